package stream

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/dial"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// box is a proxy on loopback, or a box that passes TCP on.
type box struct {
	addr  string
	asked atomic.Int64 // connections that it has passed on

	mu   sync.Mutex // guards conns
	cuts []func()
}

// newBox returns an HTTP proxy, or for to other than "" a box that passes everything on to that address.
func newBox(t *testing.T, to string) *box {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &box{}
	b.addr = testkit.ServeOn(t, ln, func(_ context.Context, c net.Conn) {
		in, addr := bufio.NewReader(c), to
		if to == "" {
			r, err := http.ReadRequest(in)
			if err != nil || r.Method != http.MethodConnect {
				return
			}
			addr = r.RequestURI
		}
		out, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		defer out.Close()
		b.mu.Lock()
		b.cuts = append(b.cuts, func() { c.Close(); out.Close() })
		b.mu.Unlock()
		b.asked.Add(1)
		if to == "" {
			io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		}
		go func() { io.Copy(out, in); out.Close() }()
		io.Copy(c, out)
	})
	return b
}

// cut closes all connections of the box.
func (b *box) cut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.cuts {
		c()
	}
}

// newDialer returns a dialer to servers, through a proxy unless that is "".
func newDialer(t *testing.T, proxy string, servers ...string) *dial.Dialer {
	t.Helper()
	var cfg dial.Config
	for _, text := range servers {
		s, err := dial.ParseServer(text)
		if err != nil {
			t.Fatal(err)
		}
		cfg.Servers = append(cfg.Servers, s)
	}
	if proxy != "" {
		p, err := dial.ParseProxy(proxy, "proxy")
		if err != nil {
			t.Fatal(err)
		}
		cfg.Proxy = dial.Through(p)
	}
	d, err := dial.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// joinBy starts an edge that reaches the cloud by a dialer, and waits for its session.
func (r *rig) joinBy(d *dial.Dialer) *edge {
	r.t.Helper()
	cfg := r.clientConfig("edge1")
	cfg.Address, cfg.Connect = d.String(), d.Dial
	e := r.start(cfg, direct)
	r.eventually("the edge joins", func() bool { return e.client.Ready() == nil && r.dir.Holds("edge1") })
	return e
}

// carries checks that a megabyte arrives each way, and that half-closes do.
func (r *rig) carries() {
	r.t.Helper()
	c, target := r.pair("edge1")
	text := testkit.Random(1 << 20)
	go func() {
		c.Write(text)
		c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	if got := testkit.ReadAll(r.t, target); !bytes.Equal(got, text) {
		r.t.Errorf("the target gets %d other bytes", len(got))
	}
	go func() {
		target.Write(text)
		target.CloseWrite()
	}()
	if got := testkit.ReadAll(r.t, c); !bytes.Equal(got, text) {
		r.t.Errorf("the caller gets %d other bytes", len(got))
	}
}

// Sessions and data connections reach the cloud through a proxy, or inside a WebSocket, or both. The log and the
// status name the way. The proxy's round trips are not taken for those of the link.
func TestRoutes(t *testing.T) {
	for _, spares := range []int{0, 4} {
		for _, way := range []string{"proxy", "WebSocket", "WebSocket through a proxy"} {
			t.Run(fmt.Sprintf("%s, %d data connections", way, spares), func(t *testing.T) {
				web := testkit.FreeAddress(t)
				r := newRig(t, func(c *ServerConfig) { c.WebSocket = web })
				r.spares = spares
				proxy, server := newBox(t, ""), r.server.Addr().String()
				through, route := "http://"+proxy.addr, " through proxy "+proxy.addr
				if way == "WebSocket" {
					through, route = "", ""
				}
				if way != "proxy" {
					server = "ws://" + web + WebSocketPath
				}
				e := r.joinBy(newDialer(t, through, server))
				r.carries()
				r.idle(e)
				if through != "" {
					if got := e.client.Status(); got != server+route {
						t.Errorf("status %q, want %q", got, server+route)
					}
					if n := proxy.asked.Load(); n == 0 || spares > 0 && n < 2 {
						t.Errorf("%d connections by the proxy", n)
					}
				}
				r.eventually("a line of the log names the way", func() bool {
					return len(r.log.lines("session started", server+route)) == 1
				})
				e.client.mu.Lock()
				defer e.client.mu.Unlock()
				if own := e.client.links[0].own; !own.indirect || own.tcp == nil {
					t.Errorf("indirect %t; the TCP connection below is known: %t", own.indirect, own.tcp != nil)
				}
			})
		}
	}
}

// A server where something else answers is left for the next one, and what worked stays.
func TestNextServer(t *testing.T) {
	r := newRig(t)
	other := testkit.Serve(t, func(c *net.TCPConn) {
		c.Read(make([]byte, 1000))
		io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
	})
	own := r.server.Addr().String()
	e := r.joinBy(newDialer(t, "", other, own))
	if got := e.client.Status(); got != own {
		t.Errorf("status %q, want %q", got, own)
	}
	if len(r.log.lines("no session; trying again")) != 1 {
		t.Errorf("not one failed attempt:\n%s", r.log)
	}
	r.dir.Lookup("edge1").Link.Close(fmt.Errorf("test"))
	r.eventually("it joins again", func() bool { return len(r.log.lines("session started", own)) == 2 })
	if n := len(r.log.lines("no session; trying again", "TLS handshake")); n > 1 {
		t.Errorf("the other server was tried %d times", n)
	}
}

// A cloud that cannot take an edge now is not left for the next server: an edge that has a direct way does not go to
// the WebSocket because of a restart.
func TestServerStays(t *testing.T) {
	web := testkit.FreeAddress(t)
	r := newRig(t, func(c *ServerConfig) { c.WebSocket = web })
	r.auth.broken.Store(true)
	own := r.server.Addr().String()
	d := newDialer(t, "", own, "ws://"+web+WebSocketPath)
	cfg := r.clientConfig("edge1")
	cfg.Address, cfg.Connect = d.String(), d.Dial
	e := r.start(cfg, direct)
	r.eventually("the edge has tried twice", func() bool { return len(r.log.lines("no session; trying again")) >= 2 })
	r.auth.broken.Store(false)
	r.eventually("the edge joins", func() bool { return e.client.Ready() == nil })
	if lines := r.log.lines("no session; trying again", "cannot check who joins now", own+": "); len(lines) < 2 {
		t.Errorf("the attempts failed otherwise:\n%s", r.log)
	}
	if got := e.client.Status(); got != own {
		t.Errorf("status %q, want %q:\n%s", got, own, r.log)
	}
}

// A WebSocket that a box in between closes ends with a line that says who may have closed it.
func TestCutWebSocket(t *testing.T) {
	web := testkit.FreeAddress(t)
	r := newRig(t, func(c *ServerConfig) { c.WebSocket = web })
	ingress := newBox(t, web)
	r.joinBy(newDialer(t, "", "ws://"+ingress.addr+WebSocketPath))
	ingress.cut()
	r.eventually("the log says so", func() bool {
		return len(r.log.lines("session ended", "the WebSocket was closed in between")) == 1
	})
}

// At the port for WebSockets the limits of strangers hold, too: for a silent one, for one that sends half a line, and
// for one that opens a WebSocket and does not join. Requests for other paths, and requests that are none for a
// WebSocket, get an answer.
func TestWebStrangers(t *testing.T) {
	web := testkit.FreeAddress(t)
	r := newRig(t, func(c *ServerConfig) {
		c.WebSocket = web
		c.Limits.JoinTimeout = listen.FirstByte + 500*time.Millisecond
	})
	const handshake = "GET /tunnel HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" +
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
	var strangers sync.WaitGroup
	for name, tt := range map[string]struct{ sends, want string }{
		"silent":       {"", ""},
		"half a line":  {"GET /tun", ""},
		"a WebSocket":  {handshake, "101 Switching Protocols"},
		"another path": {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "404 Not Found"},
		"no WebSocket": {"GET /tunnel HTTP/1.1\r\nHost: x\r\n\r\n", "426 Upgrade Required"},
	} {
		strangers.Go(func() {
			c, err := net.Dial("tcp", web)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			io.WriteString(c, tt.sends)
			c.SetDeadline(time.Now().Add(patience))
			got, err := io.ReadAll(c)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: the connection stays", name)
			}
			if line, _, _ := strings.Cut(string(got), "\r\n"); !strings.Contains(line, tt.want) {
				t.Errorf("%s: %q, want %q", name, line, tt.want)
			}
		})
	}
	strangers.Wait()
	if n := r.counters.LimitedBy(tunnel.LimitJoinTimeout); n < 2 {
		t.Errorf("%d were too late, want at least 2", n)
	}
	r.joinBy(newDialer(t, "", "ws://"+web+WebSocketPath))
	r.carries()
}

// Leave closes the port for WebSockets, and no connection of the one port is taken any more. Sessions live until the
// server's end, which closes everything.
func TestWebStops(t *testing.T) {
	web := testkit.FreeAddress(t)
	port := listen.NewHandover(func() net.Addr { return new(net.TCPAddr) }, nil)
	first := true
	r := newFleet(t, 2, func(c *ServerConfig) {
		if first {
			c.WebSocket, c.OnePort = web, port
		}
		first = false
	})[0]
	e := r.joinBy(newDialer(t, "", "ws://"+web+WebSocketPath))
	session := e.client.Session()
	left := make(chan struct{})
	go func() { defer close(left); r.server.Leave(t.Context()) }()
	r.eventually("the port is closed", func() bool {
		c, err := net.Dial("tcp", web)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	here, there := tcpPair(t)
	defer here.Close()
	defer there.Close()
	r.eventually("no connection of the one port is taken", func() bool { return !port.Give(here, 0) })
	<-left
	if e.client.Session() != session || !r.dir.Holds("edge1") {
		t.Error("the session has ended")
	}
	r.carries()
	r.running.Stop()
	r.eventually("the session has ended", func() bool { return e.client.Ready() != nil })
}

// After a change of routes a session stays while the cloud answers, even if the kernel would connect from another
// address now. If nobody answers, the session ends in three seconds, not in fifteen. A session with the right
// address is left alone.
func TestNetworkChanged(t *testing.T) {
	r := newRig(t)
	way := newBox(t, r.server.Addr().String())
	var stalled atomic.Bool
	joined := func(from string) *edge {
		cfg := r.clientConfig("edge1")
		cfg.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
			c, err := d.DialContext(ctx, network, way.addr)
			if err != nil {
				return nil, err
			}
			return &deafConn{Conn: c, deaf: &stalled}, nil
		}
		e := r.start(cfg, direct)
		r.eventually("the edge joins", func() bool { return e.client.Ready() == nil })
		return e
	}
	// 127.0.0.2 is a good address of this machine, and not the one that the kernel chooses.
	e := joined("127.0.0.2")
	session := e.client.Session()
	e.client.NetworkChanged()
	if e.client.Session() != session {
		t.Error("a session that answers has ended")
	}
	stalled.Store(true)
	began := time.Now()
	e.client.NetworkChanged()
	if took := time.Since(began); took < routeTimeout || took >= lostAfter {
		t.Errorf("the check took %s", took)
	}
	r.eventually("the session has ended", func() bool {
		return len(r.log.lines("session ended", "has another address towards the cloud")) == 1
	})
	stalled.Store(false)
	r.eventually("the edge joins again", func() bool { s := e.client.Session(); return s != nil && s != session })
	e.Stop()

	e = joined("127.0.0.1")
	stalled.Store(true)
	began = time.Now()
	e.client.NetworkChanged()
	if took := time.Since(began); took >= routeTimeout {
		t.Errorf("a session with the right address was checked for %s", took)
	}
	stalled.Store(false)
}

// Without a session, a change of routes ends the pause only if this machine has another address towards the cloud
// since the last attempt. After refusals the next pause is as long as without the change.
func TestNetworkChangedWithoutSession(t *testing.T) {
	for name, tt := range map[string]struct {
		err  error
		next time.Duration // there is no second attempt within this time after a change
	}{
		"nothing answers": {&net.OpError{
			Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort("10.0.0.1:9000")),
			Err: syscall.ECONNREFUSED,
		}, 0},
		"the cloud refuses": {status.Error(codes.Unauthenticated, "no"), tunnel.BackoffRefusedMax / 4},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var attempts atomic.Int64
				var source netip.Addr
				log, _ := testkit.NewLog()
				c, err := NewClient(ClientConfig{
					Address: "cloud:9000", Node: "edge1", Token: auth.StaticToken("x"), Log: log,
					TLS:  fixed(&tls.Config{ServerName: "cloud"}),
					Dial: func(context.Context, string, string) (net.Conn, error) { attempts.Add(1); return nil, tt.err },
				})
				if err != nil {
					t.Fatal(err)
				}
				known := "10.0.0.1:9000" // the address that was tried
				if _, ok := errors.AsType[*net.OpError](tt.err); !ok {
					known = "192.0.2.1:9" // none is known
				}
				c.source = func(remote string) (netip.Addr, error) {
					if remote != known || !source.IsValid() {
						return netip.Addr{}, syscall.ENETUNREACH
					}
					return source, nil
				}
				running := testkit.Run(t, c.Run)
				defer running.Stop()
				changed := func(to string, want int64, why string) {
					t.Helper()
					synctest.Wait()
					before := attempts.Load()
					source, _ = netip.ParseAddr(to)
					c.NetworkChanged()
					synctest.Wait()
					if n := attempts.Load() - before; n != want {
						t.Errorf("%s: %d attempts, want %d", why, n, want)
					}
				}
				time.Sleep(time.Hour) // the bound of the pause is at its largest
				changed("", 0, "there is no route yet")
				changed("10.0.0.7", 1, "a route has appeared")
				before := attempts.Load()
				time.Sleep(tt.next)
				synctest.Wait()
				if n := attempts.Load() - before; n != 0 {
					t.Errorf("%d more attempts within %s", n, tt.next)
				}
				time.Sleep(time.Hour)
				changed("10.0.0.7", 0, "pods come and go")
				changed("10.0.0.8", 1, "another address")
				changed("", 0, "the route has gone")
				changed("10.0.0.8", 1, "the route is back")
			})
		})
	}
}

// deafConn is a connection from which nothing comes while it is deaf.
type deafConn struct {
	net.Conn
	deaf *atomic.Bool
}

func (c *deafConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	for c.deaf.Load() && err == nil {
		time.Sleep(10 * time.Millisecond)
		if err := c.SetReadDeadline(time.Time{}); err != nil { // closed
			return 0, err
		}
	}
	return n, err
}
