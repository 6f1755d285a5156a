// Command fuzzall fuzzes every target of the given packages, one after the other,
// since `go test -fuzz` takes one target at a time:
//
//	go run ./test/fuzzall -time 10s ./...
//
// What the fuzzer finds worth trying lies in Go's cache. With -keep N the N shortest inputs
// of each target are copied to its testdata/fuzz, where every `go test` tries them.
package main

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

func main() {
	each := flag.Duration("time", 10*time.Second, "how long to fuzz each target")
	most := flag.Int("keep", 0, "how many inputs of each target to copy to testdata/fuzz")
	flag.Parse()
	if err := run(*each, *most, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "fuzzall:", err)
		os.Exit(1)
	}
}

func run(each time.Duration, most int, patterns []string) error {
	packages, err := output("go", append([]string{"list"}, patterns...)...)
	if err != nil {
		return err
	}
	found := 0
	for _, pkg := range packages {
		targets, err := output("go", "test", "-list", "^Fuzz", pkg)
		if err != nil {
			return fmt.Errorf("%s: %w", pkg, err)
		}
		for _, target := range targets {
			if !strings.HasPrefix(target, "Fuzz") {
				continue // go test's own closing line
			}
			found++
			fmt.Printf("fuzz  %s/%s for %s\n", pkg, target, each)
			// No new inputs are minimised for longer than the fuzzing itself takes.
			cmd := exec.Command("go", "test", "-run", "^$", "-fuzz", "^"+target+"$", //nolint:gosec // names from go list
				"-fuzztime", each.String(), "-fuzzminimizetime", "5s", pkg)
			if out, err := cmd.CombinedOutput(); err != nil && !timeIsUp(string(out)) {
				return fmt.Errorf("%s/%s: %w\n%s", pkg, target, err, out)
			}
			if err := keep(pkg, target, most); err != nil {
				return fmt.Errorf("keeping inputs of %s/%s: %w", pkg, target, err)
			}
		}
	}
	if found == 0 {
		return fmt.Errorf("no fuzz target in %s", strings.Join(patterns, " "))
	}
	fmt.Printf("fuzz  %d targets, nothing found\n", found)
	return nil
}

// keep copies the shortest inputs of a target from Go's cache to its package.
func keep(pkg, target string, most int) error {
	if most == 0 {
		return nil
	}
	found, err := output("go", "env", "GOCACHE")
	if err != nil {
		return err
	}
	dir, err := output("go", "list", "-f", "{{.Dir}}", pkg)
	if err != nil {
		return err
	}
	inputs, err := filepath.Glob(filepath.Join(found[0], "fuzz", pkg, target, "*"))
	if err != nil {
		return err
	}
	content := make(map[string][]byte)
	var newest time.Time
	values := 0
	for _, f := range inputs {
		info, err := os.Stat(f)
		if err != nil {
			return err
		}
		if content[f], err = os.ReadFile(f); err != nil {
			return err
		}
		if info.ModTime().After(newest) {
			newest, values = info.ModTime(), bytes.Count(content[f], []byte("\n"))
		}
	}
	// The cache remembers inputs from when the target had other parameters.
	inputs = slices.DeleteFunc(inputs, func(f string) bool { return bytes.Count(content[f], []byte("\n")) != values })
	slices.SortFunc(inputs, func(a, b string) int {
		return cmp.Or(len(content[a])-len(content[b]), strings.Compare(a, b))
	})
	to := filepath.Join(dir[0], "testdata", "fuzz", target)
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, f := range inputs[:min(most, len(inputs))] {
		if err := os.WriteFile(filepath.Join(to, filepath.Base(f)), content[f], 0o644); err != nil {
			return err
		}
	}
	return nil
}

// timeIsUp reports whether a failed run only ran out of its time. Go before 1.27 says
// so by mistake when the end of -fuzztime comes at a bad moment (go.dev/issue/75804).
// A finding always writes its input to testdata, or says what panicked.
func timeIsUp(out string) bool {
	return regexp.MustCompile(`(?m)^--- FAIL: Fuzz\w+ \(.*\)\n    context deadline exceeded\nFAIL\n`).MatchString(out) &&
		!strings.Contains(out, "Failing input") && !strings.Contains(out, "panic:")
}

// output returns the lines that a command prints.
func output(name string, args ...string) ([]string, error) {
	cmd := exec.Command(name, args...) //nolint:gosec // the go command
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, stderr.String())
	}
	return strings.Fields(strings.ReplaceAll(string(out), "\t", "\n")), nil
}
