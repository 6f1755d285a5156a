package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"aead.dev/minisign"
)

const (
	testVersion = "v0.1.0"
	commitTime  = 1000000000 // Unix time: 2001-09-09 01:46:40 UTC
)

// testFolder holds what the tests share. TestMain makes and removes it.
var testFolder string

func TestMain(m *testing.M) {
	var err error
	if testFolder, err = os.MkdirTemp("", "release-test-"); err != nil {
		panic(err)
	}
	code := m.Run()
	if err = os.RemoveAll(testFolder); err != nil {
		panic(err)
	}
	os.Exit(code)
}

// example is a release of this tree for linux/amd64, signed.
type example struct {
	options
	dir    string // of the release
	public minisign.PublicKey
}

// amd64 returns the release that the tests share, built once.
func amd64(t *testing.T) example {
	t.Helper()
	e, err := buildExample()
	if err != nil {
		t.Fatal(err)
	}
	return e
}

var buildExample = sync.OnceValues(func() (e example, err error) {
	root, err := copyTree(filepath.Join(testFolder, "first"))
	if err != nil {
		return e, err
	}
	public, private, err := minisign.GenerateKey(nil)
	if err != nil {
		return e, err
	}
	text, err := private.MarshalText()
	if err != nil {
		return e, err
	}
	key := filepath.Join(testFolder, "minisign.key")
	if err = os.WriteFile(key, text, 0o600); err != nil {
		return e, err
	}
	out := filepath.Join(root, "dist") // as in `make release`
	e = example{public: public, dir: out, options: options{
		root: root, out: out, wanted: testVersion, key: key,
		platforms: []platform{{"linux", "amd64"}}, log: io.Discard,
	}}
	return e, build(context.Background(), e.options)
})

// copyTree copies this repository to a new folder, as it is with its uncommitted changes, commits it there, and
// tags it. It returns the folder.
func copyTree(to string) (string, error) {
	here, err := filepath.Abs("../..")
	if err != nil {
		return "", err
	}
	names, err := tracked(context.Background(), here)
	if err != nil {
		return "", err
	}
	for _, name := range names {
		if err = copyFile(filepath.Join(here, name), filepath.Join(to, name)); err != nil {
			return "", err
		}
	}
	return to, commit(to, testVersion)
}

func copyFile(from, to string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err = os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, data, info.Mode().Perm())
}

// commit makes dir a repository with one commit, and tags the commit.
func commit(dir string, tags ...string) error {
	commands := [][]string{{"init", "-q"}, {"add", "-A"}, {"commit", "-q", "-m", "test"}}
	for _, tag := range tags {
		commands = append(commands, []string{"tag", tag})
	}
	for _, args := range commands {
		if err := git(dir, args...); err != nil {
			return err
		}
	}
	return nil
}

// git runs git in dir, whatever the user's configuration is. Its commits are of commitTime.
func git(dir string, args ...string) error {
	date := time.Unix(commitTime, 0).UTC().Format(time.RFC3339)
	env := append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
		"GIT_AUTHOR_NAME=t", "GIT_AUTHOR_EMAIL=t@example.org", "GIT_AUTHOR_DATE="+date,
		"GIT_COMMITTER_NAME=t", "GIT_COMMITTER_EMAIL=t@example.org", "GIT_COMMITTER_DATE="+date)
	_, err := output(context.Background(), dir, env, "git", args...)
	return err
}

// need skips the test if a program is not there, and returns its path.
func need(t *testing.T, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skipf("%s is not installed", program)
	}
	return path
}

// tool runs a program in dir and returns its standard output.
func tool(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	out, err := output(t.Context(), dir, os.Environ(), name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// small is a release that the test fills itself, from a tree with a few files.
func small(t *testing.T) *release {
	t.Helper()
	return &release{
		options: options{root: t.TempDir(), log: io.Discard},
		source: &source{
			version: testVersion, commit: strings.Repeat("a", 40), time: time.Unix(commitTime, 0).UTC(),
			module: "example.org/tunnel",
		},
		dir: t.TempDir(), work: t.TempDir(),
	}
}

// write writes a file below dir.
func write(t *testing.T, dir, name, text string) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// read returns a file.
func read(t *testing.T, path ...string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// wantError checks that err holds every one of the texts.
func wantError(t *testing.T, err error, texts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error; want one with %q", texts)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("error %q lacks %q", err, text)
		}
	}
}

func TestCommandLine(t *testing.T) {
	for _, test := range []struct {
		args string
		want string // of the error
	}{
		{"", "-out is missing"},
		{"-out x y", `not "y"`},
		{"-out x -platforms linux/arm", "-platforms needs -snapshot"},
		{"-out x -snapshot -platforms linux/arm,plan9/arm", "plan9/arm is none"},
		{"-out x -snapshot -platforms linux/arm,", "an empty name"},
		{"-out x -root /nowhere", "/nowhere"},
		{"-notices x -out y", "-notices builds no release"},
		{"-notices x -snapshot", "-notices builds no release"},
		{"-notices /nowhere/tunnel", "/nowhere/tunnel"},
		{"-notices main.go", "main.go"},
	} {
		var b bytes.Buffer
		wantError(t, run(t.Context(), strings.Fields(test.args), "", io.Discard, &b), test.want)
	}
}
