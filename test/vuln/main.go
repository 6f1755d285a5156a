// Command vuln runs govulncheck and tells what it has found from what it could not ask:
//
//	go run ./test/vuln -- bin/govulncheck ./...
//
// A vulnerability fails, and so does whatever else goes wrong. Where the vulnerability
// database cannot be reached (a machine without a network) nothing was checked: that is
// said on stderr, and does not fail.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
)

// unreachable is how govulncheck says that it has not reached the database, and why in the
// words of package net: there is no name server, no route, nobody, or no answer. What the
// database itself answers is none of these.
var unreachable = regexp.MustCompile(`(?m)^govulncheck: fetching vulnerabilities: Get "https?://[^"]*": (dial |proxyconnect |net/http: TLS handshake timeout$|context deadline exceeded)`)

func main() {
	command := os.Args[1:]
	if len(command) > 0 && command[0] == "--" {
		command = command[1:]
	}
	if len(command) == 0 {
		fmt.Fprintln(os.Stderr, "usage: vuln -- govulncheck PACKAGES")
		os.Exit(2)
	}
	var said bytes.Buffer
	cmd := exec.Command(command[0], command[1:]...) //nolint:gosec // whoever runs us says what
	cmd.Stdout, cmd.Stderr = os.Stdout, io.MultiWriter(os.Stderr, &said)
	err := cmd.Run()
	if err != nil && !errors.As(err, new(*exec.ExitError)) {
		fmt.Fprintln(os.Stderr, "vuln:", err)
	}
	os.Exit(verdict(cmd.ProcessState.ExitCode(), said.String(), os.Stderr))
}

// verdict returns our exit code, by govulncheck's (0: nothing found, 3: vulnerabilities,
// else it has failed) and by what it has said on stderr.
func verdict(exit int, stderr string, w io.Writer) int {
	switch {
	case exit == 0 || exit == 3:
		return exit
	case unreachable.MatchString(stderr):
		fmt.Fprintln(w, strings.TrimSpace(`
NOT CHECKED for known vulnerabilities: the database, vuln.go.dev, cannot be reached from
here. This says nothing about the code; run make vuln where there is a network.`))
		return 0
	}
	return max(exit, 1) // -1: it did not start, or a signal has ended it
}
