package relay

import (
	"fmt"
	"net/netip"
	"testing"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// routedToAll are networks with all endpoints of manyServices.
func routedToAll() []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")} }

// manyServices sets 5,000 Services of 10 endpoints each, which this node reaches by itself.
func manyServices(t testing.TB) *pb.Changes {
	changes := new(pb.Changes)
	for i := range 5000 {
		name := fmt.Sprint("s", i)
		changes.Set = append(changes.Set, item(t, services.ServicePath("many", name), &services.Service{
			ClusterIps: []string{netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)}).String()},
			Ports:      []*services.Port{{Name: "http", Protocol: "TCP", Port: 80}}}))
		for k := range 10 {
			addr := netip.AddrFrom4([4]byte{10, byte(100 + k), byte(i >> 8), byte(i)}).String()
			changes.Set = append(changes.Set, item(t, services.EndpointPath("many", name, "x", addr), endpoint(addr, "server1")))
		}
	}
	return changes
}

// Budget: with mode full, a change takes 50 ms at most.
func BenchmarkFull(b *testing.B) {
	state, n := services.NewState(), planner{node: "edge1", full: true, direct: routedToAll()}
	if _, err := state.Apply(manyServices(b)); err != nil {
		b.Fatal(err)
	}
	b.Run("plan", func(b *testing.B) {
		for b.Loop() {
			n.plan(state)
		}
	})
	p := n.plan(state)
	p.take()
	b.Run("change", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			e := endpoint("10.200.0.1", fmt.Sprint("edge", i%2))
			one := item(b, services.EndpointPath("many", "s7", "x", "10.200.0.1"), e)
			d, err := state.Apply(&pb.Changes{Set: []*pb.Item{one}})
			if err != nil {
				b.Fatal(err)
			}
			n.update(p, state, &d)
			p.take()
		}
	})
	b.Run("elements", func(b *testing.B) {
		for b.Loop() {
			stepsOf(nil, p.all())
		}
	})
}

// Of networks of pods that overlap, the widest one counts: the kernel takes no others.
func TestWithoutOverlaps(t *testing.T) {
	var all []netip.Prefix
	for _, text := range []string{"10.2.0.0/16", "10.1.0.0/16", "fd00::/64", "10.0.0.0/8", "10.0.0.0/16", "11.0.0.0/16"} {
		all = append(all, netip.MustParsePrefix(text))
	}
	if got := fmt.Sprint(withoutOverlaps(all)); got != "[10.0.0.0/8 11.0.0.0/16 fd00::/64]" {
		t.Error(got)
	}
}
