package main

import (
	"bytes"
	"encoding/hex"
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// What the documents say of speed is what the JSON says, and that says where it is from.
func TestDocuments(t *testing.T) {
	top, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	files, err := render(top)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range files {
		got, err := os.ReadFile(filepath.Join(top, path))
		if err != nil {
			t.Error(err)
		} else if !bytes.Equal(got, want) {
			t.Errorf("%s is not what %s says: go run ./bench -render", path, jsonPath)
		}
	}
	for _, path := range []string{"README.md", "docs/benchmarks/README.md", plotPath("speed"), plotPath("links")} {
		if files[path] == nil {
			t.Errorf("%s says nothing of %s", path, jsonPath)
		}
	}
	r, err := readReport(filepath.Join(top, jsonPath))
	if err != nil {
		t.Fatal(err)
	}
	if commit, err := hex.DecodeString(r.Commit); err != nil || len(commit) != 20 || r.Dirty {
		t.Errorf("%s is of no commit: %q, dirty: %v", jsonPath, r.Commit, r.Dirty)
	}
	if m := r.Machine; m.CPU == "" || m.Cores == 0 || m.Kernel == "" || m.TCP == "" || r.Go == "" || r.Date == "" {
		t.Errorf("%s does not say where and when: %+v, %q, %q", jsonPath, m, r.Go, r.Date)
	}
	if _, err := git(top, "cat-file", "-e", r.Commit); err != nil {
		t.Logf("%s is of a commit that is not here: %s", jsonPath, r.Commit)
	} else if _, err := git(top, "merge-base", "--is-ancestor", r.Commit, "HEAD"); err != nil {
		t.Errorf("%s is of a commit that is not in the history: %s", jsonPath, r.Commit)
	}
}

// Nobody writes a figure of speed into these by hand.
func TestNoFigureByHand(t *testing.T) {
	top, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	speed := regexp.MustCompile(`\d (Mi|Gi|M|G)B/s|\d (µs|conns/s|requests/s)`)
	for _, path := range []string{"README.md", "docs/benchmarks/README.md", "docs/architecture.md"} {
		text, err := os.ReadFile(filepath.Join(top, path))
		if err != nil {
			t.Fatal(err)
		}
		if found := speed.FindAll(marked.ReplaceAll(text, nil), -1); found != nil {
			t.Errorf("%s has figures that no run has written: %q", path, found)
		}
	}
}
