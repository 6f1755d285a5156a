package dns

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"tunnel/pkg/listen"
	"tunnel/pkg/tunnel"
)

// Whoever holds a connection and does not use it loses it.
func TestConnTimeouts(t *testing.T) {
	packet := pack(t, question("edge1.", dns.TypeA))
	for _, tc := range []struct {
		what  string
		asker func(net.Conn)
		after time.Duration
	}{
		{"says nothing", func(net.Conn) {}, idleTimeout},
		{"says half of something", func(c net.Conn) { c.Write([]byte{0, 40, 1}) }, idleTimeout},
		{"says a byte a second", func(c net.Conn) {
			for _, b := range append([]byte{0, byte(len(packet))}, packet...) {
				if _, err := c.Write([]byte{b}); err != nil {
					return
				}
				time.Sleep(time.Second)
			}
		}, idleTimeout},
		{"asks once, and then nothing", func(c net.Conn) {
			time.Sleep(3 * time.Second)
			conn := dns.Conn{Conn: c}
			conn.Write(packet)
			conn.ReadMsg()
		}, 3*time.Second + idleTimeout},
		{"does not read the answer", func(c net.Conn) {
			(&dns.Conn{Conn: c}).Write(packet)
		}, writeTimeout},
		{"says what is too long", func(c net.Conn) { c.Write([]byte{0xff, 0xff}) }, 0},
		{"goes", func(c net.Conn) { c.Close() }, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := NewResponder(ResponderConfig{Truth: newHeld("edge1 10.0.0.5"), Log: quiet})
			ours, theirs := net.Pipe()
			defer theirs.Close()
			var asker sync.WaitGroup
			defer asker.Wait()
			asker.Go(func() { tc.asker(theirs) })
			start := time.Now()
			r.serveConn(t.Context(), ours, someplace())
			if took := time.Since(start); took != tc.after {
				t.Errorf("an asker that %s has its connection for %v, want %v", tc.what, took, tc.after)
			}
		})
	}
}

// someplace is the place of a connection among others.
func someplace() *listen.Stranger {
	place, _ := listen.NewStrangers(1, 1).Admit(new(net.TCPConn), nil)
	return place
}

// The end of Run does not wait for those who hold a connection.
func TestConnEndsWithRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewResponder(ResponderConfig{Truth: newHeld(), Log: quiet})
		ours, theirs := net.Pipe()
		defer theirs.Close()
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		start := time.Now()
		r.serveConn(ctx, ours, someplace())
		if took := time.Since(start); took != time.Second {
			t.Errorf("the connection ends after %v, want 1 s", took)
		}
	})
}

// Many sources together hold no more connections than there are for all.
func TestConnsInAll(t *testing.T) {
	r := respond(t, ResponderConfig{Truth: newHeld("edge1 10.0.0.5")})
	var parked []net.Conn
	defer func() {
		for _, c := range parked {
			c.Close()
		}
	}()
	const sources = 8 + 1
	for i := range sources {
		from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(i))}}
		for range DefaultConns / 8 {
			c, err := from.Dial("tcp", r.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			parked = append(parked, c)
		}
	}
	eventually(t, "those that are too many have been closed", func() bool { return r.stats.overloaded.Load() == DefaultConns/8 })
	other := dns.Client{Net: "tcp", Timeout: 5 * time.Second, Dialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, sources)}}}
	if m, _, err := other.Exchange(question("edge1.", dns.TypeA), r.Addr().String()); err != nil || len(m.Answer) != 1 {
		t.Errorf("another source over TCP, while a few hold all places: %v, %v", m, err)
	}
	if n := r.cfg.Counters.LimitedBy(tunnel.LimitDNS); n != DefaultConns/8+1 {
		t.Errorf("the limit is counted %d times, want %d", n, DefaultConns/8+1)
	}
	if m := ask(t, r.Addr(), "udp", question("edge1.", dns.TypeA)); len(m.Answer) != 1 {
		t.Errorf("over UDP: %s", show(m))
	}
	// Those that were closed count for nobody: when the others have gone, the last
	// source has as much room as any.
	for _, c := range parked {
		c.Close()
	}
	eventually(t, "the last source is admitted", func() bool {
		c := dns.Client{Net: "tcp", Timeout: 5 * time.Second,
			Dialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, sources-1)}}}
		_, _, err := c.Exchange(question("edge1.", dns.TypeA), r.Addr().String())
		return err == nil
	})
}

// What cannot be read is tried again, ever more slowly, and said once a minute.
func TestAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, journal := newLog()
		r := NewResponder(ResponderConfig{Log: log})
		ctx, cancel := context.WithCancel(t.Context())
		backoff, start := backoffFirst, time.Now()
		for i, want := range []time.Duration{5, 15, 35, 75, 155, 315, 635, 1275, 2275, 3275} {
			if !r.again(ctx, "cannot read", errors.New("no memory"), &backoff) {
				t.Fatal("given up")
			}
			if waited := time.Since(start); waited != want*time.Millisecond {
				t.Errorf("try %d comes after %v, want %d ms", i+1, waited, want)
			}
		}
		cancel()
		if r.again(ctx, "cannot read", net.ErrClosed, &backoff) {
			t.Error("tried again after the end")
		}
		if n := strings.Count(journal.String(), "no memory"); n != 1 || strings.Contains(journal.String(), "closed") {
			t.Errorf("said %d times:\n%s", n, journal)
		}
	})
}

func TestIsOurs(t *testing.T) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if p := netip.MustParsePrefix(a.String()); !isOurs(p.Addr()) {
			t.Errorf("%s is not ours", p.Addr())
		}
	}
	for s, want := range map[string]bool{"127.0.0.9": true, "::1": true, "::ffff:127.0.0.1": true, "0.0.0.0": true, "192.0.2.1": false, "2001:db8::1": false} {
		if got := isOurs(netip.MustParseAddr(s)); got != want {
			t.Errorf("%s is ours: %t, want %t", s, got, want)
		}
	}
}
