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

// A token for several nodes is good for a number of uses. The cloud counts them in a file beside the token file,
// with a line for each use:
//
//	SHA256-OF-THE-TOKEN NODE TIME
//	SHA256-OF-THE-TOKEN NODE TIME returned    the node got no certificate: the use before counts no more
//
// A use is on the disk before the certificate is signed. So a crash may lose a use for good, but never permits one
// more. The line of a use that is given back is removed if it is still the last one. All other lines stay: each name
// in the file has joined, and no token for several nodes is good for that name again.

// ErrNoUse refuses a node a certificate for a token that is good, but not for this node now. The cloud may tell the
// edge the text of the error, because the edge has proven that it has the token.
var ErrNoUse = errors.New("the token is not good for this node")

// wordReturned marks the line that gives a use back.
const wordReturned = "returned"

// usesSuffix makes the name of the file from that of the token file.
const usesSuffix = ".uses"

// Used says how often a token was used.
type Used struct {
	Count int
	Last  time.Time // zero: never
}

// uses is the content of the file.
type uses struct {
	byToken map[sum]Used
	nodes   map[tunnel.NodeName]bool // that have used any token
}

// parseUses parses the file. It ignores a line that is not valid: a crash may have cut off the last line. The cloud had
// then not signed the certificate of that line, because it writes the line first.
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

// ReadUses reads how often the tokens for several nodes of a token file were used, by the ID of [Line].
func ReadUses(tokenFile string) (map[string]Used, error) {
	content, err := os.ReadFile(tokenFile + usesSuffix)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	byID := make(map[string]Used)
	for s, used := range parseUses(content).byToken {
		byID[hex.EncodeToString(s[:4])] = used
	}
	return byID, nil
}

// spend notes that node uses the token with the sum s, if it is one for several nodes. known reports whether the cloud
// has seen the node before; nil: the cloud does not remember nodes, and no such token is good. The caller calls
// giveBack if the node got no certificate; giveBack returns the use to the token.
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

// editUses keeps so many bytes of the file as edit says, and appends more. A lock keeps out other processes that share
// the folder.
func (t *Tokens) editUses(edit func(content []byte) (keep int, more string, err error)) (err error) {
	t.counting.Lock()
	defer t.counting.Unlock()
	path := t.path + usesSuffix
	fail := func(err error) error {
		return fmt.Errorf("counting the uses of a token: %w; the cloud must be able to write to the folder of its "+
			"token file", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fail(err)
	}
	defer f.Close() // it ends the lock, too
	if err = lockFile(f, usesTimeout); err != nil {
		return fail(err)
	}
	content, err := io.ReadAll(io.LimitReader(f, maxTokenFile+1))
	switch {
	case err != nil:
		return fail(err)
	case len(content) > maxTokenFile:
		return fmt.Errorf("counting the uses of a token: %s is longer than %d bytes; "+
			"make a token for each node, or revoke the tokens for several nodes, remove the file and make others",
			path, maxTokenFile)
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
	if err == nil && len(content) == 0 { // else the file itself may be gone after a crash
		err = SyncFolder(filepath.Dir(path))
	}
	if err != nil {
		return fail(err)
	}
	return nil
}

// usesTimeout is how long editUses waits for another process.
const usesTimeout = 5 * time.Second

// errLocked says that another process holds a lock.
var errLocked = errors.New("another process holds the lock of the file")

// lockFile locks a file until it is closed.
func lockFile(f *os.File, within time.Duration) error {
	for late := time.Now().Add(within); ; time.Sleep(10 * time.Millisecond) {
		err := tryLockFile(f)
		if !errors.Is(err, errLocked) || time.Now().After(late) {
			return err
		}
	}
}
