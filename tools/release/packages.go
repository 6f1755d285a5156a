package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/goreleaser/nfpm/v2"
	"github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/files"
	"github.com/goreleaser/nfpm/v2/rpm"
)

// packageFormat is a format of packages, and what its distributions expect.
type packageFormat struct {
	name    string // also of the folder in deployment/packages
	write   nfpm.Packager
	units   string            // folder of systemd's units
	zsh     string            // folder of zsh's completions
	license string            // type of the files with licences
	scripts [4]string         // files: before and after an installation, before and after a removal; "": none
	arch    map[string]string // by Go's name
}

// packageFormats returns the formats that a release has.
func packageFormats() []packageFormat {
	return []packageFormat{
		{
			name: "deb", write: deb.Default,
			units: "/lib/systemd/system", zsh: "/usr/share/zsh/vendor-completions", license: files.TypeFile,
			scripts: [4]string{"", "postinst", "prerm", "postrm"},
			arch:    map[string]string{"amd64": "amd64", "arm64": "arm64", "arm": "armhf"},
		},
		{
			name: "rpm", write: rpm.DefaultRPM,
			units: "/usr/lib/systemd/system", zsh: "/usr/share/zsh/site-functions", license: files.TypeRPMLicense,
			scripts: [4]string{"", "post", "preun", "postun"},
			arch:    map[string]string{"amd64": "x86_64", "arm64": "aarch64", "arm": "armv7hl"},
		},
	}
}

// addPackages writes the packages for p, which only Linux has.
func (r *release) addPackages(p *program, docs documents) error {
	if p.os != "linux" {
		return nil
	}
	for _, format := range packageFormats() {
		info, err := r.packageInfo(format, p, docs)
		if err != nil {
			return fmt.Errorf("%s: %w", format.name, err)
		}
		var b bytes.Buffer
		if err = format.write.Package(info, &b); err != nil {
			return fmt.Errorf("%s: %w", format.name, err)
		}
		if err = r.put(format.write.ConventionalFileName(info), b.Bytes()); err != nil {
			return err
		}
	}
	return nil
}

// packageInfo describes the package of p to nfpm.
func (r *release) packageInfo(format packageFormat, p *program, docs documents) (*nfpm.Info, error) {
	contents, err := r.packageContents(format, p, docs)
	if err != nil {
		return nil, err
	}
	info := &nfpm.Info{
		Name: "tunnel", Arch: format.arch[p.arch], Platform: "linux",
		Version: r.version, VersionSchema: "semver", Release: "1",
		Section: "net", Priority: "optional", License: "Apache-2.0",
		Maintainer: "The tunnel authors",
		Description: "reach edge nodes behind NAT\n" +
			"tunnel cloud runs where edge nodes can dial it, tunnel edge runs on each node.\n" +
			"Then kubectl logs, exec, attach, port-forward and top work on nodes behind NAT,\n" +
			"and callers in the cloud's network reach TCP services on and near the nodes.",
		MTime:           r.time,
		DisableGlobbing: true,
		Overridables:    nfpm.Overridables{Contents: contents},
	}
	info.RPM.BuildHost = "localhost" // else the name of this machine gets into the package
	for i, to := range []*string{
		&info.Scripts.PreInstall, &info.Scripts.PostInstall, &info.Scripts.PreRemove, &info.Scripts.PostRemove,
	} {
		if format.scripts[i] != "" {
			*to = filepath.Join(r.root, "deployment", "packages", format.name, format.scripts[i])
		}
	}
	return nfpm.WithDefaults(info), nil
}

// packageContents writes what the package holds into the work folder, since nfpm reads files.
func (r *release) packageContents(format packageFormat, p *program, docs documents) (files.Contents, error) {
	dir := filepath.Join(r.work, p.String(), format.name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	var contents files.Contents
	var failed error
	add := func(kind, destination string, mode fs.FileMode, data []byte) {
		source := filepath.Join(dir, fmt.Sprintf("%03d", len(contents)))
		if err := os.WriteFile(source, data, 0o644); err != nil && failed == nil {
			failed = err
		}
		contents = append(contents, &files.Content{
			Source: source, Destination: destination, Type: kind,
			FileInfo: &files.ContentFileInfo{Owner: "root", Group: "root", Mode: mode, MTime: r.time},
		})
	}
	plain := func(destination string, data []byte) { add(files.TypeFile, destination, 0o644, data) }

	add(files.TypeFile, "/usr/bin/tunnel", 0o755, p.data)
	add(files.TypeFile, "/usr/bin/"+pluginName, 0o755, p.plugin)
	for _, name := range kubectlNames() {
		contents = append(contents, &files.Content{
			Source: "tunnel", Destination: "/usr/bin/" + name, Type: files.TypeSymlink,
			FileInfo: &files.ContentFileInfo{Owner: "root", Group: "root", MTime: r.time},
		})
	}
	for _, unit := range docs.units {
		text, err := packagedUnit(unit)
		if err != nil {
			return nil, err
		}
		plain(format.units+"/"+unit.name, text)
	}
	for _, page := range docs.manuals {
		text, err := compressed(page.data)
		if err != nil {
			return nil, err
		}
		plain("/usr/share/man/man1/"+page.name+".gz", text)
	}
	plain("/usr/share/bash-completion/completions/tunnel", docs.completions["bash"])
	plain(format.zsh+"/_tunnel", docs.completions["zsh"])
	plain("/usr/share/fish/vendor_completions.d/tunnel.fish", docs.completions["fish"])
	plain("/usr/share/doc/tunnel/README.md", docs.readme)
	for _, example := range slices.Concat(docs.examples, docs.dropIns) {
		plain("/usr/share/doc/tunnel/examples/"+example.name, example.data)
	}
	add(format.license, "/usr/share/doc/tunnel/copyright", 0o644, docs.license)
	add(format.license, "/usr/share/doc/tunnel/NOTICES", 0o644, p.notices)
	return contents, failed
}

// execStart matches the program that a unit starts.
var execStart = regexp.MustCompile(`(?m)^ExecStart=\S+/tunnel `)

// packagedUnit returns the text of a unit that starts the program of the package. `tunnel join --systemd`
// installs the same unit with another path.
func packagedUnit(unit file) ([]byte, error) {
	if len(execStart.FindAll(unit.data, -1)) != 1 {
		return nil, fmt.Errorf("%s: want one line that begins with ExecStart=/…/tunnel", unit.name)
	}
	return execStart.ReplaceAll(unit.data, []byte("ExecStart=/usr/bin/tunnel ")), nil
}
