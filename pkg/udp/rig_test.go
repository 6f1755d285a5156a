package udp

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

const (
	// patience bounds every wait on loopback, on a busy machine.
	patience = time.Minute
	// never is longer than any test: no datagram is dropped because this process waits for a processor.
	never = time.Hour
)

// tunnelDouble stands for the tunnel: it asks the edge for its end of a conn, and joins it to the
// cloud's by a TCP connection, as sessions do.
type tunnelDouble struct {
	edge *Edge

	dials atomic.Int64
	conns sync.WaitGroup

	mu     sync.Mutex // guards the following
	refuse error
	last   tunnel.Request
	live   []*net.TCPConn // the cloud's ends
}

func (d *tunnelDouble) refuseWith(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refuse = err
}

func (d *tunnelDouble) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	d.dials.Add(1)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.last = r
	if d.refuse != nil {
		return nil, d.refuse
	}
	end, err := d.edge.Open(ctx, r)
	if err != nil {
		return nil, err
	}
	cloud, edge, err := tcpPair()
	if err != nil {
		return nil, err
	}
	d.live = append(d.live, cloud)
	d.conns.Go(func() { tunnel.Splice(context.Background(), edge, end) })
	return cloud, nil
}

// cut resets all conns.
func (d *tunnelDouble) cut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.live {
		tunnel.Reset(c)
	}
	d.live = nil
}

// tcpPair returns the two ends of a TCP connection.
func tcpPair() (a, b *net.TCPConn, err error) {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	if a, err = net.DialTCP("tcp", nil, l.Addr().(*net.TCPAddr)); err != nil {
		return nil, nil, err
	}
	if b, err = l.AcceptTCP(); err != nil {
		a.Close()
	}
	return a, b, err
}

// running is a front door with one listener and an edge, in operation.
type running struct {
	t     *testing.T
	door  *FrontDoor
	edge  *Edge
	core  *tunnel.Counters
	via   *tunnelDouble
	log   *testkit.Log
	stop  context.CancelFunc // of the front door
	close context.CancelFunc // of the edge
	done  chan struct{}      // closed when the front door's Run has returned
	err   error              // Run's result; read it after done
}

// policy permits everything.
func policy(t testing.TB, entries ...string) *auth.Policy {
	t.Helper()
	if entries == nil {
		entries = []string{"self:*", "0.0.0.0/0:*"}
	}
	p, err := auth.ParsePolicy(entries)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// run starts a front door. change may change it, and the edge, before.
func run(t *testing.T, l Listener, change ...func(*FrontDoor, *Edge)) *running {
	t.Helper()
	if l.Listen == "" {
		l.Listen = "127.0.0.1:0"
	}
	r := &running{t: t, log: new(testkit.Log), core: new(tunnel.Counters), done: make(chan struct{})}
	log := slog.New(slog.NewTextHandler(r.log, nil))
	r.edge = NewEdge(policy(t), EdgeConfig{Core: r.core, Log: log, late: never})
	r.via = &tunnelDouble{edge: r.edge}
	r.door = New([]Listener{l}, r.via, Config{Core: r.core, Software: "v0.9.0", Log: log, late: never})
	for _, c := range change {
		c(r.door, r.edge)
	}
	ctx, stop := context.WithCancel(context.Background())
	edgeCtx, stopEdge := context.WithCancel(context.Background())
	r.stop, r.close = stop, stopEdge
	edgeDone := make(chan struct{})
	go func() {
		defer close(edgeDone)
		r.edge.Run(edgeCtx)
	}()
	go func() {
		defer close(r.done)
		r.err = r.door.Run(ctx)
	}()
	t.Cleanup(func() {
		stop()
		stopEdge()
		if err := r.wait(); err != nil {
			t.Errorf("Run: %v", err)
		}
		<-edgeDone
		r.via.conns.Wait()
		r.nothingLeft()
	})
	testkit.Eventually(t, "the socket is open", func() bool { return r.door.Ready() == nil })
	return r
}

func (r *running) wait() error {
	r.t.Helper()
	select {
	case <-r.done:
		return r.err
	case <-time.After(patience):
		r.t.Fatal("Run does not return")
		return nil
	}
}

// nothingLeft checks that no flow is left anywhere.
func (r *running) nothingLeft() {
	r.t.Helper()
	r.edge.mu.Lock()
	conns := len(r.edge.conns)
	r.edge.mu.Unlock()
	cloud, edge := r.door.cfg.Counters.Flows.Load(), r.edge.counters.Flows.Load()
	if cloud != 0 || edge != 0 || r.edge.flows.Load() != 0 || conns != 0 {
		r.t.Errorf("%d flows are left at the cloud, %d and %d at the edge, with %d conns",
			cloud, edge, r.edge.flows.Load(), conns)
	}
	if n := r.core.Panics.Load(); n != 0 {
		r.t.Errorf("%d panics:\n%s", n, r.log)
	}
}

func (r *running) addr() netip.AddrPort {
	return r.door.Addrs()[0].(*net.UDPAddr).AddrPort()
}

// caller returns a socket that is connected to the front door.
func (r *running) caller() *net.UDPConn {
	r.t.Helper()
	return callerOf(r.t, r.addr())
}

func callerOf(t *testing.T, to netip.AddrPort) *net.UDPConn {
	t.Helper()
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c
}

// ask sends a datagram and returns the answer.
func ask(t *testing.T, c *net.UDPConn, question string) (answer string) {
	t.Helper()
	if _, err := c.Write([]byte(question)); err != nil {
		t.Fatal(err)
	}
	return receive(t, c)
}

func receive(t *testing.T, c *net.UDPConn) string {
	t.Helper()
	b := make([]byte, 1<<16)
	n, err := c.Read(b)
	if err != nil {
		t.Fatalf("no answer: %v", err)
	}
	return string(b[:n])
}

// target serves UDP on loopback: serve returns the answer to each datagram; nil: none.
func target(t *testing.T, serve func(p []byte, from netip.AddrPort) []byte) string {
	t.Helper()
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	t.Cleanup(func() {
		c.Close()
		<-ended
	})
	c.SetReadBuffer(4 << 20)
	go func() {
		defer close(ended)
		for b := make([]byte, 1<<16); ; {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			if answer := serve(b[:n], from); answer != nil {
				c.WriteToUDPAddrPort(answer, from)
			}
		}
	}()
	return c.LocalAddr().String()
}

func echo(p []byte, _ netip.AddrPort) []byte {
	if p == nil {
		p = []byte{}
	}
	return p
}

// dropped waits until the counters have n datagrams of a reason.
func dropped(t *testing.T, c *Counters, why Reason, n uint64) {
	t.Helper()
	testkit.Eventually(t, why.String()+" is counted", func() bool { return c.Dropped(why) >= n })
	if got := c.Dropped(why); got != n {
		t.Errorf("%d are dropped as %v, want %d", got, why, n)
	}
}
