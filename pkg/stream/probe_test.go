package stream

import (
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
)

// client makes a client that does not run.
func (r *rig) client(cfg ClientConfig) *Client {
	r.t.Helper()
	c, err := NewClient(cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// A node that asks is told the cloud's time and the node's live session. The session continues, and the cloud
// counts and logs nothing.
func TestProbe(t *testing.T) {
	r := newRig(t)
	prober := r.client(r.clientConfig("edge1"))
	a, err := prober.Probe(t.Context())
	if err != nil || a.Session != "" || a.Software != "test" || time.Since(a.Time).Abs() > patience {
		t.Fatalf("without a session: %+v, %v", a, err)
	}
	e := r.join("edge1", nil)
	live := r.dir.Lookup("edge1")
	if a, err = prober.Probe(t.Context()); err != nil || a.Session != live.ID || a.Remote != live.Remote ||
		a.Since.UnixMilli() != live.Since.UnixMilli() {
		t.Errorf("with a session: %+v, %v; want %s from %s", a, err, live.ID, live.Remote)
	}
	if r.dir.Lookup("edge1") != live || e.client.Ready() != nil || r.counters.Sessions.Load() != 1 {
		t.Error("the question has ended the session, or has opened one")
	}
	if n := r.counters.JoinsRefused.Load(); n != 0 || len(r.log.lines("join refused", "level=WARN")) != 0 {
		t.Errorf("the question counts as a refused join (%d)", n)
	}
}

// A node that may not join gets the same answer as at a join, with the next step apart.
func TestProbeRefused(t *testing.T) {
	r := newRig(t)
	cfg := r.clientConfig("edge1")
	cfg.Token = auth.StaticToken("wrong")
	_, err := r.client(cfg).Probe(t.Context())
	hinted, ok := err.(*Hinted) //nolint:errorlint // Probe itself has made it
	if status.Code(err) != codes.Unauthenticated || !ok || !strings.Contains(hinted.Hint, "token file") ||
		strings.Contains(hinted.Err.Error(), hinted.Hint) {
		t.Errorf("a wrong token: %v", err)
	}
	if r.counters.JoinsRefused.Load() != 1 {
		t.Error("the wrong token is not counted")
	}
	if _, err = answerOf(nil, ""); err == nil {
		t.Error("a message is taken for an answer")
	}
	if a, err := answerOf(status.Error(codes.FailedPrecondition, "an older cloud"), ""); err != nil || a != (Answer{}) {
		t.Errorf("an older cloud: %+v, %v", a, err)
	}
	if _, err := answerOf(withReason(codes.FailedPrecondition, "OTHER", "no"), ""); err == nil {
		t.Error("a refusal for another reason is taken for an answer")
	}
	err = withFacts(codes.FailedPrecondition, reasonProbed, "", map[string]string{"version": "9", "software": "v9"})
	if _, err = answerOf(err, ""); err == nil || !strings.Contains(err.Error(), "release of the cloud (v9)") {
		t.Errorf("a cloud of another version: %v", err)
	}
}

// A balancer that ends TLS on both sides passes a token on, and is noticed by the answer, or by the lack of one.
func TestProbeThroughBalancer(t *testing.T) {
	for name, losesTrailers := range map[string]bool{"whole": false, "without trailers": true} {
		t.Run(name, func(t *testing.T) { testProbeThroughBalancer(t, losesTrailers) })
	}
}

func testProbeThroughBalancer(t *testing.T, losesTrailers bool) {
	r := newRig(t)
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true)
	balancer := testkit.L7(t, r.server.Addr().String(), &tls.Config{RootCAs: r.ca.Pool(), ServerName: "cloud"}, losesTrailers)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	pair := r.ca.Pair(t, auth.Leaf{CommonName: "cloud", DNSNames: []string{"cloud"}, Server: true})
	cfg := r.clientConfig("edge1")
	cfg.Address = testkit.ServeTLS(t, ln, &http.Server{
		Handler: balancer, TLSConfig: &tls.Config{Certificates: []tls.Certificate{pair}}, Protocols: protocols,
		ErrorLog: log.New(io.Discard, "", 0),
	})
	_, err = r.client(cfg).Probe(t.Context())
	if hinted, ok := errors.AsType[*Hinted](err); !ok || !strings.Contains(hinted.Hint, "pass TCP through") {
		t.Errorf("%v", err)
	}
}
