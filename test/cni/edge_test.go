package cni

import (
	"encoding/json"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/podnet"
)

// byEdge has an edge prepare the node, and returns the network configuration that the edge writes. The edge runs until
// the end of the test. Only the folder of the reservations is another one.
func byEdge(t *testing.T, cfg podnet.Config) []byte {
	t.Helper()
	dir := t.TempDir()
	cfg.ConfDir, cfg.BinDir, cfg.Log = dir, programs, slog.New(slog.DiscardHandler)
	for _, subnet := range families[2] {
		cfg.Subnets = append(cfg.Subnets, netip.MustParsePrefix(subnet))
	}
	node, err := podnet.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Run(t, node.Run)
	var data []byte
	testkit.Eventually(t, "the network configuration of the edge", func() bool {
		data, err = os.ReadFile(filepath.Join(dir, "10-tunnel.conflist"))
		return err == nil
	})
	if note := node.Note(); note != "" {
		t.Errorf("the edge says %s", note)
	}
	var list map[string]any
	if err := json.Unmarshal(data, &list); err != nil {
		t.Fatal(err)
	}
	list["plugins"].([]any)[0].(map[string]any)["datadir"] = filepath.Join(t.TempDir(), "data")
	if data, err = json.Marshal(list); err != nil {
		t.Fatal(err)
	}
	return data
}

// mirror serves at an address outside, and tells each caller the address that it sees.
func mirror(t *testing.T, path, listen string) {
	t.Helper()
	serve(t, path, listen, func(conn net.Conn) string { return conn.RemoteAddr().(*net.TCPAddr).IP.String() })
}

// outsideSees checks under which addresses the network outside sees a pod. It has no route to pods.
func outsideSees(t *testing.T, from string, want map[string]string) {
	t.Helper()
	for server, node := range want {
		if got, err := ask(from, server); err != nil || got != node {
			t.Errorf("%s sees the pod as %q, %v; want %s", server, got, err, node)
		}
	}
}

// The node as an edge prepares it. A pod of both families reaches the outside as soon as ADD is done, under the
// addresses of the node: there is no duplicate address detection to wait for.
func TestOutside(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	outside, path := newNamespace(t), newNamespace(t)
	connectOutside(t, outside)
	servers := map[string]string{"192.0.2.2:80": "192.0.2.1", "[2001:db8::2]:80": "2001:db8::1"}
	for server := range servers {
		mirror(t, outside, server)
	}
	c := newClient(t, byEdge(t, podnet.Config{}))
	web := container("web", path)
	if err := c.add(web); err != nil {
		t.Fatalf("ADD: %v", err)
	}
	if err := inside(path, func() error { return nothingTentative(t, "eth0") }); err != nil {
		t.Error(err)
	}
	if err := nothingTentative(t, "tunnel0"); err != nil {
		t.Error(err)
	}
	outsideSees(t, path, servers)
	if err := c.del(web); err != nil {
		t.Errorf("DEL: %v", err)
	}
}

// nothingTentative checks that every address of a link serves, except the link-local one.
func nothingTentative(t *testing.T, name string) error {
	t.Helper()
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_V6)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		if !a.IP.IsLinkLocalUnicast() && a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0 {
			t.Errorf("%s of %s is tentative", a.IPNet, name)
		}
	}
	return nil
}

// Limits of bandwidth, by the stock plugin behind ours, as the edge chains it. The kernel has both limits, the pod
// reaches the outside with them, and DEL removes them.
func TestBandwidth(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	needsShaper(t)
	outside, path := newNamespace(t), newNamespace(t)
	connectOutside(t, outside)
	servers := map[string]string{"192.0.2.2:80": "192.0.2.1", "[2001:db8::2]:80": "2001:db8::1"}
	for server := range servers {
		mirror(t, outside, server)
	}
	c := newClient(t, byEdge(t, podnet.Config{Bandwidth: true}))
	web := container("web", path)
	const bits = 8_000_000 // of both, a second
	web.CapabilityArgs = map[string]any{"bandwidth": map[string]any{
		"ingressRate": bits, "ingressBurst": bits, "egressRate": bits, "egressBurst": bits}}
	if err := c.add(web); err != nil {
		t.Fatalf("ADD: %v", err)
	}
	if err := c.CheckNetworkList(t.Context(), c.list, web); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	limited := shaped(t)
	for _, kind := range []string{"veth", "ifb"} { // to the pod, and from the pod
		if limited[kind] != bits/8 {
			t.Errorf("the limits are %v bytes a second, by the type of the link; want %d for %s", limited, bits/8, kind)
		}
	}
	outsideSees(t, path, servers)
	if err := c.del(web); err != nil {
		t.Errorf("DEL: %v", err)
	}
	if left := shaped(t); len(left) > 0 || len(veths(t)) > 1 { // uplink0 is a veth pair, too
		t.Errorf("after DEL there are the limits %v and the links %v", left, veths(t))
	}
}

// shaped returns the limits of this node in bytes a second, by the type of their link.
func shaped(t *testing.T) map[string]uint64 {
	t.Helper()
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	limits := make(map[string]uint64)
	for _, link := range links {
		qdiscs, err := netlink.QdiscList(link)
		if err != nil {
			t.Fatal(err)
		}
		for _, q := range qdiscs {
			if tbf, ok := q.(*netlink.Tbf); ok {
				limits[link.Type()] = tbf.Rate
			}
		}
	}
	return limits
}

// needsShaper skips a test where the kernel cannot limit bandwidth.
func needsShaper(t *testing.T) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "probe0"
	probe := &netlink.Ifb{LinkAttrs: attrs}
	err := netlink.LinkAdd(probe)
	if err == nil {
		err = netlink.QdiscAdd(&netlink.Tbf{Rate: 1e6, Limit: 1e5, Buffer: 1e5, QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: probe.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}})
		_ = netlink.LinkDel(probe)
	}
	if err != nil {
		t.Skipf("the kernel has no links of the type ifb, or no shaper tbf: %v", strings.TrimSpace(err.Error()))
	}
}
