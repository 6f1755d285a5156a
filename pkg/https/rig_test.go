package https

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// patience bounds every wait in the tests.
const patience = 15 * time.Second

// testCA issues certificates.
type testCA struct {
	testca.CA
	t    testing.TB
	pool *x509.CertPool
}

func newCA(t testing.TB, name string) *testCA {
	t.Helper()
	ca := testca.New(t, name)
	return &testCA{ca, t, ca.Pool()}
}

// always returns a func for a value that does not change.
func always[T any](v T) func() T { return func() T { return v } }

// issue creates a certificate for clients and servers. names may contain IP addresses.
func (ca *testCA) issue(cn string, names ...string) *tls.Certificate {
	ca.t.Helper()
	l := auth.Leaf{CommonName: cn, Client: true, Server: true}
	for _, n := range names {
		if ip := net.ParseIP(n); ip != nil {
			l.IPs = append(l.IPs, ip)
		} else {
			l.DNSNames = append(l.DNSNames, n)
		}
	}
	return ca.issueLeaf(l)
}

func (ca *testCA) issueLeaf(l auth.Leaf) *tls.Certificate {
	ca.t.Helper()
	pair := ca.Pair(ca.t, l)
	return &pair
}

// rig is a front door with a fake tunnel, which dials a kubelet directly.
type rig struct {
	t         testing.TB
	clientCA  *testCA // signs callers and our client certificate
	frontCA   *testCA // signs the front door
	kubeletCA *testCA // signs the kubelet
	kubelet   *httptest.Server
	tunnel    *fakeTunnel
	door      *FrontDoor
	addr      string // of the door's first port
	logs      *testkit.Log
	stop      context.CancelFunc
	done      chan error
}

// newRig starts a kubelet that serves h, and creates a door; configure may change its
// configuration.
func newRig(t testing.TB, h http.Handler, configure func(*rig, *Config)) *rig {
	t.Helper()
	r := &rig{
		t: t, clientCA: newCA(t, "clients"), frontCA: newCA(t, "front"), kubeletCA: newCA(t, "kubelets"),
		logs: &testkit.Log{},
	}
	if h == nil {
		h = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "pong") })
	}
	r.kubelet = httptest.NewUnstartedServer(h)
	r.kubelet.EnableHTTP2 = true
	r.kubelet.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	r.kubelet.TLS = &tls.Config{
		Certificates: []tls.Certificate{*r.kubeletCA.issue("system:node:edge1", "edge1")},
		ClientAuth:   tls.RequireAndVerifyClientCert, ClientCAs: r.clientCA.pool,
		NextProtos: []string{"h2", "http/1.1"},
	}
	r.kubelet.StartTLS()
	t.Cleanup(r.kubelet.Close)
	r.tunnel = &fakeTunnel{target: r.kubelet.Listener.Addr().String(), nodes: map[tunnel.NodeName]bool{"edge1": true}}

	cfg := Config{
		Listen:      "127.0.0.1",
		Ports:       map[string]string{"0": "127.0.0.1:10250"},
		Certificate: always(r.frontCA.issue("front", "front.example", "127.0.0.1", "edge1", "edge9")),
		ClientCA:    always(r.clientCA.pool),
		Kubelet:     Kubelet{Certificate: always(r.clientCA.issue("tunnel-cloud")), CA: always(r.kubeletCA.pool)},
	}
	if configure != nil {
		configure(r, &cfg)
	}
	log := slog.New(slog.NewTextHandler(r.logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	door, err := New(cfg, r.tunnel, r.tunnel, log)
	must(t, err)
	door.grace = 2 * time.Second
	r.door = door
	return r
}

// addKubelet connects a node that has its own kubelet.
func (r *rig) addKubelet(node tunnel.NodeName, h http.Handler) {
	r.t.Helper()
	k := httptest.NewUnstartedServer(h)
	k.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	k.TLS = r.kubelet.TLS.Clone()
	k.TLS.Certificates = []tls.Certificate{*r.kubeletCA.issue("system:node:"+string(node), string(node))}
	k.StartTLS()
	r.t.Cleanup(k.Close)
	r.tunnel.set(func(f *fakeTunnel) {
		if f.at == nil {
			f.at = make(map[tunnel.NodeName]string)
		}
		f.nodes[node], f.at[node] = true, k.Listener.Addr().String()
	})
}

// hold connects or disconnects a node.
func (r *rig) hold(node tunnel.NodeName, held bool) {
	r.tunnel.set(func(f *fakeTunnel) { f.nodes[node] = held })
}

// start runs the door until the end of the test.
func (r *rig) start() *rig {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r.stop, r.done = cancel, make(chan error, 1)
	go func() { r.done <- r.door.Run(ctx) }()
	testkit.Eventually(r.t, "the door opens", func() bool { return r.door.Ready() == nil })
	r.addr = r.door.Addrs()[0].String()
	r.t.Cleanup(func() {
		cancel()
		select {
		case err, ok := <-r.done:
			if ok && err != nil {
				r.t.Errorf("Run: %v", err)
			}
		case <-time.After(patience):
			r.t.Error("Run does not end")
		}
		if n := r.tunnel.openConns(); n != 0 {
			r.t.Errorf("%d conns through the tunnel are left open", n)
		}
		if n := len(r.door.passthroughs.counts); n != 0 {
			r.t.Errorf("connections of %d sources still count as passed through", n)
		}
		if n := r.door.strangers.Len(); n != 0 {
			r.t.Errorf("%d strangers are still counted", n)
		}
		if r.t.Failed() {
			r.t.Logf("log of the door:\n%s", r.logs)
		}
	})
	return r
}

// caller returns a TLS configuration like kube-apiserver's.
func (r *rig) caller(serverName string) *tls.Config {
	return &tls.Config{
		RootCAs: r.frontCA.pool, ServerName: serverName,
		Certificates: []tls.Certificate{*r.clientCA.issue(DefaultClientName)},
	}
}

// client returns an HTTP client that dials the door for every host.
func (r *rig) client(cfg *tls.Config, h2 bool) *http.Client {
	p := new(http.Protocols)
	p.SetHTTP1(!h2)
	p.SetHTTP2(h2)
	t := &http.Transport{
		TLSClientConfig: cfg, Protocols: p, DisableCompression: true, ExpectContinueTimeout: patience,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", r.addr)
		},
	}
	r.t.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
}

// raw opens a TLS connection to the door.
func (r *rig) raw(cfg *tls.Config) *tls.Conn {
	r.t.Helper()
	c := r.tcp()
	tc := tls.Client(c, cfg)
	must(r.t, tc.Handshake())
	return tc
}

// kept is a connection to the door with HTTP/1.1 that a test keeps. A client of net/http would dial again after a
// request whose goroutine is 50 ms late.
type kept struct {
	*tls.Conn
	t  testing.TB
	br *bufio.Reader
}

func (r *rig) keep(cfg *tls.Config) *kept {
	r.t.Helper()
	c := r.raw(cfg)
	return &kept{c, r.t, bufio.NewReader(c)}
}

// ask is the function ask, over this connection.
func (k *kept) ask(host, path string) (*http.Response, string) {
	k.t.Helper()
	_, err := fmt.Fprintf(k, "GET %s HTTP/1.1\r\nHost: %s\r\nX-Test: not a probe\r\n\r\n", path, host)
	must(k.t, err)
	res := readResponse(k.t, k.br, "GET")
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	must(k.t, err)
	return res, string(b)
}

func (r *rig) tcp() *net.TCPConn {
	r.t.Helper()
	c, err := net.DialTimeout("tcp", r.addr, patience)
	must(r.t, err)
	must(r.t, c.SetDeadline(time.Now().Add(patience)))
	r.t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

// wantReset connects and fails unless the door resets the connection.
func (r *rig) wantReset() {
	r.t.Helper()
	c, err := net.DialTimeout("tcp", r.addr, patience)
	if err == nil {
		defer c.Close()
		must(r.t, c.SetDeadline(time.Now().Add(patience)))
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		r.t.Errorf("the connection ended with %v, want a reset", err)
	}
}

// fakeTunnel is a Dialer whose conns lead to target.
type fakeTunnel struct {
	target string

	mu       sync.Mutex // guards the following
	nodes    map[tunnel.NodeName]bool
	at       map[tunnel.NodeName]string // targets of nodes that have their own
	received []tunnel.Request
	conns    map[*fakeConn]bool
	fail     error
	edge     *Edge // dials instead, if set
	hook     func(context.Context, tunnel.Request) error
}

func (f *fakeTunnel) Holds(n tunnel.NodeName) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.nodes[n]
}

func (f *fakeTunnel) Connected() []tunnel.NodeName {
	f.mu.Lock()
	defer f.mu.Unlock()
	var names []tunnel.NodeName
	for n, held := range f.nodes {
		if held {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	return names
}

func (f *fakeTunnel) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	f.mu.Lock()
	f.received = append(f.received, r)
	fail, edge, hook := f.fail, f.edge, f.hook
	held, at := f.nodes[r.Node], f.at[r.Node]
	f.mu.Unlock()
	if hook != nil {
		if err := hook(ctx, r); err != nil {
			return nil, err
		}
	}
	switch {
	case !held:
		return nil, tunnel.Refusef(tunnel.NoSuchNode, "node %s is not connected", r.Node)
	case fail != nil:
		return nil, fail
	}
	if r.Addr = at; at == "" {
		r.Addr = f.target
	}
	var c net.Conn
	var err error
	if edge != nil {
		c, err = edge.Dial(ctx, r)
	} else {
		c, err = dialTCP(ctx, r)
	}
	if err != nil {
		return nil, err
	}
	fc := &fakeConn{Conn: c, f: f}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.conns == nil {
		f.conns = make(map[*fakeConn]bool)
	}
	f.conns[fc] = true
	return fc, nil
}

func dialTCP(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", r.Addr)
}

func (f *fakeTunnel) set(change func(*fakeTunnel)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *fakeTunnel) openConns() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.conns)
}

func (f *fakeTunnel) requests() []tunnel.Request {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]tunnel.Request(nil), f.received...)
}

// resetAll resets all conns, as when a session ends.
func (f *fakeTunnel) resetAll() {
	f.mu.Lock()
	var all []*fakeConn
	for c := range f.conns {
		all = append(all, c)
	}
	f.mu.Unlock()
	for _, c := range all {
		tunnel.Reset(c.Conn)
	}
}

// fakeConn has the methods of a conn through the tunnel: CloseWrite, CloseRead, Reset.
type fakeConn struct {
	net.Conn
	f *fakeTunnel
}

func (c *fakeConn) gone() {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	delete(c.f.conns, c)
}

func (c *fakeConn) Close() error {
	c.gone()
	return c.Conn.Close()
}

func (c *fakeConn) Reset() error {
	c.gone()
	tunnel.Reset(c.Conn)
	return nil
}

func (c *fakeConn) CloseWrite() error { return closeWrite(c.Conn) }

func (c *fakeConn) CloseRead() error {
	if cr, ok := c.Conn.(interface{ CloseRead() error }); ok {
		return cr.CloseRead()
	}
	return nil
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// within fails unless c is closed or receives a value in time.
func within[T any](t testing.TB, what string, d time.Duration, c <-chan T) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(d):
		t.Fatalf("not within %v: %s", d, what)
	}
}

// get requests url and returns the response with its body.
func get(t testing.TB, c *http.Client, url string) (*http.Response, string) {
	t.Helper()
	res, err := c.Get(url)
	must(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	must(t, err)
	return res, string(b)
}

func wantStatus(t testing.TB, res *http.Response, body string, status int, words ...string) {
	t.Helper()
	if res.StatusCode != status {
		t.Errorf("status %d, want %d; body %q", res.StatusCode, status, body)
	}
	for _, w := range words {
		if !strings.Contains(body, w) {
			t.Errorf("body %q does not say %q", body, w)
		}
	}
}

// readResponse reads one response from a raw connection.
func readResponse(t testing.TB, br *bufio.Reader, method string) *http.Response {
	t.Helper()
	res, err := http.ReadResponse(br, &http.Request{Method: method})
	must(t, err)
	return res
}
