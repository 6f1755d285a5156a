package auth

import (
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// The functions of this file edit the content of a token file, for the command line. They leave other
// lines as they are: comments, order, line ends. Malformed content is an error that names the line.

// Kind is the purpose of a line of the token file.
type Kind string

// The kinds of lines.
const (
	KindToken         Kind = "token"          // opens sessions of its node
	KindJoin          Kind = "join token"     // gets a certificate for its node
	KindShared        Kind = "shared"         // a default: line, for any node
	KindRevoked       Kind = "revoked"        // no proof of the node is good
	KindRevokedBefore Kind = "revoked before" // certificates issued earlier are revoked
)

// Line is one line of a token file, without its secret.
type Line struct {
	Number  int             // from 1
	Node    tunnel.NodeName // "": the line is for the nodes of Nodes, or for any node (default:)
	Nodes   NodePattern     // the nodes of a token for several nodes
	Uses    int             // how many nodes may use a token for several nodes
	Kind    Kind
	ID      string    // the first 8 hexadecimal digits of the token's SHA-256; "": no token
	Hashed  bool      // the file holds the SHA-256, not the token
	Expires time.Time // zero: never
	Before  time.Time // set for KindRevokedBefore: certificates issued earlier are revoked
}

// TokenLine is a line that AddToken adds. A line for one node sets Node. A line for several nodes sets Nodes, Uses and
// Expires.
type TokenLine struct {
	Node    tunnel.NodeName
	Nodes   NodePattern
	Uses    int
	Secret  Secret
	Join    bool      // gets a certificate and opens no session
	Expires time.Time // zero: never
}

// List returns the lines of the file in order, without comments and blank lines.
func List(content string) ([]Line, error) {
	parsed, err := parseAll(content)
	if err != nil {
		return nil, err
	}
	lines := make([]Line, len(parsed))
	for i, l := range parsed {
		lines[i] = Line{
			Number: l.number, Node: l.node, Kind: l.kind(),
			Nodes: l.token.nodes, Uses: l.token.uses, Hashed: l.hashed, Expires: l.token.expires, Before: l.before,
		}
		if !l.revoked {
			lines[i].ID = hex.EncodeToString(l.token.sum[:4])
		}
	}
	return lines, nil
}

// kind returns the kind of a parsed line.
func (l line) kind() Kind {
	switch {
	case l.revoked && l.before.IsZero():
		return KindRevoked
	case l.revoked:
		return KindRevokedBefore
	case l.token.join:
		return KindJoin
	case l.node == "":
		return KindShared
	}
	return KindToken
}

// AddTokens adds a line for each token, as AddToken does. It parses the file only once: its running time grows with
// the size of the file, not with the square of the number of tokens.
func AddTokens(content string, all []TokenLine, now time.Time) (string, error) {
	lines, err := parseAll(content)
	if err != nil {
		return "", err
	}
	behind, rest := make(map[int][]string), newEdit(content) // behind: the lines to insert behind each line number
	last := make(map[tunnel.NodeName]int)
	revoked, old := make(map[tunnel.NodeName][]int), make(map[tunnel.NodeName][]int) // numbers of lines
	for _, l := range lines {
		if l.node == "" {
			continue
		}
		last[l.node] = l.number
		switch l.kind() {
		case KindRevoked:
			revoked[l.node] = append(revoked[l.node], l.number)
		case KindRevokedBefore:
		default:
			old[l.node] = append(old[l.node], l.number)
		}
	}
	for _, t := range all {
		text, err := t.text()
		if err != nil {
			return "", err
		}
		at, ok := last[t.Node]
		if !ok {
			at = len(rest.lines)
		}
		behind[at] = append(behind[at], text)
		for _, number := range revoked[t.Node] {
			rest.replace(number, revokedBefore(t.Node, now))
			for _, token := range old[t.Node] { // it would be good again
				rest.lines[token-1] = ""
			}
		}
	}
	e := &edit{newline: rest.newline}
	for number := range len(rest.lines) + 1 {
		if number > 0 {
			e.lines = append(e.lines, rest.lines[number-1])
		}
		for _, text := range behind[number] {
			e.lines = append(e.lines, text+e.newline)
		}
	}
	return e.String(), nil
}

// AddToken adds a line behind the last line of its node. If the node was revoked, it can join with the
// new token, but neither with an older one nor with a certificate from before now.
func AddToken(content string, t TokenLine, now time.Time) (string, error) {
	return AddTokens(content, []TokenLine{t}, now)
}

// text returns the line.
func (t TokenLine) text() (string, error) {
	name := string(t.Nodes)
	if t.Nodes == "" {
		if _, err := tunnel.ParseNodeName(string(t.Node)); err != nil {
			return "", fmt.Errorf("adding a token: %w", err)
		}
		name = string(t.Node)
	}
	if err := checkToken(t.Secret.Reveal()); err != nil {
		return "", fmt.Errorf("adding a token for %s: %w", name, err)
	}
	text := name + ":" + t.Secret.Hashed()
	if t.Join {
		text += " " + keywordJoin
	}
	if t.Nodes != "" {
		text += " " + keywordUses + strconv.Itoa(t.Uses)
	}
	if !t.Expires.IsZero() {
		text += " " + keywordExpires + t.Expires.UTC().Format(time.RFC3339)
	}
	if _, err := parseLine(text); err != nil {
		return "", fmt.Errorf("adding a token for %s: %w", name, err)
	}
	return text, nil
}

// revokedBefore returns the line that revokes certificates issued before now. Times in certificates are
// whole seconds, so the time in the line is rounded up: it includes the current second.
func revokedBefore(node tunnel.NodeName, now time.Time) string {
	next := now.UTC().Truncate(time.Second).Add(time.Second)
	return string(node) + ":" + keywordRevoked + " " + keywordBefore + next.Format(time.RFC3339)
}

// RevokeNode revokes a node: it removes the node's lines and adds a line that revokes every proof.
func RevokeNode(content string, node tunnel.NodeName) (string, error) {
	lines, err := parseAll(content)
	if err != nil {
		return "", err
	}
	if _, err := tunnel.ParseNodeName(string(node)); err != nil {
		return "", fmt.Errorf("revoking a node: %w", err)
	}
	e := newEdit(content)
	at := len(e.lines)
	for _, l := range slices.Backward(lines) {
		if l.node == node {
			at = l.number - 1
			e.remove(l.number)
		}
	}
	e.insert(at, string(node)+":"+keywordRevoked)
	return e.String(), nil
}

// RemovePattern removes the tokens for the nodes of a pattern. Certificates that nodes got by these tokens stay good.
func RemovePattern(content string, p NodePattern) (edited string, removed int, err error) {
	lines, err := parseAll(content)
	if err != nil {
		return "", 0, err
	}
	e := newEdit(content)
	for _, l := range slices.Backward(lines) {
		if l.token.nodes == p {
			e.remove(l.number)
			removed++
		}
	}
	return e.String(), removed, nil
}

// parseAll parses every line. It permits default: lines: the cloud decides whether they are allowed.
func parseAll(content string) ([]line, error) {
	var problems []error
	lines := parseLines(content, func(number int, err error) bool {
		problems = append(problems, fmt.Errorf("line %d: %w", number, err))
		return len(problems) < maxProblems
	})
	return lines, errors.Join(problems...)
}

// edit holds the lines of a file, each with its line end.
type edit struct {
	lines   []string
	newline string // line end for new lines, as in the first line
}

func newEdit(content string) *edit {
	e := &edit{lines: slices.Collect(strings.Lines(content)), newline: "\n"}
	if len(e.lines) > 0 && strings.HasSuffix(e.lines[0], "\r\n") {
		e.newline = "\r\n"
	}
	if n := len(e.lines); n > 0 && !strings.HasSuffix(e.lines[n-1], "\n") {
		e.lines[n-1] += e.newline
	}
	return e
}

// replace, insert and remove take line numbers from 1. insert adds text behind line n.
func (e *edit) replace(n int, text string) { e.lines[n-1] = text + e.newline }
func (e *edit) insert(n int, text string)  { e.lines = slices.Insert(e.lines, n, text+e.newline) }
func (e *edit) remove(n int)               { e.lines = slices.Delete(e.lines, n-1, n) }

func (e *edit) String() string { return strings.Join(e.lines, "") }
