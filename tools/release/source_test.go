package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// repository makes a repository with a commit and tags.
func repository(t *testing.T, tags ...string) string {
	t.Helper()
	dir := t.TempDir()
	write(t, dir, "go.mod", "module example.org/x\n\ngo 1.26\n")
	write(t, dir, ".gitignore", "/ignored\n")
	write(t, dir, "b.go", "package x\n")
	if err := commit(dir, tags...); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestSource(t *testing.T) {
	dir := repository(t, "v0.1.0", "v0.10.0", "v0.2.0", "latest", "v1")
	for _, wanted := range []string{"", "v0.10.0", "v0.1.0"} {
		s, err := readSource(t.Context(), options{root: dir, wanted: wanted})
		if err != nil {
			t.Fatal(err)
		}
		want := wanted
		if want == "" {
			want = "v0.10.0" // the highest tag of HEAD
		}
		if s.version != want || s.module != "example.org/x" || s.time.Unix() != commitTime || len(s.commit) != 40 {
			t.Errorf("version %q: got %+v", wanted, s)
		}
	}
}

func TestSourceRefused(t *testing.T) {
	tagged, untagged, changed := repository(t, "v0.1.0"), repository(t), repository(t, "v0.1.0")
	write(t, changed, "b.go", "package y\n")
	added := repository(t, "v0.1.0")
	write(t, added, "new.go", "package x\n")
	for _, test := range []struct {
		name, dir, version string
		want               []string
	}{
		{"no tag", untagged, "", []string{"HEAD has no tag"}},
		{"no tag, version given", untagged, "v0.1.0", []string{"HEAD has no tag"}},
		{"another version", tagged, "v0.2.0", []string{"v0.2.0 is no tag of HEAD", "v0.1.0"}},
		{"no v", tagged, "0.1.0", []string{`"0.1.0"`, "semantic version"}},
		{"short", tagged, "v1", []string{`"v1"`}},
		{"build metadata", tagged, "v0.1.0+x", []string{`"v0.1.0+x"`}},
		{"changed file", changed, "v0.1.0", []string{"uncommitted changes", "b.go"}},
		{"new file", added, "v0.1.0", []string{"uncommitted changes", "new.go"}},
		{"no repository", t.TempDir(), "v0.1.0", []string{"git"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := readSource(t.Context(), options{root: test.dir, wanted: test.version})
			wantError(t, err, test.want...)
		})
	}
}

func TestSnapshotVersion(t *testing.T) {
	for _, test := range []struct {
		name   string
		tag    string // of the commit before HEAD
		change bool
		want   string // # stands for the hash
	}{
		{"no tag", "", false, "v0.0.0-20010909014640-#"},
		{"after a release", "v0.1.9", false, "v0.1.10-0.20010909014640-#"},
		{"with changes", "", true, "v0.0.0-20010909014640-#-dirty"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := repository(t)
			if test.tag != "" {
				if err := git(dir, "tag", test.tag); err != nil {
					t.Fatal(err)
				}
			}
			if err := git(dir, "commit", "-q", "--allow-empty", "-m", "next"); err != nil {
				t.Fatal(err)
			}
			if test.change {
				write(t, dir, "b.go", "package y\n")
			}
			s, err := readSource(t.Context(), options{root: dir, snapshot: true})
			if err != nil {
				t.Fatal(err)
			}
			if want := strings.ReplaceAll(test.want, "#", s.commit[:12]); s.version != want || !canonical(want) {
				t.Errorf("got %s, want %s", s.version, want)
			}
		})
	}
	// A snapshot has the version that it is given, tag or not: tests of upgrades need two.
	s, err := readSource(t.Context(), options{root: repository(t), snapshot: true, wanted: "v9.9.9"})
	if err != nil || s.version != "v9.9.9" {
		t.Errorf("got %+v, %v", s, err)
	}
}

func TestTracked(t *testing.T) {
	dir := repository(t)
	write(t, dir, "ignored", "x")
	write(t, dir, "a b.go", "package x\n")
	if err := os.Remove(filepath.Join(dir, "b.go")); err != nil {
		t.Fatal(err)
	}
	got, err := tracked(t.Context(), dir)
	if want := []string{".gitignore", "a b.go", "go.mod"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

// TestOutIsKept checks that a release replaces no file, and that a failed one leaves no folder.
func TestOutIsKept(t *testing.T) {
	dir, parent := repository(t, "v0.1.0"), t.TempDir()
	write(t, parent, "full/precious", "x")
	o := options{root: dir, out: filepath.Join(parent, "full"), platforms: every(), log: io.Discard}
	wantError(t, build(t.Context(), o), "is not empty")
	read(t, parent, "full/precious")

	o.out = filepath.Join(parent, "new")
	wantError(t, build(t.Context(), o), "make") // the repository has no Makefile
	if entries, err := os.ReadDir(parent); err != nil || len(entries) != 1 {
		t.Errorf("the failed release left %v, %v", entries, err)
	}
}
