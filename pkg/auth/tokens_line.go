package auth

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"tunnel.example/tunnel/pkg/tunnel"
)

// The keywords of a line.
const (
	keywordRevoked = "revoked"  // in place of the token
	keywordBefore  = "before="  // behind revoked: followed by a time
	keywordJoin    = "join"     // behind the token
	keywordExpires = "expires=" // behind the token: followed by a time
	keywordUses    = "uses="    // behind the token of a pattern: followed by a number
)

// minTokenChars is the least length of a token that nobody can guess, in characters: 22 characters of
// base64 hold 128 random bits.
const minTokenChars = 22

// line is a parsed line of a token file that is neither blank nor a comment.
type line struct {
	number  int             // from 1
	node    tunnel.NodeName // "": the line is for several nodes, or for any node (default:)
	revoked bool            // the line revokes and has no token
	before  time.Time       // with revoked: only certificates issued earlier are revoked; zero: every proof
	hashed  bool            // the file holds the SHA-256 of the token
	short   bool            // the file holds the token in plain form, with fewer than minTokenChars characters
	token   token
}

// token is a token of the file with its attributes. It never changes.
type token struct {
	sum     sum       // SHA-256
	join    bool      // gets a certificate and opens no session
	expires time.Time // zero: never
	hashed  bool      // the file holds sum, not the token
	// nodes and uses are for a token for several nodes: its nodes, and how many of them may use it.
	nodes NodePattern
	uses  int
}

// live reports whether the token has not expired at now.
func (t token) live(now time.Time) bool { return t.expires.IsZero() || now.Before(t.expires) }

// parseLines parses the lines of a token file. It calls report for each bad line, and stops when report
// returns false. No error repeats any part of a line: if somebody swaps node and token, the token must
// not appear in the log.
func parseLines(content string, report func(number int, err error) (goOn bool)) []line {
	var lines []line
	n := 0
	for text := range strings.Lines(content) {
		n++
		text = strings.TrimSpace(text)
		if text == "" || text[0] == '#' {
			continue
		}
		l, err := parseLine(text)
		if err != nil {
			if !report(n, err) {
				break
			}
			continue
		}
		l.number = n
		lines = append(lines, l)
	}
	return lines
}

// parseLine parses a line that is neither blank nor a comment.
func parseLine(text string) (line, error) {
	name, rest, ok := strings.Cut(text, ":")
	if !ok {
		return line{}, errors.New("no colon in the line; write node:token or node:sha256:HEX")
	}
	words := strings.FieldsFunc(rest, func(r rune) bool { return r == ' ' || r == '\t' })
	if len(words) == 0 {
		return line{}, errors.New("the token is empty")
	}
	l := line{revoked: words[0] == keywordRevoked, hashed: strings.HasPrefix(words[0], hashPrefix)}
	var err error
	if !l.revoked {
		if l.token.sum, err = parseSum(words[0]); err != nil {
			return line{}, err
		}
		l.token.hashed = l.hashed
		l.short = !l.hashed && utf8.RuneCountInString(words[0]) < minTokenChars
	}
	name = strings.TrimSpace(name)
	switch {
	case strings.Contains(name, "*"):
		if l.token.nodes, err = ParseNodePattern(name); err != nil {
			return line{}, err
		}
	case name != sharedName:
		if l.node, err = tunnel.ParseNodeName(name); err != nil {
			return line{}, errors.New("the text before the colon is not a node name " +
				"(RFC 1123: lower-case letters, digits, '-' and '.')")
		}
	case l.revoked:
		return line{}, errors.New("only a node can be revoked; remove the default: lines to revoke their tokens")
	}
	for _, word := range words[1:] {
		if err := l.parseAttribute(word); err != nil {
			return line{}, err
		}
	}
	return l, l.checkPattern()
}

// checkPattern returns an error for a line for several nodes that sets no limits to its token.
func (l *line) checkPattern() error {
	t := l.token
	switch {
	case t.nodes == "" && t.uses != 0:
		return errors.New("only the token of a pattern, such as edge-*, has uses=NUMBER")
	case t.nodes == "":
		return nil
	case l.revoked:
		return errors.New("only a node can be revoked, no pattern; remove the line to withdraw its token")
	case !l.hashed || !t.join || t.uses == 0 || t.expires.IsZero():
		return errors.New("the token of a pattern is sha256:HEX, and has join, uses=NUMBER and expires=TIME behind it; " +
			"tunnel token create writes such a line")
	}
	return nil
}

// MaxUses is the largest number of uses of a token.
const MaxUses = 100_000

// parseAttribute parses a word behind the token or behind revoked. Each attribute may appear once.
func (l *line) parseAttribute(word string) error {
	before, isBefore := strings.CutPrefix(word, keywordBefore)
	expires, isExpires := strings.CutPrefix(word, keywordExpires)
	uses, isUses := strings.CutPrefix(word, keywordUses)
	switch {
	case l.revoked && isBefore && l.before.IsZero():
		return parseTime(&l.before, keywordBefore, before)
	case l.revoked:
		return errors.New("after revoked, only before=TIME may follow, once; a comment needs a line of its own")
	case word == keywordJoin && !l.token.join:
		l.token.join = true
		return nil
	case isExpires && l.token.expires.IsZero():
		return parseTime(&l.token.expires, keywordExpires, expires)
	}
	if isUses && l.token.uses == 0 {
		n, err := strconv.Atoi(uses)
		if err != nil || n < 1 || n > MaxUses {
			return fmt.Errorf("%s needs a number from 1 to %d after it", keywordUses, MaxUses)
		}
		l.token.uses = n
		return nil
	}
	return errors.New("after the token, only join and expires=TIME may follow, each once; " +
		"a comment needs a line of its own")
}

// parseTime parses the time behind keyword word into t. The zero time is refused, since it means unset.
func parseTime(t *time.Time, word, s string) (err error) {
	if *t, err = time.Parse(time.RFC3339, s); err != nil || t.IsZero() {
		return fmt.Errorf("%s needs a time after it, such as 2026-01-31T15:04:05Z (RFC 3339)", word)
	}
	return nil
}
