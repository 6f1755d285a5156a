package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// unpack returns the files of a tar, and checks that their owner is root and that their time is the commit's.
func unpack(t *testing.T, r io.Reader) (files []file) {
	t.Helper()
	archive := tar.NewReader(r)
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.ModTime.Unix() != commitTime {
			t.Errorf("%s: owner %d:%d, time %s", h.Name, h.Uid, h.Gid, h.ModTime)
		}
		f := file{name: h.Name, executable: h.Mode&0o111 != 0, data: data, link: h.Linkname}
		kind := byte(tar.TypeReg)
		switch {
		case f.folder():
			kind, f.executable = tar.TypeDir, false
		case f.link != "":
			kind, f.executable = tar.TypeSymlink, false
		}
		if h.Mode != int64(f.mode()) || h.Typeflag != kind {
			t.Errorf("%s: mode %o, type %c", h.Name, h.Mode, h.Typeflag)
		}
		files = append(files, f)
	}
}

// names returns the names of files, and checks that they are sorted and that no file is empty.
func names(t *testing.T, files []file) (names []string) {
	t.Helper()
	for _, f := range files {
		names = append(names, f.name)
		if len(f.data) == 0 && !f.folder() && f.link == "" {
			t.Errorf("%s is empty", f.name)
		}
	}
	if !slices.IsSorted(names) {
		t.Errorf("not sorted: %q", names)
	}
	return names
}

// dataOf returns the content of the file with a name.
func dataOf(t *testing.T, files []file, name string) []byte {
	t.Helper()
	for _, f := range files {
		if f.name == name {
			return f.data
		}
	}
	t.Fatalf("there is no %s in %q", name, names(t, files))
	return nil
}

// archived returns the files of the archive of a release.
func archived(t *testing.T, e example) []file {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(read(t, e.dir, "tunnel_v0.1.0_linux_amd64.tar.gz")))
	if err != nil {
		t.Fatal(err)
	}
	return unpack(t, z)
}

// commandPage matches the path of a man page of one command, such as tunnel-edge.1.
var commandPage = regexp.MustCompile(`/(?:kubectl|tunnel)-[a-z-]+\.1(\.gz)?$`)

// withoutPages returns names without the man pages of commands. tunnel.1 stays.
func withoutPages(names []string) []string { return slices.DeleteFunc(names, commandPage.MatchString) }

func TestArchive(t *testing.T) {
	e := amd64(t)
	files := archived(t, e)
	const dir = "tunnel_v0.1.0_linux_amd64/"
	var want []string
	for _, name := range []string{
		"LICENSE", "NOTICES", "README.md", "completions/_tunnel", "completions/tunnel.bash", "completions/tunnel.fish",
		"conf/cloud.toml", "conf/edge.toml", "kubectl-edgetunnel", "kubectl_complete-edgetunnel", "man/tunnel.1",
		"systemd/tunnel-cloud.service", "systemd/tunnel-edge-cni.conf", "systemd/tunnel-edge-services.conf",
		"systemd/tunnel-edge.service", "tunnel", "tunnel-cni",
	} {
		want = append(want, dir+name)
	}
	if got := withoutPages(names(t, files)); !slices.Equal(got, want) {
		t.Errorf("the archive holds\n%q, want\n%q", got, want)
	}
	for name, source := range map[string]string{
		"LICENSE": "LICENSE", "README.md": "README.md", "conf/edge.toml": "conf/edge.toml",
		"systemd/tunnel-cloud.service":      "deployment/systemd/tunnel-cloud.service",
		"systemd/tunnel-edge-cni.conf":      "deployment/systemd/tunnel-edge-cni.conf",
		"systemd/tunnel-edge-services.conf": "deployment/systemd/tunnel-edge-services.conf",
	} {
		if !bytes.Equal(dataOf(t, files, dir+name), read(t, e.root, source)) {
			t.Errorf("%s is not %s", name, source)
		}
	}
	for _, f := range files {
		if isLink := strings.HasPrefix(f.name, dir+"kubectl"); isLink && f.link != "tunnel" || !isLink && f.link != "" {
			t.Errorf("%s is a link to %q", f.name, f.link)
		}
		if f.executable != slices.Contains([]string{dir + "tunnel", dir + "tunnel-cni"}, f.name) {
			t.Errorf("%s: executable %t", f.name, f.executable)
		}
		for _, layout := range []string{"Jan 2006", time.DateOnly} { // a page has the commit's date, or none
			if strings.HasSuffix(f.name, ".1") && bytes.Contains(f.data, []byte(time.Now().Format(layout))) {
				t.Errorf("%s has today's date", f.name)
			}
		}
	}
}

// runsHere skips the test on a machine that cannot run the program of the example.
func runsHere(t *testing.T) {
	t.Helper()
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		t.Skip("the program is for linux/amd64")
	}
}

func TestProgramKnowsItsVersion(t *testing.T) {
	runsHere(t)
	path := filepath.Join(t.TempDir(), "tunnel")
	if err := os.WriteFile(path, dataOf(t, archived(t, amd64(t)), "tunnel_v0.1.0_linux_amd64/tunnel"), 0o755); err != nil {
		t.Fatal(err)
	}
	if out := tool(t, "/", path, "version"); !strings.HasPrefix(out, "tunnel v0.1.0\n") {
		t.Errorf("tunnel version prints %q", out)
	}
}

// TestPlugin executes the CNI plugin of the archive.
func TestPlugin(t *testing.T) {
	runsHere(t)
	path := filepath.Join(t.TempDir(), "tunnel-cni")
	data := dataOf(t, archived(t, amd64(t)), "tunnel_v0.1.0_linux_amd64/tunnel-cni")
	if err := os.WriteFile(path, data, 0o755); err != nil {
		t.Fatal(err)
	}
	out, err := output(t.Context(), "/", []string{"CNI_COMMAND=VERSION"}, path)
	if err != nil || !strings.Contains(string(out), `"supportedVersions":`) {
		t.Errorf("VERSION answers %q, %v", out, err)
	}
	if !bytes.Contains(data, []byte("v0.1.0")) {
		t.Error("the plugin does not hold its version")
	}
}

// fakeDocuments are documents without content that matters.
func fakeDocuments() documents {
	return documents{
		completions: map[string][]byte{"bash": []byte("b"), "zsh": []byte("z"), "fish": []byte("f")},
		manuals:     []file{{name: "tunnel.1", data: []byte("m")}, {name: "tunnel-edge.1", data: []byte("m")}},
		units:       []file{{name: "tunnel-edge.service", data: []byte("ExecStart=/usr/local/bin/tunnel edge\n")}},
		dropIns:     []file{{name: "tunnel-edge-cni.conf", data: []byte("[Service]\n")}},
		examples:    []file{{name: "edge.toml", data: []byte("e")}},
		license:     []byte("l"), readme: []byte("r"),
	}
}

// fakeProgram is a program for os/arch that is none.
func fakeProgram(os, arch string) *program {
	p := &program{platform: platform{os, arch}, data: []byte("program " + arch), notices: []byte("n")}
	if os == "linux" {
		p.plugin = []byte("plugin " + arch)
	}
	return p
}

func TestArchiveForWindows(t *testing.T) {
	r := small(t)
	if err := r.addArchive(fakeProgram("windows", "amd64"), fakeDocuments()); err != nil {
		t.Fatal(err)
	}
	data := read(t, r.dir, "tunnel_v0.1.0_windows_amd64.zip")
	archive, err := zip.NewReader(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range archive.File {
		got = append(got, f.Name)
		if f.Modified.Unix() != commitTime {
			t.Errorf("%s: time %s", f.Name, f.Modified)
		}
	}
	const dir = "tunnel_v0.1.0_windows_amd64/"
	for _, name := range []string{"tunnel.exe", "LICENSE", "NOTICES", "README.md", "conf/edge.toml"} {
		if !slices.Contains(got, dir+name) {
			t.Errorf("no %s in %q", name, got)
		}
	}
	for _, linux := range []string{"systemd", "tunnel-cni"} {
		if slices.ContainsFunc(got, func(name string) bool { return strings.Contains(name, linux) }) {
			t.Errorf("%s in %q", linux, got)
		}
	}
	if !slices.IsSorted(got) {
		t.Errorf("not sorted: %q", got)
	}
	f, err := archive.Open(dir + "tunnel.exe")
	if err != nil {
		t.Fatal(err)
	}
	if content, err := io.ReadAll(f); err != nil || string(content) != "program amd64" {
		t.Errorf("tunnel.exe holds %q, %v", content, err)
	}
}
