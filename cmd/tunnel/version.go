package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"tunnel/pkg/stream"
)

// version is set by the Makefile: -ldflags "-X main.version=…".
var version string

// software returns the version of this build: for its peers, metrics, logs and operators.
func software() string {
	v := version
	if info, ok := debug.ReadBuildInfo(); ok && v == "" && info.Main.Version != "(devel)" {
		v = info.Main.Version
	}
	return cmp.Or(v, "devel")
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program and of the protocol",
		Args:  cobra.NoArgs,
		Run: func(cmd *cobra.Command, _ []string) {
			fmt.Fprintf(cmd.OutOrStdout(), "tunnel %s\nprotocol %d\n%s %s/%s\n",
				software(), stream.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
		},
	}
}
