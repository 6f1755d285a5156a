package main

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tunnel/conf"
	"tunnel/pkg/auth"
	"tunnel/pkg/tunnel"
)

func newTokenCommand() *cobra.Command {
	token := newGroup("token", "Say which nodes may join a cloud")
	token.AddCommand(newTokenCreateCommand(), newTokenListCommand(), newTokenRevokeCommand())
	return token
}

// nodeFlag adds --node, without which the command does nothing.
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
		return "", &exitError{exitUsage, errors.New("--node: in a token file default means any node, so that no node can have this name")}
	}
	return node, nil
}

// The time that a join token is good for.
const (
	defaultTTL = 24 * time.Hour
	leastTTL   = time.Minute
	mostTTL    = 365 * 24 * time.Hour
	// adoption is how long a running cloud takes to see that the token file has changed.
	adoption = time.Second
)

func newTokenCreateCommand() *cobra.Command {
	var file, node string
	var ttl time.Duration
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "create -c cloud.toml --node NAME",
		Short: "Make a token, and the line to paste on the edge",
		Long: `create makes a token by which one node gets a certificate from this cloud, and prints the
line to paste on that machine. A running cloud takes the token at once. It is a secret until
it expires; the line is all of the standard output, so that it can be piped as well:

  tunnel token create -c cloud.toml --node edge1 | ssh root@edge1 sh`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			name, err := parseNode(node)
			if err != nil {
				return err
			}
			if ttl < leastTTL || ttl > mostTTL {
				return &exitError{exitUsage, fmt.Errorf("--ttl is from %s to %s, not %s", spell(leastTTL), spell(mostTTL), spell(ttl))}
			}
			c, err := loadToCreate(file)
			if err != nil {
				return err
			}
			created, err := createToken(c, name, ttl)
			if err != nil {
				return err
			}
			if errors.Is(created.change.failed, fs.ErrPermission) {
				return created.change.unwritten(c) // who runs it again gets another one
			}
			if created.Written { // the line may be pasted, or piped, as soon as it is seen
				select {
				case <-time.After(adoption):
				case <-cmd.Context().Done():
				}
			}
			if asJSON {
				err = json.NewEncoder(cmd.OutOrStdout()).Encode(created)
			} else {
				created.explain(cmd.OutOrStdout(), cmd.ErrOrStderr(), c)
			}
			return errors.Join(err, created.change.unwritten(c))
		},
	}
	fileFlag(cmd, &file)
	nodeFlag(cmd, &node)
	cmd.Flags().DurationVar(&ttl, "ttl", defaultTTL, "how long the token is good for, such as 72h or 10m; the certificate that it gets is renewed by the edge")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print an object with node, id, expires, token, command, lines and written")
	return cmd
}

// loadToCreate reads the configuration of a cloud that could run: what is wrong with it
// would keep a node from joining.
func loadToCreate(file string) (*conf.Cloud, error) {
	c, err := conf.LoadCloud(file, environment())
	if err != nil {
		return nil, configError(err)
	}
	if _, err = newTokens(c, slog.New(slog.DiscardHandler)); err != nil {
		return nil, configError(err)
	}
	return c, nil
}

// createdToken is a new token. It is printed once.
type createdToken struct {
	Node    tunnel.NodeName `json:"node"`
	ID      string          `json:"id"`
	Expires time.Time       `json:"expires"`
	Token   string          `json:"token"`
	Command string          `json:"command"` // to paste on the edge
	Lines   []string        `json:"lines"`   // of the token file
	Written bool            `json:"written"` // whether they are there

	ttl    time.Duration
	change tokenChange
}

// createToken makes a join token and writes it to the token file.
func createToken(c *conf.Cloud, node tunnel.NodeName, ttl time.Duration) (*createdToken, error) {
	if err := node.MayJoin(); err != nil {
		return nil, &exitError{exitUsage, fmt.Errorf("--node: %w", err)}
	}
	if !c.Join.Signs() {
		return nil, configError(errors.New("this cloud gives no certificates to nodes: write ca and cakey (tunnel init makes them) or signer = \"kubernetes\" in [mode.cloud.join]"))
	}
	if c.Join.Address == "" {
		return nil, configError(errors.New("mode.cloud.join: address is missing: write what edges dial, such as address = \"tunnel.example.com:9000\", and cloudca, the CA that signed cert in [mode.cloud.stream.server]"))
	}
	root, err := cloudRoot(c)
	if err != nil {
		return nil, configError(err)
	}
	host, _, err := splitAddress(c.Join.Address)
	if err != nil {
		return nil, configError(fmt.Errorf("mode.cloud.join: address: %w", err))
	}
	now := time.Now()
	secret := auth.NewToken()
	t := &createdToken{Node: node, Expires: now.Add(ttl).UTC().Truncate(time.Second), ttl: ttl}
	t.Token = auth.JoinToken{
		Address: c.Join.Address, ServerName: host, CA: sha256.Sum256(root.Raw), Node: node, Secret: secret,
	}.Encode().Reveal()
	t.Command = "echo '" + t.Token + "' | sudo tunnel join"
	line := auth.TokenLine{Node: node, Secret: secret, Join: true, Expires: t.Expires}
	t.change, err = editTokenFile(c.Server.TokenFile, func(content string) (string, error) {
		// A time from before a wait for the lock would spare the certificates made meanwhile.
		return auth.AddToken(content, line, time.Now())
	})
	if err != nil {
		return nil, &exitError{exitRuntime, err}
	}
	t.ID = strings.TrimPrefix(secret.Hashed(), "sha256:")[:8]
	t.Lines, t.Written = t.change.added, t.change.failed == nil
	return t, nil
}

func (t *createdToken) explain(out, notes io.Writer, c *conf.Cloud) {
	fmt.Fprintf(notes, "A token for node %s, good until %s (%s). It is a secret: who has it can be that node.\n", t.Node, when(t.Expires), spell(t.ttl))
	fmt.Fprintf(notes, "On the edge, paste (the blank at its start keeps it out of most shells' history):\n\n")
	fmt.Fprintf(out, "  %s\n", t.Command)
	fmt.Fprintf(notes, "\nWith --systemd behind it, the edge starts then and there, and with the machine.\n")
	if t.Written {
		tellReplicas(notes, c, t.change)
	}
}

// tellReplicas says what a change means where there are several token files.
func tellReplicas(notes io.Writer, c *conf.Cloud, change tokenChange) {
	if !c.Peers.Configured() {
		return
	}
	fmt.Fprintf(notes, "\nThis cloud has other replicas, and each reads a token file of its own. Unless %s is shared, change theirs as well:\n\n", c.Server.TokenFile)
	change.show(notes)
}

// show prints the lines of a change.
func (c tokenChange) show(w io.Writer) {
	for _, l := range c.removed {
		fmt.Fprintf(w, "  remove  %s\n", shownLine(l))
	}
	for _, l := range c.added {
		fmt.Fprintf(w, "  add     %s\n", l)
	}
}

// unwritten says what to do when the token file could not be written.
func (c tokenChange) unwritten(cloud *conf.Cloud) error {
	path := cloud.Server.TokenFile
	if c.failed == nil {
		return nil
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s was NOT changed: %v.\n", path, reasonOf(c.failed))
	if errors.Is(c.failed, fs.ErrPermission) {
		b.WriteString("Run this again as its owner, such as with sudo.")
		return &exitError{exitRuntime, errors.New(b.String())}
	}
	b.WriteString("Nothing has happened until somebody changes it:\n\n")
	c.show(&b)
	if errors.Is(c.failed, errMounted) || errors.Is(c.failed, syscall.EROFS) {
		b.WriteString("\n" + c.kubectl(filepath.Base(path)))
	}
	return &exitError{exitRuntime, errors.New(strings.TrimRight(b.String(), "\n"))}
}

// reasonOf is err without the names of temporary files.
func reasonOf(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}

// kubectl returns shell commands that make the change in one key of a Secret. What the
// Secret holds stands in no command line.
func (c tokenChange) kubectl(key string) string {
	namespace := os.Getenv("POD_NAMESPACE")
	if namespace == "" {
		namespace = "tunnel-system"
	}
	filter := ""
	for _, l := range c.removed {
		f := " | grep -vxF '" + l + "'"
		if node, plain := plainToken(l); plain { // a change that removes one removes all of its node
			f = " | grep -v '^[[:blank:]]*" + strings.ReplaceAll(node, ".", "[.]") + "[[:blank:]]*:'"
		}
		if !strings.Contains(filter, f) {
			filter += f
		}
	}
	return fmt.Sprintf(`If it comes from a Secret, this does it (correct the two names first):

  NS=%s SECRET=tunnel-tokens
  { kubectl -n $NS get secret $SECRET -o jsonpath='{.data.%s}' | base64 -d%s; echo; printf '%%s\n' '%s'; } |
    base64 -w0 | sed 's|.*|{"data":{"%s":"&"}}|' | kubectl -n $NS patch secret $SECRET --patch-file /dev/stdin

A pod sees it about a minute later.`, namespace, strings.ReplaceAll(key, ".", `\.`), filter, strings.Join(c.added, "' '"), key)
}

// when writes a time for people.
func when(t time.Time) string { return t.UTC().Format("2006-01-02 15:04 UTC") }

// spell writes a duration as people do: 24h, 10m, 1h30m.
func spell(d time.Duration) string {
	s := d.Round(time.Second).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

func newTokenListCommand() *cobra.Command {
	var file string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list -c cloud.toml",
		Short: "Show what the token file holds; never a token",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := conf.ReadCloud(file, environment())
			if err != nil {
				return configError(err)
			}
			content, err := os.ReadFile(c.Server.TokenFile)
			if err != nil {
				return &exitError{exitRuntime, err}
			}
			lines, err := listTokens(string(content), time.Now())
			if err != nil {
				return configError(fmt.Errorf("%s: %w", c.Server.TokenFile, err))
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(lines)
			}
			if len(lines) == 0 {
				fmt.Fprintf(cmd.OutOrStdout(), "%s holds no token: tunnel token create -c %s --node NAME\n", c.Server.TokenFile, shellQuote(file))
				return nil
			}
			return printTokens(cmd.OutOrStdout(), lines)
		},
	}
	fileFlag(cmd, &file)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print an array of objects with node, kind, id, expires and state")
	return cmd
}

// listedToken is a line of the table.
type listedToken struct {
	Node    string     `json:"node"` // or "default"
	Kind    string     `json:"kind"`
	ID      string     `json:"id,omitempty"`
	Expires *time.Time `json:"expires,omitempty"`
	State   string     `json:"state"`
}

// The kinds in the table. A token that a file holds as it is has no ID: it may be short,
// and then its sum says what it is.
const (
	listedPlain      = "token, not hashed"
	listedRevocation = "revocation"
)

func listTokens(content string, now time.Time) ([]listedToken, error) {
	lines, err := auth.List(content)
	if err != nil {
		return nil, err
	}
	revoked := make(map[tunnel.NodeName]bool)
	for _, l := range lines {
		revoked[l.Node] = revoked[l.Node] || l.Kind == auth.KindRevoked
	}
	table := make([]listedToken, len(lines))
	for i, l := range lines {
		row := listedToken{Node: cmp.Or(string(l.Node), "default"), Kind: string(l.Kind), State: "good"}
		if l.Hashed {
			row.ID = l.ID
		} else if l.ID != "" {
			row.Kind = listedPlain
		}
		if !l.Expires.IsZero() {
			row.Expires = &l.Expires
		}
		switch {
		case l.Kind == auth.KindRevoked:
			row.Kind, row.State = listedRevocation, "nothing proves this node"
		case l.Kind == auth.KindRevokedBefore:
			row.Kind, row.State = listedRevocation, "certificates from before "+when(l.Before)+" are bad"
		case l.Node != "" && revoked[l.Node]:
			row.State = "revoked"
		case row.Expires != nil && !now.Before(l.Expires):
			row.State = "expired"
		}
		table[i] = row
	}
	return table, nil
}

func printTokens(out io.Writer, lines []listedToken) error {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "NODE\tKIND\tID\tEXPIRES\tSTATE")
	for _, l := range lines {
		expires := "never"
		if l.Expires != nil {
			expires = when(*l.Expires)
		}
		if l.Kind == listedRevocation {
			expires = "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", l.Node, l.Kind, cmp.Or(l.ID, "-"), expires, l.State)
	}
	return w.Flush()
}

func newTokenRevokeCommand() *cobra.Command {
	var file, node string
	cmd := &cobra.Command{
		Use:   "revoke -c cloud.toml --node NAME",
		Short: "Shut a node out: its tokens, its certificates, its session",
		Long: `revoke writes to the token file that nothing proves the node any more, and removes its
tokens. A running cloud ends the node's session and conns within a second.
` + "`tunnel token create`" + ` lets the node come back, but not with what it had.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			name, err := parseNode(node)
			if err != nil {
				return err
			}
			c, err := conf.ReadCloud(file, environment())
			if err != nil {
				return configError(err)
			}
			return revoke(c, name, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	fileFlag(cmd, &file)
	nodeFlag(cmd, &node)
	return cmd
}

// revoke writes that nothing proves a node.
func revoke(c *conf.Cloud, node tunnel.NodeName, out, notes io.Writer) error {
	var known bool
	change, err := editTokenFile(c.Server.TokenFile, func(content string) (string, error) {
		lines, err := auth.List(content)
		if err != nil {
			return "", err
		}
		known = slices.ContainsFunc(lines, func(l auth.Line) bool { return l.Node == node })
		return auth.RevokeNode(content, node)
	})
	switch {
	case err != nil:
		return &exitError{exitRuntime, err}
	case change.failed != nil:
		return change.unwritten(c)
	}
	fmt.Fprintf(out, "Node %s is revoked: no token and no certificate proves it any more, and a cloud that runs ends its session now.\n", node)
	if !known {
		fmt.Fprintf(notes, "No line of %s was about %s before: is the name right?\n", c.Server.TokenFile, node)
	}
	tellReplicas(notes, c, change)
	return nil
}
