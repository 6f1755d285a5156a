package stream

import (
	"crypto/tls"
	"errors"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The audit has each join, each refused one and each end of a session; and a dial to any node says which node
// was chosen.
func TestAudit(t *testing.T) {
	seen := new(testkit.Trail[tunnel.Event])
	r := newRig(t, func(cfg *ServerConfig) { cfg.Audit = seen.Record })
	e := r.join("edge1", direct)
	chosen := new(tunnel.NodeName)
	c, err := r.dir.Dial(t.Context(), tunnel.Request{
		Category: "tcp", Network: "tcp", Addr: testkit.Serve(t, testkit.Echo), Chosen: chosen,
	})
	if err != nil || *chosen != "edge1" {
		t.Fatalf("chosen is %q, %v", *chosen, err)
	}
	tunnel.Reset(c)
	e.Stop()
	testkit.Eventually(t, "the session has ended", func() bool { return len(seen.All()) == 2 })
	join, leave := seen.All()[0], seen.All()[1]
	if join.Kind != tunnel.EventJoin || join.Result != "ok" || join.Node != "edge1" || join.By != "token" ||
		join.Remote == "" || join.Session == "" {
		t.Errorf("the join is %+v", join)
	}
	if leave.Kind != tunnel.EventLeave || leave.Node != "edge1" || leave.Session != join.Session || leave.Seconds <= 0 || leave.Err != "" {
		t.Errorf("the end is %+v", leave)
	}
	cfg := r.clientConfig("edge2")
	cfg.Token = auth.StaticToken("wrong")
	r.start(cfg, direct)
	testkit.Eventually(t, "the refused join", func() bool { return len(seen.All()) == 3 })
	if e := seen.All()[2]; e.Kind != tunnel.EventJoin || e.Result != "denied" || e.Node != "" || e.Caller != "edge2" ||
		e.Err != "the token is wrong" {
		t.Errorf("the refused join is %+v", e)
	}
}

// Strangers cause a few events a minute, and the next one counts the others. A fault of the cloud is no denial,
// and strangers cannot hide it.
func TestAuditOfRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seen := new(testkit.Trail[tunnel.Event])
		log, _ := testkit.NewLog()
		s, err := NewServer(ServerConfig{Audit: seen.Record, Log: log, TLS: new(tls.Config)}, new(tunnel.Directory))
		if err != nil {
			t.Fatal(err)
		}
		here, there := net.Pipe()
		defer here.Close()
		defer there.Close()
		stranger := &transport{conn: &joiningConn{Conn: here}}
		for range 100 {
			s.refused(t.Context(), stranger, &refusedJoin{told: uniform(), err: errors.New("the token is wrong")})
		}
		s.refused(t.Context(), stranger, &refusedJoin{
			told: status.Error(codes.Unavailable, "later"), err: errors.New("no CA"), node: "edge1",
		})
		s.refused(t.Context(), stranger, &refusedJoin{told: uniform(), what: certificateRefused})
		time.Sleep(time.Minute)
		s.refused(t.Context(), stranger, &refusedJoin{told: status.Error(codes.InvalidArgument, "no hello")})
		all := seen.All()
		if len(all) != auditedRefusals+3 {
			t.Fatalf("%d events: %+v", len(all), all)
		}
		if e := all[auditedRefusals]; e.Result != "internal" || e.Err != "no CA" || e.Caller != "edge1" {
			t.Errorf("the fault of the cloud is %+v", e)
		}
		if e := all[auditedRefusals+1]; e.Kind != tunnel.EventIssue || e.Result != "denied" {
			t.Errorf("the refused certificate is %+v", e)
		}
		if e := all[auditedRefusals+2]; e.Result != "bad-request" || e.Skipped != 100-auditedRefusals {
			t.Errorf("the join a minute later is %+v", e)
		}
	})
}
