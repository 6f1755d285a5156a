package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// program is a govulncheck that says what it is told to. Asked with a database of ours it
// looks whether that has a record that is in it for sure, and finds something.
const program = `#!/bin/sh
if [ "$1" = -db ]; then
	grep -q golang.org/x/text "${2#file://}/index/modules.json" &&
		grep -q CVE-2021-38561 "${2#file://}/ID/GO-2021-0113.json" && exit 3
	exit 9
fi
printf '%%s' '%s' >&2
%s
`

func TestCheck(t *testing.T) {
	t.Chdir(filepath.Join("..", ".."))
	const get = `govulncheck: fetching vulnerabilities: Get "https://vuln.go.dev/index/modules.json.gz": `
	for _, c := range []struct {
		name, stderr, end string
		want              int
		snapshot          bool // whether it was asked, which finds something
	}{
		{"nothing found", "", "exit 0", 0, false},
		{"found", "", "exit 3", 3, false},
		{"found, and the network was lost", get + "dial tcp: lookup vuln.go.dev: no such host\n", "exit 3", 3, false},
		{"no name server", get + "dial tcp: lookup vuln.go.dev on 10.0.0.1:53: no such host\n", "exit 1", 3, true},
		{"no route", get + "dial tcp 34.0.0.1:443: connect: network is unreachable\n", "exit 1", 3, true},
		{"no answer", get + "dial tcp 34.0.0.1:443: i/o timeout\n", "exit 1", 3, true},
		{"no proxy", get + "proxyconnect tcp: dial tcp 10.0.0.1:3128: connect: connection refused\n", "exit 1", 3, true},
		{"something before it",
			"go: downloading x v1\n" + get + "dial tcp: lookup vuln.go.dev: no such host\n", "exit 1", 3, true},
		{"a wrong certificate", get + "tls: failed to verify certificate: x509: certificate signed by unknown authority\n",
			"exit 1", 1, false},
		{"the database is broken", "govulncheck: fetching vulnerabilities: unexpected status code 500\n", "exit 1", 1, false},
		{"the code does not build", "govulncheck: loading packages:\nx.go:1:1: undefined: dial tcp: no such host\n",
			"exit 1", 1, false},
		{"wrong usage", "flag provided but not defined\n", "exit 2", 2, false},
		{"killed", "", "kill -9 $$", 1, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "govulncheck")
			if err := os.WriteFile(path, fmt.Appendf(nil, program, c.stderr, c.end), 0o700); err != nil {
				t.Fatal(err)
			}
			var stdout, stderr bytes.Buffer
			got, err := check([]string{path, "./..."}, &stdout, &stderr)
			if asked := strings.Contains(stderr.String(), "asking its records of 20"); err != nil || got != c.want ||
				asked != c.snapshot {
				t.Errorf("exit code %d, %v, says %q; want %d", got, err, stderr.String(), c.want)
			}
		})
	}
	if code, err := check([]string{filepath.Join(t.TempDir(), "none")}, nil, nil); code == 0 || err == nil {
		t.Error("there is no such program")
	}
}

// What a new dependency has to fear is not known before the records are taken anew.
func TestCovers(t *testing.T) {
	t.Chdir(filepath.Join("..", ".."))
	s, err := readSnapshot()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.covers(); err != nil {
		t.Error(err)
	}
	s.Modules = s.Modules[1:]
	if err := s.covers(); err == nil || !strings.Contains(err.Error(), "-take") {
		t.Errorf("a module more: %v", err)
	}
}

func TestFormat(t *testing.T) {
	s, err := readSnapshot()
	if err != nil {
		t.Fatal(err)
	}
	if again := s.format(); !bytes.Equal(again, snapshotJSON) {
		t.Error("written again it is another one")
	}
	if err := json.Unmarshal((&snapshot{Records: s.Records[:1]}).format(), new(snapshot)); err != nil {
		t.Error(err)
	}
}

// What was withdrawn is no vulnerability. A record that forgets it fails `make vuln`.
func TestWithdrawn(t *testing.T) {
	var r record
	if err := json.Unmarshal([]byte(`{"id":"GO-2025-3408","withdrawn":"2025-02-05T23:01:18Z"}`), &r); err != nil {
		t.Fatal(err)
	}
	if kept, err := json.Marshal(r); err != nil || !strings.Contains(string(kept), `"withdrawn":"2025-02-05T23:01:18Z"`) {
		t.Errorf("a record that was withdrawn becomes %s (%v)", kept, err)
	}
}
