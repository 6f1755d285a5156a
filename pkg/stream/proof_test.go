package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/auth"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// pipeTarget dials one end of a pipe and returns the other.
func pipeTarget(t *testing.T) (net.Conn, tunnel.DialFunc) {
	near, far := net.Pipe()
	t.Cleanup(func() { near.Close() })
	return near, func(context.Context, tunnel.Request) (net.Conn, error) { return far, nil }
}

// echo checks that a conn carries bytes.
func echo(t *testing.T, what string, from io.Writer, to io.Reader) {
	t.Helper()
	go from.Write([]byte("still here"))
	if _, err := io.ReadFull(to, make([]byte, 10)); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// An edge whose token file changes tells the cloud, and its session goes on when the old
// token is withdrawn.
func TestTokenChanges(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		far, dial := pipeTarget(t)
		var token atomic.Value
		token.Store(auth.Secret("token-edge1"))
		cfg := r.clientConfig("edge1")
		cfg.Token = tokenFunc(func() (auth.Secret, error) { return token.Load().(auth.Secret), nil })
		r.joinWith(cfg, dial)
		c := r.mustDial("edge1", "target:1")
		time.Sleep(time.Hour)
		if n := r.auth.asked.Load(); n != 1 {
			t.Errorf("a token that does not change is looked at %d times", n)
		}
		token.Store(auth.Secret("next-edge1"))
		within(t, tokenInterval+time.Second, "the cloud takes the new token", func() bool {
			return len(r.log.lines("end=cloud", "the session has a new proof", "node=edge1")) == 1
		})
		r.auth.revoke("edge1") // the old one
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := r.auth.live.Load(); n != 1 {
			t.Errorf("%d grants are remembered, want 1", n)
		}
		echo(t, "the conn that was open all the time", c, far)
		if n := r.counters.Sessions.Load(); n != 1 {
			t.Errorf("%d sessions, want 1", n)
		}
		// It says so every minute, for a cloud that learns late; this one knows.
		if n := r.auth.asked.Load(); n != 2 {
			t.Errorf("tokens were looked at %d times, want 2", n)
		}
		r.dir.Lookup("edge1").Close(errors.New("cut by the test"))
		within(t, time.Minute, "the session that has ended is forgotten", func() bool {
			return r.counters.Sessions.Load() == 2 && r.auth.live.Load() == 1
		})
	})
}

// A token that changes back is told as any other change.
func TestTokenChangesBack(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		var token atomic.Value
		token.Store(auth.Secret("token-edge1"))
		cfg := r.clientConfig("edge1")
		cfg.Token = tokenFunc(func() (auth.Secret, error) { return token.Load().(auth.Secret), nil })
		r.joinWith(cfg, direct)
		for i, next := range []auth.Secret{"next-edge1", "token-edge1"} {
			token.Store(next)
			within(t, tokenInterval+time.Second, "the cloud takes it", func() bool {
				return len(r.log.lines("end=cloud", "the session has a new proof")) == i+1
			})
		}
	})
}

// What happens to a proof that another one has replaced does not concern the session, not
// even in the moment before the session's goroutine hears of the change.
func TestReplacedProofIsRevoked(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &cloudSession{proven: make(chan struct{}, 1)}
		s.pub = new(tunnel.Session)
		s.init()
		first, second := make(chan struct{}), make(chan struct{})
		s.standOn(&proof{grant: auth.Grant{Revoked: first}, release: func() {}})
		s.wg.Go(func() { s.endWhenExpiredOrRevoked(false) })
		synctest.Wait()
		s.proof.Store(&proof{grant: auth.Grant{Revoked: second}, release: func() {}}) // and says nothing
		close(first)
		time.Sleep(time.Second)
		if tunnel.IsClosed(s.done) {
			t.Error("the session has ended with its old proof")
		}
		s.proven <- struct{}{}
		close(second)
		s.wg.Wait()
		if !errors.Is(s.reason(), errRevoked) {
			t.Errorf("it ends with %v", s.reason())
		}
	})
}

// A token file that cannot be read for a while costs a session nothing.
func TestTokenGoneForAWhile(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		var gone atomic.Bool
		cfg := r.clientConfig("edge1")
		cfg.Token = tokenFunc(func() (auth.Secret, error) {
			if gone.Load() {
				return "", errors.New("no file")
			}
			return "token-edge1", nil
		})
		e := r.joinWith(cfg, direct)
		gone.Store(true)
		time.Sleep(3*time.Hour - time.Minute)
		if n := len(r.log.lines("end=edge", "level=WARN", "cannot read the token", "no file")); n != 3 {
			t.Errorf("%d warnings in three hours, want 3", n)
		}
		if e.client.Ready() != nil || r.counters.Sessions.Load() != 1 {
			t.Error("the session has ended")
		}
	})
}

// A token that is not good, or good for another node, changes nothing, and the log says so.
func TestCredentialIgnored(t *testing.T) {
	for name, c := range map[string]struct{ token, logs string }{
		"wrong":             {auth.EncodeToken("edge1", "s3cret"), "the token is wrong"},
		"of another node":   {auth.EncodeToken("edge2", "token-edge2"), "it is that of node edge2"},
		"garbage":           {"s3cret", "no usable token"},
		"nothing":           {"", "no usable token"},
		"the one there was": {auth.EncodeToken("edge1", "token-edge1"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			s := r.stranger().join("edge1")
			s.say(typeCredential, "", &pb.Credential{AccessToken: c.token})
			s.say(typeHeartbeat, "", &pb.Heartbeat{Sent: 1})
			s.want("the session goes on", typeHeartbeat)
			if c.logs != "" {
				r.eventually("it is in the log", func() bool {
					return len(r.log.lines("level=WARN", "new credential ignored", "node=edge1", c.logs)) == 1
				})
			}
			if len(r.log.lines("new proof")) != 0 || len(r.log.lines("s3cret")) != 0 {
				t.Errorf("it has changed something, or is in the log:\n%s", strings.Join(r.log.lines(), ""))
			}
			r.auth.revoke("edge1")
			if err := s.end(); status.Code(err) != codes.Unauthenticated {
				t.Errorf("the session does not stand on its first token any more: %v", err)
			}
		})
	}
}

// An edge that says one credential after the other has a few looked at, and its session
// goes on.
func TestCredentialFlood(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		s := r.stranger().join("edge1")
		for i := range 100 {
			s.say(typeCredential, "", &pb.Credential{AccessToken: auth.EncodeToken("edge1", auth.Secret(fmt.Sprint("guess", i)))})
		}
		s.say(typeHeartbeat, "", &pb.Heartbeat{Sent: 1})
		s.want("the session goes on", typeHeartbeat)
		synctest.Wait()
		if n := r.auth.asked.Load(); n > renewBurst+1 {
			t.Errorf("%d credentials were looked at", n)
		}
	})
}

// A panic while a new credential is looked at ends that session and no other.
func TestCredentialPanic(t *testing.T) {
	r := newRig(t)
	r.panics = 1
	r.join("edge2", direct)
	s := r.stranger().join("edge1")
	r.auth.panics.Store(true)
	s.say(typeCredential, "", &pb.Credential{AccessToken: auth.EncodeToken("edge1", "next-edge1")})
	if err := s.end(); err == nil {
		t.Error("the session goes on")
	}
	r.eventually("the node is gone", func() bool { return !r.dir.Holds("edge1") })
	if !r.dir.Holds("edge2") {
		t.Error("another session ended with it")
	}
}

// A token with an end ends its session then, unless another one has taken its place.
func TestTokenExpires(t *testing.T) {
	bubble(t, func(t *testing.T) {
		expires := " expires=" + time.Now().Add(2*time.Hour).UTC().Format(time.RFC3339)
		a := newRegistry(t, nodeCA(t), "edge1:token-edge1"+expires, "edge1:next-edge1", "edge2:token-edge2"+expires)
		r := newRigOn(t, newMemNet(), a.serve)
		first := r.stranger().join("edge1")
		second := r.stranger().join("edge2")
		first.say(typeCredential, "", &pb.Credential{AccessToken: auth.EncodeToken("edge1", "next-edge1")})
		start := time.Now()
		if err := second.end(); status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), "has expired") {
			t.Errorf("the session ends with %v", err)
		}
		if d := time.Since(start); d < 2*time.Hour-time.Second || d > 2*time.Hour+time.Second {
			t.Errorf("it ends after %s, want 2 hours", d)
		}
		time.Sleep(time.Hour)
		if !r.dir.Holds("edge1") {
			t.Error("the one with a new token has ended, too")
		}
	})
}

// An edge whose clock stands behind does not know that its certificate ends soon: the cloud asks it to renew.
func TestLateCertificate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		a := newRegistry(t, nodeCA(t))
		r := newRigOn(t, newMemNet(), a.serve)
		var asked []time.Time
		cfg, began := r.certified("edge1", hold(a.certificate("edge1"))), time.Now()
		cfg.AskedToRenew = func(time.Duration) { asked = append(asked, time.Now()) }
		r.joinWith(cfg, direct)
		time.Sleep(a.ttl - 2*clockStep)
		r.cloudEnd("edge1").Close(errors.New("the test ends"))
		if len(asked) < 2 || asked[0].Before(began.Add(a.ttl*3/4-clockStep)) || asked[0].After(began.Add(a.ttl*3/4+2*clockStep)) ||
			asked[1].Sub(asked[0]) < askAgain {
			t.Errorf("the certificate began at %v and lives for %v, asked at %v", began, a.ttl, asked)
		}
	})
}

// A renewed certificate takes the place of the old one in the session, with no break of
// what runs.
func TestRenew(t *testing.T) {
	bubble(t, func(t *testing.T) {
		a := newRegistry(t, nodeCA(t))
		r := newRigOn(t, newMemNet(), a.serve)
		far, dial := pipeTarget(t)
		h := hold(a.certificate("edge1"))
		e := r.joinWith(r.certified("edge1", h), dial)
		c := r.mustDial("edge1", "target:1")
		for range 5 {
			time.Sleep(a.ttl * 2 / 3)
			key, request, err := auth.NewRequest("edge1")
			if err != nil {
				t.Fatal(err)
			}
			chain, _, err := e.client.Renew(t.Context(), request)
			if err != nil {
				t.Fatal(err)
			}
			next := certificateOf(t, chain, key)
			h.Store(&next)
			echo(t, "the conn that was open all the time", c, far)
		}
		if n := r.counters.Sessions.Load(); n != 1 {
			t.Errorf("%d sessions, want 1", n)
		}
		if n := len(r.log.lines("end=cloud", "certificate issued", "node=edge1")); n != 5 {
			t.Errorf("%d certificates are in the log, want 5", n)
		}
		e.client.Session().Close(errors.New("cut by the test"))
		r.eventually("it comes back with the last one", func() bool { return r.counters.Sessions.Load() == 2 && e.client.Ready() == nil })
		time.Sleep(a.ttl + time.Minute)
		if r.dir.Holds("edge1") {
			t.Error("the session outlives its last certificate")
		}
	})
}
