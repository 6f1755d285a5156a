// Command release builds everything that a release of tunnel holds: archives, packages for Debian and Fedora,
// the container image, bills of materials, third-party notices, the module as a Go module proxy serves it,
// checksums, and their signature. `make release` runs it; docs/releases.md is for its users.
//
//	go -C tools/release run . -out /tmp/dist              # the tag at HEAD, of a clean tree
//	go -C tools/release run . -out /tmp/dist -snapshot    # any tree, for trials
//	go -C tools/release run . -notices $PWD/bin/tunnel    # only the third-party notices of one binary
//
// Two builds of one commit by one version of Go give the same bytes. Every timestamp is the commit's, every
// list is sorted, every owner is root, and the environment does not change how the binaries are compiled.
// The command works without a network if Go's module cache holds the modules of the two go.mod files.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
)

// passwordVariable names the environment variable with the password of the secret key.
const passwordVariable = "TUNNEL_RELEASE_PASSWORD"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Getenv(passwordVariable), os.Stdout, os.Stderr)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// run reads the command line and builds the release, or writes notices to stdout.
func run(ctx context.Context, args []string, password string, stdout, stderr io.Writer) error {
	o := options{password: password, log: stderr}
	var platforms, binary string
	flags := flag.NewFlagSet("release", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&o.root, "root", "../..", "root `folder` of the repository")
	flags.StringVar(&o.out, "out", "", "`folder` for the release: a new or an empty one")
	flags.StringVar(&o.wanted, "version", "", "`version` of the release, such as v0.1.0 (default: the tag of HEAD)")
	flags.StringVar(&o.key, "key", "", "sign the checksums with the secret key of minisign in this `file`; "+
		"the variable "+passwordVariable+" holds its password")
	flags.BoolVar(&o.snapshot, "snapshot", false, "build a tree without a tag or with uncommitted changes, for trials")
	flags.StringVar(&platforms, "platforms", "", "with -snapshot: build only for these, such as `linux/amd64,linux/arm`")
	flags.StringVar(&binary, "notices", "", "print the third-party notices of the `binary` that make build has made, "+
		"and build no release")
	if err := flags.Parse(args); err != nil {
		return err
	}
	switch {
	case flags.NArg() > 0:
		return fmt.Errorf("release takes only flags, not %q", flags.Arg(0))
	case binary != "" && (o.out != "" || o.key != "" || o.snapshot || platforms != ""):
		return errors.New("-notices builds no release: only -root and -version fit to it")
	case binary == "" && o.out == "":
		return errors.New("-out is missing: name a folder for the release")
	case platforms != "" && !o.snapshot:
		return errors.New("-platforms needs -snapshot: a release is for all platforms")
	}
	var err error
	if o.platforms, err = parsePlatforms(platforms); err != nil {
		return err
	}
	for _, path := range []*string{&o.root, &o.out} {
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	if binary != "" {
		return writeNotices(ctx, o, binary, stdout)
	}
	return build(ctx, o)
}

// platform is a system that Go builds for.
type platform struct{ os, arch string }

func (p platform) String() string { return p.os + "_" + p.arch }

// binary returns the name of the program's file.
func (p platform) binary() string {
	if p.os == "windows" {
		return "tunnel.exe"
	}
	return "tunnel"
}

// armVersion is the oldest ARM that linux/arm is for: 7, as Debian's armhf and Fedora's armv7hl.
const armVersion = "7"

// every returns all platforms of a release. The daemons are for Linux; the others have the client's commands.
func every() []platform {
	return []platform{
		{"linux", "amd64"}, {"linux", "arm64"}, {"linux", "arm"},
		{"darwin", "amd64"}, {"darwin", "arm64"}, {"windows", "amd64"},
	}
}

// parsePlatforms reads a list such as linux/amd64,linux/arm. An empty list means all platforms.
func parsePlatforms(list string) ([]platform, error) {
	if list == "" {
		return every(), nil
	}
	var found []platform
	for item := range strings.SplitSeq(list, ",") {
		name := cmp.Or(item, "an empty name")
		known := false
		for _, p := range every() {
			if p.os+"/"+p.arch == item {
				found, known = append(found, p), true
			}
		}
		if !known {
			return nil, fmt.Errorf("-platforms: %s is none of the platforms of a release: %v", name, every())
		}
	}
	return found, nil
}
