package inventory

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"tunnel.example/tunnel/pkg/tunnel"
)

// format is the version of the file.
const format = 1

// file is the content of the file.
type file struct {
	Format int                        `json:"format"`
	Nodes  map[tunnel.NodeName]Record `json:"nodes"`
}

// errContent is the error of a file that is not an inventory of this version.
var errContent = errors.New("it is not an inventory")

// badSuffix is appended to the name of a file with errContent: Run renames the file, so that it is not overwritten.
const badSuffix = ".bad"

// errAside is the error of load while there is a file with badSuffix: the nodes in it may be missing. Without errAside,
// the next start would think that the new file has all nodes.
var errAside = errors.New("a damaged inventory was set aside")

// load reads the file at path. The map that it returns is never nil. A file that does not exist is no
// error. With errAside, load returns the nodes of the file.
func load(path string) (map[tunnel.NodeName]*Record, error) {
	nodes := make(map[tunnel.NodeName]*Record)
	if path == "" {
		return nodes, nil
	}
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nodes, err
	default:
		got, bad := parse(text)
		if bad != nil {
			return nodes, fmt.Errorf("%w: %w", errContent, bad)
		}
		for n, r := range got {
			nodes[n] = &r
		}
	}
	if _, err = os.Lstat(path + badSuffix); err == nil {
		return nodes, errAside
	}
	return nodes, nil
}

// parse reads the content of a file.
func parse(text []byte) (map[tunnel.NodeName]Record, error) {
	var f file
	if err := json.Unmarshal(text, &f); err != nil {
		return nil, err
	}
	if f.Format != format {
		return nil, fmt.Errorf("the format is %d, and this version reads %d", f.Format, format)
	}
	for n := range f.Nodes {
		if _, err := tunnel.ParseNodeName(string(n)); err != nil {
			return nil, err
		}
	}
	return f.Nodes, nil
}

// asideSuffix ends the name of the file that save writes before it replaces the other one. A process that is killed
// leaves it, and the next save overwrites it.
const asideSuffix = ".new"

// save replaces the file at path. A reader finds the old content or the new one.
func save(path string, nodes map[tunnel.NodeName]Record) (err error) {
	var text bytes.Buffer
	if err = json.NewEncoder(&text).Encode(file{format, nodes}); err != nil {
		return err
	}
	aside, err := os.OpenFile(path+asideSuffix, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(aside.Name()) //nolint:errcheck // the caller gets the first error
		}
	}()
	_, err = aside.Write(text.Bytes())
	if err == nil {
		err = aside.Sync()
	}
	if err = errors.Join(err, aside.Close()); err != nil {
		return err
	}
	return os.Rename(aside.Name(), path)
}
