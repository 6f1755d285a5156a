package check

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/cni"
	"tunnel.example/tunnel/pkg/podnet"
)

// The rules that an edge writes are those that the check looks for.
func TestMasqueradeOfEdge(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	if _, err := os.Stat("/proc/sys/net/ipv6"); err != nil {
		t.Skipf("the kernel has no IPv6: %v", err)
	}
	subnets := []netip.Prefix{netip.MustParsePrefix("10.88.1.0/24"), netip.MustParsePrefix("fd00:88:1::/64")}
	node, err := podnet.New(podnet.Config{ConfDir: t.TempDir(), BinDir: t.TempDir(), Subnets: subnets,
		Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	testkit.Run(t, node.Run)
	p := &pods{conf: &cni.Conf{Subnets: subnets}, rules: masqueraded}
	testkit.Within(t, 20*time.Second, "the check finds the rules of the edge", func() error {
		if strings.Contains(node.Note(), "nftables") {
			t.Skip(node.Note())
		}
		if r := p.masquerade(t.Context()); r.State != StateOK {
			return fmt.Errorf("%+v; the edge says %s", r, node.Note())
		}
		return nil
	})
}

// What the kernel of a node says: forwarding is off for a family, and the rules of the edge are missing for a network.
func TestPodNetworkOfKernel(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	own := []netip.Prefix{netip.MustParsePrefix("10.88.1.0/24"), netip.MustParsePrefix("fd00:88:1::/64")}
	p := &pods{conf: &cni.Conf{Subnets: own}, rules: masqueraded}
	for _, s := range []struct{ file, value, says, help string }{
		{"ipv4/ip_forward", "0", "net.ipv4.ip_forward is 0", "sysctl -w net.ipv4.ip_forward=1; look in"},
		{"ipv4/ip_forward", "1", "net.ipv6.conf.all.forwarding is 0", "start the edge, or add a pod"},
	} {
		if err := os.WriteFile("/proc/sys/net/"+s.file, []byte(s.value), 0o600); err != nil {
			t.Fatal(err)
		}
		want(t, s.file+" is "+s.value, p.forwarding(t.Context()), StateFail, s.says, s.help)
	}
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0o600); err != nil {
		t.Fatal(err)
	}
	want(t, "forwarding", p.forwarding(t.Context()), StateOK, "the kernel forwards", "")

	c, err := nftables.New()
	if err == nil {
		_, err = c.ListTables()
	}
	if err != nil {
		t.Skipf("the kernel has no nftables: %v", err)
	}
	want(t, "no table", p.masquerade(t.Context()), StateFail, "pods of 10.88.1.0/24 reach nothing", "start the edge")
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: cni.RulesTable})
	chain := c.AddChain(&nftables.Chain{Name: "postrouting", Table: table, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource})
	for i, offset := range []uint32{12, 8} { // of the source address: RFC 791, RFC 8200
		source := own[i].Addr().AsSlice()
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(len(source))},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: source},
			&expr.Masq{},
		}})
		if err := c.Flush(); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			want(t, "one family", p.masquerade(t.Context()), StateFail, "pods of fd00:88:1::/64 reach nothing", "start the edge")
		}
	}
	want(t, "both families", p.masquerade(t.Context()), StateOK, "under the node's address", "")
}
