package setup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"tunnel/conf"
	"tunnel/pkg/auth"
)

// errMounted is why a token file is left as it is: what it shows is kept somewhere else.
var errMounted = errors.New("it is a symbolic link, as in a mounted Secret")

// tokenFile is the token file of a cloud.
type tokenFile struct {
	path      string
	replicas  bool   // the cloud has others, and each reads a file of its own
	namespace string // in which the cloud runs; "": unknown
}

func tokenFileOf(c *conf.Cloud, h Host) tokenFile {
	return tokenFile{path: c.Server.TokenFile, replicas: c.Peers.Configured(), namespace: h.Env.PodNamespace}
}

// tokenChange is what a token file should become.
type tokenChange struct {
	file           tokenFile
	added, removed []string // lines
	failed         error    // why the file is as it was; nil: it has been changed
}

// edit replaces a token file with what edit makes of it, one process at a time.
// A cloud that follows the file sees the old one or the new one. Mode and owner stay. An
// error means that there is nothing to write; a file that cannot be written is a change
// that has failed.
func (f tokenFile) edit(edit func(content string) (string, error)) (tokenChange, error) {
	held, err := lock(filepath.Dir(f.path), lockTimeout)
	if err != nil {
		return tokenChange{}, err
	}
	defer held.Close()                  // gives the lock back
	content, err := os.ReadFile(f.path) //nolint:gosec // the configuration names it
	if err != nil {
		return tokenChange{}, err
	}
	edited, err := edit(string(content))
	if err != nil {
		return tokenChange{}, fmt.Errorf("%s: %w", f.path, err)
	}
	c := tokenChange{file: f, added: missing(edited, string(content)), removed: missing(string(content), edited)}
	info, err := os.Lstat(f.path)
	switch {
	case err != nil:
		return tokenChange{}, err
	case info.Mode()&fs.ModeSymlink != 0:
		c.failed = errMounted
	default:
		c.failed = replaceFile(f.path, []byte(edited), info)
	}
	return c, nil
}

// lockTimeout is how long other processes may take that change the same file.
const lockTimeout = 10 * time.Second

// errLocked says that another process holds a lock.
var errLocked = errors.New("another process holds the lock")

// lock locks a folder until the file that it returns is closed. Whoever may read the folder may
// hold the lock, so lock does not wait for long: a revocation must not hang.
func lock(folder string, within time.Duration) (held *os.File, err error) {
	for late := time.Now().Add(within); ; time.Sleep(10 * time.Millisecond) {
		held, err := tryLock(folder)
		switch {
		case err == nil:
			return held, nil
		case !errors.Is(err, errLocked):
			return nil, fmt.Errorf("locking %s: %w", folder, err)
		case time.Now().After(late):
			return nil, fmt.Errorf("another process holds the lock of %s: %s, end it, and run this again", folder, findHolder(folder))
		}
	}
}

// missing returns the lines of a that b does not have.
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

// plainToken reports whether a line of a token file holds a token as it is, and not its
// sum, and of which node.
func plainToken(text string) (node string, plain bool) {
	lines, err := auth.List(text)
	if err != nil || len(lines) != 1 {
		return "", false // it has been read as a line of a good file
	}
	l := lines[0]
	return string(l.Node), l.ID != "" && !l.Hashed
}

// shownLine is a line of a token file as it may be shown: other replicas may still take a
// token that is removed here.
func shownLine(text string) string {
	if node, plain := plainToken(text); plain {
		return node + ":*** (every line with a token of this node that is not hashed)"
	}
	return text
}

// replaceFile writes content beside path and renames it over path. Mode and owner are
// those of like.
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
		os.Remove(tmp.Name()) //nolint:errcheck // the first error is the one to report
	}
	return err
}
