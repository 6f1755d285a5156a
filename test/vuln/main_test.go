package main

import (
	"bytes"
	"testing"
)

func TestVerdict(t *testing.T) {
	const get = `govulncheck: fetching vulnerabilities: Get "https://vuln.go.dev/index/modules.json.gz": `
	for _, c := range []struct {
		name   string
		exit   int
		stderr string
		want   int
		says   bool // that nothing was checked
	}{
		{"nothing found", 0, "", 0, false},
		{"found", 3, "", 3, false},
		{"found, and the network was lost", 3, get + "dial tcp: lookup vuln.go.dev: no such host\n", 3, false},
		{"no name server", 1, get + "dial tcp: lookup vuln.go.dev on 10.0.0.1:53: no such host\n", 0, true},
		{"no route", 1, get + "dial tcp 34.0.0.1:443: connect: network is unreachable\n", 0, true},
		{"no answer", 1, get + "dial tcp 34.0.0.1:443: i/o timeout\n", 0, true},
		{"no proxy", 1, get + "proxyconnect tcp: dial tcp 10.0.0.1:3128: connect: connection refused\n", 0, true},
		{"something before it", 1, "go: downloading x v1\n" + get + "dial tcp: lookup vuln.go.dev: no such host\n", 0, true},
		{"a wrong certificate", 1, get + "tls: failed to verify certificate: x509: certificate signed by unknown authority\n", 1, false},
		{"the database is broken", 1, "govulncheck: fetching vulnerabilities: unexpected status code 500\n", 1, false},
		{"the code does not build", 1, "govulncheck: loading packages:\nx.go:1:1: undefined: dial tcp: no such host\n", 1, false},
		{"wrong usage", 2, "flag provided but not defined\n", 2, false},
		{"killed", -1, "", 1, false},
	} {
		var said bytes.Buffer
		if got := verdict(c.exit, c.stderr, &said); got != c.want || (said.Len() > 0) != c.says {
			t.Errorf("%s: exit code %d, says %q; want %d", c.name, got, said.String(), c.want)
		}
	}
}
