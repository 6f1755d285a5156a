package main

import (
	"bytes"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"aead.dev/minisign"
)

// copied returns a copy of the release, for tests that change it.
func copied(t *testing.T, e example) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(e.dir)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// checkSums runs the command that docs/releases.md names.
func checkSums(t *testing.T, dir string) error {
	cmd := exec.CommandContext(t.Context(), need(t, "sha256sum"), "--check", "--quiet", "--strict", sumsFile)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	t.Logf("sha256sum: %s", out)
	return err
}

func TestChecksums(t *testing.T) {
	dir := copied(t, amd64(t))
	if err := checkSums(t, dir); err != nil {
		t.Fatal(err)
	}
	sums := string(read(t, dir, sumsFile))
	files := 0
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || strings.HasPrefix(entry.Name(), sumsFile) {
			return err
		}
		files++
		name, err := filepath.Rel(dir, path)
		if !strings.Contains(sums, "  "+name+"\n") {
			t.Errorf("%s has no checksum", name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(sums, "\n"); lines != files || files < 6 {
		t.Errorf("%d checksums of %d files", lines, files)
	}

	for name := range strings.FieldsSeq(sums) {
		path := filepath.Join(dir, name)
		data, err := os.ReadFile(path)
		if err != nil {
			continue // the field is a checksum
		}
		data[len(data)/2] ^= 1
		write(t, dir, name, string(data))
		if checkSums(t, dir) == nil {
			t.Errorf("a changed byte in %s goes unnoticed", name)
		}
		data[len(data)/2] ^= 1
		write(t, dir, name, string(data))
	}
}

func TestSignature(t *testing.T) {
	e := amd64(t)
	sums, signature := read(t, e.dir, sumsFile), read(t, e.dir, sumsFile+".minisig")
	verify := func(key minisign.PublicKey, text []byte) bool {
		r := minisign.NewReader(bytes.NewReader(text))
		if _, err := io.Copy(io.Discard, r); err != nil {
			t.Fatal(err)
		}
		return r.Verify(key, signature)
	}
	other, _, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	changed := bytes.Clone(sums)
	changed[0] ^= 1
	if !verify(e.public, sums) || verify(other, sums) || verify(e.public, changed) {
		t.Errorf("the key verifies: %t; another key verifies: %t; changed checksums verify: %t",
			verify(e.public, sums), verify(other, sums), verify(e.public, changed))
	}
	comment := "trusted comment: timestamp:1000000000\tfile:SHA256SUMS\ttunnel v0.1.0\n"
	if !bytes.Contains(signature, []byte(comment)) {
		t.Errorf("the signature lacks %q:\n%s", comment, signature)
	}
}

// TestMinisign verifies the signature with minisign's command line, as docs/releases.md says.
func TestMinisign(t *testing.T) {
	e := amd64(t)
	dir := copied(t, e)
	public, err := e.public.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	write(t, dir, "tunnel.pub", string(public))
	minisign := func() error {
		_, err := output(t.Context(), ".", os.Environ(), "go", "tool", "minisign", "-V",
			"-p", dir+"/tunnel.pub", "-m", dir+"/"+sumsFile)
		return err
	}
	if err = minisign(); err != nil {
		t.Fatal(err)
	}
	write(t, dir, sumsFile, string(read(t, dir, sumsFile))+"\n")
	wantError(t, minisign(), "minisign")
}

func TestKeys(t *testing.T) {
	_, private, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	text, err := private.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	r := small(t)
	write(t, r.work, "good", string(text))
	// The third and the fourth byte name the function that makes a key from the password: Sc is scrypt.
	encrypted := strings.Replace(string(text), "RWQAAEIy", "RWRTY0Iy", 1)
	if encrypted == string(text) {
		t.Fatalf("an unexpected form of the key: %s", text)
	}
	write(t, r.work, "encrypted", encrypted)
	write(t, r.work, "bad", "not a key")
	write(t, r.dir, "a", "x")
	for name, want := range map[string]string{
		"good": "", "encrypted": passwordVariable, "bad": "minisign", "missing": "no such file",
	} {
		r.key = filepath.Join(r.work, name)
		err := r.addSums()
		if want == "" {
			if err != nil {
				t.Error(err)
			}
			read(t, r.dir, sumsFile+".minisig")
			continue
		}
		wantError(t, err, "-key "+r.key, want)
	}
}
