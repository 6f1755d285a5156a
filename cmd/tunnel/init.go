package main

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"tunnel/pkg/setup"
)

// setupError gives an error of pkg/setup its exit code.
func setupError(err error) error {
	if err == nil {
		return nil
	}
	code := exitRuntime
	if e, ok := errors.AsType[*setup.Error](err); ok {
		switch e.Kind {
		case setup.KindFailed:
		case setup.KindUsage:
			code = exitUsage
		case setup.KindConfig:
			code = exitConfig
		case setup.KindRefused:
			code = exitRefused
		}
	}
	return &exitError{code, err}
}

// host returns what pkg/setup needs to know of this process.
func host() setup.Host {
	return setup.Host{Env: environment(), Sudo: os.Getenv("SUDO_USER") != "", Software: software()}
}

func newInitCommand() *cobra.Command {
	var dir, address string
	cmd := &cobra.Command{
		Use:   "init --address HOST:PORT",
		Short: "Make what a cloud needs: authorities, certificate, token file, configuration",
		Long: `init makes a folder with everything that ` + "`tunnel cloud`" + ` needs on a machine without
Kubernetes. It never replaces a file.

  tunnel init --address tunnel.example.com:9000
  tunnel cloud -c /etc/tunnel/cloud.toml
  tunnel token create -c /etc/tunnel/cloud.toml --node edge1`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			folder, err := setup.Init(dir, address)
			if err != nil {
				return setupError(err)
			}
			folder.Explain(cmd.OutOrStdout(), host())
			return nil
		},
	}
	cmd.Flags().StringVar(&address, "address", "",
		"where edges will dial, `host:port`: a name or an address of this machine")
	cmd.Flags().StringVar(&dir, "dir", setup.DefaultDir, "folder to put the files into")
	if err := cmd.MarkFlagRequired("address"); err != nil {
		panic(err) // the flag was added above
	}
	return cmd
}
