package main

import (
	"archive/zip"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/mod/module"
	modzip "golang.org/x/mod/zip"
)

func TestGoProxy(t *testing.T) {
	r := small(t)
	r.module = "example.org/Tunnel"
	for name, text := range map[string]string{
		"go.mod": "module example.org/Tunnel\n\ngo 1.26\n", "x.go": "package tunnel\n", "LICENSE": mit,
		"tools/release/go.mod": "module example.org/Tunnel/tools/release\n", "tools/release/main.go": "package main\n",
		".gitignore": "/bin/\n", "bin/tunnel": "binary",
	} {
		write(t, r.root, name, text)
	}
	if err := commit(r.root); err != nil {
		t.Fatal(err)
	}
	var err error
	if r.files, err = tracked(t.Context(), r.root); err != nil {
		t.Fatal(err)
	}
	if err = r.addModule(); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(r.dir, "goproxy/example.org/!tunnel/@v")
	if list := string(read(t, dir, "list")); list != "v0.1.0\n" {
		t.Errorf("list: %q", list)
	}
	var info struct{ Version, Time string }
	err = json.Unmarshal(read(t, dir, "v0.1.0.info"), &info)
	if err != nil || info.Version != "v0.1.0" || info.Time != "2001-09-09T01:46:40Z" {
		t.Errorf("info: %+v, %v", info, err)
	}
	if mod := string(read(t, dir, "v0.1.0.mod")); mod != "module example.org/Tunnel\n\ngo 1.26\n" {
		t.Errorf("mod: %q", mod)
	}
	path := filepath.Join(dir, "v0.1.0.zip")
	if _, err = modzip.CheckZip(module.Version{Path: "example.org/Tunnel", Version: "v0.1.0"}, path); err != nil {
		t.Error(err)
	}
	archive, err := zip.OpenReader(path)
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	var got []string
	for _, f := range archive.File {
		got = append(got, strings.TrimPrefix(f.Name, "example.org/Tunnel@v0.1.0/"))
	}
	if want := []string{".gitignore", "LICENSE", "go.mod", "x.go"}; !slices.Equal(got, want) {
		t.Errorf("the zip holds %q, want %q", got, want)
	}
}

// TestGoInstall installs tunnel from a release, as docs/releases.md says. Other modules come from the module cache.
func TestGoInstall(t *testing.T) {
	path, err := modulePath("../..")
	if err != nil {
		t.Fatal(err)
	}
	runsHere(t)
	e := amd64(t)
	cache := strings.TrimSpace(tool(t, ".", "go", "env", "GOMODCACHE"))
	bin, downloads := t.TempDir(), t.TempDir()
	env := append(os.Environ(), "GOBIN="+bin, "GOMODCACHE="+downloads, "CGO_ENABLED=0",
		// -modcacherw: the test's folder must be removable. -trimpath: the compiler's cache then serves.
		"GOFLAGS=-modcacherw -trimpath -tags=grpcnotrace",
		"GOPROXY=file://"+filepath.Join(e.dir, "goproxy")+",file://"+filepath.Join(cache, "cache", "download")+",off",
		"GOSUMDB=off", "GOTOOLCHAIN=local")
	if _, err = output(t.Context(), t.TempDir(), env, "go", "install", path+"/cmd/tunnel@v0.1.0"); err != nil {
		t.Fatal(err)
	}
	if out := tool(t, "/", filepath.Join(bin, "tunnel"), "version"); !strings.HasPrefix(out, "tunnel v0.1.0\n") {
		t.Errorf("tunnel version prints %q", out)
	}
}
