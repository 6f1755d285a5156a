package ways

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
	"tunnel.example/tunnel/test/rig/rigtest"
)

// broken is a way to break an edge or a cloud, and what tunnel check must say.
type broken struct {
	// how breaks the site, and returns more arguments of tunnel check.
	how         func(s *site) []string
	group, name string // of the line; group is how it begins
	state       string
	cause, next string // parts of the text, and of what to do
}

// test breaks a site, and looks for the line.
func (b broken) test(t *testing.T, file string) {
	t.Parallel()
	s := newSite(t, nil)
	_, port, _ := net.SplitHostPort(s.CloudHealth())
	b.name = strings.Replace(b.name, "LOGPORT", port, 1)
	r := s.check(file, b.how(s)...)
	l := r.line(b.group, b.name)
	if l == nil || l.State != b.state || !strings.Contains(l.Text, b.cause) || !strings.Contains(l.Do, b.next) {
		t.Errorf("want %s %s / %s: %q, do %q; got\n%s", b.state, b.group, b.name, b.cause, b.next, r)
	}
	if b.state == "fail" && r.OK {
		t.Error("the report is ok")
	}
}

// With a cloud, an edge and a kubelet that work, nothing fails, and the live session stays. A wait ends when all is
// well.
func TestAllIsWell(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	kubelet := testkit.ServeTLS(t, listen(t), &http.Server{
		TLSConfig: serving(t, s.CA(), "kubelet"), ErrorLog: log.New(io.Discard, "", 0),
	})
	wait := s.command(t.Context(), "check", "-c", s.Path("edge.toml"), "--kubelet", kubelet, "--wait", hangs.String())
	var waited bytes.Buffer
	wait.Stdout, wait.Stderr = &waited, &waited
	s.must(wait.Start())
	s.cloudRuns()
	s.edgeRuns()
	if err := wait.Wait(); err != nil {
		t.Errorf("after the wait: %v\n%s", err, &waited)
	}
	r := s.check("edge.toml", "--kubelet", kubelet)
	for _, want := range [][2]string{
		{"configuration", "edge edge1"}, {"identity", "proof"}, {"identity", "ca"}, {"way to", "name"}, {"way to", "tcp"},
		{"way to", "tls"}, {"way to", "mtu"}, {"way to", "clock"}, {"way to", "join"}, {"edge", "daemon"},
		{"edge", "session"}, {"edge", "modules"}, {"edge", "other edge"}, {"node", "kubelet"},
	} {
		if l := r.line(want[0], want[1]); l == nil || l.State != "ok" {
			t.Errorf("%s / %s is not ok", want[0], want[1])
		}
	}
	if !r.OK || t.Failed() {
		t.Errorf("the edge:\n%s", r)
	}
	if r = s.check("cloud.toml"); !r.OK || r.line("cloud", "nodes").State != "ok" {
		t.Errorf("the cloud:\n%s", r)
	}
	for _, l := range r.Checks {
		if l.Group == "ports" && l.Text != "the cloud has the port" {
			t.Errorf("%+v", l)
		}
	}
	if text := s.CloudLog.String(); strings.Count(text, "session started") != 1 || strings.Contains(text, "join refused") {
		t.Errorf("the checks leave traces in the log of the cloud:\n%s", text)
	}
	code, out, notes := s.run("check", "-c", s.Path("edge.toml"), "--kubelet", testkit.FreeAddress(t))
	if code != 1 || !strings.Contains(out, "\n  fail     kubelet        the kubelet does not answer") ||
		!strings.Contains(out, "\n                          do: start the kubelet") || !strings.Contains(notes, "1 of ") {
		t.Errorf("as text: exit code %d\n%s%s", code, out, notes)
	}
}

const day = 24 * time.Hour

// edges are the ways to break an edge, by the rows of docs/check.md.
func edges() map[string]broken {
	return map[string]broken{
		"the cloud is down": {
			func(*site) []string { return nil },
			"way to", "tcp", "fail", "connection refused", "is the cloud running",
		},
		"the name does not resolve": {
			func(s *site) []string { s.dials("cloud.invalid:9000"); return nil },
			"way to", "name", "fail", "cloud.invalid does not resolve", "resolv.conf",
		},
		"the port is blocked": {
			func(s *site) []string {
				addr, done, err := rig.FullBacklog()
				if err != nil {
					s.Fatal(err)
				}
				s.Cleanup(done)
				s.dials(addr)
				return nil
			},
			"way to", "tcp", "fail", "timeout", "does a firewall let TCP port",
		},
		"only an HTTP proxy is reachable": {
			func(s *site) []string {
				s.cloudRuns()
				s.secrets = []string{"canary"}
				s.env = append(s.env, "HTTP_PROXY=http://me:canary@"+httpProxy(s))
				s.dials("cloud.invalid:9000") // the proxy alone knows where that is
				return nil
			},
			"way to", "name", "fail", "does not resolve", "only the proxy 127.0.0.1:",
		},
		"the proxy is down": {
			func(s *site) []string {
				s.edit("edge.toml", "logport", fmt.Sprintf("proxy = \"http://me:canary@%s\"\nlogport", testkit.FreeAddress(s.T)))
				s.secrets = []string{"canary"}
				return nil
			},
			"way to", "box", "fail", "connection refused", "is the proxy running",
		},
		"another CA": {
			func(s *site) []string {
				other, err := rig.NewCA()
				if err != nil {
					s.Fatal(err)
				}
				s.must(s.Certify(other))
				s.cloudRuns()
				return nil
			},
			"way to", "tls", "fail", "a CA that the edge does not trust signed the server", "if the cloud has a new CA, copy it",
		},
		"DNS leads elsewhere": {
			func(s *site) []string {
				other, err := auth.NewCA("Public CA", day)
				if err != nil {
					s.Fatal(err)
				}
				s.dials(testkit.ServeTLS(s, listen(s.T), &http.Server{
					TLSConfig: serving(s.T, other, "www.example.com"), ErrorLog: log.New(io.Discard, "", 0),
				}))
				return nil
			},
			"way to", "tls", "fail", "made out to www.example.com and signed by \"CN=Public CA\"", "check where 127.0.0.1:",
		},
		"a proxy inspects TLS": {
			func(s *site) []string {
				other, err := auth.NewCA("Corporate Firewall", day)
				if err != nil {
					s.Fatal(err)
				}
				s.cloudRuns()
				s.dials(l7(s, other, false, false))
				return nil
			},
			"way to", "tls", "fail", "signed by \"CN=Corporate Firewall\"", "a proxy that inspects TLS",
		},
		"an L7 balancer without HTTP/2": {
			func(s *site) []string { s.cloudRuns(); s.dials(l7(s, s.CA(), false, false)); return nil },
			"way to", "tls", "fail", "but not HTTP/2", "pass TCP through",
		},
		"an L7 balancer with HTTP/2": {
			func(s *site) []string { s.cloudRuns(); s.dials(l7(s, s.CA(), true, false)); return nil },
			"way to", "join", "fail", "in between ends TLS", "pass TCP through",
		},
		"an L7 balancer that loses trailers": {
			func(s *site) []string { s.cloudRuns(); s.dials(l7(s, s.CA(), true, true)); return nil },
			"way to", "join", "fail", "without sending trailers", "a proxy in between ends TLS: have it pass TCP through",
		},
		"an L7 balancer with HTTP/2, and a certificate": {
			func(s *site) []string {
				s.nodeCertificate(time.Now().Add(-time.Hour), time.Now().Add(day))
				s.cloudRuns()
				s.dials(l7(s, s.CA(), true, false))
				return nil
			},
			"way to", "join", "fail", "the cloud's log says why", "a balancer or a proxy in between ends TLS",
		},
		"a web server": {
			func(s *site) []string {
				s.dials(serve(s.T, listen(s.T), func(c net.Conn) {
					c.Read(make([]byte, 1<<16)) // a reset would follow a close with unread bytes
					io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
				}))
				return nil
			},
			"way to", "tls", "fail", "HTTP without TLS", "grpcport",
		},
		"a port that hangs up": {
			func(s *site) []string {
				s.dials(serve(s.T, listen(s.T), func(c net.Conn) { c.Read(make([]byte, 1<<16)) }))
				return nil
			},
			"way to", "tls", "fail", "closed the connection before it showed a certificate", "PROXY protocol",
		},
		"another name": {
			func(s *site) []string {
				s.edit("edge.toml", "tunnel.cloud.io", "other.example.com")
				s.cloudRuns()
				return nil
			},
			"way to", "tls", "fail", "not made out to other.example.com: it is made out to tunnel.cloud.io",
			"dns in [mode.edge.stream.client]",
		},
		"the cloud's certificate has expired": {
			func(s *site) []string {
				s.certify(time.Now().Add(-10*day), time.Now().Add(-day))
				s.cloudRuns()
				return nil
			},
			"way to", "tls", "fail", "the cloud's certificate expired on", "replace it on the cloud",
		},
		"the clock is a day behind": {
			func(s *site) []string {
				s.certify(time.Now().Add(day), time.Now().Add(10*day))
				s.cloudRuns()
				return nil
			},
			"way to", "clock", "fail", "this machine's clock says", "timedatectl set-ntp true",
		},
		"the clock is behind the node's certificate": {
			func(s *site) []string { s.nodeCertificate(time.Now().Add(day), time.Now().Add(10*day)); return nil },
			"identity", "proof", "fail", "is not valid before", "timedatectl set-ntp true",
		},
		"the node's certificate ends soon": {
			func(s *site) []string {
				s.nodeCertificate(time.Now().Add(-28*day), time.Now().Add(2*day))
				s.cloudRuns()
				return nil
			},
			"identity", "proof", "warn", "ends in 47h59m", "tunnel join",
		},
		"the node's certificate has expired": {
			func(s *site) []string {
				s.nodeCertificate(time.Now().Add(-28*day), time.Now().Add(-day))
				s.cloudRuns()
				return nil
			},
			"way to", "join", "fail", "the cloud's log says why", "has expired on",
		},
		"a wrong token": {
			func(s *site) []string {
				s.cloudRuns()
				s.write("token", auth.NewToken().Reveal())
				return nil
			},
			"way to", "join", "fail", "the cloud's log says why", "this node's line in the cloud's token file",
		},
		"the edge does not run": {
			func(s *site) []string { s.cloudRuns(); return nil },
			"edge", "daemon", "fail", "nothing listens on", "systemctl start tunnel-edge",
		},
		"the edge has another environment": {
			func(s *site) []string { s.cloudRuns(); s.edgeRuns(); s.dials(testkit.FreeAddress(s.T)); return nil },
			"way to", "tcp", "warn", "the running edge has a session", "sudo --preserve-env=",
		},
		"the kubelet is stopped": {
			func(s *site) []string { return []string{"--kubelet", testkit.FreeAddress(s.T)} },
			"node", "kubelet", "fail", "connection refused", "systemctl status kubelet",
		},
		"the edge may not dial the kubelet": {
			func(s *site) []string {
				s.edit("edge.toml", "[mode.edge]\n", "[mode.edge]\nallow = [\"127.0.0.1:22\"]\n")
				return []string{"--kubelet", "127.0.0.1:10250"}
			},
			"node", "kubelet", "fail", "the edge may not dial the kubelet", "allow in [mode.edge]",
		},
		"the configuration is wrong": {
			func(s *site) []string { s.edit("edge.toml", "tokenfile", "tokenfiel"); return nil },
			"configuration", "file", "fail", "tokenfiel", "tunnel config check",
		},
	}
}

// An edge that is broken in one way.
func TestEdge(t *testing.T) {
	for name, tt := range edges() {
		t.Run(name, func(t *testing.T) { tt.test(t, "edge.toml") })
	}
}

// The first warning of an edge names the cause and the next step, too.
func TestFirstLogLine(t *testing.T) {
	all := edges()
	all["an L7 balancer without ALPN"] = broken{how: func(s *site) []string {
		conf := serving(s.T, s.CA(), "tunnel.cloud.io")
		s.dials(serve(s.T, listen(s.T), func(c net.Conn) { tls.Server(c, conf).Read(make([]byte, 1<<16)) }))
		return nil
	}}
	for name, says := range map[string][]string{
		"the cloud is down":                   {"connection refused", "is the cloud running"},
		"the name does not resolve":           {"cloud.invalid", "where only a proxy resolves names"},
		"another CA":                          {"must be the CA that signed the cloud's certificate"},
		"the cloud's certificate has expired": {"the cloud's certificate expired on", "replace it on the cloud"},
		"a wrong token":                       {"this node's line in the cloud's token file"},
		"an L7 balancer without ALPN":         {"speaks no HTTP/2", "pass TCP through"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, nil)
			all[name].how(s)
			p, err := s.StartEdge()
			s.started(p, err)
			var first string
			testkit.Within(t, soon, "the edge warns", func() error {
				for line := range strings.Lines(s.EdgeLog.String()) {
					if strings.Contains(line, "no session; trying again") {
						first = line
						return nil
					}
				}
				return fmt.Errorf("its log is %s", s.EdgeLog.String())
			})
			for _, want := range says {
				if !strings.Contains(first, want) {
					t.Errorf("the first warning lacks %q: %s", want, first)
				}
			}
		})
	}
}

// A live session hides no mistake in the edge's file: the edge could not come back.
func TestSessionHidesNoMistake(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	s.cloudRuns()
	s.edgeRuns()
	other, err := rig.NewCA()
	s.must(err)
	s.write("other.crt", string(other.CertPEM()))
	right, err := os.ReadFile(s.Path("edge.toml"))
	s.must(err)
	for _, tt := range []struct{ old, now, cause string }{
		{"tunnel.cloud.io", "other.example.com", "not made out to other.example.com"},
		{"ca.crt", "other.crt", "a CA that the edge does not trust signed the server"},
		{s.GRPC(), l7(s, s.CA(), false, false), "but not HTTP/2"},
	} {
		s.edit("edge.toml", tt.old, tt.now)
		r := s.check("edge.toml")
		if l := r.line("way to", "tls"); l == nil || l.State != "fail" || !strings.Contains(l.Text, tt.cause) || r.OK {
			t.Errorf("want a failure with %q; got\n%s", tt.cause, r)
		}
		if l := r.line("edge", "session"); l == nil || l.State != "ok" {
			t.Errorf("the edge has no session:\n%s", r)
		}
		s.write("edge.toml", string(right))
	}
}

// An edge that does not answer may have the session that the cloud has. Nobody is called a stranger.
func TestSilentEdge(t *testing.T) {
	broken{
		func(s *site) []string {
			s.cloudRuns()
			s.edgeRuns()
			s.edit("edge.toml", "e.sock", "other.sock")
			return nil
		},
		"edge", "other edge", "skipped", "it is not known whose session this is: from 127.0.0.1:", "",
	}.test(t, "edge.toml")
}

// Two edges of one name take the session from each other. The edge that has none is told of the other one.
func TestTwoEdges(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	s.cloudRuns()
	s.edgeRuns()
	text, err := os.ReadFile(s.Path("edge.toml"))
	s.must(err)
	_, port, _ := net.SplitHostPort(s.EdgeHealth())
	_, other, _ := net.SplitHostPort(testkit.FreeAddress(t))
	s.write("two.toml", strings.NewReplacer("e.sock", "two.sock", port, other).Replace(string(text)))
	s.started(rig.Start(new(rig.Log), program, "edge", "-c", s.Path("two.toml")))
	var last report
	testkit.Within(t, hangs, "an edge is told of the other one", func() error {
		for _, file := range []string{"edge.toml", "two.toml"} {
			last = s.check(file, "--kubelet", "127.0.0.1:1")
			l := last.line("edge", "other edge")
			if l.State != "ok" && strings.Contains(l.Text, "from 127.0.0.1:") &&
				strings.Contains(l.Text, "another edge") && strings.Contains(l.Do, "stop the edge there") {
				return nil
			}
		}
		return fmt.Errorf("the last report is\n%s", last)
	})
}

// While one server leads to the cloud, another one that fails is a warning. The proxy of an edge is a step of its way.
func TestServers(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	s.cloudRuns()
	down := testkit.FreeAddress(t)
	s.edit("edge.toml", fmt.Sprintf("servername = %q", s.GRPC()), fmt.Sprintf("servers = [%q, %q]", down, s.GRPC()))
	r := s.check("edge.toml")
	bad, good := r.line("way to "+down, "tcp"), r.line("way to "+s.GRPC(), "join")
	if bad == nil || bad.State != "warn" || !strings.Contains(bad.Text, "the edge uses another server") ||
		good == nil || good.State != "ok" {
		t.Errorf("two servers:\n%s", r)
	}
	if later := r.line("way to "+down, "tls"); later == nil || later.State != "skipped" {
		t.Errorf("%+v", later)
	}
	s.edit("edge.toml", "logport", fmt.Sprintf("proxy = \"http://%s\"\nlogport", httpProxy(s)))
	r = s.check("edge.toml")
	for _, name := range []string{"box", "tls", "clock", "join"} {
		if l := r.line("way to "+s.GRPC(), name); l == nil || l.State != "ok" {
			t.Errorf("through a proxy, %s is not ok:\n%s", name, r)
		}
	}
}

// An edge with updates = true verifies the cloud by the CAs that the cloud has told, and tries the told addresses
// first.
func TestToldByTheCloud(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	s.nodeCertificate(time.Now().Add(-time.Hour), time.Now().Add(day))
	next, err := rig.NewCA()
	s.must(err)
	s.must(s.Certify(next))
	s.cloudRuns()
	down := testkit.FreeAddress(t)
	s.dials(down)
	s.edit("edge.toml", "nodecert", "updates = true\nnodecert")
	old, err := auth.ParseCertificates(s.CA().CertPEM())
	s.must(err)
	told, err := json.Marshal(map[string]any{
		"base": fmt.Sprintf("%x", sha256.Sum256(old[0].Raw)), "cas": string(next.CertPEM()), "servers": []string{s.GRPC()},
	})
	s.must(err)
	s.write("cloud.json", string(told))
	r := s.check("edge.toml")
	way := "way to " + s.GRPC()
	for _, l := range []*line{r.line("identity", "ca"), r.line(way, "tls"), r.line(way, "join")} {
		if l == nil || l.State != "ok" {
			t.Errorf("%+v", l)
		}
	}
	first := strings.Index(r.String(), "way to "+s.GRPC())
	if other := strings.Index(r.String(), "way to "+down); first < 0 || other < first || t.Failed() {
		t.Errorf("the edge:\n%s", r)
	}
}

// A path that loses large packets is told from a cloud that does not answer.
func TestSmallMTU(t *testing.T) {
	networks := [2]*rig.Network{rigtest.Network(t), rigtest.Network(t)}
	ends := [2]netip.Prefix{netip.MustParsePrefix("10.1.0.1/24"), netip.MustParsePrefix("10.1.0.2/24")}
	link, err := rig.NewLink(networks, ends, 1500, rig.Quality{Largest: 1300})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(link.Close)
	s := newSite(t, func(c *rig.Config) {
		c.CloudHost = rig.Host{IP: "10.1.0.1", Network: networks[0]}
		c.EdgeHost = rig.Host{IP: "10.1.0.2", Network: networks[1]}
	})
	p, err := s.StartCloud()
	s.started(p, err)
	testkit.Within(t, soon, "the cloud listens", func() error {
		c, err := networks[1].Dial(t.Context(), "tcp", s.GRPC())
		if err == nil {
			c.Close()
		}
		return err
	})
	check := func() string {
		var out []byte
		err := networks[1].Do(func() (err error) {
			out, err = exec.Command(program, "check", "-c", s.Path("edge.toml")).CombinedOutput()
			if _, failed := errors.AsType[*exec.ExitError](err); failed {
				return nil
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	if out := check(); !strings.Contains(out, "fail     mtu            large packets are lost on the path") ||
		!strings.Contains(out, "do: lower the MTU") {
		t.Errorf("no MTU in\n%s", out)
	}
	link.Set(rig.Quality{})
	if out := check(); !strings.Contains(out, "ok       mtu            the kernel knows a path of 1500 bytes") {
		t.Errorf("the MTU is not right again in\n%s", out)
	}
}

// must ends the test after an error.
func (s *site) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// serving returns the TLS configuration of a server with a certificate for a name.
func serving(t *testing.T, ca *auth.CA, name string) *tls.Config {
	t.Helper()
	cert, key, err := ca.Issue(auth.Leaf{CommonName: name, DNSNames: []string{name}, Server: true})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}}
}

// l7 is a balancer in front of the cloud that ends TLS, with a certificate for the name of the cloud.
func l7(s *site, ca *auth.CA, http2, losesTrailers bool) string {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(http2)
	return testkit.ServeTLS(s, listen(s.T), &http.Server{
		Handler: testkit.L7(s, s.GRPC(), s.EdgeTLS(), losesTrailers), TLSConfig: serving(s.T, ca, "tunnel.cloud.io"),
		Protocols: protocols, ErrorLog: log.New(io.Discard, "", 0),
	})
}

// httpProxy is a proxy that leads every CONNECT to the cloud.
func httpProxy(s *site) string {
	return serve(s.T, listen(s.T), func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil || r.Method != http.MethodConnect {
			return
		}
		to, err := new(net.Dialer).DialContext(context.Background(), "tcp", s.GRPC())
		if err != nil {
			return
		}
		defer to.Close()
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n")
		go io.Copy(to, c) // ends with c
		io.Copy(c, to)    // ends with to
	})
}
