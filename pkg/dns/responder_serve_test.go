package dns

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A TCP connection that its client does not use is closed.
func TestConnTimeouts(t *testing.T) {
	packet := pack(t, question("edge1.", dns.TypeA))
	for _, tc := range []struct {
		what   string
		client func(net.Conn)
		after  time.Duration // when the connection is closed
	}{
		{"sends nothing", func(net.Conn) {}, idleTimeout},
		{"sends half of a query", func(c net.Conn) { c.Write([]byte{0, 40, 1}) }, idleTimeout},
		{"sends a byte a second", func(c net.Conn) {
			for _, b := range append([]byte{0, byte(len(packet))}, packet...) {
				if _, err := c.Write([]byte{b}); err != nil {
					return
				}
				time.Sleep(time.Second)
			}
		}, idleTimeout},
		{"sends one query, and then nothing", func(c net.Conn) {
			time.Sleep(3 * time.Second)
			conn := dns.Conn{Conn: c}
			conn.Write(packet)
			conn.ReadMsg()
		}, 3*time.Second + idleTimeout},
		{"does not read the answer", func(c net.Conn) {
			(&dns.Conn{Conn: c}).Write(packet)
		}, writeTimeout},
		{"announces too long a query", func(c net.Conn) { c.Write([]byte{0xff, 0xff}) }, 0},
		{"closes the connection", func(c net.Conn) { c.Close() }, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := NewResponder(ResponderConfig{Truth: newHeld("edge1 10.0.0.5"), Log: quiet})
			ours, theirs := net.Pipe()
			defer theirs.Close()
			var client sync.WaitGroup
			defer client.Wait()
			client.Go(func() { tc.client(theirs) })
			start := time.Now()
			r.serveConn(t.Context(), ours, anyPlace())
			if took := time.Since(start); took != tc.after {
				t.Errorf("a client that %s has its connection for %v, want %v", tc.what, took, tc.after)
			}
		})
	}
}

// anyPlace returns the place of a connection that serveConn needs.
func anyPlace() *listen.Stranger {
	place, _ := listen.NewStrangers(1, 1).Admit(new(net.TCPConn), nil)
	return place
}

// Run does not wait for clients that hold a connection open.
func TestConnEndsWithRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewResponder(ResponderConfig{Truth: newHeld(), Log: quiet})
		ours, theirs := net.Pipe()
		defer theirs.Close()
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		start := time.Now()
		r.serveConn(ctx, ours, anyPlace())
		if took := time.Since(start); took != time.Second {
			t.Errorf("the connection ends after %v, want 1 s", took)
		}
	})
}

// Many sources together hold at most DefaultConns connections.
func TestConnsInAll(t *testing.T) {
	r := respond(t, ResponderConfig{Truth: newHeld("edge1 10.0.0.5")})
	const sources = 8 + 1
	parked := testkit.DialMany(t, sources*DefaultConns/8, r.Addr().String(), func(i int) net.IP {
		return net.IPv4(127, 0, 1, byte(i%sources))
	})
	testkit.Eventually(t, "the connections beyond the limit have been closed", func() bool {
		return r.stats.overloaded.Load() == DefaultConns/8
	})
	other := dns.Client{
		Net: "tcp", Timeout: 5 * time.Second,
		Dialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, sources)}},
	}
	if m, _, err := other.Exchange(question("edge1.", dns.TypeA), r.Addr().String()); err != nil || len(m.Answer) != 1 {
		t.Errorf("another source over TCP, while a few sources hold all places: %v, %v", m, err)
	}
	if n := r.cfg.Counters.LimitedBy(tunnel.LimitDNS); n != DefaultConns/8+1 {
		t.Errorf("the limit is counted %d times, want %d", n, DefaultConns/8+1)
	}
	if m := ask(t, r.Addr(), "udp", question("edge1.", dns.TypeA)); len(m.Answer) != 1 {
		t.Errorf("over UDP: %s", show(m))
	}
	// Closed connections do not count for their source: after the others have closed theirs, the
	// last source has as much room as any.
	for _, c := range parked {
		c.Close()
	}
	testkit.Eventually(t, "the last source is admitted", func() bool {
		c := dns.Client{Net: "tcp", Timeout: 5 * time.Second,
			Dialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, sources-1)}}}
		_, _, err := c.Exchange(question("edge1.", dns.TypeA), r.Addr().String())
		return err == nil
	})
}

// After a failed read the responder tries again, with growing pauses, and logs once a minute.
func TestRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, journal := testkit.NewLog()
		r := NewResponder(ResponderConfig{Log: log})
		ctx, cancel := context.WithCancel(t.Context())
		backoff, start := minBackoff, time.Now()
		for i, want := range []time.Duration{5, 15, 35, 75, 155, 315, 635, 1275, 2275, 3275} {
			r.retry(ctx, "cannot read", errors.New("no memory"), &backoff)
			if waited := time.Since(start); waited != want*time.Millisecond {
				t.Errorf("try %d comes after %v, want %d ms", i+1, waited, want)
			}
		}
		cancel()
		end := time.Now()
		r.retry(ctx, "cannot read", errors.New("no memory"), &backoff)
		if waited := time.Since(end); waited != 0 {
			t.Errorf("after the end, it waits for %v", waited)
		}
		if n := strings.Count(journal.String(), "no memory"); n != 1 {
			t.Errorf("logged %d times:\n%s", n, journal)
		}
	})
}

// failing is a listener whose Accept first returns errs, one after the other.
type failing struct {
	net.Listener
	errs chan error // filled by the test
}

func (f *failing) Accept() (net.Conn, error) {
	select {
	case err := <-f.errs:
		return nil, err
	default:
		return f.Listener.Accept()
	}
}

// A socket that is broken ends Serve with an error, and also the connections of clients. Errors of single connections
// do not.
func TestBrokenSocket(t *testing.T) {
	for name, breaks := range map[string]func(ln *failing, udp *net.UDPConn) (wake string){
		"TCP": func(ln *failing, _ *net.UDPConn) string { ln.errs <- syscall.EBADF; return ln.Addr().String() },
		"UDP": func(_ *failing, udp *net.UDPConn) string { udp.Close(); return "" },
	} {
		t.Run(name, func(t *testing.T) {
			r := NewResponder(ResponderConfig{Truth: newHeld("edge1 10.0.0.5"), Log: quiet})
			udp, tcp, err := r.Open(t.Context(), "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			ln := &failing{tcp, make(chan error, 2)}
			ln.errs <- syscall.ECONNABORTED
			ended := make(chan error, 1)
			ctx, cancel := context.WithCancel(t.Context())
			go func() { ended <- r.Serve(ctx, udp, ln) }()
			held, err := net.Dial("tcp", tcp.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer held.Close()
			client := &dns.Conn{Conn: held}
			if err := client.WriteMsg(question("edge1.", dns.TypeA)); err != nil {
				t.Fatal(err)
			}
			if m, err := client.ReadMsg(); err != nil || len(m.Answer) != 1 {
				t.Fatalf("after an error of a connection: %v, %v", m, err)
			}
			if wake := breaks(ln, udp); wake != "" { // Accept is blocked, and returns for a connection
				c, err := net.Dial("tcp", wake)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
			}
			select {
			case err := <-ended:
				if err == nil {
					t.Error("a broken socket is no error")
				}
			case <-time.After(idleTimeout / 2):
				t.Errorf("Serve goes on with a broken socket, or waits for clients")
				cancel()
				<-ended
			}
			cancel()
			if c, err := net.Dial("tcp", tcp.Addr().String()); err == nil {
				c.Close()
				t.Error("the listener is open after the end")
			}
		})
	}
}

func TestIsLocal(t *testing.T) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if p := netip.MustParsePrefix(a.String()); !isLocal(p.Addr()) {
			t.Errorf("%s is not local", p.Addr())
		}
	}
	for s, want := range map[string]bool{
		"127.0.0.9": true, "::1": true, "::ffff:127.0.0.1": true, "0.0.0.0": true,
		"192.0.2.1": false, "2001:db8::1": false,
	} {
		if got := isLocal(netip.MustParseAddr(s)); got != want {
			t.Errorf("%s is local: %t, want %t", s, got, want)
		}
	}
}

// Once another process has taken over, it gets every query.
func TestResponderLeaves(t *testing.T) {
	sockets := listen.NewSockets()
	r := respond(t, ResponderConfig{Truth: newHeld("edge1 10.0.0.5"), Sockets: sockets})
	held := &dns.Conn{}
	var err error
	if held.Conn, err = net.Dial("tcp", r.Addr().String()); err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	query := question("edge1.", dns.TypeA)
	overTCP := func() error {
		if err := held.WriteMsg(query); err != nil {
			return err
		}
		_, err := held.ReadMsg()
		return err
	}
	if err := overTCP(); err != nil {
		t.Fatal(err)
	}
	ask(t, r.Addr(), "udp", query)
	copies, err := sockets.Copies()
	if err != nil {
		t.Fatal(err)
	}
	defer listen.CloseCopies(copies)
	i := slices.IndexFunc(copies, func(c listen.Copy) bool { return strings.HasPrefix(c.Network, "udp") })
	next, err := net.FilePacketConn(copies[i].File)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	client, err := net.Dial("udp", r.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	unanswered := func() bool { // by the old process; the query then waits for the other one
		if _, err := client.Write(pack(t, query)); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, maxQuery)
		if err := client.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if _, err := client.Read(buf); err == nil {
			return false
		}
		if err := next.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		_, _, err := next.ReadFrom(buf)
		return err == nil
	}
	sockets.Leave()
	testkit.Eventually(t, "the other process gets a query", unanswered)
	for range 5 {
		if !unanswered() {
			t.Fatal("the old process has taken a query")
		}
	}
	if err := overTCP(); err == nil {
		t.Error("the old process still answers over TCP")
	}
}
