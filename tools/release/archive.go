package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"io"
	"io/fs"
	"slices"
	"strings"
	"time"
)

// file is a file of an archive, of a package or of a layer. Its owner is root.
type file struct {
	name       string // ends with a slash: the file is a folder, which only writeTar knows
	executable bool
	data       []byte
	link       string // the file is a symbolic link to this name, which only writeTar knows; "": it is none
}

// folder reports whether the file is a folder.
func (f file) folder() bool { return strings.HasSuffix(f.name, "/") }

// mode returns the permissions of the file.
func (f file) mode() fs.FileMode {
	switch {
	case f.link != "":
		return 0o777
	case f.executable || f.folder():
		return 0o755
	}
	return 0o644
}

// addArchive writes the archive for p: a zip for Windows, else a compressed tar.
func (r *release) addArchive(p *program, docs documents) error {
	base := r.name(p.String())
	files := r.archiveFiles(p, docs)
	for i := range files {
		files[i].name = base + "/" + files[i].name
	}
	pack, suffix := writeTarGzip, ".tar.gz"
	if p.os == "windows" {
		pack, suffix = writeZip, ".zip"
	}
	var b bytes.Buffer
	if err := pack(&b, files, r.time); err != nil {
		return err
	}
	return r.put(base+suffix, b.Bytes())
}

// archiveFiles returns what the archive for p holds.
func (r *release) archiveFiles(p *program, docs documents) []file {
	files := []file{
		{name: p.binary(), executable: true, data: p.data},
		{name: "LICENSE", data: docs.license},
		{name: "NOTICES", data: p.notices},
		{name: "README.md", data: docs.readme},
		{name: "completions/tunnel.bash", data: docs.completions["bash"]},
		{name: "completions/_tunnel", data: docs.completions["zsh"]},
		{name: "completions/tunnel.fish", data: docs.completions["fish"]},
	}
	in := func(dir string, list []file) {
		for _, f := range list {
			f.name = dir + "/" + f.name
			files = append(files, f)
		}
	}
	in("man", docs.manuals)
	in("conf", docs.examples)
	if p.os != "windows" {
		for _, name := range kubectlNames() {
			files = append(files, file{name: name, link: p.binary()})
		}
	}
	if p.os == "linux" {
		files = append(files, file{name: pluginName, executable: true, data: p.plugin})
		in("systemd", docs.units)
		in("systemd", docs.dropIns)
	}
	return files
}

// writeTar writes files, sorted by name, as a tar. Every timestamp in the tar is at.
func writeTar(w io.Writer, files []file, at time.Time) error {
	t := tar.NewWriter(w)
	for _, f := range sorted(files) {
		h := &tar.Header{
			Typeflag: tar.TypeReg, Name: f.name, Mode: int64(f.mode()), Size: int64(len(f.data)), ModTime: at,
			Format: tar.FormatUSTAR,
		}
		switch {
		case f.folder():
			h.Typeflag = tar.TypeDir
		case f.link != "":
			h.Typeflag, h.Linkname = tar.TypeSymlink, f.link
		}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		if _, err := t.Write(f.data); err != nil {
			return err
		}
	}
	return t.Close()
}

// writeTarGzip writes files as writeTar does, compressed by gzip.
func writeTarGzip(w io.Writer, files []file, at time.Time) error {
	z, err := gzip.NewWriterLevel(w, gzip.BestCompression)
	if err != nil {
		return err
	}
	if err = writeTar(z, files, at); err != nil {
		return err
	}
	return z.Close()
}

// writeZip writes a zip archive with the files, sorted by name. at is the modification time of each file.
func writeZip(w io.Writer, files []file, at time.Time) error {
	z := zip.NewWriter(w)
	for _, f := range sorted(files) {
		h := &zip.FileHeader{Name: f.name, Method: zip.Deflate, Modified: at}
		h.SetMode(f.mode())
		out, err := z.CreateHeader(h)
		if err != nil {
			return err
		}
		if _, err = out.Write(f.data); err != nil {
			return err
		}
	}
	return z.Close()
}

// compressed returns data compressed by gzip, without a name or a time.
func compressed(data []byte) ([]byte, error) {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err = z.Write(data); err != nil {
		return nil, err
	}
	err = z.Close()
	return b.Bytes(), err
}

// sorted returns files sorted by name.
func sorted(files []file) []file {
	return slices.SortedFunc(slices.Values(files), func(a, b file) int { return strings.Compare(a.name, b.name) })
}
