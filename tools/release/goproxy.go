package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
)

// addModule writes the module as a Go module proxy serves it, into the folder goproxy. With
// GOPROXY=file:///…/goproxy, `go install` takes the release from there.
func (r *release) addModule() error {
	path, err := module.EscapePath(r.module)
	if err != nil {
		return err
	}
	version, err := module.EscapeVersion(r.version)
	if err != nil {
		return err
	}
	info, err := json.Marshal(struct {
		Version string
		Time    time.Time
	}{r.version, r.time})
	if err != nil {
		return err
	}
	mod, err := r.read("go.mod")
	if err != nil {
		return err
	}
	archive, err := r.moduleZip()
	if err != nil {
		return err
	}
	for name, data := range map[string][]byte{
		"list": []byte(r.version + "\n"), version + ".info": info, version + ".mod": mod, version + ".zip": archive,
	} {
		if err = r.put("goproxy/"+path+"/@v/"+name, data); err != nil {
			return err
		}
	}
	return nil
}

// moduleZip returns the module's files as Go wants them, without the modules in folders below.
func (r *release) moduleZip() ([]byte, error) {
	var files []zip.File
	for _, name := range r.files {
		files = append(files, sourceFile{root: r.root, name: name})
	}
	var b bytes.Buffer
	if err := zip.Create(&b, module.Version{Path: r.module, Version: r.version}, files); err != nil {
		return nil, fmt.Errorf("%s %s: %w", r.module, r.version, err)
	}
	return b.Bytes(), nil
}

// sourceFile is a file of the repository.
type sourceFile struct{ root, name string }

func (f sourceFile) Path() string                 { return f.name }
func (f sourceFile) Lstat() (os.FileInfo, error)  { return os.Lstat(filepath.Join(f.root, f.name)) }
func (f sourceFile) Open() (io.ReadCloser, error) { return os.Open(filepath.Join(f.root, f.name)) }
