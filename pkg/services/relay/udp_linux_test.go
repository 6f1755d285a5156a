package relay

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

// Another Service of the tests.
var (
	log4    = netip.MustParseAddrPort("10.96.0.11:514")
	logPath = services.ServicePath("shop", "log")
)

// datagramShop is shop with UDP.
func datagramShop(t testing.TB) *pb.Changes {
	changes := shop(t)
	changes.Set = append(changes.Set,
		item(t, far4, datagramEndpoint("10.88.2.5", "edge2", 5353)),
		item(t, far6, datagramEndpoint("fd00:88:2::5", "edge2", 5353)),
		item(t, logPath, &services.Service{ClusterIps: []string{"10.96.0.11"},
			Ports: []*services.Port{{Name: "dns", Protocol: "UDP", Port: 514}}}),
		item(t, services.EndpointPath("shop", "log", "log-a", "10.88.2.6"), datagramEndpoint("10.88.2.6", "edge2", 5353)))
	return changes
}

// farNode is the other end of Reach: for each target, a UDP server that answers with the target's address and what it
// got.
type farNode struct {
	t        testing.TB
	edge     *udp.Edge
	counters *udp.Counters

	mu      sync.Mutex // guards the following
	servers map[string]string
	away    map[string]bool // addresses that cannot be reached
	ends    []net.Conn
}

func newFarNode(t testing.TB) *farNode {
	n := &farNode{
		t: t, counters: new(udp.Counters), servers: make(map[string]string), away: make(map[string]bool),
	}
	n.edge = udp.NewEdge(anyTarget{}, udp.EdgeConfig{
		OneTarget: true, Counters: n.counters, Log: slog.New(slog.DiscardHandler),
	})
	return n
}

// reach is that of a cloud.
func (n *farNode) reach(text string) (net.Conn, error) {
	target, err := services.ParseTarget(text)
	if err != nil || target.Protocol != "UDP" || target.Port != 5353 {
		return nil, tunnel.Refusef(tunnel.Denied, "the test has no %s", text)
	}
	addr := target.Endpoint[strings.LastIndex(target.Endpoint, "/")+1:]
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.away[addr] {
		return nil, tunnel.Refusef(tunnel.NoSuchNode, "away")
	}
	if n.servers[addr] == "" {
		n.servers[addr] = n.serve(addr)
	}
	c, err := n.edge.Open(context.Background(), tunnel.Request{Network: tunnel.NetworkUDP, Addr: n.servers[addr]})
	if err == nil {
		n.ends = append(n.ends, c)
	}
	return c, err
}

// lose has an endpoint go away.
func (n *farNode) lose(addr string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.away[addr] = true
	for _, c := range n.ends {
		tunnel.Reset(c)
	}
}

// serve answers datagrams. Long ones come back as they are.
func (n *farNode) serve(name string) string {
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		n.t.Fatal(err)
	}
	done := make(chan struct{})
	n.t.Cleanup(func() { c.Close(); <-done })
	c.SetReadBuffer(4 << 20)
	go func() {
		defer close(done)
		for b := make([]byte, 1<<16); ; {
			size, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			answer := b[:size]
			if size < 100 {
				answer = []byte(name + " " + string(answer))
			}
			c.WriteToUDPAddrPort(answer, from)
		}
	}()
	return c.LocalAddr().String()
}

// socketIn opens a socket for UDP in the pod; to: what it is connected to, or zero.
func (p *pod) socketIn(to netip.AddrPort) *net.UDPConn {
	p.t.Helper()
	var c *net.UDPConn
	p.in(func() (err error) {
		if to.IsValid() {
			c, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
		} else {
			c, err = net.ListenUDP("udp4", &net.UDPAddr{})
		}
		return err
	})
	p.t.Cleanup(func() { c.Close() })
	c.SetReadBuffer(4 << 20)
	return c
}

// answered sends a datagram until there is an answer, and returns it.
func answered(t *testing.T, c *net.UDPConn, question string) (got string) {
	t.Helper()
	got, err := tryAnswered(c, question)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// tryAnswered sends a question until an answer to it comes.
func tryAnswered(c *net.UDPConn, question string) (got string, err error) {
	err = testkit.Poll(30*time.Second, func() error {
		if _, err := c.Write([]byte(question)); err != nil {
			return err
		}
		c.SetReadDeadline(time.Now().Add(time.Second))
		b := make([]byte, 1<<16)
		for {
			n, err := c.Read(b)
			if err != nil {
				return err
			}
			if got = string(b[:n]); strings.HasSuffix(got, question) { // else it is a late one
				return nil
			}
		}
	})
	return got, err
}

// Datagrams of pods and of the node get to Services of another node, in order and in any size, beside kube-proxy.
func TestRedirectDatagrams(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	p := newNode(t)
	link, err := netlink.LinkByName("vethpod")
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"10.96.0.0/12", "fd00:96::/112"} {
		_, to, err := net.ParseCIDR(text)
		if err == nil {
			err = netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: to})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	// This caller has sent before the edge starts, so that the kernel has a way for it: kube-proxy's.
	early := p.socketIn(udp4)
	fmt.Fprint(early, "early")
	testkit.Eventually(t, "the kernel knows the way", func() bool { return tracked(t, udp4) == 1 })

	c, far := newCloud(), newFarNode(t)
	c.reach = far.reach
	r, _ := newTestRelay(t, &linux{}, c)
	running := testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, false, datagramShop(t))
	<-c.nexts
	wantServing(t, r, 5)
	if got := answered(t, early, "early"); got != "10.88.2.5 early" {
		t.Errorf("the early caller gets %q", got)
	}

	for at, from := range map[netip.AddrPort]string{udp4: "10.88.2.5", udp6: "fd00:88:2::5"} {
		inPod := p.socketIn(at)
		onNode, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(at))
		if err != nil {
			t.Fatal(err)
		}
		defer onNode.Close()
		for _, caller := range []*net.UDPConn{inPod, onNode} {
			if got := answered(t, caller, "hello"); got != from+" hello" {
				t.Errorf("%s: got %q", at, got)
			}
			wantSizes(t, caller)
			wantOrder(t, caller, from, func() int {
				return int(r.udp.Dropped(udp.DropLate) + far.counters.Dropped(udp.DropLate))
			})
		}
	}

	// One port of a caller, two Services: conntrack tells them apart, and the answers come from where they were asked.
	one := p.socketIn(netip.AddrPort{})
	for i := range 3 {
		for at, from := range map[netip.AddrPort]string{udp4: "10.88.2.5", log4: "10.88.2.6"} {
			question := strconv.Itoa(i)
			testkit.Within(t, 30*time.Second, fmt.Sprintf("%s answers from %s", from, at), func() error {
				if _, err := one.WriteToUDPAddrPort([]byte(question), at); err != nil {
					return err
				}
				one.SetReadDeadline(time.Now().Add(time.Second))
				for b := make([]byte, 100); ; {
					n, by, err := one.ReadFromUDPAddrPort(b)
					if err != nil || by == at && string(b[:n]) == from+" "+question {
						return err
					}
				}
			})
		}
	}

	// A datagram to the relay's own socket leads nowhere.
	denied := r.udp.Dropped(udp.DropDenied)
	stranger := p.socketIn(r.socketAt(t, udp4))
	fmt.Fprint(stranger, "x")
	testkit.Eventually(t, "it is denied", func() bool { return r.udp.Dropped(udp.DropDenied) == denied+1 })

	// One of the edge itself is left to kube-proxy.
	direct, err := (&net.Dialer{Control: Unredirected}).Dial("udp", log4.String())
	if err != nil {
		t.Fatal(err)
	}
	defer direct.Close()
	fmt.Fprint(direct, "x")
	local := direct.LocalAddr().(*net.UDPAddr).AddrPort()
	if to, err := r.kernel.destination(local, r.socketAt(t, log4)); !errors.Is(err, errUntracked) {
		t.Errorf("a datagram of the edge itself to %s is redirected: %v", to, err)
	}

	start, own := time.Now(), r.socketAt(t, udp4)
	for range 1000 {
		to, err := r.kernel.destination(early.LocalAddr().(*net.UDPAddr).AddrPort(), own)
		if err != nil || to != udp4 {
			t.Fatalf("conntrack says %s, %v", to, err)
		}
	}
	t.Logf("one look into conntrack takes %s", time.Since(start)/1000)

	manyFlows(t, p, c)

	// The endpoint goes away: a flow chooses another one.
	more := item(t, other, datagramEndpoint("10.88.3.5", "edge3", 5353))
	c.batches <- batch(t, false, &pb.Changes{Set: []*pb.Item{more}})
	<-c.nexts
	far.lose("10.88.2.5")
	testkit.Eventually(t, "the other endpoint answers", func() bool { return answered(t, early, "b") == "10.88.3.5 b" })
	// It is deleted, and the first one is back. A flow leaves it although its conn lives.
	far.mu.Lock()
	far.away = make(map[string]bool)
	far.mu.Unlock()
	c.batches <- batch(t, false, &pb.Changes{Deleted: []services.Path{other}})
	<-c.nexts
	testkit.Eventually(t, "the first endpoint answers", func() bool { return answered(t, early, "c") == "10.88.2.5 c" })

	// After the end, callers that go on are kube-proxy's.
	running.Stop()
	if n := tracked(t, udp4); n != 0 {
		t.Errorf("%d flows still have their way in the kernel", n)
	}
	if n := r.udp.Flows.Load(); n != 0 {
		t.Errorf("%d flows are left", n)
	}
}

// manyFlows has callers of a Service ask at a time.
func manyFlows(t *testing.T, p *pod, cloud *cloud) {
	t.Helper()
	start := time.Now()
	var all errgroup.Group
	all.SetLimit(50)
	for i := range 500 {
		caller := p.socketIn(udp4)
		all.Go(func() error {
			question := strconv.Itoa(i)
			got, err := tryAnswered(caller, question)
			if err == nil && got != "10.88.2.5 "+question {
				err = fmt.Errorf("got %q for %q", got, question)
			}
			return err
		})
	}
	if err := all.Wait(); err != nil {
		t.Error(err)
	}
	t.Logf("500 callers took %s", time.Since(start))
	if n := len(cloud.targets()); n > 6 {
		t.Errorf("%d conns to 3 endpoints", n)
	}
}

// wantSizes checks that long datagrams come back whole.
func wantSizes(t *testing.T, c *net.UDPConn) {
	t.Helper()
	for _, size := range []int{100, 1400, 1500, 9000, 65507} {
		want := bytes.Repeat([]byte{byte(size)}, size)
		if got := answered(t, c, string(want)); got != string(want) {
			t.Errorf("%d bytes come back as %d", size, len(got))
		}
	}
	if got := answered(t, c, ""); !strings.HasSuffix(got, " ") {
		t.Errorf("an empty datagram comes back as %q", got)
	}
}

// wantOrder checks that datagrams of a flow come back in order. late counts those that have waited too long for a
// processor: only these may be missing.
func wantOrder(t *testing.T, c *net.UDPConn, from string, late func() int) {
	t.Helper()
	const n = 100
	before := late()
	for i := range n {
		if _, err := fmt.Fprintf(c, "order-%03d", i); err != nil {
			t.Fatal(err)
		}
	}
	answers, last := 0, ""
	testkit.Within(t, 30*time.Second, "the end comes behind the datagrams", func() error {
		fmt.Fprint(c, "order-end")
		c.SetReadDeadline(time.Now().Add(time.Second))
		for b := make([]byte, 1<<16); ; {
			size, err := c.Read(b)
			if err != nil {
				return err
			}
			by, got, ok := strings.Cut(string(b[:size]), " order-")
			switch {
			case !ok: // a late answer of before
			case by != from:
				t.Errorf("%s answers, want %s", by, from)
			case got == "end":
				return nil
			case got <= last:
				t.Errorf("%s comes behind %s", got, last)
			default:
				answers, last = answers+1, got
			}
		}
	})
	if lost := late() - before; answers+lost < n {
		t.Errorf("%d datagrams come back, %d were late, of %d", answers, lost, n)
	}
}

// tracked returns how many flows of UDP to an address conntrack has.
func tracked(t *testing.T, to netip.AddrPort) (n int) {
	t.Helper()
	all, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	if err != nil {
		t.Skipf("the kernel has no conntrack: %v", err)
	}
	for _, f := range all {
		addr, _ := netip.AddrFromSlice(f.Forward.DstIP)
		if f.Forward.Protocol == unix.IPPROTO_UDP && netip.AddrPortFrom(addr.Unmap(), f.Forward.DstPort) == to {
			n++
		}
	}
	return n
}

// socketAt returns the relay's socket for an address.
func (r *Relay) socketAt(t *testing.T, at netip.AddrPort) netip.AddrPort {
	t.Helper()
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	elements, err := c.GetSetElements(r.kernel.(*linux).set(setServices, familyOf(at.Addr())))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range elements {
		if bytes.Equal(e.Key, key(address{at, protocolUDP})) {
			return netip.AddrPortFrom(familyOf(at.Addr()).own, binary.BigEndian.Uint16(e.Val))
		}
	}
	t.Fatalf("%s is not redirected", at)
	return netip.AddrPort{}
}
