package auth

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// MaxTokenFile is the largest token file that a cloud reads, in bytes. It holds the tokens of 100,000 nodes.
	MaxTokenFile = 16 << 20
	// maxToken is the longest token, in bytes. Twice that (if JSON escapes every byte) still fits into
	// maxWire, together with a node name and the field names. A projected ServiceAccount token has 1
	// to 2 KiB.
	maxToken = 3584
	// maxProblems is how many problems of a file are reported at once.
	maxProblems = 10

	hashPrefix = "sha256:" // stands before the SHA-256 of a token
	sharedName = "default" // stands in place of a node, for any node
)

// parseTokens parses a token file. name stands before the line number in errors. mayBeEmpty permits a
// file without a token.
func parseTokens(name, content string, allowShared, mayBeEmpty bool) (*table, error) {
	var problems []error
	report := func(number int, err error) bool {
		problems = append(problems, fmt.Errorf("%s:%d: %w", name, number, err))
		return len(problems) < maxProblems
	}
	lines := parseLines(content, report)
	tb := &table{digest: sha256.Sum256([]byte(content)), byNode: make(map[tunnel.NodeName]*entry)}
	for _, l := range lines {
		if l.node == "" && l.token.nodes == "" && !allowShared && len(problems) < maxProblems {
			report(l.number, errors.New("a default: line lets every holder of its token join as any node; "+
				"give each node a line of its own, or set allowshared = true under [mode.cloud.stream.server]"))
		}
		tb.add(l)
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	if tb.maxTokens == 0 && len(tb.patterns) == 0 && !mayBeEmpty {
		return nil, fmt.Errorf("%s: it holds no token, so no node could join; add a line node:sha256:HEX for each edge", name)
	}
	return tb, nil
}

// parseSum returns the SHA-256 of a token that the file holds in plain or hashed form.
func parseSum(token string) (s sum, err error) {
	digits, hashed := strings.CutPrefix(token, hashPrefix)
	if !hashed {
		if isMisplacedKeyword(token) {
			return s, errors.New("the token looks like a misplaced or misspelt keyword (revoked, join, " +
				"expires=TIME or sha256:), and anybody could guess it; " +
				"write node:revoked in lower case, or node:sha256:HEX and the attributes behind it")
		}
		return sha256.Sum256([]byte(token)), checkToken(token)
	}
	// hex.DecodeString decodes any number of digits, so that too many digits are noticed.
	b, err := hex.DecodeString(digits)
	if err != nil || len(b) != len(s) {
		return s, fmt.Errorf("after %s there must be %d hexadecimal digits", hashPrefix, 2*len(s))
	}
	return sum(b), nil
}

// isMisplacedKeyword reports whether a plain token is probably a misplaced or misspelt keyword, and the token is
// missing in the line.
func isMisplacedKeyword(token string) bool {
	token = strings.ToLower(token)
	return token == keywordJoin ||
		slices.ContainsFunc([]string{"revoke", keywordBefore, keywordExpires, hashPrefix}, func(word string) bool {
			return strings.HasPrefix(token, word)
		})
}

// checkToken returns an error if a token cannot be sent over the wire or stored in a token file.
func checkToken(token string) error {
	switch {
	case token == "":
		return errors.New("the token is empty")
	case len(token) > maxToken:
		return fmt.Errorf("the token is %d bytes long; %d are allowed", len(token), maxToken)
	case !utf8.ValidString(token):
		return errors.New("the token is not UTF-8; tokens are text, such as base64")
	}
	for _, r := range token {
		if unicode.IsSpace(r) || unicode.IsControl(r) {
			return errors.New("the token has a blank or control character in it; a comment needs a line of its own")
		}
	}
	return nil
}

// ReadTokenFile reads an edge's token file, which holds the token and nothing else. One newline at the
// end is not part of the token. It logs a warning if other users can read the file.
func ReadTokenFile(path string, log *slog.Logger) (Secret, error) {
	content, _, err := readSecretFile(path, maxToken+2, log)
	if err != nil {
		return "", fmt.Errorf("token file: %w; it must hold this node's token alone", err)
	}
	token := strings.TrimSuffix(strings.TrimSuffix(string(content), "\n"), "\r")
	if err := checkToken(token); err != nil {
		return "", fmt.Errorf("token file %s: %w", path, err)
	}
	return Secret(token), nil
}

// readSecretFile reads a regular file of at most limit bytes, and warns if other users can read it.
func readSecretFile(path string, limit int64, log *slog.Logger) ([]byte, fs.FileInfo, error) {
	content, st, err := tunnel.ReadFile(path, limit)
	if err != nil {
		return nil, nil, err
	}
	warnIfExposed(path, st, log)
	return content, st, nil
}
