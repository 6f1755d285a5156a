//go:build linux

package balancers

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/docs"
	"tunnel.example/tunnel/test/rig"
)

// These tests put balancers between callers, edges and the cloud. All of them run on loopback. The
// addresses of 127.0.0.0/8 tell the parties apart: callers have callerIP, balancers connect to the cloud
// from balancerIP, and edges have 127.0.0.1.
const (
	callerIP   = "127.0.0.9"
	balancerIP = "127.0.0.77"
	// cloudName is the name in the certificates of test/rig.
	cloudName = "tunnel.cloud.io"
	// settle bounds each wait: for a start, a join, and another replica's news.
	settle = 30 * time.Second
)

// TestBalancers puts real programs, or the test itself, in front of the cloud.
func TestBalancers(t *testing.T) {
	dir := t.TempDir()
	program, err := rig.Build(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("relayed", func(t *testing.T) { testRelayed(t, program) })
	t.Run("one-port", func(t *testing.T) { testOnePort(t, program) })
	for name, b := range map[string]balancer{"haproxy": haproxy, "nginx": nginx} {
		t.Run(name, func(t *testing.T) {
			proxies, err := rig.FindProxies("../..")
			if err != nil {
				t.Skip(err)
			}
			testProgram(t, program, proxies, b)
		})
	}
}

// site is a cloud of replicas with an edge and two targets.
type site struct {
	*rig.Fleet

	t      *testing.T
	listen string // the one port of the first replica; "": none
}

// newSite starts replicas. The door "who" of each leads to a target that expects a PROXY header and
// answers with its addresses. The https front door leads to a TLS server for the name edge1.
func newSite(t *testing.T, program string, replicas int, onePort bool) *site {
	t.Helper()
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	s := &site{t: t}
	cfg := rig.FleetConfig{
		Binary: program, Dir: t.TempDir(), CA: ca, Hosts: make([]rig.Host, replicas), Nodes: []string{"edge1"}, Debug: true,
		Doors: map[string]string{"who": "edge1/" + headerTarget(t)},
		HTTPS: tlsTarget(t),
		Cloud: `
[mode.cloud.tcpproxyfrom]
{{range $door, $target := .Targets}}"{{$door}}" = ["` + balancerIP + `"]
{{end}}
[mode.cloud.tcpsendproxy]
{{range $door, $target := .Targets}}"{{$door}}" = "v2"
{{end}}`,
		Server: `proxyfrom = ["` + balancerIP + `"]`,
	}
	if onePort {
		port := testkit.FreePort(t)
		s.listen = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		cfg.Server += "\nlisten = \"" + s.listen + "\""
	}
	if s.Fleet, err = rig.NewFleet(cfg); err != nil {
		t.Fatal(err)
	}
	for _, r := range s.Replicas {
		p, err := r.Start()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Kill)
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("log of %s:\n%s", r.Name, r.Log.String())
			}
		})
	}
	for _, r := range s.Replicas {
		testkit.Within(t, settle, r.Name+" is ready", r.Ready)
	}
	return s
}

// startEdge starts the edge, which dials cloud, and waits until it has a session.
func (s *site) startEdge(cloud string) {
	s.t.Helper()
	e, err := s.Edge(rig.EdgeConfig{Node: "edge1", Cloud: cloud, Allow: []string{"127.0.0.0/8:*"}})
	if err != nil {
		s.t.Fatal(err)
	}
	p, err := e.Start()
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(p.Kill)
	s.t.Cleanup(func() {
		if s.t.Failed() {
			s.t.Logf("log of the edge:\n%s", e.Log.String())
		}
	})
	testkit.Within(s.t, settle, "the edge has a session", e.Ready)
}

// headerTarget is a target that answers a line with the addresses of the PROXY header that it must get before.
func headerTarget(t *testing.T) string {
	return testkit.Serve(t, func(c *net.TCPConn) {
		r := bufio.NewReader(c)
		h, err := proxyproto.Read(r)
		if err != nil {
			fmt.Fprintln(c, err)
			return
		}
		// The header of the cloud may come before the cloud has seen the caller's bytes, and refuses the caller.
		if _, err = r.ReadString('\n'); err == nil {
			fmt.Fprintln(c, h.SourceAddr, h.DestinationAddr)
		}
	})
}

// tlsTarget is a TLS server with a certificate of its own.
func tlsTarget(t *testing.T) string {
	pair := selfSigned(t, "the kubelet of edge1")
	return testkit.Serve(t, func(c *net.TCPConn) {
		tls.Server(c, &tls.Config{Certificates: []tls.Certificate{pair}}).Handshake()
		io.Copy(io.Discard, c)
	})
}

// ask connects to address from a caller's address, sends first and a line, and returns the first line that comes.
func ask(address, from, first string) (string, *net.TCPAddr, error) {
	d := net.Dialer{Timeout: settle, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.Dial("tcp", address)
	if err != nil {
		return "", nil, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(settle))
	if _, err = io.WriteString(c, first+"who am I?\n"); err != nil {
		return "", nil, err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSpace(line), c.LocalAddr().(*net.TCPAddr), err
}

// A target sees the caller of a balancer, whichever replica holds its node.
func testRelayed(t *testing.T, program string) {
	t.Parallel()
	s := newSite(t, program, 2, false)
	s.startEdge(s.Replicas[0].GRPC())
	const want = "10.1.2.3:4711 10.9.9.9:443"
	for i, r := range s.Replicas {
		testkit.Within(t, settle, fmt.Sprintf("the target sees the caller through replica %d", i), func() error {
			got, _, err := ask(r.Door("who"), balancerIP, "PROXY TCP4 10.1.2.3 10.9.9.9 4711 443\r\n")
			if err == nil && got != want {
				t.Fatalf("the target sees %q, want %q", got, want)
			}
			return err
		})
	}
	if n, err := s.Replicas[1].Metrics(); err != nil || n["tunnel_relay_conns_opened_total"] == 0 {
		t.Errorf("nothing was relayed: %v", err)
	}
	// A caller that is no balancer is refused with its header: it is not served with its own address either.
	if got, _, err := ask(s.Replicas[1].Door("who"), callerIP, "PROXY TCP4 10.1.2.3 10.9.9.9 4711 443\r\n"); err == nil {
		t.Errorf("a caller that sends a header is served: %q", got)
	}
	const refused = "tunnel_proxy_headers_unexpected_total"
	if n, err := s.Replicas[1].Metrics(); err != nil || n[refused] != 1 {
		t.Errorf("%s is %v, %v; want 1", refused, n[refused], err)
	}
	testkit.Within(t, settle, "the log says what to write where", func() error {
		const says = `[\"` + callerIP + `\"] into [mode.cloud.tcpproxyfrom]`
		if !strings.Contains(s.Replicas[1].Log.String(), says) {
			return errors.New("not yet")
		}
		return nil
	})
}

// One port serves an edge, a caller of the https front door, and a health check.
func testOnePort(t *testing.T, program string) {
	t.Parallel()
	s := newSite(t, program, 1, true)
	s.startEdge(s.listen)
	s.wantKubelet(s.listen)
	s.wantReady(s.listen)
}

// wantKubelet fails unless a caller that names edge1 by SNI reaches the TLS server behind edge1.
func (s *site) wantKubelet(address string) {
	s.t.Helper()
	testkit.Within(s.t, settle, "a caller reaches the kubelet", func() error {
		cn, err := commonName(address, "edge1")
		if err == nil && cn != "the kubelet of edge1" {
			err = fmt.Errorf("the caller meets %q", cn)
		}
		return err
	})
}

// commonName makes a TLS handshake as a caller, and returns the name of the certificate.
func commonName(address, serverName string) (string, error) {
	d := &net.Dialer{Timeout: settle, LocalAddr: &net.TCPAddr{IP: net.ParseIP(callerIP)}}
	c, err := tls.DialWithDialer(d, "tcp", address, &tls.Config{
		ServerName: serverName, NextProtos: []string{"h2", "http/1.1"}, InsecureSkipVerify: true,
	})
	if err != nil {
		return "", err
	}
	defer c.Close()
	return c.ConnectionState().PeerCertificates[0].Subject.CommonName, nil
}

// wantReady fails unless the one port answers a health check.
func (s *site) wantReady(address string) {
	s.t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(s.CA().CertPEM())
	client := &http.Client{Timeout: settle, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		},
	}}
	res, err := client.Get("https://" + cloudName + "/readyz")
	if err != nil {
		s.t.Fatal(err)
	}
	defer res.Body.Close()
	if body, err := io.ReadAll(res.Body); err != nil || res.StatusCode != http.StatusOK || string(body) != "ok" {
		s.t.Errorf("the check gets %d %q, %v", res.StatusCode, body, err)
	}
}

// balancer is a program that stands in front of the cloud.
type balancer struct {
	page  string // the part of docs/network.md with its configuration: the n-th block that begins with it
	cloud func(address string) string
	start func(t *testing.T, proxies rig.Proxies, dir, config string)
}

var haproxy = balancer{
	page:  "frontend port443\n",
	cloud: func(address string) string { return address + " source " + balancerIP },
	start: func(t *testing.T, proxies rig.Proxies, dir, config string) {
		file := filepath.Join(dir, "haproxy.cfg")
		writeFile(t, file, config)
		run(t, proxies, dir, "haproxy", "-db", "-f", file)
	},
}

var nginx = balancer{
	page:  "stream {\n",
	cloud: func(address string) string { return address },
	start: func(t *testing.T, proxies rig.Proxies, dir, config string) {
		file := filepath.Join(dir, "nginx.conf")
		config = strings.ReplaceAll(config, "proxy_protocol on;", "proxy_protocol on; proxy_bind "+balancerIP+";")
		writeFile(t, file, "load_module "+proxies.NginxStream()+";\nuser root;\ndaemon off;\npid "+dir+"/pid;\n"+
			"error_log stderr;\nevents {}\n"+config)
		run(t, proxies, dir, "nginx", "-e", "stderr", "-c", file)
	},
}

// run starts a program of proxies in dir until the test ends.
func run(t *testing.T, proxies rig.Proxies, dir, program string, args ...string) {
	t.Helper()
	log := new(rig.Log)
	before, err := proxies.Command(program, dir)
	if err != nil {
		t.Fatal(err)
	}
	p, err := rig.Start(log, "env", append(before, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Signal(syscall.SIGTERM)
		select {
		case <-p.Done():
		case <-time.After(5 * time.Second):
			p.Kill()
		}
		if t.Failed() {
			t.Logf("log of %s:\n%s", program, log)
		}
	})
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// documented returns the configuration of docs/network.md that begins with begin and uses the PROXY
// protocol.
func documented(t *testing.T, begin string) string {
	t.Helper()
	const page = "docs/network.md"
	text, err := os.ReadFile("../../" + page)
	if err != nil {
		t.Fatal(err)
	}
	blocks, err := docs.Parse(page, string(text))
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		uses := strings.Contains(b.Text, "proxy_protocol") || strings.Contains(b.Text, "send-proxy")
		if strings.HasPrefix(b.Text, begin) && uses {
			return b.Text
		}
	}
	t.Fatalf("%s has no configuration that begins with %q and uses the PROXY protocol", page, begin)
	return ""
}

// testProgram puts a program with its documented configuration in front of the cloud: for an edge, a
// caller of the https front door, a health check, another site, and callers of a TCP port.
func testProgram(t *testing.T, program string, proxies rig.Proxies, b balancer) {
	t.Parallel()
	s := newSite(t, program, 1, true)
	var port443, port6443 string
	for _, p := range []*string{&port443, &port6443} {
		n := testkit.FreePort(t)
		*p = strconv.Itoa(n)
	}
	const servers = 4 // lines of the page that the test replaces
	config, replaced := documented(t, b.page), 0
	for _, r := range [][2]string{
		{"10.0.0.5:443", b.cloud(s.listen)}, {"10.0.0.5:6443", b.cloud(s.Replicas[0].Door("who"))},
		{"10.0.0.6:8443", website(t)}, {"tunnel.example.com", cloudName},
	} {
		if strings.Contains(config, r[0]) {
			replaced++
		}
		config = strings.ReplaceAll(config, r[0], r[1])
	}
	if replaced != servers {
		t.Fatalf("only %d of %d values are in the configuration of the page:\n%s", replaced, servers, config)
	}
	for old, now := range map[string]string{
		"bind :443": "bind 127.0.0.1:" + port443, "bind :6443": "bind 127.0.0.1:" + port6443,
		"listen 443;": "listen 127.0.0.1:" + port443 + ";", "listen 6443;": "listen 127.0.0.1:" + port6443 + ";",
	} {
		config = strings.ReplaceAll(config, old, now)
	}
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "ca.crt"), string(s.CA().CertPEM())) // a file of the page: programs run in dir
	b.start(t, proxies, dir, config)
	front := "127.0.0.1:" + port443

	s.startEdge(front)
	s.wantKubelet(front)
	s.wantReady(front)
	if cn, err := commonName(front, "www.example.com"); err != nil || cn != "the web site" {
		t.Errorf("the other site is %q, %v", cn, err)
	}
	got, own, err := ask("127.0.0.1:"+port6443, callerIP, "")
	if want := fmt.Sprintf("%s 127.0.0.1:%s", own, port6443); err != nil || got != want {
		t.Errorf("the target sees %q, %v; want %q", got, err, want)
	}
	log := s.Replicas[0].Log.String()
	sessions := 0
	for line := range strings.Lines(log) {
		if strings.Contains(line, "session started") {
			if sessions++; !strings.Contains(line, "remote=127.0.0.1:") {
				t.Errorf("the session does not have the address of the edge: %s", line)
			}
		}
		if strings.Contains(line, "level=WARN") && (strings.Contains(line, "PROXY") || strings.Contains(line, "denied")) {
			t.Errorf("the cloud warns: %s", line)
		}
	}
	if sessions == 0 {
		t.Error("the cloud's log has no session")
	}
}

// website is a TLS server of somebody else. If it gets a PROXY header, it takes it, as nginx has it.
func website(t *testing.T) string {
	pair := selfSigned(t, "the web site")
	return testkit.Serve(t, func(c *net.TCPConn) {
		with := proxyproto.NewConn(c, proxyproto.WithPolicy(proxyproto.USE))
		tls.Server(with, &tls.Config{Certificates: []tls.Certificate{pair}}).Handshake()
		io.Copy(io.Discard, c)
	})
}

// selfSigned returns a certificate with a common name.
func selfSigned(t *testing.T, name string) tls.Certificate {
	t.Helper()
	return testca.New(t, name).Pair(t, auth.Leaf{CommonName: name, Server: true, TTL: time.Hour})
}
