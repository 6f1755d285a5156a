package https

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestNewComplains(t *testing.T) {
	ca := newCA(t, "ca")
	cert := always(ca.issue("front", "front.example"))
	for name, test := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"no clientca": {func(c *Config) { c.Mode, c.ClientCA = Terminate, nil },
			"needs clientca in [mode.cloud.https]"},
		"no certificate": {func(c *Config) { c.Mode, c.Certificate = Terminate, nil },
			"needs cert and key in [mode.cloud.https]"},
		"useless CA":      {func(c *Config) { c.Certificate = nil }, "no effect without cert and key"},
		"no kubelet CA":   {func(c *Config) { c.Kubelet.CA = nil }, "insecure = true"},
		"listen":          {func(c *Config) { c.Listen = "localhost" }, `"localhost"`},
		"port":            {func(c *Config) { c.Ports["https"] = "127.0.0.1:1" }, `"https"`},
		"target":          {func(c *Config) { c.Ports["1"] = "127.0.0.1" }, `"127.0.0.1"`},
		"mode":            {func(c *Config) { c.Mode = 7 }, "tls mode 7"},
		"nothing at all":  {func(c *Config) {}, ""},
		"passthrough":     {func(c *Config) { *c = Config{Mode: Passthrough} }, ""},
		"SuperEdge's own": {func(c *Config) { *c = Config{Certificate: cert, Ports: c.Ports} }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{Certificate: cert, ClientCA: always(ca.pool),
				Ports:   map[string]string{"10250": "127.0.0.1:10250"},
				Kubelet: Kubelet{Certificate: cert, CA: always(ca.pool)}}
			test.change(&cfg)
			_, err := New(cfg, &fakeTunnel{}, &fakeTunnel{}, slog.New(slog.DiscardHandler))
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one that says %q", err, test.want)
			}
		})
	}
}

func TestPortTaken(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer taken.Close()
	freePort := strconv.Itoa(testkit.FreePort(t))
	_, takenPort, _ := net.SplitHostPort(taken.Addr().String())
	r := newRig(t, nil, func(_ *rig, c *Config) {
		c.Ports = map[string]string{freePort: "127.0.0.1:1", takenPort: "127.0.0.1:2"}
	})
	err = r.door.Run(context.Background())
	if err == nil || !errors.Is(err, syscall.EADDRINUSE) ||
		!strings.Contains(err.Error(), "port "+takenPort+" of [mode.cloud.https.addr]") ||
		!strings.Contains(err.Error(), "choose another port") {
		t.Errorf("error %v", err)
	}
	if r.door.Ready() == nil || r.door.Addrs() != nil {
		t.Error("the door says that it is open")
	}
	again, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", freePort))
	if err != nil {
		t.Fatalf("the other port was left open: %v", err)
	}
	again.Close()
}

// alertIn returns the TLS alert that ended a handshake.
func alertIn(err error) tls.AlertError {
	var op *net.OpError
	if errors.As(err, &op) {
		// crypto/tls's own type for a received alert prints like AlertError.
		for a := range 256 {
			if op.Err.Error() == tls.AlertError(a).Error() {
				return tls.AlertError(a)
			}
		}
	}
	return 0
}

func TestDecisions(t *testing.T) {
	noClientCA := func(_ *rig, c *Config) { c.ClientCA = nil }
	passthrough := func(_ *rig, c *Config) { c.Mode = Passthrough }
	terminate := func(_ *rig, c *Config) { c.Mode = Terminate }
	for name, test := range map[string]struct {
		configure  func(*rig, *Config)
		serverName string
		alert      tls.AlertError // 0: the handshake succeeds
		by         string         // common name of the certificate that the caller saw
		log        string
	}{
		"auto, held":                   {nil, "edge1", 0, "system:node:edge1", ""},
		"auto, held, upper case":       {nil, "EDGE1", 0, "system:node:edge1", ""},
		"auto, not held":               {nil, "edge9", 0, "front", ""},
		"auto, another name":           {nil, "front.example", 0, "front", ""},
		"auto, no SNI":                 {nil, "127.0.0.1", 0, "front", ""},
		"auto, no clientca, held":      {noClientCA, "edge1", 0, "system:node:edge1", ""},
		"auto, no clientca, not held":  {noClientCA, "edge9", alertUnrecognizedName, "", "not a connected node"},
		"auto, no clientca, no SNI":    {noClientCA, "127.0.0.1", alertMissingExtension, "", "set clientca"},
		"passthrough, held":            {passthrough, "edge1", 0, "system:node:edge1", ""},
		"passthrough, not held":        {passthrough, "edge9", alertUnrecognizedName, "", "not a connected node"},
		"passthrough, no SNI":          {passthrough, "127.0.0.1", alertMissingExtension, "", "terminates nothing"},
		"passthrough, not a node name": {passthrough, "a_b", alertUnrecognizedName, "", "not a connected node"},
		"terminate, held":              {terminate, "edge1", 0, "front", ""},
		"terminate, no SNI":            {terminate, "127.0.0.1", 0, "front", ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil, test.configure).start()
			cfg := r.caller(test.serverName)
			cfg.InsecureSkipVerify = true
			c := tls.Client(r.tcp(), cfg)
			err := c.Handshake()
			if test.alert != 0 {
				if alertIn(err) != test.alert {
					t.Errorf("the handshake ended with %v, want %v", err, test.alert)
				}
				testkit.Eventually(t, "the log says why", func() bool { return strings.Contains(r.logs.String(), test.log) })
				n := r.door.cfg.Counters.Refusals(tunnel.NoSuchNode)
				if (n == 1) != (test.alert == alertUnrecognizedName) {
					t.Errorf("%d calls of an unknown node were counted", n)
				}
				return
			}
			must(t, err)
			if cn := c.ConnectionState().PeerCertificates[0].Subject.CommonName; cn != test.by {
				t.Errorf("met %q, want %q", cn, test.by)
			}
		})
	}
}

// A refusal of the dialler reaches callers that are passed through as an alert, and terminated
// callers as an HTTP response.
func TestRefusals(t *testing.T) {
	for _, test := range []struct {
		err    error
		status int
		alert  tls.AlertError
	}{
		{tunnel.Refusef(tunnel.Denied, "not in allow"), 502, alertAccessDenied},
		{tunnel.Refusef(tunnel.Refused, "connection refused"), 502, alertInternalError},
		{tunnel.Refusef(tunnel.Unreachable, "no route"), 502, alertInternalError},
		{tunnel.Refusef(tunnel.Timeout, "slow"), 504, alertInternalError},
		{tunnel.Refusef(tunnel.NoSuchNode, "just left"), 502, alertUnrecognizedName},
		{tunnel.Refusef(tunnel.Overloaded, "too many"), 503, alertInternalError},
		{tunnel.Refusef(tunnel.Draining, "going"), 503, alertInternalError},
		{tunnel.Refusef(tunnel.Gone, "gone"), 502, alertInternalError},
		{errors.New("something else"), 502, alertInternalError},
	} {
		t.Run(tunnel.CodeOf(test.err).String(), func(t *testing.T) {
			fail := func(r *rig, _ *Config) { r.tunnel.fail = test.err }
			check := func(r *rig, c *http.Client) {
				t.Helper()
				res, body := get(t, c, "https://edge1/")
				wantStatus(t, res, body, test.status, "edge1", test.err.Error())
				if h := res.Header.Get(RefusalHeader); h != tunnel.CodeOf(test.err).String() {
					t.Errorf("%s: %q", RefusalHeader, h)
				}
			}
			r := newRig(t, nil, fail).start()
			check(r, r.client(r.caller("127.0.0.1"), false))
			check(r, r.client(r.caller("127.0.0.1"), true))

			// A caller that named the node by SNI gets an HTTP response if it accepts our
			// certificate.
			before := len(r.tunnel.requests())
			check(r, r.client(r.caller("edge1"), false))
			if n := len(r.tunnel.requests()) - before; n != 1 {
				t.Errorf("the node was dialled %d times", n)
			}

			r = newRig(t, nil, func(r *rig, c *Config) { c.Mode = Passthrough; fail(r, c) }).start()
			if err := tls.Client(r.tcp(), r.caller("edge1")).Handshake(); alertIn(err) != test.alert {
				t.Errorf("the handshake ended with %v, want %v", err, test.alert)
			}
		})
	}
}

func TestCallers(t *testing.T) {
	r := newRig(t, nil, func(_ *rig, c *Config) { c.ClientNames = []string{"alice", "bob"} }).start()
	stranger := newCA(t, "stranger")
	as := func(cert *tls.Certificate) *http.Client {
		cfg := r.caller("127.0.0.1")
		cfg.Certificates = nil
		if cert != nil {
			cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil }
		}
		return r.client(cfg, false)
	}
	for _, name := range []string{"alice", "bob"} {
		res, body := get(t, as(r.clientCA.issue(name)), "https://edge1/")
		wantStatus(t, res, body, 200, "pong")
	}
	for _, q := range r.tunnel.requests() {
		if q.Caller != "alice" && q.Caller != "bob" {
			t.Errorf("Caller %q", q.Caller)
		}
	}
	if n := len(r.tunnel.requests()); n != 2 {
		t.Errorf("two callers shared %d conns", n)
	}
	for _, name := range []string{"", "Alice", "alice ", "kube-apiserver-kubelet-client", "system:node:edge1"} {
		res, body := get(t, as(r.clientCA.issue(name)), "https://edge1/")
		wantStatus(t, res, body, 403, "callers")
	}
	for name, cert := range map[string]*tls.Certificate{
		"none":       nil,
		"another CA": stranger.issue("alice"),
		"server's":   r.clientCA.issueLeaf(auth.Leaf{CommonName: "alice", Server: true}),
	} {
		if res, err := as(cert).Get("https://edge1/"); err == nil {
			res.Body.Close()
			t.Errorf("%s: status %d", name, res.StatusCode)
		}
	}
	testkit.Eventually(t, "the log says why", func() bool {
		return strings.Contains(r.logs.String(), "didn't provide a certificate") &&
			strings.Contains(r.logs.String(), "see callers")
	})
	if n := len(r.tunnel.requests()); n != 2 {
		t.Errorf("%d conns were dialled", n)
	}
}

func TestHosts(t *testing.T) {
	r := newRig(t, nil, func(_ *rig, c *Config) { c.Mode = Terminate }).start()
	r.tunnel.nodes["edge2"] = true
	none, sni1 := r.client(r.caller("127.0.0.1"), false), r.client(r.caller("edge1"), true)
	for _, test := range []struct {
		c      *http.Client
		host   string
		status int
		word   string
	}{
		{none, "edge1", 200, "pong"},
		{none, "edge1:10250", 200, "pong"},
		{none, "EDGE1.:10250", 200, "pong"},
		{none, "edge9", 502, "node edge9 is not connected"},
		{none, "127.0.0.1:10250", 502, "node 127.0.0.1 is not connected"},
		{none, "[::1]:10250", 400, "must name a node"},
		{none, "a_b", 400, "must name a node"},
		{none, strings.Repeat("a.", 150) + "a", 400, "must name a node"},
		{sni1, "edge1", 200, "pong"},
		{sni1, "edge2", 421, "edge1"},
	} {
		t.Run(fmt.Sprintf("%.20s", test.host), func(t *testing.T) {
			req, err := http.NewRequest("GET", "https://edge1/", nil)
			must(t, err)
			req.Host = test.host
			res, err := test.c.Do(req)
			must(t, err)
			b, err := io.ReadAll(res.Body)
			must(t, err)
			res.Body.Close()
			wantStatus(t, res, string(b), test.status, test.word)
		})
	}
	if n := r.door.cfg.Counters.Refusals(tunnel.NoSuchNode); n != 2 {
		t.Errorf("%d calls of unknown nodes were counted, want 2", n)
	}
}

// Raw requests, such as no client library sends.
func TestRawRequests(t *testing.T) {
	r := newRig(t, nil, nil).start()
	for name, test := range map[string]struct {
		request string
		status  int
	}{
		"no host":       {"GET / HTTP/1.1\r\n\r\n", 400},
		"empty host":    {"GET / HTTP/1.1\r\nHost:\r\n\r\n", 400},
		"two hosts":     {"GET / HTTP/1.1\r\nHost: edge1\r\nHost: edge2\r\n\r\n", 400},
		"absolute form": {"GET https://edge9/ HTTP/1.1\r\nHost: edge1\r\n\r\n", 502},
		"CONNECT":       {"CONNECT edge1:22 HTTP/1.1\r\nHost: edge1:22\r\n\r\n", 405},
		"two lengths":   {"POST / HTTP/1.1\r\nHost: edge1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400},
		"TE twice": {"POST / HTTP/1.1\r\nHost: edge1\r\n" +
			"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501},
		"TE obfuscated": {"POST / HTTP/1.1\r\nHost: edge1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501},
		"TE with space": {"POST / HTTP/1.1\r\nHost: edge1\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400},
		"bad chunk":     {"POST / HTTP/1.1\r\nHost: edge1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400},
		"header too big": {"GET / HTTP/1.1\r\nHost: edge1\r\nX: " +
			strings.Repeat("x", DefaultLimits().Headers+8<<10) + "\r\n\r\n", 431},
		"upgrade, body": {
			strings.Replace(upgradeRequest("websocket", "x"), "Content-Length: 0", "Content-Length: 1", 1), 400},
		"expectation": {"GET / HTTP/1.1\r\nHost: edge1\r\nExpect: miracles\r\n\r\n", 417},
		"HTTP/1.0":    {"GET / HTTP/1.0\r\nHost: edge1\r\n\r\n", 200},
	} {
		t.Run(name, func(t *testing.T) {
			c := r.raw(r.caller("127.0.0.1"))
			_, err := io.WriteString(c, test.request)
			must(t, err)
			res := readResponse(t, bufio.NewReader(c), strings.Fields(test.request)[0])
			b, _ := io.ReadAll(res.Body)
			wantStatus(t, res, string(b), test.status)
		})
	}
}

func TestAnswerHeaderTooBig(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X", strings.Repeat("x", 2*DefaultLimits().Headers))
	})
	r := newRig(t, h, nil).start()
	res, body := get(t, r.client(r.caller("127.0.0.1"), false), "https://edge1/")
	wantStatus(t, res, body, 502, "exceeded")
}

func TestKubeletCertificate(t *testing.T) {
	for name, test := range map[string]struct {
		node      tunnel.NodeName
		configure func(*rig, *Config)
		status    int
		word      string
	}{
		"verified":   {"edge1", nil, 200, "pong"},
		"other name": {"edge2", nil, 502, "not edge2"},
		"other CA": {"edge1", func(r *rig, c *Config) { c.Kubelet.CA = always(r.frontCA.pool) },
			502, "[mode.cloud.https.kubelet]"},
		"insecure": {"edge2", func(_ *rig, c *Config) { c.Kubelet.CA, c.Kubelet.Insecure = nil, true }, 200, "pong"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil, test.configure).start()
			r.tunnel.nodes["edge2"] = true
			res, body := get(t, r.client(r.caller("127.0.0.1"), false), "https://"+string(test.node)+"/")
			wantStatus(t, res, body, test.status, test.word)
		})
	}
}

func TestAllowFrom(t *testing.T) {
	seen := new(testkit.Trail[tunnel.Event])
	r := newRig(t, nil, func(_ *rig, c *Config) {
		c.Sink.Audit, c.Counters = seen.Record, new(tunnel.Counters)
		c.AllowFrom = auth.Sources{netip.MustParsePrefix("10.0.0.0/8")}
	}).start()
	r.wantReset()
	testkit.Eventually(t, "the log says why", func() bool { return strings.Contains(r.logs.String(), "allowfrom") })
	testkit.Eventually(t, "an event", func() bool { return len(seen.All()) == 1 })
	if e := seen.All()[0]; e.Kind != tunnel.EventHTTPS || e.Result != "denied" || e.Remote == "" || e.Door != r.addr {
		t.Errorf("the event is %+v", e)
	}
	if n := r.door.cfg.Counters.Doors[tunnel.DoorHTTPS].Results(tunnel.Denied); n != 1 {
		t.Errorf("%d denied callers are counted", n)
	}
}

// Lists that change count for the next connections, and for the next request of a connection that is open.
func TestListsChange(t *testing.T) {
	r := newRig(t, nil, nil).start()
	caller := r.keep(r.caller("127.0.0.1"))
	call := func(why string, status int, word string) {
		t.Helper()
		res, body := caller.ask("edge1", "/pods")
		if res.StatusCode != status || !strings.Contains(body, word) {
			t.Errorf("%s: %d %s, want %d and %q", why, res.StatusCode, body, status, word)
		}
	}
	call("by default", 200, "")
	r.door.SetLists(Lists{ClientNames: []string{"another"}, Callers: []Caller{
		{Name: DefaultClientName, May: []auth.Class{auth.ClassMetrics}},
	}})
	call("a caller that may read metrics alone", 403, "pods")
	r.door.SetLists(Lists{})
	call("by default again", 200, "")
	r.door.SetLists(Lists{AllowFrom: auth.Sources{netip.MustParsePrefix("10.0.0.0/8")}})
	call("a connection that is open", 200, "")
	r.wantReset()
}

func TestPlainHTTP(t *testing.T) {
	r := newRig(t, nil, nil).start()
	c := r.tcp()
	_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: edge1\r\n\r\n")
	must(t, err)
	res := readResponse(t, bufio.NewReader(c), "GET")
	b, err := io.ReadAll(res.Body)
	must(t, err)
	wantStatus(t, res, string(b), 400, "HTTP request to an HTTPS server")
}

// Strangers do not keep callers from other addresses out. Their places are free again when they have gone.
func TestStrangers(t *testing.T) {
	r := newRig(t, nil, func(_ *rig, c *Config) { c.Limits.HandshakeTimeout = time.Minute }).start()
	var slow []net.Conn
	for range DefaultLimits().StrangersPerAddress {
		c := r.tcp()
		_, err := c.Write(testkit.ClientHello("edge1")[:100]) // else it may lose its place to a newcomer after a second
		must(t, err)
		slow = append(slow, c)
	}
	count := r.door.strangers.Len
	testkit.Eventually(t, "all are counted", func() bool { return count() == DefaultLimits().StrangersPerAddress })
	r.wantReset()
	r.wantLimited(tunnel.LimitStrangersPerAddress, 1)
	from2 := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	other, err := from2.Dial("tcp", r.addr)
	must(t, err)
	defer other.Close()
	must(t, tls.Client(other, r.caller("127.0.0.1")).Handshake())
	for _, c := range slow {
		c.Close()
	}
	testkit.Eventually(t, "all are forgotten", func() bool { return count() == 0 })
	must(t, tls.Client(r.tcp(), r.caller("127.0.0.1")).Handshake())
}

// Strangers from a few addresses hold all places, silent or with half a ClientHello. Another caller
// is admitted all the same.
func TestStrangersFromFewAddresses(t *testing.T) {
	for name, begin := range map[string][]byte{"silent": nil, "half a ClientHello": testkit.ClientHello("edge1")[:100]} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil, func(_ *rig, c *Config) {
				c.Limits.Strangers, c.Limits.StrangersPerAddress = 64, 16
			}).start()
			few := func(i int) net.IP { return net.IPv4(127, 0, 0, byte(10+i%4)) }
			for _, c := range testkit.DialMany(t, 4*16, r.addr, few) {
				_, err := c.Write(begin)
				must(t, err)
			}
			testkit.Eventually(t, "all are counted", func() bool { return r.door.strangers.Len() == 64 })
			for range 20 {
				c := r.tcp()
				must(t, tls.Client(c, r.caller("127.0.0.1")).Handshake())
				c.Close()
			}
		})
	}
}

// A silent caller is disconnected.
func TestSilentStranger(t *testing.T) {
	r := newRig(t, nil, nil).start()
	begun := time.Now()
	c := r.tcp()
	c.SetDeadline(begun.Add(patience))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection ended with %v, want a reset", err)
	}
	if d := time.Since(begun); d < listen.FirstByte || d > listen.FirstByte+patience/2 {
		t.Errorf("hung up on after %s, want %s", d, listen.FirstByte)
	}
	r.wantLimited(tunnel.LimitHandshakeTimeout, 1)
}

// A caller with a certificate of clientca that may not call remains a stranger. Its connections
// count until they end: when it has been told why, or after strangerTimeout.
func TestStrangersWithACertificate(t *testing.T) {
	for _, proto := range []string{"h2", "http/1.1"} {
		t.Run(proto, func(t *testing.T) {
			r := newRig(t, nil, nil)
			if proto == "h2" {
				r.door.strangerTimeout = patience / 2
			}
			r.start()
			count := r.door.strangers.Len
			raw := func(name string) *tls.Conn {
				cfg := r.caller("127.0.0.1")
				cfg.Certificates = []tls.Certificate{*r.clientCA.issue(name)}
				cfg.NextProtos = []string{proto}
				return r.raw(cfg)
			}
			raw(DefaultClientName)
			testkit.Eventually(t, "a known caller is not counted", func() bool { return count() == 0 })
			mallory := raw("mallory")
			testkit.Eventually(t, "the other is given to net/http", func() bool {
				return strings.Count(r.logs.String(), "https connection terminated") == 2
			})
			if n := count(); n != 1 {
				t.Errorf("%d strangers are counted, want 1", n)
			}
			if proto == "http/1.1" {
				_, err := io.WriteString(mallory, "GET / HTTP/1.1\r\nHost: edge1\r\n\r\n")
				must(t, err)
				if b, err := io.ReadAll(mallory); err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 403") {
					t.Errorf("the answer is %q, %v", b, err)
				}
			} else {
				// No request: an HTTP/2 preface and SETTINGS.
				const preface, settings = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
				_, err := io.WriteString(mallory, preface+settings)
				must(t, err)
				if _, err := io.Copy(io.Discard, mallory); !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("the connection ended with %v, want a reset", err)
				}
			}
			testkit.Eventually(t, "its place is free again", func() bool { return count() == 0 })
		})
	}
}

// One address cannot take all conns of a node. Others still pass through, the address still reaches
// other nodes, and sources in allowfrom are not counted.
func TestConnsPerAddress(t *testing.T) {
	must2 := func(s auth.Sources, err error) auth.Sources {
		t.Helper()
		must(t, err)
		return s
	}
	for name, test := range map[string]struct {
		from    auth.Sources
		trusted bool
	}{
		"anyone":        {nil, false},
		"all addresses": {must2(auth.ParseSources([]string{"0.0.0.0/0", "::/0"})), false},
		"named":         {must2(auth.ParseSources([]string{"127.0.0.0/8"})), true},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil, func(_ *rig, c *Config) { c.Mode, c.AllowFrom = Passthrough, test.from })
			sink, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and sends nothing
			must(t, err)
			defer sink.Close()
			r.tunnel.at = map[tunnel.NodeName]string{"edge1": sink.Addr().String()}
			r.hold("edge2", true)
			r.start()
			hello := testkit.ClientHello("edge1")
			for i := range DefaultLimits().ConnsPerAddress {
				_, err = r.tcp().Write(hello)
				must(t, err)
				if i%64 == 63 { // limits the pressure on the sink's backlog
					testkit.Eventually(t, "they pass through", func() bool { return r.tunnel.openConns() == i+1 })
				}
			}
			if test.trusted {
				_, err = r.tcp().Write(hello)
				must(t, err)
				testkit.Eventually(t, "one more passes through",
					func() bool { return r.tunnel.openConns() == DefaultLimits().ConnsPerAddress+1 })
				return
			}
			for range 3 {
				if err = tls.Client(r.tcp(), r.caller("edge1")).Handshake(); alertIn(err) != alertInternalError {
					t.Errorf("one too many ended with %v", err)
				}
			}
			if n := strings.Count(r.logs.String(), "level=WARN msg=\"https connection denied"); n != 1 {
				t.Errorf("%d warnings, want 1", n)
			}
			r.wantLimited(tunnel.LimitConnsPerAddress, 3)
			cfg := direct(r)
			cfg.ServerName, cfg.InsecureSkipVerify = "edge2", true
			must(t, tls.Client(r.tcp(), cfg).Handshake())
			other, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}).Dial("tcp", r.addr)
			must(t, err)
			defer other.Close()
			_, err = other.Write(hello)
			must(t, err)
			testkit.Eventually(t, "another address passes through",
				func() bool { return r.tunnel.openConns() == DefaultLimits().ConnsPerAddress+2 })
			r.tunnel.resetAll()
			testkit.Eventually(t, "all are forgotten", func() bool {
				r.door.passthroughs.mu.Lock()
				defer r.door.passthroughs.mu.Unlock()
				return len(r.door.passthroughs.counts) == 0
			})
		})
	}
}

func TestWarnings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var logs testkit.Log
		f := &FrontDoor{log: slog.New(slog.NewTextHandler(&logs, nil))}
		for range 100 {
			f.warn(denySNI, "no name")
		}
		f.warn(denySource, "no source")
		if n := strings.Count(logs.String(), "\n"); n != 2 {
			t.Errorf("%d lines:\n%s", n, &logs)
		}
		time.Sleep(time.Minute) // in the synctest bubble's clock
		f.warn(denySNI, "no name")
		if !strings.Contains(logs.String(), `msg="no name" module=https skipped=99`) {
			t.Errorf("log:\n%s", &logs)
		}
	})
}

// tunnel.Splice can set socket options of callers that are passed through.
func TestPassedThroughCallerIsASocket(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer ln.Close()
	there, err := net.Dial("tcp", ln.Addr().String())
	must(t, err)
	defer there.Close()
	here, err := ln.Accept()
	must(t, err)
	c := &clientConn{Conn: here}
	if _, err := c.SyscallConn(); err != nil {
		t.Errorf("SyscallConn: %v", err)
	}
	tunnel.ResetOnDeath(c)
	here.Close() // as the kernel does when the process is killed
	must(t, there.SetDeadline(time.Now().Add(patience)))
	if _, err := there.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the caller saw %v, want a reset", err)
	}
}

// A panic ends only its own connection or request, is counted, and is logged.
func TestPanics(t *testing.T) {
	seen := new(testkit.Trail[tunnel.Event])
	r := newRig(t, nil, func(_ *rig, c *Config) { c.Sink.Audit = seen.Record }).start()
	r.tunnel.set(func(f *fakeTunnel) {
		f.hook = func(context.Context, tunnel.Request) error { panic("on purpose") }
	})
	if err := tls.Client(r.tcp(), r.caller("edge1")).Handshake(); err == nil {
		t.Error("the connection survived")
	}
	if n := r.door.cfg.Counters.Panics.Load(); n != 1 {
		t.Errorf("%d panics are counted", n)
	}
	// Terminated, net/http dials in a goroutine of its own.
	res, body := get(t, r.client(r.caller("127.0.0.1"), false), "https://edge1/")
	wantStatus(t, res, body, http.StatusBadGateway, "internal error")
	if n := r.door.cfg.Counters.Panics.Load(); n != 2 {
		t.Errorf("%d panics are counted", n)
	}
	r.tunnel.set(func(f *fakeTunnel) { f.hook = nil })
	must(t, tls.Client(r.tcp(), direct(r)).Handshake())

	// In a request: its event blames us, not the caller.
	door := r.door
	here, there := net.Pipe()
	defer here.Close()
	defer there.Close()
	exec, err := http.NewRequest("POST", "https://edge1/exec/ns/pod/c", nil)
	must(t, err)
	broken := &entry{f: door, r: exec, conn: &clientConn{Conn: here}}
	broken.arrive()
	broken.end(true)
	is := func(e tunnel.Event) bool { return e.Kind == tunnel.EventExec }
	testkit.Eventually(t, "the event", func() bool { return slices.ContainsFunc(seen.All(), is) })
	if e := seen.All()[slices.IndexFunc(seen.All(), is)]; e.Result != "internal" || !strings.Contains(e.Err, "panic") {
		t.Errorf("the event is %+v", e)
	}
	panics := door.cfg.Counters.Panics.Load()
	p := &proxy{f: door}
	func() {
		defer func() {
			if v := recover(); v != http.ErrAbortHandler { //nolint:errorlint // net/http compares in the same way
				t.Errorf("net/http sees %v", v)
			}
		}()
		req, err := http.NewRequest("GET", "/", nil)
		must(t, err)
		p.ServeHTTP(nil, req) // panics: there is no conn in the context
	}()
	if n := door.cfg.Counters.Panics.Load(); n != panics+1 || !strings.Contains(r.logs.String(), "on purpose") {
		t.Errorf("%d panics are counted", n)
	}
}

// closed waits until nobody can connect to the door.
func (r *rig) closed() {
	r.t.Helper()
	testkit.Eventually(r.t, "the door is closed", func() bool {
		n, err := net.Dial("tcp", r.addr)
		if err == nil {
			n.Close()
		}
		return err != nil
	})
}

// A drain lets connections of every kind end.
func TestDrain(t *testing.T) {
	release := make(chan struct{})
	started := make(chan struct{}, 1)
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "first ")
		http.NewResponseController(w).Flush()
		started <- struct{}{}
		<-release
		io.WriteString(w, "last")
	})
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			release = make(chan struct{})
			r := newRig(t, h, w.configure)
			r.door.grace = patience
			r.start()
			c := r.client(w.caller(r), w.h2)
			res, err := c.Get("https://edge1/")
			must(t, err)
			defer res.Body.Close()
			within(t, "the request", patience, started)
			r.stop()
			r.closed()
			close(release)
			b, err := io.ReadAll(res.Body)
			if err != nil || string(b) != "first last" {
				t.Errorf("got %q, %v", b, err)
			}
			testkit.Eventually(t, "the end of Run", func() bool {
				c.CloseIdleConnections() // those passed through belong to the caller
				select {
				case err := <-r.done:
					close(r.done)
					if err != nil {
						t.Errorf("Run: %v", err)
					}
					return true
				default:
					return false
				}
			})
		})
	}
}

// A door that stops waits for upgraded connections, such as those of kubectl exec.
func TestDrainWaitsForUpgrades(t *testing.T) {
	echo := hijacked(t, fmt.Sprintf(switching, "SPDY/3.1"), func(c net.Conn, br *bufio.Reader) {
		io.Copy(c, br) // until the half-close
	})
	for _, way := range upgradeWays {
		t.Run(way.name, func(t *testing.T) {
			r := newRig(t, echo, way.configure)
			r.door.grace = patience
			r.start()
			c := r.raw(r.caller("127.0.0.1"))
			_, err := io.WriteString(c, upgradeRequest("SPDY/3.1", ""))
			must(t, err)
			br := bufio.NewReader(c)
			readResponse(t, br, "POST")
			r.stop()
			r.closed()
			for range 10 {
				_, err := io.WriteString(c, "x")
				must(t, err)
				_, err = br.ReadByte()
				must(t, err)
				time.Sleep(10 * time.Millisecond)
			}
			must(t, c.CloseWrite())
			if rest, err := io.ReadAll(br); err != nil || len(rest) > 0 {
				t.Errorf("at the end: %q, %v", rest, err)
			}
			within(t, "the end of Run", patience, r.done)
			close(r.done)
		})
	}
}

// Connections that do not end within the grace period are reset.
func TestDrainResetsAfterTheGracePeriod(t *testing.T) {
	started := make(chan struct{}, 8)
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			hijacked(t, fmt.Sprintf(switching, "SPDY/3.1"), func(c net.Conn, br *bufio.Reader) {
				started <- struct{}{}
				io.Copy(io.Discard, br)
			}).ServeHTTP(w, r)
			return
		}
		io.WriteString(w, "first")
		http.NewResponseController(w).Flush()
		started <- struct{}{}
		<-r.Context().Done()
	})
	r := newRig(t, h, nil)
	r.door.grace = 50 * time.Millisecond
	r.start()
	res, err := r.client(r.caller("127.0.0.1"), false).Get("https://edge1/")
	must(t, err)
	defer res.Body.Close()
	passed, err := r.client(direct(r), true).Get("https://edge1/")
	must(t, err)
	defer passed.Body.Close()
	up := r.raw(r.caller("127.0.0.1"))
	_, err = io.WriteString(up, upgradeRequest("SPDY/3.1", ""))
	must(t, err)
	br := bufio.NewReader(up)
	readResponse(t, br, "POST")
	silent := r.tcp() // sends nothing
	for range 3 {
		within(t, "the request", patience, started)
	}
	r.stop()
	within(t, "the end of Run", patience, r.done)
	close(r.done)
	for name, body := range map[string]io.Reader{
		"terminated": res.Body, "passed through": passed.Body, "upgraded": br, "silent": silent,
	} {
		if _, err := io.Copy(io.Discard, body); err == nil {
			t.Errorf("%s: the end was a clean one", name)
		}
	}
}

// A dial that does not end is answered with a timeout.
func TestSlowDial(t *testing.T) {
	if testing.Short() {
		return // the dial lasts until dialTimeout
	}
	r := newRig(t, nil, nil).start()
	r.tunnel.set(func(f *fakeTunnel) {
		f.hook = func(ctx context.Context, _ tunnel.Request) error {
			<-ctx.Done()
			return ctx.Err()
		}
	})
	res, body := get(t, r.client(r.caller("127.0.0.1"), false), "https://edge1/")
	wantStatus(t, res, body, 504, "timeout")
}
