// Command report runs a `go test -json` command and prints what a person reads. It
// fails when a test fails, when none ran, and when one was skipped that the list of
// allowed skips does not name:
//
//	go run ./tools/report -allow test/skips.txt -- go test -json ./...
//
// A line of the list is "package/TestName: reason". A line that nothing needed is no
// error: what is skipped depends on the machine.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// event is what test2json writes (cmd/internal/test2json).
type event struct {
	Action  string
	Package string
	Test    string
	Output  string
	Elapsed float64
}

// summary is what has happened so far.
type summary struct {
	passed, failed, skipped int
	failures                []string            // tests that failed, each with the first of what it said
	forbidden               []string            // skips that the list does not name
	output                  map[string][]string // of tests that run, by package and test
}

func main() {
	allow := flag.String("allow", "", "file that names the tests that may be skipped, each with a reason")
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "usage: report [-allow FILE] -- go test -json …")
		os.Exit(2)
	}
	ok, err := run(*allow, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
	}
	if !ok || err != nil {
		os.Exit(1)
	}
}

func run(allow string, command []string) (ok bool, err error) {
	allowed, err := readAllowed(allow)
	if err != nil {
		return false, err
	}
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return false, err
	}
	if err := cmd.Start(); err != nil {
		return false, err
	}
	s := &summary{output: make(map[string][]string)}
	scanErr := s.read(out, allowed)
	waitErr := cmd.Wait()
	for _, failure := range s.failures {
		fmt.Print("FAILED ", failure)
	}
	for _, name := range s.forbidden {
		fmt.Printf("SKIPPED %s, and the list of allowed skips does not name it\n", name)
	}
	// The closing line is one that CI systems read.
	fmt.Printf("%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
	if scanErr != nil {
		return false, scanErr
	}
	if waitErr != nil {
		if _, exited := errors.AsType[*exec.ExitError](waitErr); !exited {
			return false, waitErr
		}
		return false, nil
	}
	return s.failed == 0 && s.passed > 0 && len(s.forbidden) == 0, nil
}

// readAllowed returns "package/TestName" → reason.
func readAllowed(file string) (map[string]string, error) {
	allowed := make(map[string]string)
	if file == "" {
		return allowed, nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	n := 0
	for line := range strings.SplitSeq(string(data), "\n") {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, reason, ok := strings.Cut(line, ":")
		if !ok || strings.TrimSpace(reason) == "" {
			return nil, fmt.Errorf("%s:%d: want package/TestName: reason", file, n)
		}
		allowed[name] = strings.TrimSpace(reason)
	}
	return allowed, nil
}

func (s *summary) read(r io.Reader, allowed map[string]string) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20) // a test's output comes in lines; a dump of goroutines is long
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			fmt.Println(lines.Text()) // of the toolchain: a build error
			continue
		}
		s.take(e, allowed)
	}
	return lines.Err()
}

func (s *summary) take(e event, allowed map[string]string) {
	key := e.Package + "/" + e.Test
	switch e.Action {
	case "output", "build-output":
		s.output[key] = append(s.output[key], e.Output)
		return
	case "pass":
		if e.Test == "" {
			fmt.Printf("ok    %-24s %s\n", e.Package, time.Duration(e.Elapsed*float64(time.Second)).Round(10*time.Millisecond))
		} else {
			s.passed++
		}
	case "skip":
		if e.Test == "" {
			return // a package without tests
		}
		s.skipped++
		if reason, ok := allowed[key]; ok {
			fmt.Printf("skip  %s: %s\n", key, reason)
		} else {
			s.forbidden = append(s.forbidden, key)
			fmt.Print(strings.Join(s.output[key], ""))
		}
	case "fail", "build-fail":
		if e.Test != "" {
			s.failed++
			s.failures = append(s.failures, key+"\n"+first(s.output[key]))
		} else {
			s.printUnfinished(e.Package)
		}
		fmt.Printf("FAIL  %s\n%s", strings.TrimSuffix(key, "/"), strings.Join(s.output[key], ""))
	default:
		return
	}
	delete(s.output, key)
}

// first returns the first lines that a test printed: they tell more often why it failed than the logs at its end.
func first(output []string) string {
	lines := slices.DeleteFunc(slices.Clone(output), func(line string) bool {
		return strings.HasPrefix(line, "=== ") || strings.HasPrefix(strings.TrimLeft(line, " "), "--- ")
	})
	return strings.Join(lines[:min(5, len(lines))], "")
}

// printUnfinished prints what the tests of a package have said that never ended: the process
// has, by a panic or an exit.
func (s *summary) printUnfinished(pkg string) {
	for _, key := range slices.Sorted(maps.Keys(s.output)) {
		if test, ok := strings.CutPrefix(key, pkg+"/"); ok && test != "" {
			fmt.Printf("NOT ENDED  %s\n%s", key, strings.Join(s.output[key], ""))
			delete(s.output, key)
		}
	}
}
