package tcp

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// callers is a listener whose connections come from a network that is not allowed.
type callers struct {
	net.Listener // nil: no other method is called
	conns        chan net.Conn
}

func (l callers) Accept() (net.Conn, error) {
	c, ok := <-l.conns
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}

type outsider struct{ net.Conn }

func (outsider) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 7} }

// A caller that tcpallow denies has a line and an event once a minute, however often it connects. It is always
// counted.
func TestDenialsAreLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Log
		seen := new(testkit.Trail[tunnel.Event])
		f := New(nil, nil, slog.New(slog.NewTextHandler(&log, nil)))
		f.Sink.Audit = seen.Record
		allow := auth.Sources{netip.MustParsePrefix("10.0.0.0/8")}
		p := newPort(f, Listener{Listen: "0.0.0.0:1", Target: "127.0.0.1:1", Allow: allow})
		l := callers{conns: make(chan net.Conn)}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		d := &door{ln: l}
		d.port.Store(p)
		go func() { done <- d.accept(ctx, func(*port, net.Conn) { t.Error("it is served") }) }()
		connect := func(times int) {
			for range times {
				ours, theirs := net.Pipe()
				l.conns <- outsider{theirs}
				ours.Read(make([]byte, 1)) // returns when the connection is closed
			}
		}
		connect(100)
		time.Sleep(time.Minute)
		connect(100)
		cancel()
		close(l.conns)
		if err := <-done; err != nil {
			t.Error(err)
		}
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if len(lines) != 2 || !strings.Contains(lines[1], "skipped=99") || !strings.Contains(lines[0], "192.0.2.1") {
			t.Errorf("the log has\n%s", log.String())
		}
		if n := f.Counters.Doors[tunnel.DoorTCP].Results(tunnel.Denied); n != 200 {
			t.Errorf("%d denied callers are counted, want 200", n)
		}
		all := seen.All()
		if len(all) != 2 || all[1].Skipped != 99 || all[0].Result != "denied" || all[0].Caller != "192.0.2.1:7" {
			t.Errorf("the events are %+v", all)
		}
	})
}

// overloaded refuses every dial because of a limit.
type overloaded struct{}

func (overloaded) Dial(context.Context, tunnel.Request) (net.Conn, error) {
	return nil, tunnel.Refusef(tunnel.Overloaded, "limit conns: node edge1 has 1 conns")
}

// The log names the limit, and does not claim that the target cannot be reached.
func TestLimitIsLogged(t *testing.T) {
	var log testkit.Log
	p := newPort(New(nil, overloaded{}, slog.New(slog.NewTextHandler(&log, nil))), Listener{Target: "127.0.0.1:1"})
	_, theirs := net.Pipe()
	p.serve(t.Context(), outsider{theirs})
	if s := log.String(); !strings.Contains(s, "limit conns") || !strings.Contains(s, "a limit is reached") ||
		strings.Contains(s, "target cannot be reached") {
		t.Errorf("the log has\n%s", s)
	}
}
