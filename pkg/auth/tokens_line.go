package auth

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"tunnel/pkg/tunnel"
)

// The words of a line besides its token.
const (
	wordRevoked = "revoked" // in place of the token
	wordBefore  = "before="
	wordJoin    = "join"
	wordExpires = "expires="
)

// longEnough is how many characters a token has that nobody guesses: 22 of base64 hold 128
// random bits.
const longEnough = 22

// line is one line of a token file that says something.
type line struct {
	number  int
	node    tunnel.NodeName // "": it is a default: line
	revoked bool            // the line revokes; it has no token
	before  time.Time       // revoked: certificates issued earlier; zero: the node
	hashed  bool            // the token is in its file as a sum
	short   bool            // the token is in its file as it is, and has fewer than longEnough characters
	token   token
}

// token is what a line says of a token. It never changes.
type token struct {
	sum     sum
	join    bool      // it gets a certificate and opens no session
	expires time.Time // zero: never
}

// live reports whether the token is still good at now.
func (t token) live(now time.Time) bool { return t.expires.IsZero() || now.Before(t.expires) }

// parseLines reads the lines of a token file, and reports the faulty ones to bad until
// it says to stop. No error repeats any part of a line: whoever mixes up the order of
// node and token must not find the token in the log.
func parseLines(content string, bad func(number int, err error) (goOn bool)) []line {
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
			if !bad(n, err) {
				break
			}
			continue
		}
		l.number = n
		lines = append(lines, l)
	}
	return lines
}

// parseLine reads a line that is neither blank nor a comment.
func parseLine(text string) (line, error) {
	name, rest, ok := strings.Cut(text, ":")
	if !ok {
		return line{}, errors.New("no colon in the line; write node:token or node:sha256:HEX")
	}
	words := strings.FieldsFunc(rest, func(r rune) bool { return r == ' ' || r == '\t' })
	if len(words) == 0 {
		return line{}, errors.New("the token is empty")
	}
	l := line{revoked: words[0] == wordRevoked, hashed: strings.HasPrefix(words[0], hashPrefix)}
	var err error
	if !l.revoked {
		if l.token.sum, err = parseSum(words[0]); err != nil {
			return line{}, err
		}
		l.short = !l.hashed && utf8.RuneCountInString(words[0]) < longEnough
	}
	if name = strings.TrimSpace(name); name != sharedName {
		if l.node, err = tunnel.ParseNodeName(name); err != nil {
			return line{}, errors.New("what stands before the colon is not a node name (RFC 1123: lower-case letters, digits, '-' and '.')")
		}
	} else if l.revoked {
		return line{}, errors.New("only a node can be revoked; remove the default: lines to revoke their tokens")
	}
	for _, word := range words[1:] {
		if err := l.attribute(word); err != nil {
			return line{}, err
		}
	}
	return l, nil
}

// attribute takes a word that stands behind the token.
func (l *line) attribute(word string) error {
	before, isBefore := strings.CutPrefix(word, wordBefore)
	expires, isExpires := strings.CutPrefix(word, wordExpires)
	switch {
	case l.revoked && isBefore && l.before.IsZero():
		return parseTime(&l.before, wordBefore, before)
	case l.revoked:
		return errors.New("behind revoked there may stand before=TIME, once; a comment needs a line of its own")
	case word == wordJoin && !l.token.join:
		l.token.join = true
		return nil
	case isExpires && l.token.expires.IsZero():
		return parseTime(&l.token.expires, wordExpires, expires)
	}
	return errors.New("behind the token there may stand join and expires=TIME, each once; a comment needs a line of its own")
}

func parseTime(t *time.Time, word, s string) (err error) {
	if *t, err = time.Parse(time.RFC3339, s); err != nil || t.IsZero() {
		return fmt.Errorf("behind %s there must be a time such as 2026-01-31T15:04:05Z (RFC 3339)", word)
	}
	return nil
}
