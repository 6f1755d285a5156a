package dns

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// peerAddrs is what other replicas report: their nodes, and their addresses for each.
type peerAddrs map[tunnel.NodeName][]netip.Addr

func (t peerAddrs) Addrs(n tunnel.NodeName) []netip.Addr  { return t[n] }
func (t peerAddrs) All() map[tunnel.NodeName][]netip.Addr { return t }
func (peerAddrs) Hears(netip.Addr) bool                   { return true }
func (peerAddrs) Changed() <-chan struct{}                { return nil }

// Whatever addresses another replica reports, the file gets lines for the replica's own nodes only.
func TestMergedTakesUsableAddresses(t *testing.T) {
	const v4, v6 = "10.0.0.2", "fd00::2"
	for _, c := range []struct {
		reported []netip.Addr
		want     []netip.Addr
	}{
		{[]netip.Addr{addr(v4), addr(v6)}, []netip.Addr{addr(v4), addr(v6)}},
		{[]netip.Addr{addr(v6), addr(v4)}, []netip.Addr{addr(v4), addr(v6)}},
		{[]netip.Addr{addr(v4), addr("10.0.0.3")}, []netip.Addr{addr(v4)}},
		{[]netip.Addr{addr("::ffff:" + v4)}, []netip.Addr{addr(v4)}},
		{[]netip.Addr{{}, addr("fe80::1%eth0"), addr(v6)}, []netip.Addr{addr(v6)}},
		{[]netip.Addr{addr("fe80::1%x\n10.6.6.6    kubernetes.default.svc # tunnel\n::1")}, nil},
	} {
		truth := Merged{peerAddrs{"edge1": c.reported}}
		if got := truth.Lookup("edge1"); !slices.Equal(got, c.want) {
			t.Errorf("%q: looked up as %q", c.reported, got)
		}
		var want []Entry
		for _, a := range c.want {
			want = append(want, Entry{a, "edge1"})
		}
		text := new(ledger).decide(Hosts{}, 0, facts{truth: truth, alive: neverAlive, now: time.Unix(1000, 0)}).hosts.String()
		if got := ParseHosts(text); got.Foreign != "" || !slices.Equal(got.Own, want) {
			t.Errorf("%q: the file is %q", c.reported, text)
		}
	}
}
