package udp

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// choice is a Router that a test tells what to answer. Its targets are addresses.
type choice struct {
	via *tunnelDouble

	mu     sync.Mutex // guards the following
	target string     // "": none
	had    []string   // what the forwarder said of each caller's flow
}

func (c *choice) Route(_ netip.AddrPort, had string) (target string, why Reason, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.had = append(c.had, had)
	if c.target == "panic" {
		panic("the test wants it")
	}
	return c.target, DropDenied, c.target != ""
}

func (c *choice) Dial(ctx context.Context, target string) (net.Conn, error) {
	return c.via.Dial(ctx, tunnel.Request{Network: tunnel.NetworkUDP, Addr: target})
}

func (c *choice) choose(target string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.target = target
}

// forwarding is a forwarder in operation.
type forwarding struct {
	*choice
	counters *Counters
	core     *tunnel.Counters
	log      *testkit.Log
	port     *port
	addr     netip.AddrPort
	run      *testkit.Running
}

func newForwarding(t *testing.T) *forwarding {
	t.Helper()
	log, lines := testkit.NewLog()
	edge := NewEdge(policy(t), EdgeConfig{Log: log, OneTarget: true, late: never})
	f := &forwarding{
		choice: &choice{via: &tunnelDouble{edge: edge}}, counters: new(Counters), core: new(tunnel.Counters), log: lines,
	}
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	f.addr = socket.LocalAddr().(*net.UDPAddr).AddrPort()
	conns, end := context.WithCancel(context.Background())
	forwarder := NewForwarder(conns, socket, f.choice, Config{Counters: f.counters, Core: f.core, Log: log, late: never})
	f.port = forwarder.port
	t.Cleanup(func() {
		end()
		f.run.Stop()
		f.via.conns.Wait()
		if n := f.counters.Flows.Load() + edge.counters.Flows.Load(); n != 0 {
			t.Errorf("%d flows are left", n)
		}
	})
	f.run = testkit.Run(t, forwarder.Run)
	return f
}

// answering is a target that answers with its name.
func answering(t *testing.T, name string) string {
	t.Helper()
	return target(t, func(p []byte, _ netip.AddrPort) []byte { return append([]byte(name+" "), p...) })
}

// Flows of one socket have different targets, and one conn for each target.
func TestForwarderTargets(t *testing.T) {
	f := newForwarding(t)
	a, b := answering(t, "a"), answering(t, "b")
	var callers []*net.UDPConn
	for i, to := range []string{a, b, a, b} {
		f.choose(to)
		c := callerOf(t, f.addr)
		want := []string{"a", "b"}[i%2] + " x"
		if got := ask(t, c, "x"); got != want {
			t.Fatalf("caller %d got %q, want %q", i, got, want)
		}
		callers = append(callers, c)
	}
	if n := f.via.dials.Load(); n != 2 {
		t.Errorf("%d conns to two targets", n)
	}
	// In the first second, a flow is not routed again, and stays.
	if got := ask(t, callers[0], "y"); got != "a y" && got != "b y" {
		t.Errorf("got %q", got)
	}
	// After that, a flow whose target changes begins anew.
	f.choose(b)
	testkit.Eventually(t, "the flow has another target", func() bool { return ask(t, callers[0], "z") == "b z" })
	f.mu.Lock()
	defer f.mu.Unlock()
	if had := f.had[len(f.had)-1]; f.had[0] != "" || had != a && had != "" {
		t.Errorf("the router was asked with %v", f.had)
	}
}

// A caller without a target is counted, and so is one whose target cannot be reached. Other targets work on.
func TestForwarderDrops(t *testing.T) {
	f := newForwarding(t)
	c := callerOf(t, f.addr)
	fmt.Fprint(c, "x")
	dropped(t, f.counters, DropDenied, 1)

	f.via.refuseWith(tunnel.Refusef(tunnel.NoSuchNode, "away"))
	f.choose("192.0.2.1:9")
	fmt.Fprint(c, "x")
	dropped(t, f.counters, DropUnreachable, 1)
	testkit.Eventually(t, "the flow has ended", func() bool { return f.counters.Flows.Load() == 0 })
	f.via.refuseWith(nil)
	f.choose(answering(t, "b"))
	if got := ask(t, c, "x"); got != "b x" {
		t.Errorf("got %q", got)
	}

	// The conn is lost: the next datagram opens a flow.
	f.via.cut()
	testkit.Eventually(t, "the flow has ended", func() bool { return f.counters.Flows.Load() == 0 })
	if got := ask(t, c, "y"); got != "b y" {
		t.Errorf("got %q", got)
	}
}

// Conns without flows make room for a conn to one more target.
func TestForwarderMakesRoom(t *testing.T) {
	f := newForwarding(t)
	f.port.mu.Lock()
	var muxes []*mux
	for n := range maxMuxes {
		m := newMux(f.port, fmt.Sprint("target ", n))
		muxes, f.port.muxes[m] = append(muxes, m), struct{}{}
	}
	caller := netip.MustParseAddr("192.0.2.1")
	hasRoom := f.port.roomForMuxLocked(caller)
	again := f.port.roomForMuxLocked(caller) // the conns are still about to end
	for _, m := range muxes {
		delete(f.port.muxes, m)
	}
	f.port.mu.Unlock()
	if lines := f.log.Lines("too many targets"); !hasRoom || again || len(lines) != 1 {
		t.Errorf("room: %t, and then %t; log: %q", hasRoom, again, lines)
	}
}

// One caller, from whichever ports, opens conns to some targets, and leaves room for those of others.
func TestForwarderSharesConns(t *testing.T) {
	f := newForwarding(t)
	f.port.mu.Lock()
	defer f.port.mu.Unlock()
	one, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	f.port.openers[f.port.table.sourceOf(one)] = maxOpened
	if f.port.roomForMuxLocked(one) || !f.port.roomForMuxLocked(other) {
		t.Error("one caller may open conns for ever, or others none")
	}
	m := newMux(f.port, "idle")
	m.opener, f.port.muxes[m] = f.port.table.sourceOf(one), struct{}{}
	if !f.port.roomForMuxLocked(one) || !m.retired {
		t.Error("a conn of the caller without flows makes no room")
	}
	f.port.dropLocked(m)
	if n := f.port.openers[f.port.table.sourceOf(one)]; n != maxOpened-1 {
		t.Errorf("%d conns of the caller", n)
	}
}

// A caller with ever new ports does not occupy the router.
func TestForwarderAsksSeldom(t *testing.T) {
	f := newForwarding(t)
	c := &control{local: f.addr.Addr()}
	from := func(addr string, port uint16) Reason {
		why, _ := f.port.forward(netip.AddrPortFrom(netip.MustParseAddr(addr), port), c, []byte("x"))
		return why
	}
	f.port.lookups = lookups{time.Now().Add(time.Hour), make(map[netip.Prefix]int)} // this second does not end
	for port := range uint16(maxLookups) {
		if why := from("192.0.2.1", port+1); why != DropDenied { // by the router
			t.Fatalf("datagram %d is dropped: %v", port, why)
		}
	}
	if why := from("192.0.2.1", 60000); why != DropFlows || len(f.had) != maxLookups {
		t.Errorf("one more is dropped: %v, and the router was asked %d times", why, len(f.had))
	}
	if why := from("192.0.2.2", 1); why != DropDenied {
		t.Errorf("another caller's is dropped: %v", why)
	}
	f.port.lookups.began = time.Now().Add(-time.Second)
	if why := from("192.0.2.1", 60000); why != DropDenied {
		t.Errorf("a second later it is dropped: %v", why)
	}
	for i := range 2 * maxLookupSources {
		f.port.lookups.allow(f.port.table.sourceOf(callerNumber(i).Addr()), time.Now())
	}
	if n := len(f.port.lookups.of); n > maxLookupSources+1 {
		t.Errorf("%d sources are counted", n)
	}
}

// A cloud that answers "internal" does not make the edge of the target too old.
func TestForwarderRefusedByTheCloud(t *testing.T) {
	f := newForwarding(t)
	f.via.refuseWith(tunnel.Refusef(tunnel.Internal, "no [mode.cloud.services]"))
	f.choose("127.0.0.1:9")
	if _, err := callerOf(t, f.addr).Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the cause is logged", func() bool { return len(f.log.Lines("no [mode.cloud.services]")) > 0 })
	if lines := f.log.Lines("too old"); len(lines) > 0 {
		t.Errorf("the log: %q", lines)
	}
}

// A forwarder that stops lets flows in use go on, and returns when they are idle.
func TestForwarderDrains(t *testing.T) {
	f := newForwarding(t)
	f.choose(answering(t, "a"))
	c := callerOf(t, f.addr)
	ask(t, c, "x")
	f.run.Cancel()
	if got := ask(t, c, "y"); got != "a y" {
		t.Errorf("got %q", got)
	}
	f.run.Stop()
}

// Many callers keep their order, by few conns.
func TestForwarderManyCallers(t *testing.T) {
	f := newForwarding(t)
	f.choose(target(t, echo))
	var all errgroup.Group
	for range 200 {
		c := callerOf(t, f.addr)
		all.Go(func() error {
			b := make([]byte, 100)
			for i := range 20 {
				want := fmt.Sprint(i)
				if _, err := c.Write([]byte(want)); err != nil {
					return err
				}
				n, err := c.Read(b)
				if err != nil || string(b[:n]) != want {
					return fmt.Errorf("got %q, %w, want %s", b[:n], err, want)
				}
			}
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		t.Error(err)
	}
	if n := f.via.dials.Load(); n != 1 {
		t.Errorf("%d conns to one target", n)
	}
}

// A panic of the router costs a datagram.
func TestForwarderPanics(t *testing.T) {
	f := newForwarding(t)
	c := callerOf(t, f.addr)
	f.choose("panic")
	fmt.Fprint(c, "x")
	testkit.Eventually(t, "the router panics", func() bool { return f.core.Panics.Load() == 1 })
	f.choose(answering(t, "a"))
	if got := ask(t, c, "x"); got != "a x" {
		t.Errorf("got %q", got)
	}
}

// With OneTarget, the other side chooses no target for a flow: it was permitted that of the conn.
func TestOneTarget(t *testing.T) {
	permitted, secret := answering(t, "a"), answering(t, "b")
	log, _ := testkit.NewLog()
	counters := new(Counters)
	e := NewEdge(policy(t), EdgeConfig{Log: log, Counters: counters, OneTarget: true, late: never})
	if c, err := e.Open(t.Context(), tunnel.Request{Network: tunnel.NetworkUDP}); err == nil {
		c.Close()
		t.Error("a conn without a target is opened")
	}
	c, err := e.Open(t.Context(), tunnel.Request{Network: tunnel.NetworkUDP, Addr: permitted})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for id, to := range map[flowID]string{1: secret, 2: "localhost:1", 3: "x"} {
		if _, err := c.Write(encode(kindOpen, id, opening{addr: to, datagram: []byte("x")}.encode())); err != nil {
			t.Fatal(err)
		}
	}
	if n := counters.Dropped(DropDenied); n != 3 || counters.Opened.Load() != 0 {
		t.Errorf("%d are denied, %d are opened", n, counters.Opened.Load())
	}
	for id, to := range map[flowID]string{4: "", 5: permitted} {
		if _, err := c.Write(encode(kindOpen, id, opening{addr: to, datagram: []byte("x")}.encode())); err != nil {
			t.Fatal(err)
		}
	}
	if n := counters.Opened.Load(); n != 2 {
		t.Errorf("%d are opened", n)
	}
}
