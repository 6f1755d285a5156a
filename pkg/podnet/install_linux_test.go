package podnet

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/cni"
)

// script writes a program that answers VERSION like a plugin.
func script(t *testing.T, answer string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "plugin")
	if err := os.WriteFile(file, []byte("#!/bin/sh\necho '"+answer+"'\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestInstall(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "cni", "bin")
	one, two := script(t, `{"supportedVersions": ["1.0.0"]}`), script(t, `{"supportedVersions": ["1.1.0"]}`)
	for _, c := range []struct {
		from    string
		changed bool
	}{{one, true}, {one, false}, {two, true}, {two, false}} {
		if changed, err := Install(t.Context(), c.from, bin); err != nil || changed != c.changed {
			t.Errorf("installing %s: changed is %v, %v", c.from, changed, err)
		}
	}
	for name, from := range map[string]string{
		"no plugin": script(t, "hello"), "not executable here": "testdata/none", "no program": filepath.Join(bin, "none"),
	} {
		if changed, err := Install(t.Context(), from, bin); err == nil || changed {
			t.Errorf("%s: changed is %v, %v", name, changed, err)
		}
	}
	now, err := os.ReadFile(filepath.Join(bin, cni.Program))
	if err != nil || !strings.Contains(string(now), "1.1.0") {
		t.Errorf("after installs that failed, the plugin is %s, %v", now, err)
	}
	info, err := os.Stat(filepath.Join(bin, cni.Program))
	if err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("the mode of the plugin is %v, %v", info.Mode(), err)
	}
	if entries, err := os.ReadDir(bin); err != nil || len(entries) != 1 {
		t.Errorf("the folder has %v, %v", entries, err)
	}
}

func TestUninstall(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	dir := t.TempDir()
	confDir, bin, data := filepath.Join(dir, "net.d"), filepath.Join(dir, "bin"), filepath.Join(dir, "data")
	if err := Uninstall(confDir, bin, data); err != nil {
		t.Errorf("with nothing to remove: %v", err)
	}
	for _, file := range []string{filepath.Join(confDir, cni.ListFile), filepath.Join(bin, cni.Program),
		filepath.Join(confDir, asideOf(cni.ListFile)), filepath.Join(confDir, neighboursFile),
		filepath.Join(confDir, asideOf(neighboursFile)), filepath.Join(bin, asideOf(cni.Program)),
		filepath.Join(data, "10.88.1.2"), filepath.Join(bin, "portmap")} {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	conf, err := cni.NewConf([]netip.Prefix{net4})
	if err != nil {
		t.Fatal(err)
	}
	if err := (linux{}).bridge(conf); err != nil {
		t.Fatal(err)
	}
	if err := (linux{}).masquerade(conf.Bridge, conf.Subnets, nil); err != nil {
		t.Skipf("the kernel has no nftables: %v", err)
	}
	pod := newHost(t)
	pod.connect("vethpod", conf.Bridge, "", "10.88.1.2/24", "", "")
	if err := Uninstall(confDir, bin, data); err == nil || !strings.Contains(err.Error(), "1 pods have links") {
		t.Errorf("with a pod: %v", err)
	}
	if _, err := os.Stat(filepath.Join(confDir, cni.ListFile)); err != nil {
		t.Errorf("a refused uninstall has removed something: %v", err)
	}
	if got := tables(t); !slices.Equal(got, []string{tableName}) {
		t.Errorf("after a refused uninstall, the tables are %v", got)
	}
	link, err := netlink.LinkByName("vethpod")
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := Uninstall(confDir, bin, data); err != nil {
		t.Error(err)
	}
	if _, err := netlink.LinkByName(conf.Bridge); err == nil {
		t.Error("the bridge is still there")
	}
	if got := tables(t); len(got) > 0 {
		t.Errorf("left are the tables %v", got)
	}
	var left []string
	for _, folder := range []string{confDir, bin, data} {
		entries, err := os.ReadDir(folder)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		for _, e := range entries {
			left = append(left, e.Name())
		}
	}
	if !slices.Equal(left, []string{"portmap"}) {
		t.Errorf("left are %v; want portmap, which is not ours", left)
	}
}

// tables returns the names of nftables' tables.
func tables(t *testing.T) (names []string) {
	t.Helper()
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	all, err := c.ListTables()
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range all {
		names = append(names, table.Name)
	}
	return names
}

// A network configuration that a person has written names another bridge and folder: uninstall takes both from there,
// and refuses while a pod has a link on any bridge.
func TestUninstallByHand(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	dir := t.TempDir()
	confDir, bin, data := filepath.Join(dir, "net.d"), filepath.Join(dir, "bin"), filepath.Join(dir, "data")
	byHand := `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "portmap"}, {"type": "tunnel-cni",
		"subnets": ["10.88.1.0/24"], "bridge": "br9", "datadir": "` + data + `"}]}`
	foreign := filepath.Join(data, "notes")
	for file, content := range map[string]string{
		filepath.Join(confDir, cni.ListFile):           byHand,
		filepath.Join(confDir, asideOf(cni.ListFile)):  "cut o",
		filepath.Join(bin, cni.Program):                "program",
		filepath.Join(bin, asideOf(cni.Program)):       "prog",
		filepath.Join(data, "10.88.1.2"):               "a reservation",
		filepath.Join(data, ".new"):                    "",
		foreign:                                        "not ours",
		filepath.Join(dir, "default", "fd00:88:1::2"):  "of another network",
		filepath.Join(confDir, "20-other.conflist"):    "not ours",
		filepath.Join(bin, "portmap"):                  "not ours",
		filepath.Join(dir, "default", "10.88.1.2.bak"): "not ours",
	} {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	uninstall := func() error { return Uninstall(confDir, bin, filepath.Join(dir, "default")) }
	written := func() bool {
		_, err := os.Stat(filepath.Join(confDir, cni.ListFile))
		return err == nil
	}
	conf, err := cni.NewConf([]netip.Prefix{net4})
	if err != nil {
		t.Fatal(err)
	}
	conf.Bridge = "br9"
	if err := (linux{}).bridge(conf); err != nil {
		t.Fatal(err)
	}
	remove := func(name string) {
		t.Helper()
		link, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkDel(link)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	newHost(t).connect("vethpod", "br9", "", "10.88.1.2/24", "", "")
	if err := uninstall(); err == nil || !strings.Contains(err.Error(), "1 pods have links on br9") || !written() {
		t.Errorf("with a pod: %v", err)
	}
	remove("vethpod")
	// The pod of another network: its name and alias are those of an attachment.
	const name, alias = "veth39a7199053c", "tunnel-cni pods c1 eth0 10.88.1.2"
	newHost(t).connect(name, "", "", "10.88.1.2/24", "", "")
	link, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetAlias(link, alias)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := uninstall(); err == nil || !strings.Contains(err.Error(), "1 pods have links") || !written() {
		t.Errorf("with a pod on no bridge: %v", err)
	}
	remove(name)
	if err := uninstall(); err != nil {
		t.Error(err)
	}
	if _, err := netlink.LinkByName("br9"); err == nil {
		t.Error("the bridge is still there")
	}
	left, err := filepath.Glob(filepath.Join(dir, "*", "*"))
	if err != nil || len(left) != 5 {
		t.Errorf("left are %v, %v; want the five files that are not ours", left, err)
	}
}

// A bridge that also holds the uplink stays.
func TestUninstallKeepsUplink(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	dir := t.TempDir()
	conf, err := cni.NewConf([]netip.Prefix{net4})
	if err != nil {
		t.Fatal(err)
	}
	if err := (linux{}).bridge(conf); err != nil {
		t.Fatal(err)
	}
	bridge, err := netlink.LinkByName(conf.Bridge)
	if err != nil {
		t.Fatal(err)
	}
	uplink := &netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "uplink0", MasterIndex: bridge.Attrs().Index}}
	if err := netlink.LinkAdd(uplink); err != nil {
		t.Skipf("the kernel has no links of this kind: %v", err)
	}
	if err := Uninstall(dir, dir, filepath.Join(dir, "data")); err != nil {
		t.Error(err)
	}
	if _, err := netlink.LinkByName(conf.Bridge); err != nil {
		t.Errorf("the bridge of the uplink is gone: %v", err)
	}
}
