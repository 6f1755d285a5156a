package stream

import (
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// What an edge that may not join is told, and what the cloud keeps of it: a line in
// the log and a count, no session and no secret.
func TestJoinRefused(t *testing.T) {
	for name, c := range map[string]struct {
		authorization string
		version       uint32
		code          codes.Code
		says          string // to the edge
		logs          string // at the cloud
	}{
		"wrong token":           {"Bearer " + auth.EncodeToken("edge1", "s3cret-wrong"), Version, codes.Unauthenticated, "the cloud's log says why", "the token is wrong"},
		"token of another node": {"Bearer " + auth.EncodeToken("edge1", "token-edge2"), Version, codes.Unauthenticated, "the cloud's log says why", "the token is wrong"},
		"empty token":           {`Bearer {"nodename":"edge1","token":""}`, Version, codes.Unauthenticated, "the cloud's log says why", "no token"},
		"empty node":            {`Bearer {"nodename":"","token":"s3cret"}`, Version, codes.Unauthenticated, "the cloud's log says why", "no nodename"},
		"node that is no name":  {"Bearer " + auth.EncodeToken("../etc", "token-../etc"), Version, codes.Unauthenticated, "the cloud's log says why", "the token is wrong"},
		"no metadata":           {"", Version, codes.Unauthenticated, "the cloud's log says why", "it shows no token"},
		"no bearer":             {"Basic s3cret", Version, codes.Unauthenticated, "the cloud's log says why", "not a JSON object"},
		"malformed JSON":        {`Bearer {"nodename":"edge1","token":"s3cret`, Version, codes.Unauthenticated, "the cloud's log says why", "no usable token"},
		"bytes behind the JSON": {bearerOf("edge1") + "x", Version, codes.Unauthenticated, "the cloud's log says why", "no usable token"},
		"token of 9,000 bytes":  {"Bearer " + auth.EncodeToken("edge1", auth.Secret(strings.Repeat("s3cret", 1500))), Version, codes.Unauthenticated, "the cloud's log says why", "8192 are allowed"},
		"older protocol":        {bearerOf("edge1"), Version - 1, codes.FailedPrecondition, "install the release of the cloud (test) on node edge1", "version 0"},
		"newer protocol":        {bearerOf("edge1"), Version + 1, codes.FailedPrecondition, "speaks version 2 of the protocol and the cloud version 1", "version 2"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			control := r.stranger().control(c.authorization)
			if c.code == codes.FailedPrecondition {
				control.hello(c.version)
			}
			err := control.end()
			if status.Code(err) != c.code || !strings.Contains(err.Error(), c.says) {
				t.Errorf("the edge is told %v; want %s and %q", err, c.code, c.says)
			}
			r.eventually("the refusal is counted and logged", func() bool {
				return r.counters.JoinsRefused.Load() == 1 && len(r.log.lines("join refused")) == 1
			})
			if len(r.log.lines("end=cloud")) != 1 || len(r.log.lines("level=WARN", "join refused", "remote=127.0.0.1:", "node=", c.logs)) != 1 {
				t.Errorf("the cloud's log does not say %q, or not from where:\n%s", c.logs, strings.Join(r.log.lines(), ""))
			}
			if r.dir.Len() != 0 || r.counters.Sessions.Load() != 0 {
				t.Error("there is a session")
			}
			if len(r.log.lines("s3cret")) != 0 {
				t.Error("the token is in the log")
			}
		})
	}
}

// notReady starts an edge that cannot join, waits until it says why, and stops it.
// It must go on trying until then.
func (r *rig) notReady(t *testing.T, change func(*ClientConfig), want ...string) {
	t.Helper()
	cfg := r.clientConfig("edge1")
	change(&cfg)
	e := r.start(cfg, direct)
	r.eventually("the edge says why it has no session", func() bool {
		return len(r.log.lines("end=edge", "no session; trying again")) > 0
	})
	err := e.client.Ready()
	for _, w := range append(want, cfg.Address) {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("Ready says %v; want %q in it", err, w)
		}
	}
	if e.client.Session() != nil {
		t.Error("there is a session all the same")
	}
	select {
	case <-e.Done():
		t.Error("the edge gives up")
	default:
	}
}

// What the person at the edge reads when it cannot join: what is wrong and where.
func TestWhatTheEdgeSays(t *testing.T) {
	other := testca.New(t, "other")
	closed := testkit.FreeAddress(t)
	page := httptest.NewServer(http.NotFoundHandler())
	defer page.Close()
	for name, c := range map[string]struct {
		change func(*ClientConfig)
		want   []string
	}{
		"wrong token": {
			func(c *ClientConfig) { c.Token = auth.StaticToken("s3cret") },
			[]string{"joining as node edge1", "token file matches"},
		},
		"no token file": {
			func(c *ClientConfig) {
				c.Token = tokenFunc(func() (auth.Secret, error) { return "", errors.New("open /etc/token: gone") })
			},
			[]string{"open /etc/token: gone"},
		},
		"another CA": {
			func(c *ClientConfig) { c.TLS().RootCAs = other.Pool() },
			[]string{"unknown authority", "cert in [mode.edge.stream.client]"},
		},
		"another name": {
			func(c *ClientConfig) { c.TLS().ServerName = "elsewhere" },
			[]string{"elsewhere", "dns in [mode.edge.stream.client]"},
		},
		"an address as the name": {
			func(c *ClientConfig) { c.TLS().ServerName = "127.0.0.1" },
			[]string{"127.0.0.1", "dns in [mode.edge.stream.client]"},
		},
		"nobody listens": {
			func(c *ClientConfig) { c.Address = closed },
			[]string{"connection refused", "is the cloud running"},
		},
		"a port without TLS": {
			func(c *ClientConfig) { c.Address = page.Listener.Addr().String() },
			[]string{"servername in [mode.edge.stream.client]", "grpcport", "TLS"},
		},
		"no such host": {
			func(c *ClientConfig) { c.Address = "no-such-host.invalid:9000" },
			[]string{"check servername"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.notReady(t, c.change, c.want...)
			if len(r.log.lines("s3cret")) != 0 {
				t.Error("the token is in the log")
			}
			r.eventually("the cloud has no session", func() bool { return r.dir.Len() == 0 })
		})
	}
}

// What the person at the edge reads when a certificate of the cloud is out of date: which one, since when or
// until when, and where to replace it.
func TestWhatTheEdgeSaysOfDates(t *testing.T) {
	now := time.Now()
	ca := testca.New(t, "cloud CA")
	ended, err := auth.NewCA("ended", -time.Second)
	if err != nil {
		t.Fatal(err)
	}
	endedCA := testca.CA{CA: ended}
	for name, c := range map[string]struct {
		ca   testca.CA
		pair tls.Certificate
		want []string
	}{
		"expired": {
			ca, ca.Dated(t, "cloud", now.Add(-2*time.Hour), now.Add(-time.Hour)),
			[]string{
				"the cloud's certificate expired on " + now.Add(-time.Hour).UTC().Format(time.RFC3339),
				"replace it on the cloud (cert and key in [mode.cloud.stream.server])", "this machine's clock",
			},
		},
		"not valid yet": {
			ca, ca.Dated(t, "cloud", now.Add(time.Hour), now.Add(2*time.Hour)),
			[]string{
				"the cloud's certificate is not valid before " + now.Add(time.Hour).UTC().Format(time.RFC3339),
				"this machine's clock",
			},
		},
		"the CA has expired": {
			endedCA, endedCA.Dated(t, "cloud", now.Add(-time.Hour), now.Add(time.Hour)),
			[]string{"the certificate of the cloud's CA expired on 20", "replace the CA on the cloud"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(cfg *ServerConfig) { cfg.TLS.Certificates = []tls.Certificate{c.pair} })
			r.notReady(t, func(cfg *ClientConfig) { cfg.TLS().RootCAs = c.ca.Pool() }, c.want...)
		})
	}
}

// A token that cannot be read costs no connection: an edge without its file would
// otherwise leave one behind at each attempt.
func TestNoTokenNoConnection(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		cfg := r.clientConfig("edge1")
		cfg.Token = tokenFunc(func() (auth.Secret, error) { return "", errors.New("no file") })
		e := r.start(cfg, direct)
		time.Sleep(time.Hour)
		if n := r.net.dials.Load(); n != 0 {
			t.Errorf("%d connections in an hour", n)
		}
		if e.client.Ready() == nil {
			t.Error("ready without a token")
		}
	})
}

// oddCloud is a cloud whose hello the test writes.
type oddCloud struct {
	pb.UnimplementedStreamServer
	hello *pb.StreamMsg
}

func (c oddCloud) TunnelStreaming(stream pb.Stream_TunnelStreamingServer) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	if err := stream.Send(c.hello); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

// An edge that meets a cloud of another version, or something that is no cloud, says
// so and waits as after a refusal.
func TestOddCloud(t *testing.T) {
	hello := func(h *pb.Hello) *pb.StreamMsg {
		return &pb.StreamMsg{Category: category, Type: typeHello, Data: encode(h)}
	}
	for name, c := range map[string]struct {
		cloud pb.StreamServer
		want  string
		slow  bool
	}{
		"newer":     {oddCloud{hello: hello(&pb.Hello{Version: 2, Software: "v9"})}, "install the release of the cloud (v9) here", true},
		"no hello":  {oddCloud{hello: &pb.StreamMsg{Category: "x", Type: "y"}}, "the first message is x/y, not stream/hello", false},
		"bad hello": {oddCloud{hello: &pb.StreamMsg{Category: category, Type: typeHello, Data: []byte("\x08")}}, "hello: ", false},
		"no cloud":  {pb.UnimplementedStreamServer{}, "not implemented", true},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			odd := grpc.NewServer(grpc.Creds(credentials.NewTLS(r.server.cfg.TLS)))
			pb.RegisterStreamServer(odd, c.cloud)
			served := make(chan struct{})
			go func() {
				odd.Serve(ln)
				close(served)
			}()
			defer func() {
				odd.Stop()
				<-served
			}()
			r.notReady(t, func(cfg *ClientConfig) { cfg.Address = ln.Addr().String() }, c.want)
			// The first wait is less than half a second, or five and more after a refusal.
			line := r.log.lines("end=edge", "no session; trying again")[0]
			_, wait, _ := strings.Cut(line, " retry_in=")
			pause, err := time.ParseDuration(strings.Fields(wait)[0])
			if err != nil {
				t.Fatal(err)
			}
			if slow := pause > 2*time.Second; slow != c.slow {
				t.Errorf("it waits as after a refusal: %t, want %t: %s", slow, c.slow, line)
			}
		})
	}
}

// A port that is taken ends Run with an error that says so.
func TestPortTaken(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	s, err := NewServer(ServerConfig{Listen: ln.Addr().String(), TLS: &tls.Config{}, Auth: &fakeAuth{}, Log: (&journal{}).logger()}, &tunnel.Directory{})
	if err != nil {
		t.Fatal(err)
	}
	err = s.Run(t.Context())
	wantErr(t, "Run", err, syscall.EADDRINUSE)
	if err == nil || !strings.Contains(err.Error(), ln.Addr().String()) || !strings.Contains(err.Error(), "grpcport") {
		t.Errorf("%v names neither the port nor the key", err)
	}
	if s.Ready() == nil || s.Addr() != nil {
		t.Error("it says that it listens")
	}
}

// A second session of a node takes its place at once; the end of the first, whose
// conns are reset, does not throw the second off.
func TestReplacedSession(t *testing.T) {
	r := newRig(t)
	old := r.stranger().join("edge1")
	first := r.dir.Lookup("edge1")
	_, dialling := r.sentOpen(old, "edge1")

	e := r.join2("edge1")
	if err := old.end(); status.Code(err) != codes.Aborted {
		t.Errorf("the old session ends with %v, want aborted", err)
	}
	if d := <-dialling; tunnel.CodeOf(d.err) != tunnel.Gone {
		t.Errorf("a dial through the old session: %v, want gone", d.err)
	}
	<-first.Done()
	r.eventually("the old session is logged as ended", func() bool { return len(r.log.lines("session ended", first.ID)) == 1 })
	second := r.dir.Lookup("edge1")
	if second == nil || second == first {
		t.Fatal("the end of the old session has thrown off the new one")
	}
	c, far := r.pair("edge1")
	go far.Write([]byte("x"))
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Errorf("the new session does not work: %v", err)
	}
	if n := r.counters.Replaced.Load(); n != 1 {
		t.Errorf("%d replacements counted", n)
	}
	if len(r.log.lines("level=WARN", "replaces", "replaced="+first.ID)) != 1 {
		t.Error("the replacement is not logged")
	}
	c.Close()
	far.Close()
	r.idle(e)
}

// join2 is join for a node that has a session already.
func (r *rig) join2(node string) *edge {
	r.t.Helper()
	before := r.dir.Lookup(tunnel.NodeName(node))
	e := r.start(r.clientConfig(node), direct)
	r.eventually("node joins again", func() bool {
		return e.client.Ready() == nil && r.dir.Lookup(tunnel.NodeName(node)) != before
	})
	return e
}

// A revoked token ends the session and its conns within a second, and the edge is told.
func TestRevoked(t *testing.T) {
	r := newRig(t)
	e := r.join("edge1", direct)
	other := r.join("edge2", direct)
	c, _ := r.pair("edge1")
	r.auth.revoke("edge1")
	_, err := c.Read(make([]byte, 1))
	wantErr(t, "read of a conn whose session was revoked", err, syscall.ECONNRESET)
	r.eventually("the edge knows", func() bool { return e.client.Ready() != nil })
	r.eventually("the edge waits as after a refusal", func() bool {
		return len(r.log.lines("end=edge", "no session; trying again", "revoked", "token file")) == 1
	})
	if other.client.Ready() != nil || !r.dir.Holds("edge2") {
		t.Error("another node's session is gone too")
	}
}

// An edge that comes back resumes its TLS session.
func TestReconnectResumesTLS(t *testing.T) {
	r := newRig(t)
	e := r.join("edge1", direct)
	resumed := func() bool {
		s := r.dir.Lookup("edge1")
		return s != nil && s.Link.(*cloudSession).transport.State.DidResume
	}
	if resumed() {
		t.Fatal("there was nothing to resume")
	}
	e.client.Session().Close(errors.New("cut by the test"))
	r.eventually("the edge is back with a resumed session", resumed)
}
