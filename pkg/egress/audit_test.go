package egress

import (
	"io"
	"net"
	"path/filepath"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The audit has each conn and each refused dial, with caller, target, node, bytes and result. So have the traces.
func TestAudit(t *testing.T) {
	t.Run(doorConnect, func(t *testing.T) { t.Parallel(); testAudit(t, doorConnect, connect) })
	t.Run(doorSOCKS, func(t *testing.T) {
		t.Parallel()
		testAudit(t, doorSOCKS, func(addr string) string { return greeting + socks(addr) })
	})
}

func testAudit(t *testing.T, protocol string, request func(addr string) string) {
	seen := new(testkit.Trail[tunnel.Event])
	n := &nodes{reach: map[tunnel.NodeName]konnectivity.Identifiers{}, changed: make(chan struct{})}
	path := filepath.Join(t.TempDir(), "connect")
	log, text := testkit.NewLog()
	spans := new(testkit.Trail[*tunnel.Span])
	sink := tunnel.Sink{Audit: seen.Record, Tracer: &tunnel.Tracer{PerMillion: 1_000_000, Take: spans.Record}}
	door, err := New(Config{HTTPConnect: []string{"unix://" + path}, Identifiers: n, Sink: sink}, n, n, log)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Run(t, door.Run)
	testkit.Eventually(t, "the front door is ready", func() bool { return door.Ready() == nil })
	call := func(addr string) {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		io.WriteString(c, request(addr)+"ping")
		io.CopyN(io.Discard, c, int64(len(greeted+granted))) // an end before the answer would end the dial
		c.(*net.UnixConn).CloseWrite()
		io.ReadAll(c)
	}
	echo := testkit.Serve(t, testkit.Echo)
	call(echo)
	testkit.Eventually(t, "an event", func() bool { return len(seen.All()) == 1 })
	e := seen.All()[0]
	if e.Kind != tunnel.EventEgress || e.Result != "ok" || e.Caller != "unix" || e.Target != echo ||
		e.Door != protocol || e.Sent != 4 || e.Received != 4 || e.Seconds <= 0 {
		t.Errorf("the event is %+v", e)
	}
	testkit.Eventually(t, "a span", func() bool { return len(spans.All()) == 1 }) // it is recorded behind the event
	call("127.0.0.1:1")
	testkit.Eventually(t, "a second event", func() bool { return len(seen.All()) == 2 })
	if e = seen.All()[1]; e.Result != "refused" || e.Target != "127.0.0.1:1" || e.Err == "" {
		t.Errorf("the event is %+v", e)
	}
	testkit.Eventually(t, "two spans", func() bool { return len(spans.All()) == 2 })
	for i, s := range spans.All() {
		if s.Event != seen.All()[i] {
			t.Errorf("the span is %+v", s)
		}
	}
	for _, words := range [][]string{
		{"conn ended", "frontend=" + protocol, "caller=unix", "node=", "bytes=8"},
		{"dial refused", "frontend=" + protocol, "caller=unix"},
	} {
		if len(text.Lines(words...)) != 1 {
			t.Errorf("no line has %q:\n%s", words, text)
		}
	}
	if count, _, _ := door.cfg.Counters.Doors[tunnel.DoorEgress].Durations(); count != 1 {
		t.Errorf("%d conns are counted", count)
	}
}
