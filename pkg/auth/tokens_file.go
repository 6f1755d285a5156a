package auth

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"tunnel/pkg/tunnel"
)

const (
	// maxTokenFile is the largest token file, in bytes: room for 100,000 nodes.
	maxTokenFile = 16 << 20
	// maxToken is the longest token, in bytes. Twice that (every byte escaped), a
	// node name and the field names still fit maxWire.
	// A projected ServiceAccount token has 1 to 2 KiB.
	maxToken = 3584
	// maxProblems is how many faults of a file are reported at once.
	maxProblems = 10

	hashPrefix = "sha256:"
	sharedName = "default"
)

// parseTokens parses a token file. name stands before the line number in errors.
// mayBeEmpty says whether a file in which there is no token is a good one.
func parseTokens(name, content string, allowShared, mayBeEmpty bool) (*table, error) {
	var problems []error
	bad := func(number int, err error) bool {
		problems = append(problems, fmt.Errorf("%s:%d: %w", name, number, err))
		return len(problems) < maxProblems
	}
	lines := parseLines(content, bad)
	tb := &table{digest: sha256.Sum256([]byte(content)), own: make(map[tunnel.NodeName]*entry)}
	for _, l := range lines {
		if l.node == "" && !allowShared && len(problems) < maxProblems {
			bad(l.number, errors.New("a default: line lets every holder of its token join as any node; "+
				"give each node a line of its own, or set allowshared = true under [mode.cloud.stream.server]"))
		}
		tb.add(l)
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	if tb.most == 0 && !mayBeEmpty {
		return nil, fmt.Errorf("%s: no token in it: nobody could join; add a line node:sha256:HEX for each edge", name)
	}
	return tb, nil
}

// parseSum returns the sum of a token that a file holds as it is or hashed.
func parseSum(token string) (s sum, err error) {
	digits, hashed := strings.CutPrefix(token, hashPrefix)
	if !hashed {
		if isSlip(token) {
			return s, errors.New("where the token should be there stands something like revoked, join, expires=TIME or sha256:, which would be a token that anybody guesses; " +
				"write node:revoked in lower case, or node:sha256:HEX and the attributes behind it")
		}
		return sha256.Sum256([]byte(token)), checkToken(token)
	}
	// Decoded into a larger buffer, so that too many digits are noticed.
	b, err := hex.DecodeString(digits)
	if err != nil || len(b) != len(s) {
		return s, fmt.Errorf("after %s there must be %d hexadecimal digits", hashPrefix, 2*len(s))
	}
	return sum(b), nil
}

// isSlip reports whether a plain token is one of the words of a line, misspelt or where
// the token was forgotten.
func isSlip(token string) bool {
	token = strings.ToLower(token)
	return token == wordJoin || slices.ContainsFunc([]string{"revoke", wordBefore, wordExpires, hashPrefix}, func(word string) bool {
		return strings.HasPrefix(token, word)
	})
}

// checkToken says whether a token survives the way over the wire and through files.
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

// ReadTokenFile reads an edge's token file, which holds the token alone. One newline
// at the end is not part of the token. A file that others can read is a warning.
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

// othersMay are the permission bits that a secret file should not have.
const othersMay fs.FileMode = 0o077

// readSecretFile reads a file of at most limit bytes and warns when others may read it.
func readSecretFile(path string, limit int64, log *slog.Logger) ([]byte, fs.FileInfo, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, nil, fmt.Errorf("%s is not a regular file", path)
	}
	content, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, nil, err
	}
	if int64(len(content)) > limit {
		return nil, nil, fmt.Errorf("%s is longer than %d bytes", path, limit)
	}
	warnOthers(path, st, log)
	return content, st, nil
}

// warnOthers warns when others may read a secret file. On Windows access lists decide, and
// the mode says nothing.
func warnOthers(path string, st fs.FileInfo, log *slog.Logger) {
	if runtime.GOOS != "windows" && st.Mode().Perm()&othersMay != 0 {
		log.Warn(fmt.Sprintf("%s can be read by others (mode %04o); chmod 600 it", path, st.Mode().Perm()))
	}
}
