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
	maxToken = 1792
	// maxProblems is how many faults of a file are reported at once.
	maxProblems = 10

	hashPrefix = "sha256:"
	sharedName = "default"
)

// parseTokens parses a token file. name stands before the line number in errors. No
// error repeats any part of a line: whoever mixes up the order of node and token
// must not find the token in the log.
func parseTokens(name, content string, allowShared bool) (*table, error) {
	tb := &table{own: make(map[tunnel.NodeName][]sum)}
	var problems []error
	n := 0
	for line := range strings.Lines(content) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if err := tb.add(line, allowShared); err != nil {
			problems = append(problems, fmt.Errorf("%s:%d: %w", name, n, err))
			if len(problems) == maxProblems {
				break
			}
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	if len(tb.own) == 0 && len(tb.shared) == 0 {
		return nil, fmt.Errorf("%s: no token in it: nobody could join; add a line node:sha256:HEX for each edge", name)
	}
	return tb, nil
}

// add takes one line that is neither blank nor a comment.
func (tb *table) add(line string, allowShared bool) error {
	name, token, ok := strings.Cut(line, ":")
	if !ok {
		return errors.New("no colon in the line; write node:token or node:sha256:HEX")
	}
	name, token = strings.TrimSpace(name), strings.TrimSpace(token)
	s, err := parseSum(token)
	if err != nil {
		return err
	}
	if name == sharedName {
		if !allowShared {
			return errors.New("a default: line lets every holder of its token join as any node; " +
				"give each node a line of its own, or set allowshared = true under [mode.cloud.stream.server]")
		}
		tb.shared = append(tb.shared, s)
		tb.most = max(tb.most, len(tb.shared))
		return nil
	}
	node, err := tunnel.ParseNodeName(name)
	if err != nil {
		return errors.New("what stands before the colon is not a node name (RFC 1123: lower-case letters, digits, '-' and '.')")
	}
	tb.own[node] = append(tb.own[node], s)
	tb.most = max(tb.most, len(tb.own[node]))
	return nil
}

// parseSum returns the sum of a token that a file holds as it is or hashed.
func parseSum(token string) (s sum, err error) {
	digits, hashed := strings.CutPrefix(token, hashPrefix)
	if !hashed {
		return sha256.Sum256([]byte(token)), checkToken(token)
	}
	// Decoded into a larger buffer, so that too many digits are noticed.
	b, err := hex.DecodeString(digits)
	if err != nil || len(b) != len(s) {
		return s, fmt.Errorf("after %s there must be %d hexadecimal digits", hashPrefix, 2*len(s))
	}
	return sum(b), nil
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

// warnOthers warns when others may read a secret file.
func warnOthers(path string, st fs.FileInfo, log *slog.Logger) {
	if st.Mode().Perm()&othersMay != 0 {
		log.Warn(fmt.Sprintf("%s can be read by others (mode %04o); chmod 600 it", path, st.Mode().Perm()))
	}
}
