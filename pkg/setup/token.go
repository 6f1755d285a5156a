package setup

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The lifetime of a join token.
const (
	DefaultTTL = 24 * time.Hour
	MinTTL     = time.Minute
	MaxTTL     = 365 * 24 * time.Hour
)

// adoption is the time within which a running cloud reads a changed token file.
const adoption = time.Second

// Token is a new join token. Its exported fields are the JSON output of `tunnel token create`.
type Token struct {
	Node    tunnel.NodeName `json:"node"`
	ID      string          `json:"id"`
	Expires time.Time       `json:"expires"`
	Token   string          `json:"token"`
	Command string          `json:"command"` // the operator pastes it on the edge
	Lines   []string        `json:"lines"`   // that the token file needs
	Written bool            `json:"written"` // the token file holds Lines

	ttl    time.Duration
	change tokenChange
}

// CreateToken makes a join token for node and writes its line to the token file of c. Without
// permission to write there, CreateToken returns an error and no token. Any other reason not
// to write makes a Token that is not Written; Unwritten says what to do.
func CreateToken(c *conf.Cloud, h Host, node tunnel.NodeName, ttl time.Duration) (*Token, error) {
	if err := node.MayJoin(); err != nil {
		return nil, &Error{KindUsage, fmt.Errorf("--node: %w", err)}
	}
	if !c.Join.Signs() {
		return nil, configError(errors.New("this cloud gives no certificates to nodes: " +
			"write ca and cakey (tunnel init makes them) or signer = \"kubernetes\" in [mode.cloud.join]"))
	}
	if c.Join.Address == "" {
		return nil, configError(errors.New("mode.cloud.join: address is missing: " +
			"write what edges dial, such as address = \"tunnel.example.com:9000\", " +
			"and cloudca, the CA that signed cert in [mode.cloud.stream.server]"))
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
	t := &Token{Node: node, Expires: now.Add(ttl).UTC().Truncate(time.Second), ttl: ttl}
	t.Token = auth.JoinToken{
		Address: c.Join.Address, ServerName: host, CA: sha256.Sum256(root.Raw), Node: node, Secret: secret,
	}.Encode().Reveal()
	t.Command = "echo '" + t.Token + "' | sudo tunnel join"
	line := auth.TokenLine{Node: node, Secret: secret, Join: true, Expires: t.Expires}
	t.change, err = tokenFileOf(c, h).edit(func(content string) (string, error) {
		// For a revoked node, AddToken revokes the certificates from before this time. The wait for
		// the lock is over here, so certificates that were issued during the wait count, too.
		return auth.AddToken(content, line, time.Now())
	})
	if err != nil {
		return nil, err
	}
	if errors.Is(t.change.failed, fs.ErrPermission) {
		return nil, t.Unwritten() // the next attempt makes another token
	}
	t.ID = strings.TrimPrefix(secret.Hashed(), "sha256:")[:8]
	t.Lines, t.Written = t.change.added, t.change.failed == nil
	return t, nil
}

// Unwritten returns an error with instructions if the token file could not be written.
func (t *Token) Unwritten() error { return t.change.unwritten() }

// AwaitAdoption waits until a running cloud has read the token, or until ctx is done.
func (t *Token) AwaitAdoption(ctx context.Context) {
	if !t.Written {
		return
	}
	select {
	case <-time.After(adoption):
	case <-ctx.Done():
	}
}

// Explain prints the line to paste to out, and everything else to notes. An error says that out does not
// have the line.
func (t *Token) Explain(out, notes io.Writer) error {
	fmt.Fprintf(notes, "A token for node %s, good until %s (%s). It is a secret: whoever has it can join as that node.\n",
		t.Node, when(t.Expires), Spell(t.ttl))
	fmt.Fprintf(notes, "On the edge, paste (the blank at its start keeps it out of most shells' history):\n\n")
	if _, err := fmt.Fprintf(out, "  %s\n", t.Command); err != nil {
		return err
	}
	fmt.Fprintf(notes, "\nWith --systemd behind it, the edge starts then and there, and with the machine.\n")
	if t.Written {
		t.change.tellReplicas(notes)
	}
	return nil
}

// tellReplicas prints the change for the token files of the other replicas, if there are any.
func (c tokenChange) tellReplicas(notes io.Writer) {
	if !c.file.replicas {
		return
	}
	fmt.Fprintf(notes, "\nThis cloud has other replicas, and each reads a token file of its own. "+
		"Unless %s is shared, change theirs as well:\n\n", c.file.path)
	c.show(notes)
}

// show prints the lines of a change, without any token.
func (c tokenChange) show(w io.Writer) {
	for _, l := range c.removed {
		fmt.Fprintf(w, "  remove  %s\n", shownLine(l))
	}
	for _, l := range c.added {
		fmt.Fprintf(w, "  add     %s\n", l)
	}
}

// unwritten returns an error with instructions if the token file could not be written.
func (c tokenChange) unwritten() error {
	if c.failed == nil {
		return nil
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s was NOT changed: %v.\n", c.file.path, reasonOf(c.failed))
	if errors.Is(c.failed, fs.ErrPermission) {
		b.WriteString("Run this again as its owner, such as with sudo.")
		return errors.New(b.String())
	}
	b.WriteString("The change takes effect when the file is edited like this:\n\n")
	c.show(&b)
	if errors.Is(c.failed, errMounted) || errors.Is(c.failed, syscall.EROFS) {
		b.WriteString("\n" + c.kubectl())
	}
	return errors.New(strings.TrimRight(b.String(), "\n"))
}

// reasonOf returns err without the path in it, which may be that of a temporary file.
func reasonOf(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}

// kubectl returns shell commands that make the change in one key of a Secret. The Secret's
// content goes through pipes, so that it is in no command line.
func (c tokenChange) kubectl() string {
	key, namespace := filepath.Base(c.file.path), cmp.Or(c.file.namespace, "tunnel-system")
	filter := ""
	for _, l := range c.removed {
		f := " | grep -vxF '" + l + "'"
		if node, plain := plainToken(l); plain { // such a change removes every line of the node
			f = " | grep -v '^[[:blank:]]*" + strings.ReplaceAll(node, ".", "[.]") + "[[:blank:]]*:'"
		}
		if !strings.Contains(filter, f) {
			filter += f
		}
	}
	return fmt.Sprintf(`If it comes from a Secret, this does it (correct the two names first):

  NS=%s SECRET=tunnel-cloud
  { kubectl -n $NS get secret $SECRET -o jsonpath='{.data.%s}' | base64 -d%s; echo; printf '%%s\n' '%s'; } |
    base64 -w0 | sed 's|.*|{"data":{"%s":"&"}}|' | kubectl -n $NS patch secret $SECRET --patch-file /dev/stdin

A pod sees it about a minute later.`,
		namespace, strings.ReplaceAll(key, ".", `\.`), filter, strings.Join(c.added, "' '"), key)
}

// when writes a time for operators.
func when(t time.Time) string { return t.UTC().Format("2006-01-02 15:04 UTC") }

// Spell writes a duration without zero units: 24h, 10m, 1h30m.
func Spell(d time.Duration) string {
	s := d.Round(time.Second).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// ListedToken is a line of the token file, as `tunnel token list` shows it.
type ListedToken struct {
	Node    string     `json:"node"` // or "default"
	Kind    string     `json:"kind"`
	ID      string     `json:"id,omitempty"`
	Expires *time.Time `json:"expires,omitempty"`
	State   string     `json:"state"`
}

// Kinds that auth.Kind does not have. A token that the file holds in plain text gets no ID:
// if the token is short, its SHA-256 gives it away.
const (
	listedPlain      = "token, not hashed"
	listedRevocation = "revocation"
)

// ListTokens returns what the token file of a cloud holds.
func ListTokens(c *conf.Cloud) ([]ListedToken, error) {
	content, err := os.ReadFile(c.Server.TokenFile)
	if err != nil {
		return nil, err
	}
	lines, err := listTokens(string(content), time.Now())
	if err != nil {
		return nil, configError(fmt.Errorf("%s: %w", c.Server.TokenFile, err))
	}
	return lines, nil
}

func listTokens(content string, now time.Time) ([]ListedToken, error) {
	lines, err := auth.List(content)
	if err != nil {
		return nil, err
	}
	revoked := make(map[tunnel.NodeName]bool)
	for _, l := range lines {
		revoked[l.Node] = revoked[l.Node] || l.Kind == auth.KindRevoked
	}
	table := make([]ListedToken, len(lines))
	for i, l := range lines {
		row := ListedToken{Node: cmp.Or(string(l.Node), "default"), Kind: string(l.Kind), State: "good"}
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

// PrintTokens prints lines as a table. config is the path of the cloud's configuration file.
func PrintTokens(out io.Writer, c *conf.Cloud, config string, lines []ListedToken) error {
	if len(lines) == 0 {
		_, err := fmt.Fprintf(out, "%s holds no token: tunnel token create -c %s --node NAME\n",
			c.Server.TokenFile, shellQuote(config))
		return err
	}
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

// Revoke removes the tokens of a node from the token file, and writes there that nothing
// proves the node. It prints the result to out, and remarks to notes.
func Revoke(c *conf.Cloud, h Host, node tunnel.NodeName, out, notes io.Writer) error {
	var known bool
	change, err := tokenFileOf(c, h).edit(func(content string) (string, error) {
		lines, err := auth.List(content)
		if err != nil {
			return "", err
		}
		known = slices.ContainsFunc(lines, func(l auth.Line) bool { return l.Node == node })
		return auth.RevokeNode(content, node)
	})
	switch {
	case err != nil:
		return err
	case change.failed != nil:
		return change.unwritten()
	}
	fmt.Fprintf(out, "Node %s is revoked: no token and no certificate proves it any more, "+
		"and a cloud that runs ends its session now.\n", node)
	if !known {
		fmt.Fprintf(notes, "No line of %s was about %s before: is the name right?\n", c.Server.TokenFile, node)
	}
	change.tellReplicas(notes)
	return nil
}
