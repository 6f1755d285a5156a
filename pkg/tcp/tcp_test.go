package tcp

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"log/slog"
	"net"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// patience bounds every wait on loopback, on a busy machine.
const patience = 10 * time.Second

// tunnelDouble stands for the tunnel: it dials the target itself.
type tunnelDouble struct {
	refuse error

	dials atomic.Int64
	mu    sync.Mutex // guards last
	last  tunnel.Request
}

func (d *tunnelDouble) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	d.dials.Add(1)
	d.mu.Lock()
	d.last = r
	d.mu.Unlock()
	if d.refuse != nil {
		return nil, d.refuse
	}
	return new(net.Dialer).DialContext(ctx, r.Network, r.Addr)
}

// running is a front door with one listener, in operation.
type running struct {
	t    *testing.T
	door *FrontDoor
	log  *testkit.Log
	stop context.CancelFunc
	done chan struct{} // closed when Run has returned
	err  error         // Run's result; read it after done
}

func run(t *testing.T, l Listener, d tunnel.Dialer, with ...func(*FrontDoor)) *running {
	t.Helper()
	if l.Listen == "" {
		l.Listen = "127.0.0.1:0"
	}
	r := &running{t: t, log: new(testkit.Log), done: make(chan struct{})}
	r.door = New([]Listener{l}, d, slog.New(slog.NewTextHandler(r.log, nil)))
	for _, w := range with {
		w(r.door)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.stop = cancel
	go func() {
		defer close(r.done)
		r.err = r.door.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		if err := r.wait(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	testkit.Eventually(t, "the listeners are open", func() bool { return r.door.Ready() == nil })
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

func (r *running) connect() *net.TCPConn {
	r.t.Helper()
	c, err := net.Dial("tcp", r.door.Addrs()[0].String())
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c.(*net.TCPConn)
}

// target is a server that handles each conn with serve. It returns the address.
func target(t *testing.T, serve func(*net.TCPConn)) string {
	t.Helper()
	return testkit.Serve(t, func(c *net.TCPConn) {
		c.SetDeadline(time.Now().Add(patience))
		serve(c)
	})
}

func echo(c *net.TCPConn) { io.Copy(c, c) }

func wantReset(t *testing.T, c net.Conn, why string) {
	t.Helper()
	if n, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%s: %d bytes and %v, want a reset", why, n, err)
	}
}

// wantTurnedAway connects and expects only a reset, which may come during the dial.
func (r *running) wantTurnedAway(why string) {
	r.t.Helper()
	c, err := net.Dial("tcp", r.door.Addrs()[0].String())
	if err != nil {
		if !errors.Is(err, syscall.ECONNRESET) {
			r.t.Errorf("%s: %v, want a reset", why, err)
		}
		return
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	wantReset(r.t, c, why)
}

func TestRequest(t *testing.T) {
	d := new(tunnelDouble)
	addr := target(t, echo)
	r := run(t, Listener{Node: "edge1", Target: addr}, d)
	c := r.connect()
	io.WriteString(c, "x")
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	want := tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: addr, Caller: c.LocalAddr().String()}
	if !reflect.DeepEqual(d.last, want) {
		t.Errorf("asked for %+v, want %+v", d.last, want)
	}
	c.Close()
}

func TestHalfClose(t *testing.T) {
	// The target answers when it has the whole request: it must see the end of the request while
	// the other direction stays open.
	addr := target(t, func(c *net.TCPConn) {
		b, _ := io.ReadAll(c)
		c.Write(bytes.ToUpper(b))
	})
	c := run(t, Listener{Target: addr}, new(tunnelDouble)).connect()
	io.WriteString(c, "question")
	c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "QUESTION" {
		t.Errorf("answer %q, %v", b, err)
	}
}

func TestHalfCloseByTheTarget(t *testing.T) {
	got := make(chan string, 1)
	addr := target(t, func(c *net.TCPConn) {
		io.WriteString(c, "greeting")
		c.CloseWrite()
		b, _ := io.ReadAll(c)
		got <- string(b)
	})
	c := run(t, Listener{Target: addr}, new(tunnelDouble)).connect()
	if b, err := io.ReadAll(c); err != nil || string(b) != "greeting" {
		t.Fatalf("greeting %q, %v", b, err)
	}
	io.WriteString(c, "still here")
	c.Close()
	if s := <-got; s != "still here" {
		t.Errorf("after its half-close the target got %q", s)
	}
}

func TestBytesBeforeACloseArrive(t *testing.T) {
	sent := make([]byte, 4<<20)
	rand.Read(sent)
	addr := target(t, func(c *net.TCPConn) { c.Write(sent) }) // and then closes
	c := run(t, Listener{Target: addr}, new(tunnelDouble)).connect()
	if b, err := io.ReadAll(c); err != nil || !bytes.Equal(b, sent) {
		t.Errorf("%d of %d bytes, %v", len(b), len(sent), err)
	}
}

func TestResetByTheTarget(t *testing.T) {
	addr := target(t, func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, 1))
		c.SetLinger(0)
	})
	c := run(t, Listener{Target: addr}, new(tunnelDouble)).connect()
	io.WriteString(c, "x")
	wantReset(t, c, "the target reset")
}

func TestResetByTheClient(t *testing.T) {
	started, ended := make(chan struct{}), make(chan error, 1)
	addr := target(t, func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, 1))
		close(started)
		_, err := io.Copy(io.Discard, c)
		ended <- err
	})
	c := run(t, Listener{Target: addr}, new(tunnelDouble)).connect()
	io.WriteString(c, "x")
	<-started
	c.SetLinger(0)
	c.Close()
	if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the target sees %v, want a reset", err)
	}
}

func TestRefusalIsAReset(t *testing.T) {
	for _, code := range tunnel.Codes() {
		refusing := &tunnelDouble{refuse: tunnel.Refusef(code, "because")}
		r := run(t, Listener{Target: "127.0.0.1:1", Node: "edge1"}, refusing)
		for range 3 {
			r.wantTurnedAway(code.String())
		}
		// The first failure is a warning that names the reason. Further ones are counted.
		testkit.Eventually(t, "a warning", func() bool { return strings.Contains(r.log.String(), "because") })
		if s := r.log.String(); strings.Count(s, "level=WARN") != 1 || !strings.Contains(s, "node=edge1") {
			t.Errorf("%v: log is %s", code, s)
		}
		r.stop()
	}
}

func TestAllow(t *testing.T) {
	addr := target(t, echo)
	allow := func(s string) auth.Sources {
		p, err := auth.ParseSources([]string{s})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	t.Run("permitted", func(t *testing.T) {
		l := Listener{Listen: "0.0.0.0:0", Target: addr, Allow: allow("127.0.0.0/8")}
		c := run(t, l, new(tunnelDouble)).connect()
		io.WriteString(c, "x")
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Error(err)
		}
		c.Close()
	})
	t.Run("denied", func(t *testing.T) {
		d := new(tunnelDouble)
		r := run(t, Listener{Target: addr, Allow: allow("10.0.0.0/8")}, d)
		for range 3 {
			r.wantTurnedAway("denied")
		}
		if n := d.dials.Load(); n != 0 {
			t.Errorf("%d dials for denied callers", n)
		}
		if s := r.log.String(); strings.Count(s, "caller denied") != 1 {
			t.Errorf("want one line: %s", s)
		}
	})
}

func TestListenersThatCannotOpen(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, tc := range []struct{ name, listen, want string }{
		{"taken", taken.Addr().String(), "already in use; stop what listens there"},
		{"every address", "0.0.0.0:0", "[mode.cloud.tcpallow]"},
		{"every address, short", ":0", "[mode.cloud.tcpallow]"},
		{"every address, IPv6", "[::]:0", "[mode.cloud.tcpallow]"},
		{"not ours", "192.0.2.1:0", "[mode.cloud.tcpallow]"},
		{"no port", "127.0.0.1", "missing port"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var opened []string
			listeners := []Listener{{Listen: "127.0.0.1:0"}, {Listen: tc.listen, Target: "127.0.0.1:22"}}
			door := New(listeners, new(tunnelDouble), slog.New(slog.DiscardHandler))
			listen := door.listen
			door.listen = func(ctx context.Context, network, addr string) (net.Listener, error) {
				ln, err := listen(ctx, network, addr)
				if err == nil {
					opened = append(opened, ln.Addr().String())
				}
				return ln, err
			}
			err := door.Run(t.Context())
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), tc.listen) {
				t.Fatalf("error %v does not say %q and name %q", err, tc.want, tc.listen)
			}
			if door.Ready() == nil {
				t.Error("it is ready")
			}
			if len(opened) != 1 {
				t.Fatalf("opened %v, want the first listener alone", opened)
			}
			if c, err := net.Dial("tcp", opened[0]); err == nil {
				c.Close()
				t.Error("the listener that could open is still open")
			}
		})
	}
}

func TestDrain(t *testing.T) {
	r := run(t, Listener{Target: target(t, echo)}, new(tunnelDouble))
	c := r.connect()
	say := func() {
		t.Helper()
		io.WriteString(c, "x")
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	say()
	addr := r.door.Addrs()[0].String()
	r.stop()
	testkit.Eventually(t, "nobody can connect any more", func() bool {
		late, err := net.Dial("tcp", addr)
		if err == nil {
			late.Close()
		}
		return err != nil
	})
	if r.door.Ready() == nil {
		t.Error("it is ready while it drains")
	}
	say() // the open conn continues
	select {
	case <-r.done:
		t.Fatal("Run has returned with a conn alive")
	default:
	}
	c.Close()
	if err := r.wait(); err != nil {
		t.Error(err)
	}
}

func TestDrainEndsAfterTheGracePeriod(t *testing.T) {
	shortGrace := func(f *FrontDoor) { f.grace = 20 * time.Millisecond }
	r := run(t, Listener{Target: target(t, echo)}, new(tunnelDouble), shortGrace)
	c := r.connect()
	io.WriteString(c, "x")
	io.ReadFull(c, make([]byte, 1))
	r.stop()
	wantReset(t, c, "the grace period is over")
	if err := r.wait(); err != nil {
		t.Error(err)
	}
}

// failing is a listener whose Accept fails a few times before it works.
type failing struct {
	net.Listener
	err   error
	times atomic.Int64
}

func (l *failing) Accept() (net.Conn, error) {
	if l.times.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: l.err}
	}
	return l.Listener.Accept()
}

func listenFailing(err error, times int64) func(*FrontDoor) {
	return func(f *FrontDoor) {
		listen := f.listen
		f.listen = func(ctx context.Context, network, addr string) (net.Listener, error) {
			ln, e := listen(ctx, network, addr)
			l := &failing{Listener: ln, err: err}
			l.times.Store(times)
			return l, e
		}
	}
}

func TestAcceptRetriesWithoutDescriptors(t *testing.T) {
	r := run(t, Listener{Target: target(t, echo)}, new(tunnelDouble), listenFailing(syscall.EMFILE, 4))
	c := r.connect()
	io.WriteString(c, "x")
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Error(err)
	}
	c.Close()
	if s := r.log.String(); strings.Count(s, "cannot accept") != 1 {
		t.Errorf("want one warning: %s", s)
	}
}

func TestBrokenListenerReachesMain(t *testing.T) {
	listeners := []Listener{{Listen: "127.0.0.1:0"}, {Listen: "127.0.0.1:0"}}
	door := New(listeners, new(tunnelDouble), slog.New(slog.DiscardHandler))
	listenFailing(syscall.EINVAL, 1)(door)
	if err := door.Run(t.Context()); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("Run: %v", err)
	}
}

// way records which message it is asked to serve, and with which dial func.
type way struct {
	served *tunnel.Message
	dial   tunnel.DialFunc
}

func (w *way) ServeOpen(in *tunnel.Incoming, dial tunnel.DialFunc) error {
	w.served, w.dial = in.Message, dial
	return nil
}

func TestEdgeServesOpen(t *testing.T) {
	mark := errors.New("dialled")
	edge := NewEdge(func(context.Context, tunnel.Request) (net.Conn, error) { return nil, mark })
	router, err := tunnel.NewRouter(edge)
	if err != nil {
		t.Fatal(err)
	}
	w := new(way)
	m := &tunnel.Message{Category: "tcp", Type: tunnel.TypeOpen, Topic: "7f", Addr: "127.0.0.1:22"}
	in := &tunnel.Incoming{Message: m, From: &tunnel.Session{Node: "edge1"}, Way: w}
	if known, err := router.Handle(t.Context(), in); !known || err != nil {
		t.Fatalf("open is not handled: %v, %v", known, err)
	}
	if w.served != m {
		t.Error("the session was not asked to serve the message")
	}
	if _, err := w.dial(t.Context(), tunnel.Request{}); !errors.Is(err, mark) {
		t.Error("it dials with something else than the edge was given")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := edge.Run(ctx); err != nil {
		t.Error(err)
	}
}

func TestCloudHandlesNoMessage(t *testing.T) {
	router, err := tunnel.NewRouter(New(nil, nil, slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	if routes := router.Routes(); len(routes) != 0 {
		t.Errorf("an edge may ask the cloud for %v", routes)
	}
}
