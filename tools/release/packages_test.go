package main

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sassoftware/go-rpmutils"
)

// packaged returns the paths that a package installs. units and zsh are the folders that differ by distribution.
func packaged(units, zsh string) []string {
	paths := []string{
		"/usr/bin/kubectl-edgetunnel",
		"/usr/bin/kubectl_complete-edgetunnel",
		"/usr/bin/tunnel",
		"/usr/bin/tunnel-cni",
		"/usr/share/bash-completion/completions/tunnel",
		"/usr/share/doc/tunnel/NOTICES",
		"/usr/share/doc/tunnel/README.md",
		"/usr/share/doc/tunnel/copyright",
		"/usr/share/doc/tunnel/examples/cloud.toml",
		"/usr/share/doc/tunnel/examples/edge.toml",
		"/usr/share/doc/tunnel/examples/tunnel-edge-cni.conf",
		"/usr/share/doc/tunnel/examples/tunnel-edge-services.conf",
		"/usr/share/fish/vendor_completions.d/tunnel.fish",
		"/usr/share/man/man1/tunnel.1.gz",
		units + "/tunnel-cloud.service",
		units + "/tunnel-edge.service",
		zsh + "/_tunnel",
	}
	slices.Sort(paths)
	return paths
}

// checkInstalled checks the content of the files of a package. open returns an installed file.
func checkInstalled(t *testing.T, e example, units string, open func(path string) []byte) {
	t.Helper()
	files := archived(t, e)
	for path, name := range map[string]string{
		"/usr/bin/tunnel":                               "tunnel",
		"/usr/bin/tunnel-cni":                           "tunnel-cni",
		"/usr/share/doc/tunnel/copyright":               "LICENSE",
		"/usr/share/doc/tunnel/NOTICES":                 "NOTICES",
		"/usr/share/bash-completion/completions/tunnel": "completions/tunnel.bash",
	} {
		if !bytes.Equal(open(path), dataOf(t, files, "tunnel_v0.1.0_linux_amd64/"+name)) {
			t.Errorf("%s is not the archive's %s", path, name)
		}
	}
	for _, unit := range []string{"tunnel-edge", "tunnel-cloud"} {
		text := string(open(units + "/" + unit + ".service"))
		if strings.Count(text, "\nExecStart=/usr/bin/tunnel ") != 1 || !strings.Contains(text, "\nDynamicUser=yes\n") {
			t.Errorf("%s:\n%s", unit, text)
		}
	}
	z, err := gzip.NewReader(bytes.NewReader(open("/usr/share/man/man1/tunnel.1.gz")))
	if err != nil {
		t.Fatal(err)
	}
	page, err := io.ReadAll(z)
	if err != nil || !bytes.Equal(page, dataOf(t, files, "tunnel_v0.1.0_linux_amd64/man/tunnel.1")) {
		t.Errorf("the man page is not the archive's: %v", err)
	}
}

func TestDeb(t *testing.T) {
	need(t, "dpkg-deb")
	e := amd64(t)
	deb := filepath.Join(e.dir, "tunnel_0.1.0-1_amd64.deb")
	for field, want := range map[string]string{
		"Package": "tunnel", "Version": "0.1.0-1", "Architecture": "amd64", "Depends": "", "Section": "net",
		"Maintainer": "The tunnel authors",
	} {
		if got := strings.TrimSpace(tool(t, "/", "dpkg-deb", "-f", deb, field)); got != want {
			t.Errorf("%s: %q, want %q", field, got, want)
		}
	}
	control, data := t.TempDir(), t.TempDir()
	tool(t, "/", "dpkg-deb", "-e", deb, control)
	entries, err := os.ReadDir(control)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, entry := range entries {
		got = append(got, entry.Name())
	}
	// No conffiles: what an operator's /etc/tunnel holds is the operator's.
	if want := []string{"control", "md5sums", "postinst", "postrm", "prerm"}; !slices.Equal(got, want) {
		t.Errorf("control files %q, want %q", got, want)
	}
	for _, name := range []string{"postinst", "postrm", "prerm"} {
		if !bytes.Equal(read(t, control, name), read(t, e.root, "deployment/packages/deb", name)) {
			t.Errorf("%s differs from its source", name)
		}
	}

	got = nil
	for line := range strings.Lines(tool(t, "/", "dpkg-deb", "-c", deb)) {
		fields := strings.Fields(line) // mode, owner, size, date, time, path
		if fields[1] != "root/root" && fields[1] != "0/0" {
			t.Errorf("owner %s: %s", fields[1], line)
		}
		path := strings.TrimPrefix(fields[5], ".")
		if !strings.HasSuffix(path, "/") {
			got = append(got, path)
		}
		if strings.HasPrefix(fields[0], "l") { // the mode of a link means nothing
			if to := fields[len(fields)-1]; to != "tunnel" {
				t.Errorf("%s leads to %s", path, to)
			}
			continue
		}
		executable := strings.HasPrefix(path, "/usr/bin/") || strings.HasSuffix(path, "/")
		if strings.Contains(fields[0][1:], "x") != executable {
			t.Errorf("mode %s: %s", fields[0], path)
		}
	}
	slices.Sort(got)
	want := packaged("/lib/systemd/system", "/usr/share/zsh/vendor-completions")
	if !slices.Equal(withoutPages(got), want) {
		t.Errorf("the package installs\n%q, want\n%q", got, want)
	}
	tool(t, "/", "dpkg-deb", "-x", deb, data)
	for _, name := range kubectlNames() {
		if to, err := os.Readlink(filepath.Join(data, "usr/bin", name)); err != nil || to != "tunnel" {
			t.Errorf("%s is a link to %q: %v", name, to, err)
		}
	}
	checkInstalled(t, e, "/lib/systemd/system", func(path string) []byte { return read(t, data, path) })
}

// leftBy lists what is below dir but folders, and but dpkg's own files.
func leftBy(t *testing.T, dir string) (left []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if !strings.HasPrefix(name, "var/lib/dpkg/") && !strings.HasPrefix(name, "var/log/") {
			left = append(left, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(left)
	return left
}

// TestDebLife installs, upgrades, removes and purges the package in a folder, with dpkg's own database there.
func TestDebLife(t *testing.T) {
	need(t, "dpkg")
	if os.Geteuid() != 0 {
		t.Skip("dpkg installs as root only")
	}
	e := amd64(t)
	runsHere(t)
	root := t.TempDir()
	for _, name := range []string{"status", "available", "info/format", "updates/.keep"} {
		write(t, root, "var/lib/dpkg/"+name, map[string]string{"info/format": "1\n"}[name])
	}
	if err := os.Remove(filepath.Join(root, "var/lib/dpkg/updates/.keep")); err != nil {
		t.Fatal(err)
	}
	dpkg := func(args ...string) {
		t.Helper()
		// Scripts of a folder without a shell run outside of it, with DPKG_ROOT.
		all := append([]string{"--root=" + root, "--force-script-chrootless", "--log=/dev/null"}, args...)
		tool(t, "/", "dpkg", all...)
	}
	operators := []string{
		"etc/tunnel/cloud.toml", "etc/tunnel/pki/ca.key", "var/lib/private/tunnel-edge/node.pem",
		"var/lib/private/tunnel-cloud/x", "etc/systemd/system/tunnel-edge.service.d/override.conf",
		"etc/systemd/system/multi-user.target.wants/tunnel-cloud.service",
		"etc/systemd/system/tunnel-cloud.service.old", // by `tunnel init --systemd`
	}
	others := []string{"etc/tunnel.d/x", "var/lib/private/other/x", "etc/systemd/system/other.service"}
	slices.Sort(others)

	dpkg("-i", filepath.Join(e.dir, "tunnel_0.1.0-1_amd64.deb"))
	out := tool(t, "/", filepath.Join(root, "usr/bin/tunnel"), "version")
	if !strings.HasPrefix(out, "tunnel v0.1.0\n") {
		t.Errorf("tunnel version prints %q", out)
	}
	for _, name := range slices.Concat(operators, others) {
		write(t, root, name, "x")
	}
	if err := os.Symlink("private/tunnel-edge", filepath.Join(root, "var/lib/tunnel-edge")); err != nil {
		t.Fatal(err)
	}
	dpkg("-i", filepath.Join(e.dir, "tunnel_0.1.0-1_amd64.deb"))
	dpkg("-r", "tunnel")
	kept := append(slices.Concat(operators, others), "var/lib/tunnel-edge")
	slices.Sort(kept)
	if left := leftBy(t, root); !slices.Equal(left, kept) {
		t.Errorf("after the removal there is\n%q, want\n%q", left, kept)
	}
	// A purge long after the removal: meanwhile an archive's program runs the service.
	const unit = "etc/systemd/system/tunnel-cloud.service"
	purge := func(program string) {
		t.Helper()
		write(t, root, unit, "[Service]\nExecStart="+program+" cloud -c /etc/tunnel/cloud.toml\n")
		cmd := exec.Command("sh", "../../deployment/packages/deb/postrm", "purge")
		cmd.Env = append(os.Environ(), "DPKG_ROOT="+root)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	purge("/usr/local/bin/tunnel")
	stays := []string{unit, "etc/tunnel/cloud.toml", "etc/tunnel/pki/ca.key", "var/lib/private/tunnel-cloud/x"}
	for _, name := range stays {
		if _, err := os.Stat(filepath.Join(root, name)); err != nil {
			t.Errorf("a purge while another program runs: %v", err)
		}
	}
	purge("/usr/bin/tunnel")
	dpkg("-P", "tunnel")
	if left := leftBy(t, root); !slices.Equal(left, others) {
		t.Errorf("after the purge there is\n%q, want\n%q", left, others)
	}
	for _, dir := range []string{"etc/tunnel", "var/lib/private/tunnel-edge", "usr/share/doc/tunnel"} {
		if _, err := os.Stat(filepath.Join(root, dir)); err == nil {
			t.Errorf("after the purge there is %s", dir)
		}
	}
}

func TestRPM(t *testing.T) {
	e := amd64(t)
	f, err := os.Open(filepath.Join(e.dir, "tunnel-0.1.0-1.x86_64.rpm"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rpm, err := rpmutils.ReadRpm(f)
	if err != nil {
		t.Fatal(err)
	}
	nevra, err := rpm.Header.GetNEVRA()
	if err != nil {
		t.Fatal(err)
	}
	if nevra.Name != "tunnel" || nevra.Version != "0.1.0" || nevra.Release != "1" || nevra.Arch != "x86_64" {
		t.Errorf("package %v", nevra)
	}
	for tag, want := range map[int]string{rpmutils.BUILDHOST: "localhost", rpmutils.LICENSE: "Apache-2.0"} {
		if got, err := rpm.Header.GetString(tag); err != nil || got != want {
			t.Errorf("tag %d: %q, %v; want %q", tag, got, err, want)
		}
	}
	if built, err := rpm.Header.GetInt(rpmutils.BUILDTIME); err != nil || built != commitTime {
		t.Errorf("built at %d, %v", built, err)
	}
	for tag, script := range map[int]string{
		rpmutils.POSTIN: "post", rpmutils.PREUN: "preun", rpmutils.POSTUN: "postun",
	} {
		got, err := rpm.Header.GetString(tag)
		if want := string(read(t, e.root, "deployment/packages/rpm", script)); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", script, got, err, want)
		}
	}

	payload, err := rpm.PayloadReaderExtended()
	if err != nil {
		t.Fatal(err)
	}
	content := map[string][]byte{}
	var paths []string
	for {
		info, err := payload.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(payload)
		if err != nil {
			t.Fatal(err)
		}
		content[info.Name()], paths = data, append(paths, info.Name())
		want := 0o100644
		switch {
		case slices.Contains(kubectlNames(), path.Base(info.Name())):
			want = 0o120000
		case strings.HasPrefix(info.Name(), "/usr/bin/tunnel"):
			want = 0o100755
		}
		if info.Mode() != want || info.UserName() != "root" || info.GroupName() != "root" || info.Mtime() != commitTime {
			t.Errorf("%s: mode %o, owner %s:%s, time %d",
				info.Name(), info.Mode(), info.UserName(), info.GroupName(), info.Mtime())
		}
		if sum := fmt.Sprintf("%x", sha256.Sum256(data)); want != 0o120000 && info.Digest() != sum {
			t.Errorf("%s: digest %s, want %s", info.Name(), info.Digest(), sum)
		}
		if want == 0o120000 && info.Linkname() != "tunnel" {
			t.Errorf("%s is a link to %q", info.Name(), info.Linkname())
		}
	}
	slices.Sort(paths)
	want := packaged("/usr/lib/systemd/system", "/usr/share/zsh/site-functions")
	if !slices.Equal(withoutPages(paths), want) {
		t.Errorf("the package installs\n%q, want\n%q", paths, want)
	}
	checkInstalled(t, e, "/usr/lib/systemd/system", func(path string) []byte { return content[path] })
}

// TestPackageNames checks name and architecture of the packages for each platform that has some.
func TestPackageNames(t *testing.T) {
	r := small(t)
	for _, format := range packageFormats() {
		for _, script := range format.scripts[1:] {
			write(t, r.root, "deployment/packages/"+format.name+"/"+script, "#!/bin/sh\n")
		}
	}
	r.version = "v0.2.0-rc.1"
	for _, p := range every() {
		if err := r.addPackages(fakeProgram(p.os, p.arch), fakeDocuments()); err != nil {
			t.Fatal(err)
		}
	}
	// Both formats sort a tilde before the end of the version: 0.2.0~rc.1 is older than 0.2.0.
	want := []string{
		"tunnel-0.2.0~rc.1-1.aarch64.rpm", "tunnel-0.2.0~rc.1-1.armv7hl.rpm", "tunnel-0.2.0~rc.1-1.x86_64.rpm",
		"tunnel_0.2.0~rc.1-1_amd64.deb", "tunnel_0.2.0~rc.1-1_arm64.deb", "tunnel_0.2.0~rc.1-1_armhf.deb",
	}
	files, err := filesBelow(r.dir)
	if err != nil {
		t.Fatal(err)
	}
	if got := names(t, files); !slices.Equal(got, want) {
		t.Errorf("packages %q, want %q", got, want)
	}
}

func TestPackagedUnit(t *testing.T) {
	for text, want := range map[string]string{
		"[Service]\nExecStart=/usr/local/bin/tunnel edge -c /etc/tunnel/edge.toml\n": "[Service]\n" +
			"ExecStart=/usr/bin/tunnel edge -c /etc/tunnel/edge.toml\n",
		"[Service]\nExecStart=/usr/bin/tunnel cloud\n": "[Service]\nExecStart=/usr/bin/tunnel cloud\n",
		"[Service]\n": "",
		"[Service]\nExecStart=/bin/sh -c tunnel\n":                   "",
		"ExecStart=/usr/bin/tunnel a\nExecStart=/usr/bin/tunnel b\n": "",
	} {
		got, err := packagedUnit(file{name: "x.service", data: []byte(text)})
		if string(got) != want || (err == nil) != (want != "") {
			t.Errorf("%q becomes %q, %v; want %q", text, got, err, want)
		}
	}
}

// When somebody removes the package, it prints what it leaves on the machine: the pods' network, if an edge has
// written a network configuration, and nftables rules, if an edge has a state file of Services. An upgrade prints
// neither.
func TestRemovalNamesWhatStays(t *testing.T) {
	const hint = "tunnel: To remove them, install tunnel again, drain the node and run: tunnel cni uninstall\n"
	const rules = "tunnel: If an edge had mode = \"full\", its rules and routes stay; to remove them: " +
		"nft delete table inet tunnel-services; ip route flush table default proto 117; " +
		"ip -6 route flush table default proto 117\n"
	for _, script := range []struct{ name, remove, upgrade string }{
		{"deb/prerm", "remove", "upgrade"}, {"rpm/preun", "0", "1"},
	} {
		root := t.TempDir()
		conf := filepath.Join(root, "etc/cni/net.d")
		// rpm's scripts know no other root. Without a PATH they find no systemctl.
		text := strings.ReplaceAll(string(read(t, "../../deployment/packages", script.name)), " /etc/cni/net.d", " "+conf)
		state := filepath.Join(root, "var/lib/tunnel")
		text = strings.ReplaceAll(text, " /var/lib/tunnel", " "+state)
		says := func(action string) string {
			cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", text, script.name, action)
			cmd.Env = []string{"DPKG_ROOT=" + root, "PATH=/nowhere"}
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%s %s: %v", script.name, action, err)
			}
			return string(out)
		}
		if got := says(script.remove); got != "" {
			t.Errorf("%s without a network of pods says %q", script.name, got)
		}
		if err := os.MkdirAll(conf, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(conf, "10-tunnel.conflist"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := says(script.remove); !strings.HasSuffix(got, hint) {
			t.Errorf("%s says %q, want %q at its end", script.name, got, hint)
		}
		if err := os.MkdirAll(state, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(state, "services.db"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := says(script.remove); !strings.HasSuffix(got, hint+rules) {
			t.Errorf("%s says %q, want %q at its end", script.name, got, hint+rules)
		}
		if got := says(script.upgrade); got != "" {
			t.Errorf("%s at an upgrade says %q", script.name, got)
		}
	}
}
