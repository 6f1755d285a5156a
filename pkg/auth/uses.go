package auth

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// A token for several nodes is good for a number of uses. The cloud counts uses in a file beside the token file, with a
// line for each use:
//
//	SHA256-OF-THE-TOKEN NODE TIME
//	SHA256-OF-THE-TOKEN NODE TIME returned    the node got no certificate: its earlier line no longer counts
//
// The cloud writes the line of a use to the disk before it signs the certificate. So a crash may waste a use, but never
// permits one more. If the node gets no certificate, the cloud gives the use back: it removes the line if it is still
// the last one, else it appends a line with "returned". All other lines stay: the nodes in them have joined, and no
// token for several nodes is good for these nodes again.

// ErrNoUse means that a token is valid, but this node cannot use it now. The cloud may send the text of the error to
// the edge, because the edge has proven that it has the token.
var ErrNoUse = errors.New("the token is not good for this node")

// wordReturned marks the line that gives a use back.
const wordReturned = "returned"

// usesSuffix is appended to the path of the token file, and gives the path of the file with the uses.
const usesSuffix = ".uses"

// UsesFile returns the path of the file with the uses. tokenFile is the path of the token file.
func UsesFile(tokenFile string) string { return tokenFile + usesSuffix }

// Used says how often a token was used.
type Used struct {
	Count int
	Last  time.Time // zero: never
}

// uses is the content of the file.
type uses struct {
	byToken map[sum]Used
	nodes   map[tunnel.NodeName]bool // the nodes that have used any token
}

// parseUses parses the file. It ignores a line that is not valid: a crash may have cut off the line. Then the cloud has
// not signed the certificate for this line, because it writes the line first.
func parseUses(content []byte) uses {
	u := uses{byToken: make(map[sum]Used), nodes: make(map[tunnel.NodeName]bool)}
	for text := range strings.Lines(string(content)) {
		if !strings.HasSuffix(text, "\n") {
			break
		}
		words := strings.Fields(text)
		if len(words) < 3 || len(words) > 4 || len(words) == 4 && words[3] != wordReturned {
			continue
		}
		b, err := hex.DecodeString(words[0])
		if err != nil || len(b) != len(sum{}) {
			continue
		}
		node, err := tunnel.ParseNodeName(words[1])
		if err != nil {
			continue
		}
		at, err := time.Parse(time.RFC3339, words[2])
		if err != nil {
			continue
		}
		is := u.byToken[sum(b)]
		if len(words) == 4 {
			if u.nodes[node] {
				is.Count = max(0, is.Count-1)
				delete(u.nodes, node)
			}
		} else {
			is.Count++
			is.Last = at
			u.nodes[node] = true
		}
		u.byToken[sum(b)] = is
	}
	return u
}

// ReadUses returns how often each token for several nodes was used. tokenFile is the path of the token file. The keys
// are values of Line.ID.
func ReadUses(tokenFile string) (map[string]Used, error) {
	content, _, err := tunnel.ReadFile(UsesFile(tokenFile), MaxTokenFile)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	byID := make(map[string]Used)
	for s, used := range parseUses(content).byToken {
		byID[hex.EncodeToString(s[:4])] = used
	}
	return byID, nil
}

// spend notes that node uses the token with the sum s, if that token is for several nodes. known reports whether the
// cloud has seen the node before; nil: the cloud does not remember nodes, and spend refuses all tokens for several
// nodes. If the node gets no certificate, the caller calls giveBack, which makes the use available again.
func (t *Tokens) spend(node tunnel.NodeName, s sum, known func(tunnel.NodeName) bool) (giveBack func(), err error) {
	nothing := func() {}
	tok, err := t.table.Load().token(node, s, true, time.Now())
	if err != nil || tok.nodes == "" {
		return nothing, err
	}
	switch {
	case known == nil:
		return nothing, fmt.Errorf("%w: the cloud does not remember which nodes have joined; "+
			"set inventory in [mode.cloud.admin] there, or make a token for this node alone", ErrNoUse)
	case known(node):
		return nothing, fmt.Errorf("%w: %s has joined already; make a token for this node alone", ErrNoUse, node)
	}
	line := useLine(s, node, "")
	err = t.editUses(func(content []byte) (keep int, more string, err error) {
		switch u := parseUses(content); {
		case u.nodes[node]:
			return 0, "", fmt.Errorf("%w: a node %s has joined already; make a token for this node alone", ErrNoUse, node)
		case u.byToken[s].Count >= tok.uses:
			return 0, "", fmt.Errorf("%w: its %d uses are used up; make another token", ErrNoUse, tok.uses)
		}
		return len(content), line, nil
	})
	if err != nil {
		return nothing, err
	}
	return func() {
		lost := t.editUses(func(content []byte) (keep int, more string, err error) {
			if before, last := bytes.CutSuffix(content, []byte(line)); last {
				return len(before), "", nil
			}
			return len(content), useLine(s, node, " "+wordReturned), nil
		})
		if lost != nil {
			t.log.Error("a use of a token was not given back", "node", node, "err", lost)
		}
	}, nil
}

// useLine returns a line of the file.
func useLine(s sum, node tunnel.NodeName, behind string) string {
	return fmt.Sprintf("%x %s %s%s\n", s, node, time.Now().UTC().Format(time.RFC3339), behind)
}

// editUses calls edit with the content of the file. It then cuts the file to the first keep bytes, and appends more. A
// lock keeps out other processes that use the same file.
func (t *Tokens) editUses(edit func(content []byte) (keep int, more string, err error)) (err error) {
	t.counting.Lock()
	defer t.counting.Unlock()
	path := UsesFile(t.path)
	fail := func(err error) error {
		return fmt.Errorf("counting the uses of a token: %w; the cloud must be able to write to the folder of its "+
			"token file", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fail(err)
	}
	defer f.Close() // also ends the lock
	if err = lockFile(f, usesTimeout); err != nil {
		return fail(err)
	}
	content, err := io.ReadAll(io.LimitReader(f, MaxTokenFile+1))
	switch {
	case err != nil:
		return fail(err)
	case len(content) > MaxTokenFile:
		return fmt.Errorf("counting the uses of a token: %s is longer than %d bytes; "+
			"make a token for each node, or revoke the tokens for several nodes, remove the file and make others",
			path, MaxTokenFile)
	}
	keep, more, err := edit(content)
	if err != nil {
		return err
	}
	if len(content) > 0 && !bytes.HasSuffix(content, []byte("\n")) { // a crash has cut off the last line
		more = "\n" + more
	}
	if keep < len(content) {
		err = f.Truncate(int64(keep))
	}
	if err == nil {
		_, err = f.WriteAt([]byte(more), int64(keep))
	}
	if err == nil {
		err = f.Sync()
	}
	if err == nil && len(content) == 0 { // a new file could be gone after a crash, unless its folder is synced
		err = SyncFolder(filepath.Dir(path))
	}
	if err != nil {
		return fail(err)
	}
	return nil
}

// usesTimeout is how long editUses waits for another process.
const usesTimeout = 5 * time.Second

// errLocked says that another process holds the lock.
var errLocked = errors.New("another process holds the lock of the file")

// lockFile locks a file until the file is closed. It gives up after the time within.
func lockFile(f *os.File, within time.Duration) error {
	for late := time.Now().Add(within); ; time.Sleep(10 * time.Millisecond) {
		err := tryLockFile(f)
		if !errors.Is(err, errLocked) || time.Now().After(late) {
			return err
		}
	}
}
