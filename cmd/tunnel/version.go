package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/pkg/stream"
)

// version is set by the Makefile: -ldflags "-X main.version=…".
var version string

// commit is set by builds that know it, in the same way; it need not be set.
var commit string //nolint:gochecknoglobals // only the linker can set it

// software returns the version of this build: for its peers, metrics, logs and operators.
func software() string {
	info, _ := debug.ReadBuildInfo()
	return versionOf(version, info)
}

// versionOf returns the version that the linker has set, or else the version of the main module: the
// tag of a program that `go install MODULE@TAG` has built. info may be nil.
func versionOf(linked string, info *debug.BuildInfo) string {
	if linked == "" && info != nil && info.Main.Version != "(devel)" {
		linked = info.Main.Version
	}
	return cmp.Or(linked, "devel")
}

// commitOf returns the commit that the linker has set, or else the commit that the go command has
// stamped; "" if neither is known. The go command stamps no commit into a program that
// `go install MODULE@VERSION` builds, since the module proxy holds no commits. info may be nil.
func commitOf(linked string, info *debug.BuildInfo) string {
	if linked != "" || info == nil {
		return linked
	}
	var revision, modified string
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			revision = s.Value
		case "vcs.modified":
			modified = s.Value
		}
	}
	if revision != "" && modified == "true" {
		revision += " and changes that are in no commit"
	}
	return revision
}

// versionText is the output of `tunnel version`.
func versionText() string {
	info, _ := debug.ReadBuildInfo()
	var b strings.Builder
	fmt.Fprintf(&b, "tunnel %s\n", versionOf(version, info))
	if c := commitOf(commit, info); c != "" {
		fmt.Fprintf(&b, "commit %s\n", c)
	}
	fmt.Fprintf(&b, "protocol %d\n%s %s/%s\n", stream.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return b.String()
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program and of the protocol",
		Args:  noArgs,
		Run:   func(cmd *cobra.Command, _ []string) { fmt.Fprint(cmd.OutOrStdout(), versionText()) },
	}
}
