package services_test

import (
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"tunnel.example/tunnel/internal/testkit/choices"
	"tunnel.example/tunnel/pkg/services"
)

// test/services shows that kube-proxy answers these cases in the same way.
func TestChoose(t *testing.T) {
	for _, c := range choices.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			given := slices.Clone(c.Endpoints)
			got := services.Choose(c.Service, c.Port, c.At, c.Endpoints, c.Self)
			for _, list := range []struct {
				name string
				got  []services.Named
				want []string
			}{
				{"Cluster", got.Cluster, c.Cluster},
				{"Local", got.Local, c.Local},
				{"Reachable", got.Reachable, c.Reachable},
			} {
				if got := choices.Places(list.got, c.Port); !slices.Equal(got, list.want) {
					t.Errorf("%s is %q, want %q", list.name, got, list.want)
				}
			}
			if got.Anywhere != c.Anywhere {
				t.Errorf("Anywhere is %t", got.Anywhere)
			}
			if !slices.Equal(c.Endpoints, given) {
				t.Error("Choose has changed the endpoints that it got")
			}
		})
	}
}

func TestTargetPort(t *testing.T) {
	e := &services.Endpoint{Ports: []*services.Port{
		{Name: "dns", Protocol: "UDP", Port: 5353}, {Name: "http", Protocol: "TCP", Port: 8080},
		{Name: "", Protocol: "TCP", Port: 9000}, {Name: "wrong", Protocol: "TCP", Port: 1<<16 + 80},
	}}
	for _, c := range []struct {
		name, protocol string
		want           uint16
	}{
		{"http", "TCP", 8080}, {"dns", "UDP", 5353}, {"dns", "TCP", 0}, {"metrics", "TCP", 0}, {"", "TCP", 9000},
		{"wrong", "TCP", 0},
	} {
		port := &services.Port{Name: c.name, Protocol: c.protocol, Port: 80}
		if got := services.TargetPort(e, port); got != c.want {
			t.Errorf("%q of %s is served at %d, want %d", c.name, c.protocol, got, c.want)
		}
	}
}

// The usual Service costs no allocation: all its endpoints are ready and in one slice.
func TestChooseAllocatesNothing(t *testing.T) {
	svc, at, endpoints := usual(10)
	self := services.Self{Node: "node1", Zone: "a"}
	if n := testing.AllocsPerRun(100, func() { services.Choose(svc, svc.GetPorts()[0], at, endpoints, self) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkChoose chooses for one port of one Service with 10 endpoints.
func BenchmarkChoose(b *testing.B) {
	self := services.Self{Node: "node1", Zone: "a"}
	svc, at, endpoints := usual(10)
	choose := func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			services.Choose(svc, svc.GetPorts()[0], at, endpoints, self)
		}
	}
	b.Run("ready", choose)
	for i, e := range endpoints {
		e.ZoneHints = []string{"abc"[i%3 : i%3+1]}
	}
	b.Run("hints", choose)
	svc.InternalLocal = true
	b.Run("local", choose)
	svc.InternalLocal = false
	slices.Reverse(endpoints)
	b.Run("slices", choose)
}

// BenchmarkChooseAll chooses for 5,000 Services with 10 endpoints each.
func BenchmarkChooseAll(b *testing.B) {
	const count = 5000
	self := services.Self{Node: "node1", Zone: "a"}
	svcs, endpoints := make([]*services.Service, count), make([][]services.Named, count)
	var at netip.Addr
	for i := range count {
		svcs[i], at, endpoints[i] = usual(10)
	}
	b.ReportAllocs()
	for b.Loop() {
		for i, svc := range svcs {
			services.Choose(svc, svc.GetPorts()[0], at, endpoints[i], self)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/count, "ns/Choose")
}

// usual returns a Service whose endpoints are ready, and its ClusterIP.
func usual(n int) (*services.Service, netip.Addr, []services.Named) {
	svc := &services.Service{
		ClusterIps: []string{"10.96.0.1"},
		Ports:      []*services.Port{{Name: "http", Protocol: "TCP", Port: 80}},
	}
	ports := []*services.Port{{Name: "http", Protocol: "TCP", Port: 8080}}
	endpoints := make([]services.Named, n)
	for i := range endpoints {
		addr := netip.AddrFrom4([4]byte{10, 0, 0, byte(10 + i)}).String()
		endpoints[i] = services.Named{
			Path: services.EndpointPath("shop", "web", "web-1", addr),
			Endpoint: &services.Endpoint{
				Address: addr, Node: "node" + strconv.Itoa(i%3), Ready: true, Serving: true, Ports: ports,
			},
		}
	}
	return svc, netip.MustParseAddr("10.96.0.1"), endpoints
}
