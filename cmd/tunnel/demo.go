package main

import (
	"github.com/spf13/cobra"

	"tunnel.example/tunnel/internal/demo"
)

func newDemoCommand() *cobra.Command {
	var flags demo.Flags
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "See the tunnel work on this machine: no Kubernetes, no root, no files left behind",
		Long: `demo makes a throwaway certificate authority and token, and starts a cloud and an edge as two
processes on loopback. Through them it reaches an HTTPS and a TCP service behind the edge.
It stays up, with live counters, until Ctrl-C.

Exit codes: 0 every check is ok, 1 a check failed, 2 wrong command line.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flags.Check(); err != nil {
				return &exitError{exitUsage, err}
			}
			if err := demo.Run(cmd.Context(), flags, cmd.OutOrStdout()); err != nil {
				return &exitError{exitRuntime, err}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&flags.Once, "once", false, "run every check, print \"ok NAME\" for each, and exit")
	cmd.Flags().StringVar(&flags.Target, "target", "", "also forward to `host:port`, something of your own")
	return cmd
}
