package main

import (
	"errors"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/pkg/setup"
)

// joinFlags are the flags of `tunnel join`.
type joinFlags struct {
	dir, tokenFile string
	force, systemd bool
}

func newJoinCommand() *cobra.Command {
	var flags joinFlags
	cmd := &cobra.Command{
		Use:   "join [--systemd]",
		Short: "Make this machine a node: check the way to the cloud, get a certificate, write the configuration",
		Long: `join reads a token of ` + "`tunnel token create`" + ` from standard input, checks the way to the cloud
step by step, gets this node's certificate and writes the edge's configuration. The token is
sent only to the cloud that made it. join may be run again: for the same node nothing is lost.
Without --systemd, join prints the command that starts the edge.

  echo 'tunnel1.…' | sudo tunnel join --systemd

Exit codes: 0 ok, 1 a step failed, 2 wrong command line or no token, 4 refused by the cloud.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 { // cobra's own error would show the token
				return errors.New("join takes no arguments: a token on a command line is seen by every user of this " +
					"machine; make another one, and pipe it: echo '…' | tunnel join")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			token, err := setup.ReadJoinToken(cmd.Context(), cmd.InOrStdin(), cmd.ErrOrStderr(), flags.tokenFile)
			switch {
			case cmd.Context().Err() != nil:
				return &exitError{exitRuntime, setup.ErrInterrupted}
			case err != nil:
				return &exitError{exitUsage, err}
			}
			return setupError(setup.Join(cmd.Context(), setup.JoinConfig{
				Token: token, Dir: flags.dir, Force: flags.force, Systemd: flags.systemd,
				Host: host(), Out: cmd.OutOrStdout(),
			}))
		},
	}
	f := cmd.Flags()
	f.StringVar(&flags.dir, "dir", setup.DefaultDir, "folder to put the files into")
	f.StringVar(&flags.tokenFile, "token-file", "", "read the token from this `file`, not from standard input")
	f.BoolVar(&flags.force, "force", false, "replace the files of another node, or of another cloud")
	f.BoolVar(&flags.systemd, "systemd", false, "have systemd start the edge, now and with the machine")
	return cmd
}
