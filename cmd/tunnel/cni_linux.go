package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/cni"
	"tunnel.example/tunnel/pkg/podnet"
)

// systemCommands are the commands that only Linux has.
func systemCommands() []*cobra.Command {
	group := newGroup("cni", "Manage the CNI plugin of a node")
	group.AddCommand(newCNIInstallCommand(), newCNIUninstallCommand())
	return []*cobra.Command{group}
}

func newCNIInstallCommand() *cobra.Command {
	var from, binDir string
	cmd := &cobra.Command{
		Use:   "install [--from FILE]",
		Short: "Copy the plugin tunnel-cni to where the container runtime finds it",
		Long: `install copies the plugin, or replaces an older one. A runtime that adds a pod meanwhile gets the
old plugin or the new one, so that pods may run. Root does it:

  sudo tunnel cni install

Exit codes: 0 the plugin is there, 1 it cannot be copied.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if from == "" {
				own, err := os.Executable()
				if err != nil {
					return &exitError{exitRuntime, err}
				}
				from = filepath.Join(filepath.Dir(own), cni.Program)
			}
			changed, err := podnet.Install(cmd.Context(), from, binDir)
			if err != nil {
				return &exitError{exitRuntime, err}
			}
			if changed {
				fmt.Fprintf(cmd.OutOrStdout(), "%s is installed in %s\n", cni.Program, binDir)
			} else {
				fmt.Fprintf(cmd.OutOrStdout(), "%s has this version already\n", filepath.Join(binDir, cni.Program))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&from, "from", "", "the plugin's `FILE`; default: tunnel-cni beside this program")
	cmd.Flags().StringVar(&binDir, "bindir", conf.DefaultBinDir, "`DIR` of the CNI plugins")
	return cmd
}

func newCNIUninstallCommand() *cobra.Command {
	var confDir, binDir, dataDir string
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove the plugin, its files, its bridge and its rules from this node",
		Long: `uninstall removes the network configuration, the plugin, the reservations of addresses, the table
of nftables and the bridge. The network configuration says which bridge and which folder of
reservations they are. It refuses while pods have links: drain the node first, and stop the edge or
remove [mode.edge.cni] from its configuration.

Exit codes: 0 removed, 1 pods have links, or something cannot be removed.`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := podnet.Uninstall(confDir, binDir, dataDir); err != nil {
				return &exitError{exitRuntime, err}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&confDir, "confdir", conf.DefaultConfDir, "`DIR` of the network configurations")
	cmd.Flags().StringVar(&binDir, "bindir", conf.DefaultBinDir, "`DIR` of the CNI plugins")
	cmd.Flags().StringVar(&dataDir, "datadir", cni.DefaultDataDir,
		"`DIR` of the reservations, if the network configuration names no other")
	return cmd
}
