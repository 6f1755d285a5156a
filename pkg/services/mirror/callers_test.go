package mirror

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// bound replaces the limits of callers.
func (r *replica) bound(inAll, perAddress int) {
	r.callers.mu.Lock()
	defer r.callers.mu.Unlock()
	r.callers.max, r.callers.maxPerAddress = inAll, perAddress
}

// call connects to a port, sends a byte and waits for it. The caller closes c, which is nil if it is reset before Dial
// has returned.
func (r *replica) call(port uint16) (c net.Conn, err error) {
	r.mu.Lock()
	at := r.at[port]
	r.mu.Unlock()
	if c, err = net.Dial("tcp", at); err != nil {
		return nil, err
	}
	if _, err = io.WriteString(c, "x"); err == nil { // else the kernel has told of the reset now
		_, err = c.Read(make([]byte, 1))
	}
	return c, err
}

// isReset reports whether a further caller is reset without an answer.
func (r *replica) isReset(port uint16) bool {
	c, err := r.call(port)
	if c != nil {
		c.Close()
	}
	return errors.Is(err, syscall.ECONNRESET)
}

// opened waits until a port is open.
func (r *replica) opened(t *testing.T, port uint16) {
	t.Helper()
	testkit.Eventually(t, "the port is open", func() bool { return slices.Contains(r.ports(), port) })
}

// Connections above the limits are reset. When a connection has ended, a new one gets its place.
func TestTooManyCallers(t *testing.T) {
	a := newAPIServer(t)
	a.replicas("10.0.0.1")
	r := start(t, a, true, func(_ context.Context, c net.Conn, _ string) {
		defer c.Close()
		io.Copy(c, c)
	})
	r.bound(10, 3)
	a.mirrored("shop", "web", "true", 80)
	port := a.target("shop", "web-tunnel", 80)
	r.opened(t, port)
	var all []net.Conn
	for range 3 {
		c, err := r.call(port)
		if err != nil {
			t.Fatalf("a caller within the limit: %v", err)
		}
		defer c.Close()
		all = append(all, c)
	}
	for range 2 {
		if !r.isReset(port) {
			t.Error("a caller above the limit is not reset")
		}
	}
	r.bound(3, 4)
	if !r.isReset(port) {
		t.Error("a caller above the limit in all is not reset")
	}
	counters := r.cfg.Counters
	if n, inAll := counters.LimitedBy(tunnel.LimitMirrorPerAddress), counters.LimitedBy(tunnel.LimitMirror); n != 2 ||
		inAll != 1 {
		t.Errorf("counted %d and %d", n, inAll)
	}
	if len(r.log.Lines("level=WARN", "there are too many", "target=web.shop.svc:80", "remote=127.0.0.1",
		"limit=mirrorperaddress", "skipped=0")) != 1 || len(r.log.Lines("there are too many")) != 1 {
		t.Errorf("the log is\n%s", r.log)
	}
	all[0].Close()
	testkit.Eventually(t, "a place is free", func() bool { return !r.isReset(port) })
}

// Each address has its own places.
func TestPlaces(t *testing.T) {
	c := callers{max: 3, maxPerAddress: 2}
	one, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	enter := func(from netip.Addr, want string) {
		t.Helper()
		got := "a place"
		if limit, full := c.enter(from); full {
			got = limit.String()
		}
		if got != want {
			t.Errorf("%s gets %s, want %s", from, got, want)
		}
	}
	enter(one, "a place")
	enter(one, "a place")
	enter(one, "mirrorperaddress")
	enter(other, "a place")
	enter(other, "mirror")
	c.leave(one)
	enter(other, "a place")
	c.leave(one)
	c.leave(other)
	c.leave(other)
	if c.total != 0 || len(c.of) != 0 {
		t.Errorf("%d connections are left, of %v", c.total, c.of)
	}
}

// A loop, in which each conn makes the cloud call the same port again, ends at the limit, and all of its conns end.
func TestLoopEnds(t *testing.T) {
	const places = 20
	a := newAPIServer(t)
	a.replicas("10.0.0.1")
	var own atomic.Pointer[string] // the port
	var calls atomic.Int64
	r := start(t, a, true, func(ctx context.Context, c net.Conn, _ string) {
		if calls.Add(1) > places { // else a Mirror without the limit would use up the descriptors of this machine's user
			tunnel.Reset(c)
			return
		}
		again, err := new(net.Dialer).DialContext(ctx, "tcp", *own.Load())
		if err != nil {
			tunnel.Reset(c)
			return
		}
		tunnel.Splice(ctx, c, again)
	})
	r.bound(2*places, places)
	a.mirrored("shop", "web", "true", 80)
	port := a.target("shop", "web-tunnel", 80)
	r.opened(t, port)
	r.mu.Lock()
	at := r.at[port]
	r.mu.Unlock()
	own.Store(&at)
	if !r.isReset(port) {
		t.Error("the caller is not reset")
	}
	testkit.Eventually(t, "all conns have ended", func() bool {
		r.callers.mu.Lock()
		defer r.callers.mu.Unlock()
		return r.callers.total == 0
	})
	if n, limited := calls.Load(), r.cfg.Counters.LimitedBy(tunnel.LimitMirrorPerAddress); n != places || limited != 1 {
		t.Errorf("%d conns, and %d above the limit", n, limited)
	}
}

// A caller of a twin reaches no port of a twin at a replica, but other ports of the replica. Other callers reach all
// ports.
func TestMayDial(t *testing.T) {
	a := newAPIServer(t)
	a.replicas("10.0.0.1", "10.0.0.2")
	var m atomic.Pointer[Mirror]
	var at atomic.Pointer[netip.AddrPort]
	r := start(t, a, true, func(ctx context.Context, c net.Conn, _ string) {
		fmt.Fprint(c, tunnel.CodeOf(m.Load().MayDial(ctx, *at.Load())) == tunnel.Denied)
		c.Close()
	})
	m.Store(r.Mirror)
	a.mirrored("shop", "web", "true", 80)
	port := a.target("shop", "web-tunnel", 80)
	for to, denied := range map[string]bool{
		fmt.Sprint("10.0.0.1:", first):            true,
		fmt.Sprint("10.0.0.2:", last):             true,
		fmt.Sprintf("[::ffff:10.0.0.2]:%d", last): true,
		fmt.Sprint("10.0.0.1:", first-1):          false,
		fmt.Sprint("10.0.0.1:", last+1):           false,
		fmt.Sprint("10.0.0.3:", first):            false,
	} {
		addr := netip.MustParseAddrPort(to)
		at.Store(&addr)
		r.leadsTo(t, port, fmt.Sprint(denied))
		if err := r.MayDial(t.Context(), addr); err != nil {
			t.Errorf("another caller of %s: %v", to, err)
		}
	}
}
