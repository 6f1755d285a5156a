package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// debianSuite is the Debian of debian. The pages state the units' exposures by its systemd (252).
const debianSuite = "bookworm"

// debian is a Debian of debootstrap in a folder of its own: what is essential, and systemd. Commands run in it as on
// a machine of their own (testdata/machine.sh). systemd there sees cgroup v2 alone. It needs no controller: it boots
// on a machine whose own controllers are those of cgroup v1, and whose process 1 is not systemd.
type debian struct {
	t    *testing.T
	root string
	pid  int // of systemd, once boot has returned
}

// newDebian unpacks a Debian with the packages old.deb and new.deb in /srv. It skips the test where none can run.
func newDebian(t *testing.T) *debian {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a machine in namespaces needs root")
	}
	runsHere(t)
	need(t, "debootstrap")
	probe := append(namespaces(), "sh", "-c", "mount -t cgroup2 cgroup2 /mnt && mkdir /mnt/$0 && rmdir /mnt/$0",
		cgroupName())
	if out, err := exec.Command("unshare", probe...).CombinedOutput(); err != nil {
		t.Skipf("no machine can be made here: %v: %s", err, out)
	}
	d := &debian{t: t, root: t.TempDir()}
	t.Cleanup(d.removeCgroup)
	tool(t, "/", "tar", "-C", d.root, "--numeric-owner", "-xpzf", debianArchive(t))
	if err := os.Chmod(d.root, 0o755); err != nil { // debootstrap's folder was one of MkdirTemp
		t.Fatal(err)
	}
	for to, from := range map[string]string{
		"old.deb": filepath.Join(amd64(t).dir, "tunnel_0.1.0-1_amd64.deb"), "new.deb": newerDeb(t),
	} {
		if err := copyFile(from, filepath.Join(d.root, "srv", to)); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// namespaces are the flags of unshare(1) that make a machine.
func namespaces() []string {
	return []string{
		"--mount", "--propagation=private", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child=SIGKILL",
	}
}

// cgroupName returns the name of a machine's cgroup. No two machines of this process live at the same time.
func cgroupName() string { return fmt.Sprintf("tunnel-release-%d", os.Getpid()) }

// debianArchive returns the path of a tar with a Debian. It is made once, and kept in the user's cache.
func debianArchive(t *testing.T) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	cache = filepath.Join(cache, "tunnel-release")
	path := filepath.Join(cache, "debian-"+debianSuite+"-systemd.tar.gz")
	if _, err = os.Stat(path); err == nil {
		return path
	}
	if err = os.MkdirAll(cache, 0o755); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(cache, "debootstrap-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	t.Logf("debootstrap of %s, for %s", debianSuite, path)
	// What debootstrap mounts in its folder goes with the namespace.
	args := append([]string{
		"--mount", "--propagation=private", "debootstrap", "--variant=minbase", "--include=systemd", debianSuite, dir,
	}, debianMirror(t)...)
	tool(t, "/", "unshare", args...)
	tool(t, dir, "sh", "-c", "rm -rf var/cache/apt/*.bin var/cache/apt/archives/*.deb var/lib/apt/lists/*")
	tool(t, dir, "tar", "--numeric-owner", "-czf", path+".new", ".")
	if err = os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	return path
}

// debianMirror returns the mirror from which apt of this machine takes the suite. If apt has none, debianMirror returns
// nothing, and debootstrap uses its own default.
func debianMirror(t *testing.T) []string {
	t.Helper()
	out := tool(t, "/", "apt-get", "indextargets", "--format", "$(REPO_URI)",
		"Created-By: Packages", "Codename: "+debianSuite, "Component: main")
	mirrors := strings.Fields(out)
	return mirrors[:min(1, len(mirrors))]
}

// newerDeb returns the package of the next version of the same tree.
func newerDeb(t *testing.T) string {
	t.Helper()
	o := amd64(t).options
	o.wanted, o.out = "v0.2.0", filepath.Join(testFolder, "newer")
	path := filepath.Join(o.out, "tunnel_0.2.0-1_amd64.deb")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	if err := git(o.root, "tag", o.wanted); err != nil {
		t.Fatal(err)
	}
	if err := build(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	return path
}

// command returns a command that runs another one as process 1 of a machine. The machine ends with this process.
func (d *debian) command(name string, args ...string) *exec.Cmd {
	script, err := filepath.Abs("testdata/machine.sh")
	if err != nil {
		d.t.Fatal(err)
	}
	d.removeCgroup()
	all := append(namespaces(), "bash", script, d.root, cgroupName(), name)
	cmd := exec.Command("unshare", append(all, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// shell runs lines of bash on the machine, and returns what they print. Without boot, each call is a machine that
// systemd does not run.
func (d *debian) shell(lines string) string {
	d.t.Helper()
	bash := []string{"/bin/bash", "-euo", "pipefail", "-c", lines}
	var cmd *exec.Cmd
	if d.pid == 0 {
		cmd = d.command(bash[0], bash[1:]...)
	} else {
		args := []string{
			"--target", strconv.Itoa(d.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd",
		}
		cmd = exec.CommandContext(d.t.Context(), "nsenter", append(args, bash...)...)
		cmd.Env = []string{"HOME=/root", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"}
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		d.t.Errorf("%s\n%v\n%s%s", lines, err, stdout.String(), stderr.String())
		if d.pid != 0 && lines != diagnosis {
			d.t.Log(d.shell(diagnosis))
		}
		d.t.FailNow()
	}
	return stdout.String()
}

// diagnosis prints what systemd knows about the services.
const diagnosis = "systemctl --no-pager --lines=0 status 'tunnel-*' || true; journalctl --no-pager --lines=60"

// removeCgroup removes the cgroups of a machine that has ended.
func (d *debian) removeCgroup() {
	out, err := exec.Command("unshare", "--mount", "--propagation=private", "sh", "-ec",
		`mount -t cgroup2 cgroup2 /mnt; [ ! -d "/mnt/$0" ] || find "/mnt/$0" -depth -type d -exec rmdir {} +`,
		cgroupName()).CombinedOutput()
	if err != nil {
		d.t.Errorf("cgroup: %v: %s", err, out)
	}
}

// boot starts systemd, and waits until the machine is up. The machine ends with the test.
func (d *debian) boot() {
	d.t.Helper()
	cmd := d.command("/lib/systemd/systemd", "--system")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	children := fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid)
	child := 0
	d.t.Cleanup(func() {
		kill := cmd.Process.Kill
		if child > 0 { // then unshare returns when all processes of the machine are gone
			kill = func() error { return syscall.Kill(child, syscall.SIGKILL) }
		}
		if err := kill(); err != nil {
			d.t.Errorf("systemd has ended by itself: %v", err)
		}
		if err := cmd.Wait(); d.t.Failed() {
			d.t.Logf("unshare: %v\n%s", err, log.String())
		}
		d.pid = 0
	})
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		// Until the script is systemd, nsenter would enter the files of this machine.
		child, _ = strconv.Atoi(strings.TrimSpace(string(read(d.t, children))))
		if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", child)); err == nil && strings.HasSuffix(exe, "/systemd") {
			break
		}
		if time.Now().After(deadline) {
			d.t.Fatalf("systemd does not start: %s", log.String())
		}
	}
	d.pid = child
	// "degraded" says that a unit of Debian does not run in a container.
	d.shell(`
for i in $(seq 300); do
	case $(systemctl is-system-running 2>/dev/null) in running|degraded) exit;; esac
	sleep 0.1
done
systemctl is-system-running || true; systemctl list-jobs
exit 1`)
}

// files returns what the disk of the machine holds, by path: mode, owner, and link or sum. It leaves out what dpkg and
// systemd note for themselves.
func (d *debian) files() map[string]string {
	d.t.Helper()
	own := regexp.MustCompile(`^/var/lib/dpkg(/|$)|^/var/log/dpkg\.log$|^/var/log/journal/|^/var/lib/systemd/` +
		`|^/var/(lib|cache|log)/private$`)
	found := map[string]string{}
	err := filepath.WalkDir(d.root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := "/" + strings.TrimPrefix(strings.TrimPrefix(path, d.root), "/")
		if own.MatchString(name) {
			return nil
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		stat := info.Sys().(*syscall.Stat_t)
		what := fmt.Sprintf("%s %d:%d", info.Mode(), stat.Uid, stat.Gid)
		switch {
		case info.Mode().IsRegular() && !strings.HasSuffix(name, "/nodes.json"): // the cloud writes it as nodes come and go
			what += fmt.Sprintf(" %x", sha256.Sum256(read(d.t, path)))
		case info.Mode().Type() == fs.ModeSymlink:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			what += " " + target
		}
		found[name] = what
		return nil
	})
	if err != nil {
		d.t.Fatal(err)
	}
	return found
}

// changes returns the paths at which two states of the disk differ, sorted.
func changes(before, after map[string]string) []string {
	var paths []string
	for path, what := range after {
		if before[path] != what {
			paths = append(paths, path)
		}
	}
	for path := range before {
		if _, ok := after[path]; !ok {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	return paths
}

// wantPurged checks that a purge has left the disk as it was, and dpkg's database too.
func (d *debian) wantPurged(before map[string]string) {
	d.t.Helper()
	after := d.files()
	for _, path := range changes(before, after) {
		d.t.Errorf("%s was %q, and after the purge it is %q", path, before[path], after[path])
	}
	left, err := filepath.Glob(filepath.Join(d.root, "var/lib/dpkg/info/tunnel*"))
	if err != nil || len(left) != 0 {
		d.t.Errorf("dpkg has %q, %v", left, err)
	}
	if status := read(d.t, d.root, "var/lib/dpkg/status"); bytes.Contains(status, []byte("Package: tunnel\n")) {
		d.t.Error("dpkg knows the package still")
	}
}

// debianPaths returns the paths of the package in Debian, where /lib is /usr/lib.
func debianPaths() []string {
	return packaged("/usr/lib/systemd/system", "/usr/share/zsh/vendor-completions")
}

// TestDebInDebian installs, upgrades and purges the package in a Debian that systemd does not run.
func TestDebInDebian(t *testing.T) {
	d := newDebian(t)
	before := d.files()
	d.shell("dpkg -i /srv/old.deb")
	installed := d.files()
	var got []string
	for _, path := range changes(before, installed) {
		if !strings.HasPrefix(installed[path], "d") {
			got = append(got, path)
		}
	}
	if want := debianPaths(); !slices.Equal(withoutPages(got), want) {
		t.Errorf("dpkg has changed\n%q, want\n%q", got, want)
	}
	d.wantInstalled("v0.1.0")
	d.wantUnits()

	d.shell("tunnel init --address cloud.example.com:9000 && echo '# mine' >>/etc/tunnel/cloud.toml && " +
		"systemctl enable tunnel-cloud && mkdir -p /etc/systemd/system/tunnel-edge.service.d && " +
		"echo '[Service]' >/etc/systemd/system/tunnel-edge.service.d/override.conf")
	mine := d.files()
	d.shell("dpkg -i /srv/new.deb")
	d.wantInstalled("v0.2.0")
	changed := withoutPages(changes(mine, d.files()))
	for _, path := range changed {
		if !slices.Contains(debianPaths(), path) {
			t.Errorf("the upgrade has changed %s", path)
		}
	}
	if !slices.Contains(changed, "/usr/bin/tunnel") {
		t.Error("the upgrade has not changed the program")
	}
	d.shell("dpkg -P tunnel")
	d.wantPurged(before)
}

// wantInstalled checks the package on the machine, and what its users get of it.
func (d *debian) wantInstalled(version string) {
	d.t.Helper()
	for _, what := range []struct{ lines, prints string }{
		{"dpkg-query -W -f '${db:Status-Status} ${Version}' tunnel", "installed " + version[1:] + "-1"},
		{"dpkg --verify tunnel", ""},
		{"tunnel version | head -n 1", "tunnel " + version},
		{". /usr/share/bash-completion/completions/tunnel; complete -p tunnel | grep -o ' tunnel$'", " tunnel"},
		{"head -n 1 /usr/share/zsh/vendor-completions/_tunnel", "#compdef tunnel"},
		{"grep -o -m 1 '^complete -c tunnel' /usr/share/fish/vendor_completions.d/tunnel.fish", "complete -c tunnel"},
		{"zcat /usr/share/man/man1/tunnel.1.gz | grep -c '^\\.TH'", "1"},
		{"systemctl is-enabled tunnel-edge || true", "disabled"},
	} {
		if got := strings.TrimSuffix(d.shell(what.lines), "\n"); got != what.prints {
			d.t.Errorf("%s: %q, want %q", what.lines, got, what.prints)
		}
	}
}

// wantUnits checks that systemd has no objection to the units, and that they are as confined as the pages say.
func (d *debian) wantUnits() {
	d.t.Helper()
	for _, unit := range []string{"tunnel-cloud.service", "tunnel-edge.service"} {
		path := "/lib/systemd/system/" + unit
		if out := d.shell("systemd-analyze verify " + path + " 2>&1"); out != "" {
			d.t.Errorf("systemd-analyze verify %s: %s", unit, out)
		}
		out := d.shell("systemd-analyze security --offline=true --no-pager " + path)
		exposure := regexp.MustCompile(`Overall exposure level for ` + unit + `: ([0-9.]+) (\S+)`).FindStringSubmatch(out)
		if exposure == nil {
			d.t.Fatalf("%s:\n%s", unit, out)
		}
		stated := fmt.Sprintf("exposure of %s (%q)", exposure[1], exposure[2])
		for _, page := range []string{"docs/releases.md", "docs/security.md"} {
			if text := read(d.t, "../..", page); !bytes.Contains(text, []byte(stated)) {
				d.t.Errorf("%s has an %s, and %s does not say so", unit, stated, page)
			}
		}
	}
}

// through asks the edge for its health by port 2222 of the cloud, until the edge is ready.
const through = `
for i in $(seq 300); do
	# In a shell of its own, which SIGPIPE may end: the cloud resets the conn while it has no session.
	status=$({ exec 3<>/dev/tcp/127.0.0.1/2222 && printf 'GET /readyz HTTP/1.0\r\n\r\n' >&3 &&
		head -n 1 <&3; } 2>/dev/null) || true
	case $status in *" 200 "*) exit;; esac
	sleep 0.2
done
exit 1
`

// alone waits until both units together have two processes: the new ones. The old ones drain for up to 25 s.
const alone = `
for i in $(seq 400); do
	count=$(cat /sys/fs/cgroup/system.slice/tunnel-{cloud,edge}.service/cgroup.procs | wc -l)
	[ "$count" != 2 ] || exit 0
	sleep 0.1
done
exit 1
`

// TestUnitsRun runs both units of the package with the configuration of tunnel init and tunnel join, through an
// upgrade, on a machine that systemd runs. When the package is removed, both units must become "inactive". A
// unit becomes "failed" if systemd kills its main process and does not wait for its end.
func TestUnitsRun(t *testing.T) {
	d := newDebian(t)
	d.boot()
	before := d.files()
	d.shell("dpkg -i /srv/old.deb")
	out := d.shell(`
tunnel init --address 127.0.0.1:9000
printf '[mode.cloud.tcp]\n"127.0.0.1:2222" = "edge1/127.0.0.1:7010"\n' >>/etc/tunnel/cloud.toml
tunnel init --address 127.0.0.1:9000 --systemd
tunnel token create --node edge1 | sed 's/sudo //; s/$/ --systemd/' >/tmp/join
. /tmp/join
sed -i 's/^#logport = 7010/logport = 7010/' /etc/tunnel/edge.toml
systemctl restart tunnel-edge`)
	for _, unit := range []string{"tunnel-cloud", "tunnel-edge"} {
		want := "the unit is the package's: /usr/lib/systemd/system/" + unit + ".service\n"
		if !strings.Contains(out, want) {
			t.Errorf("%s\nwant %q", out, want)
		}
	}
	d.shell(through)
	first := d.wantActive()

	mine := d.files()
	d.shell("dpkg -i /srv/new.deb")
	d.shell(through)
	d.wantOwnFiles(mine)
	second := d.wantActive()
	if second[0] == first[0] || second[1] == first[1] {
		t.Errorf("processes %q before the upgrade, %q afterwards", first, second)
	}
	d.shell(alone)
	if later := d.wantActive(); !slices.Equal(later, second) {
		t.Errorf("processes %q after the upgrade, and %q when the old ones had ended", second, later)
	}

	d.shell("dpkg -r tunnel")
	if out := d.shell("systemctl is-active tunnel-cloud tunnel-edge || true"); out != "inactive\ninactive\n" {
		t.Errorf("after the removal, the units are %q\n%s", out, d.shell(diagnosis))
	}
	d.wantOwnFiles(mine)
	d.shell("dpkg -P tunnel")
	d.wantPurged(before)
}

// TestCNIDropIn runs an edge with [mode.edge.cni] by the package's unit and the package's drop-in: with one capability,
// the edge prepares the node, and reaches the cloud with the certificate that it got as another user.
func TestCNIDropIn(t *testing.T) {
	d := newDebian(t)
	d.boot()
	d.shell("dpkg -i /srv/old.deb")
	d.shell(`
tunnel init --address 127.0.0.1:9000
printf '[mode.cloud.tcp]\n"127.0.0.1:2222" = "edge1/127.0.0.1:7010"\n' >>/etc/tunnel/cloud.toml
tunnel init --address 127.0.0.1:9000 --systemd
tunnel token create --node edge1 | sed 's/sudo //; s/$/ --systemd/' >/tmp/join
. /tmp/join
sed -i 's/^#logport = 7010/logport = 7010/' /etc/tunnel/edge.toml
printf '[mode.edge.cni]\npodcidrs = ["10.88.1.0/24", "fd00:88:1::/64"]\n' >>/etc/tunnel/edge.toml
to=/etc/systemd/system/tunnel-edge.service.d/60-cni.conf
install -D -m 644 /usr/share/doc/tunnel/examples/tunnel-edge-cni.conf $to
systemctl daemon-reload
systemctl restart tunnel-edge`)
	d.shell(through)
	d.shell("for i in $(seq 100); do [ ! -e /etc/cni/net.d/10-tunnel.conflist ] || exit 0; sleep 0.1; done; exit 1")
	d.shell("CNI_COMMAND=VERSION /opt/cni/bin/tunnel-cni </dev/null && grep -q tunnel0 /proc/net/dev")
	const capNetAdmin = "0000000000001000"
	out := d.shell("grep ^CapEff /proc/$(systemctl show --value --property=MainPID tunnel-edge)/status")
	if got := strings.Fields(out); len(got) != 2 || got[1] != capNetAdmin {
		t.Errorf("the edge has the capabilities %q, want CAP_NET_ADMIN alone: %s", got, capNetAdmin)
	}

	old := d.shell("sha256sum /opt/cni/bin/tunnel-cni")
	d.shell("dpkg -i /srv/new.deb")
	d.shell(through)
	if d.shell("sha256sum /opt/cni/bin/tunnel-cni") == old {
		t.Error("after an upgrade of the package, the runtime's plugin is the old one")
	}
	// The hint of prerm is true: a removal leaves the network of the pods, and a later installation removes it.
	if out = d.shell("dpkg -r tunnel 2>&1"); !strings.Contains(out, "drain the node and run: tunnel cni uninstall") {
		t.Errorf("the removal does not say that the network of the pods stays: %s", out)
	}
	d.shell("[ -e /etc/cni/net.d/10-tunnel.conflist ] && [ -e /opt/cni/bin/tunnel-cni ] && dpkg -i /srv/new.deb")
	out = d.shell("systemctl stop tunnel-edge; tunnel cni uninstall; find /etc/cni/net.d /opt/cni/bin -type f; " +
		"ls -d /var/lib/cni/tunnel /sys/class/net/tunnel0 2>/dev/null || true")
	if strings.TrimSpace(out) != "" {
		t.Errorf("after the uninstall there is %s", out)
	}
}

// TestServicesDropIn runs an edge with [mode.edge.services] by the package's unit and the package's drop-in: with one
// capability, the edge writes its rules and its state. A purge removes both folders. Beside the drop-in for
// [mode.edge.cni], under which the edge is root, the state stays.
func TestServicesDropIn(t *testing.T) {
	d := newDebian(t)
	d.boot()
	before := d.files()
	d.shell("dpkg -i /srv/old.deb")
	d.shell(`
tunnel init --address 127.0.0.1:9000
printf '[mode.cloud.tcp]\n"127.0.0.1:2222" = "edge1/127.0.0.1:7010"\n' >>/etc/tunnel/cloud.toml
tunnel init --address 127.0.0.1:9000 --systemd
tunnel token create --node edge1 | sed 's/sudo //; s/$/ --systemd/' >/tmp/join
. /tmp/join
sed -i 's/^#logport = 7010/logport = 7010/' /etc/tunnel/edge.toml
printf '[mode.edge.services]\n' >>/etc/tunnel/edge.toml
to=/etc/systemd/system/tunnel-edge.service.d/60-services.conf
install -D -m 644 /usr/share/doc/tunnel/examples/tunnel-edge-services.conf $to
systemctl daemon-reload
systemctl restart tunnel-edge`)
	d.shell(through)
	// The edge adds the address before it writes the rules, and fails without CAP_NET_ADMIN.
	const ready = "for i in $(seq 100); do grep -q 169.254.77.1 /proc/net/fib_trie && " +
		"[ -e /var/lib/tunnel/services.db ] && exit 0; sleep 0.1; done; exit 1"
	d.shell(ready)
	const capNetAdmin = "0000000000001000"
	out := d.shell("grep ^CapEff /proc/$(systemctl show --value --property=MainPID tunnel-edge)/status")
	if got := strings.Fields(out); len(got) != 2 || got[1] != capNetAdmin {
		t.Errorf("the edge has the capabilities %q, want CAP_NET_ADMIN alone: %s", got, capNetAdmin)
	}
	if out = d.shell("tunnel status 2>&1 || true"); strings.Contains(out, "CAP_NET_ADMIN") {
		t.Errorf("the edge lacks rights: %s", out)
	}

	d.shell(`
printf '[mode.edge.cni]\npodcidrs = ["10.88.1.0/24"]\n' >>/etc/tunnel/edge.toml
install -m 644 /usr/share/doc/tunnel/examples/tunnel-edge-cni.conf \
	/etc/systemd/system/tunnel-edge.service.d/60-cni.conf
systemctl stop tunnel-edge
systemctl daemon-reload
systemctl start tunnel-edge`)
	d.shell(through)
	d.shell(ready)
	d.shell("systemctl stop tunnel-edge; tunnel cni uninstall; dpkg -P tunnel; rm -rf /opt/cni /etc/cni /var/lib/cni")
	d.wantPurged(before)
}

// wantActive checks that both units run the program of the package, from the unit of the package. It returns the ids
// of their processes.
func (d *debian) wantActive() (pids []string) {
	d.t.Helper()
	for _, unit := range []string{"tunnel-cloud", "tunnel-edge"} {
		got := d.shell("systemctl show --property=ActiveState,FragmentPath,DropInPaths,UnitFileState " + unit + "; " +
			"readlink /proc/$(systemctl show --value --property=MainPID " + unit + ")/exe")
		lines := strings.Split(strings.ReplaceAll(got, "=/usr/lib/", "=/lib/"), "\n")
		for _, want := range []string{
			"ActiveState=active", "FragmentPath=/lib/systemd/system/" + unit + ".service", "DropInPaths=",
			"UnitFileState=enabled", "/usr/bin/tunnel",
		} {
			if !slices.Contains(lines, want) {
				d.t.Errorf("%s: want %q in\n%s", unit, want, got)
			}
		}
		pids = append(pids, strings.TrimSpace(d.shell("systemctl show --value --property=MainPID "+unit)))
	}
	return pids
}

// wantOwnFiles checks that the files of an operator are as they were, of which the state of both services.
func (d *debian) wantOwnFiles(before map[string]string) {
	d.t.Helper()
	after, own := d.files(), 0
	for path, what := range before {
		if !strings.HasPrefix(path, "/etc/") && !strings.HasPrefix(path, "/var/lib/") {
			continue
		}
		if strings.Contains(path, "tunnel") {
			own++
		}
		if after[path] != what {
			d.t.Errorf("%s was %q, and is %q", path, what, after[path])
		}
	}
	if own < 10 {
		d.t.Errorf("an operator has %d files and folders", own)
	}
}
