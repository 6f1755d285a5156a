package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
)

// source says what a release is built from. It never changes after readSource.
type source struct {
	version string    // such as v0.1.0
	commit  string    // hash of HEAD
	time    time.Time // of the commit; the timestamp of everything in the release
	module  string    // module path, from go.mod
	files   []string  // of the tree, as tracked returns them
}

// readSource checks that the tree may become a release: it is clean, and the version is a tag of HEAD.
// A snapshot needs neither.
func readSource(ctx context.Context, o options) (*source, error) {
	git := func(args ...string) (string, error) {
		out, err := output(ctx, o.root, os.Environ(), "git", args...)
		return strings.TrimSpace(string(out)), err
	}
	changes, err := git("status", "--porcelain", "--untracked-files=normal")
	if err != nil {
		return nil, err
	}
	if changes != "" && !o.snapshot {
		return nil, fmt.Errorf("the tree has uncommitted changes; commit them, or build a -snapshot:\n%s", changes)
	}
	head, err := git("log", "-1", "--format=%H %ct")
	if err != nil {
		return nil, err
	}
	hash, seconds, _ := strings.Cut(head, " ")
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("git log: time of the commit: %w", err)
	}
	s := &source{commit: hash, time: time.Unix(unix, 0).UTC()}
	if s.module, err = modulePath(o.root); err != nil {
		return nil, err
	}
	// Listed now, since the release itself may grow inside the tree.
	if s.files, err = tracked(ctx, o.root); err != nil {
		return nil, err
	}
	tags, err := git("tag", "--points-at", "HEAD")
	if err != nil {
		return nil, err
	}
	if s.version, err = chooseVersion(o, strings.Fields(tags)); err != nil {
		return nil, err
	}
	if s.version == "" {
		// Without a tag before HEAD, git describe fails, and the pseudo-version begins with v0.0.0.
		older, _ := git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*")
		s.version = pseudoVersion(older, s, changes != "")
	}
	return s, nil
}

// modulePath returns the path of the module in root.
func modulePath(root string) (string, error) {
	data, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		return "", err
	}
	path := modfile.ModulePath(data)
	if path == "" {
		return "", fmt.Errorf("%s/go.mod names no module", root)
	}
	return path, nil
}

// chooseVersion returns the version of the release. Of a snapshot without a version it returns "".
func chooseVersion(o options, tags []string) (string, error) {
	tags = slices.DeleteFunc(tags, func(tag string) bool { return !canonical(tag) })
	semver.Sort(tags)
	switch {
	case o.wanted != "" && !canonical(o.wanted):
		return "", fmt.Errorf("version %q: want a semantic version with a v and no build metadata, such as v0.1.0", o.wanted)
	case o.snapshot:
		return o.wanted, nil
	case len(tags) == 0:
		return "", errors.New("HEAD has no tag of a version: git tag v0.1.0, or build a -snapshot")
	case o.wanted == "":
		return tags[len(tags)-1], nil
	case !slices.Contains(tags, o.wanted):
		return "", fmt.Errorf("version %s is no tag of HEAD, whose tags are %s: check out the tag, or build a -snapshot",
			o.wanted, strings.Join(tags, ", "))
	}
	return o.wanted, nil
}

// canonical reports whether v is a version as Go's modules have it. Build metadata is not permitted: names of
// packages and of images have no room for it.
func canonical(v string) bool { return semver.IsValid(v) && semver.Canonical(v) == v }

// pseudoVersion returns the version of a tree without a tag, by the rules of Go's modules. older is the newest
// tag before HEAD, or "".
func pseudoVersion(older string, s *source, changed bool) string {
	if !canonical(older) {
		older = ""
	}
	v := module.PseudoVersion(semver.Major(older), older, s.time, s.commit[:12])
	if changed {
		v += "-dirty"
	}
	return v
}

// tracked returns the files of the tree in root, sorted: those that git tracks, and new ones that it does not
// ignore. A clean tree has only tracked ones.
func tracked(ctx context.Context, root string) ([]string, error) {
	out, err := output(ctx, root, os.Environ(), "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	if err != nil {
		return nil, err
	}
	files := slices.DeleteFunc(strings.Split(string(out), "\x00"), func(name string) bool {
		if name == "" {
			return true
		}
		_, err := os.Lstat(filepath.Join(root, name)) // a file of the index may have been deleted
		return err != nil
	})
	slices.Sort(files)
	return slices.Compact(files), nil
}
