// Command fuzzall fuzzes every target of the given packages, one after the other,
// since `go test -fuzz` takes one target at a time:
//
//	go run ./tools/fuzzall -time 10s ./...
//
// Go's build cache keeps the inputs that reach new code, in the folder "fuzz" of `go env GOCACHE`.
// The next run continues from these inputs, on a developer's machine and in a CI that keeps the
// cache. They do not belong in the repository.
//
// An input that fails is different. The fuzzer writes it to the target's testdata/fuzz, and every
// `go test` tries it from then on. Rename the file after the fault that it shows, for example
// FuzzHosts/carriage-return-ends-a-name, and commit it with the fix.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"
)

func main() {
	each := flag.Duration("time", 10*time.Second, "how long to fuzz each target")
	flag.Parse()
	if err := run(*each, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "fuzzall:", err)
		os.Exit(1)
	}
}

func run(each time.Duration, patterns []string) error {
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
			cmd := exec.Command("go", "test", "-run", "^$", "-fuzz", "^"+target+"$", // the names come from go list
				"-fuzztime", each.String(), "-fuzzminimizetime", "5s", pkg)
			if out, err := cmd.CombinedOutput(); err != nil && !timeIsUp(string(out)) {
				return fmt.Errorf("%s/%s: %w\n%s", pkg, target, err, out)
			}
		}
	}
	if found == 0 {
		return fmt.Errorf("no fuzz target in %s", strings.Join(patterns, " "))
	}
	fmt.Printf("fuzz  %d targets, nothing found\n", found)
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
	cmd := exec.Command(name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, stderr.String())
	}
	return strings.Fields(strings.ReplaceAll(string(out), "\t", "\n")), nil
}
