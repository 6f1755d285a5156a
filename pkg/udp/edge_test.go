package udp

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// cloudEnd speaks the protocol to an edge by hand, as a cloud or as somebody who means harm.
type cloudEnd struct {
	t    testing.TB
	edge *Edge
	conn net.Conn
	log  *testkit.Log
	got  chan frame // frames of the edge; closed at the end of the conn
}

// dialEdge opens a conn of an edge for a target; "": each flow names its own.
func dialEdge(t testing.TB, p Policy, addr string, change ...func(*Edge)) *cloudEnd {
	t.Helper()
	log := new(testkit.Log)
	c := &cloudEnd{t: t, log: log, got: make(chan frame, 1<<16)}
	c.edge = NewEdge(p, EdgeConfig{
		Core: new(tunnel.Counters), Log: slog.New(slog.NewTextHandler(log, nil)), late: never,
	})
	for _, f := range change {
		f(c.edge)
	}
	end, err := c.edge.Open(t.Context(), tunnel.Request{Network: "udp", Addr: addr})
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs, err := tcpPair()
	if err != nil {
		t.Fatal(err)
	}
	c.conn = ours
	var running sync.WaitGroup
	running.Go(func() { tunnel.Splice(context.Background(), theirs, end) })
	running.Go(func() {
		defer close(c.got)
		s := splitter{handle: func(f frame) error {
			f.payload = append([]byte(nil), f.payload...)
			c.got <- f
			return nil
		}}
		io.Copy(writerFunc(s.feed), ours)
	})
	t.Cleanup(func() {
		ours.Close()
		running.Wait()
		if n := c.edge.counters.Flows.Load(); n != 0 || c.edge.flows.Load() != 0 || len(c.edge.conns) != 0 {
			t.Errorf("%d flows and %d conns are left", n, len(c.edge.conns))
		}
		if n := c.edge.core.Panics.Load(); n != 0 {
			t.Errorf("%d panics: %s", n, log)
		}
	})
	return c
}

type writerFunc func([]byte) error

func (f writerFunc) Write(p []byte) (int, error) { return len(p), f(p) }

func (c *cloudEnd) send(k kind, id flowID, payload []byte) {
	c.t.Helper()
	if _, err := c.conn.Write(encode(k, id, payload)); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cloudEnd) open(id flowID, addr, datagram string) {
	c.t.Helper()
	c.send(kindOpen, id, opening{addr: addr, caller: "192.0.2.1:7", datagram: []byte(datagram)}.encode())
}

// want expects a datagram of a flow.
func (c *cloudEnd) want(id flowID, datagram string) {
	c.t.Helper()
	if f := c.next(); f.kind != kindDatagram || f.flow != id || string(f.payload) != datagram {
		c.t.Errorf("the edge sends kind %d of flow %d with %q; want %q of flow %d", f.kind, f.flow, f.payload, datagram, id)
	}
}

// wantEnd expects the end of a flow.
func (c *cloudEnd) wantEnd(id flowID, code tunnel.Code) ending {
	c.t.Helper()
	f := c.next()
	e, err := parseEnding(f.payload)
	if f.kind != kindEnd || f.flow != id || err != nil || e.code != code {
		c.t.Errorf("the edge sends kind %d of flow %d with %+v, %v; want the end of flow %d with code %d",
			f.kind, f.flow, e, err, id, code)
	}
	return e
}

func (c *cloudEnd) next() frame {
	c.t.Helper()
	select {
	case f, ok := <-c.got:
		if !ok {
			c.t.Fatal("the conn has ended")
		}
		return f
	case <-time.After(patience):
		c.t.Fatalf("the edge sends nothing; its log is %s", c.log)
	}
	return frame{}
}

// A panic in the goroutine that ends the idle flows of a conn ends that conn, and not the process.
func TestPanicOfEdgeSweep(t *testing.T) {
	// time.NewTicker panics because the idle time is too short to be divided.
	c := dialEdge(t, policy(t, "self:*"), "", func(e *Edge) { e.idle = 1 })
	for range c.got { // until the edge ends the conn
	}
	if n := c.edge.core.Panics.Swap(0); n != 1 || !strings.Contains(c.log.String(), "the conn ends") {
		t.Errorf("%d panics: %s", n, c.log)
	}
}

// A flow may name its own target, and the policy is asked about each.
func TestTargetOfAFlow(t *testing.T) {
	first, second := target(t, echo), target(t, echo)
	c := dialEdge(t, policy(t, "self:*"), first)
	c.open(1, "", "to the target of the conn")
	c.want(1, "to the target of the conn")
	c.open(2, second, "to another target")
	c.want(2, "to another target")
	c.open(3, "10.1.2.3:53", "denied")
	if e := c.wantEnd(3, tunnel.Denied); !strings.Contains(e.text, `add "10.1.2.3:53"`) {
		t.Errorf("the cloud is told %q", e.text)
	}
	c.open(4, "169.254.169.254:80", "denied")
	c.wantEnd(4, tunnel.Denied)
	dropped(t, c.edge.counters, DropDenied, 2)
	if s := c.log.String(); !strings.Contains(s, "denied") || !strings.Contains(s, "caller=192.0.2.1:7") {
		t.Errorf("log is %s", s)
	}
	c.send(kindDatagram, 2, []byte("again")) // the others go on
	c.want(2, "again")

	none := dialEdge(t, policy(t, "self:*"), "")
	none.open(1, first, "a conn without a target")
	none.want(1, "a conn without a target")
	none.open(2, "", "no target at all")
	none.wantEnd(2, tunnel.Unreachable)
	dropped(t, none.edge.counters, DropUnreachable, 1)
}

// A datagram that the edge has read from the socket of a flow that has ended is dropped, and counted.
func TestAnswerAfterTheEnd(t *testing.T) {
	l, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.SetDeadline(time.Now().Add(patience))
	c := dialEdge(t, policy(t), l.LocalAddr().String())
	c.open(1, "", "question")
	_, from, err := l.ReadFromUDPAddrPort(make([]byte, 100))
	if err != nil {
		t.Fatal(err)
	}
	conn := c.edgeConn()
	conn.mu.Lock()
	f := conn.flows[1]
	conn.mu.Unlock()
	conn.out.mu.Lock() // the first answer keeps the flow's goroutine busy
	release := sync.OnceFunc(conn.out.mu.Unlock)
	defer release()
	for _, answer := range []string{"in time", "too late"} {
		if _, err := l.WriteToUDPAddrPort([]byte(answer), from); err != nil {
			t.Fatal(err)
		}
	}
	testkit.Eventually(t, "the goroutine has the first answer", f.answered.Load)
	var ending sync.WaitGroup
	ending.Go(func() { c.send(kindEnd, 1, nil) }) // it closes the socket, and waits for the goroutine
	testkit.Eventually(t, "the flow has ended", f.ended.Load)
	release()
	ending.Wait()
	dropped(t, c.edge.counters, DropUnknown, 1)
}

// The error of the system call says why the kernel did not take a datagram.
func TestNotSent(t *testing.T) {
	for _, tc := range []struct {
		err  error
		want Reason
	}{
		{syscall.EAGAIN, DropSendBuffer},
		{syscall.ENOBUFS, DropSendBuffer},
		{syscall.ENOMEM, DropSendBuffer},
		{syscall.EMSGSIZE, DropTooLong},
		{syscall.EPERM, DropForbidden},
		{syscall.ENETUNREACH, DropSend},
		{&net.OpError{Op: "raw-write", Err: net.ErrClosed}, DropUnknown},
		{&net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.EMSGSIZE)}, DropTooLong},
	} {
		if got := notSent(tc.err); got != tc.want {
			t.Errorf("%v: %v, want %v", tc.err, got, tc.want)
		}
	}
}

// An end ends a flow; a datagram of a flow that is not there is answered by an end.
func TestEndOfAFlow(t *testing.T) {
	c := dialEdge(t, policy(t), target(t, echo))
	c.open(1, "", "x")
	c.want(1, "x")
	c.send(kindEnd, 1, nil)
	c.send(kindDatagram, 1, []byte("late"))
	c.wantEnd(1, 0)
	dropped(t, c.edge.counters, DropUnknown, 1)
	c.send(kindEnd, 1, nil) // it has ended already
	c.send(77, 1, []byte("of a later version"))
	c.open(1, "", "the id is free again")
	c.want(1, "the id is free again")
	c.open(1, "", "and replaces what is there")
	c.want(1, "and replaces what is there")
	if n := c.edge.counters.Flows.Load(); n != 1 {
		t.Errorf("%d flows", n)
	}
}

// Flows to a target that is no longer permitted end, though they are in use.
func TestTargetThatGoes(t *testing.T) {
	var gone atomic.Bool
	addr := target(t, echo)
	c := dialEdge(t, policy(t), addr, func(e *Edge) {
		e.keeps = func(one string) bool { return one != addr || !gone.Load() }
	})
	c.open(1, "", "x")
	c.want(1, "x")
	if n := c.edgeConn().endIdle(time.Hour); n != 1 {
		t.Errorf("%d flows go on, want 1", n)
	}
	gone.Store(true)
	c.edgeConn().endIdle(time.Hour)
	c.wantEnd(1, 0)
}

// The end of a flow does not wait for what its target has sent, and meanwhile no other flow waits.
func TestEndOfAFloodedFlow(t *testing.T) {
	l, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := dialEdge(t, policy(t), l.LocalAddr().String())
	c.open(1, "", "x")
	l.SetDeadline(time.Now().Add(patience))
	_, from, err := l.ReadFromUDPAddrPort(make([]byte, 1))
	if err != nil {
		t.Fatal(err)
	}
	conn := c.edgeConn()
	conn.mu.Lock()
	f := conn.flows[1]
	conn.mu.Unlock()

	conn.out.mu.Lock() // receive waits for it with the first datagram
	release := sync.OnceFunc(conn.out.mu.Unlock)
	defer release()
	for range 50 {
		l.WriteToUDPAddrPort([]byte("flood"), from)
	}
	testkit.Eventually(t, "the first datagram is there", f.answered.Load)
	c.send(kindEnd, 1, nil)
	testkit.Eventually(t, "the flow has ended, and other flows may use the conn", func() bool {
		if !conn.mu.TryLock() {
			return false
		}
		defer conn.mu.Unlock()
		return len(conn.flows) == 0
	})
	release()
	c.want(1, "flood")
	c.send(kindDatagram, 1, nil)
	c.wantEnd(1, 0) // and no second datagram before it
}

// edgeConn returns the only conn of the edge.
func (c *cloudEnd) edgeConn() *edgeConn {
	c.t.Helper()
	c.edge.mu.Lock()
	defer c.edge.mu.Unlock()
	for conn := range c.edge.conns {
		return conn
	}
	c.t.Fatal("the edge has no conn")
	return nil
}

// When the cloud ends its direction, the edge sends what it has and ends the conn.
func TestCleanEndOfAConn(t *testing.T) {
	c := dialEdge(t, policy(t), target(t, echo))
	c.open(1, "", "x")
	c.want(1, "x")
	c.conn.(*net.TCPConn).CloseWrite()
	if f, ok := <-c.got; ok {
		t.Errorf("the edge sends %v", f)
	}
	testkit.Eventually(t, "the flow ends", func() bool { return c.edge.counters.Flows.Load() == 0 })
}

// Bytes that break the protocol end the conn, and nothing else.
func TestBrokenProtocol(t *testing.T) {
	for name, bytes := range map[string][]byte{
		"too long":        {0, 0, 0, 0, 1, 0xff, 0xff, 0xff},
		"bad open":        encode(kindOpen, 1, []byte{0x0a, 0xff}),
		"target with LF":  encode(kindOpen, 1, opening{addr: "a\n:1"}.encode()),
		"open of 66 KiB":  {1, 0, 0, 0, 1, 1, 8, 0},
		"datagram 65,508": {0, 0, 0, 0, 1, 0, 0xff, 0xe4},
	} {
		t.Run(name, func(t *testing.T) {
			c := dialEdge(t, policy(t), target(t, echo))
			c.open(1, "", "x")
			c.want(1, "x")
			c.conn.Write(bytes)
			select {
			case f, ok := <-c.got:
				if ok {
					t.Errorf("the edge sends %v", f)
				}
			case <-time.After(patience):
				t.Error("the conn goes on")
			}
		})
	}
}

// slowPolicy resolves names when it is told to.
type slowPolicy struct {
	Policy
	go_ chan struct{} // closed: names resolve
	to  string
}

func (p slowPolicy) DialUDP(
	ctx context.Context, addr string, refusedAt func(netip.AddrPort) time.Time,
) (*net.UDPConn, error) {
	if isAddress(addr) {
		return p.Policy.DialUDP(ctx, addr, refusedAt)
	}
	select {
	case <-p.go_:
		return p.Policy.DialUDP(ctx, p.to, refusedAt)
	case <-ctx.Done():
		return nil, tunnel.Refusef(tunnel.Gone, "the caller has gone")
	}
}

// A name that resolves slowly delays its own flow only. What waits arrives in order.
func TestSlowName(t *testing.T) {
	addr := target(t, echo)
	p := slowPolicy{policy(t), make(chan struct{}), addr}
	c := dialEdge(t, p, addr)
	c.open(1, "slow.example:53", "0")
	for i := 1; i < 100; i++ {
		c.send(kindDatagram, 1, []byte(fmt.Sprint(i)))
	}
	c.open(2, "", "does not wait")
	c.want(2, "does not wait")
	c.send(kindDatagram, 1, make([]byte, maxPending)) // one too many
	dropped(t, c.edge.counters, DropOpening, 1)
	close(p.go_)
	for i := range 100 {
		c.want(1, fmt.Sprint(i))
	}
	c.send(kindDatagram, 1, []byte("after"))
	c.want(1, "after")
}

// Empty datagrams that wait for a name take memory, too: their number is bounded.
func TestEmptyDatagramsWait(t *testing.T) {
	addr := target(t, echo)
	p := slowPolicy{policy(t), make(chan struct{}), addr}
	c := dialEdge(t, p, addr)
	c.open(1, "slow.example:53", "")
	const most = maxPending / pendingCost
	for range most + 10 - 1 {
		c.send(kindDatagram, 1, nil)
	}
	dropped(t, c.edge.counters, DropOpening, 10)
	close(p.go_)
	for range most {
		c.want(1, "")
	}
}

// twoAddresses resolves every name to two addresses.
type twoAddresses struct {
	Policy
	first, second string
}

func (p twoAddresses) DialUDP(
	ctx context.Context, _ string, refusedAt func(netip.AddrPort) time.Time,
) (*net.UDPConn, error) {
	to := p.first
	if refusedAt(netip.MustParseAddrPort(p.first)).After(refusedAt(netip.MustParseAddrPort(p.second))) {
		to = p.second
	}
	return p.Policy.DialUDP(ctx, to, refusedAt)
}

// A name may have an address where nobody listens, such as ::1 of localhost. The next flow uses another
// address, and a flow that was never answered ends, so that its caller gets a next one.
func TestNameWithTwoAddresses(t *testing.T) {
	nobody := testkit.FreeAddress(t)
	p := twoAddresses{policy(t), nobody, target(t, echo)}
	const name = "two.example:53"

	c := dialEdge(t, p, name)
	c.open(1, "", "x")
	dropped(t, c.edge.counters, DropRefused, 1)
	if n := c.edge.counters.Flows.Load(); n != 1 {
		t.Errorf("%d flows, want the one that was refused: it is young", n)
	}
	testkit.Eventually(t, "the edge remembers the refusal", func() bool {
		return !c.edge.refusedAt(netip.MustParseAddrPort(nobody)).IsZero()
	})
	c.open(2, "", "y")
	c.want(2, "y")
	c.open(3, "", "z") // and the next one, too
	c.want(3, "z")

	old := dialEdge(t, p, name, func(e *Edge) { e.refused = 0 })
	old.open(1, "", "x")
	old.wantEnd(1, 0)
	old.open(2, "", "y")
	old.want(2, "y")

	// With one address there is no other one to try: the flow goes on.
	one := dialEdge(t, policy(t), nobody, func(e *Edge) { e.refused = 0 })
	one.open(1, "", "x")
	dropped(t, one.edge.counters, DropRefused, 1)
	one.send(kindDatagram, 1, []byte("y"))
	dropped(t, one.edge.counters, DropRefused, 2)
	if n := one.edge.counters.Opened.Load(); n != 1 || len(one.edge.refusals) != 0 {
		t.Errorf("%d flows, %d addresses are remembered", n, len(one.edge.refusals))
	}
}

// The edge remembers refusals of a bounded number of addresses.
func TestRefusalsAreBounded(t *testing.T) {
	e := NewEdge(policy(t), EdgeConfig{Log: slog.New(slog.DiscardHandler)})
	for i := range 5 * maxRefused {
		e.refusedBy(callerNumber(i))
	}
	last := callerNumber(5*maxRefused - 1)
	if n := len(e.refusals); n > maxRefused || e.refusedAt(last).IsZero() {
		t.Errorf("%d are remembered; the last refusal was at %v", n, e.refusedAt(last))
	}
}

// The conns of one caller together have a share of the flows, and the conns of others have room.
func TestFlowsPerCaller(t *testing.T) {
	addr := target(t, echo)
	e := NewEdge(policy(t), EdgeConfig{Log: slog.New(slog.DiscardHandler), OneTarget: true, Flows: 16, Share: 4})
	open := func(caller string, flows int) (c net.Conn) {
		c, err := e.Open(t.Context(), tunnel.Request{Network: tunnel.NetworkUDP, Addr: addr, Caller: caller})
		if err != nil {
			t.Fatal(err)
		}
		for id := range flowID(flows) {
			if _, err := c.Write(encode(kindOpen, id+1, opening{datagram: []byte("x")}.encode())); err != nil {
				t.Fatal(err)
			}
		}
		return c
	}
	of := func(caller string) int64 {
		e.mu.Lock()
		defer e.mu.Unlock()
		if one := e.callers[caller]; one != nil {
			return one.flows.Load()
		}
		return 0
	}
	a, b := open("edge1", 3), open("edge1", 3)
	other := open("edge2", 3)
	if of("edge1") > 4 || of("edge2") != 3 {
		t.Errorf("edge1 has %d flows, want 4 at most; edge2 has %d, want 3", of("edge1"), of("edge2"))
	}
	for _, c := range []net.Conn{a, b, other} {
		c.Close()
	}
	testkit.Eventually(t, "nothing is left", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.callers) == 0 && e.flows.Load() == 0
	})
}

// Only some flows may wait for names at once, and they end with the conn.
func TestManySlowNames(t *testing.T) {
	addr := target(t, echo)
	p := slowPolicy{policy(t), make(chan struct{}), addr}
	c := dialEdge(t, p, addr)
	for id := range flowID(maxOpening) {
		c.open(id, "slow.example:53", "x")
	}
	c.open(1000, "slow.example:53", "one too many")
	c.wantEnd(1000, tunnel.Overloaded)
	dropped(t, c.edge.counters, DropOpening, 1)
	c.send(kindEnd, 5, nil)
	testkit.Eventually(t, "it has ended", func() bool { return c.edge.counters.Flows.Load() == maxOpening-1 })
	dropped(t, c.edge.counters, DropLost, 1)
}

// A conn without a module's network is refused: frames are for pkg/udp only.
func TestOtherNetworks(t *testing.T) {
	e := NewEdge(policy(t), EdgeConfig{Log: slog.New(slog.DiscardHandler)})
	for _, network := range []string{"tcp", "tls", ""} {
		if _, err := e.Open(t.Context(), tunnel.Request{Network: network, Addr: "127.0.0.1:1"}); err == nil ||
			tunnel.CodeOf(err) != tunnel.Denied {
			t.Errorf("network %q: %v", network, err)
		}
	}
}

// way records which message it is asked to serve.
type way struct{ served *tunnel.Message }

func (w *way) ServeOpen(in *tunnel.Incoming, _ tunnel.DialFunc) error {
	w.served = in.Message
	return nil
}

func TestEdgeServesOpen(t *testing.T) {
	router, err := tunnel.NewRouter(NewEdge(policy(t), EdgeConfig{Log: slog.New(slog.DiscardHandler)}))
	if err != nil {
		t.Fatal(err)
	}
	w := new(way)
	m := &tunnel.Message{Category: "udp", Type: tunnel.TypeOpen, Topic: "7f", Addr: "127.0.0.1:53"}
	in := &tunnel.Incoming{Message: m, From: &tunnel.Session{Node: "edge1"}, Way: w}
	if known, err := router.Handle(t.Context(), in); !known || err != nil || w.served != m {
		t.Errorf("open is not handled: %v, %v", known, err)
	}
}

// memory returns the bytes of the heap and of the stacks that are in use.
func memory() uint64 {
	var m runtime.MemStats
	for range 3 {
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

// TestMemoryOfAFlow: 10,000 flows take at most 16 KiB each at the edge, and 1 KiB at the cloud.
func TestMemoryOfAFlow(t *testing.T) {
	const n = 10_000
	t.Run("edge", func(t *testing.T) {
		c := dialEdge(t, policy(t), target(t, echo), func(e *Edge) { e.SetFlows(n) })
		before := memory()
		for id := range flowID(n) {
			c.open(id, "", "x")
			c.want(id, "x")
		}
		each := (memory() - before) / n
		t.Logf("%d bytes for each flow", each)
		if each > 16<<10 {
			t.Errorf("a flow takes %d bytes at the edge", each)
		}
	})
	t.Run("cloud", func(t *testing.T) {
		p := benchPort(t)
		before := memory()
		for i := range n {
			if why, ok := p.forward(callerNumber(i), &control{}, []byte("x")); !ok {
				t.Fatalf("flow %d is dropped: %v", i, why)
			}
			p.current[p.Target].out.take(make([]byte, 1000))
		}
		each := (memory() - before) / n
		t.Logf("%d bytes for each flow", each)
		if each > 1<<10 {
			t.Errorf("a flow takes %d bytes at the cloud", each)
		}
	})
}

// If a session cannot open a conn, it resets the conn and does not close it. The edge forgets the conn nevertheless.
func TestResetConnIsForgotten(t *testing.T) {
	e := NewEdge(policy(t), EdgeConfig{Log: slog.New(slog.DiscardHandler)})
	c, err := e.Open(t.Context(), tunnel.Request{Network: "udp"})
	if err != nil {
		t.Fatal(err)
	}
	tunnel.Reset(c)
	e.mu.Lock()
	n := len(e.conns)
	e.mu.Unlock()
	if n != 0 {
		t.Errorf("%d conns are left", n)
	}
	c.Close()
}
