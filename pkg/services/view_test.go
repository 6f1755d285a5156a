package services_test

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"testing"

	"tunnel.example/tunnel/internal/testkit/choices"
	"tunnel.example/tunnel/pkg/services"
)

// sent returns the endpoints that the edge of a node needs.
func sent(svc *services.Service, endpoints []services.Named, self services.Self) (all []services.Named) {
	for _, i := range services.ViewOf(svc, endpoints).For(self) {
		all = append(all, endpoints[i])
	}
	return all
}

func TestView(t *testing.T) {
	one := func(address, node string, ready bool, zones ...string) services.Named {
		return services.Named{
			Path: services.EndpointPath("shop", "web", "web-a", address),
			Endpoint: &services.Endpoint{
				Address: address, Node: node, Ready: ready, Serving: ready, ZoneHints: zones,
				Ports: []*services.Port{{Name: "http", Protocol: "TCP", Port: 8080}},
			},
		}
	}
	http := func(nodePort uint32) []*services.Port {
		return []*services.Port{{Name: "http", Protocol: "TCP", Port: 80, NodePort: nodePort}}
	}
	local := &services.Service{ClusterIps: []string{"10.96.0.1"}, Ports: http(0), InternalLocal: true}
	everywhere := &services.Service{ClusterIps: []string{"10.96.0.1"}, Ports: http(0)}
	apart := []services.Named{
		one("10.0.0.1", "node1", true), one("10.0.0.2", "node2", true), one("10.0.0.3", "node2", false),
	}
	hinted := []services.Named{
		one("10.0.0.1", "node1", true, "a"), one("10.0.0.2", "node2", true, "b"), one("10.0.0.3", "node3", true, "b"),
		one("10.0.0.4", "node3", false),
	}
	onNodes := []services.Named{one("10.0.0.1", "node1", true), one("10.0.0.2", "node2", true)}
	for _, e := range onNodes {
		e.NodeHints = []string{e.GetNode()}
	}
	inZone := []services.Named{
		one("10.0.0.1", "node1", true, "a"), one("10.0.0.2", "node2", true, "a"), one("10.0.0.3", "node3", true, "b"),
	}
	for _, e := range inZone {
		e.NodeHints = []string{e.GetNode()}
	}
	ends := one("10.0.0.5", "node5", false)
	ends.Zone, ends.Serving, ends.Terminating = "a", true, true
	withoutHint := append(slices.Clone(hinted), one("10.0.0.5", "node5", true))
	other := one("10.0.0.6", "node6", true, "a")
	other.Ports = []*services.Port{{Name: "metrics", Protocol: "TCP", Port: 9090}}
	twoPorts := &services.Service{ClusterIps: []string{"10.96.0.1"}, Ports: append(http(0), other.Ports...)}
	moved := one("10.0.0.1", "node1", false)
	moved.Path = services.EndpointPath("shop", "web", "web-b", "10.0.0.1")
	for _, c := range []struct {
		name      string
		svc       *services.Service
		endpoints []services.Named
		self      services.Self
		want      []string
	}{
		{
			"local: those of the node, and one usable", local, apart, services.Self{Node: "node2"},
			[]string{"10.0.0.1", "10.0.0.2", "10.0.0.3"},
		},
		{"local: only one usable", local, apart, services.Self{Node: "node9"}, []string{"10.0.0.1"}},
		{
			"local, but callers outside use it",
			&services.Service{ClusterIps: []string{"10.96.0.1"}, Ports: http(30080), InternalLocal: true}, apart,
			services.Self{Node: "node9"}, []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"},
		},
		{
			"local, but its names lead to endpoints", &services.Service{Headless: true, InternalLocal: true}, apart,
			services.Self{Node: "node9"}, []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"},
		},
		{"the zone", everywhere, hinted, services.Self{Node: "node9", Zone: "a"}, []string{"10.0.0.1"}},
		{
			"the zone, with a pod that ends and still serves", everywhere, append(slices.Clone(hinted), ends),
			services.Self{Node: "node9", Zone: "a"}, []string{"10.0.0.1", "10.0.0.5"},
		},
		{
			"the zone, and the node itself", everywhere, hinted, services.Self{Node: "node3", Zone: "a"},
			[]string{"10.0.0.1", "10.0.0.3", "10.0.0.4"},
		},
		{
			"nothing in the zone", everywhere, hinted, services.Self{Node: "node9", Zone: "c"},
			[]string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"},
		},
		{
			"no zone", everywhere, hinted, services.Self{Node: "node9"},
			[]string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"},
		},
		{
			"one has no hint", everywhere, withoutHint, services.Self{Node: "node9", Zone: "a"},
			[]string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"},
		},
		{
			"a port without an endpoint in the zone", twoPorts, append(slices.Clone(hinted), other),
			services.Self{Node: "node9", Zone: "b"}, []string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.6"},
		},
		{
			"two ports in the zone", twoPorts, append(slices.Clone(hinted), other),
			services.Self{Node: "node9", Zone: "a"}, []string{"10.0.0.1", "10.0.0.6"},
		},
		{
			"the node itself", everywhere, onNodes, services.Self{Node: "node1"}, []string{"10.0.0.1"},
		},
		{
			"the node itself, not the rest of its zone", everywhere, inZone, services.Self{Node: "node1", Zone: "a"},
			[]string{"10.0.0.1"},
		},
		{
			"no hint for the node, but for its zone", everywhere, inZone, services.Self{Node: "node9", Zone: "a"},
			[]string{"10.0.0.1", "10.0.0.2"},
		},
		{
			"no hint for the node", everywhere, onNodes, services.Self{Node: "node9"}, []string{"10.0.0.1", "10.0.0.2"},
		},
		{
			"an address in two slices", everywhere, append(slices.Clone(hinted), moved),
			services.Self{Node: "node9", Zone: "a"}, []string{"10.0.0.1", "10.0.0.1"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, e := range sent(c.svc, c.endpoints, c.self) {
				got = append(got, e.GetAddress())
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("the node needs %q, want %q", got, c.want)
			}
		})
	}
}

// A Service with very many ports and endpoints is not worth a view for each zone.
func TestViewOfLargeService(t *testing.T) {
	for ports, narrow := range map[int]bool{5: true, 6: false} {
		svc := &services.Service{ClusterIps: []string{"10.96.0.1"}, InternalLocal: true}
		for i := range ports {
			svc.Ports = append(svc.Ports, &services.Port{Name: strconv.Itoa(i), Protocol: "TCP", Port: uint32(i + 1)})
		}
		var all []services.Named
		for i := range 1000 {
			address := "10.1." + strconv.Itoa(i/250) + "." + strconv.Itoa(i%250)
			all = append(all, services.Named{Endpoint: &services.Endpoint{Address: address, Ready: true, Ports: svc.Ports}})
		}
		if services.ViewOf(svc, all).Narrow() != narrow {
			t.Errorf("with %d ports: narrow is %t", ports, !narrow)
		}
	}
}

// For the endpoints that a node is sent, Choose answers as for all endpoints. test/services shows that kube-proxy
// answers so for far more Services.
func TestViewChangesNoChoice(t *testing.T) {
	for _, c := range choices.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			sameChoice(t, c.Service, c.Endpoints, c.Self)
		})
	}
	random := rand.New(rand.NewPCG(1, 2))
	narrow := 0
	for range 20_000 {
		svc, endpoints, self := anyService(random)
		sameChoice(t, svc, endpoints, self)
		if len(sent(svc, endpoints, self)) < len(endpoints) {
			narrow++
		}
	}
	if narrow < 2_000 {
		t.Errorf("only %d of 20,000 Services have a shorter list", narrow)
	}
}

func sameChoice(t *testing.T, svc *services.Service, endpoints []services.Named, self services.Self) {
	t.Helper()
	few := sent(svc, endpoints, self)
	for _, port := range svc.GetPorts() {
		for _, ip := range []string{"10.96.0.1", "fd00:96::1"} {
			at := netip.MustParseAddr(ip)
			want := listed(services.Choose(svc, port, at, endpoints, self), port)
			if got := listed(services.Choose(svc, port, at, few, self), port); !reflect.DeepEqual(got, want) {
				t.Fatalf("%v at %s on %+v\nof all endpoints: %v\nof those sent: %v\n%v\n%v", port, ip, self, want, got, svc,
					endpoints)
			}
		}
	}
}

// listed returns a choice in a form that can be compared.
func listed(c services.Choice, port *services.Port) [4]any {
	return [4]any{
		choices.Places(c.Cluster, port), choices.Places(c.Local, port), choices.Places(c.Reachable, port), c.Anywhere,
	}
}

// anyService returns a Service with endpoints in up to three zones and slices, and a node.
func anyService(r *rand.Rand) (*services.Service, []services.Named, services.Self) {
	ports := []*services.Port{{Name: "http", Protocol: "TCP", Port: 80}, {Name: "dns", Protocol: "UDP", Port: 53}}
	svc := &services.Service{Ports: ports[:1+r.IntN(2)], InternalLocal: r.IntN(3) == 0, ExternalLocal: r.IntN(3) == 0}
	if r.IntN(4) == 0 {
		svc.ExternalIps = []string{"192.0.2.1"}
	}
	zones := []string{"a", "b", "c"}
	lacks := 1 + r.IntN(200) // one endpoint in so many lacks a hint, on average
	var all []services.Named
	for slice := range 1 + r.IntN(3) {
		for i := range r.IntN(5) {
			e := &services.Endpoint{
				Address: "10.0.0." + strconv.Itoa(r.IntN(12)), Node: "node" + strconv.Itoa(r.IntN(4)), Ports: ports[:1+r.IntN(2)],
			}
			if r.IntN(8) == 0 {
				e.Address = "fd00::" + strconv.Itoa(i)
			}
			e.Ready = r.IntN(4) > 0
			e.Serving, e.Terminating = e.Ready || r.IntN(2) == 0, !e.Ready && r.IntN(2) == 0
			if lacks%3 > 0 && r.IntN(lacks) > 0 {
				e.ZoneHints = []string{zones[r.IntN(3)]}
			}
			if lacks > 100 && r.IntN(lacks) > 0 {
				e.NodeHints = []string{"node" + strconv.Itoa(r.IntN(4))}
			}
			all = append(all, services.Named{
				Path: services.EndpointPath("shop", "web", "web-"+strconv.Itoa(slice), e.Address), Endpoint: e,
			})
		}
	}
	return svc, all, services.Self{Node: "node" + strconv.Itoa(r.IntN(5)), Zone: append(zones, "")[r.IntN(4)]}
}
