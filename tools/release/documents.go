package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

// documents are the files that are the same in every archive and package.
type documents struct {
	completions map[string][]byte // by shell: bash, zsh, fish
	manuals     []file            // man pages, such as tunnel.1
	units       []file            // of systemd
	dropIns     []file            // of systemd, for features that need rights; an operator chooses
	examples    []file            // of configuration
	license     []byte
	readme      []byte
}

// documents collects the documents. The program itself writes completions and man pages.
func (r *release) documents(ctx context.Context) (documents, error) {
	d := documents{completions: map[string][]byte{}}
	host, err := r.host(ctx)
	if err != nil {
		return d, err
	}
	if err = r.askProgram(ctx, host, &d); err != nil {
		return d, err
	}
	for _, of := range []struct {
		to    *[]file
		names []string
	}{
		{&d.units, []string{"deployment/systemd/tunnel-cloud.service", "deployment/systemd/tunnel-edge.service"}},
		{&d.dropIns, []string{
			"deployment/systemd/tunnel-edge-cni.conf", "deployment/systemd/tunnel-edge-services.conf",
		}},
		{&d.examples, []string{"conf/cloud.toml", "conf/edge.toml"}},
	} {
		for _, name := range of.names {
			var data []byte
			if data, err = r.read(name); err != nil {
				return d, err
			}
			*of.to = append(*of.to, file{name: path.Base(name), data: data})
		}
	}
	if d.license, err = r.read("LICENSE"); err != nil {
		return d, err
	}
	d.readme, err = r.read("README.md")
	return d, err
}

// askProgram has the program host write its completions and man pages.
func (r *release) askProgram(ctx context.Context, host string, d *documents) error {
	// The date of a man page is the commit's.
	env := append(os.Environ(), "SOURCE_DATE_EPOCH="+strconv.FormatInt(r.time.Unix(), 10), "TZ=UTC", "LC_ALL=C")
	for _, shell := range []string{"bash", "zsh", "fish"} {
		script, err := output(ctx, r.work, env, host, "completion", shell)
		if err != nil {
			return err
		}
		if len(script) == 0 {
			return fmt.Errorf("tunnel completion %s wrote nothing", shell)
		}
		d.completions[shell] = script
	}
	dir := filepath.Join(r.work, "man")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if _, err := output(ctx, r.work, env, host, "man", dir); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir) // sorted by name
	if err != nil {
		return err
	}
	for _, entry := range entries {
		data, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			return err
		}
		if !strings.HasSuffix(entry.Name(), ".1") {
			return fmt.Errorf("tunnel man wrote %s: want only pages of section 1", entry.Name())
		}
		d.manuals = append(d.manuals, file{name: entry.Name(), data: data})
	}
	if len(d.manuals) == 0 {
		return errors.New("tunnel man wrote no page")
	}
	return nil
}
