package https

import (
	"fmt"
	"net/netip"
	"testing"
)

// TestManySources: a stranger with a wide network, or with many addresses, gets no more than a part of a node's conns,
// and none of another node's.
func TestManySources(t *testing.T) {
	const limit = 4
	for name, c := range map[string]struct {
		source func(i int) string
		want   int
	}{
		"one address": {func(int) string { return "192.0.2.1" }, limit},
		"one /64":     {func(i int) string { return fmt.Sprintf("2001:db8::%x", i) }, limit},
		"one /56":     {func(i int) string { return fmt.Sprintf("2001:db8:0:%x::1", i%256) }, 2 * limit},
		"one /48":     {func(i int) string { return fmt.Sprintf("2001:db8:0:%x::1", i<<8&0xffff) }, 4 * limit},
		"many addresses": {func(i int) string { return fmt.Sprintf("198.51.%d.%d", i/256, i%256) },
			strangersTogether * limit},
	} {
		t.Run(name, func(t *testing.T) {
			var p passthroughCounter
			var releases []func()
			for i := range 1000 {
				if release, ok := p.admit(netip.MustParseAddr(c.source(i)), "edge1", limit); ok {
					releases = append(releases, release)
				}
			}
			if len(releases) != c.want {
				t.Errorf("%d connections, want %d", len(releases), c.want)
			}
			release, ok := p.admit(netip.MustParseAddr(c.source(0)), "edge2", limit)
			if !ok {
				t.Fatal("another node is out of reach")
			}
			for _, r := range append(releases, release) {
				r()
			}
			if len(p.counts) != 0 {
				t.Errorf("counts that are left: %v", p.counts)
			}
		})
	}
}
