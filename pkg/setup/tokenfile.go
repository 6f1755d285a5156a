package setup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// errMounted is the error for a file that is a symbolic link, as in a mounted Secret. edit does not replace the link:
// the content comes from elsewhere, so a change here would be lost.
var errMounted = errors.New("it is a symbolic link, as in a mounted Secret")

// tokenFile names the file with the lines of all tokens of a cloud. It also has what an operator must know to make
// the same change at other places.
type tokenFile struct {
	path      string
	replicas  bool   // the cloud has other replicas: each reads a token file of its own
	namespace string // the namespace of the cloud's pod; "": unknown
}

func tokenFileOf(c *conf.Cloud, h Host) tokenFile {
	return tokenFile{path: c.Server.TokenFile, replicas: c.Peers.Configured(), namespace: h.Env.PodNamespace}
}

// tokenChange is a change of a token file that edit has made or has tried to make.
type tokenChange struct {
	file           tokenFile
	added, removed []string // lines
	failed         error    // why the file did not change; nil: it has changed
}

// edit replaces the content of the token file by what the function edit returns. A lock on the folder lets only one
// process at a time change the file. A cloud that watches the file reads either the old or the new content, never a
// part. The mode and the owner of the file stay. If the change is known but the file cannot be written, edit returns
// a tokenChange with failed set. An error means that edit could not find out the change.
func (f tokenFile) edit(edit func(content string) (string, error)) (tokenChange, error) {
	held, err := lock(filepath.Dir(f.path), lockTimeout)
	if err != nil {
		return tokenChange{}, err
	}
	defer held.Close() // releases the lock
	content, info, err := readNoLink(f.path)
	if err != nil {
		return tokenChange{}, err
	}
	edited, err := edit(string(content))
	if err != nil {
		return tokenChange{}, fmt.Errorf("%s: %w", f.path, err)
	}
	if len(edited) > auth.MaxTokenFile {
		return tokenChange{}, fmt.Errorf("%s would have %d bytes, and a cloud reads %d at most: remove lines of nodes that "+
			"are gone, and lines with join whose expires= is over", f.path, len(edited), auth.MaxTokenFile)
	}
	c := tokenChange{file: f, added: missing(edited, string(content)), removed: missing(string(content), edited)}
	if info == nil {
		c.failed = errMounted
	} else {
		c.failed = replaceFile(f.path, []byte(edited), info)
	}
	return c, nil
}

// readNoLink returns the content of a file and its FileInfo, which is nil if path is a symbolic link. Root calls it for
// files in a folder of the cloud's user. If that user replaces the file by a link meanwhile, readNoLink fails. Root
// would otherwise give the user a copy of the file behind the link.
func readNoLink(path string) (content []byte, info fs.FileInfo, err error) {
	before, err := os.Lstat(path)
	if err != nil {
		return nil, nil, err
	}
	content, info, err = tunnel.ReadFile(path, auth.MaxTokenFile)
	switch {
	case err != nil:
		return nil, nil, err
	case before.Mode()&fs.ModeSymlink != 0:
		return content, nil, nil
	case !os.SameFile(before, info):
		return nil, nil, fmt.Errorf("%s was replaced while it was read: run this again", path)
	}
	return content, info, nil
}

// lockTimeout is how long edit waits for other processes that change the same file.
const lockTimeout = 10 * time.Second

// errLocked is the error of tryLock if another process holds the lock.
var errLocked = errors.New("another process holds the lock")

// lock locks a folder until the caller closes the returned file. It gives up after the time within: any user who may
// read the folder could hold the lock for ever, and a revocation must not hang.
func lock(folder string, within time.Duration) (held *os.File, err error) {
	for late := time.Now().Add(within); ; time.Sleep(10 * time.Millisecond) {
		held, err := tryLock(folder)
		switch {
		case err == nil:
			return held, nil
		case !errors.Is(err, errLocked):
			return nil, fmt.Errorf("locking %s: %w", folder, err)
		case time.Now().After(late):
			return nil, fmt.Errorf("another process holds the lock of %s: %s, end it, and run this again",
				folder, findHolder(folder))
		}
	}
}

// missing returns the lines of a that are not in b.
func missing(a, b string) (lines []string) {
	there := make(map[string]bool)
	for l := range strings.Lines(b) {
		there[strings.TrimSpace(l)] = true
	}
	for l := range strings.Lines(a) {
		if l = strings.TrimSpace(l); !there[l] {
			lines = append(lines, l)
		}
	}
	return lines
}

// plainToken returns the node of a line of a token file. plain reports whether the line holds a token itself, and not
// the SHA-256 of a token.
func plainToken(text string) (node string, plain bool) {
	lines, err := auth.List(text)
	if err != nil || len(lines) != 1 {
		return "", false // unreachable: auth.List took the whole file
	}
	l := lines[0]
	return string(l.Node), l.ID != "" && !l.Hashed
}

// shownLine returns a line of a token file for the operator, without a token in plain text. Even a removed token must
// not be shown: another replica may still accept it.
func shownLine(text string) string {
	if node, plain := plainToken(text); plain {
		return node + ":*** (every line with a token of this node that is not hashed)"
	}
	return text
}

// replaceFile writes content to a temporary file beside path, gives that file the mode and the
// owner of like, and renames it to path.
func replaceFile(path string, content []byte, like fs.FileInfo) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*") // mode 0600
	if err != nil {
		return err
	}
	_, err = tmp.Write(content)
	if err == nil {
		err = own(tmp, like)
	}
	err = errors.Join(err, tmp.Chmod(like.Mode().Perm()), tmp.Sync(), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name()) //nolint:errcheck // the caller reports the first error
		return err
	}
	// After a power loss, a revocation that the operator has been told of must still be there.
	return auth.SyncFolder(filepath.Dir(path))
}
