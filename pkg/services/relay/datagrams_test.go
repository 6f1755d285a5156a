package relay

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

// The UDP port of the Service of the tests, at its addresses.
var (
	udp4 = netip.AddrPortFrom(web4.Addr(), 53)
	udp6 = netip.AddrPortFrom(web6.Addr(), 53)
)

// datagramEndpoint is an endpoint with a UDP port.
func datagramEndpoint(addr, node string, port uint16) *services.Endpoint {
	e := endpoint(addr, node)
	e.Ports = append(e.Ports, &services.Port{Name: "dns", Protocol: "UDP", Port: uint32(port)})
	return e
}

// routed returns a router of a relay with a state, and a kernel that says of caller that it has sent to udp4.
func routed(t *testing.T, changes *pb.Changes) (o *router, k *fake, c *cloud, caller netip.AddrPort) {
	t.Helper()
	caller = netip.MustParseAddrPort("10.88.1.2:40000")
	k, c = &fake{sentTo: map[netip.AddrPort]netip.AddrPort{caller: udp4}}, newCloud()
	r, _ := newTestRelay(t, k, c)
	if _, _, err := r.applySeries([]*pb.Changes{changes}); err != nil {
		t.Fatal(err)
	}
	return &router{r, netip.AddrPortFrom(addr4, 1)}, k, c, caller
}

// twoFar is shop with two far endpoints of UDP.
func twoFar(t *testing.T) *pb.Changes {
	changes := shop(t)
	changes.Set = append(changes.Set, item(t, far4, datagramEndpoint("10.88.2.5", "edge2", 5353)),
		item(t, other, datagramEndpoint("10.88.3.5", "edge3", 5353)))
	return changes
}

// route asks a router that has to choose a target.
func route(t *testing.T, o *router, caller netip.AddrPort, had string) string {
	t.Helper()
	target, why, ok := o.Route(caller, had)
	if !ok {
		t.Fatalf("the datagram is dropped: %v", why)
	}
	return target
}

// A flow keeps its endpoint. A new one takes any, but none that could not be reached a moment ago.
func TestRouteDatagrams(t *testing.T) {
	o, k, c, caller := routed(t, twoFar(t))
	a, b := far4+" UDP 5353", other+" UDP 5353"
	seen := make(map[string]int)
	for range 100 {
		seen[route(t, o, caller, "")]++
		if route(t, o, caller, a) != a || route(t, o, caller, b) != b {
			t.Fatal("a flow loses its endpoint")
		}
	}
	if len(seen) != 2 || seen[a] == 0 || seen[b] == 0 {
		t.Errorf("chosen: %v", seen)
	}

	c.reach = func(string) (net.Conn, error) { return nil, tunnel.Refusef(tunnel.NoSuchNode, "away") }
	if _, err := o.Dial(t.Context(), a); tunnel.CodeOf(err) != tunnel.NoSuchNode {
		t.Errorf("away: %v", err)
	}
	for range 20 {
		if got := route(t, o, caller, ""); got != b {
			t.Fatalf("after a failure of %s, the router chooses %s", a, got)
		}
	}
	if _, err := o.Dial(t.Context(), b); err == nil {
		t.Error("b is reached")
	}
	if got := route(t, o, caller, ""); got != a && got != b {
		t.Errorf("with both away, the router chooses %s", got)
	}

	// An endpoint that terminates keeps its flows as long as it serves.
	apply := func(changes *pb.Changes) {
		t.Helper()
		if _, _, err := o.relay.applySeries([]*pb.Changes{changes}); err != nil {
			t.Fatal(err)
		}
	}
	drains := datagramEndpoint("10.88.2.5", "edge2", 5353)
	drains.Ready, drains.Terminating = false, true
	apply(&pb.Changes{Set: []*pb.Item{item(t, far4, drains)}})
	if got, other := route(t, o, caller, a), route(t, o, caller, ""); got != a || other != b {
		t.Errorf("with an endpoint that terminates, its flow goes to %s, and a new one to %s", got, other)
	}
	drains.Serving = false
	apply(&pb.Changes{Set: []*pb.Item{item(t, far4, drains)}})
	if got := route(t, o, caller, a); got != b {
		t.Errorf("the flow of an endpoint that serves no more goes to %s", got)
	}
	// In another EndpointSlice it is the same endpoint.
	moved := services.EndpointPath("shop", "web", "web-z", "10.88.2.5")
	same := datagramEndpoint("10.88.2.5", "edge2", 5353)
	apply(&pb.Changes{Deleted: []string{far4}, Set: []*pb.Item{item(t, moved, same)}})
	if got := route(t, o, caller, a); got != moved+" UDP 5353" {
		t.Errorf("the flow of an endpoint in another EndpointSlice goes to %s", got)
	}
	apply(&pb.Changes{Deleted: []string{moved}, Set: []*pb.Item{item(t, far4, same)}})

	// An endpoint that is deleted loses its flows.
	if _, _, err := o.relay.applySeries([]*pb.Changes{{Deleted: []string{far4}}}); err != nil {
		t.Fatal(err)
	}
	if got := route(t, o, caller, a); got != b {
		t.Errorf("the flow of a deleted endpoint goes to %s", got)
	}
	if _, err := o.Dial(t.Context(), a); err == nil {
		t.Error("the relay dials an endpoint that is deleted")
	}

	// Without endpoints, and for strangers, the datagram is dropped.
	if _, _, err := o.relay.applySeries([]*pb.Changes{{Deleted: []string{other}}}); err != nil {
		t.Fatal(err)
	}
	stranger := netip.MustParseAddrPort("10.88.1.2:40001")
	for _, one := range []struct {
		caller, to netip.AddrPort
		want       udp.Reason
	}{
		{caller, udp4, udp.DropUnreachable},
		{caller, netip.MustParseAddrPort("10.96.0.12:53"), udp.DropDenied}, // no Service has it
		{caller, web4, udp.DropDenied},                                     // a TCP port
		{caller, o.local, udp.DropDenied},                                  // the relay itself
		{stranger, udp4, udp.DropDenied},                                   // the kernel does not know
	} {
		k.mu.Lock()
		k.sentTo[caller] = one.to
		k.mu.Unlock()
		if _, why, ok := o.Route(one.caller, ""); ok || why != one.want {
			t.Errorf("%s to %s: dropped: %t, %v; want %v", one.caller, one.to, !ok, why, one.want)
		}
	}
}

// With session affinity, flows of one caller have one endpoint, also for another port of the caller.
func TestRouteAffinity(t *testing.T) {
	changes := twoFar(t)
	s := webService()
	s.AffinitySeconds = 60
	changes.Set = append(changes.Set, item(t, web, s))
	o, k, _, caller := routed(t, changes)
	first := route(t, o, caller, "")
	for port := range uint16(20) {
		next := netip.AddrPortFrom(caller.Addr(), 50000+port)
		k.sentTo[next] = udp4
		if got := route(t, o, next, ""); got != first {
			t.Fatalf("the caller had %s, and gets %s", first, got)
		}
	}
}

// A flow gets an endpoint that this node reaches by itself, if there is one, and this node sends to it. Datagrams and
// answers pass, and the flow ends with the relay.
func TestDirectDatagrams(t *testing.T) {
	server := echoDatagrams(t)
	changes := twoFar(t)
	own := datagramEndpoint("10.88.1.5", "edge1", 5353)
	changes.Set = append(changes.Set, item(t, services.EndpointPath("shop", "web", "web-a", "10.88.1.5"), own))
	k, c := new(fake), newCloud()
	r, _ := newTestRelay(t, k, c)
	at1(t, r, changes)
	if _, _, err := r.applySeries([]*pb.Changes{changes}); err != nil {
		t.Fatal(err)
	}
	r.direct = udp.NewEdge(leadsTo(server), r.cfg.Datagrams)
	d := newDoor(t.Context(), r, failing(t))
	if err := d.open(); err != nil {
		t.Fatal(err)
	}
	askTimes(t, k, d, 10)
	if len(c.targets()) != 0 || r.udp.Flows.Load() != 1 {
		t.Errorf("asked for %v, %d flows", c.targets(), r.udp.Flows.Load())
	}
	d.close()
	d.drain()
	if r.udp.Flows.Load() != 0 {
		t.Errorf("%d flows are left", r.udp.Flows.Load())
	}
}

// echoDatagrams starts a server that sends each datagram back to its sender. It returns the server's address.
func echoDatagrams(t *testing.T) (addr string) {
	t.Helper()
	server, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	t.Cleanup(func() { server.Close(); <-served })
	go func() {
		defer close(served)
		for b := make([]byte, 100); ; {
			n, from, err := server.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			server.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	return server.LocalAddr().String()
}

// askTimes has a new caller send n datagrams to udp4, one after the other, and wait for each to come back. d is a door
// of the relay with the kernel k.
func askTimes(t *testing.T, k *fake, d *door, n int) {
	t.Helper()
	caller, err := net.DialUDP("udp", nil, d.sockets[0].LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer caller.Close()
	k.mu.Lock()
	k.sentTo = map[netip.AddrPort]netip.AddrPort{caller.LocalAddr().(*net.UDPAddr).AddrPort(): udp4}
	k.mu.Unlock()
	for i := range n {
		question := fmt.Sprint(i)
		testkit.Within(t, 30*time.Second, "the datagram "+question+" comes back", func() error {
			fmt.Fprint(caller, question)
			caller.SetReadDeadline(time.Now().Add(time.Second))
			for b := make([]byte, 100); ; {
				n, err := caller.Read(b)
				if err != nil || string(b[:n]) == question {
					return err
				}
			}
		})
	}
}

// leadsTo is the address of the server that has all endpoints.
type leadsTo string

func (l leadsTo) DialUDP(ctx context.Context, addr string, _ func(netip.AddrPort) time.Time) (*net.UDPConn, error) {
	if addr != "10.88.1.5:5353" {
		return nil, tunnel.Refusef(tunnel.Unreachable, "the test has no %s", addr)
	}
	return anyTarget{}.DialUDP(ctx, string(l), nil)
}

// A conn for datagrams may live longer than its endpoint. Then no flow begins.
func TestEndpointOfAConnIsDeleted(t *testing.T) {
	r, _ := newTestRelay(t, new(fake), newCloud())
	apply := func(changes *pb.Changes) {
		t.Helper()
		if _, _, err := r.applySeries([]*pb.Changes{changes}); err != nil {
			t.Fatal(err)
		}
	}
	path := services.EndpointPath("shop", "web", "web-a", "10.88.1.5")
	apply(&pb.Changes{Set: []*pb.Item{
		item(t, web, webService()), item(t, path, datagramEndpoint("10.88.1.5", "edge1", 9))}})
	var dialled []string
	p := ownTargets{noting{dialled: &dialled}, r}
	never := func(netip.AddrPort) time.Time { return time.Time{} }
	dial := func() tunnel.Code {
		_, err := p.DialUDP(t.Context(), "10.88.1.5:9", never)
		return tunnel.CodeOf(err)
	}
	if code := dial(); code != tunnel.Timeout || len(dialled) != 1 {
		t.Errorf("an endpoint of this node: %v", code)
	}
	apply(&pb.Changes{Deleted: []string{path}})
	if code := dial(); code != tunnel.Denied {
		t.Errorf("after the end of the endpoint: %v", code)
	}
}

// The kernel forgets the way of datagrams to addresses that change, and of no others.
func TestForget(t *testing.T) {
	k, c := new(fake), newCloud()
	r, _ := newTestRelay(t, k, c)
	testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, false, shop(t))
	<-c.nexts
	wantRedirected(t, k, both...)
	c.batches <- batch(t, false, twoFar(t))
	<-c.nexts
	wantRedirected(t, k, udp4, web4, web6)
	testkit.Eventually(t, "the kernel is told to forget", func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		return len(k.forgot) == 1 && k.forgot[0] == address{udp4, protocolUDP}
	})
}
