package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/audit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/setup"
	"tunnel.example/tunnel/pkg/tunnel"
)

func newTokenCommand(logs *logFlags) *cobra.Command {
	token := newGroup("token", "Manage which nodes may join a cloud")
	token.AddCommand(newTokenCreateCommand(logs), newTokenListCommand(), newTokenRevokeCommand(logs))
	return token
}

// auditCommand appends to the audit file of the cloud what a command has done, and which user ran it. If the cloud
// writes its audit to standard output, or runs on another machine, auditCommand does nothing: the cloud itself records
// only that its token file has changed. If the file cannot be written, a log line on w says so.
func auditCommand(c *conf.Cloud, logs *logFlags, w io.Writer, e tunnel.Event) {
	if c.Audit == "" || c.Audit == audit.Stdout {
		return
	}
	e.Result, e.By = tunnel.ResultOK, fmt.Sprintf("uid %d", os.Getuid())
	// Believe SUDO_USER only if root runs the command: any other user can set the variable.
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

// tokenFlags are the flags of tunnel token create.
type tokenFlags struct {
	file            configFlag
	node, nodesFrom string
	uses            int
	ttl             time.Duration
	asJSON          bool
	output          outputFlag
}

func newTokenCreateCommand(logs *logFlags) *cobra.Command {
	var flags tokenFlags
	cmd := &cobra.Command{
		Use:   "create [-c FILE] {--node NAME | --node PATTERN --uses N | --nodes-from FILE}",
		Short: "Make a token, and the line to paste on the edge",
		Long: `create makes a token by which one node gets a certificate from this cloud, and prints the
line to paste on that machine. A running cloud takes the token at once. The token is a secret
until it expires. Standard output holds only the line, so that a pipe can run it:

  tunnel token create --node edge1 | ssh root@edge1 sh

With a "*" in the name and --uses, one token is good for several nodes. The star stands for
letters, digits and "-". Each machine joins by its host name, or by tunnel join --node NAME.
Such a token is not good for a node that has joined already, or that has a line in the token file:

  tunnel token create --node 'edge-*' --uses 10 --expires 24h

With --nodes-from, create makes a token for each name in a file, or with - of standard input.
Standard output then holds a line for each node, with its name and its token:

  tunnel token create --nodes-from nodes.txt -o json

Exit codes: 0 made; 1 a file cannot be read or written; 2 wrong command line; 3 the cloud could not start with its
configuration.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return flags.run(cmd, logs) },
	}
	flags.file.register(cmd, cloudFile)
	f := cmd.Flags()
	f.StringVar(&flags.node, "node", "", "the node's `name` in Kubernetes, or any other of that form; "+
		"with --uses a pattern, such as edge-*")
	f.StringVar(&flags.nodesFrom, "nodes-from", "", "make a token for each name in this `file`, one on each line; "+
		"- is standard input")
	f.IntVar(&flags.uses, "uses", 0, "how many nodes may join by the token of a pattern")
	f.DurationVar(&flags.ttl, "ttl", setup.DefaultTTL, "how long the token is good for, such as 72h or 10m; "+
		"the certificate that it gets is renewed by the edge")
	f.DurationVar(&flags.ttl, "expires", setup.DefaultTTL, "another name of --ttl")
	f.BoolVar(&flags.asJSON, "json", false,
		"as -o json: print an object with node, id, expires, token, command, lines and written; "+
			"with --nodes-from an array of them")
	flags.output.register(cmd, "text", "json", "yaml")
	cmd.MarkFlagsOneRequired("node", "nodes-from")
	cmd.MarkFlagsMutuallyExclusive("node", "nodes-from")
	cmd.MarkFlagsMutuallyExclusive("nodes-from", "uses")
	cmd.MarkFlagsMutuallyExclusive("ttl", "expires")
	return cmd
}

// run makes the tokens that the flags ask for.
func (f *tokenFlags) run(cmd *cobra.Command, logs *logFlags) error {
	if f.asJSON {
		f.output.form = "json"
	}
	if err := f.output.check(); err != nil {
		return err
	}
	if f.ttl < setup.MinTTL || f.ttl > setup.MaxTTL {
		return &exitError{exitUsage, fmt.Errorf("--ttl is from %s to %s, not %s",
			setup.Spell(setup.MinTTL), setup.Spell(setup.MaxTTL), setup.Spell(f.ttl))}
	}
	create, err := f.creator(cmd.InOrStdin())
	if err != nil {
		return &exitError{exitUsage, err}
	}
	path, err := f.file.path()
	if err != nil {
		return err
	}
	c, err := loadToCreate(path)
	if err != nil {
		return err
	}
	created, err := create(c)
	if err != nil {
		return setupError(err)
	}
	if created[0].Written {
		for _, t := range created {
			auditCommand(c, logs, cmd.ErrOrStderr(), tunnel.Event{
				Kind: tunnel.EventTokenCreate, Node: t.Node, Nodes: string(t.Nodes), Token: t.ID,
			})
		}
	}
	var v any = created[0]
	if f.nodesFrom != "" {
		v = created
	}
	done, err := f.output.encodeLine(cmd.OutOrStdout(), v)
	switch {
	case done:
	case f.nodesFrom != "":
		err = setup.ExplainTokens(created, cmd.OutOrStdout(), cmd.ErrOrStderr())
	default:
		err = created[0].Explain(cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	return errors.Join(err, setupError(created[0].Unwritten()))
}

// creator checks --node, --uses and --nodes-from. It returns the function that makes the tokens, one at least.
func (f *tokenFlags) creator(in io.Reader) (func(*conf.Cloud) ([]*setup.Token, error), error) {
	if f.nodesFrom != "" {
		if f.nodesFrom != "-" {
			file, err := os.Open(f.nodesFrom)
			if err != nil {
				return nil, fmt.Errorf("--nodes-from: %w", err)
			}
			defer file.Close()
			in = file
		}
		nodes, err := setup.ReadNodes(in)
		if err != nil {
			return nil, fmt.Errorf("--nodes-from: %w", err)
		}
		return func(c *conf.Cloud) ([]*setup.Token, error) {
			return setup.CreateTokens(c, host(), nodes, f.ttl)
		}, nil
	}
	if !strings.Contains(f.node, "*") {
		if f.uses != 0 {
			return nil, errors.New("--uses is for a pattern of names, such as --node 'edge-*'")
		}
		node, err := parseNode(f.node)
		if err != nil {
			return nil, err
		}
		return func(c *conf.Cloud) ([]*setup.Token, error) {
			return setup.CreateTokens(c, host(), []tunnel.NodeName{node}, f.ttl)
		}, nil
	}
	nodes, err := auth.ParseNodePattern(f.node)
	if err != nil {
		return nil, fmt.Errorf("--node: %w", err)
	}
	if f.uses < 1 || f.uses > auth.MaxUses {
		return nil, fmt.Errorf("--uses says how many nodes may join by the token of a pattern, from 1 to %d", auth.MaxUses)
	}
	return func(c *conf.Cloud) ([]*setup.Token, error) {
		t, err := setup.CreateSharedToken(c, host(), nodes, f.uses, f.ttl)
		return []*setup.Token{t}, err
	}, nil
}

// printProblems prints what is wrong with a configuration, and does not keep a command from its work.
func printProblems(w io.Writer, all conf.Problems) {
	for _, one := range all {
		fmt.Fprintln(w, "warning: "+tunnel.Printable(one.Error()))
	}
}

// loadToCreate reads the configuration of a cloud, and its token file. It fails if the cloud
// could not start: then no node could join either.
func loadToCreate(file string) (*conf.Cloud, error) {
	c, err := conf.LoadCloud(file, elsewhere())
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
	var output outputFlag
	cmd := &cobra.Command{
		Use:   "list [-c FILE]",
		Short: "Show what the token file holds; never a token",
		Long: `list shows the nodes that have tokens, that have joined or that are revoked, as the token file has them. It
never shows a token.

Exit codes: 0 ok, 1 the token file cannot be read, 3 the configuration cannot be read.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON {
				output.form = "json"
			}
			if err := output.check(); err != nil {
				return err
			}
			path, err := file.path()
			if err != nil {
				return err
			}
			c, others, err := conf.ReadCloud(path, elsewhere())
			if err != nil {
				return configError(err)
			}
			printProblems(cmd.ErrOrStderr(), others)
			lines, err := setup.ListTokens(c)
			if err != nil {
				return setupError(err)
			}
			if done, err := output.encodeLine(cmd.OutOrStdout(), lines); done {
				return err
			}
			return setup.PrintTokens(cmd.OutOrStdout(), c, path, lines)
		},
	}
	file.register(cmd, cloudFile)
	cmd.Flags().BoolVar(&asJSON, "json", false,
		"as -o json: print an array of objects with node, kind, id, expires, state, uses, used and last_used")
	output.register(cmd, "table", "json", "yaml")
	return cmd
}

// revokeTime is how long a cloud may take to end the session of a revoked node. The cloud looks at its token file once
// a second.
const revokeTime = 10 * time.Second

// revokePoll is how often the cloud is asked within revokeTime.
const revokePoll = 100 * time.Millisecond

// sessionAfterRevoke says what has become of the session of a revoked node. It asks the cloud that answers on the
// admin socket of c: the running cloud may read another token file than that of c. stays says that the cloud still has
// the session.
func sessionAfterRevoke(ctx context.Context, c *conf.Cloud, node tunnel.NodeName) (text string, stays bool) {
	if c.AdminSocket == "" {
		return "Not checked: the configuration names no admin socket, by which a cloud could be asked for its sessions.",
			false
	}
	asking, cancel := limited(ctx, revokeTime)
	defer cancel()
	client, connected := api.NewClient(c.AdminSocket), false
	for {
		list, err := client.Nodes(asking)
		if err != nil && (!connected || asking.Err() == nil) { // else the time is over, and it was connected just before
			return fmt.Sprintf("Not checked whether a cloud has ended a session: %v", err), false
		}
		if err == nil {
			connected = slices.ContainsFunc(list.Nodes, func(n api.Node) bool {
				return n.Name == string(node) && n.State == api.Connected
			})
		}
		if !connected {
			text = fmt.Sprintf("The cloud that answers on %s has no session of node %s.", c.AdminSocket, node)
			if len(list.Incomplete) > 0 {
				text += " Not all of its replicas were checked: " + strings.Join(list.Incomplete, "; ")
			}
			return text, false
		}
		select {
		case <-time.After(revokePoll):
		case <-asking.Done():
			if ctx.Err() != nil {
				return "Not checked whether a cloud has ended a session: the command was interrupted.", false
			}
			return fmt.Sprintf("The cloud that answers on %s STILL has a session of node %s. Does it read %s? If systemd runs "+
				"the cloud, its configuration is /etc/tunnel/cloud.toml.", c.AdminSocket, node, c.Server.TokenFile), true
		}
	}
}

func newTokenRevokeCommand(logs *logFlags) *cobra.Command {
	var file configFlag
	var node string
	cmd := &cobra.Command{
		Use:   "revoke [-c FILE] --node NAME",
		Short: "Revoke a node: its tokens, its certificates, its session",
		Long: `revoke marks the node as revoked in the token file, and removes its tokens. A running cloud
that reads this file ends the node's session and conns within a second. revoke then asks the cloud by
the admin socket of the configuration, and says whether the node still has a session.
` + "`tunnel token create`" + ` lets the node join again, but not with its old token or certificate.
With the pattern of a token for several nodes, revoke removes that token. Nodes that have joined stay.

Exit codes: 0 revoked; 1 a file cannot be read or written, or the node still has a session; 2 wrong command line;
3 the configuration cannot be read.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var name tunnel.NodeName
			pattern, err := auth.ParseNodePattern(node)
			if err != nil { // then it is one node
				if name, err = parseNode(node); err != nil {
					return err
				}
			}
			path, err := file.path()
			if err != nil {
				return err
			}
			c, others, err := conf.ReadCloud(path, elsewhere())
			if err != nil {
				return configError(err)
			}
			printProblems(cmd.ErrOrStderr(), others)
			if pattern != "" {
				err = setup.Withdraw(c, host(), pattern, cmd.OutOrStdout(), cmd.ErrOrStderr())
			} else {
				err = setup.Revoke(c, host(), name, cmd.OutOrStdout(), cmd.ErrOrStderr())
			}
			if err != nil {
				return setupError(err)
			}
			auditCommand(c, logs, cmd.ErrOrStderr(), tunnel.Event{
				Kind: tunnel.EventTokenRevoke, Node: name, Nodes: string(pattern),
			})
			if name == "" {
				return nil
			}
			text, stays := sessionAfterRevoke(cmd.Context(), c, name)
			if _, err = fmt.Fprintln(cmd.OutOrStdout(), tunnel.Printable(text)); err == nil && stays {
				err = &exitError{code: exitRuntime}
			}
			return err
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
