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
	t.Parallel()
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
	connect := func(addr string) {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		io.WriteString(c, "CONNECT "+addr+" HTTP/1.1\r\nHost: x\r\n\r\nping")
		io.CopyN(io.Discard, c, int64(len("HTTP/1.1 200 "))) // an end before the answer would end the dial
		c.(*net.UnixConn).CloseWrite()
		io.ReadAll(c)
	}
	echo := testkit.Serve(t, testkit.Echo)
	connect(echo)
	testkit.Eventually(t, "an event", func() bool { return len(seen.All()) == 1 })
	e := seen.All()[0]
	if e.Kind != tunnel.EventEgress || e.Result != "ok" || e.Caller != "unix" || e.Target != echo ||
		e.Door != doorConnect || e.Sent != 4 || e.Received != 4 || e.Seconds <= 0 {
		t.Errorf("the event is %+v", e)
	}
	connect("127.0.0.1:1")
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
	for _, words := range [][]string{{"conn ended", "caller=unix", "node=", "bytes=8"}, {"dial refused", "caller=unix"}} {
		if len(text.Lines(words...)) != 1 {
			t.Errorf("no line has %q:\n%s", words, text)
		}
	}
	if count, _, _ := door.cfg.Counters.Doors[tunnel.DoorEgress].Durations(); count != 1 {
		t.Errorf("%d conns are counted", count)
	}
}
