package stream

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/listen"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// bubble is synctest.Test on one processor: where two run timers of a bubble at once, Go 1.26's
// race detector crashes (runtime's timer.unlockAndRun has one race context for all of them).
func bubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	synctest.Test(t, test)
}

// onFakeClock runs a test with a cloud and edges in memory, where hours cost nothing.
func onFakeClock(t *testing.T, test func(t *testing.T, r *rig), change ...func(*ServerConfig)) {
	t.Helper()
	bubble(t, func(t *testing.T) { test(t, newRigOn(t, newMemNet(), change...)) })
}

// Strangers who connect shortly before the end do not delay a cloud that stops.
func TestStrangersDoNotDelayTheStop(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		for _, first := range []string{"", "\x16"} { // nothing, or half a record of TLS
			c, err := r.net.dial(t.Context(), "", "")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			io.WriteString(c, first)
		}
		synctest.Wait()
		start := time.Now()
		r.running.Stop()
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("the stop took %v", took)
		}
	})
}

// A path that swallows everything without a word is noticed by both ends within the
// 15 s of keepalive, and their conns end as resets. When it works again the node is
// back.
func TestHalfOpenPathIsNoticed(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		near, far := net.Pipe()
		e := r.join("edge1", func(context.Context, tunnel.Request) (net.Conn, error) { return far, nil })
		c := r.mustDial("edge1", "target:1")
		time.Sleep(time.Hour)
		if !r.dir.Holds("edge1") || e.client.Ready() != nil || r.counters.Sessions.Load() != 1 {
			t.Fatal("an idle session does not last an hour")
		}

		r.net.dead.Store(true)
		const noticed = lostAfter + time.Second
		reset := make(chan error, 2)
		go func() {
			_, err := c.Read(make([]byte, 1))
			reset <- err
		}()
		go func() {
			_, err := near.Read(make([]byte, 1))
			reset <- err
		}()
		within(t, noticed, "both ends let go", func() bool { return !r.dir.Holds("edge1") && e.client.Ready() != nil })
		for range 2 {
			if err := <-reset; !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.EOF) {
				t.Errorf("a conn of the lost session: %v", err)
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}

		r.net.dead.Store(false)
		within(t, 2*tunnel.BackoffMax, "the edge is back", func() bool { return r.dir.Holds("edge1") && e.client.Ready() == nil })
		if w := r.log.lines("end=edge", "no session; trying again"); len(w) == 0 {
			t.Error("the edge does not log why it has no session")
		}
	})
}

// Who connects and does not become a session is hung up on, however far it comes.
func TestStrangersAreHungUpOn(t *testing.T) {
	handshakeAs := func(t *testing.T, r *rig, protocol string) net.Conn {
		raw, err := r.net.dial(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		c := tls.Client(raw, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{protocol}})
		if err := c.HandshakeContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		return c
	}
	handshake := func(t *testing.T, r *rig) net.Conn { return handshakeAs(t, r, "h2") }
	connect := func(t *testing.T, r *rig) net.Conn {
		c, err := r.net.dial(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	for name, tc := range map[string]struct {
		after    time.Duration
		approach func(t *testing.T, r *rig) net.Conn
	}{
		"TCP and silence": {listen.FirstByte, connect},
		"half a record of TLS": {joinTimeout, func(t *testing.T, r *rig) net.Conn {
			c := connect(t, r)
			c.Write([]byte{22})
			return c
		}},
		"TLS and silence": {joinTimeout, handshake},
		"a data connection and silence": {joinTimeout, func(t *testing.T, r *rig) net.Conn {
			return handshakeAs(t, r, DataProtocol)
		}},
		"TLS and HTTP/2, no stream": {joinTimeout, func(t *testing.T, r *rig) net.Conn {
			c := handshake(t, r)
			io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
			return c
		}},
	} {
		t.Run(name, func(t *testing.T) {
			onFakeClock(t, func(t *testing.T, r *rig) {
				start := time.Now()
				c := tc.approach(t, r)
				defer c.Close()
				io.Copy(io.Discard, c) // ends when the cloud hangs up
				if d := time.Since(start); d < tc.after || d > tc.after+time.Second {
					t.Errorf("hung up on after %s, want %s", d, tc.after)
				}
				if tc.after == listen.FirstByte { // else gRPC may hang up at the same moment
					r.wantLimited(tunnel.LimitJoinTimeout, 1)
				}
			})
		})
	}
	t.Run("control stream and no hello", func(t *testing.T) {
		onFakeClock(t, func(t *testing.T, r *rig) {
			start := time.Now()
			c := r.stranger().control(bearerOf("edge1"))
			if err := c.end(); status.Code(err) != codes.Unavailable && status.Code(err) != codes.InvalidArgument {
				t.Errorf("the stream ends with %v", err)
			}
			if d := time.Since(start); d > joinTimeout+time.Second {
				t.Errorf("hung up on after %s, want %s", d, joinTimeout)
			}
			testkit.Eventually(t, "it is counted", func() bool { return r.counters.JoinsRefused.Load() == 1 })
			if r.dir.Len() != 0 {
				t.Error("a stranger without hello has a session")
			}
		})
	})
	t.Run("refused and lingering", func(t *testing.T) {
		onFakeClock(t, func(t *testing.T, r *rig) {
			s := r.stranger()
			if err := s.control("").end(); status.Code(err) != codes.Unauthenticated {
				t.Errorf("got %v, want a refusal", err)
			}
			time.Sleep(2 * time.Second)
			synctest.Wait()
			if _, err := s.client.TunnelStreaming(s.ctx); status.Code(err) != codes.Unavailable {
				t.Errorf("the connection outlives its refusal: %v", err)
			}
		})
	})
}

// As many sources as there are places, each with a silent connection, keep an edge out for a second, and not longer.
func TestStrangersDoNotKeepEdgesOut(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		r.net.spread.Store(true)
		for range DefaultLimits().Joining {
			c, err := r.net.dial(t.Context(), "", "")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
		}
		late, err := r.net.dial(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		defer late.Close()
		late.SetReadDeadline(time.Now().Add(time.Millisecond))
		if _, err = late.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("another one gets a place at once: %v", err)
		}
		time.Sleep(time.Second)
		start := time.Now()
		r.join("edge1", direct)
		if d := time.Since(start); d > time.Second {
			t.Errorf("the edge has joined after %s", d)
		}
	})
}

// A few sources that hold all places do not keep an edge out, not even for a moment, whether
// they are silent or have begun a handshake.
func TestFewSourcesDoNotKeepEdgesOut(t *testing.T) {
	for name, spoken := range map[string]bool{"silent": false, "half a record of TLS": true} {
		t.Run(name, func(t *testing.T) {
			onFakeClock(t, func(t *testing.T, r *rig) {
				start := time.Now()
				const sources = 16
				for i := range sources * DefaultLimits().JoiningPerAddress {
					r.net.from.Store(&net.TCPAddr{IP: net.IPv4(192, 0, 2, byte(i%sources)), Port: 1})
					c, err := r.net.dial(t.Context(), "", "")
					if err != nil {
						t.Fatal(err)
					}
					defer c.Close()
					if spoken {
						c.Write([]byte{22})
					}
				}
				r.net.from.Store(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 1})
				r.join("edge1", direct)
				if d := time.Since(start); d > time.Second {
					t.Errorf("the edge has joined after %s", d)
				}
			})
		})
	}
}

// An edge from the address of an earlier edge joins at once, although every place for unknown
// sources is taken by a handshake of its own source, and another unknown connection came before.
func TestKnownAddressesHaveAPlace(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		known := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 1}
		r.net.from.Store(known)
		r.join("edge1", direct)
		r.net.from.Store(nil)
		r.net.spread.Store(true)
		for range DefaultLimits().Joining + 1 {
			c, err := r.net.dial(t.Context(), "", "")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			go c.Write([]byte{22})
		}
		start := time.Now()
		r.net.from.Store(known)
		r.join("edge2", direct)
		if d := time.Since(start); d > time.Second {
			t.Errorf("the edge has joined after %s", d)
		}
	})
}

// More connections of one source than may join at all do not keep another source out,
// not even for a moment: those that are too many for it are closed at once.
func TestOneSourceDoesNotKeepEdgesOut(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		start := time.Now()
		most := DefaultLimits().Joining + 500
		for range most {
			c, err := r.net.dial(t.Context(), "", "")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
		}
		r.net.spread.Store(true)
		r.join("edge1", direct)
		if d := time.Since(start); d > time.Second {
			t.Errorf("the edge has joined after %s", d)
		}
		if n := r.counters.JoinsRefused.Load(); n != uint64(most-DefaultLimits().JoiningPerAddress) {
			t.Errorf("%d connections are counted as refused, want %d", n, most-DefaultLimits().JoiningPerAddress)
		}
		if n := len(r.log.lines("level=WARN", "too many connections of one source")); n != 1 {
			t.Errorf("%d lines of warning, want 1", n)
		}
	})
}

// A stranger who is refused thousands of times writes ten lines a second, and they
// say from where, who he says he is, and why.
func TestRefusalsAreLoggedTenASecond(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		const rounds = 60
		for range rounds {
			s := r.stranger()
			if err := s.control("Bearer " + auth.EncodeToken("edge1", "guess")).end(); status.Code(err) != codes.Unauthenticated {
				t.Fatalf("got %v, want a refusal", err)
			}
			s.cc.Close()
		}
		if n := r.counters.JoinsRefused.Load(); n != rounds {
			t.Errorf("%d refusals are counted", n)
		}
		if n := len(r.log.lines("end=cloud")); n != 10 {
			t.Errorf("%d lines, want 10:\n%s", n, strings.Join(r.log.lines("end=cloud"), ""))
		}
		time.Sleep(time.Second)
		r.stranger().control("Bearer " + auth.EncodeToken("edge2", "guess")).end()
		if len(r.log.lines("level=WARN", "join refused", "remote=", "node=edge2", `err="the token is wrong"`, "skipped=50")) != 1 {
			t.Errorf("the next line does not count what was left out:\n%s", strings.Join(r.log.lines("edge2"), ""))
		}
	})
}

// A connection that has been refused once serves no further stream while its status
// leaves.
func TestOneRefusalPerConnection(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		s := r.stranger()
		if err := s.control("").end(); status.Code(err) != codes.Unauthenticated {
			t.Fatalf("got %v, want a refusal", err)
		}
		for range (maxEarlyStreams - 1) / 2 { // with more, the cloud hangs up at once
			if err := s.control(bearerOf("edge1")).end(); status.Code(err) != codes.Unavailable {
				t.Fatalf("a control stream: %v, want unavailable", err)
			}
			if _, err := s.connect("topic").Recv(); status.Code(err) != codes.Unavailable {
				t.Fatalf("a conn: %v, want unavailable", err)
			}
		}
		if n, m := r.counters.JoinsRefused.Load(), r.counters.Refusals(tunnel.WrongSession); n != 1 || m != 0 {
			t.Errorf("%d joins and %d conns refused, want 1 and 0", n, m)
		}
		if n := len(r.log.lines("end=cloud")); n != 1 {
			t.Errorf("%d lines in the log, want 1", n)
		}
	})
}

// A server that takes the connection and never answers does not hold the edge for
// ever, and the edge says what to look at.
func TestCloudThatDoesNotAnswer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRigOn(t, newMemNet())
		r.net.dead.Store(true)
		e := r.start(r.clientConfig("edge1"), direct)
		within(t, joinTimeout+time.Second, "the edge gives up", func() bool {
			return strings.Contains(e.client.Ready().Error(), "is that address the tunnel's gRPC port?")
		})
		attempts := func() int { return len(r.log.lines("end=edge", "no session; trying again")) }
		before := attempts()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		// An attempt takes 10 s and the wait after it 5 s on average.
		if n := attempts() - before; n < 25 || n > 55 {
			t.Errorf("%d attempts in 10 minutes; want about 40", n)
		}
		r.net.dead.Store(false)
		within(t, time.Minute, "the edge joins when the cloud answers", func() bool { return e.client.Ready() == nil })
	})
}

// An edge that was refused goes on trying, slowly, and joins once its token is good.
func TestRefusedEdgeTriesSlowly(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		cfg := r.clientConfig("edge1")
		token := make(chan auth.Secret, 1)
		token <- "wrong"
		cfg.Token = tokenFunc(func() (auth.Secret, error) {
			now := <-token
			token <- now
			return now, nil
		})
		e := r.start(cfg, direct)
		time.Sleep(time.Hour)
		if n := r.counters.JoinsRefused.Load(); n < 12 || n > 30 {
			t.Errorf("%d attempts in an hour; want one every 5 minutes or a little more", n)
		}
		<-token
		token <- "token-edge1"
		within(t, tunnel.BackoffRefusedMax+time.Minute, "the edge joins with the right token", func() bool { return e.client.Ready() == nil })
	})
}

// A cloud that is down is tried again soon, and a session that lasted makes the next
// attempt soon again.
func TestCloudDownAndUp(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		e := r.join("edge1", direct)
		for range 3 {
			r.running.Stop()
			within(t, time.Second, "the edge notices", func() bool { return e.client.Ready() != nil })
			time.Sleep(5 * time.Minute)
			if err := e.client.Ready(); err == nil || !strings.Contains(err.Error(), "is the cloud running") {
				t.Errorf("while the cloud is down, Ready says %v", err)
			}
			r.serve()
			within(t, tunnel.BackoffMax+time.Second, "the edge is back", func() bool { return e.client.Ready() == nil })
			time.Sleep(time.Minute)
		}
		r.dir.Lookup("edge1").Close(errors.New("cut by the test"))
		within(t, tunnel.BackoffMin+100*time.Millisecond, "after a minute of peace the edge is back at once", func() bool {
			return r.counters.Sessions.Load() == 5
		})
	})
}

// The edge's heartbeats tell both ends how long a round trip takes.
func TestHeartbeat(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		r.net.delay.Store(int64(40 * time.Millisecond))
		e := r.join("edge1", direct)
		time.Sleep(3 * heartbeatInterval)
		for end, s := range map[string]*tunnel.Session{"cloud": r.dir.Lookup("edge1"), "edge": e.client.Session()} {
			if rtt := time.Duration(s.RTT.Load()); rtt < 80*time.Millisecond || rtt > 160*time.Millisecond {
				t.Errorf("the %s thinks that the round trip takes %s, want 80 ms", end, rtt)
			}
		}
	})
}

// A session lives while something comes from the other side, however late its heartbeats are
// answered: over a slow link they wait behind everything else.
func TestLateHeartbeats(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		e := r.join("edge1", direct)
		first := e.client.Session()
		r.net.delay.Store(int64(5200 * time.Millisecond)) // of every write, so that an answer takes more than 10 s
		time.Sleep(10 * time.Minute)
		r.net.delay.Store(0)
		time.Sleep(heartbeatInterval)
		if e.client.Session() != first || r.counters.Sessions.Load() != 1 {
			t.Errorf("there have been %d sessions:\n%s", r.counters.Sessions.Load(), r.log.lines("session ended"))
		}
	})
}

// A download whose bytes wait on their way for nearly as long as the cloud does lets the session
// live: heartbeats wait for no echo.
func TestHeartbeatsBesideDeepQueue(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		r.net.queue.Store(1)
		e := r.join("edge1", direct)
		first := e.client.Session()
		cs := r.cloudEnd("edge1")
		const depth = 14 * time.Second
		for range 600 {
			if !tunnel.IsClosed(cs.done) {
				cs.post(&tunnel.Message{Category: "test", Type: "bulk"})
			}
			if d := time.Duration(r.net.queue.Load()); d < depth {
				r.net.queue.Store(int64(d + time.Second/2))
			}
			time.Sleep(time.Second)
		}
		if e.client.Session() != first || r.counters.Sessions.Load() != 1 {
			t.Errorf("there have been %d sessions:\n%s", r.counters.Sessions.Load(), r.log.lines("session ended"))
		}
		if rtt := time.Duration(first.RTT.Load()); rtt < depth || rtt > depth+time.Second {
			t.Errorf("the edge thinks that the round trip takes %s, want %s", rtt, depth)
		}
	})
}

// A process that was stopped for long reads what has come meanwhile before it gives a session up.
func TestSessionAfterFreeze(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		e := r.join("edge1", direct)
		first := e.client.Session()
		es, cs := first.Link.(*edgeSession), r.cloudEnd("edge1")
		time.Sleep(time.Minute)
		for _, s := range []*session{&es.session, &cs.session} {
			s.own.heard.Add(-int64(20 * time.Second)) // the timer is the first to go on
			s.watchSilence()
		}
		sent := time.Now().Add(-2 * stuckAfter)
		es.mu.Lock()
		es.beats = []time.Time{sent}
		es.mu.Unlock()
		es.post(message(typeHeartbeat, "", &pb.Heartbeat{Sent: sent.UnixNano()})) // its echo is as if it had waited
		time.Sleep(time.Minute)
		if e.client.Session() != first || r.counters.Sessions.Load() != 1 {
			t.Errorf("there have been %d sessions:\n%s", r.counters.Sessions.Load(), r.log.lines("session ended"))
		}
	})
}

// A session whose connection takes no more streams, since HTTP/2 has no ids left, makes room for
// one whose connection does.
func TestNoMoreStreams(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		near, far := net.Pipe()
		defer near.Close()
		e := r.join("edge1", func(context.Context, tunnel.Request) (net.Conn, error) { return far, nil })
		first := e.client.Session()
		// gRPC then asks for another connection, and does not get it: see connect.
		gone, err := grpc.NewClient("passthrough:///cloud", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
				return nil, errors.New("the session's connection has closed")
			}))
		if err != nil {
			t.Fatal(err)
		}
		defer gone.Close()
		first.Link.(*edgeSession).client = pb.NewStreamClient(gone)
		if _, err := r.dial("edge1", "target:1"); err == nil {
			t.Fatal("a conn is open without a stream")
		}
		within(t, tunnel.BackoffMax, "a new session takes its place", func() bool {
			s := e.client.Session()
			return s != nil && s != first && r.dir.Holds("edge1")
		})
		r.mustDial("edge1", "target:1")
	})
}

// A cloud that answers pings but no heartbeat is stuck: the edge looks for another.
func TestCloudThatAnswersNoHeartbeat(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		e := r.join("edge1", direct)
		s := r.dir.Lookup("edge1").Link.(*cloudSession)
		time.Sleep(heartbeatInterval + time.Second)
		s.mu.Lock() // stops the cloud from handling anything that needs the session
		first := e.client.Session()
		s.mu.Unlock()
		es := first.Link.(*edgeSession)
		es.mu.Lock()
		es.beats = []time.Time{time.Now().Add(-stuckAfter)} // as if this one had been lost
		es.mu.Unlock()
		within(t, heartbeatInterval+time.Second, "the session ends", func() bool { return tunnel.IsClosed(es.done) })
		if err := es.reason(); err == nil || !strings.Contains(err.Error(), "heartbeat") {
			t.Errorf("the session ended with %v", err)
		}
		within(t, tunnel.BackoffMax, "a new one takes its place", func() bool {
			s := e.client.Session()
			return s != nil && s != first
		})
	})
}

// A target that does not answer is a timeout for the caller, whatever error the
// module makes of it.
func TestTargetThatDoesNotAnswer(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		r.join("edge1", func(ctx context.Context, _ tunnel.Request) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		})
		start := time.Now()
		_, err := r.dir.Dial(t.Context(), tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "silent:1"})
		if err == nil || tunnel.CodeOf(err) != tunnel.Timeout || !strings.Contains(err.Error(), "silent:1") {
			t.Errorf("got %v, want a timeout that names the target", err)
		}
		if d := time.Since(start); d < dialTimeout || d > dialTimeout+time.Second {
			t.Errorf("after %s, want %s", d, dialTimeout)
		}
		if r.counters.Refusals(tunnel.Timeout) != 1 || r.edges.Refusals(tunnel.Timeout) != 1 {
			t.Error("the timeout is not counted at both ends")
		}
	})
}

// An edge that does not answer at all costs the caller its own deadline and no more.
func TestEdgeThatDoesNotAnswer(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		c := r.stranger().join("edge1")
		start := time.Now()
		open, result := r.sentOpen(c, "edge1")
		d := <-result
		if d.err == nil || tunnel.CodeOf(d.err) != tunnel.Timeout {
			t.Errorf("got %v, want a timeout", d.err)
		}
		if since := time.Since(start); since != patience {
			t.Errorf("after %s, want the caller's own deadline of %s", since, patience)
		}
		if m := c.want("the edge is told that nobody waits", typeCancel); m.GetTopic() != open.GetTopic() {
			t.Error("another topic is cancelled")
		}
		r.idle()
	})
}

// A stopping edge lets its conns finish within the grace period and not longer.
func TestEdgeStopsWithinItsGrace(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		near, far := net.Pipe()
		defer near.Close()
		e := r.join("edge1", func(context.Context, tunnel.Request) (net.Conn, error) { return far, nil })
		c := r.mustDial("edge1", "target:1")
		start := time.Now()
		e.Stop()
		if d := time.Since(start); d < patience || d > patience+2*time.Second {
			t.Errorf("the edge stops after %s although a conn lives; want its grace of %s", d, patience)
		}
		_, err := c.Read(make([]byte, 1))
		wantErr(t, "the conn that was cut off", err, syscall.ECONNRESET)
	})
}

// A stopping cloud does too.
func TestCloudStopsWithinItsGrace(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		near, far := net.Pipe()
		defer near.Close()
		r.join("edge1", func(context.Context, tunnel.Request) (net.Conn, error) { return far, nil })
		c := r.mustDial("edge1", "target:1")
		start := time.Now()
		r.running.Stop()
		if d := time.Since(start); d < patience || d > patience+3*time.Second {
			t.Errorf("the cloud stops after %s although a conn lives; want its grace of %s", d, patience)
		}
		_, err := c.Read(make([]byte, 1))
		wantErr(t, "the conn that was cut off", err, syscall.ECONNRESET)
	})
}
