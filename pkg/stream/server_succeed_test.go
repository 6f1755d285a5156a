package stream

import (
	"context"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// answers checks that a conn still passes bytes.
func answers(t *testing.T, what string, c, far net.Conn) {
	t.Helper()
	go far.Write([]byte("x"))
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

// succeed starts the process of an edge that takes over from another one.
func (r *rig) succeed(from *edge) *edge {
	r.t.Helper()
	before := r.dir.Lookup("edge1")
	cfg := r.clientConfig("edge1")
	cfg.Instance, cfg.Succeeds = from.client.Instance(), func() bool { return true }
	e := r.start(cfg, direct)
	r.eventually("the new process joins", func() bool {
		return e.client.Ready() == nil && r.dir.Lookup("edge1") != before
	})
	return e
}

// The session of a new process leaves the conns of the old process alone. When the new process ends early, the old
// session takes dials again.
func TestSuccession(t *testing.T) {
	r := newRig(t)
	old := r.join("edge1", direct)
	c, far := r.pair("edge1")
	first := r.dir.Lookup("edge1")

	failed := r.succeed(old)
	answers(t, "the conn of the old process", c, far)
	failed.Stop()
	r.eventually("the old session takes dials again", func() bool { return r.dir.Lookup("edge1") == first })
	if _, err := r.dial("edge1", "127.0.0.1:1"); tunnel.CodeOf(err) != tunnel.Refused {
		t.Errorf("a dial through the old session: %v, want the target's refusal", err)
	}

	next := r.succeed(old)
	c2, far2 := r.pair("edge1")
	answers(t, "a conn of the new process", c2, far2)
	answers(t, "the conn of the old process", c, far)
	c.Close()
	far.Close()
	old.Stop()
	answers(t, "the conn of the new process, after the end of the old one", c2, far2)
	if n := r.counters.Replaced.Load(); n != 0 {
		t.Errorf("%d sessions were replaced", n)
	}
	c2.Close()
	far2.Close()
	r.idle(next)
}

// Once another process takes over, the old process opens no session, also if its sessions end. Its session would replace
// that of the new process.
func TestPause(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		old := r.join("edge1", direct)
		c, far := r.pair("edge1")
		old.client.Pause()
		answers(t, "the conn of the old process", c, far)
		r.cloudEnd("edge1").Close(nil)
		r.eventually("the session of the old process ends", func() bool { return old.client.Ready() != nil })
		next := r.succeed(old)
		now := r.dir.Lookup("edge1")
		time.Sleep(time.Hour)
		if r.dir.Lookup("edge1") != now || old.client.Session() != nil {
			t.Error("the old process has opened another session")
		}
		next.Stop()
		old.client.Resume()
		r.eventually("the old process joins again", func() bool { return old.client.Ready() == nil })
		c.Close()
		far.Close()
		r.idle(old)
	})
}

// Pause ends an attempt that is under way.
func TestPauseEndsAttempt(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		cfg := r.clientConfig("edge1")
		dials, join := 0, cfg.Dial
		cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if dials++; dials == 1 {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return join(ctx, network, addr)
		}
		e := r.start(cfg, direct)
		synctest.Wait()
		e.client.Pause()
		time.Sleep(time.Hour)
		if dials != 1 || e.client.Ready() == nil {
			t.Errorf("%d dials, %v", dials, e.client.Ready())
		}
		began := time.Now()
		e.client.Resume()
		r.eventually("the edge joins", func() bool { return e.client.Ready() == nil })
		if took := time.Since(began); took > time.Second {
			t.Errorf("after Resume, the edge joins after %v", took)
		}
		r.idle(e)
	})
}

// A restart of an edge that fails leaves the session of the old process alone for good.
func TestFailedSuccession(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		old := r.join("edge1", direct)
		first := r.dir.Lookup("edge1")
		r.succeed(old).Stop()
		r.eventually("the old session takes dials again", func() bool { return r.dir.Lookup("edge1") == first })
		time.Sleep(2 * successionTime)
		if r.dir.Lookup("edge1") != first || tunnel.IsClosed(first.Done()) {
			t.Error("the old session has ended")
		}
	})
}

// attached returns the session of edge1 that has been attached after another one.
func (r *rig) attached(after *tunnel.Session) *tunnel.Session {
	r.t.Helper()
	r.eventually("another session is attached", func() bool {
		now := r.dir.Lookup("edge1")
		return now != nil && now != after
	})
	return r.dir.Lookup("edge1")
}

// The new process of an edge joins again before the cloud notices that its first session is lost, and then fails.
// The session of the old process takes dials again, for good.
func TestFailedSuccessionOfTwoSessions(t *testing.T) {
	for name, inOrder := range map[string]bool{"the first session ends first": true, "the second session ends first": false} {
		t.Run(name, func(t *testing.T) {
			onFakeClock(t, func(t *testing.T, r *rig) {
				old := r.join("edge1", direct)
				first := r.dir.Lookup("edge1")
				hello := &pb.Hello{Version: Version, Instance: old.client.Instance(), Succeeds: true}
				one, two := r.stranger(), r.stranger()
				one.joinWith("edge1", hello)
				second := r.attached(first)
				two.joinWith("edge1", hello)
				third := r.attached(second)
				ends := []func(){
					func() { one.cc.Close(); <-second.Done() },
					func() { two.cc.Close(); <-third.Done() },
				}
				if !inOrder {
					ends[0], ends[1] = ends[1], ends[0]
				}
				ends[0]()
				synctest.Wait()
				ends[1]()
				r.eventually("the old session takes dials again", func() bool { return r.dir.Lookup("edge1") == first })
				time.Sleep(2 * successionTime)
				if r.dir.Lookup("edge1") != first || tunnel.IsClosed(first.Done()) {
					t.Error("the old session has ended")
				}
			})
		})
	}
}

// The new process of an edge joins twice, and its first session is lost. It goes on, and the session of the old process
// ends after a while.
func TestSuccessionOfTwoSessions(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		old := r.join("edge1", direct)
		first := r.dir.Lookup("edge1")
		hello := &pb.Hello{Version: Version, Instance: old.client.Instance(), Succeeds: true}
		one := r.stranger()
		one.joinWith("edge1", hello)
		second := r.attached(first)
		r.stranger().joinWith("edge1", hello)
		third := r.attached(second)
		one.cc.Close()
		<-second.Done()
		r.stranger().joinWith("edge1", hello)
		fourth := r.attached(third)
		time.Sleep(successionTime + time.Second)
		if !tunnel.IsClosed(first.Done()) || !tunnel.IsClosed(third.Done()) || tunnel.IsClosed(fourth.Done()) {
			t.Errorf("the sessions have ended: %t, %t, %t; want all but the last",
				tunnel.IsClosed(first.Done()), tunnel.IsClosed(third.Done()), tunnel.IsClosed(fourth.Done()))
		}
	})
}

// However often a restart of the cloud fails, a session whose conns go on stays, and the ended ones are forgotten.
func TestManyFailedMoves(t *testing.T) {
	r := newRig(t)
	hello := &pb.Hello{Version: Version, Instance: "a"}
	r.stranger().joinWith("edge1", hello)
	first := r.attached(nil)
	newest := first
	var last *stranger
	for range maxPredecessors + 2 {
		nodes := r.server.Move()
		r.server.Stay(nodes)
		before, ended := last, newest
		last = r.stranger()
		last.joinWith("edge1", hello)
		newest = r.attached(newest)
		if before != nil {
			before.cc.Close()
			<-ended.Done()
		}
	}
	if tunnel.IsClosed(first.Done()) {
		t.Error("the session whose conns go on has ended")
	}
	kept := 0
	for s := newest.Link.(*cloudSession).predecessor.Load(); s != nil; s = s.predecessor.Load() {
		kept++
	}
	if kept > 2 { // the first session, and the one that has ended last
		t.Errorf("%d sessions are kept", kept)
	}
}

// Edges that come back after the cloud has told them to move keep the conns of their old session.
func TestStay(t *testing.T) {
	r := newRig(t)
	e := r.join("edge1", direct)
	c, far := r.pair("edge1")
	first := r.dir.Lookup("edge1")
	nodes := r.server.Move()
	r.server.Stay(nodes)
	r.eventually("the edge opens another session", func() bool {
		now := r.dir.Lookup("edge1")
		return now != nil && now != first
	})
	answers(t, "the conn of the old session", c, far)
	c2, far2 := r.pair("edge1")
	answers(t, "a conn of the new session", c2, far2)
	for _, conn := range []net.Conn{c, far, c2, far2} {
		conn.Close()
	}
	r.idle(e)
}

// Who does not say that it succeeds a session, or names another instance, ends that session. A node has a few sessions
// at most.
func TestNoSuccession(t *testing.T) {
	for name, hello := range map[string]*pb.Hello{
		"it does not say so": {Version: Version, Instance: "a"},
		"another instance":   {Version: Version, Instance: "b", Succeeds: true},
	} {
		r := newRig(t)
		old := r.stranger().joinWith("edge1", &pb.Hello{Version: Version, Instance: "a"})
		r.stranger().joinWith("edge1", hello)
		if err := old.end(); status.Code(err) != codes.Aborted {
			t.Errorf("%s: the old session ends with %v, want aborted", name, err)
		}
	}
	r := newRig(t)
	hello := &pb.Hello{Version: Version, Instance: "a", Succeeds: true}
	oldest := r.stranger().joinWith("edge1", hello)
	for range maxPredecessors + 1 {
		r.stranger().joinWith("edge1", hello)
	}
	if err := oldest.end(); status.Code(err) != codes.Aborted {
		t.Errorf("the oldest of too many sessions ends with %v, want aborted", err)
	}
}
