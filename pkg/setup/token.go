package setup

import (
	"bufio"
	"cmp"
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

// Token is a new join token. Its exported fields are the JSON output of `tunnel token create`.
type Token struct {
	Node    tunnel.NodeName  `json:"node"`            // "": the token is for the nodes of the pattern Nodes
	Nodes   auth.NodePattern `json:"nodes,omitempty"` // "": the token is for Node alone
	Uses    int              `json:"uses,omitempty"`  // how many nodes may join by a token with Nodes
	ID      string           `json:"id"`
	Expires time.Time        `json:"expires"`
	Token   string           `json:"token"`
	Command string           `json:"command"` // the operator pastes it on the edge
	Lines   []string         `json:"lines"`   // the lines of the token file that make the token valid
	Written bool             `json:"written"` // the token file holds Lines

	ttl    time.Duration
	change tokenChange
}

// CreateToken makes a join token for node, see CreateTokens.
func CreateToken(c *conf.Cloud, h Host, node tunnel.NodeName, ttl time.Duration) (*Token, error) {
	all, err := CreateTokens(c, h, []tunnel.NodeName{node}, ttl)
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// CreateTokens makes a join token for each node, and writes the lines of all tokens, or none, to the token file of c.
// If this user may not write the file, CreateTokens returns an error and no token. If the file cannot be written for
// another reason, the Tokens are not Written, and Unwritten says what to do.
func CreateTokens(c *conf.Cloud, h Host, nodes []tunnel.NodeName, ttl time.Duration) ([]*Token, error) {
	var all []*Token
	for _, node := range nodes {
		if err := node.MayJoin(); err != nil {
			return nil, &Error{KindUsage, fmt.Errorf("--node: %w", err)}
		}
		all = append(all, &Token{Node: node, ttl: ttl})
	}
	return all, createTokens(c, h, all)
}

// CreateSharedToken makes a join token by which several nodes may join, as CreateTokens does.
func CreateSharedToken(
	c *conf.Cloud, h Host, nodes auth.NodePattern, uses int, ttl time.Duration,
) (*Token, error) {
	t := &Token{Nodes: nodes, Uses: uses, ttl: ttl}
	if c.Inventory == "" {
		return nil, configError(errors.New("after a restart, this cloud does not know which nodes have joined, and such a " +
			"token would be good for their names: set inventory in [mode.cloud.admin], or make a token for each node " +
			"with --nodes-from"))
	}
	if info, err := os.Lstat(c.Server.TokenFile); err == nil && info.Mode()&fs.ModeSymlink != 0 {
		return nil, fmt.Errorf("the cloud counts the uses of such a token in a file beside %s, where it cannot write: %w; "+
			"make a token for each node with --nodes-from", c.Server.TokenFile, errMounted)
	}
	return t, createTokens(c, h, []*Token{t})
}

// ReadNodes reads names of nodes, one on each line. It ignores blank lines and lines that begin with #.
func ReadNodes(in io.Reader) ([]tunnel.NodeName, error) {
	const most = 16 << 20 // bytes
	text, err := io.ReadAll(io.LimitReader(in, most+1))
	if err == nil && len(text) > most {
		err = fmt.Errorf("the list of nodes is longer than %d bytes: split it", most)
	}
	if err != nil {
		return nil, err
	}
	var all []tunnel.NodeName
	seen, number := make(map[tunnel.NodeName]bool), 0
	for line := range strings.Lines(string(text)) {
		number++
		name := strings.TrimSpace(line)
		if name == "" || name[0] == '#' {
			continue
		}
		node, err := tunnel.ParseNodeName(name)
		if err == nil {
			err = node.MayJoin()
		}
		switch {
		case err != nil:
			return nil, fmt.Errorf("line %d: %w", number, err)
		case name == "default":
			return nil, fmt.Errorf("line %d: in a token file default means any node, so that no node can have this name", number)
		case seen[node]:
			return nil, fmt.Errorf("line %d: %s is there twice", number, node)
		}
		seen[node] = true
		all = append(all, node)
	}
	if len(all) == 0 {
		return nil, errors.New("there is no name of a node: write one on each line")
	}
	return all, nil
}

// createTokens fills in tokens, and writes their lines.
func createTokens(c *conf.Cloud, h Host, tokens []*Token) error {
	if !c.Join.Signs() {
		return configError(errors.New("this cloud gives no certificates to nodes: " +
			"write ca and cakey (tunnel init makes them) or signer = \"kubernetes\" in [mode.cloud.join]"))
	}
	if c.Join.Address == "" {
		return configError(errors.New("mode.cloud.join: address is missing: " +
			"write what edges dial, such as address = \"tunnel.example.com:9000\", " +
			"and cloudca, the CA that signed cert in [mode.cloud.stream.server]"))
	}
	root, err := cloudRoot(c)
	if err != nil {
		return configError(err)
	}
	host, _, err := splitAddress(c.Join.Address)
	if err != nil {
		return configError(fmt.Errorf("mode.cloud.join: address: %w", err))
	}
	now := time.Now()
	var lines []auth.TokenLine
	for _, t := range tokens {
		secret := auth.NewToken()
		t.ID = strings.TrimPrefix(secret.Hashed(), "sha256:")[:8]
		t.Expires = now.Add(t.ttl).UTC().Truncate(time.Second)
		t.Token = auth.JoinToken{
			Address: c.Join.Address, ServerName: host, CA: sha256.Sum256(root.Raw), Node: t.Node, Nodes: t.Nodes, Secret: secret,
		}.Encode().Reveal()
		t.Command = "echo '" + t.Token + "' | sudo tunnel join"
		if t.Nodes != "" {
			t.Command += " --systemd" // each name can join once by this token, so a second join cannot add the unit
		}
		lines = append(lines, auth.TokenLine{
			Node: t.Node, Nodes: t.Nodes, Uses: t.Uses, Secret: secret, Join: true, Expires: t.Expires,
		})
	}
	change, err := tokenFileOf(c, h).edit(func(content string) (string, error) {
		// If the node was revoked, AddTokens revokes all its certificates from before time.Now(). edit holds the lock
		// here, so this time also covers certificates that the cloud issued while edit waited for the lock.
		return auth.AddTokens(content, lines, time.Now())
	})
	if err != nil {
		return err
	}
	if errors.Is(change.failed, fs.ErrPermission) {
		return change.unwritten() // these tokens are thrown away: as root, the next attempt makes others
	}
	for _, t := range tokens {
		t.change, t.Written = change, change.failed == nil
		t.Lines = change.linesOf(t.ID)
	}
	return nil
}

// linesOf returns the added lines that the token with this id needs: the line of the token, and the changed line that
// revokes earlier certificates of its node.
func (c tokenChange) linesOf(id string) []string {
	at := slices.IndexFunc(c.added, func(l string) bool { return strings.Contains(l, ":sha256:"+id) })
	if at < 0 {
		return nil
	}
	node, _, _ := strings.Cut(c.added[at], ":")
	var all []string
	for _, l := range c.added {
		if name, rest, _ := strings.Cut(l, ":"); name == node && (l == c.added[at] || strings.HasPrefix(rest, "revoked")) {
			all = append(all, l)
		}
	}
	return all
}

// Unwritten returns an error with instructions if the token file could not be written.
func (t *Token) Unwritten() error { return t.change.unwritten() }

// Explain prints the line that the operator pastes on the edge to out, and all remarks to notes. It returns an error
// if it could not write the line to out.
func (t *Token) Explain(out, notes io.Writer) error {
	if t.Nodes != "" {
		fmt.Fprintf(notes, "A token for %d nodes %s, good until %s (%s). It is a secret: whoever has it can join as such a "+
			"node that has not joined before.\nThe node's name is the host name, or that of tunnel join --node NAME.\n",
			t.Uses, t.Nodes, when(t.Expires), Spell(t.ttl))
		if t.change.file.replicas {
			fmt.Fprintf(notes, "Each replica counts the uses in its own %s.uses: unless the replicas share that folder, each "+
				"permits %d.\n", t.change.file.path, t.Uses)
		}
	} else {
		fmt.Fprintf(notes, "A token for node %s, good until %s (%s). It is a secret: whoever has it can join as that node.\n",
			t.Node, when(t.Expires), Spell(t.ttl))
	}
	fmt.Fprintf(notes, "On the edge, paste (the blank at its start keeps it out of most shells' history):\n\n")
	if _, err := fmt.Fprintf(out, "  %s\n", t.Command); err != nil {
		return err
	}
	if t.Nodes != "" {
		fmt.Fprintf(notes, "\nWithout systemd on the machine, leave --systemd out.\n")
	} else {
		fmt.Fprintf(notes, "\nWith --systemd behind it, the edge starts then and there, and with the machine.\n")
	}
	if t.Written {
		t.change.tellReplicas(notes)
	}
	return nil
}

// ExplainTokens prints a line for each token to out, with the node and the token. It prints all remarks to notes.
func ExplainTokens(all []*Token, out, notes io.Writer) error {
	fmt.Fprintf(notes, "%d tokens, good until %s (%s). Each is a secret: whoever has it can join as its node.\n"+
		"On each edge: echo 'TOKEN' | sudo tunnel join\n\n", len(all), when(all[0].Expires), Spell(all[0].ttl))
	for _, t := range all {
		if _, err := fmt.Fprintf(out, "%s %s\n", t.Node, t.Token); err != nil {
			return err
		}
	}
	if all[0].Written {
		all[0].change.tellReplicas(notes)
	}
	return nil
}

// tellReplicas prints which lines the operator must change in the token files of the other replicas, if there are any.
func (c tokenChange) tellReplicas(notes io.Writer) {
	if !c.file.replicas {
		return
	}
	fmt.Fprintf(notes, "\nThis cloud has other replicas, and each reads a token file of its own. "+
		"Unless %s is shared, change theirs as well:\n\n", c.file.path)
	c.show(notes)
}

// show prints the removed and the added lines of a change. It leaves out tokens in plain text.
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

// reasonOf returns err without its path, since the path may be that of a temporary file.
func reasonOf(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}

// kubectl returns shell commands that make the change in one key of a Secret. The commands send the Secret's content
// through pipes, since other users can read command lines. They change nothing if the Secret cannot be read, or if
// somebody else changes it meanwhile (resourceVersion).
func (c tokenChange) kubectl() string {
	key, namespace := filepath.Base(c.file.path), cmp.Or(c.file.namespace, "tunnel-system")
	filter := ""
	for _, l := range c.removed {
		f := " | grep -vxF '" + l + "'"
		if node, plain := plainToken(l); plain { // to hide the token, the pattern matches every line of the node
			f = everyLineOf(node)
		}
		if !strings.Contains(filter, f) {
			filter += f
		}
	}
	for _, l := range c.added {
		if node, ok := strings.CutSuffix(l, ":revoked"); ok { // the Secret may hold tokens that this pod does not see yet
			filter = everyLineOf(node)
		}
	}
	return fmt.Sprintf(`If it comes from a Secret, these commands change it; correct the two names first.
With cert-manager, the Secret is tunnel-tokens: make the same change where the chart or the overlay writes it.

  NS=%s SECRET=tunnel-cloud
  old=$(kubectl -n $NS get secret $SECRET -o jsonpath='{.metadata.resourceVersion} {.data.%s}') &&
    { printf '%%s' "${old#* }" | base64 -d%s; echo; printf '%%s\n' '%s'; } | base64 -w0 |
    sed "s|.*|{\"metadata\":{\"resourceVersion\":\"${old%%%% *}\"},\"data\":{\"%s\":\"&\"}}|" |
    kubectl -n $NS patch secret $SECRET --patch-file /dev/stdin

Each pod sees it within about two minutes, one earlier than another. Until then, a join by a new token may be refused,
and another token command here would not know of this change.`,
		namespace, strings.ReplaceAll(key, ".", `\.`), filter, strings.Join(c.added, "' '"), key)
}

// everyLineOf returns the part of a shell pipe that removes the lines of a node from a token file.
func everyLineOf(node string) string {
	return " | grep -v '^[[:blank:]]*" + strings.ReplaceAll(node, ".", "[.]") + "[[:blank:]]*:'"
}

// when returns a time as operators read it, in UTC.
func when(t time.Time) string { return t.UTC().Format("2006-01-02 15:04 UTC") }

// Spell returns a duration as text without units that are zero, such as 24h, 10m or 1h30m.
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
	// For a token for several nodes: how many nodes may join by it, how many have joined, and when the last one joined.
	Uses     int        `json:"uses,omitempty"`
	Used     int        `json:"used,omitempty"`
	LastUsed *time.Time `json:"last_used,omitempty"`
}

// Kinds of lines that auth.Kind lacks. An ID is the begin of a token's SHA-256. ListTokens gives no ID to a token that
// the file holds in plain text: if the token is short, an attacker could guess it by the ID.
const (
	listedPlain      = "token, not hashed"
	listedRevocation = "revocation"
)

// ListTokens returns what the token file of a cloud holds.
func ListTokens(c *conf.Cloud) ([]ListedToken, error) {
	content, _, err := tunnel.ReadFile(c.Server.TokenFile, auth.MaxTokenFile)
	if err != nil {
		return nil, err
	}
	used, err := auth.ReadUses(c.Server.TokenFile)
	if err != nil {
		return nil, err
	}
	lines, err := listTokens(string(content), used, time.Now())
	if err != nil {
		return nil, configError(fmt.Errorf("%s: %w", c.Server.TokenFile, err))
	}
	return lines, nil
}

func listTokens(content string, used map[string]auth.Used, now time.Time) ([]ListedToken, error) {
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
		row := ListedToken{
			Node: cmp.Or(string(l.Node), string(l.Nodes), "default"), Kind: string(l.Kind), State: "good", Uses: l.Uses,
		}
		if u := used[l.ID]; l.Nodes != "" && u.Count > 0 {
			row.Used, row.LastUsed = u.Count, &u.Last
		}
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
		case row.Uses > 0 && row.Used >= row.Uses:
			row.State = "used up"
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
	text := bufio.NewWriter(out) // a tabwriter writes each cell with a call of its own
	w := tabwriter.NewWriter(text, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "NODE\tKIND\tID\tEXPIRES\tSTATE\tUSED")
	for _, l := range lines {
		expires := "never"
		if l.Expires != nil {
			expires = when(*l.Expires)
		}
		if l.Kind == listedRevocation {
			expires = "-"
		}
		used := "-"
		if l.Uses > 0 {
			used = fmt.Sprintf("used %d of %d", l.Used, l.Uses)
		}
		if l.LastUsed != nil {
			used += ", last " + ago(time.Since(*l.LastUsed)) + " ago"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", l.Node, l.Kind, cmp.Or(l.ID, "-"), expires, l.State, used)
	}
	return cmp.Or(w.Flush(), text.Flush())
}

// ago returns the time since an event in its largest unit, such as "3 h".
func ago(d time.Duration) string {
	switch {
	case d >= 48*time.Hour:
		return fmt.Sprintf("%d days", d/(24*time.Hour))
	case d >= time.Hour:
		return fmt.Sprintf("%d h", d/time.Hour)
	}
	return fmt.Sprintf("%d min", max(0, d/time.Minute))
}

// Withdraw removes the tokens for the nodes of a pattern from the token file. It prints the result to out, and remarks
// to notes.
func Withdraw(c *conf.Cloud, h Host, nodes auth.NodePattern, out, notes io.Writer) error {
	removed := 0
	change, err := tokenFileOf(c, h).edit(func(content string) (edited string, err error) {
		edited, removed, err = auth.RemovePattern(content, nodes)
		return edited, err
	})
	switch {
	case err != nil:
		return err
	case removed == 0:
		return fmt.Errorf("%s has no token for the nodes %s", c.Server.TokenFile, nodes)
	case change.failed != nil:
		return change.unwritten()
	}
	fmt.Fprintf(out, "No node joins by the token for %s any more. Nodes that have joined by it keep their certificates: "+
		"revoke them one by one.\n", nodes)
	change.tellReplicas(notes)
	return nil
}

// Revoke removes the tokens of a node from the token file, and adds a line to the file: no credential of the node is
// valid. Revoke prints the result to out, and remarks to notes.
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
	fmt.Fprintf(out, "Node %s is revoked in %s. A cloud that reads this file accepts no token and no certificate of the "+
		"node any more, and ends its session within a second.\n", node, c.Server.TokenFile)
	if !known {
		fmt.Fprintf(notes, "No line of %s was about %s before: is the name right?\n", c.Server.TokenFile, node)
	}
	change.tellReplicas(notes)
	return nil
}
