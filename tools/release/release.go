package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// options say what to build.
type options struct {
	root      string     // of the repository; absolute
	out       string     // folder of the release; absolute
	wanted    string     // version, such as v0.1.0; "": readSource chooses
	snapshot  bool       // permits uncommitted changes, and versions that are no tag of HEAD
	platforms []platform // to build for
	key       string     // file with a secret key of minisign; "": the checksums are not signed
	password  string     // of key
	log       io.Writer  // gets a line for each step
}

// release is a release while it is built. Its fields are set once, by build.
type release struct {
	options
	*source
	dir  string // holds what is finished; becomes options.out
	work string // holds what only the steps need
}

// build builds a release. The folder out appears when the release is complete, or not at all.
func build(ctx context.Context, o options) (err error) {
	src, err := readSource(ctx, o)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(o.out)
	switch {
	case err == nil && len(entries) > 0:
		return fmt.Errorf("%s is not empty: remove it, or name another folder", o.out)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err = os.MkdirAll(filepath.Dir(o.out), 0o755); err != nil {
		return err
	}
	r := &release{options: o, source: src}
	if r.work, err = os.MkdirTemp("", "tunnel-release-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.work)) }()
	if r.dir, err = os.MkdirTemp(filepath.Dir(o.out), ".tunnel-release-"); err != nil { // beside out, to be renamed
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.dir)) }()
	if err = r.fill(ctx); err != nil {
		return err
	}
	if err = os.Chmod(r.dir, 0o755); err != nil { // MkdirTemp makes folders for the owner only
		return err
	}
	if err = os.Rename(r.dir, r.out); err != nil {
		return err
	}
	r.say("%s holds tunnel %s", r.out, r.version)
	return nil
}

// fill makes all files of the release. The checksums come last, since they cover all other files.
func (r *release) fill(ctx context.Context) error {
	programs, err := r.programs(ctx)
	if err != nil {
		return err
	}
	docs, err := r.documents(ctx)
	if err != nil {
		return err
	}
	for _, p := range programs {
		r.say("%s/%s", p.os, p.arch)
		for _, add := range []func(*program, documents) error{r.addBOM, r.addArchive, r.addPackages} {
			if err = add(p, docs); err != nil {
				return fmt.Errorf("%s/%s: %w", p.os, p.arch, err)
			}
		}
	}
	if err = r.addImages(programs, docs); err != nil {
		return fmt.Errorf("image: %w", err)
	}
	if err = r.addModule(); err != nil {
		return fmt.Errorf("module: %w", err)
	}
	return r.addSums()
}

// say writes a line of progress.
func (r *release) say(format string, args ...any) { fmt.Fprintf(r.log, format+"\n", args...) }

// name returns the name of a file of the release: tunnel_VERSION_SUFFIX.
func (r *release) name(suffix string) string { return "tunnel_" + r.version + "_" + suffix }

// put writes a file of the release. The path is relative to the release's folder.
func (r *release) put(path string, data []byte) error {
	full := filepath.Join(r.dir, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		return err
	}
	return os.WriteFile(full, data, 0o644)
}

// read returns a file of the repository.
func (r *release) read(path string) ([]byte, error) {
	data, err := os.ReadFile(filepath.Join(r.root, path))
	if err != nil {
		return nil, fmt.Errorf("a release holds %s: %w", path, err)
	}
	return data, nil
}

// output runs a command and returns its standard output. If the command fails, the error holds its messages.
func output(ctx context.Context, dir string, env []string, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = dir, env, &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.Bytes(), nil
}
