package cni

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gocni "github.com/containerd/go-cni"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	plugin "tunnel.example/tunnel/pkg/cni"
)

var (
	versions = []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}
	families = [][]string{{"10.88.1.0/24"}, {"fd00:88:1::/64"}, {"10.88.1.0/24", "fd00:88:1::/64"}}
)

// each runs a test for every version of the specification and every family, in a network of its own.
func each(t *testing.T, f func(t *testing.T, version string, subnets []string)) {
	t.Helper()
	if !inOwnNetwork(t) {
		return
	}
	for _, version := range versions {
		for _, subnets := range families {
			t.Run(version+" "+strings.Join(subnets, ","), func(t *testing.T) { f(t, version, subnets) })
		}
	}
}

// libcni: every verb; the results are those of the version that was asked for.
func TestLibcni(t *testing.T) {
	each(t, func(t *testing.T, version string, subnets []string) {
		ctx := context.Background()
		c := newClient(t, network(t, version, "pods", ours(t, subnets...)))
		if _, err := c.ValidateNetworkList(ctx, c.list); err != nil {
			t.Fatalf("VERSION: %v", err)
		}
		info, err := c.GetVersionInfo(ctx, "tunnel-cni")
		if err != nil || !slices.Equal(info.SupportedVersions(), versions) {
			t.Errorf("VERSION: %v, %v", info, err)
		}
		if err := c.GetStatusNetworkList(ctx, c.list); err != nil {
			t.Errorf("STATUS: %v", err)
		}
		web, db := container("web", newNamespace(t)), container("db", newNamespace(t))
		result, err := c.AddNetworkList(ctx, c.list, web)
		if err != nil {
			t.Fatalf("ADD: %v", err)
		}
		if result.Version() != version {
			t.Errorf("the result is of version %s", result.Version())
		}
		converted, err := current.NewResultFromResult(result)
		if err != nil || len(converted.IPs) != len(subnets) {
			t.Errorf("the addresses are %v, %v", converted, err)
		}
		if err := c.add(db); err != nil {
			t.Fatalf("ADD: %v", err)
		}
		if err := c.CheckNetworkList(ctx, c.list, web); (err == nil) != (version != "0.3.1") {
			t.Errorf("CHECK: %v", err) // CHECK came with 0.4.0
		}
		// libcni forgets this attachment, so it calls no DEL: only the plugin's GC, which came with 1.1.0, frees it.
		forgotten, stale := newClient(t, c.list.Bytes), container("stale", newNamespace(t))
		if err := forgotten.add(stale); err != nil {
			t.Fatalf("ADD: %v", err)
		}
		valid := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: "db", IfName: "eth0"}}}
		if err := c.GCNetworkList(ctx, c.list, valid); err != nil {
			t.Errorf("GC: %v", err)
		}
		left := map[bool]int{true: 1, false: 2}[version == "1.1.0"]
		if links := veths(t); len(links) != left {
			t.Errorf("after GC the links are %v, want %d", links, left)
		}
		if err := forgotten.del(stale); err != nil {
			t.Errorf("DEL: %v", err)
		}
		if version != "0.3.1" {
			if err := c.CheckNetworkList(ctx, c.list, db); err != nil {
				t.Errorf("CHECK of the attachment that GC was told to keep: %v", err)
			}
		}
		for range 2 {
			if err := c.del(web); err != nil {
				t.Errorf("DEL: %v", err)
			}
			if err := c.del(db); err != nil {
				t.Errorf("DEL: %v", err)
			}
		}
		if links := veths(t); len(links) > 0 {
			t.Errorf("left are the links %v", links)
		}
	})
}

func veths(t *testing.T) (names []string) {
	t.Helper()
	links, err := plugin.Dump(netlink.LinkList)
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if link.Type() == "veth" {
			names = append(names, link.Attrs().Name)
		}
	}
	return names
}

// go-cni: as containerd does it, with the network of the loopback plugin beside ours.
func TestGoCNI(t *testing.T) {
	each(t, func(t *testing.T, version string, subnets []string) {
		ctx, dir := context.Background(), t.TempDir()
		conf := network(t, version, "pods", ours(t, subnets...), map[string]any{
			"type": "bandwidth", "capabilities": map[string]bool{"bandwidth": true}})
		if err := os.WriteFile(filepath.Join(dir, "10-tunnel.conflist"), conf, 0o600); err != nil {
			t.Fatal(err)
		}
		runtime, err := gocni.New(gocni.WithPluginDir([]string{programs}), gocni.WithPluginConfDir(dir),
			gocni.WithMinNetworkCount(2), gocni.WithInterfacePrefix("eth"))
		if err == nil {
			err = runtime.Load(gocni.WithLoNetwork, gocni.WithDefaultConf)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := runtime.Status(); err != nil {
			t.Errorf("STATUS: %v", err)
		}
		id, path := "container-1", newNamespace(t)
		labels := gocni.WithLabels(map[string]string{"IgnoreUnknown": "1", "K8S_POD_NAMESPACE": "shop",
			"K8S_POD_NAME": "web-0", "K8S_POD_INFRA_CONTAINER_ID": id, "K8S_POD_UID": "uid"})
		result, err := runtime.Setup(ctx, id, path, labels)
		if err != nil {
			t.Fatalf("ADD: %v", err)
		}
		eth0 := result.Interfaces["eth0"]
		if eth0 == nil || len(eth0.IPConfigs) != len(subnets) || eth0.Sandbox != path {
			t.Fatalf("containerd sees %+v", result.Interfaces)
		}
		// go-cni's network for loopback has the version 0.3.1, which has no CHECK: it is left out.
		alone, err := gocni.New(gocni.WithPluginDir([]string{programs}), gocni.WithPluginConfDir(dir),
			gocni.WithMinNetworkCount(1), gocni.WithInterfacePrefix("eth"))
		if err == nil {
			err = alone.Load(gocni.WithDefaultConf)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := alone.Check(ctx, id, path, labels); (err == nil) != (version != "0.3.1") {
			t.Errorf("CHECK: %v", err)
		}
		for range 2 {
			if err := runtime.Remove(ctx, id, path, labels); err != nil {
				t.Errorf("DEL: %v", err)
			}
		}
		if links := veths(t); len(links) > 0 {
			t.Errorf("left are the links %v", links)
		}
	})
}

// cnitool: every verb that it has and that the version of the specification knows.
func TestCnitool(t *testing.T) {
	each(t, func(t *testing.T, version string, subnets []string) {
		dir, path := t.TempDir(), newNamespace(t)
		conf := network(t, version, "cnitool-test", ours(t, subnets...))
		if err := os.WriteFile(filepath.Join(dir, "10-tunnel.conflist"), conf, 0o600); err != nil {
			t.Fatal(err)
		}
		verbs := []string{"add", "check", "del", "del"}
		if version == "1.1.0" {
			verbs = []string{"status", "add", "check", "del", "del", "add", "gc", "status", "del"}
		}
		for _, verb := range verbs {
			cmd := exec.Command(filepath.Join(programs, "cnitool"), verb, "cnitool-test", path)
			cmd.Env = append(os.Environ(), "CNI_PATH="+programs, "NETCONFPATH="+dir, "CNI_IFNAME=eth0",
				"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web") // the second ADD is for the same pod
			out, err := cmd.CombinedOutput()
			if fails := verb == "check" && version == "0.3.1"; (err != nil) != fails { // CHECK came with 0.4.0
				t.Fatalf("cnitool %s: %v: %s", verb, err, out)
			}
			if verb == "add" {
				wantPrinted(t, out, version, subnets)
			}
			attached := map[bool]int{true: 1, false: 0}[verb == "add" || verb == "check"]
			if links := veths(t); len(links) != attached {
				t.Fatalf("after cnitool %s the links are %v, want %d", verb, links, attached)
			}
		}
	})
}

// wantPrinted asserts that a result has the version of the configuration, and the first address of each subnet.
func wantPrinted(t *testing.T, result []byte, version string, subnets []string) {
	t.Helper()
	var printed struct {
		CNIVersion string
		IPs        []struct{ Address string }
	}
	if err := json.Unmarshal(result, &printed); err != nil {
		t.Fatalf("%v: %s", err, result)
	}
	var got, want []string
	for _, ip := range printed.IPs {
		got = append(got, ip.Address)
	}
	for _, subnet := range subnets {
		addr := netip.MustParsePrefix(subnet).Addr().Next().Next() // the first one is the gateway's
		want = append(want, netip.PrefixFrom(addr, addr.BitLen()).String())
	}
	if printed.CNIVersion != version || !slices.Equal(got, want) {
		t.Errorf("cnitool add prints the version %s and the addresses %v, want %s and %v", printed.CNIVersion, got,
			version, want)
	}
}

// What ADD and DEL cost, beside the stock plugins for the same addresses: libcni executes both, one pod at a
// time. An ADD is one process of ours, and two of the stock plugins. `make cni-bench` gives it a network of
// its own.
func BenchmarkAddDel(b *testing.B) {
	links, err := netlink.LinkList()
	if err != nil {
		b.Fatal(err)
	}
	for _, link := range links {
		if name := link.Attrs().Name; !slices.Contains([]string{"lo", "tunnel0", "stock0"}, name) {
			b.Skipf("the network of this machine, with %s, is not for bridges of a test: make cni-bench", name)
		}
	}
	for name, part := range map[string]map[string]any{
		"tunnel-cni":        ours(b, families[2]...),
		"bridge+host-local": stock(b, families[2]...),
	} {
		b.Run(name, func(b *testing.B) {
			c := newClient(b, network(b, "1.1.0", "pods", part))
			path := newNamespace(b)
			defer removeBridges(b) // each plugin finds the subnets unused
			var add, del int64
			for i := 0; b.Loop(); i++ {
				rt := container(fmt.Sprintf("c%d", i), path)
				began := now()
				if err := c.add(rt); err != nil {
					b.Fatal(err)
				}
				added := now()
				if err := c.del(rt); err != nil {
					b.Fatal(err)
				}
				add, del = add+added-began, del+now()-added
			}
			b.ReportMetric(float64(add)/float64(b.N)/1e6, "ms/ADD")
			b.ReportMetric(float64(del)/float64(b.N)/1e6, "ms/DEL")
		})
	}
}

func removeBridges(b *testing.B) {
	b.Helper()
	for _, name := range []string{"tunnel0", "stock0"} {
		if link, err := netlink.LinkByName(name); err != nil {
			continue // the other plugin's
		} else if err := netlink.LinkDel(link); err != nil {
			b.Error(err)
		}
	}
}
