package dial

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// After a connection has led to a replica that has a session already, other servers and other addresses come first.
func TestSecond(t *testing.T) {
	answers := map[string]time.Duration{"[::1]:1": 0, "[::2]:1": 0, "1.1.1.1:1": 0, "2.2.2.2:1": 0}
	n := &fakeNet{takes: answers, names: map[string][]string{"a": {"::1", "::2", "1.1.1.1"}}}
	for _, tt := range []struct{ servers, want []string }{
		{[]string{"a:1"}, []string{"[::1]:1", "1.1.1.1:1", "[::2]:1", "[::1]:1"}},
		{[]string{"1.1.1.1:1", "2.2.2.2:1"}, []string{"1.1.1.1:1", "2.2.2.2:1", "1.1.1.1:1", "2.2.2.2:1"}},
		{[]string{"2.2.2.2:1", "a:1"}, []string{"2.2.2.2:1", "[::1]:1", "2.2.2.2:1", "1.1.1.1:1"}},
	} {
		d, err := New(Config{Servers: mustServers(t, tt.servers...), Connect: n.connect, LookUp: n.lookUp})
		if err != nil {
			t.Fatal(err)
		}
		dial := func() *Conn {
			c, err := d.Dial(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			c.Close()
			return c
		}
		for i, want := range tt.want {
			c := dial()
			if got := c.RemoteAddr().String(); got != want {
				t.Errorf("%v: dial %d goes to %s, want %s", tt.servers, i, got, want)
			}
			c.Second()
		}
		dial().Worked()
		first := dial()
		first.Worked()
		if again := dial(); again.RemoteAddr().String() != first.RemoteAddr().String() {
			t.Errorf("%v: after a session by %s, the next dial goes to %s", tt.servers, first.RemoteAddr(), again.RemoteAddr())
		}
	}
}

// mustServers parses servers.
func mustServers(t *testing.T, texts ...string) (all []Server) {
	t.Helper()
	for _, text := range texts {
		s, err := ParseServer(text)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	return all
}

func TestParseServer(t *testing.T) {
	for text, addr := range map[string]string{
		"tunnel.example.com:9000":             "tunnel.example.com:9000",
		"[::1]:9000":                          "[::1]:9000",
		"wss://tunnel.example.com/tunnel":     "tunnel.example.com:443",
		"wss://tunnel.example.com:8443/a/b?c": "tunnel.example.com:8443",
		"ws://[::1]/tunnel":                   "[::1]:80",
		"tunnel.example.com":                  "",
		":9000":                               "",
		"a:http":                              "",
		"a:0":                                 "",
		"a:65536":                             "",
		"https://tunnel.example.com/tunnel":   "",
		"wss:///tunnel":                       "",
		"wss://user:canary@host/tunnel":       "",
		"wss://host:canary-port/tunnel":       "",
		"wss://host/tunnel#x":                 "",
		"":                                    "",
	} {
		s, err := ParseServer(text)
		if s.Addr() != addr || (err == nil) != (addr != "") || addr != "" && s.String() != text {
			t.Errorf("%q: %q, %v; want %q", text, s.Addr(), err, addr)
		}
		if s.IsWebSocket() != (addr != "" && strings.HasPrefix(text, "ws")) {
			t.Errorf("%q: that it is a WebSocket is %t", text, s.IsWebSocket())
		}
		if err != nil && strings.Contains(err.Error(), "canary") {
			t.Errorf("%q: the error shows a secret: %v", text, err)
		}
	}
}

// The families take turns, and the preferred one comes first.
func TestInterleave(t *testing.T) {
	for in, want := range map[string]string{
		"::1 ::2 ::3 1.1.1.1":         "::1 1.1.1.1 ::2 ::3",
		"1.1.1.1 ::1 1.1.1.2 1.1.1.3": "1.1.1.1 ::1 1.1.1.2 1.1.1.3",
		"1.1.1.1":                     "1.1.1.1",
		"::ffff:1.1.1.1 ::1":          "1.1.1.1 ::1",
	} {
		var ips []netip.Addr
		for word := range strings.FieldsSeq(in) {
			ips = append(ips, netip.MustParseAddr(word))
		}
		var got []string
		for _, ip := range interleave(ips) {
			got = append(got, ip.String())
		}
		if g := strings.Join(got, " "); g != want {
			t.Errorf("%s: %s, want %s", in, g, want)
		}
	}
}

// fakeNet is a network on a fake clock.
type fakeNet struct {
	names map[string][]string      // addresses of names
	takes map[string]time.Duration // how long a connection to host:port takes; missing: for ever
	fails map[string]bool          // it then fails

	mu     sync.Mutex // guards the following
	dialed []string
	open   int
}

func (n *fakeNet) lookUp(_ context.Context, _, host string) (all []netip.Addr, err error) {
	for _, ip := range n.names[host] {
		all = append(all, netip.MustParseAddr(ip))
	}
	return all, nil
}

func (n *fakeNet) connect(ctx context.Context, _, addr string) (net.Conn, error) {
	n.mu.Lock()
	n.dialed = append(n.dialed, addr)
	n.mu.Unlock()
	takes, answers := n.takes[addr]
	if !answers {
		takes = 24 * time.Hour
	}
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if n.fails[addr] {
		return nil, errors.New(addr + " refuses")
	}
	n.mu.Lock()
	n.open++
	n.mu.Unlock()
	return &fakeConn{n: n, addr: addr}, nil
}

// fakeConn is a connection that only closes.
type fakeConn struct {
	net.Conn
	n    *fakeNet
	addr string
}

func (c *fakeConn) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.addr))
}

func (c *fakeConn) Close() error {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	c.n.open--
	return nil
}

// TestHappyEyeballs: addresses that do not answer delay a connection by 250 ms each, and servers by two seconds.
// An error costs no time. Connections that come too late are closed.
func TestHappyEyeballs(t *testing.T) {
	for _, tt := range []struct {
		name    string
		servers []string
		net     *fakeNet
		to      string        // the connection that wins; "": none
		takes   time.Duration // until then
		dialed  []string
		within  time.Duration // the time of Dial; 0: a minute
	}{
		{
			name: "the first address answers", servers: []string{"a:1"},
			net: &fakeNet{takes: map[string]time.Duration{"[::1]:1": 100 * time.Millisecond, "1.1.1.1:1": 0}},
			to:  "[::1]:1", takes: 100 * time.Millisecond, dialed: []string{"[::1]:1"},
		},
		{
			name: "IPv6 is silent", servers: []string{"a:1"},
			net: &fakeNet{takes: map[string]time.Duration{"1.1.1.1:1": 50 * time.Millisecond}},
			to:  "1.1.1.1:1", takes: addressDelay + 50*time.Millisecond, dialed: []string{"[::1]:1", "1.1.1.1:1"},
		},
		{
			name: "all but the last are silent", servers: []string{"a:1"},
			net: &fakeNet{takes: map[string]time.Duration{"[::2]:1": 0}},
			to:  "[::2]:1", takes: 2 * addressDelay, dialed: []string{"[::1]:1", "1.1.1.1:1", "[::2]:1"},
		},
		{
			name: "the first refuses", servers: []string{"a:1"},
			net: &fakeNet{
				takes: map[string]time.Duration{"[::1]:1": 10 * time.Millisecond, "1.1.1.1:1": 0},
				fails: map[string]bool{"[::1]:1": true},
			},
			to: "1.1.1.1:1", takes: 10 * time.Millisecond, dialed: []string{"[::1]:1", "1.1.1.1:1"},
		},
		{
			name: "the late one is closed", servers: []string{"a:1"},
			net: &fakeNet{takes: map[string]time.Duration{
				"[::1]:1": 300 * time.Millisecond, "1.1.1.1:1": 100 * time.Millisecond,
			}},
			to: "[::1]:1", takes: 300 * time.Millisecond, dialed: []string{"[::1]:1", "1.1.1.1:1"},
		},
		{
			name: "the first server is silent", servers: []string{"2.2.2.2:1", "3.3.3.3:1"},
			net: &fakeNet{takes: map[string]time.Duration{"3.3.3.3:1": time.Second}},
			to:  "3.3.3.3:1", takes: serverDelay + time.Second, dialed: []string{"2.2.2.2:1", "3.3.3.3:1"},
		},
		{
			name:    "many servers are silent, and the time is short",
			servers: []string{"2.2.2.1:1", "2.2.2.2:1", "2.2.2.3:1", "2.2.2.4:1", "2.2.2.5:1", "2.2.2.6:1", "3.3.3.3:1"},
			within:  9 * time.Second, net: &fakeNet{takes: map[string]time.Duration{"3.3.3.3:1": 2 * time.Second}},
			to: "3.3.3.3:1", takes: 8 * time.Second, // each is tried a second after the one before
			dialed: []string{"2.2.2.1:1", "2.2.2.2:1", "2.2.2.3:1", "2.2.2.4:1", "2.2.2.5:1", "2.2.2.6:1", "3.3.3.3:1"},
		},
		{
			name: "a name without addresses", servers: []string{"nowhere:1", "3.3.3.3:1"},
			net: &fakeNet{takes: map[string]time.Duration{"3.3.3.3:1": 0}},
			to:  "3.3.3.3:1", dialed: []string{"3.3.3.3:1"},
		},
		{
			name: "nothing answers", servers: []string{"2.2.2.2:1", "3.3.3.3:1"}, net: &fakeNet{}, takes: time.Minute,
			dialed: []string{"2.2.2.2:1", "3.3.3.3:1"},
		},
		{
			name: "all addresses of the one server refuse", servers: []string{"a:1"},
			net: &fakeNet{
				takes: map[string]time.Duration{"[::1]:1": 0, "1.1.1.1:1": 0, "[::2]:1": 0},
				fails: map[string]bool{"[::1]:1": true, "1.1.1.1:1": true, "[::2]:1": true},
			},
			dialed: []string{"[::1]:1", "1.1.1.1:1", "[::2]:1"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := tt.net
				n.names = map[string][]string{"a": {"::1", "::2", "1.1.1.1"}}
				d, err := New(Config{Servers: mustServers(t, tt.servers...), Connect: n.connect, LookUp: n.lookUp})
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), cmp.Or(tt.within, time.Minute))
				defer cancel()
				began := time.Now()
				c, err := d.Dial(ctx)
				if took := time.Since(began); took != tt.takes {
					t.Errorf("it took %s, want %s", took, tt.takes)
				}
				switch {
				case tt.to == "" && err == nil:
					t.Fatalf("%v, want an error", c)
				case tt.to == "" && len(tt.servers) > 1:
					for _, server := range tt.servers {
						if !strings.Contains(err.Error(), server+": ") {
							t.Errorf("error %v does not name %s", err, server)
						}
					}
				case tt.to != "" && (err != nil || c.RemoteAddr().String() != tt.to):
					t.Fatalf("%v, %v, want %s", c, err, tt.to)
				}
				if err == nil {
					c.Close()
				}
				n.mu.Lock()
				defer n.mu.Unlock()
				if n.open != 0 || !slices.Equal(n.dialed, tt.dialed) {
					t.Errorf("%d connections are open; dialed %q, want %q", n.open, n.dialed, tt.dialed)
				}
			})
		})
	}
}

// The server that worked is tried first; after one that did not lead to the cloud comes the next one. The same
// way leads to the same address.
func TestServerOrder(t *testing.T) {
	n := &fakeNet{takes: map[string]time.Duration{"1.1.1.1:1": 0, "2.2.2.2:1": 0, "3.3.3.3:1": 0}}
	d, err := New(Config{Servers: mustServers(t, "1.1.1.1:1", "2.2.2.2:1", "3.3.3.3:1"), Connect: n.connect})
	if err != nil {
		t.Fatal(err)
	}
	dial := func(want string) *Conn {
		t.Helper()
		c, err := d.Dial(t.Context())
		if err != nil || c.Server().String() != want || c.Route() != want {
			t.Fatalf("%v, %v, want %s", c, err, want)
		}
		return c
	}
	dial("1.1.1.1:1").Worked()
	dial("1.1.1.1:1").Failed()
	second := dial("2.2.2.2:1")
	second.Failed()
	second.Failed() // another session by the same server has failed as well
	dial("3.3.3.3:1").Worked()
	if c, err := second.Again(t.Context()); err != nil || c.RemoteAddr().String() != "2.2.2.2:1" {
		t.Errorf("%v, %v", c, err)
	}
	third := dial("3.3.3.3:1")
	third.Failed()
	dial("1.1.1.1:1")
	if _, indirect := third.IsIndirect(); indirect {
		t.Error("a direct connection counts as indirect")
	}
}

// A program that answers at once in place of the cloud does not win against a cloud that takes longer than serverDelay.
// If the cloud fails, that server is tried again.
func TestFastImpostor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &fakeNet{takes: map[string]time.Duration{"1.1.1.1:1": 0, "2.2.2.2:1": serverDelay + time.Second}}
		d, err := New(Config{Servers: mustServers(t, "1.1.1.1:1", "2.2.2.2:1"), Connect: n.connect})
		if err != nil {
			t.Fatal(err)
		}
		dial := func(want string) *Conn {
			t.Helper()
			c, err := d.Dial(t.Context())
			if err != nil || c.Server().String() != want {
				t.Fatalf("%v, %v, want %s", c, err, want)
			}
			return c
		}
		dial("1.1.1.1:1").Failed()
		dial("2.2.2.2:1").Worked()
		dial("2.2.2.2:1").Worked()
		n.fails = map[string]bool{"2.2.2.2:1": true}
		dial("1.1.1.1:1").Failed()
		n.fails = nil
		delete(n.takes, "2.2.2.2:1") // it hangs
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if c, err := d.Dial(ctx); err == nil {
			t.Fatalf("%v although the only good server hangs", c)
		}
		dial("1.1.1.1:1")
	})
}

// Preferred servers come before those of the configuration, which stay. The one that has worked stays first.
func TestPrefer(t *testing.T) {
	takes := make(map[string]time.Duration)
	for _, s := range []string{"1.1.1.1:1", "2.2.2.2:1", "3.3.3.3:1"} {
		takes[s] = 0
	}
	n := &fakeNet{takes: takes}
	d, err := New(Config{Servers: mustServers(t, "1.1.1.1:1", "2.2.2.2:1"), Connect: n.connect})
	if err != nil {
		t.Fatal(err)
	}
	order := func(want ...string) {
		t.Helper()
		var got []string
		for _, s := range d.order() {
			got = append(got, s.String())
		}
		if !slices.Equal(got, want) {
			t.Errorf("the order is %q, want %q", got, want)
		}
	}
	d.Prefer(nil, false)
	order("1.1.1.1:1", "2.2.2.2:1")
	d.Prefer(mustServers(t, "3.3.3.3:1"), false) // as after a start: nothing has worked yet
	order("3.3.3.3:1", "1.1.1.1:1", "2.2.2.2:1")
	d.failed(mustServers(t, "3.3.3.3:1")[0])
	d.Prefer(mustServers(t, "3.3.3.3:1"), false) // the same once more
	order("1.1.1.1:1", "3.3.3.3:1", "2.2.2.2:1")
	d.Prefer(nil, false)
	c, err := d.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c.Worked()
	d.Prefer(mustServers(t, "3.3.3.3:1", "2.2.2.2:1"), false)
	order("1.1.1.1:1", "3.3.3.3:1", "2.2.2.2:1")
	c.Failed()
	order("3.3.3.3:1", "2.2.2.2:1", "1.1.1.1:1")
	third, err := d.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	d.Prefer(nil, false)
	third.Worked() // it is no server any more
	third.Failed()
	order("1.1.1.1:1", "2.2.2.2:1")

	if d.WorksAsConfigured() {
		t.Error("nothing has worked")
	}
	d.Prefer(mustServers(t, "3.3.3.3:1"), false)
	if third, err = d.Dial(t.Context()); err != nil {
		t.Fatal(err)
	}
	third.Worked()
	if d.WorksAsConfigured() {
		t.Error("3.3.3.3 is not of the configuration")
	}
	d.Prefer(mustServers(t, "3.3.3.3:1"), true)
	order("1.1.1.1:1", "2.2.2.2:1", "3.3.3.3:1")
	c.Worked()
	if !d.WorksAsConfigured() {
		t.Error("1.1.1.1 is of the configuration")
	}
}
