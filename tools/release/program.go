package main

import (
	"cmp"
	"context"
	"debug/buildinfo"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// program is the binary for one platform.
type program struct {
	platform
	path    string // of the binary
	data    []byte // the binary
	info    *buildinfo.BuildInfo
	modules []linked // sorted by path; first the standard library
	notices []byte   // the licences of modules, as text
	plugin  []byte   // the CNI plugin tunnel-cni; nil: there is none for this platform
}

// pluginName is the name of the CNI plugin's file. `tunnel cni install` looks for the plugin beside the program.
const pluginName = "tunnel-cni"

// kubectlNames are the names under which kubectl runs the program: as the plugin edgetunnel, and to complete its words.
func kubectlNames() []string { return []string{"kubectl-edgetunnel", "kubectl_complete-edgetunnel"} }

// programs compiles for every platform of the release, and reads what each binary is made of.
func (r *release) programs(ctx context.Context) ([]*program, error) {
	var programs []*program
	for _, p := range r.platforms {
		r.say("compiling for %s/%s", p.os, p.arch)
		path, err := r.compile(ctx, p)
		if err != nil {
			return nil, err
		}
		prog, err := r.inspect(ctx, p, path)
		if err != nil {
			return nil, fmt.Errorf("%s/%s: %w", p.os, p.arch, err)
		}
		if prog.plugin, err = r.plugin(ctx, prog); err != nil {
			return nil, fmt.Errorf("%s/%s: %w", p.os, p.arch, err)
		}
		programs = append(programs, prog)
	}
	return programs, nil
}

// compile builds the binary for p, and returns its path. `make build` knows the flags of the compiler.
func (r *release) compile(ctx context.Context, p platform) (string, error) {
	path := filepath.Join(r.work, p.String(), p.binary())
	_, err := output(ctx, r.root, buildEnvironment(p), "make", "--no-print-directory", "build",
		"VERSION="+r.version, "BIN="+path)
	return path, err
}

// plugin compiles the CNI plugin for the platform of p. The notices of p are the plugin's, too: each module of the
// plugin is a module of p.
func (r *release) plugin(ctx context.Context, p *program) ([]byte, error) {
	if p.os != "linux" {
		return nil, nil
	}
	path := filepath.Join(r.work, p.String(), pluginName)
	if _, err := output(ctx, r.root, buildEnvironment(p.platform), "make", "--no-print-directory", "build-cni",
		"VERSION="+r.version, "CNI_BIN="+path); err != nil {
		return nil, err
	}
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for _, dep := range info.Deps {
		same := func(m linked) bool { return m.path == dep.Path && m.version == dep.Version }
		if !slices.ContainsFunc(p.modules, same) {
			return nil, fmt.Errorf("%s holds module %s %s, and the notices of tunnel do not have it",
				pluginName, dep.Path, dep.Version)
		}
	}
	return os.ReadFile(path)
}

// host compiles for the machine that builds the release.
func (r *release) host(ctx context.Context) (string, error) {
	return r.compile(ctx, platform{runtime.GOOS, runtime.GOARCH})
}

// writeNotices writes the notices of a binary that was compiled from the tree in o.root. It needs no repository.
func writeNotices(ctx context.Context, o options, binary string, to io.Writer) error {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return err
	}
	r := &release{options: o, source: &source{version: cmp.Or(o.wanted, "devel")}}
	p := &program{info: info}
	prog, err := r.inspect(ctx, platform{p.setting("GOOS"), p.setting("GOARCH")}, binary)
	if err != nil {
		return fmt.Errorf("%s: %w", binary, err)
	}
	_, err = to.Write(prog.notices)
	return err
}

// inspect reads the binary at path.
func (r *release) inspect(ctx context.Context, p platform, path string) (*program, error) {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return nil, err
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	prog := &program{platform: p, path: path, data: data, info: info}
	if prog.modules, err = r.linkedModules(ctx, prog); err != nil {
		return nil, err
	}
	prog.notices = r.noticesOf(prog)
	return prog, nil
}

// setting returns a setting of the build, such as -tags, or "".
func (p *program) setting(key string) string {
	for _, s := range p.info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}

// buildEnvironment is the environment of the compiler. It leaves out each variable that changes the binary or
// that make hands to a make below it, and sets those that say for which platform to build.
func buildEnvironment(p platform) []string {
	env := slices.DeleteFunc(os.Environ(), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		switch name {
		case "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "GNUMAKEFLAGS", "GOEXPERIMENT", "GOFIPS140", "GODEBUG":
			return true
		}
		return false
	})
	return append(env, "LC_ALL=C", "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=-buildvcs=false",
		"GOOS="+p.os, "GOARCH="+p.arch, "GOAMD64=v1", "GOARM64=v8.0", "GOARM="+armVersion)
}
