package main

import (
	"errors"

	"github.com/spf13/cobra"
	"golang.org/x/net/http/httpproxy"

	"tunnel.example/tunnel/pkg/setup"
)

// joinFlags are the flags of `tunnel join`.
type joinFlags struct {
	dir, tokenFile, node      string
	proxy, proxyFile, proxyCA string
	servers                   []string
	force, systemd            bool
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

join uses the proxy that HTTPS_PROXY names (sudo drops that variable), or that of --proxy, and
writes it into the edge's configuration. --server replaces the address in the token, for instance
by the wss:// URL of an ingress; give it again for each further server.

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
			shared := token.Nodes != ""
			if token, err = setup.ForNode(token, flags.node, environment()); err != nil {
				return &exitError{exitUsage, err}
			}
			return setupError(setup.Join(cmd.Context(), setup.JoinConfig{
				Token: token, Shared: shared, Dir: flags.dir, Force: flags.force, Systemd: flags.systemd,
				Servers: flags.servers, Proxy: flags.proxy, ProxyFile: flags.proxyFile, ProxyCA: flags.proxyCA,
				Environment: httpproxy.FromEnvironment(), Host: host(), Out: cmd.OutOrStdout(),
			}))
		},
	}
	f := cmd.Flags()
	f.StringVar(&flags.dir, "dir", setup.DefaultDir, "folder to put the files into")
	f.StringVar(&flags.tokenFile, "token-file", "", "read the token from this `file`, not from standard input")
	f.StringVar(&flags.node, "node", "", "the node's `name`, if the token is for several nodes; else the host name")
	f.StringArrayVar(&flags.servers, "server", nil,
		"reach the cloud at this `host:port or wss://URL`, not at the token's address")
	f.StringVar(&flags.proxy, "proxy", "", "reach the cloud through the proxy at this `URL`, env (the default) or none")
	f.StringVar(&flags.proxyFile, "proxy-file", "", "read the proxy's URL, with user and password, from this `file`")
	f.StringVar(&flags.proxyCA, "proxy-ca", "",
		"`file` with the CA of an https:// proxy or a wss:// server; else the system's")
	f.BoolVar(&flags.force, "force", false, "replace the files of another node, or of another cloud")
	f.BoolVar(&flags.systemd, "systemd", false, "have systemd start the edge, now and with the machine")
	cmd.MarkFlagsMutuallyExclusive("proxy", "proxy-file")
	return cmd
}
