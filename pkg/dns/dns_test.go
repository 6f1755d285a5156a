package dns

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"tunnel/pkg/tunnel"
)

// told is what other replicas say of the nodes they hold, and where they are.
type told map[tunnel.NodeName][]netip.Addr

func (t told) Addrs(n tunnel.NodeName) []netip.Addr  { return t[n] }
func (t told) All() map[tunnel.NodeName][]netip.Addr { return t }
func (told) Hears(netip.Addr) bool                   { return true }
func (told) Changed() <-chan struct{}                { return nil }

// Whatever another replica says where it is, the file has lines for its nodes alone.
func TestMergedTakesUsableAddresses(t *testing.T) {
	const v4, v6 = "10.0.0.2", "fd00::2"
	for _, c := range []struct {
		told []netip.Addr
		want []netip.Addr
	}{
		{[]netip.Addr{addr(v4), addr(v6)}, []netip.Addr{addr(v4), addr(v6)}},
		{[]netip.Addr{addr(v6), addr(v4)}, []netip.Addr{addr(v4), addr(v6)}},
		{[]netip.Addr{addr(v4), addr("10.0.0.3")}, []netip.Addr{addr(v4)}},
		{[]netip.Addr{addr("::ffff:" + v4)}, []netip.Addr{addr(v4)}},
		{[]netip.Addr{{}, addr("fe80::1%eth0"), addr(v6)}, []netip.Addr{addr(v6)}},
		{[]netip.Addr{addr("fe80::1%x\n10.6.6.6    kubernetes.default.svc # tunnel\n::1")}, nil},
	} {
		truth := Merged{told{"edge1": c.told}}
		if got := truth.Lookup("edge1"); !slices.Equal(got, c.want) {
			t.Errorf("%q: looked up as %q", c.told, got)
		}
		var want []Entry
		for _, a := range c.want {
			want = append(want, Entry{a, "edge1"})
		}
		text := new(ledger).decide(Hosts{}, 0, facts{truth: truth, alive: nobody, now: time.Unix(1000, 0)}).hosts.String()
		if got := ParseHosts(text); got.Foreign != "" || !slices.Equal(got.Own, want) {
			t.Errorf("%q: the file is %q", c.told, text)
		}
	}
}
