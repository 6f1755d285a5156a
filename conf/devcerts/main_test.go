package main

import (
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tunnel.example/tunnel/pkg/auth"
)

func TestDevcerts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "dir")
	var out, errs strings.Builder
	if code := run([]string{dir}, &out, &errs); code != 0 {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
	path := func(name string) string { return filepath.Join(dir, name) }
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.Contains(out.String(), path(e.Name())) {
			t.Errorf("%s is written and not mentioned", e.Name())
		}
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		if open := strings.HasSuffix(e.Name(), ".crt"); !open && info.Mode().Perm() != secret {
			t.Errorf("%s has mode %v", e.Name(), info.Mode())
		}
	}

	ca, err := os.ReadFile(path("ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	for _, tc := range []struct {
		file, name string
		usage      x509.ExtKeyUsage
	}{
		{"cloud", "tunnel.cloud.io", x509.ExtKeyUsageServerAuth},
		{"cloud", "127.0.0.1", x509.ExtKeyUsageServerAuth},
		{"cloud", "localhost", x509.ExtKeyUsageClientAuth},
		{"https", "edge1", x509.ExtKeyUsageServerAuth},
		{"client", "", x509.ExtKeyUsageClientAuth},
	} {
		pair, err := tls.LoadX509KeyPair(path(tc.file+".crt"), path(tc.file+".key"))
		if err != nil {
			t.Fatal(err)
		}
		opts := x509.VerifyOptions{Roots: roots, DNSName: tc.name, KeyUsages: []x509.ExtKeyUsage{tc.usage}}
		if _, err := pair.Leaf.Verify(opts); err != nil {
			t.Errorf("%s for %q: %v", tc.file, tc.name, err)
		}
	}

	log := slog.New(slog.DiscardHandler)
	tokens, err := auth.NewTokens(auth.TokensConfig{Path: path("tokens"), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	token, err := auth.ReadTokenFile(path("edge1.token"), log)
	if err != nil {
		t.Fatal(err)
	}
	gate := auth.NewGate(auth.GateConfig{Tokens: tokens, Log: log})
	if _, err := gate.Authenticate(t.Context(), auth.Credential{Node: "edge1", Token: token}); err != nil {
		t.Errorf("the edge's token does not open the cloud: %v", err)
	}
	if strings.Contains(out.String()+errs.String(), token.Reveal()) {
		t.Error("the token is printed")
	}
}

func TestDevcertsDoesNotOverwrite(t *testing.T) {
	dir := t.TempDir()
	mine := filepath.Join(dir, "cloud.key")
	if err := os.WriteFile(mine, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	var out, errs strings.Builder
	code := run([]string{dir}, &out, &errs)
	if code != exitRuntime || !strings.Contains(errs.String(), mine) || !strings.Contains(errs.String(), "-force") {
		t.Errorf("exit %d: %s", code, errs.String())
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("something was written: %v", entries)
	}
	if code = run([]string{"-force", dir}, &out, &errs); code != 0 {
		t.Fatalf("-force: exit %d: %s", code, errs.String())
	}
	if st, err := os.Stat(mine); err != nil || st.Mode().Perm() != secret {
		t.Errorf("the key has mode %v, %v", st.Mode(), err)
	}
}

func TestDevcertsUsage(t *testing.T) {
	var out, errs strings.Builder
	if code := run([]string{"a", "b"}, &out, &errs); code != exitUsage || !strings.Contains(errs.String(), "usage:") {
		t.Errorf("exit %d: %s", code, errs.String())
	}
	if code := run([]string{"-wrong"}, &out, &errs); code != exitUsage {
		t.Errorf("exit %d", code)
	}
}
