package udp

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// callerNumber returns the address of one of many callers.
func callerNumber(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 40000)
}

// benchPort returns a port without a socket whose conn never opens.
func benchPort(t testing.TB) *port {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	d := dialerFunc(func() (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	f := New(nil, d, Config{Log: slog.New(slog.DiscardHandler)})
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	anybody := auth.Sources{netip.MustParsePrefix("0.0.0.0/0")}
	p := f.newPort(Listener{Listen: "127.0.0.1:0", Target: "127.0.0.1:1", Allow: anybody}, c, ctx)
	t.Cleanup(func() {
		p.closeSocket()
		cancel()
		p.close()
	})
	return p
}

// A datagram of a known flow takes no allocation on its way through the cloud.
func TestForwardDoesNotAllocate(t *testing.T) {
	p := benchPort(t)
	datagram, buf := make([]byte, 1200), make([]byte, 32<<10)
	c := new(control)
	round := func() {
		for i := range 20 {
			p.forward(callerNumber(i), c, datagram)
		}
		p.current[p.Target].out.take(buf)
	}
	for range 20 {
		round()
	}
	if n := testing.AllocsPerRun(100, round); n != 0 {
		t.Errorf("%v allocations for 20 datagrams", n)
	}
}

// Nor does it on its way through the edge, or back.
func TestSendingDoesNotAllocate(t *testing.T) {
	addr := target(t, func([]byte, netip.AddrPort) []byte { return nil })
	e := NewEdge(policy(t), EdgeConfig{Log: slog.New(slog.DiscardHandler)})
	end, err := e.Open(t.Context(), tunnel.Request{Network: "udp", Addr: addr})
	if err != nil {
		t.Fatal(err)
	}
	defer end.Close()
	end.Write(encode(kindOpen, 1, opening{}.encode()))
	var chunk []byte
	for range 20 {
		chunk = append(chunk, encode(kindDatagram, 1, make([]byte, 1200))...)
	}
	end.Write(chunk)
	if n := testing.AllocsPerRun(100, func() { end.Write(chunk) }); n != 0 {
		t.Errorf("%v allocations for 20 datagrams of the edge", n)
	}

	p := benchPort(t)
	m := newMux(p, p.Target)
	f := &flow{key: flowKey{caller: netip.MustParseAddrPort(addr)}}
	send := func() {
		for range 20 {
			m.train.add(f, chunk[:1200])
		}
		m.train.flush()
	}
	send()
	if n := testing.AllocsPerRun(100, send); n != 0 {
		t.Errorf("%v allocations for 20 datagrams of the cloud", n)
	}
}

// The cloud does not wait for room in the send buffer of a port, since all flows would wait.
func TestFullSendBuffer(t *testing.T) {
	// No datagram socket on loopback gets full. A connected TCP socket does, and ignores the address.
	full, other, err := tcpPair()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	defer full.Close()
	for n := 1; n > 0; {
		full.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		n, _ = full.Write(make([]byte, 1<<20))
	}
	full.SetWriteDeadline(time.Now().Add(patience))
	p := benchPort(t)
	if p.out.raw, err = full.SyscallConn(); err != nil {
		t.Fatal(err)
	}
	m := newMux(p, p.Target)
	// On a busy machine the kernel makes room once more, after the buffer was full.
	for end := time.Now().Add(patience / 2); p.counters.Dropped(DropSendBuffer) == 0; {
		m.train.add(&flow{key: flowKey{caller: callerNumber(1)}}, make([]byte, 1200))
		m.train.flush()
		if time.Now().After(end) {
			t.Fatal("the cloud waits for room")
		}
	}
	dropped(t, p.counters, DropSendBuffer, 1)
}

// Control messages are parsed once.
func TestControlsDoNotAllocate(t *testing.T) {
	var known controls
	messages := make([]byte, 32)
	known.of(messages)
	if n := testing.AllocsPerRun(100, func() { known.of(messages) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	for i := range 10 * maxControls { // an attacker chooses some of the bytes
		known.of(append(messages, byte(i), byte(i>>8)))
	}
	if len(known.known) > maxControls {
		t.Errorf("%d are remembered", len(known.known))
	}
}

// A train leaves as datagrams, however their sizes follow each other; a system that cannot send it at
// once sends them one by one.
func TestTrains(t *testing.T) {
	none := errors.New("the kernel would merge the datagrams of a train")
	for name, broken := range map[string]error{
		"whole": nil, "EIO": syscall.EIO, "EINVAL": syscall.EINVAL, "EMSGSIZE": syscall.EMSGSIZE, "none": none,
	} {
		t.Run(name, func(t *testing.T) {
			var got []int
			calls, sent := 0, 0
			tr := newTrain(func(_ int, p []byte, segment int) error {
				calls++
				if segment > 0 && errors.Is(broken, none) {
					t.Error(none)
				}
				if segment > 0 && broken != nil {
					return broken
				}
				for segment > 0 && len(p) > segment {
					got, p = append(got, segment), p[segment:]
				}
				got = append(got, len(p))
				return nil
			}, func(_, n, _ int, err error) {
				if err == nil {
					sent += n
				}
			}, !errors.Is(broken, none))
			var want []int
			for _, n := range []int{100, 100, 100, 50, 0, 0, 7, 100, 200, 200, 60_000, 60_000, 65_507, 1} {
				tr.add(1, make([]byte, n))
				want = append(want, n)
			}
			for i := range 100 {
				tr.add(2+i/50, make([]byte, 1200))
				want = append(want, 1200)
			}
			tr.flush()
			if !equalInts(got, want) || sent != len(want) {
				t.Errorf("%d were sent: %v\nwant %v", sent, got, want)
			}
			if broken == nil && calls > 20 {
				t.Errorf("%d system calls for %d datagrams", calls, len(want))
			}
		})
	}
}

// A place to which nothing can be sent leaves the trains to other places as they are.
func TestTrainsBesideABadPlace(t *testing.T) {
	const bad, good = 1, 2
	calls := 0
	tr := newTrain(func(to int, _ []byte, _ int) error {
		if to == bad {
			return syscall.EINVAL // such as port 0
		}
		calls++
		return nil
	}, func(int, int, int, error) {}, true)
	for _, to := range []int{bad, bad, good, good, good} {
		tr.add(to, make([]byte, 100))
	}
	tr.flush()
	if calls != 1 {
		t.Errorf("%d system calls for a train", calls)
	}
}

// After 2^32 flows, a new flow does not get the number of one that lives.
func TestNumbersOfFlows(t *testing.T) {
	p := benchPort(t)
	c := new(control)
	p.forward(callerNumber(0), c, []byte("x"))
	m := p.current[p.Target]
	m.lastID = 0
	p.forward(callerNumber(1), c, []byte("x"))
	if len(m.flows) != 2 {
		t.Errorf("%d flows, want 2", len(m.flows))
	}
}

// Nobody can answer a datagram from port 0, which the kernel delivers.
func TestPortZero(t *testing.T) {
	p := benchPort(t)
	caller := netip.AddrPortFrom(callerNumber(0).Addr(), 0)
	if why, ok := p.forward(caller, new(control), []byte("x")); ok || why != DropDenied || len(p.table.flows) > 0 {
		t.Errorf("taken %v, %v, %d flows", ok, why, len(p.table.flows))
	}
}

// A flow whose first datagram finds the queue full was never open: the audit says so.
func TestAuditOfADroppedOpen(t *testing.T) {
	p := benchPort(t)
	seen := new(testkit.Trail[tunnel.Event])
	p.sink = &tunnel.Sink{Audit: seen.Record}
	full := false
	for i := 0; i < 10_000 && !full; i++ {
		why, ok := p.forward(callerNumber(i), new(control), make([]byte, 1200))
		full = !ok && why == DropFull
	}
	p.handOver()
	if all := seen.All(); !full || len(all) != 1 || all[0].Result != "overloaded" {
		t.Errorf("the queue is full: %v, events: %+v", full, all)
	}
}

// TestFlowsLeaveNothing: many flows one after the other leave nothing behind. TUNNEL_UDP_FLOWS=1000000
// takes minutes.
func TestFlowsLeaveNothing(t *testing.T) {
	n := 20_000
	if s := os.Getenv("TUNNEL_UDP_FLOWS"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	r := run(t, Listener{Target: target(t, echo)}, func(f *FrontDoor, e *Edge) {
		f.cfg.Limits = Limits{Flows: 1000}
		f.idle, f.keep, e.idle = 5*time.Second, 100*time.Millisecond, 10*time.Second
	})
	round := func(n int) {
		for range n {
			c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(r.addr()))
			if err != nil {
				t.Fatal(err)
			}
			c.SetDeadline(time.Now().Add(patience))
			c.Write([]byte("x"))
			if _, err := c.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			c.Close()
		}
	}
	ended := func() bool {
		return r.door.cfg.Counters.Flows.Load() == 0 && r.edge.counters.Flows.Load() == 0
	}
	round(2000)
	testkit.Within(t, time.Minute, "the first flows end", func() error {
		if !ended() {
			return errNotYet
		}
		return nil
	})
	files, before := descriptors(t), memory()
	round(n)
	testkit.Within(t, time.Minute, "all flows end", func() error {
		if !ended() {
			return errNotYet
		}
		return nil
	})
	if after := memory(); after > before+4<<20 {
		t.Errorf("%d bytes of memory became %d", before, after)
	}
	testkit.Eventually(t, "all descriptors are closed", func() bool { return descriptors(t) <= files+2 })
	if p := r.door.open[0]; len(p.table.flows)+len(p.table.sources)+p.table.fresh.Len()+p.table.confirmed.Len() != 0 {
		t.Error("the table is not empty")
	}
}

var errNotYet = net.ErrClosed // any error: Within shows it if the time is over

// descriptors returns how many files and sockets the process has open.
func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// A socket's full receive buffer is counted.
func TestFullReceiveBufferIsCounted(t *testing.T) {
	p := benchPort(t) // nobody receives
	p.socket.SetReadBuffer(4 << 10)
	c := callerOf(t, p.socket.LocalAddr().(*net.UDPAddr).AddrPort())
	for range 100 {
		c.Write(make([]byte, 1000))
	}
	if n := p.counters.Dropped(DropReceive); n < 80 || n > 99 {
		t.Errorf("%d of 100 are counted", n)
	}
	if n := p.counters.Dropped(DropReceive); n > 99 {
		t.Errorf("%d: some are counted twice", n)
	}
}
