package auth

import (
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"tunnel/pkg/tunnel"
)

// The functions of this file change the content of a token file for the tools, and leave
// what they are not asked about as it is: comments, order, line ends. Content that is
// malformed is an error that names the line.

// Kind is what a line of the token file is for.
type Kind string

// The kinds of lines.
const (
	KindToken         Kind = "token"          // opens sessions of its node
	KindJoin          Kind = "join token"     // gets a certificate for its node
	KindShared        Kind = "shared"         // a default: line, for any node
	KindRevoked       Kind = "revoked"        // nothing proves the node
	KindRevokedBefore Kind = "revoked before" // certificates issued earlier do not prove it
)

// Line is one line of a token file, as far as it may be shown.
type Line struct {
	Number  int
	Node    tunnel.NodeName // "": any, a default: line
	Kind    Kind
	ID      string    // the first 8 digits of the token's SHA-256; "": no token
	Hashed  bool      // the file holds the sum, not the token
	Expires time.Time // zero: never
	Before  time.Time // of KindRevokedBefore
}

// TokenLine is a line that AddToken adds.
type TokenLine struct {
	Node    tunnel.NodeName
	Secret  Secret
	Join    bool      // it gets a certificate and opens no session
	Expires time.Time // zero: never
}

// List returns the lines that say something, in order.
func List(content string) ([]Line, error) {
	parsed, err := wholeFile(content)
	if err != nil {
		return nil, err
	}
	lines := make([]Line, len(parsed))
	for i, l := range parsed {
		lines[i] = Line{Number: l.number, Node: l.node, Kind: l.kind(), Hashed: l.hashed, Expires: l.token.expires, Before: l.before}
		if !l.revoked {
			lines[i].ID = hex.EncodeToString(l.token.sum[:4])
		}
	}
	return lines, nil
}

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

// AddToken adds a line, behind the last one of its node. A node that was revoked may join
// again by the new token, but not by a certificate from before now.
func AddToken(content string, t TokenLine, now time.Time) (string, error) {
	lines, err := wholeFile(content)
	if err != nil {
		return "", err
	}
	if _, err := tunnel.ParseNodeName(string(t.Node)); err != nil {
		return "", fmt.Errorf("adding a token: %w", err)
	}
	if err := checkToken(t.Secret.Reveal()); err != nil {
		return "", fmt.Errorf("adding a token for node %s: %w", t.Node, err)
	}
	text := string(t.Node) + ":" + t.Secret.Hashed()
	if t.Join {
		text += " " + wordJoin
	}
	if !t.Expires.IsZero() {
		text += " " + wordExpires + t.Expires.UTC().Format(time.RFC3339)
	}
	e := newEdit(content)
	at := len(e.lines)
	for _, l := range lines {
		if l.node != t.Node {
			continue
		}
		at = l.number
		if l.kind() == KindRevoked {
			e.replace(l.number, revokedBefore(t.Node, now))
		}
	}
	e.insert(at, text)
	return e.String(), nil
}

// revokedBefore is the line that makes certificates bad which were issued before now. Times
// in certificates are whole seconds, so that those of the second that has begun are among
// them.
func revokedBefore(node tunnel.NodeName, now time.Time) string {
	next := now.UTC().Truncate(time.Second).Add(time.Second)
	return string(node) + ":" + wordRevoked + " " + wordBefore + next.Format(time.RFC3339)
}

// RevokeNode revokes a node: its tokens leave the file, and nothing else proves it any
// more.
func RevokeNode(content string, node tunnel.NodeName) (string, error) {
	lines, err := wholeFile(content)
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
	e.insert(at, string(node)+":"+wordRevoked)
	return e.String(), nil
}

// wholeFile reads every line; default: ones are somebody else's question.
func wholeFile(content string) ([]line, error) {
	var problems []error
	lines := parseLines(content, func(number int, err error) bool {
		problems = append(problems, fmt.Errorf("line %d: %w", number, err))
		return len(problems) < maxProblems
	})
	return lines, errors.Join(problems...)
}

// edit is a file's lines, with their ends.
type edit struct {
	lines []string
	end   string // of new lines: what the first one has
}

func newEdit(content string) *edit {
	e := &edit{lines: slices.Collect(strings.Lines(content)), end: "\n"}
	if len(e.lines) > 0 && strings.HasSuffix(e.lines[0], "\r\n") {
		e.end = "\r\n"
	}
	if n := len(e.lines); n > 0 && !strings.HasSuffix(e.lines[n-1], "\n") {
		e.lines[n-1] += e.end
	}
	return e
}

// replace, insert and remove count lines from 1; insert does so behind that line.
func (e *edit) replace(n int, text string) { e.lines[n-1] = text + e.end }
func (e *edit) insert(n int, text string)  { e.lines = slices.Insert(e.lines, n, text+e.end) }
func (e *edit) remove(n int)               { e.lines = slices.Delete(e.lines, n-1, n) }

func (e *edit) String() string { return strings.Join(e.lines, "") }
