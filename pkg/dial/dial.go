// Package dial connects an edge to its cloud: directly, through a proxy, or inside a WebSocket.
//
//	d, err := dial.New(dial.Config{Servers: servers, Proxy: dial.FromEnvironment(httpproxy.FromEnvironment())})
//	c, err := d.Dial(ctx)        // a session
//	other, err := c.Again(ctx)   // a data connection of the session, by the same way
//
// Sessions, data connections and `tunnel join` use one [Dialer], so they reach the cloud by the same ways.
// The cloud's own TLS begins on top of the connection. So proxies and boxes in between see no plain byte,
// and edge and cloud verify each other's certificates as they do without a proxy.
//
// Each error that an operator can correct is an [*Error]: it says what failed and what to do next. No error
// and no String method shows the password of a proxy.
//
// The package reads no environment variable and no configuration file. Its caller passes both.
package dial

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

// Server is a place where the cloud can be reached.
type Server struct {
	text string // as the operator wrote it
	addr string // host:port to connect to
	web  bool   // text is the URL of a WebSocket
	tls  bool   // the WebSocket is inside TLS (wss)
}

// ParseServer parses host:port, or the URL of a WebSocket: wss://host/path. ws:// is for a box in between
// that has no TLS of its own.
func ParseServer(text string) (Server, error) {
	if !strings.Contains(text, "://") {
		host, port, err := net.SplitHostPort(text)
		if err != nil || host == "" || !isPort(port) {
			return Server{}, fmt.Errorf("%q is neither host:port nor wss://host/path: write an address such as %q",
				text, "tunnel.example.com:9000")
		}
		return Server{text: text, addr: text}, nil
	}
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || u.Scheme != "wss" && u.Scheme != "ws" || u.Port() != "" && !isPort(u.Port()) {
		return Server{}, errors.New("a URL of a server is wss://host/path: write one such as " +
			`"wss://tunnel.example.com/tunnel"`)
	}
	switch {
	case u.User != nil: // the URL is shown in logs
		return Server{}, errors.New("the URL of a server has no user and no password: " +
			"the node's token or certificate proves who it is")
	case u.Fragment != "":
		return Server{}, fmt.Errorf("the URL %q has a fragment, which no server sees: remove it", text)
	}
	s := Server{text: text, web: true, tls: u.Scheme == "wss"}
	port := u.Port()
	switch {
	case port != "":
	case s.tls:
		port = "443"
	default:
		port = "80"
	}
	s.addr = net.JoinHostPort(u.Hostname(), port)
	return s, nil
}

// isPort reports whether s is a number from 1 to 65535.
func isPort(s string) bool {
	p, err := netip.ParseAddrPort("0.0.0.0:" + s)
	return err == nil && p.Port() != 0
}

// String returns the server as the operator wrote it.
func (s Server) String() string { return s.text }

// Addr returns the host:port of the server. For a WebSocket, it is the host:port of the box in between.
func (s Server) Addr() string { return s.addr }

// IsWebSocket reports whether the cloud is reached inside a WebSocket.
func (s Server) IsWebSocket() bool { return s.web }

// host returns the host of Addr.
func (s Server) host() string {
	host, _, _ := net.SplitHostPort(s.addr)
	return host
}

// Config configures a [Dialer].
type Config struct {
	Servers []Server // at least one, in the order in which they are tried
	// Proxy chooses the proxy for a server; nil: no server has a proxy.
	Proxy ProxyFunc
	// Roots returns the CAs that sign the certificates of https:// proxies and wss:// servers; nil: the
	// system's CAs. The cloud's own CA is not among them: the owner of the connection verifies the cloud.
	Roots     func() *x509.CertPool
	UserAgent string // sent to proxies and wss:// servers
	Keys      Keys   // names of the settings, for hints; zero: the keys of an edge's configuration

	Connect func(ctx context.Context, network, addr string) (net.Conn, error)     // nil: a net.Dialer
	LookUp  func(ctx context.Context, network, host string) ([]netip.Addr, error) // nil: the system's resolver
}

// Dialer connects to one cloud. Several goroutines may use it at once.
type Dialer struct {
	cfg Config // set once

	mu      sync.Mutex // guards the following
	servers []Server   // never changes; replaced as a whole
	first   Server     // the server that Dial tries first
	proven  bool       // first is the server that has worked last
	// bad are the servers at which another program than the cloud has answered. They are tried only after all others
	// have failed: such a program may be faster than the cloud at every attempt.
	bad map[Server]bool
	// taken are servers, as texts, and addresses that have led to a replica with which there is a session. The next
	// session is with another replica, so they are tried after others.
	taken map[string]bool
}

// New makes a Dialer.
func New(cfg Config) (*Dialer, error) {
	if len(cfg.Servers) == 0 {
		return nil, errors.New("there is no address of the cloud")
	}
	if cfg.Keys == (Keys{}) {
		cfg.Keys = keysOfEdge()
	}
	if cfg.Connect == nil {
		cfg.Connect = new(net.Dialer).DialContext
	}
	if cfg.LookUp == nil {
		cfg.LookUp = net.DefaultResolver.LookupNetIP
	}
	return &Dialer{cfg: cfg, servers: cfg.Servers, first: cfg.Servers[0]}, nil
}

// String lists the servers.
func (d *Dialer) String() string {
	var all []string
	for _, s := range d.cfg.Servers {
		all = append(all, s.text)
	}
	return strings.Join(all, ", ")
}

// Prefer makes Dial try other servers as well: before the configured servers, or behind them if last is true. The
// others of an earlier call are forgotten. Dial still begins with the server that has worked last, if that server is
// still known. With last, that server must also be a configured one. A call with the same servers changes nothing.
func (d *Dialer) Prefer(others []Server, last bool) {
	all := slices.Concat(others, d.cfg.Servers)
	if last {
		all = slices.Concat(d.cfg.Servers, others)
	}
	var servers []Server
	for _, s := range all {
		if !slices.Contains(servers, s) {
			servers = append(servers, s)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if slices.Equal(servers, d.servers) {
		return // d.first stays, too: failed may have moved it to the next server
	}
	d.servers = servers
	clear(d.bad)
	if !d.proven || !slices.Contains(servers, d.first) || last && !slices.Contains(d.cfg.Servers, d.first) {
		d.first, d.proven = servers[0], false
	}
}

// WorksAsConfigured reports whether the server that has worked last is one of the configuration.
func (d *Dialer) WorksAsConfigured() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.proven && slices.Contains(d.cfg.Servers, d.first)
}

// serverDelay is how long Dial waits for a server before it tries the next one as well. It covers a name
// lookup and one lost packet of a handshake.
const serverDelay = 2 * time.Second

// Dial connects to the cloud. It tries the servers in order, first the one that worked last. If a server
// does not answer within serverDelay, Dial tries the next server beside it; the first connection wins. Servers at which
// another program has answered come after all others have failed.
func (d *Dialer) Dial(ctx context.Context) (*Conn, error) {
	all := d.order()
	try := func(servers []Server) (*Conn, error) {
		return race(ctx, len(servers), serverDelay, func(ctx context.Context, i int) (*Conn, error) {
			c, err := d.reach(ctx, servers[i])
			if err != nil && len(all) > 1 {
				err = fmt.Errorf("%s: %w", servers[i], err)
			}
			return c, err
		})
	}
	good, bad := d.split(all)
	c, err := try(good)
	if err == nil || len(bad) == 0 {
		return c, err
	}
	d.forgive()
	if ctx.Err() != nil {
		return nil, err
	}
	c, again := try(bad)
	if again != nil {
		return nil, raceError{err, again}
	}
	return c, nil
}

// split splits all servers into the good ones and the bad ones. If all are bad, it returns them as good ones.
func (d *Dialer) split(all []Server) (good, bad []Server) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range all {
		if d.bad[s] {
			bad = append(bad, s)
		} else {
			good = append(good, s)
		}
	}
	if good == nil {
		return all, nil
	}
	return good, bad
}

// forgive forgets the bad servers.
func (d *Dialer) forgive() {
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.bad)
}

// order returns the servers in the order in which Dial tries them.
func (d *Dialer) order() []Server {
	d.mu.Lock()
	defer d.mu.Unlock()
	order := []Server{d.first}
	for _, s := range d.servers {
		if s != d.first {
			order = append(order, s)
		}
	}
	takenLast(order, func(s Server) bool { return d.taken[s.text] })
	return order
}

// takenLast moves the elements that are taken behind the others.
func takenLast[E any](all []E, taken func(E) bool) {
	slices.SortStableFunc(all, func(a, b E) int {
		switch {
		case taken(a) == taken(b):
			return 0
		case taken(a):
			return 1
		}
		return -1
	})
}

// second notes that a connection to addr of s has led to a replica with which there is a session. Once that is so for
// all servers, the next time may be different for each.
func (d *Dialer) second(s Server, addr netip.Addr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.taken == nil {
		d.taken = make(map[string]bool)
	}
	d.taken[addr.String()] = true
	if d.taken[s.text] = true; !slices.ContainsFunc(d.servers, func(s Server) bool { return !d.taken[s.text] }) {
		for _, s := range d.servers {
			delete(d.taken, s.text)
		}
	}
}

// reach connects to one server. The proxy is chosen each time, since its file may have changed.
func (d *Dialer) reach(ctx context.Context, s Server) (*Conn, error) {
	var p *Proxy
	if d.cfg.Proxy != nil {
		var err error
		if p, err = d.cfg.Proxy(s); err != nil {
			return nil, err
		}
	}
	return d.by(ctx, s, p)
}

// by connects to server s through proxy p, or directly if p is nil.
func (d *Dialer) by(ctx context.Context, s Server, p *Proxy) (*Conn, error) {
	c := &Conn{dialer: d, server: s, proxy: p}
	var err error
	if p == nil {
		c.Conn, err = d.direct(ctx, s.addr, nil)
	} else {
		c.Conn, c.trip, err = p.connect(ctx, d, s.addr)
	}
	if err == nil && s.web {
		c.Conn, c.trip, err = d.openWebSocket(ctx, c.Conn, s)
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// failed notes that a connection to s did not lead to the cloud. Dial then tries the next server first.
func (d *Dialer) failed(s Server) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if slices.Contains(d.servers, s) {
		if d.bad == nil {
			d.bad = make(map[Server]bool)
		}
		d.bad[s] = true
	}
	if d.first == s {
		d.first, d.proven = d.servers[(slices.Index(d.servers, s)+1)%len(d.servers)], false
	}
}

// worked notes that a connection to s has led to the cloud. Dial then tries s first.
func (d *Dialer) worked(s Server) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.bad, s)
	clear(d.taken)
	if slices.Contains(d.servers, s) { // Prefer may have removed it
		d.first, d.proven = s, true
	}
}

// Conn is a connection to the cloud, before the cloud's TLS.
type Conn struct {
	net.Conn
	dialer *Dialer
	server Server
	proxy  *Proxy        // nil: none
	trip   time.Duration // how long the box in between took to reach the cloud; 0: there is no box
}

// NetConn returns the connection below: TCP, TLS to a box in between, or a WebSocket.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// Server returns the server of the connection.
func (c *Conn) Server() Server { return c.server }

// IsIndirect reports whether TCP ends at a box in between. The kernel's figures, such as the round trip, then
// describe only the part up to the box. trip is how long the box took to reach the cloud: some round trips.
func (c *Conn) IsIndirect() (trip time.Duration, is bool) {
	return c.trip, c.proxy != nil || c.server.web
}

// Proxy returns the proxy of the connection; nil: none.
func (c *Conn) Proxy() *Proxy { return c.proxy }

// Route says where the connection leads, and through which proxy, without a password.
func (c *Conn) Route() string {
	if c.proxy == nil {
		return c.server.text
	}
	return c.server.text + " through " + c.proxy.String()
}

// Worked tells the dialer that the cloud has answered on this connection: the server is tried first from
// now on.
func (c *Conn) Worked() { c.dialer.worked(c.server) }

// Second tells the dialer that the connection has led to a replica with which there is a session already. The next Dial
// tries other servers and other addresses of the name first.
func (c *Conn) Second() {
	at, _ := netip.ParseAddrPort(c.RemoteAddr().String())
	c.dialer.second(c.server, at.Addr().Unmap())
}

// Failed tells the dialer that another program than the cloud answers on this connection: the next server is
// tried first from now on.
func (c *Conn) Failed() { c.dialer.failed(c.server) }

// Again connects to the cloud by the same server and proxy. Without a box in between, it connects to the same
// address. A proxy or a WebSocket's server may lead to another replica.
func (c *Conn) Again(ctx context.Context) (*Conn, error) {
	if _, is := c.IsIndirect(); is {
		return c.dialer.by(ctx, c.server, c.proxyNow())
	}
	raw, err := c.dialer.cfg.Connect(ctx, "tcp", c.RemoteAddr().String())
	if err != nil {
		return nil, err
	}
	again := *c
	again.Conn = raw
	return &again, nil
}

// proxyNow returns the proxy of the connection, with the user and password that are configured now. If another proxy
// is configured now, or the setting cannot be read, it returns the old proxy: Again must use the same one.
func (c *Conn) proxyNow() *Proxy {
	if c.proxy == nil {
		return nil
	}
	now, err := c.dialer.cfg.Proxy(c.server)
	if err != nil || now == nil || now.scheme != c.proxy.scheme || now.addr != c.proxy.addr {
		return c.proxy
	}
	return now
}

// addressDelay is how long direct waits for an address before it tries the next one as well (RFC 8305
// section 5, Connection Attempt Delay).
const addressDelay = 250 * time.Millisecond

// direct makes a TCP connection to addr, host:port. It tries the addresses of a name as RFC 8305 says, IPv6
// and IPv4 in turn, and starts the next try after addressDelay. A net.Dialer would try only one address of
// each family at a time, and might wait the whole timeout for an address that does not answer. Unlike RFC
// 8305, direct waits until Go's resolver has answered for both families. through is the proxy that listens at
// addr; nil: a server listens there.
func (d *Dialer) direct(ctx context.Context, addr string, through *Proxy) (net.Conn, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	ips, err := d.lookUp(ctx, host)
	if err != nil {
		return nil, d.explainLookup(err, host, through)
	}
	c, err := race(ctx, len(ips), addressDelay, func(ctx context.Context, i int) (net.Conn, error) {
		return d.cfg.Connect(ctx, "tcp", net.JoinHostPort(ips[i].String(), port))
	})
	if err != nil {
		return nil, d.explainDial(err, addr, through)
	}
	return c, nil
}

// lookUp returns the addresses of a host, IPv6 and IPv4 in turn. If host is an address, it returns that address.
func (d *Dialer) lookUp(ctx context.Context, host string) ([]netip.Addr, error) {
	if ip, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{ip}, nil
	}
	ips, err := d.cfg.LookUp(ctx, "ip", host)
	if err == nil && len(ips) == 0 {
		err = &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
	}
	ips = interleave(ips)
	d.mu.Lock()
	defer d.mu.Unlock()
	takenLast(ips, func(ip netip.Addr) bool { return d.taken[ip.String()] })
	return ips, nil
}

// interleave orders addresses so that the families take turns. The resolver's first address stays first: it
// has sorted them by preference (RFC 6724).
func interleave(ips []netip.Addr) []netip.Addr {
	var families [2][]netip.Addr // the preferred family, and the other one
	for i := range ips {
		ip := ips[i].Unmap()
		other := 0
		if ip.Is4() != ips[0].Unmap().Is4() {
			other = 1
		}
		families[other] = append(families[other], ip)
	}
	all := make([]netip.Addr, 0, len(ips))
	for i := range max(len(families[0]), len(families[1])) {
		for _, family := range families {
			if i < len(family) {
				all = append(all, family[i])
			}
		}
	}
	return slices.Compact(all)
}
