package udp

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestRequest(t *testing.T) {
	addr := target(t, echo)
	r := run(t, Listener{Node: "edge1", Target: addr})
	ask(t, r.caller(), "x")
	want := tunnel.Request{Node: "edge1", Category: "udp", Network: "udp", Addr: addr, Caller: "127.0.0.1:0"}
	r.via.mu.Lock()
	defer r.via.mu.Unlock()
	if !reflect.DeepEqual(r.via.last, want) {
		t.Errorf("asked for %+v, want %+v", r.via.last, want)
	}
}

// Datagrams of every length arrive as they are: none is merged with another, and none is cut.
func TestDatagramsArriveAsTheyAre(t *testing.T) {
	r := run(t, Listener{Target: target(t, echo)})
	c := r.caller()
	for _, n := range []int{0, 1, 2, 500, 1200, 1472, 1473, 9000, 32759, 32760, 65506, 65507, 0, 1} {
		sent := make([]byte, n)
		rand.Read(sent)
		if got := ask(t, c, string(sent)); got != string(sent) {
			t.Errorf("a datagram of %d bytes came back with %d", n, len(got))
		}
	}
	// Several at once, of changing lengths: each by itself, and in order.
	var want []string
	for i := range 200 {
		want = append(want, fmt.Sprintf("%d %s", i, strings.Repeat("x", i/7*9)))
	}
	for _, s := range want {
		if _, err := c.Write([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	for i, s := range want {
		if got := receive(t, c); got != s {
			t.Fatalf("datagram %d came back as %.20q with %d bytes", i, got, len(got))
		}
	}
	if n := r.via.dials.Load(); n != 1 {
		t.Errorf("%d conns, want one for all", n)
	}
}

// IPv6 has datagrams that are longer than a frame may be. Each is dropped and counted; the flows go on.
func TestLongDatagrams(t *testing.T) {
	l, err := net.ListenUDP("udp6", &net.UDPAddr{IP: net.IPv6loopback})
	if err != nil {
		t.Skip("this machine has no IPv6")
	}
	defer l.Close()
	l.SetDeadline(time.Now().Add(patience))
	r := run(t, Listener{Listen: "[::1]:0", Target: l.LocalAddr().String()})
	c := r.caller()
	long := make([]byte, 65527)
	for _, n := range []int{maxDatagram + 1, len(long)} { // the first datagram of a flow, and a later one
		if _, err := c.Write(long[:n]); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte("to the target")); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1<<16)
		got, from, err := l.ReadFromUDPAddrPort(b)
		if err != nil || string(b[:got]) != "to the target" {
			t.Fatalf("the target got %d bytes, %v", got, err)
		}
		l.WriteToUDPAddrPort(long[:n], from)
		l.WriteToUDPAddrPort([]byte("to the caller"), from)
		if got := receive(t, c); got != "to the caller" {
			t.Fatalf("the caller got %d bytes", len(got))
		}
	}
	dropped(t, r.door.cfg.Counters, DropTooLong, 2)
	dropped(t, r.edge.counters, DropTooLong, 2)
	if dials, opened := r.via.dials.Load(), r.edge.counters.Opened.Load(); dials != 1 || opened != 1 {
		t.Errorf("%d flows by %d conns, want one", opened, dials)
	}
}

// Each caller has a flow: the target sees a port for each, and answers reach the caller that asked.
func TestEachCallerHasAFlow(t *testing.T) {
	r := run(t, Listener{Target: target(t, func(p []byte, from netip.AddrPort) []byte {
		return fmt.Appendf(nil, "%s from %d", p, from.Port())
	})})
	ports := make(map[string]bool)
	for i := range 50 {
		c := r.caller()
		for range 2 {
			answer := ask(t, c, fmt.Sprint(i))
			own, port, _ := strings.Cut(answer, " from ")
			if own != fmt.Sprint(i) {
				t.Fatalf("caller %d got %q", i, answer)
			}
			ports[port] = true
		}
	}
	if len(ports) != 50 || r.via.dials.Load() != 1 {
		t.Errorf("%d ports of %d conns for 50 callers", len(ports), r.via.dials.Load())
	}
	if cloud, edge := r.door.cfg.Counters.Opened.Load(), r.edge.counters.Opened.Load(); cloud != 50 || edge != 50 {
		t.Errorf("%d flows at the cloud, %d at the edge", cloud, edge)
	}
}

// A target may send whenever it likes, and more than it was asked.
func TestTargetSendsByItself(t *testing.T) {
	s, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c := run(t, Listener{Target: s.LocalAddr().String()}).caller()
	c.Write([]byte("subscribe"))
	b := make([]byte, 100)
	_, from, err := s.ReadFromUDPAddrPort(b)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 30 {
		s.WriteToUDPAddrPort(fmt.Appendf(nil, "event %d", i), from)
	}
	for i := range 30 {
		if got := receive(t, c); got != fmt.Sprintf("event %d", i) {
			t.Errorf("got %q", got)
		}
	}
}

// On a listener for all addresses, an answer comes from the address that the caller has dialled.
func TestReplyAddress(t *testing.T) {
	addr := target(t, echo)
	loopback := auth.Sources{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
	for listen, dials := range map[string][]string{
		"0.0.0.0:0": {"127.0.0.1", "127.0.0.2", "127.9.8.7"},
		"[::]:0":    {"127.0.0.1", "127.0.0.2", "::1"},
		"[::1]:0":   {"::1"},
	} {
		t.Run(listen, func(t *testing.T) {
			if strings.HasPrefix(listen, "[") {
				if l, err := net.ListenUDP("udp6", &net.UDPAddr{IP: net.IPv6loopback}); err != nil {
					t.Skip("this machine has no IPv6")
				} else {
					l.Close()
				}
			}
			r := run(t, Listener{Listen: listen, Target: addr, Allow: loopback})
			// One unconnected socket of each family: two local addresses are two flows.
			for _, to := range dials {
				ip := netip.MustParseAddr(to)
				network := "udp4"
				if ip.Is6() {
					network = "udp6"
				}
				c, err := net.ListenUDP(network, nil)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				c.SetDeadline(time.Now().Add(patience))
				dialled := netip.AddrPortFrom(ip, r.addr().Port())
				for range 3 { // also as a train
					c.WriteToUDPAddrPort([]byte("x"), dialled)
				}
				for range 3 {
					_, from, err := c.ReadFromUDPAddrPort(make([]byte, 10))
					if err != nil || netip.AddrPortFrom(from.Addr().Unmap(), from.Port()) != dialled {
						t.Errorf("dialled %v, and %v answers, %v", dialled, from, err)
					}
				}
			}
		})
	}
}

func TestAllow(t *testing.T) {
	seen := new(testkit.Trail[tunnel.Event])
	r := run(t, Listener{Target: target(t, echo), Allow: auth.Sources{netip.MustParsePrefix("10.0.0.0/8")}},
		func(f *FrontDoor, _ *Edge) { f.cfg.Sink.Audit = seen.Record })
	c := r.caller()
	for range 5 {
		c.Write([]byte("x"))
	}
	dropped(t, r.door.cfg.Counters, DropDenied, 5)
	if s := r.log.String(); strings.Count(s, "caller denied by [mode.cloud.udpallow]") != 1 {
		t.Errorf("want one line: %s", s)
	}
	if r.via.dials.Load() != 0 {
		t.Error("the tunnel is asked for a denied caller")
	}
	if n := r.core.Doors[tunnel.DoorUDP].Results(tunnel.Denied); n != 5 {
		t.Errorf("%d denied datagrams are counted as callers", n)
	}
	r.stop()
	if err := r.wait(); err != nil {
		t.Fatal(err)
	}
	if all := seen.All(); len(all) != 1 || all[0].Result != "denied" || all[0].Caller != c.LocalAddr().String() {
		t.Errorf("the events are %+v", all)
	}
}

// A flow ends when it is idle, at both ends, and a conn without flows ends, too.
func TestIdleFlowsEnd(t *testing.T) {
	r := run(t, Listener{Target: target(t, echo)}, func(f *FrontDoor, e *Edge) {
		f.idle, f.keep, e.idle = 5*time.Second, 100*time.Millisecond, time.Minute
	})
	busy, idle := r.caller(), r.caller()
	ask(t, idle, "once")
	testkit.Within(t, patience, "one flow ends", func() error {
		ask(t, busy, "again") // much more often than every five seconds
		if r.door.cfg.Counters.Flows.Load() == 1 && r.edge.counters.Flows.Load() == 1 {
			return nil
		}
		return errNotYet
	})
	ask(t, busy, "at last")
	if n := r.edge.counters.Opened.Load(); n != 2 {
		t.Errorf("%d flows were opened: the busy one has ended", n)
	}
	testkit.Eventually(t, "the conn ends", func() bool {
		r.edge.mu.Lock()
		defer r.edge.mu.Unlock()
		return len(r.edge.conns) == 0
	})
	r.nothingLeft()
	if got := ask(t, idle, "after a while"); got != "after a while" || r.via.dials.Load() != 2 {
		t.Errorf("%q by conn %d", got, r.via.dials.Load())
	}
	if n := r.edge.counters.Dropped(DropUnknown) + r.door.cfg.Counters.Dropped(DropUnknown); n != 0 {
		t.Errorf("%d datagrams of unknown flows", n)
	}
}

// The edge ends a flow that the cloud still knows. The next datagram tells the cloud, the one after
// that has a new flow.
func TestFlowEndsAtTheEdge(t *testing.T) {
	r := run(t, Listener{Target: target(t, echo)})
	c := r.caller()
	for range 3 {
		ask(t, c, "x")
		r.edge.mu.Lock()
		for conn := range r.edge.conns {
			conn.endIdle(0)
		}
		r.edge.mu.Unlock()
		testkit.Eventually(t, "the flow ends", func() bool {
			return r.edge.counters.Flows.Load() == 0 && r.door.cfg.Counters.Flows.Load() == 0
		})
	}
	if n := r.edge.counters.Opened.Load(); n != 3 {
		t.Errorf("%d flows", n)
	}
}

// When the conn is lost, the next datagram of each caller opens a new flow.
func TestConnIsLost(t *testing.T) {
	r := run(t, Listener{Target: target(t, echo)})
	callers := make([]*net.UDPConn, 20)
	for i := range callers {
		callers[i] = r.caller()
		ask(t, callers[i], "x")
	}
	r.via.cut()
	testkit.Eventually(t, "both ends know", func() bool {
		return r.edge.counters.Flows.Load() == 0 && r.door.cfg.Counters.Flows.Load() == 0
	})
	for i, c := range callers {
		if got := ask(t, c, fmt.Sprint(i)); got != fmt.Sprint(i) {
			t.Errorf("caller %d got %q", i, got)
		}
	}
	if n := r.via.dials.Load(); n != 2 {
		t.Errorf("%d conns", n)
	}
}

// While the node cannot be reached, datagrams are dropped and counted, and the log says why once.
func TestRefusal(t *testing.T) {
	for _, code := range tunnel.Codes() {
		t.Run(code.String(), func(t *testing.T) {
			r := run(t, Listener{Target: target(t, echo), Node: "edge1"})
			r.via.refuseWith(tunnel.Refusef(code, "because"))
			c := r.caller()
			started := time.Now()
			for range 20 {
				c.Write([]byte("x"))
			}
			n := r.door.cfg.Counters
			testkit.Eventually(t, "all are dropped", func() bool {
				return n.Dropped(DropUnreachable)+n.Dropped(DropLost) == 20
			})
			testkit.Eventually(t, "the log says why", func() bool { return strings.Contains(r.log.String(), "level=WARN") })
			if s := r.log.String(); strings.Count(s, "level=WARN") != 1 || !strings.Contains(s, "node=edge1") ||
				!strings.Contains(s, "because") {
				t.Errorf("log is %s", s)
			}
			if d, took := r.via.dials.Load(), time.Since(started); int64(d) > 1+int64(took/retryTime) {
				t.Errorf("%d dials in %v", d, took)
			}
			r.via.refuseWith(nil)
			testkit.Eventually(t, "it is tried again", func() bool {
				c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
				c.Write([]byte("x"))
				_, err := c.Read(make([]byte, 1))
				return err == nil
			})
		})
	}
}

// The log says what to do when the edge does not know UDP.
func TestOldEdge(t *testing.T) {
	r := run(t, Listener{Target: "127.0.0.1:1", Node: "edge1"})
	r.via.refuseWith(tunnel.Refusef(tunnel.Internal, "node edge1 runs no module %q", "udp"))
	r.caller().Write([]byte("x"))
	testkit.Eventually(t, "the log says so", func() bool {
		return strings.Contains(r.log.String(), "too old for UDP: install version v0.9.0 there")
	})
}

// The edge's policy is asked when the conn is opened, so the cloud's log says what to permit.
func TestDeniedTarget(t *testing.T) {
	r := run(t, Listener{Target: "10.1.2.3:53"}, func(_ *FrontDoor, e *Edge) { e.policy = policy(t, "self:*") })
	r.caller().Write([]byte("x"))
	testkit.Eventually(t, "the log says so", func() bool {
		return strings.Contains(r.log.String(), `the edge may not dial 10.1.2.3:53; to permit it, add \"10.1.2.3:53\"`)
	})
}

// Nothing listens at the target for a while: its machine says so, and it is counted.
func TestRefusedByTheTarget(t *testing.T) {
	addr := testkit.FreeAddress(t)
	r := run(t, Listener{Target: addr})
	c := r.caller()
	c.Write([]byte("nobody"))
	testkit.Eventually(t, "the refusal is counted and logged", func() bool {
		return r.edge.counters.Dropped(DropRefused) > 0 && strings.Contains(r.log.String(), "does a program listen there?")
	})
	s, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(addr)))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.SetDeadline(time.Now().Add(patience))
	c.Write([]byte("somebody"))
	b := make([]byte, 100)
	if n, err := s.Read(b); err != nil || string(b[:n]) != "somebody" {
		t.Errorf("the target got %q, %v", b[:n], err)
	}
	if n := r.edge.counters.Opened.Load(); n != 1 {
		t.Errorf("%d flows, want the same one", n)
	}
}

// A conn that takes nothing makes nobody wait: datagrams are dropped and counted.
func TestStalledConn(t *testing.T) {
	stalled, other, err := tcpPair()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	// With small buffers, the conn stalls after a few datagrams. The others then wait in the queue of the flow, and the
	// reset loses them. With large buffers, the kernel could take all of them before the reset.
	stalled.SetWriteBuffer(1 << 16)
	other.SetReadBuffer(1 << 16)
	r := run(t, Listener{Target: "127.0.0.1:1"}, func(f *FrontDoor, _ *Edge) {
		f.dialer = dialerFunc(func() (net.Conn, error) { return stalled, nil })
	})
	c := r.caller()
	p := bytes.Repeat([]byte{'x'}, 60_000)
	n := r.door.cfg.Counters
	if _, err := c.Write(p); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the conn takes the first one", func() bool { return n.ToTarget.Datagrams.Load() == 1 })
	sent := uint64(1)
	for start := time.Now(); n.Dropped(DropFull) == 0; {
		if time.Since(start) > patience {
			t.Fatal("nothing is dropped")
		}
		if _, err := c.Write(p); err != nil {
			t.Fatal(err)
		}
		sent++
	}
	tunnel.Reset(other)
	testkit.Within(t, patience, "each datagram is counted once", func() error {
		passed, lost, all := n.ToTarget.Datagrams.Load(), n.Dropped(DropLost), uint64(0)
		for _, why := range Reasons() {
			all += n.Dropped(why)
		}
		if lost == 0 || passed == 0 || passed+all != sent {
			return fmt.Errorf("%d sent; %d passed on, %d dropped, of these %d as lost", sent, passed, all, lost)
		}
		return nil
	})
}

type dialerFunc func() (net.Conn, error)

func (f dialerFunc) Dial(context.Context, tunnel.Request) (net.Conn, error) { return f() }

// The limits bound the flows, and the log and the metrics say which limit is reached.
func TestLimits(t *testing.T) {
	for name, limits := range map[string]Limits{
		"flows": {Flows: 5}, "flowsperaddress": {FlowsPerAddress: 5},
	} {
		t.Run(name, func(t *testing.T) {
			r := run(t, Listener{Target: target(t, echo)}, func(f *FrontDoor, _ *Edge) { f.cfg.Limits = limits })
			for range 50 {
				ask(t, r.caller(), "x")
			}
			n := r.door.cfg.Counters
			if n.Flows.Load() != 5 || n.Evicted.Load() != 45 {
				t.Errorf("%d flows, %d evicted", n.Flows.Load(), n.Evicted.Load())
			}
			testkit.Eventually(t, "they have ended at the edge", func() bool { return r.edge.counters.Flows.Load() == 5 })
			limit := tunnel.LimitFlows
			if limit.String() != name {
				limit = tunnel.LimitFlowsPerAddress
			}
			if r.core.LimitedBy(limit) != 45 || !strings.Contains(r.log.String(), "limit="+name) {
				t.Errorf("%d times at the limit; log %s", r.core.LimitedBy(limit), r.log)
			}
		})
	}
	t.Run("of the edge", func(t *testing.T) {
		r := run(t, Listener{Target: target(t, echo)}, func(_ *FrontDoor, e *Edge) { e.SetFlows(5) })
		for range 50 {
			ask(t, r.caller(), "x")
		}
		if n := r.edge.counters.Flows.Load(); n != 5 || r.edge.counters.Evicted.Load() != 45 {
			t.Errorf("%d flows, %d evicted", n, r.edge.counters.Evicted.Load())
		}
		testkit.Eventually(t, "the cloud hears of it", func() bool { return r.door.cfg.Counters.Flows.Load() == 5 })
	})
}

// When the front door stops, it opens no flow. Flows in use go on, and end when they are idle.
func TestDrain(t *testing.T) {
	// A draining front door ends a flow that was idle for f.idle or for drainIdle, whichever is shorter. On a busy
	// machine, half a second may pass between two questions. A shorter f.idle would then end the flow too early.
	r := run(t, Listener{Target: target(t, echo)}, func(f *FrontDoor, _ *Edge) { f.idle = 2 * drainIdle })
	c := r.caller()
	ask(t, c, "before")
	addr := r.addr()
	r.stop()
	testkit.Eventually(t, "it is not ready", func() bool { return r.door.Ready() != nil })
	late := callerOf(t, addr)
	testkit.Eventually(t, "no flow is opened", func() bool {
		ask(t, c, "meanwhile")
		late.Write([]byte("late"))
		return r.door.cfg.Counters.Dropped(DropDraining) > 0
	})
	if err := r.wait(); err != nil {
		t.Error(err)
	}
	r.via.conns.Wait()
	r.nothingLeft()
}

func TestDrainEndsAfterTheGracePeriod(t *testing.T) {
	r := run(t, Listener{Target: target(t, echo)}, func(f *FrontDoor, _ *Edge) { f.grace = 50 * time.Millisecond })
	c := r.caller()
	ask(t, c, "x")
	used := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	defer func() {
		cancel()
		<-used
	}()
	go func() { // so that the flow is not idle, and only the end of the grace period can end it
		defer close(used)
		for ctx.Err() == nil {
			c.Write([]byte("x"))
			time.Sleep(100 * time.Millisecond)
		}
	}()
	start := time.Now()
	r.stop()
	if err := r.wait(); err != nil || time.Since(start) > 5*drainIdle {
		t.Errorf("%v after %v", err, time.Since(start))
	}
}

// When the edge stops, its conns end by themselves, and the cloud opens flows by another conn.
func TestEdgeDrains(t *testing.T) {
	addr := target(t, echo)
	r := run(t, Listener{Target: addr})
	c := r.caller()
	ask(t, c, "before")
	next := NewEdge(policy(t), EdgeConfig{Log: slog.New(slog.DiscardHandler), late: never})
	ended := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	defer func() {
		r.stop()
		r.wait()
		r.via.conns.Wait()
		cancel()
		<-ended
	}()
	go func() {
		defer close(ended)
		next.Run(ctx)
	}()
	old := r.via.edge
	r.via.mu.Lock()
	r.via.edge = next
	r.via.mu.Unlock()
	r.close()
	testkit.Eventually(t, "a new caller has a flow of the other edge", func() bool {
		d := callerOf(t, r.addr())
		d.SetDeadline(time.Now().Add(100 * time.Millisecond))
		d.Write([]byte("x"))
		_, err := d.Read(make([]byte, 1))
		ask(t, c, "meanwhile")
		return err == nil && next.counters.Flows.Load() > 0
	})
	testkit.Eventually(t, "the conns of the old one end", func() bool {
		old.mu.Lock()
		defer old.mu.Unlock()
		return len(old.conns) == 0
	})
}

func TestListenersThatCannotOpen(t *testing.T) {
	taken, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, tc := range []struct{ name, listen, want string }{
		{"taken", taken.LocalAddr().String(), "already in use; stop what listens there"},
		{"every address", "0.0.0.0:0", "[mode.cloud.udpallow]"},
		{"every address, short", ":0", "[mode.cloud.udpallow]"},
		{"every address, IPv6", "[::]:0", "[mode.cloud.udpallow]"},
		{"not ours", "192.0.2.1:0", "[mode.cloud.udpallow]"},
		{"no port", "127.0.0.1", "missing port"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			listeners := []Listener{{Listen: "127.0.0.1:0"}, {Listen: tc.listen, Target: "127.0.0.1:22"}}
			counters := new(Counters)
			door := New(listeners, new(tunnelDouble), Config{Counters: counters, Log: slog.New(slog.DiscardHandler)})
			err := door.Run(t.Context())
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), tc.listen) {
				t.Fatalf("error %v does not say %q and name %q", err, tc.want, tc.listen)
			}
			if door.Ready() == nil || len(counters.sockets) != 0 {
				t.Error("the listener that could open is still open")
			}
		})
	}
}

func TestCloudHandlesNoMessage(t *testing.T) {
	router, err := tunnel.NewRouter(New(nil, nil, Config{Log: slog.New(slog.DiscardHandler)}))
	if err != nil {
		t.Fatal(err)
	}
	if routes := router.Routes(); len(routes) != 0 {
		t.Errorf("an edge may ask the cloud for %v", routes)
	}
}
