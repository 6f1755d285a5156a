// Command vuln runs govulncheck, and tells what it has found from what it could not ask:
//
//	go run ./tools/vuln -- bin/govulncheck ./...
//
// A vulnerability fails, and so does whatever else goes wrong. Where the vulnerability
// database cannot be reached (a machine without a network) the records in snapshot.json
// are asked: those of everything that we depend on, as they were on the day that is
// printed. They are taken anew from a clone of github.com/golang/vulndb:
//
//	go run ./tools/vuln -take CLONE
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
)

// unreachable is how govulncheck says that it has not reached the database, and why in the
// words of package net: there is no name server, no route, nobody, or no answer. What the
// database itself answers is none of these.
var unreachable = regexp.MustCompile(`(?m)^govulncheck: fetching vulnerabilities: Get "https?://[^"]*": ` +
	`(dial |proxyconnect |net/http: TLS handshake timeout$|context deadline exceeded)`)

func main() {
	clone := flag.String("take", "", "write "+snapshotPath+" from this clone of github.com/golang/vulndb, and end")
	flag.Parse()
	if *clone != "" {
		if err := take(*clone); err != nil {
			fmt.Fprintln(os.Stderr, "vuln:", err)
			os.Exit(1)
		}
		return
	}
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "usage: vuln -- govulncheck PACKAGES, or vuln -take CLONE")
		os.Exit(2)
	}
	code, err := check(flag.Args(), os.Stdout, os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "vuln:", err)
	}
	os.Exit(code)
}

// check runs govulncheck, which command begins with, and returns its exit code: 0 when
// nothing was found, 3 for vulnerabilities, else it has failed.
func check(command []string, stdout, stderr io.Writer) (int, error) {
	var said bytes.Buffer
	code, err := run(command, stdout, io.MultiWriter(&said, stderr))
	if code == 0 || code == 3 || !unreachable.Match(said.Bytes()) {
		return code, err
	}
	s, err := readSnapshot()
	if err != nil {
		return 1, err
	}
	if err = s.covers(); err != nil {
		return 1, err
	}
	dir, err := os.MkdirTemp("", "tunnel-vuln-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	if err := s.unpack(dir); err != nil {
		return 1, err
	}
	fmt.Fprintf(stderr, "vuln.go.dev cannot be reached from here: asking its records of %s, which are in %s\n",
		s.Taken, snapshotPath)
	return run(slices.Insert(slices.Clone(command), 1, "-db", "file://"+filepath.ToSlash(dir)), stdout, stderr)
}

func run(command []string, stdout, stderr io.Writer) (int, error) {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	err := cmd.Run()
	if errors.As(err, new(*exec.ExitError)) {
		err = nil
	}
	if code := cmd.ProcessState.ExitCode(); code >= 0 {
		return code, err
	}
	return 1, err // it did not start, or a signal has ended it
}
