package api

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tap"
	"tunnel.example/tunnel/pkg/tunnel"
)

// watch follows the conns of a node by a client until the test ends. The lines go to the trail.
func watch(t *testing.T, follow func(context.Context, func(tap.Line) error) error) (
	seen *testkit.Trail[tap.Line], stop func(),
) {
	t.Helper()
	seen = new(testkit.Trail[tap.Line])
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1) // one error is sent
	go func() { ended <- follow(ctx, func(l tap.Line) error { seen.Record(l); return nil }) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("the stream has ended by itself: %v", err)
		}
	}
	t.Cleanup(stop)
	return seen, stop
}

// A client sees conns while it watches, as they come. When it leaves, nobody watches.
func TestTap(t *testing.T) {
	r := newRig()
	r.cfg.Tap = tap.New("cloud-0")
	c := r.client(t)
	seen, stop := watch(t, func(ctx context.Context, each func(tap.Line) error) error { return c.Tap(ctx, "edge1", each) })
	testkit.Eventually(t, "the cloud is watched", r.cfg.Tap.Watched)
	for _, node := range []tunnel.NodeName{"edge1", "edge2", "edge1"} {
		r.cfg.Tap.Show(tunnel.PhaseEnd, tunnel.Event{Kind: tunnel.EventTCP, Result: "ok", Node: node, Sent: 7})
	}
	testkit.Eventually(t, "two lines", func() bool { return len(seen.All()) == 2 })
	if l := seen.All()[1]; l.Phase != tunnel.PhaseEnd || l.Replica != "cloud-0" || l.Node != "edge1" || l.Sent != 7 {
		t.Errorf("the line is %+v", l)
	}
	stop()
	testkit.Eventually(t, "nobody watches", func() bool { return !r.cfg.Tap.Watched() })

	var failed *Failure
	if err := c.Tap(t.Context(), "UPPER", nil); !errors.As(err, &failed) {
		t.Errorf("a name that is none: %v", err)
	}
}

// Another replica follows over a conn of the tunnel for longer than the timeouts of short answers. A replica that stops
// ends the stream.
func TestTapInside(t *testing.T) {
	r := newRig()
	r.cfg.Tap = tap.New("cloud-0")
	s := New(r.cfg)
	running := testkit.Run(t, s.Run)
	ended := make(chan error, 1) // one error is sent
	seen := new(testkit.Trail[tap.Line])
	go func() {
		ended <- follow(t.Context(), clientOf(s.Dial), "", func() {}, func(l tap.Line) error { seen.Record(l); return nil })
	}()
	testkit.Eventually(t, "the cloud is watched", r.cfg.Tap.Watched)
	select {
	case err := <-ended:
		t.Fatal(err)
	case <-time.After(askTimeout + 500*time.Millisecond):
	}
	r.cfg.Tap.Show(tunnel.PhaseOpen, tunnel.Event{Node: "edge1"})
	testkit.Eventually(t, "a line", func() bool { return len(seen.All()) == 1 })
	running.Stop()
	if err := <-ended; err == nil {
		t.Error("the stream has ended without an error")
	}
	testkit.Eventually(t, "nobody watches", func() bool { return !r.cfg.Tap.Watched() })
}

// A replica whose stream fails is asked again, until it answers or has gone. The watcher is told once that lines are
// missing, and when the replica is back.
func TestReplicaIsFollowedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.cfg.Tap = tap.New("cloud-1")
		other := New(r.cfg)
		ctx, cancel := context.WithCancel(t.Context())
		served := make(chan error, 1) // one error is sent
		go func() { served <- other.Run(ctx) }()

		const failures = 10
		asked, gone := 0, false
		find := func() dialFunc {
			if asked++; gone {
				return nil
			}
			return func(ctx context.Context) (net.Conn, error) {
				if asked <= failures {
					return nil, errors.New("no way")
				}
				return other.Dial(ctx)
			}
		}
		watcher := tap.New("cloud-0").Watch("")
		defer watcher.Close()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			followReplica(t.Context(), "192.0.2.1:1", find, "", watcher)
		}()
		next := func() tap.Line {
			l, _ := watcher.Next(t.Context())
			return l
		}
		if l := next(); !strings.Contains(l.Warning, "192.0.2.1:1: no way; its conns are missing here until") {
			t.Errorf("the first line is %+v", l)
		}
		if l := next(); !strings.Contains(l.Warning, "answers again") || asked != failures+1 {
			t.Errorf("after %d questions, the second line is %+v", asked, l)
		}
		synctest.Wait()
		r.cfg.Tap.Show(tunnel.PhaseOpen, tunnel.Event{Node: "edge1"})
		if l := next(); l.Event == nil || l.Node != "edge1" {
			t.Errorf("the line is %+v", l)
		}
		gone = true
		cancel() // the replica stops
		if l := next(); !strings.Contains(l.Warning, "missing") {
			t.Errorf("the last line is %+v", l)
		}
		<-ended
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
}

// Watchers leave conns of the admin socket to the other commands.
func TestTooManyTaps(t *testing.T) {
	r := newRig()
	r.cfg.Tap = tap.New("cloud-0")
	c := r.client(t)
	var stops []func()
	seen := make([]*testkit.Trail[tap.Line], maxWatchers)
	for i := range seen {
		var stop func()
		seen[i], stop = watch(t, func(ctx context.Context, each func(tap.Line) error) error { return c.Tap(ctx, "", each) })
		stops = append(stops, stop)
	}
	testkit.Eventually(t, "all watch", func() bool {
		r.cfg.Tap.Show(tunnel.PhaseOpen, tunnel.Event{Node: "edge1"})
		for _, s := range seen {
			if len(s.All()) == 0 {
				return false
			}
		}
		return true
	})
	var failed *Failure
	if err := c.Tap(t.Context(), "", nil); !errors.As(err, &failed) || failed.Code != tunnel.Overloaded.String() {
		t.Fatalf("one more: %v", err)
	}
	stops[0]()
	testkit.Eventually(t, "one more may watch", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		go func() {
			for ctx.Err() == nil {
				r.cfg.Tap.Show(tunnel.PhaseOpen, tunnel.Event{Node: "edge1"})
				time.Sleep(5 * time.Millisecond)
			}
		}()
		shown := false
		c.Tap(ctx, "", func(tap.Line) error { shown = true; return nil })
		return shown
	})
}

// A watcher that reads nothing, such as a stopped terminal, is dropped. One that has nothing to read stays.
func TestStoppedWatcher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.cfg.Tap = tap.New("cloud-0")
		s := New(r.cfg)
		running := testkit.Run(t, s.Run)
		defer running.Stop()
		conn, err := s.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		io.WriteString(conn, "GET /v1/tap HTTP/1.1\r\nHost: tunnel\r\n\r\n")
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		time.Sleep(time.Hour)
		for range 2 {
			time.Sleep(maxStall - time.Second)
			r.cfg.Tap.Show(tunnel.PhaseOpen, tunnel.Event{Node: "edge1"})
			if _, err = bufio.NewReader(response.Body).ReadString('\n'); err != nil {
				t.Fatalf("the watcher has lost its stream: %v", err)
			}
		}
		r.cfg.Tap.Show(tunnel.PhaseOpen, tunnel.Event{Node: "edge1"})
		time.Sleep(maxStall - time.Second)
		if !r.cfg.Tap.Watched() {
			t.Error("the watcher is dropped too early")
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if r.cfg.Tap.Watched() {
			t.Error("the watcher that reads nothing stays")
		}
	})
}

// Each hop is there up to the one that fails, and that one says what to do. An old edge gets an honest answer.
func TestTrace(t *testing.T) {
	r := newRig()
	c := r.client(t)
	want := func(name string, codes string, words ...string) {
		t.Helper()
		traced, err := c.Trace(t.Context(), "edge1", "10.0.0.5:22")
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var got []string
		for _, h := range traced.Hops {
			got = append(got, h.Step+"-"+h.Code)
		}
		last := traced.Hops[len(traced.Hops)-1]
		if strings.Join(got, " ") != codes || (last.Code != "") != (last.Next != "") {
			t.Errorf("%s: %q, want %q; the last hop is %+v", name, got, codes, last)
		}
		for _, word := range words {
			if !strings.Contains(last.At+last.Text+last.Next, word) {
				t.Errorf("%s: the last hop lacks %q: %+v", name, word, last)
			}
		}
	}
	want("never seen", "hold-no-such-node", "no replica holds edge1", "tunnel ls")
	s := r.attach("edge1")
	s.Dialer = refuses{tunnel.Refusef(tunnel.Overloaded, "limit conns: full")}
	want("full", "hold- reach-overloaded", "node edge1", "limits.md")
	s.Dialer = refuses{tunnel.Refusef(tunnel.Internal, "node edge1 runs no module %q", "trace")}
	want("old", "hold- reach- dial-internal")
	why := "connection lost"
	s.EndedBecause.Store(&why)
	r.dir.Detach(s)
	want("gone", "hold-no-such-node", "last seen", why)

	var failed *Failure
	for _, bad := range [][2]string{{"UPPER", "a:1"}, {"edge1", "no-port"}} {
		if _, err := c.Trace(t.Context(), bad[0], bad[1]); !errors.As(err, &failed) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
