package stream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

func pemOf(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// requestFor makes a request for a node's certificate.
func requestFor(t *testing.T, node string) []byte {
	t.Helper()
	_, request, err := auth.NewRequest(tunnel.NodeName(node))
	if err != nil {
		t.Fatal(err)
	}
	return request
}

// sign asks for a certificate on the stranger's connection, with this metadata: keys and
// values in turn.
func (s *stranger) sign(request []byte, pairs ...string) (*pb.SignResponse, error) {
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(s.ctx, pairs...), time.Minute)
	defer cancel()
	return pb.NewCertificatesClient(s.cc).Sign(ctx, &pb.SignRequest{Request: request})
}

// enroll gets a node its first certificate.
func (r *rig) enroll(node string, token auth.Secret, request []byte) (Enrolled, error) {
	cfg := EnrollConfig{
		Address: r.server.Addr().String(), TLS: &tls.Config{RootCAs: r.ca.Pool(), ServerName: "cloud"},
		Node: tunnel.NodeName(node), Token: token, Request: request, Software: "test",
	}
	if r.net != nil {
		cfg.Dial = r.net.dial
	}
	return Enroll(context.Background(), cfg)
}

// A join token gets a node its certificate, with which it joins. The token itself opens
// no session.
func TestEnroll(t *testing.T) {
	a := newRegistry(t, nodeCA(t), "edge1:token-edge1 join")
	r := newRig(t, a.serve)
	key, request, err := auth.NewRequest("edge1")
	if err != nil {
		t.Fatal(err)
	}
	got, err := r.enroll("edge1", "token-edge1", request)
	if err != nil {
		t.Fatal(err)
	}
	if got.Node != "edge1" || time.Since(got.Time).Abs() > time.Minute {
		t.Errorf("got %s at %s", got.Node, got.Time)
	}
	if len(r.log.lines("end=cloud", "certificate issued", "node=edge1", "remote=127.0.0.1:")) != 1 {
		t.Error("the log does not say so")
	}
	r.joinWith(r.certified("edge1", hold(certificateOf(t, got.Chain, key))), direct)
	if err := r.stranger().control(bearerOf("edge1")).end(); status.Code(err) != codes.Unauthenticated {
		t.Errorf("the join token opens a session: %v", err)
	}
}

// What somebody hears who gets no certificate, and what it means at the edge. Nothing is
// signed.
func TestEnrollRefused(t *testing.T) {
	const join = "edge1:token-edge1 join"
	for name, c := range map[string]struct {
		lines   string
		token   auth.Secret
		request []byte // nil: a good one
		change  func(*ServerConfig)
		code    codes.Code
		says    string
	}{
		"wrong token":      {lines: join, token: "s3cret", code: codes.Unauthenticated, says: "tunnel token create"},
		"a plain token":    {lines: "edge1:token-edge1", token: "token-edge1", code: codes.Unauthenticated, says: "tunnel token create"},
		"an expired one":   {lines: join + " expires=2020-01-01T00:00:00Z", token: "token-edge1", code: codes.Unauthenticated, says: "tunnel token create"},
		"a revoked node":   {lines: join + "\nedge1:revoked", token: "token-edge1", code: codes.Unauthenticated, says: "tunnel token create"},
		"no issuer":        {lines: join, token: "token-edge1", change: func(c *ServerConfig) { c.Issuer = nil }, code: codes.Unimplemented, says: "[mode.cloud.join]"},
		"no Node yet":      {lines: join, token: "token-edge1", change: func(c *ServerConfig) { c.Issuer = noNode{c.Issuer} }, code: codes.FailedPrecondition, says: "kubectl get nodes"},
		"garbage":          {lines: join, token: "token-edge1", request: []byte("garbage"), code: codes.InvalidArgument, says: "PKCS #10"},
		"an empty request": {lines: join, token: "token-edge1", request: []byte{}, code: codes.InvalidArgument, says: "PKCS #10"},
		"a long request":   {lines: join, token: "token-edge1", request: blob(maxRequest + 1), code: codes.InvalidArgument, says: "16384 are allowed"},
		"a huge request":   {lines: join, token: "token-edge1", request: blob(2 * conn.MaxMessage), code: codes.ResourceExhausted, says: "larger than max"},
		"another node's":   {lines: join, token: "token-edge1", request: requestFor(t, "edge2"), code: codes.InvalidArgument, says: "edge2"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newRegistry(t, nodeCA(t), strings.Split(c.lines, "\n")...)
			r := newRig(t, func(cfg *ServerConfig) {
				a.serve(cfg)
				if c.change != nil {
					c.change(cfg)
				}
			})
			request := c.request
			if request == nil {
				request = requestFor(t, "edge1")
			}
			_, err := r.enroll("edge1", c.token, request)
			if status.Code(err) != c.code || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v; want %s and %q", err, c.code, c.says)
			}
			// gRPC refuses a message that is too long before the cloud counts and logs the refusal.
			r.eventually("it is counted and logged", func() bool {
				return r.counters.JoinsRefused.Load() == 1 &&
					len(r.log.lines("end=cloud", "certificate refused", "node=edge1", "remote=127.0.0.1:")) == 1
			})
			if len(r.log.lines("s3cret")) != 0 {
				t.Errorf("the cloud's log:\n%s", strings.Join(r.log.lines(), ""))
			}
			if a.signed.Load() != 0 {
				t.Error("something was signed")
			}
		})
	}
}

// noNode is an issuer of a cluster that does not have the node yet.
type noNode struct{ Issuer }

func (noNode) First(context.Context, auth.Credential, []byte) (tunnel.NodeName, []byte, error) {
	return "", nil, auth.ErrNoNode
}

// A connection that has asked for a first certificate does nothing else, whatever came of
// it; and one that has a control stream does not ask for one.
func TestSignOnAStrangersConnection(t *testing.T) {
	a := newRegistry(t, nodeCA(t), "edge1:token-edge1 join")
	// Tokens of sessions are looked at by the rig's own.
	r := newRig(t, func(c *ServerConfig) { c.Certificates, c.Issuer = true, auth.NewIssuer(a.gate, a) })
	request := requestFor(t, "edge1")
	for name, pairs := range map[string][]string{
		"no metadata":   nil,
		"a claim":       {nodeKey, "edge1"},
		"no bearer":     {"authorization", "Basic x"},
		"two tokens":    {"authorization", bearerOf("edge1"), "authorization", bearerOf("edge1")},
		"another token": {"authorization", bearerOf("edge2")},
	} {
		s := r.stranger(a.certificate("edge1"))
		if _, err := s.sign(request, pairs...); status.Code(err) != codes.Unauthenticated || status.Convert(err).Message() != auth.ErrUnauthenticated.Error() {
			t.Errorf("%s: %v", name, err)
		}
		if err := s.control(bearerOf("edge2")).end(); status.Code(err) != codes.Unavailable {
			t.Errorf("%s, and then a control stream: %v", name, err)
		}
	}
	if n := a.signed.Load(); n != 0 {
		t.Errorf("%d were signed", n)
	}

	s := r.stranger()
	if _, err := s.sign(request, "authorization", bearerOf("edge1")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.sign(request, "authorization", bearerOf("edge1")); status.Code(err) != codes.Unavailable {
		t.Errorf("a second certificate: %v", err)
	}
	if err := s.control(bearerOf("edge2")).end(); status.Code(err) != codes.Unavailable {
		t.Errorf("a control stream after a certificate: %v", err)
	}

	s = r.stranger()
	first := s.control(bearerOf("edge2")) // says no hello
	r.eventually("the control stream is there", func() bool { return r.auth.asked.Load() == 1 })
	if _, err := s.sign(request, "authorization", bearerOf("edge1")); status.Code(err) != codes.AlreadyExists {
		t.Errorf("a certificate before the hello: %v", err)
	}
	if err := first.end(); err == nil {
		t.Error("the control stream goes on")
	}
	if n := a.signed.Load(); n != 1 {
		t.Errorf("%d were signed, want 1", n)
	}
}

// Only a session that a certificate has opened gets another one, for its own node, and not
// without end. A refusal costs the session nothing.
func TestRenewRefused(t *testing.T) {
	byCertificate := func(a *registry, r *rig) (*stranger, *strangerControl) {
		s := r.stranger(a.certificate("edge1"))
		c := s.controlWith(nodeKey, "edge1")
		c.hello(Version)
		c.want("the certificate opens a session", typeHello)
		return s, c
	}
	byToken := func(_ *registry, r *rig) (*stranger, *strangerControl) {
		s := r.stranger()
		return s, s.join("edge1")
	}
	thenByToken := func(a *registry, r *rig) (*stranger, *strangerControl) {
		s, c := byCertificate(a, r)
		c.say(typeCredential, "", &pb.Credential{AccessToken: auth.EncodeToken("edge1", "token-edge1")})
		r.eventually("the session stands on the token", func() bool { return len(r.log.lines("new proof")) == 1 })
		return s, c
	}
	good := requestFor(t, "edge1")
	ill := func(a *registry, _ *ServerConfig) {
		a.before = func(context.Context) error { return errors.New("ill") }
	}
	expired := func(a *registry, _ *ServerConfig) {
		a.before = func(context.Context) error { a.ttl = -time.Second; return nil }
	}
	for name, c := range map[string]struct {
		join    func(*registry, *rig) (*stranger, *strangerControl)
		request []byte
		before  int // that are signed
		change  func(*registry, *ServerConfig)
		code    codes.Code
	}{
		"by a token":               {join: byToken, request: good, code: codes.PermissionDenied},
		"by a token meanwhile":     {join: thenByToken, request: good, code: codes.PermissionDenied},
		"garbage":                  {join: byCertificate, request: []byte("x"), code: codes.InvalidArgument},
		"another node's":           {join: byCertificate, request: requestFor(t, "edge2"), code: codes.InvalidArgument},
		"too many":                 {join: byCertificate, request: good, before: renewBurst, code: codes.ResourceExhausted},
		"nobody signs":             {join: byCertificate, request: good, change: func(_ *registry, c *ServerConfig) { c.Issuer = nil }, code: codes.Unimplemented},
		"who signs is ill":         {join: byCertificate, request: good, change: ill, code: codes.Unavailable},
		"what is signed is no use": {join: byCertificate, request: good, change: expired, code: codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			a := newRegistry(t, nodeCA(t), "edge1:token-edge1")
			r := newRig(t, func(cfg *ServerConfig) {
				a.serve(cfg)
				if c.change != nil {
					c.change(a, cfg)
				}
			})
			s, control := c.join(a, r)
			for range c.before {
				if _, err := s.sign(good); err != nil {
					t.Fatal(err)
				}
			}
			was := r.dir.Lookup("edge1").Link.(*cloudSession).proof.Load()
			if _, err := s.sign(c.request, "authorization", bearerOf("edge1")); status.Code(err) != c.code {
				t.Errorf("got %v, want %s", err, c.code)
			}
			r.eventually("it is counted", func() bool { return r.counters.JoinsRefused.Load() == 1 })
			control.say(typeHeartbeat, "", &pb.Heartbeat{Sent: 1})
			control.want("the session goes on", typeHeartbeat)
			if r.dir.Lookup("edge1").Link.(*cloudSession).proof.Load() != was {
				t.Error("the session stands on something else now")
			}
		})
	}
}

// A join token gets one certificate at a time, so that it cannot take all places of a
// signer that has few. Others do not notice.
func TestEnrollOneAtATime(t *testing.T) {
	a := newRegistry(t, nodeCA(t), "edge1:token-edge1 join", "edge2:token-edge2 join")
	signing, signed := make(chan struct{}), make(chan struct{})
	var began atomic.Bool
	a.before = func(context.Context) error {
		if !began.Swap(true) {
			close(signing)
			<-signed
		}
		return nil
	}
	r := newRig(t, a.serve)
	done := make(chan error, 1)
	slow := requestFor(t, "edge1")
	go func() {
		_, err := r.enroll("edge1", "token-edge1", slow)
		done <- err
	}()
	<-signing
	if _, err := r.enroll("edge1", "token-edge1", requestFor(t, "edge1")); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("another one meanwhile: %v", err)
	}
	if _, err := r.enroll("edge2", "token-edge2", requestFor(t, "edge2")); err != nil {
		t.Errorf("another node: %v", err)
	}
	close(signed)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := r.enroll("edge1", "token-edge1", requestFor(t, "edge1")); err != nil {
		t.Errorf("when it is done: %v", err)
	}
}

// A node whose certificates are revoked while another one is being made does not get it,
// although that is younger than those.
func TestRevokedWhileSigning(t *testing.T) {
	a := newRegistry(t, nodeCA(t))
	a.age = time.Hour
	a.follow()
	r := newRig(t, a.serve)
	s := r.stranger(a.certificate("edge1"))
	control := s.controlWith(nodeKey, "edge1")
	control.hello(Version)
	control.want("the certificate opens a session", typeHello)
	a.before = func(ctx context.Context) error {
		a.write("edge1:revoked before=" + time.Now().Add(-time.Minute).UTC().Format(time.RFC3339))
		a.age = 0
		for r.dir.Holds("edge1") && ctx.Err() == nil { // signing has a timeout
			time.Sleep(time.Millisecond)
		}
		return nil
	}
	if _, err := s.sign(requestFor(t, "edge1")); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v, want unavailable", err)
	}
	if err := control.end(); status.Code(err) != codes.Unauthenticated {
		t.Errorf("the session ends with %v", err)
	}
}

// Without a session there is nobody to ask.
func TestRenewWithoutASession(t *testing.T) {
	r := newRig(t)
	c, err := NewClient(r.clientConfig("edge1"))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Renew(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "no session with "+r.server.Addr().String()) {
		t.Errorf("got %v", err)
	}
}

// A panic of who signs ends that connection, is counted, and costs nobody else anything.
func TestSignPanic(t *testing.T) {
	a := newRegistry(t, nodeCA(t), "edge1:token-edge1 join")
	a.before = func(context.Context) error { panic("boom") }
	r := newRig(t, a.serve)
	r.panics = 2
	e := r.joinWith(r.certified("edge2", hold(a.certificate("edge2"))), direct)
	other := r.joinWith(r.certified("edge3", hold(a.certificate("edge3"))), direct)
	was := r.dir.Lookup("edge2")
	if _, err := r.enroll("edge1", "token-edge1", requestFor(t, "edge1")); status.Code(err) != codes.Internal {
		t.Errorf("a first certificate: %v, want internal", err)
	}
	if r.dir.Lookup("edge2") != was {
		t.Error("a node's session has ended")
	}
	// The end of the session may overtake the answer.
	if _, _, err := e.client.Renew(t.Context(), requestFor(t, "edge2")); err == nil || !strings.Contains(err.Error(), "Internal") && !strings.Contains(err.Error(), "Canceled") {
		t.Errorf("another certificate: %v, want internal, or canceled", err)
	}
	r.eventually("the node comes back", func() bool { return r.dir.Holds("edge2") && r.dir.Lookup("edge2") != was })
	if other.client.Ready() != nil || !r.dir.Holds("edge3") {
		t.Error("another node's session has ended")
	}
	if n := len(r.log.lines("level=ERROR", "panic", "boom", "stack=")); n != 2 {
		t.Errorf("%d panics are in the log", n)
	}
}

// Kubernetes may take half a minute to sign, longer than a stranger may take to join. When
// it has, the connection ends.
func TestSlowSigner(t *testing.T) {
	bubble(t, func(t *testing.T) {
		a := newRegistry(t, nodeCA(t), "edge1:token-edge1 join")
		const slow = 30 * time.Second
		a.before = func(ctx context.Context) error {
			select {
			case <-time.After(slow):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		r := newRigOn(t, newMemNet(), a.serve)
		s := r.stranger()
		if _, err := s.sign(requestFor(t, "edge1"), "authorization", bearerOf("edge1")); err != nil {
			t.Errorf("a signer who takes %s: %v", slow, err)
		}
		start := time.Now()
		r.eventually("the connection ends when it has its answer", func() bool { return s.cc.GetState() != connectivity.Ready })
		if d := time.Since(start); d > 2*time.Second {
			t.Errorf("after %s", d)
		}

		a.before = func(ctx context.Context) error { // hangs
			<-ctx.Done()
			return ctx.Err()
		}
		start = time.Now()
		_, err := r.enroll("edge1", "token-edge1", requestFor(t, "edge1"))
		if d := time.Since(start); err == nil || d > signTimeout+time.Second {
			t.Errorf("a signer who hangs: %v after %s", err, d)
		}
	})
}

// Who asks for a certificate and never finishes asking is hung up on as every stranger is,
// be the token good or not.
func TestSignAndSilence(t *testing.T) {
	bubble(t, func(t *testing.T) {
		a := newRegistry(t, nodeCA(t), "edge1:token-edge1 join")
		r := newRigOn(t, newMemNet(), a.serve)
		for _, token := range []auth.Secret{"token-edge1", "guess"} {
			s := r.stranger()
			start := time.Now()
			ctx := metadata.AppendToOutgoingContext(s.ctx, "authorization", "Bearer "+auth.EncodeToken("edge1", token))
			stream, err := s.cc.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, pb.Certificates_Sign_FullMethodName)
			if err != nil {
				t.Fatal(err)
			}
			if err := stream.RecvMsg(&pb.SignResponse{}); err == nil {
				t.Error("there is an answer to nothing")
			}
			if d := time.Since(start); d > joinTimeout+time.Second {
				t.Errorf("hung up on after %s, want %s", d, joinTimeout)
			}
		}
	})
}

// With a certificate comes what the cloud tells its edges, and by which certificates the edge has verified the cloud.
// The cloud learns by which CAs the edge verifies it.
func TestToldWithACertificate(t *testing.T) {
	a := newRegistry(t, nodeCA(t), "edge1:token-edge1 join")
	tell := auth.TellEdges{CloudCAs: []byte("CAs"), Servers: []string{"cloud:9000"}, NodeCAs: []byte("others")}
	trusts := make(chan []string, 1)
	r := newRig(t, a.serve, func(c *ServerConfig) {
		c.Tell = func() auth.TellEdges { return tell }
		c.Trusts = func(node tunnel.NodeName, cas []string) { trusts <- append([]string{string(node)}, cas...) }
	})
	_, request, err := auth.NewRequest("edge1")
	if err != nil {
		t.Fatal(err)
	}
	enrolled, err := r.enroll("edge1", "token-edge1", request)
	if err != nil || !reflect.DeepEqual(enrolled.Told, tell) || len(enrolled.Cloud) == 0 {
		t.Fatalf("at the join: %+v, %v", enrolled, err)
	}
	cfg := r.certified("edge1", hold(a.certificate("edge1")))
	cfg.Trusts = func() []string {
		return []string{"0123456789abcdef", "far too long to be an id of a CA", "fedcba9876543210"}
	}
	var told auth.TellEdges
	var cloud []*x509.Certificate
	cfg.Told = func(t auth.TellEdges, chain []*x509.Certificate) { told, cloud = t, chain }
	e := r.joinWith(cfg, direct)
	if _, _, err = e.client.Renew(t.Context(), requestFor(t, "edge1")); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(told, tell) || len(cloud) == 0 || !cloud[0].Equal(enrolled.Cloud[0]) {
		t.Errorf("at the renewal: %+v, by %d certificates", told, len(cloud))
	}
	if got, want := <-trusts, []string{"edge1", "0123456789abcdef", "fedcba9876543210"}; !slices.Equal(got, want) {
		t.Errorf("the edge trusts %q, want %q", got, want)
	}
}

// The cloud asks an edge to renew its certificate, if the edge can do that.
func TestAskToRenew(t *testing.T) {
	r := newRig(t)
	old := r.join("old", direct)
	if s := r.cloudEnd("old").pub; s.Renews {
		t.Error("an edge that renews nothing says that it does")
	} else if err := AskToRenew(s, time.Minute); err != nil {
		t.Fatal(err)
	}
	asked := make(chan time.Duration, 2)
	cfg := r.clientConfig("edge1")
	cfg.AskedToRenew = func(within time.Duration) { asked <- within }
	r.joinWith(cfg, direct)
	s := r.cloudEnd("edge1").pub
	if !s.Renews {
		t.Fatal("the edge does not say that it renews")
	}
	for _, within := range []time.Duration{time.Minute, 1000 * time.Hour} {
		if err := AskToRenew(s, within); err != nil {
			t.Fatal(err)
		}
	}
	if a, b := <-asked, <-asked; a != time.Minute || b != maxRenewWithin {
		t.Errorf("asked within %s and %s", a, b)
	}
	r.mustDial("old", testkit.Serve(t, testkit.Echo)) // its open is behind the message
	if err := old.client.Ready(); err != nil {
		t.Errorf("the message has ended the session of an edge that renews nothing: %v", err)
	}
}
