package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/audit"
	"tunnel.example/tunnel/pkg/setup"
	"tunnel.example/tunnel/pkg/tunnel"
)

func newTokenCommand(logs *logFlags) *cobra.Command {
	token := newGroup("token", "Manage which nodes may join a cloud")
	token.AddCommand(newTokenCreateCommand(logs), newTokenListCommand(), newTokenRevokeCommand(logs))
	return token
}

// auditCommand appends what a command has done to the audit file of the cloud, with the user who ran it. A cloud
// that writes its audit to standard output, or that runs on another machine, records the change of its token file
// alone. If the file cannot be written, a log line on w says so.
func auditCommand(c *conf.Cloud, logs *logFlags, w io.Writer, e tunnel.Event) {
	if c.Audit == "" || c.Audit == audit.Stdout {
		return
	}
	e.Result, e.By = tunnel.ResultOK, fmt.Sprintf("uid %d", os.Getuid())
	// Anybody can set the variable. Only root can append to the file of the cloud's user under the unit.
	if sudo := os.Getenv("SUDO_USER"); sudo != "" && os.Getuid() == 0 {
		e.By += ", by sudo " + sudo
	}
	log := logs.logger(w)
	trail := audit.New(audit.Config{Path: c.Audit, Log: log, Existing: true})
	trail.Record(e)
	if err := trail.Close(); err != nil {
		log.Error("closing the audit file", "err", err)
	}
}

// nodeFlag adds --node, which the command requires.
func nodeFlag(cmd *cobra.Command, node *string) {
	cmd.Flags().StringVar(node, "node", "", "the node's `name` in Kubernetes, or any other of that form")
	if err := cmd.MarkFlagRequired("node"); err != nil {
		panic(err) // the flag was added a line above
	}
}

// parseNode reads --node.
func parseNode(text string) (tunnel.NodeName, error) {
	node, err := tunnel.ParseNodeName(text)
	switch {
	case err != nil:
		return "", &exitError{exitUsage, fmt.Errorf("--node: %w", err)}
	case text == "default":
		return "", &exitError{exitUsage, errors.New("--node: in a token file default means any node, " +
			"so that no node can have this name")}
	}
	return node, nil
}

func newTokenCreateCommand(logs *logFlags) *cobra.Command {
	var file configFlag
	var node string
	var ttl time.Duration
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "create [-c FILE] --node NAME",
		Short: "Make a token, and the line to paste on the edge",
		Long: `create makes a token by which one node gets a certificate from this cloud, and prints the
line to paste on that machine. A running cloud takes the token at once. The token is a secret
until it expires. Standard output holds only the line, so that a pipe can run it:

  tunnel token create --node edge1 | ssh root@edge1 sh`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			name, err := parseNode(node)
			if err != nil {
				return err
			}
			if ttl < setup.MinTTL || ttl > setup.MaxTTL {
				return &exitError{exitUsage, fmt.Errorf("--ttl is from %s to %s, not %s",
					setup.Spell(setup.MinTTL), setup.Spell(setup.MaxTTL), setup.Spell(ttl))}
			}
			path, err := file.path()
			if err != nil {
				return err
			}
			c, err := loadToCreate(path)
			if err != nil {
				return err
			}
			created, err := setup.CreateToken(c, host(), name, ttl)
			if err != nil {
				return setupError(err)
			}
			if created.Written {
				auditCommand(c, logs, cmd.ErrOrStderr(), tunnel.Event{
					Kind: tunnel.EventTokenCreate, Node: name, Token: created.ID,
				})
			}
			created.AwaitAdoption(cmd.Context()) // the edge may use the token as soon as it is printed
			if asJSON {
				err = json.NewEncoder(cmd.OutOrStdout()).Encode(created)
			} else {
				err = created.Explain(cmd.OutOrStdout(), cmd.ErrOrStderr())
			}
			return errors.Join(err, setupError(created.Unwritten()))
		},
	}
	file.register(cmd, cloudFile)
	nodeFlag(cmd, &node)
	cmd.Flags().DurationVar(&ttl, "ttl", setup.DefaultTTL, "how long the token is good for, such as 72h or 10m; "+
		"the certificate that it gets is renewed by the edge")
	cmd.Flags().BoolVar(&asJSON, "json", false,
		"print an object with node, id, expires, token, command, lines and written")
	return cmd
}

// loadToCreate reads the configuration of a cloud, and its token file. It fails if the cloud
// could not start: then no node could join either.
func loadToCreate(file string) (*conf.Cloud, error) {
	c, err := conf.LoadCloud(file, environment())
	if err != nil {
		return nil, configError(err)
	}
	if _, err = newTokens(c, slog.New(slog.DiscardHandler), nil); err != nil {
		return nil, configError(err)
	}
	return c, nil
}

func newTokenListCommand() *cobra.Command {
	var file configFlag
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list [-c FILE]",
		Short: "Show what the token file holds; never a token",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			path, err := file.path()
			if err != nil {
				return err
			}
			c, err := conf.ReadCloud(path, environment())
			if err != nil {
				return configError(err)
			}
			lines, err := setup.ListTokens(c)
			if err != nil {
				return setupError(err)
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(lines)
			}
			return setup.PrintTokens(cmd.OutOrStdout(), c, path, lines)
		},
	}
	file.register(cmd, cloudFile)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print an array of objects with node, kind, id, expires and state")
	return cmd
}
func newTokenRevokeCommand(logs *logFlags) *cobra.Command {
	var file configFlag
	var node string
	cmd := &cobra.Command{
		Use:   "revoke [-c FILE] --node NAME",
		Short: "Revoke a node: its tokens, its certificates, its session",
		Long: `revoke marks the node as revoked in the token file, and removes its tokens. A running cloud
ends the node's session and conns within a second.
` + "`tunnel token create`" + ` lets the node join again, but not with its old token or certificate.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			name, err := parseNode(node)
			if err != nil {
				return err
			}
			path, err := file.path()
			if err != nil {
				return err
			}
			c, err := conf.ReadCloud(path, environment())
			if err != nil {
				return configError(err)
			}
			if err = setup.Revoke(c, host(), name, cmd.OutOrStdout(), cmd.ErrOrStderr()); err != nil {
				return setupError(err)
			}
			auditCommand(c, logs, cmd.ErrOrStderr(), tunnel.Event{Kind: tunnel.EventTokenRevoke, Node: name})
			return nil
		},
	}
	file.register(cmd, cloudFile)
	nodeFlag(cmd, &node)
	err := cmd.RegisterFlagCompletionFunc("node", func(
		cmd *cobra.Command, args []string, prefix string,
	) ([]cobra.Completion, cobra.ShellCompDirective) {
		return (&askFlags{config: file}).nodeNames(cmd, args, prefix)
	})
	if err != nil {
		panic(err) // the flag was added above
	}
	return cmd
}
