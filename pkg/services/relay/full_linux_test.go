package relay

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// site is this namespace as a node without kube-proxy, with two pods and a machine outside of the cluster.
type site struct {
	t          testing.TB
	caller     *pod // 10.88.1.2, fd00:88:1::2
	servers    *pod // 10.88.2.2 to 10.88.2.5, and the same of IPv6
	outside    *pod // 192.168.7.2; the node has 192.168.7.1
	kernel     *linux
	planner    planner
	state      *services.State
	plan       *plan
	programmed rules // what the kernel has
}

const (
	nodeIP    = "192.168.7.1"
	outsideIP = "192.168.7.2"
)

// newSite makes a node whose kernel has the rules of an empty state.
func newSite(t *testing.T, full bool) *site {
	t.Helper()
	s := &site{t: t, kernel: &linux{full: full}, planner: planner{node: "edge1", full: full}, state: services.NewState()}
	s.caller = newPod(t, "vetha", "10.88.1.1/24", "10.88.1.2/24", "fd00:88:1::1/64", "fd00:88:1::2/64")
	s.servers = newPod(t, "vethb", "10.88.2.1/24", "10.88.2.2/24", "fd00:88:2::1/64", "fd00:88:2::2/64")
	s.outside = newPod(t, "uplink", nodeIP+"/24", outsideIP+"/24", "fd00:7::1/64", "fd00:7::2/64")
	for _, file := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+file, []byte("1"), 0o600); err != nil {
			t.Skipf("no settings of its own: %v", err)
		}
	}
	s.servers.in(func() error {
		return setAddresses("eth0", "10.88.2.3/24", "10.88.2.4/24", "10.88.2.5/24",
			"fd00:88:2::3/64", "fd00:88:2::4/64", "fd00:88:2::5/64")
	})
	// The node has a default route, as most nodes do.
	for _, gateway := range []string{outsideIP, "fd00:7::2"} {
		if err := netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.kernel.open(); err != nil {
		t.Fatal(err)
	}
	s.serve()
	s.plan = s.planner.plan(s.state)
	if err := s.kernel.program(someListeners(1), s.plan.all()); err != nil {
		t.Skipf("the kernel has no nftables: %v", err)
	}
	s.programmed = s.plan.all()
	if err := s.kernel.route(nil, s.programmed); err != nil {
		t.Fatal(err)
	}
	s.apply(&pb.Changes{Set: []*pb.Item{
		item(t, services.NodePath("edge1"), &services.Node{Edge: true, PodCidrs: []string{"10.88.0.0/16", "fd00:88::/32"},
			InternalIps: []string{nodeIP}}),
	}})
	return s
}

func someListeners(port uint16) []netip.AddrPort {
	return []netip.AddrPort{netip.AddrPortFrom(addr4, port), netip.AddrPortFrom(addr6, port)}
}

// serve answers by TCP and UDP at port 8080 of the servers' pod: with the address where it was asked, and by whom.
func (s *site) serve() {
	s.servers.in(func() error {
		for _, network := range []string{"tcp4", "tcp6"} {
			ln, err := net.Listen(network, ":8080")
			if err != nil {
				return err
			}
			s.t.Cleanup(func() { ln.Close() })
			go func() {
				for {
					c, err := ln.Accept()
					if err != nil {
						return
					}
					fmt.Fprintf(c, "%s %s\n", listen.AddrOf(c.LocalAddr()), listen.AddrOf(c.RemoteAddr()))
					go func() {
						io.Copy(c, c)
						c.Close()
					}()
				}
			}()
		}
		for _, last := range []string{"2", "3", "4", "5"} {
			for _, prefix := range []string{"10.88.2.", "fd00:88:2::"} {
				at := netip.AddrPortFrom(netip.MustParseAddr(prefix+last), 8080)
				c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
				if err != nil {
					return err
				}
				s.t.Cleanup(func() { c.Close() })
				go func() {
					for b := make([]byte, 100); ; {
						_, from, err := c.ReadFromUDPAddrPort(b)
						if err != nil {
							return
						}
						c.WriteToUDPAddrPort([]byte(at.Addr().String()+" "+from.Addr().Unmap().String()), from)
					}
				}()
			}
		}
		return nil
	})
}

// apply has the kernel follow a change of the state.
func (s *site) apply(changes *pb.Changes) {
	s.t.Helper()
	d, err := s.state.Apply(changes)
	if err != nil {
		s.t.Fatal(err)
	}
	s.planner.update(s.plan, s.state, &d)
	s.program()
}

// program has the kernel do what the plan says.
func (s *site) program() {
	s.t.Helper()
	want := follow(s.programmed, s.plan)
	before, after := s.programmed.difference(want)
	if err := s.kernel.change(before, after); err != nil {
		s.t.Fatal(err)
	}
	if err := s.kernel.route(before, after); err != nil {
		s.t.Fatal(err)
	}
	if err := s.kernel.forget(before, after); err != nil {
		s.t.Fatal(err)
	}
	s.programmed = want
}

// service returns a change that sets a Service and its endpoints.
func (s *site) service(service *services.Service, endpoints ...*services.Endpoint) *pb.Changes {
	changes := &pb.Changes{Set: []*pb.Item{item(s.t, web, service)}}
	for _, e := range endpoints {
		changes.Set = append(changes.Set, item(s.t, services.EndpointPath("shop", "web", "web-a", e.GetAddress()), e))
	}
	return changes
}

func siteService(change func(*services.Service)) *services.Service {
	s := &services.Service{ClusterIps: []string{"10.96.0.10", "fd00:96::10"}, Ports: []*services.Port{
		{Name: "http", Protocol: "TCP", Port: 80, NodePort: 30080},
		{Name: "dns", Protocol: "UDP", Port: 53, NodePort: 30053},
	}}
	if change != nil {
		change(s)
	}
	return s
}

// ready returns an endpoint with both ports.
func ready(addr, node string) *services.Endpoint {
	return &services.Endpoint{Address: addr, Node: node, Ready: true, Serving: true, Ports: []*services.Port{
		{Name: "http", Protocol: "TCP", Port: 8080}, {Name: "dns", Protocol: "UDP", Port: 8080}}}
}

// connect connects, from a pod or from the node (nil), and returns which endpoint answers, and whom it sees.
func connect(from *pod, to string, timeout time.Duration) (endpoint, caller string, err error) {
	dial := func() error {
		c, err := (&net.Dialer{Timeout: timeout}).Dial("tcp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(10 * time.Second))
		line, err := bufio.NewReader(c).ReadString('\n')
		endpoint, caller, _ = strings.Cut(strings.TrimSpace(line), " ")
		return err
	}
	if from == nil {
		return endpoint, caller, dial()
	}
	return endpoint, caller, from.try(dial)
}

// want connects n times, and checks that each of these endpoints answers and no other, and whom they see.
func (s *site) want(from *pod, to string, n int, caller string, endpoints ...string) {
	s.t.Helper()
	got := make(map[string]int)
	for range n {
		e, by, err := connect(from, to, 5*time.Second)
		if err != nil {
			s.t.Fatalf("to %s: %v", to, err)
		}
		if caller != "" && by != caller {
			s.t.Errorf("%s: endpoint %s sees %s, want %s", to, e, by, caller)
		}
		got[e]++
	}
	for e := range got {
		if !slices.Contains(endpoints, e) {
			s.t.Errorf("%s leads to %s", to, e)
		}
	}
	if len(got) != len(endpoints) {
		s.t.Errorf("%s leads to %v, want %v", to, got, endpoints)
	}
}

// wantRefused checks that connections are refused, and at once unless the machine is slow.
func (s *site) wantRefused(from *pod, to string) {
	s.t.Helper()
	best := time.Hour
	for range 5 {
		start := time.Now()
		if _, _, err := connect(from, to, 5*time.Second); !errors.Is(err, syscall.ECONNREFUSED) {
			s.t.Errorf("%s: %v", to, err)
			return
		}
		best = min(best, time.Since(start))
	}
	if best > time.Second {
		s.t.Errorf("%s: a refusal takes %s", to, best)
	}
}

// wantSilence checks that a connection gets no answer.
func (s *site) wantSilence(from *pod, to string) {
	s.t.Helper()
	_, _, err := connect(from, to, 300*time.Millisecond)
	if timeout, ok := errors.AsType[net.Error](err); !ok || !timeout.Timeout() {
		s.t.Errorf("%s: %v", to, err)
	}
}

// try is in, and returns the error.
func (p *pod) try(f func() error) (err error) {
	p.in(func() error {
		err = f()
		return nil
	})
	return err
}

// Connections to a Service get each of its endpoints, from pods and from the node. Endpoints see the address of a pod,
// and of the node the address that is nearest to them.
func TestFullSpread(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	v4 := []string{"10.88.2.2", "10.88.2.3", "10.88.2.4"}
	v6 := []string{"fd00:88:2::2", "fd00:88:2::3"}
	var all []*services.Endpoint
	for _, addr := range append(slices.Clone(v4), v6...) {
		all = append(all, ready(addr, "edge1"))
	}
	external := func(s *services.Service) { s.ExternalIps = []string{"203.0.113.5", "fd00:203::5"} }
	s.apply(s.service(siteService(external), all...))
	s.want(s.caller, "10.96.0.10:80", 60, "10.88.1.2", v4...)
	s.want(s.caller, "[fd00:96::10]:80", 60, "fd00:88:1::2", v6...)
	s.want(nil, "10.96.0.10:80", 60, "10.88.2.1", v4...)
	s.want(nil, "[fd00:96::10]:80", 60, "fd00:88:2::1", v6...)
	// Node ports: answers come by the node, so it masquerades callers that may be elsewhere.
	s.want(s.outside, nodeIP+":30080", 60, "10.88.2.1", v4...)
	s.want(s.outside, "[fd00:7::1]:30080", 60, "fd00:88:2::1", v6...)
	s.want(s.caller, nodeIP+":30080", 60, "10.88.2.1", v4...)
	s.want(nil, nodeIP+":30080", 60, "10.88.2.1", v4...)
	s.want(s.outside, "203.0.113.5:80", 60, "10.88.2.1", v4...)
	s.want(nil, "[fd00:203::5]:80", 60, "fd00:88:2::1", v6...)
	// A port that no Service has.
	s.wantRefused(s.caller, "10.96.0.10:81")
	s.wantRefused(nil, "[fd00:96::10]:81")
	if !s.kernel.intact() {
		t.Error("the table is not intact")
	}
	// Connections go on when the endpoint leaves the Service, and new ones get others.
	var conn net.Conn
	s.caller.in(func() (err error) {
		conn, err = net.Dial("tcp", "10.96.0.10:80")
		return err
	})
	defer conn.Close()
	lines := bufio.NewReader(conn)
	line, err := lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	gone, _, _ := strings.Cut(line, " ")
	s.apply(&pb.Changes{Deleted: []string{services.EndpointPath("shop", "web", "web-a", gone)}})
	left := slices.DeleteFunc(slices.Clone(v4), func(a string) bool { return a == gone })
	s.want(s.caller, "10.96.0.10:80", 40, "10.88.1.2", left...)
	fmt.Fprintln(conn, "x")
	if line, err = lines.ReadString('\n'); line != "x\n" {
		t.Errorf("the connection to an endpoint that has left: %q, %v", line, err)
	}
	// A pod that is the only endpoint reaches itself.
	self := s.service(siteService(nil), ready("10.88.2.2", "edge1"), ready("fd00:88:2::2", "edge1"))
	for _, addr := range append(slices.Clone(v4), v6...) {
		if !strings.HasSuffix(addr, "2.2") && !strings.HasSuffix(addr, "::2") {
			self.Deleted = append(self.Deleted, services.EndpointPath("shop", "web", "web-a", addr))
		}
	}
	s.apply(self)
	s.want(s.servers, "10.96.0.10:80", 5, "10.88.2.1", "10.88.2.2")
	err = s.servers.try(func() error { // of its addresses, it must take that of the endpoint
		from := net.TCPAddrFromAddrPort(netip.MustParseAddrPort("[fd00:88:2::2]:0"))
		c, err := (&net.Dialer{Timeout: 5 * time.Second, LocalAddr: from}).Dial("tcp", "[fd00:96::10]:80")
		if err != nil {
			return err
		}
		defer c.Close()
		if line, err := bufio.NewReader(c).ReadString('\n'); line != "fd00:88:2::2 fd00:88:2::1\n" {
			return fmt.Errorf("got %q, %w", line, err)
		}
		return nil
	})
	if err != nil {
		t.Errorf("an endpoint of IPv6 that calls itself: %v", err)
	}
	s.apply(&pb.Changes{Deleted: []string{web}})
	elements := 0
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range s.kernel.sets() {
		for _, own := range []netip.Addr{addr4, addr6} {
			all, err := c.GetSetElements(s.kernel.set(kind, familyOf(own)))
			if err != nil {
				t.Fatal(err)
			}
			if kind != setPods {
				elements += len(all)
			}
		}
	}
	if elements != 0 {
		t.Errorf("without Services, %d elements are left", elements)
	}
}

// Without endpoints, connections and datagrams are refused at once; with the policy Local they are dropped while other
// nodes have endpoints.
func TestFullRefuses(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	s.apply(s.service(siteService(nil)))
	for _, to := range []string{"10.96.0.10:80", "[fd00:96::10]:80"} {
		s.wantRefused(s.caller, to)
		s.wantRefused(nil, to)
	}
	s.wantRefused(s.outside, nodeIP+":30080")
	for _, from := range []*pod{s.caller, s.outside} {
		to := map[*pod]string{s.caller: "10.96.0.10:53", s.outside: nodeIP + ":30053"}[from]
		err := from.try(func() error {
			c, err := net.Dial("udp", to)
			if err != nil {
				return err
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(5 * time.Second))
			if _, err = c.Write([]byte("x")); err == nil {
				_, err = c.Read(make([]byte, 1))
			}
			return err
		})
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("a datagram to %s: %v", to, err)
		}
	}
	// An endpoint of another node, to which no tunnel leads. The rules know a local endpoint of it in the end.
	local := func(s *services.Service) { s.InternalLocal, s.ExternalLocal = true, true }
	s.apply(s.service(siteService(local), ready("10.88.2.2", "server1")))
	s.wantSilence(s.caller, "10.96.0.10:80")
	s.wantSilence(nil, "10.96.0.10:80")
	s.wantSilence(s.outside, nodeIP+":30080")
	s.want(s.caller, nodeIP+":30080", 5, "10.88.1.2", "10.88.2.2")
	s.want(nil, nodeIP+":30080", 5, "10.88.2.1", "10.88.2.2")
	s.apply(s.service(siteService(local), ready("10.88.2.3", "edge1"), ready("10.88.2.4", "edge1")))
	s.want(s.caller, "10.96.0.10:80", 40, "10.88.1.2", "10.88.2.3", "10.88.2.4")
	s.want(s.outside, nodeIP+":30080", 40, outsideIP, "10.88.2.3", "10.88.2.4")
	s.want(s.caller, nodeIP+":30080", 40, "10.88.1.2", "10.88.2.3", "10.88.2.4")
}

// A caller keeps its endpoint until it has been idle for the timeout, or the endpoint goes.
func TestFullAffinity(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	sticky := func(seconds uint32) *services.Service {
		return siteService(func(s *services.Service) { s.AffinitySeconds = seconds })
	}
	v4 := []string{"10.88.2.2", "10.88.2.3", "10.88.2.4"}
	var all []*services.Endpoint
	for _, addr := range append(slices.Clone(v4), "fd00:88:2::2", "fd00:88:2::3") {
		all = append(all, ready(addr, "edge1"))
	}
	s.apply(s.service(sticky(600), all...))
	first := make(map[string]string)
	for _, to := range []string{"10.96.0.10:80", "[fd00:96::10]:80", nodeIP + ":30080"} {
		e, _, err := connect(s.caller, to, 5*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		first[to] = e
		s.want(s.caller, to, 20, "", e)
	}
	// The next process takes over what callers have.
	next := &linux{full: true}
	if err := next.program(someListeners(2), s.plan.all()); err != nil {
		t.Fatal(err)
	}
	s.kernel = next
	for to, e := range first {
		s.want(s.caller, to, 10, "", e)
	}
	// The endpoint goes: the caller gets another one, and keeps that.
	gone := first["10.96.0.10:80"]
	s.apply(&pb.Changes{Deleted: []string{services.EndpointPath("shop", "web", "web-a", gone)}})
	e, _, err := connect(s.caller, "10.96.0.10:80", 5*time.Second)
	if err != nil || e == gone {
		t.Fatalf("got %s, %v", e, err)
	}
	s.want(s.caller, "10.96.0.10:80", 20, "", e)
	// Back again: the caller stays where it is.
	s.apply(s.service(sticky(600), ready(gone, "edge1")))
	s.want(s.caller, "10.96.0.10:80", 20, "", e)
	// A short timeout: idle callers are forgotten.
	s.apply(s.service(sticky(1)))
	other := s.outside
	if _, _, err = connect(other, "10.96.0.10:80", 5*time.Second); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the kernel forgets an idle caller", func() bool {
		seen, start := make(map[string]bool), time.Now()
		for range 3 {
			e, _, err := connect(other, "10.96.0.10:80", 5*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			seen[e] = true
		}
		if len(seen) != 1 && time.Since(start) < time.Second { // else the machine was slow, and the caller idle
			t.Fatalf("a caller that is not idle gets %v", seen)
		}
		time.Sleep(1100 * time.Millisecond) // the caller is idle for its timeout
		e, _, err := connect(other, "10.96.0.10:80", 5*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		return !seen[e]
	})
}

// A caller that may have endpoints of this node alone, from now on, does not keep one of another node.
func TestFullAffinityLocal(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	s.planner.direct = []netip.Prefix{netip.MustParsePrefix("10.88.2.0/24")}
	sticky := func(local bool) *services.Service {
		return siteService(func(s *services.Service) { s.AffinitySeconds, s.ExternalLocal = 600, local })
	}
	s.apply(s.service(sticky(false), ready("10.88.2.3", "server1")))
	s.want(s.outside, nodeIP+":30080", 3, "", "10.88.2.3")
	s.apply(s.service(sticky(true), ready("10.88.2.2", "edge1")))
	s.want(s.outside, nodeIP+":30080", 5, outsideIP, "10.88.2.2")
	s.apply(s.service(sticky(true), ready("10.88.2.4", "edge1"))) // the caller keeps what it has on this node
	s.want(s.outside, nodeIP+":30080", 20, outsideIP, "10.88.2.2")
	// The relay chooses for callers on this node, among endpoints of several nodes. The kernel chooses for the others.
	s.planner.spread = true
	far := s.service(sticky(true), ready("10.88.9.9", "edge2"))
	far.Set = append(far.Set, item(t, services.NodePath("edge2"), &services.Node{Edge: true}))
	s.apply(far)
	if r := s.plan.rule(address{netip.MustParseAddrPort("0.0.0.0:30080"), protocolTCP}); r.inside != toRelay {
		t.Errorf("the rule is %+v", r)
	}
	s.want(s.outside, nodeIP+":30080", 20, outsideIP, "10.88.2.2")
}

// Without session affinity in the kernel (Linux 5.2 and 5.3), each new connection of a caller may go to any endpoint of
// the Service.
func TestFullWithoutAffinity(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	s.kernel.noAffinity = true
	sticky := siteService(func(s *services.Service) { s.AffinitySeconds = 600 })
	s.apply(s.service(sticky, ready("10.88.2.2", "edge1"), ready("10.88.2.3", "edge1")))
	s.want(s.caller, "10.96.0.10:80", 60, "10.88.1.2", "10.88.2.2", "10.88.2.3")
	s.want(s.outside, nodeIP+":30080", 60, "10.88.2.1", "10.88.2.2", "10.88.2.3")
}

// A Service whose external IP is the address of the cloud does not take the edge's own connections, with endpoints and
// without. Those of others are the Service's.
func TestFullLeavesTheEdgeAlone(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	const cloud = "203.0.113.5:80"
	s.outside.in(func() error {
		if err := setAddresses("eth0", "203.0.113.5/32"); err != nil {
			return err
		}
		ln, err := net.Listen("tcp", cloud)
		if err != nil {
			return err
		}
		t.Cleanup(func() { ln.Close() })
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				fmt.Fprintln(c, "cloud")
				c.Close()
			}
		}()
		return nil
	})
	claims := siteService(func(s *services.Service) { s.ExternalIps = []string{"203.0.113.5"} })
	for _, endpoints := range [][]*services.Endpoint{nil, {ready("10.88.2.2", "edge1")}} {
		s.apply(s.service(claims, endpoints...))
		own := net.Dialer{Timeout: 5 * time.Second, Control: Unredirected}
		c, err := own.Dial("tcp", cloud)
		if err != nil {
			t.Errorf("%d endpoints: %v", len(endpoints), err)
			continue
		}
		if line, err := bufio.NewReader(c).ReadString('\n'); line != "cloud\n" {
			t.Errorf("%d endpoints: %q, %v", len(endpoints), line, err)
		}
		c.Close()
	}
	s.want(nil, cloud, 3, "10.88.2.1", "10.88.2.2")
}

// A packet that is masqueraded loses the mark that asks for it.
func TestFullClearsTheMark(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "foreign"})
	after := nftables.ChainPriorityRef(*nftables.ChainPriorityNATSource + 100)
	chain := c.AddChain(&nftables.Chain{Name: "after", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPostrouting, Priority: after})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain,
		Exprs: append(hasMark(markMasquerade, true), &expr.Verdict{Kind: expr.VerdictDrop})})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	s.apply(s.service(siteService(nil), ready("10.88.2.2", "edge1")))
	s.want(s.outside, nodeIP+":30080", 1, "10.88.2.1", "10.88.2.2")
}

// A flow of UDP whose endpoint goes gets another one, although it always comes from the same port.
func TestFullDatagrams(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	s.apply(s.service(siteService(nil), ready("10.88.2.2", "edge1"), ready("fd00:88:2::2", "edge1")))
	for _, c := range []struct {
		from *pod
		to   string
		by   string
	}{
		{s.caller, "10.96.0.10:53", "10.88.1.2"}, {s.caller, "[fd00:96::10]:53", "fd00:88:1::2"},
		{s.outside, nodeIP + ":30053", "10.88.2.1"}, {s.caller, nodeIP + ":30053", "10.88.2.1"},
	} {
		want := func(socket *net.UDPConn, endpoint string) {
			t.Helper()
			for range 3 {
				fmt.Fprint(socket, "x")
				b := make([]byte, 100)
				socket.SetReadDeadline(time.Now().Add(5 * time.Second))
				n, err := socket.Read(b)
				if got := string(b[:n]); err != nil || got != endpoint+" "+c.by {
					t.Errorf("%s: %q, %v; want %s", c.to, got, err, endpoint)
				}
			}
		}
		prefix, _ := strings.CutSuffix("10.88.2.2", "2")
		if strings.HasPrefix(c.to, "[fd") {
			prefix = "fd00:88:2::"
		}
		socket := c.from.socketIn(netip.MustParseAddrPort(c.to))
		want(socket, prefix+"2")
		drains := ready(prefix+"2", "edge1")
		drains.Ready, drains.Terminating = false, true
		s.apply(s.service(siteService(nil), drains, ready(prefix+"3", "edge1")))
		want(socket, prefix+"2") // a flow ends with its endpoint
		want(c.from.socketIn(netip.MustParseAddrPort(c.to)), prefix+"3")
		swap := s.service(siteService(nil), ready(prefix+"3", "edge1"))
		swap.Deleted = []string{services.EndpointPath("shop", "web", "web-a", prefix+"2")}
		s.apply(swap)
		want(socket, prefix+"3")
		back := s.service(siteService(nil), ready(prefix+"2", "edge1"))
		back.Deleted = []string{services.EndpointPath("shop", "web", "web-a", prefix+"3")}
		s.apply(back)
		want(socket, prefix+"2")
	}
}

// The next process takes over while callers connect all the time: no connection fails.
func TestFullProcessSwap(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	s.apply(s.service(siteService(nil), ready("10.88.2.2", "edge1"), ready("10.88.2.3", "edge1")))
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "foreign"})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var callers errgroup.Group
	var served atomic.Int64
	for range 4 {
		callers.Go(func() error {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return nil
				default:
				}
				if _, _, err := connect(s.caller, "10.96.0.10:80", 5*time.Second); err != nil {
					return fmt.Errorf("connection %d: %w", n, err)
				}
				served.Add(1)
			}
		})
	}
	last := s.kernel
	for i := 0; i < 20 || i < 1000 && served.Load() < 40; i++ { // on a busy machine, connections take their time
		next := &linux{full: true}
		if i%3 == 2 {
			next = last // it writes its table again
		}
		if err := next.program(someListeners(uint16(10+i)), s.plan.all()); err != nil {
			t.Fatal(err)
		}
		if err := last.clear(); err != nil {
			t.Fatal(err)
		}
		if err := last.remove(); err != nil {
			t.Fatal(err)
		}
		last = next
	}
	close(stop)
	if err := callers.Wait(); err != nil || served.Load() < 40 {
		t.Errorf("%d connections; %v", served.Load(), err)
	}
	// Nothing of the processes before is left.
	if others, err := last.others(c); err != nil || len(others.chains)+len(others.sets) > 0 || !last.intact() {
		t.Errorf("left: %v, %v, intact: %t", others, err, last.intact())
	}
	if got := tables(t); !slices.Equal(got, []string{"foreign", tableName}) {
		t.Errorf("tables: %v", got)
	}
	// Without the edge, local endpoints go on. An edge without Services removes the rules.
	s.want(s.caller, "10.96.0.10:80", 20, "10.88.1.2", "10.88.2.2", "10.88.2.3")
	log, _ := testkit.NewLog()
	RemoveRules(log)
	if got := tables(t); !slices.Equal(got, []string{"foreign"}) {
		t.Errorf("tables: %v", got)
	}
}

// If the kernel refuses a table, the one of before stays in force, and changes go on. Chains that nothing leads to do
// not gather without end.
func TestFullTableIsRefused(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	s.apply(s.service(siteService(nil), ready("10.88.2.2", "edge1")))
	wrong := rules{{web4, protocolTCP}: {kind: toEnds, ends: []netip.AddrPort{netip.MustParseAddrPort("[fd00::1]:1")}}}
	for range 3 {
		if err := s.kernel.program(someListeners(1), wrong); err == nil {
			t.Fatal("the kernel takes an endpoint of another family")
		}
	}
	if !s.kernel.intact() {
		t.Error("the table of before is not intact")
	}
	own, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	if others, err := s.kernel.others(own); err != nil || len(others.chains)+len(others.sets) > 0 {
		t.Errorf("tables that were refused left %d chains and %d sets, %v", len(others.chains), len(others.sets), err)
	}
	s.want(s.caller, "10.96.0.10:80", 3, "", "10.88.2.2")
	s.apply(s.service(siteService(nil), ready("10.88.2.3", "edge1")))
	s.want(s.caller, "10.96.0.10:80", 40, "", "10.88.2.2", "10.88.2.3")
	for i := uint32(1); err == nil; i++ {
		if i > 2*maxSpareChains {
			t.Fatal("the table gets more chains with each change")
		}
		d, applyErr := s.state.Apply(s.service(siteService(func(s *services.Service) { s.AffinitySeconds = i })))
		if applyErr != nil {
			t.Fatal(applyErr)
		}
		s.planner.update(s.plan, s.state, &d)
		want := follow(s.programmed, s.plan)
		err = s.kernel.change(s.programmed.difference(want))
		s.programmed = want
	}
	if err := s.kernel.program(someListeners(1), s.plan.all()); err != nil || len(s.kernel.chains) > 20 {
		t.Errorf("written again: %v, %d chains", err, len(s.kernel.chains))
	}
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	if others, err := s.kernel.others(c); err != nil || len(others.chains)+len(others.sets) > 0 {
		t.Errorf("left: %d chains and %d sets, %v", len(others.chains), len(others.sets), err)
	}
	if _, _, err := connect(s.caller, "10.96.0.10:80", 5*time.Second); err != nil {
		t.Error(err)
	}
}

// 5,000 Services of 10 endpoints each. The log says how long they take: the budget is 5 s, and 50 ms for a change.
func TestFullManyServices(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	s.planner.direct = routedToAll()
	changes := manyServices(t)
	if _, err := s.state.Apply(changes); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	s.plan = s.planner.plan(s.state)
	planned := time.Since(start)
	next := &linux{full: true}
	if err := next.program(someListeners(3), s.plan.all()); err != nil {
		t.Fatal(err)
	}
	programmed := time.Since(start)
	if err := next.route(nil, s.plan.all()); err != nil {
		t.Fatal(err)
	}
	t.Logf("planned in %s, programmed in %s, routes in %s", planned, programmed-planned, time.Since(start)-programmed)
	s.kernel = next
	s.programmed = s.plan.all()
	var worst time.Duration
	for i := range 20 {
		change := s.service(siteService(nil), ready("10.88.2.2", "edge1"))
		if i%2 == 1 {
			change = &pb.Changes{Deleted: []string{services.EndpointPath("shop", "web", "web-a", "10.88.2.2")}}
		}
		start = time.Now()
		s.apply(change)
		worst = max(worst, time.Since(start))
	}
	t.Logf("a change takes %s at most", worst)
	start = time.Now()
	again := &linux{full: true}
	if err := errors.Join(again.program(someListeners(4), s.plan.all()), again.route(nil, s.plan.all())); err != nil {
		t.Fatal(err)
	}
	t.Logf("the next process takes over in %s", time.Since(start))
	s.kernel = again
	s.apply(s.service(siteService(nil), ready("10.88.2.2", "edge1")))
	s.want(s.caller, "10.96.0.10:80", 3, "10.88.1.2", "10.88.2.2")
}
