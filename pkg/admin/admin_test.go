package admin

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	channelz "google.golang.org/grpc/channelz/grpc_channelz_v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

const patience = 10 * time.Second

type module interface {
	tunnel.Module
	Addr() net.Addr
}

// start runs m until the end of the test and returns its address.
func start(t *testing.T, m module) string {
	t.Helper()
	testkit.Run(t, m.Run)
	testkit.Eventually(t, "it listens", func() bool { return m.Addr() != nil })
	return m.Addr().String()
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// get sends a request on a new connection and returns the response's status and body.
func get(t *testing.T, method, url string) (int, string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestHealth(t *testing.T) {
	var fault atomic.Pointer[error]
	s := New("127.0.0.1:0", []Check{
		{Name: "stream", Ready: func() error { return nil }},
		{Name: "session", Ready: func() error {
			if err := fault.Load(); err != nil {
				return *err
			}
			return nil
		}},
	}, NewRegistry("v1", new(tunnel.Counters), nil), discard())
	base := "http://" + start(t, s)
	want := func(method, path string, status int, body string) {
		t.Helper()
		if gotStatus, got := get(t, method, base+path); gotStatus != status || !strings.HasPrefix(got, body) {
			t.Errorf("%s %s: %d %q, want %d %q", method, path, gotStatus, got, status, body)
		}
	}
	want("GET", "/healthz", 200, "ok")
	want("HEAD", "/healthz", 200, "")
	want("GET", "/readyz", 200, "ok")
	want("GET", "/readyz?verbose", 200, "[+]stream ok\n[+]session ok\nreadyz check passed\n")

	err := errors.New("no session with the cloud")
	fault.Store(&err)
	want("GET", "/healthz", 200, "ok")
	want("GET", "/readyz", 503, "[+]stream ok\n[-]session no session with the cloud\nreadyz check failed\n")
	want("GET", "/readyz?verbose=1", 503, "[+]stream ok\n[-]session ")

	for _, path := range []string{"/", "/debug/pprof/", "/healthz/x", "/metrics/", "/readyz/stream"} {
		want("GET", path, 404, "")
	}
	want("POST", "/healthz", 405, "")
	want("OPTIONS", "/metrics", 405, "")
}

// A public server speaks TLS, and tells nothing but whether the process is ready.
func TestPublic(t *testing.T) {
	ca := testca.New(t, "test")
	pair := ca.Pair(t, auth.Leaf{CommonName: "cloud", DNSNames: []string{"cloud.example"}, Server: true, TTL: time.Hour})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	var ready atomic.Bool
	s := NewPublic(ln, &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		return &pair, nil
	}}, func() []Check {
		return []Check{{Name: "stream", Ready: func() error {
			if !ready.Load() {
				return errors.New("a secret of the inside")
			}
			return nil
		}}}
	}, discard())
	address := start(t, s)
	client := &http.Client{Timeout: patience, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: ca.Pool(), ServerName: "cloud.example"},
		ForceAttemptHTTP2: true,
	}}
	want := func(path string, status int, body string) {
		t.Helper()
		res, err := client.Get("https://" + address + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		got, err := io.ReadAll(res.Body)
		if err != nil || res.StatusCode != status || string(got) != body || res.ProtoMajor != 1 {
			t.Errorf("%s: %s %d %q, %v; want %d %q", path, res.Proto, res.StatusCode, got, err, status, body)
		}
	}
	want("/healthz", 200, "ok")
	want("/readyz", 503, "not ready")
	want("/readyz?verbose", 503, "not ready")
	ready.Store(true)
	want("/readyz?verbose", 200, "ok")
	want("/metrics", 404, "404 page not found\n")
}

// A note is listed, and does not make /readyz fail.
func TestNote(t *testing.T) {
	var fault, note, status string
	s := New("127.0.0.1:0", []Check{
		{Name: "stream"},
		{
			Name: "dns",
			Ready: func() error {
				if fault != "" {
					return errors.New(fault)
				}
				return nil
			},
			Note:   func() string { return note },
			Status: func() string { return status },
		},
		{Name: "hosts", Note: func() string { return "" }},
	}, prometheus.NewRegistry(), discard())
	h := s.handler()
	want := func(path string, status int, body string) {
		t.Helper()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		if got := w.Body.String(); w.Code != status || got != body {
			t.Errorf("%s: %d %q, want %d %q", path, w.Code, got, status, body)
		}
	}
	want("/readyz", 200, "ok")
	want("/readyz?verbose", 200, "[+]stream ok\n[+]dns ok\n[+]hosts ok\nreadyz check passed\n")

	status = "lag 3s"
	want("/readyz", 200, "ok")
	want("/readyz?verbose", 200, "[+]stream ok\n[+]dns ok: lag 3s\n[+]hosts ok\nreadyz check passed\n")

	note = "the ConfigMap is full\r\n[-]stream made up\n"
	list := "[+]stream ok\n[~]dns the ConfigMap is full; [-]stream made up\n[+]hosts ok\nreadyz check passed\n"
	want("/readyz", 200, list)
	want("/readyz?verbose", 200, list)

	fault = "one\ntwo"
	list = "[+]stream ok\n[-]dns one; two\n[+]hosts ok\nreadyz check failed\n"
	want("/readyz", 503, list)
	want("/readyz?verbose", 503, list)
}

func TestDegraded(t *testing.T) {
	note := ""
	reg := prometheus.NewPedanticRegistry()
	checks := []Check{{Name: "quiet"}, {Name: "auth", Note: func() string { return note }}}
	reg.MustRegister(NewDegradedCollector(checks))
	for _, want := range []float64{0, 1, 0} {
		families, err := reg.Gather()
		if err != nil || len(families) != 1 || len(families[0].GetMetric()) != 1 {
			t.Fatalf("%v, %v", families, err)
		}
		if m := families[0].GetMetric()[0]; m.GetGauge().GetValue() != want || m.GetLabel()[0].GetValue() != "auth" {
			t.Errorf("%v, want %v", m, want)
		}
		note = map[string]string{"": "the token file is bad"}[note]
	}
}

// Strangers who ask for the metrics all the time do not keep Prometheus out.
func TestScrapesWait(t *testing.T) {
	collect := make(chan struct{})
	slow := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "slow", Help: "x"}, func() float64 { <-collect; return 1 })
	reg := prometheus.NewRegistry()
	reg.MustRegister(slow)
	base := "http://" + start(t, New("127.0.0.1:0", nil, reg, discard()))
	statuses := make(chan int)
	const asked = 3 * maxScrapes
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for range asked {
		go func() {
			resp, err := client.Get(base + "/metrics")
			if err != nil {
				statuses <- 0
				return
			}
			resp.Body.Close()
			statuses <- resp.StatusCode
		}()
	}
	for range maxScrapes {
		collect <- struct{}{}
	}
	close(collect)
	for range asked {
		if status := <-statuses; status != http.StatusOK {
			t.Errorf("a scrape beside %d others gets %d", asked-1, status)
		}
	}
}

func TestMetrics(t *testing.T) {
	var c tunnel.Counters
	c.Sessions.Store(3)
	c.Replaced.Store(1)
	c.JoinsRefused.Store(7)
	c.ConnsOpened.Store(20)
	c.Switched.Store(6)
	c.Resets.Store(2)
	c.BytesSent.Store(1 << 30)
	c.BytesReceived.Store(5)
	c.UnknownMessages.Store(4)
	c.Refuse(tunnel.Denied)
	c.Refuse(tunnel.Denied)
	c.Refuse(tunnel.Timeout)
	c.Limited(tunnel.LimitOpens)
	var dir tunnel.Directory
	for _, node := range []tunnel.NodeName{"edge1", "edge2"} {
		s := &tunnel.Session{Node: node}
		if node == "edge2" {
			s.Paths = func() []tunnel.Path { return make([]tunnel.Path, 3) }
		}
		s.Conns.Store(4)
		dir.Attach(s)
	}
	base := "http://" + start(t, New("127.0.0.1:0", nil, NewRegistry("v1.2.3", &c, dir.Sessions), discard()))
	status, body := get(t, "GET", base+"/metrics")
	if status != 200 {
		t.Fatalf("%d %s", status, body)
	}
	for _, line := range []string{
		"tunnel_sessions 2",
		"tunnel_conns 8",
		"tunnel_multipath_sessions 1",
		"tunnel_multipath_paths 3",
		"tunnel_connections_switched_total 6",
		"tunnel_sessions_established_total 3",
		"tunnel_sessions_replaced_total 1",
		"tunnel_joins_refused_total 7",
		"tunnel_conns_opened_total 20",
		"tunnel_conns_reset_total 2",
		"tunnel_sent_bytes_total 1.073741824e+09",
		"tunnel_received_bytes_total 5",
		"tunnel_unknown_messages_total 4",
		"tunnel_panics_total 0",
		`tunnel_conns_refused_total{code="denied"} 2`,
		`tunnel_conns_refused_total{code="timeout"} 1`,
		`tunnel_conns_refused_total{code="no-such-node"} 0`,
		`tunnel_limited_total{limit="opens"} 1`,
		`tunnel_limited_total{limit="joiningperaddress"} 0`,
	} {
		if !strings.Contains(body, "\n"+line+"\n") {
			t.Errorf("no line %q", line)
		}
	}
	for _, part := range []string{`version="v1.2.3"`, "tunnel_build_info{", "go_goroutines ", "process_open_fds "} {
		if !strings.Contains(body, part) {
			t.Errorf("no %q", part)
		}
	}
	if strings.Contains(body, "edge1") {
		t.Error("a node is named")
	}
}

func TestEveryMetricKeepsTheConventions(t *testing.T) {
	reg := NewRegistry("v1", new(tunnel.Counters), new(tunnel.Directory).Sessions)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		name := f.GetName()
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		counter := f.GetType().String() == "COUNTER"
		if !strings.HasPrefix(name, "tunnel_") || strings.HasSuffix(name, "_total") != counter || f.GetHelp() == "" {
			t.Errorf("%s (%s): want the prefix tunnel_, _total on counters alone, and a help text", name, f.GetType())
		}
	}
}

func TestPortTaken(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	addr := ln.Addr().String()
	for _, m := range []tunnel.Module{
		New(addr, nil, NewRegistry("v1", new(tunnel.Counters), nil), discard()),
		NewChannelz(addr, discard()),
	} {
		err := m.Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), addr) || !strings.Contains(err.Error(), "choose another port") {
			t.Errorf("%s: %v", m.Name(), err)
		}
	}
}

// One host opens more idle keep-alive connections than it may have places. A probe from another
// address still succeeds, and idle connections are closed after a while.
func TestParkedConnectionsLeaveRoom(t *testing.T) {
	s := New("127.0.0.1:0", nil, prometheus.NewRegistry(), discard())
	s.Counters = new(tunnel.Counters)
	addr := start(t, s)
	var parked []net.Conn
	closed := 0
	for range DefaultConns + 10 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(2 * patience))
		io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			closed++
			continue
		}
		io.Copy(io.Discard, resp.Body)
		parked = append(parked, c)
	}
	// On a slow machine some are silent for a second, and then lose their places to newcomers.
	served := len(parked)
	parked = slices.DeleteFunc(parked, func(c net.Conn) bool { return hasEnded(t, c) })
	if len(parked) != DefaultConns/8 {
		t.Errorf("one address has %d connections open, want %d", len(parked), DefaultConns/8)
	}
	closed += served - len(parked)
	if n := s.Counters.LimitedBy(tunnel.LimitHealth); n != uint64(closed) {
		t.Errorf("the limit is counted %d times, want %d", n, closed)
	}
	probe := &http.Client{Timeout: patience, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}).DialContext,
	}}
	resp, err := probe.Get("http://" + addr + "/healthz")
	if err != nil {
		t.Fatalf("a probe from another address: %v", err)
	}
	resp.Body.Close()
	if idleTimeout > 10*time.Second {
		t.Errorf("an idle connection is kept for %s", idleTimeout)
	}
	// A released place is free again.
	parked[0].Close()
	late := time.After(patience)
	for {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, "GET /healthz HTTP/1.0\r\n\r\n")
		answer, err := io.ReadAll(c)
		c.Close()
		if err == nil && len(answer) > 0 {
			return
		}
		select {
		case <-late:
			t.Fatal("no room after one has left")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// hasEnded reports whether the peer has closed c, which has nothing to read. It does not wait.
func hasEnded(t *testing.T, c net.Conn) bool {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var peekErr error
	if err := raw.Control(func(fd uintptr) {
		_, _, peekErr = syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	}); err != nil {
		t.Fatal(err)
	}
	return !errors.Is(peekErr, syscall.EAGAIN)
}

// A few addresses hold all places: silent, in the middle of a header, or idle after a response. A
// probe from another address does not have to wait.
func TestFewAddressesLeaveRoom(t *testing.T) {
	for name, begin := range map[string]string{
		"silent":           "",
		"half a header":    "GET /metrics HTTP/1.1\r\n",
		"behind an answer": "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			s := New("127.0.0.1:0", nil, prometheus.NewRegistry(), discard())
			addr := start(t, s)
			from := func(last byte) net.Dialer {
				return net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, last)}, Timeout: patience}
			}
			const sources = 16
			for i := range sources * DefaultConns / 8 {
				d := from(byte(10 + i%sources))
				c, err := d.Dial("tcp", addr)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				io.WriteString(c, begin)
			}
			other := from(2)
			transport := &http.Transport{DisableKeepAlives: true, DialContext: other.DialContext}
			probe := &http.Client{Timeout: patience, Transport: transport}
			var took []time.Duration
			for range 21 {
				begun := time.Now()
				resp, err := probe.Get("http://" + addr + "/healthz")
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				took = append(took, time.Since(begun))
			}
			if fastest := slices.Min(took); fastest > time.Second { // others may be slower on a busy machine
				t.Errorf("probes take %s; a kubelet waits for one second", fastest)
			}
		})
	}
}

func TestHugeHeaderIsRefused(t *testing.T) {
	addr := start(t, New("127.0.0.1:0", nil, NewRegistry("v1", new(tunnel.Counters), nil), discard()))
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n")
	go func() { // ends when the server closes the connection, or when c is closed
		line := "X: " + strings.Repeat("x", 1000) + "\r\n"
		for range 1000 {
			if _, err := io.WriteString(c, line); err != nil {
				return
			}
		}
	}()
	b := make([]byte, 12)
	// The reset that follows the response may overtake it.
	if _, err := io.ReadFull(c, b); string(b) != "HTTP/1.1 431" && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("answered %q, %v", b, err)
	}
}

func TestChannelzIsOnLoopbackOnly(t *testing.T) {
	for _, addr := range []string{"0.0.0.0:7001", ":7001", "[::]:7001", "192.0.2.1:7001"} {
		err := NewChannelz(addr, discard()).Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), "write 127.0.0.1:7001") {
			t.Errorf("%s: %v", addr, err)
		}
	}
	if err := NewChannelz("nonsense", discard()).Run(t.Context()); err == nil {
		t.Error("nonsense is accepted")
	}
}

func TestChannelz(t *testing.T) {
	addr := start(t, NewChannelz("127.0.0.1:0", discard()))
	ask := func(opts ...grpc.DialOption) (*channelz.GetServersResponse, error) {
		opts = append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))
		conn, err := grpc.NewClient("passthrough:///"+addr, opts...)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		return channelz.NewChannelzClient(conn).GetServers(ctx, &channelz.GetServersRequest{})
	}
	r, err := ask()
	if err != nil || len(r.GetServer()) == 0 {
		t.Errorf("channelz does not see its own server: %v, %v", r, err)
	}
	if _, err := ask(grpc.WithAuthority("localhost:7001")); err != nil {
		t.Errorf("localhost: %v", err)
	}
	if _, err := ask(grpc.WithAuthority("evil.example")); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a name that is not this machine's own: %v", err)
	}
}
