package dial

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http/httpproxy"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/wsconn"
)

// canary is the password of the proxies here. It must stand in no error.
const canary = "canary/p@ss:word"

const patience = time.Minute

// serve serves connections on loopback until the test ends.
func serve(t *testing.T, conf *tls.Config, handle func(net.Conn)) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if conf != nil {
		ln = tls.NewListener(ln, conf)
	}
	return testkit.ServeOn(t, ln, func(_ context.Context, c net.Conn) {
		defer c.Close()
		handle(c)
	})
}

// echo is a cloud: it returns what it gets.
func echo(c net.Conn) { io.Copy(c, c) }

// connectProxy is an HTTP proxy. want is what it wants in Proxy-Authorization. It says first right behind its 200.
func connectProxy(want, first string) func(net.Conn) {
	return func(c net.Conn) {
		in := bufio.NewReader(c)
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		if want != "" && r.Header.Get("Proxy-Authorization") != want {
			fmt.Fprint(c, "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=\"x\"\r\n"+
				"Content-Length: 5\r\n\r\nsorry")
			return
		}
		splice(c, in, r.RequestURI, "HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n"+first)
	}
}

// splice connects c to an address, after it has sent answer.
func splice(c net.Conn, in io.Reader, addr, answer string) {
	to, err := net.Dial("tcp", addr)
	if err != nil {
		fmt.Fprintf(c, "HTTP/1.1 503 Service Unavailable\r\nX-Squid-Error: ERR_CONNECT_FAIL 111\r\n\r\n")
		return
	}
	defer to.Close()
	io.WriteString(c, answer)
	go func() { io.Copy(to, in); to.Close() }()
	io.Copy(c, to)
}

// socksProxy is a SOCKS5 proxy. With reply other than 0 it refuses.
func socksProxy(user, password string, reply byte) func(net.Conn) {
	return func(c net.Conn) {
		b := make([]byte, 260)
		read := func(n int) []byte { io.ReadFull(c, b[:n]); return b[:n] }
		methods := string(read(int(read(2)[1])))
		method := byte(0)
		if user != "" {
			method = 2
		}
		if !strings.Contains(methods, string(method)) {
			c.Write([]byte{5, 0xff})
			return
		}
		c.Write([]byte{5, method})
		if user != "" {
			gotUser := string(read(int(read(2)[1])))
			gotPassword := string(read(int(read(1)[0])))
			if gotUser != user || gotPassword != password {
				c.Write([]byte{1, 1})
				return
			}
			c.Write([]byte{1, 0})
		}
		head := read(4)
		var host string
		switch head[3] {
		case 1:
			host = net.IP(read(4)).String()
		case 3:
			host = string(read(int(read(1)[0])))
		}
		port := binary.BigEndian.Uint16(read(2))
		ok := []byte{5, reply, 0, 1, 0, 0, 0, 0, 0, 0}
		if reply != 0 {
			c.Write(ok)
			return
		}
		splice(c, c, net.JoinHostPort(strings.Replace(host, "cloud.test", "127.0.0.1", 1), fmt.Sprint(port)), string(ok))
	}
}

// certificate returns the CA of a box in between, and its TLS.
func certificate(t *testing.T, host string) (*x509.CertPool, *tls.Config) {
	t.Helper()
	ca := testca.New(t, "box")
	leaf := auth.Leaf{CommonName: host, DNSNames: []string{host}, Server: true, TTL: time.Hour}
	if ip := net.ParseIP(host); ip != nil {
		leaf.DNSNames, leaf.IPs = nil, []net.IP{ip}
	}
	return ca.Pool(), &tls.Config{Certificates: []tls.Certificate{ca.Pair(t, leaf)}}
}

// through returns a dialer to a server by the URL of a proxy.
func through(t *testing.T, proxy string, roots *x509.CertPool, servers ...string) *Dialer {
	t.Helper()
	cfg := Config{Servers: mustServers(t, servers...), UserAgent: "tunnel/test"}
	if proxy != "" {
		p, err := ParseProxy(proxy, "proxy in [mode.edge.stream.client]")
		if err != nil {
			t.Fatal(err)
		}
		cfg.Proxy = Through(p)
	}
	if roots != nil {
		cfg.Roots = func() *x509.CertPool { return roots }
	}
	d, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// escaped is the canary as a URL holds it.
const escaped = "canary%2Fp%40ss%3Aword"

// Connections lead to the cloud through each kind of proxy, the first and another one by the same way.
func TestProxies(t *testing.T) {
	cloud := serve(t, nil, echo)
	_, port, _ := net.SplitHostPort(cloud)
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte("me:"+canary))
	roots, boxTLS := certificate(t, "127.0.0.1")
	plain, withPassword := serve(t, nil, connectProxy("", "")), serve(t, nil, connectProxy(basic, ""))
	early, overTLS := serve(t, nil, connectProxy("", "hello")), serve(t, boxTLS, connectProxy(basic, ""))
	socks, socksPassword := serve(t, nil, socksProxy("", "", 0)), serve(t, nil, socksProxy("me", canary, 0))
	const user = "me:" + escaped + "@"
	name := "cloud.test:" + port
	for name, tt := range map[string]struct {
		proxy, server, first, via string
		roots                     *x509.CertPool
	}{
		"http":                 {proxy: "http://" + plain, server: cloud, via: plain},
		"host:port":            {proxy: plain, server: cloud, via: plain},
		"with password":        {proxy: "http://" + user + withPassword, server: cloud, via: withPassword},
		"bytes behind the 200": {proxy: "http://" + early, server: cloud, first: "hello", via: early},
		"https": {
			proxy: "https://" + user + overTLS, server: cloud, roots: roots, via: "https://" + overTLS,
		},
		"socks5":  {proxy: "socks5://" + socks, server: cloud, via: "socks5://" + socks},
		"socks5h": {proxy: "socks5h://" + user + socksPassword, server: name, via: "socks5://" + socksPassword},
	} {
		t.Run(name, func(t *testing.T) {
			d := through(t, tt.proxy, tt.roots, tt.server)
			c, err := d.Dial(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			again, err := c.Again(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer again.Close()
			for _, c := range []*Conn{c, again} {
				if _, indirect := c.IsIndirect(); !indirect || c.Route() != tt.server+" through proxy "+tt.via {
					t.Errorf("route %q, indirect %t", c.Route(), indirect)
				}
				want := tt.first + "ping"
				c.SetDeadline(time.Now().Add(patience))
				c.Write([]byte("ping"))
				got := make([]byte, len(want))
				if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
					t.Errorf("%q, %v; want %q", got, err, want)
				}
			}
		})
	}
}

// The edge reaches the cloud inside a WebSocket, directly and through a proxy.
func TestWebSocketRoute(t *testing.T) {
	roots, boxTLS := certificate(t, "127.0.0.1")
	ingress := serveHTTP(t, boxTLS)
	proxy := serve(t, nil, connectProxy("", ""))
	for name, url := range map[string]string{"directly": "", "through a proxy": "http://" + proxy} {
		t.Run(name, func(t *testing.T) {
			d := through(t, url, roots, "wss://"+ingress+"/tunnel")
			c, err := d.Dial(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if trip, indirect := c.IsIndirect(); !indirect || trip <= 0 {
				t.Errorf("indirect %t, trip %s", indirect, trip)
			}
			c.Write([]byte("ping"))
			got := make([]byte, 4)
			if _, err := io.ReadFull(c, got); err != nil || string(got) != "ping" {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

// serveHTTP is an ingress with the WebSocket of a cloud that echoes at /tunnel. Other paths are statuses.
func serveHTTP(t *testing.T, conf *tls.Config) (addr string) {
	t.Helper()
	type rawKey struct{}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr = ln.Addr().String()
	if conf != nil {
		ln = tls.NewListener(ln, conf)
	}
	server := &http.Server{
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, rawKey{}, c) },
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var status int
			if r.URL.Path == "/tunnel" {
				c, err := wsconn.Accept(w, r, r.Context().Value(rawKey{}).(net.Conn))
				if err == nil {
					echo(c)
					c.Close()
				}
			} else if _, err := fmt.Sscanf(r.URL.Path, "/%d", &status); err == nil {
				w.WriteHeader(status)
			} else {
				http.NotFound(w, r)
			}
		}),
		ErrorLog: log.New(io.Discard, "", 0),
	}
	served := make(chan struct{})
	go func() { defer close(served); server.Serve(ln) }()
	t.Cleanup(func() { server.Close(); <-served })
	return addr
}

// TestBrokenNetworks: each broken network has an error that names the cause, and the next step.
func TestBrokenNetworks(t *testing.T) {
	cloud := serve(t, nil, echo)
	closed := testkit.FreeAddress(t)
	says := func(text string) string {
		return serve(t, nil, func(c net.Conn) {
			http.ReadRequest(bufio.NewReader(c))
			io.WriteString(c, text)
		})
	}
	asked := make(map[string]chan struct{}) // closed when the silent server of a test is asked
	silent := func(name string) string {
		first := make(chan struct{})
		asked[name] = first
		heard := sync.OnceFunc(func() { close(first) })
		return serve(t, nil, func(c net.Conn) {
			io.ReadFull(c, make([]byte, 1))
			heard()
			io.Copy(io.Discard, c)
		})
	}
	boxRoots, boxTLS := certificate(t, "127.0.0.1")
	otherRoots, otherTLS := certificate(t, "other.test")
	namedRoots, namedTLS := certificate(t, "\x1b[2J.test")
	named := strings.Replace(serve(t, namedTLS, echo), "127.0.0.1", "box.test", 1)
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte("me:other"))
	password := "me:" + escaped + "@"
	web := serveHTTP(t, nil)
	overTLS := serveHTTP(t, boxTLS)
	for _, tt := range []struct {
		name, proxy, server string
		roots               *x509.CertPool
		step, cause, next   string
	}{
		{"no cloud there", "", closed, nil, StepTCP, "connection refused", "is the cloud running"},
		{"the name is unknown", "", "cloud.invalid:9000", nil, StepDNS, "cloud.invalid", "servername"},
		{"proxy down", "http://" + closed, cloud, nil, StepProxy, "connection refused", "is the proxy running"},
		{"proxy unknown", "http://proxy.invalid:3128", cloud, nil, StepProxy, "proxy.invalid", "name of the proxy"},
		{"proxy silent", "http://" + silent("proxy silent"), cloud, nil, StepProxy,
			"no answer to CONNECT " + cloud, "does not reach"},
		{"no password", "http://" + serve(t, nil, connectProxy(basic, "")), cloud, nil, StepProxy,
			"407 Proxy Authentication Required", "http://USER:PASSWORD@"},
		{"no password, over TLS", "https://" + serve(t, boxTLS, connectProxy(basic, "")), cloud, boxRoots, StepProxy,
			"407 Proxy Authentication Required", "https://USER:PASSWORD@"},
		{"wrong password", "http://" + password + serve(t, nil, connectProxy(basic, "")), cloud, nil, StepProxy,
			"407", "does not accept the user and password"},
		{"NTLM alone", "http://" + says("HTTP/1.1 407 Denied\r\nProxy-Authenticate: NTLM\r\n\r\n"), cloud, nil, StepProxy,
			"407 Denied", "asks for NTLM, and tunnel speaks Basic"},
		{"forbidden", "http://" + password + says("HTTP/1.1 403 Forbidden\r\nX-Squid-Error: ERR_ACCESS_DENIED 0\r\n\r\n"),
			cloud, nil, StepProxy, "403 Forbidden, ERR_ACCESS_DENIED 0", "permit CONNECT to " + cloud},
		{"the proxy does not reach the cloud", "http://" + serve(t, nil, connectProxy("", "")), closed, nil, StepProxy,
			"503 Service Unavailable, ERR_CONNECT_FAIL 111", "cannot reach " + closed},
		{"a web server", "http://" + web, cloud, nil, StepProxy, "404 Not Found", "a web server answers there"},
		{"a web server that says so", "http://" + says("HTTP/1.1 400 Bad Request\r\n\r\n"), cloud, nil, StepProxy,
			"400 Bad Request", "a web server answers there"},
		{"no HTTP", "http://" + says("SSH-2.0-OpenSSH\r\n\x00\xff"), cloud, nil, StepProxy,
			"is not HTTP", "it is no HTTP proxy"},
		{"no end of its header", "http://" + says("HTTP/1.1 200 OK\r\nA: "+strings.Repeat("b", 1<<20)), cloud, nil, StepProxy,
			"longer than 16384 bytes", "it is no HTTP proxy"},
		{"it hangs up", "http://" + says(""), cloud, nil, StepProxy, "closed the connection", "https://"},
		{"TLS to a proxy without", "https://" + password + serve(t, nil, func(c net.Conn) {
			c.Read(make([]byte, 1))
			io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
		}), cloud, nil, StepProxy, "does not look like a TLS handshake", "write http://"},
		{"proxy of another CA", "https://" + overTLS, cloud, nil, StepProxy, "unknown authority", "proxyca"},
		{"proxy of another name", "https://" + serve(t, otherTLS, echo), cloud, otherRoots, StepProxy,
			"127.0.0.1", "name in the proxy's certificate"},
		{"proxy with a name that is no text", "https://" + named, cloud, namedRoots, StepProxy,
			"valid for ?[2J.test", "name in the proxy's certificate"},
		{"ingress with a name that is no text", "", "wss://" + named + "/tunnel", namedRoots, StepWebSocket,
			"valid for ?[2J.test", "name in the certificate"},
		{"SOCKS wants a password", "socks5://" + serve(t, nil, socksProxy("me", "x", 0)), cloud, nil, StepProxy,
			"no acceptable authentication methods", "USER:PASSWORD@"},
		{"SOCKS, wrong password", "socks5://" + password + serve(t, nil, socksProxy("me", "x", 0)), cloud, nil, StepProxy,
			"authentication failed", "does not accept the user and password"},
		{"SOCKS, forbidden", "socks5://" + serve(t, nil, socksProxy("", "", 2)), cloud, nil, StepProxy,
			"not allowed by ruleset", "permit connections to " + cloud},
		{"SOCKS, refused", "socks5://" + serve(t, nil, socksProxy("", "", 5)), cloud, nil, StepProxy,
			"connection refused", "cannot reach " + cloud},
		{"no SOCKS", "socks5://" + serve(t, nil, func(c net.Conn) {
			c.Read(make([]byte, 100)) // a greeting has no line end
			io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
		}), cloud, nil, StepProxy, "unexpected protocol version", "it is no SOCKS5 proxy"},
		{"SOCKS silent", "socks5://" + silent("SOCKS silent"), cloud, nil, StepProxy, "CONNECT " + cloud, "does not reach"},
		{"TLS interception", "", "wss://" + overTLS + "/tunnel", nil, StepWebSocket, "unknown authority", "proxyca"},
		{"no TLS at the ingress", "", "wss://" + web + "/tunnel", nil, StepWebSocket,
			"does not look like a TLS handshake", "ws://"},
		{"another path", "", "ws://" + web + "/404", nil, StepWebSocket, "404 Not Found", "/tunnel"},
		{"Upgrade is not passed on", "", "ws://" + web + "/426", nil, StepWebSocket, "426", "proxy_http_version"},
		{"the ingress wants a login", "", "ws://" + web + "/401", nil, StepWebSocket, "401", "without a login"},
		{"the ingress does not reach the cloud", "", "ws://" + web + "/502", nil, StepWebSocket,
			"502 Bad Gateway", "websocket in [mode.cloud.stream.server]"},
		{"an answer that would move the cursor", "",
			"ws://" + says("HTTP/1.1 403 \x1b[2J\xff"+strings.Repeat("x", 1000)+"\r\n\r\n") + "/tunnel",
			nil, StepWebSocket, "403 ?[2J?", "without a login"},
		{"an endless line", "", "ws://" + says("SSH-2.0-\x1b[2J"+strings.Repeat("x", 1000)+"\r\n") + "/tunnel",
			nil, StepWebSocket, "malformed HTTP response", "does the ingress pass WebSockets on"},
		{"the ingress is silent", "", "ws://" + silent("the ingress is silent") + "/tunnel", nil, StepWebSocket, "",
			"does not answer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if asked := asked[tt.name]; asked != nil {
				ctx = testkit.Deadline(ctx, asked)
			}
			d := through(t, tt.proxy, tt.roots, tt.server)
			d.cfg.LookUp = func(_ context.Context, _, host string) ([]netip.Addr, error) {
				if host == "box.test" {
					return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
				}
				return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
			}
			c, err := d.Dial(ctx)
			if err == nil {
				c.Close()
				t.Fatal("connected")
			}
			e, ok := errors.AsType[*Error](err)
			if !ok {
				t.Fatalf("no hint: %v", err)
			}
			t.Log(e)
			if e.Step != tt.step || !strings.Contains(e.Err.Error(), tt.cause) || !strings.Contains(e.Hint, tt.next) {
				t.Errorf("step %s, %v (%s)\nwant step %s, %q and %q", e.Step, e.Err, e.Hint, tt.step, tt.cause, tt.next)
			}
			if text := err.Error(); strings.Contains(text, canary) || strings.Contains(text, escaped) ||
				strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }) || len(text) > 600 {
				t.Errorf("the error shows a secret, more than a short line, or what is no text: %q", text)
			}
		})
	}
}

// A timeout of a direct connection says what may be in between.
func TestTimeoutHint(t *testing.T) {
	d, err := New(Config{
		Servers: mustServers(t, "192.0.2.1:9000"),
		Connect: func(ctx context.Context, _, _ string) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err = d.Dial(ctx)
	if e, ok := errors.AsType[*Error](err); !ok || !strings.Contains(e.Hint, "TCP port 9000") {
		t.Errorf("%v", err)
	}
}

func TestParseProxy(t *testing.T) {
	for text, want := range map[string]string{
		"http://proxy:3128":               "proxy proxy:3128",
		"proxy:3128":                      "proxy proxy:3128",
		"proxy":                           "proxy proxy:80",
		"https://proxy":                   "proxy https://proxy:443",
		"socks5://[::1]":                  "proxy socks5://[::1]:1080",
		"socks5h://u:" + escaped + "@p:1": "proxy socks5://p:1",
		"http://u:" + escaped + "@p:1/":   "proxy p:1",
		" http://p:1\n":                   "proxy p:1",
		"ftp://u:canary@p":                "",
		"http://u:canary @p:1":            "",
		"http://u:canary/x@p:1":           "",
		"http://u:canary@p:port":          "",
		"http://u:canary@p:0":             "",
		"socks5://u@p":                    "",
		"socks5://u:canary" + strings.Repeat("x", 300) + "@p": "",
		"": "",
	} {
		p, err := ParseProxy(text, "proxy")
		if (err == nil) != (want != "") || err == nil && p.String() != want {
			t.Errorf("%q: %v, %v; want %s", text, p, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "canary") {
			t.Errorf("the error shows the password: %v", err)
		}
		if err == nil {
			again, err := ParseProxy(p.URL(), "proxy")
			if err != nil || *again != *p {
				t.Errorf("%q: URL and back makes %v, %v", text, again, err)
			}
		}
	}
}

// HTTPS_PROXY and NO_PROXY mean what they mean to other programs.
func TestFromEnvironment(t *testing.T) {
	for _, tt := range []struct{ https, no, server, want string }{
		{"", "", "cloud:9000", ""},
		{"http://u:" + escaped + "@p:1", "", "cloud:9000", "proxy p:1"},
		{"p:1", "", "wss://cloud/tunnel", "proxy p:1"},
		{"p:1", "", "127.0.0.1:9000", ""},
		{"p:1", "", "localhost:9000", ""},
		{"p:1", "*", "cloud:9000", ""},
		{"p:1", ".example.com,10.0.0.0/8", "a.example.com:9000", ""},
		{"p:1", ".example.com,10.0.0.0/8", "10.1.2.3:9000", ""},
		{"p:1", ".example.com,10.0.0.0/8", "11.1.2.3:9000", "proxy p:1"},
		{"p:1", "cloud:9001", "cloud:9000", "proxy p:1"},
		{"ftp://u:" + escaped + "@p", "", "cloud:9000", "error"},
		{"ftp://u:" + escaped + "@p", "cloud", "cloud:9000", ""},
	} {
		p, err := FromEnvironment(&httpproxy.Config{HTTPSProxy: tt.https, NoProxy: tt.no})(mustServers(t, tt.server)[0])
		got := ""
		switch {
		case err != nil:
			got = "error"
			if strings.Contains(err.Error(), "canary") || !strings.Contains(err.Error(), "HTTPS_PROXY") {
				t.Error(err)
			}
		case p != nil:
			got = p.String()
		}
		if got != tt.want {
			t.Errorf("%+v: %q", tt, got)
		}
	}
}

// The file of a proxy is read each time.
func TestFromFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "proxy")
	f := FromFile(path, "proxyfile")
	for text, want := range map[string]string{"http://u:p@a:1\n": "http://u:p@a:1", "b:2": "http://b:2"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if p, err := f(Server{}); err != nil || p.URL() != want {
			t.Errorf("%q: %v, %v", text, p, err)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := f(Server{}); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "proxyfile") {
		t.Error(err)
	}
}

// A connection by the same way has the password that the file has now. It keeps its proxy if the file names another
// one, or none.
func TestAgainReadsPassword(t *testing.T) {
	cloud := serve(t, nil, echo)
	var password atomic.Pointer[string]
	proxy := serve(t, nil, func(c net.Conn) {
		connectProxy("Basic "+base64.StdEncoding.EncodeToString([]byte("me:"+*password.Load())), "")(c)
	})
	path := filepath.Join(t.TempDir(), "proxy")
	write := func(url string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(url), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	change := func(to string) {
		password.Store(&to)
		write("http://me:" + to + "@" + proxy)
	}
	change("first")
	d, err := New(Config{Servers: mustServers(t, cloud), Proxy: FromFile(path, "proxyfile")})
	if err != nil {
		t.Fatal(err)
	}
	c, err := d.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	again := func(when string) {
		t.Helper()
		other, err := c.Again(t.Context())
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		other.Close()
	}
	change("second")
	again("after the password has changed")
	password.Store(new("first"))
	write("http://me:first@127.0.0.1:1")
	again("the file names another proxy")
	write("")
	again("the file is empty")
}

// FuzzParseProxy: what parses, parses again from its URL, and no error shows what was to be parsed.
func FuzzParseProxy(f *testing.F) {
	for _, text := range []string{
		"http://user:" + escaped + "@proxy:3128", "https://[::1]", "socks5h://u:p@h", "proxy", "http://u:p@h:x", "\x00://@",
	} {
		f.Add(text)
	}
	_, hint := ParseProxy("ftp://none", "proxy") // some texts are a part of each error
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParseProxy(text, "proxy")
		if err != nil {
			if len(text) > 8 && strings.Contains(err.Error(), text) && !strings.Contains(hint.Error(), text) {
				t.Errorf("%q: the error shows it: %v", text, err)
			}
			return
		}
		again, err := ParseProxy(p.URL(), "proxy")
		if err != nil || *again != *p {
			t.Errorf("%q: its URL makes %+v, %v, want %+v", text, again, err, p)
		}
		other := *p // the same proxy with another password
		if other.password += "x"; p.String() != other.String() {
			t.Errorf("%q: the password is shown: %s", text, p)
		}
	})
}
