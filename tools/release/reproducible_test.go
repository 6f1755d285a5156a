package main

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestReproducible builds a release twice: in folders of different names, the second time with an empty cache of the
// compiler, another umask, another time zone, other flags in the environment, and without a network. Every file must
// be the same, so the checksums must be.
func TestReproducible(t *testing.T) {
	e := amd64(t)
	root, err := copyTree(filepath.Join(testFolder, "another", "place with a blank"))
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{
		"GOCACHE": filepath.Join(testFolder, "gocache"), "GOPROXY": "off", "GOFLAGS": "-mod=mod -ldflags=-X=main.version=x",
		"TZ": "Pacific/Auckland", "LC_ALL": "C.UTF-8", "VERSION": "v9.9.9", "GOAMD64": "v3", "MAKEFLAGS": "BIN=/nowhere/x",
		"SOURCE_DATE_EPOCH": "1",
	} {
		t.Setenv(name, value)
	}
	defer syscall.Umask(syscall.Umask(0o077))
	o := e.options
	o.root, o.out = root, filepath.Join(testFolder, "another", "release")
	if err = build(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	first := strings.Split(string(read(t, e.dir, sumsFile)), "\n")
	second := strings.Split(string(read(t, o.out, sumsFile)), "\n")
	if len(first) != len(second) {
		t.Fatalf("%d and %d checksums", len(first), len(second))
	}
	for i := range first {
		if first[i] != second[i] {
			t.Errorf("the first release has %s, the second %s", first[i], second[i])
		}
	}
	if string(read(t, e.dir, sumsFile+".minisig")) != string(read(t, o.out, sumsFile+".minisig")) {
		t.Error("two signatures")
	}
}
