package dns

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sync/errgroup"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Anyone may send queries, so every resource that a client can use is bounded.
const (
	maxConnQueries = 128              // queries on one TCP connection; then the client must connect again
	maxQuery       = 4 << 10          // bytes; longer packets are not answered
	idleTimeout    = 10 * time.Second // of a TCP connection (RFC 7766 section 6.2.3: a few seconds)
	writeTimeout   = 2 * time.Second  // of one answer over TCP
	// receiveBuffer is the size in bytes of the UDP socket's receive buffer. It holds the queries of
	// a burst until they are read. The kernel limits it to net.core.rmem_max.
	receiveBuffer = 1 << 20
	// After a failed read, the responder waits for minBackoff. The pause doubles with
	// each further failure, up to maxBackoff.
	minBackoff = 5 * time.Millisecond
	maxBackoff = time.Second
)

// ResponderConfig configures a Responder.
type ResponderConfig struct {
	Listen   string           // host:port, for UDP and TCP
	Upstream []netip.AddrPort // tried in order for names that are not a node's; empty: NXDOMAIN
	// Upstreams replaces Upstream, unless it is nil. The responder calls it for each query to get the servers to ask. If
	// there are none, the query gets SERVFAIL.
	Upstreams func() []netip.AddrPort
	// Dial connects to an upstream; nil: the responder uses a net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Zone returns the code and the records of the answer to a question; nil: the zone does not have the name. If the
	// last record is an alias (CNAME) that the question does not ask for, the responder asks an upstream for the rest. A
	// nil Zone has no names.
	Zone func(dns.Question) *dns.Msg
	// AllowFrom are the networks whose queries are forwarded to an upstream. Queries from others
	// are refused, since an answer can be 31 times as long as its query, and the client's address
	// may be forged. Empty: private addresses and loopback.
	AllowFrom auth.Sources
	Truth     Truth            // nil: there are no nodes
	Names     Names            // nil: every connected node may be published
	Counters  *tunnel.Counters // counts panics and limits; nil: nobody counts them
	Sockets   *listen.Sockets  // opens the sockets; nil: nobody can take them over
	Log       *slog.Logger
	// Conns is how many TCP connections may be open at once, an eighth of them from one source;
	// see listen.Strangers. 0: DefaultConns.
	Conns int
	// Lookups is how many queries may wait for an upstream at once. Further ones fail at once. 0:
	// DefaultLookups.
	Lookups int
	// PerAddress makes each IPv6 address a client of its own; else the addresses of a /64 are one.
	PerAddress bool
}

// The values that replace zero fields of ResponderConfig.
const (
	DefaultConns   = 512
	DefaultLookups = 512
)

// Responder answers DNS queries for the names of nodes, and forwards other queries. It is
// the module "dns".
//
//	r := dns.NewResponder(dns.ResponderConfig{Listen: "10.0.0.5:5353", Truth: truth, Log: log})
//	err := r.Run(ctx)
//
// A node's name is a complete domain name: edge1 is "edge1.". The responder asks Truth for
// every query and caches nothing. So a node that disconnects is gone at the next query, except
// for what the client itself caches (see ttl).
//
//	a name of Zone                 what Zone says
//	a node that may be published   its addresses; NODATA if it has none of that type
//	... unknown whether it may     SERVFAIL: a late answer is better than a wrong one
//	any other name                 the upstream's answer; without an upstream NXDOMAIN, REFUSED for PTR
//
// The responder has no zone transfer, no DNSSEC, no recursion of its own and no cache.
// Anyone who reaches it may query nodes. ResponderConfig.AllowFrom decides who may query other
// names.
//
// Messages are parsed and packed by github.com/miekg/dns. The responder does not use the Server
// of that package: it starts a goroutine for every packet without a limit, unpacks without a
// recover, and writes to TCP connections without a deadline.
type Responder struct {
	// Set once.
	cfg      ResponderConfig
	forwards bool // the responder forwards queries for names that it does not know
	forward  *forwarder

	addr  atomic.Pointer[net.Addr] // nil while not listening; written by Run
	stats responderStats

	ioErrors, upstreamErrors, panics, denials tunnel.Limiter // of log lines, one a minute each
}

var _ tunnel.Module = (*Responder)(nil)

// NewResponder returns a responder. It opens no socket before Run.
func NewResponder(cfg ResponderConfig) *Responder {
	cfg.Conns, cfg.Lookups = cmp.Or(cfg.Conns, DefaultConns), cmp.Or(cfg.Lookups, DefaultLookups)
	if len(cfg.AllowFrom) == 0 {
		cfg.AllowFrom = privateSources()
	}
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	forwards := len(cfg.Upstream) > 0 || cfg.Upstreams != nil
	if cfg.Upstreams == nil {
		cfg.Upstreams = func() []netip.AddrPort { return cfg.Upstream }
	}
	if cfg.Dial == nil {
		cfg.Dial = new(net.Dialer).DialContext
	}
	return &Responder{cfg: cfg, forwards: forwards, forward: newForwarder(&cfg)}
}

// privateSources returns loopback and the addresses that are not routed on the Internet. A
// packet from these addresses comes from the operator's own networks.
func privateSources() auth.Sources {
	return auth.Sources{
		netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"),
		// RFC 1918
		netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
		netip.MustParsePrefix("100.64.0.0/10"),                                      // RFC 6598
		netip.MustParsePrefix("fc00::/7"),                                           // RFC 4193
		netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("fe80::/10"), // link-local
	}
}

// Name implements tunnel.Module.
func (r *Responder) Name() string { return "dns" }

// Ready returns nil while queries are answered.
func (r *Responder) Ready() error {
	if r.addr.Load() == nil {
		return errors.New("the DNS responder is not listening")
	}
	return nil
}

// Addr returns the address of the responder, one port for UDP and TCP, or nil while it
// does not listen.
func (r *Responder) Addr() net.Addr {
	if a := r.addr.Load(); a != nil {
		return *a
	}
	return nil
}

// Run listens and answers queries until ctx is done. Then it stops at once. A client that still
// waits for an upstream's answer gets none, and asks another server. After another process has taken
// over, Run reads no more queries, since the other process knows the nodes.
func (r *Responder) Run(ctx context.Context) error {
	udp, tcp, err := r.Open(ctx, r.cfg.Listen)
	if err != nil {
		return fmt.Errorf("listening on %s for DNS: %w", r.cfg.Listen, err)
	}
	if err = r.checkUpstreams(udp.LocalAddr()); err != nil {
		udp.Close() // no query has been read yet
		tcp.Close()
		return err
	}
	addr := udp.LocalAddr()
	r.addr.Store(&addr)
	defer r.addr.Store(nil)
	return r.Serve(ctx, udp, tcp)
}

// Open opens addr for UDP and TCP, with the same port for both. Its errors say what to do.
func (r *Responder) Open(ctx context.Context, addr string) (*net.UDPConn, net.Listener, error) {
	return openBoth(ctx, r.cfg.Sockets, addr)
}

// Serve is Run with sockets that are already open. Serve closes them when it ends. Several goroutines may call Serve
// at once, with different sockets. It returns an error if a socket is broken.
func (r *Responder) Serve(ctx context.Context, udp *net.UDPConn, tcp net.Listener) error {
	tcp = listen.Steady(tcp, r.cfg.Log)
	g, ctx := errgroup.WithContext(ctx)
	closed := make(chan struct{}) // closed when both sockets are; nothing is sent
	context.AfterFunc(ctx, func() {
		defer close(closed)
		udp.Close() // a client that misses its answer repeats the query
		tcp.Close()
	})
	select {
	case <-r.cfg.Sockets.Serving():
	case <-ctx.Done():
	}
	g.Go(func() error {
		select {
		case <-r.cfg.Sockets.Left():
			udp.SetReadDeadline(time.Unix(1, 0))
		case <-ctx.Done():
		}
		return nil
	})
	// One goroutine per processor, and each handles one packet at a time. A query costs only
	// processor time, so more goroutines would only wait for each other.
	for range runtime.GOMAXPROCS(0) {
		g.Go(func() error { return r.serveUDP(ctx, g, udp) })
	}
	g.Go(func() error {
		return r.serveTCP(ctx, tcp, listen.NewStrangers(r.cfg.Conns, max(1, r.cfg.Conns/8)))
	})
	err := g.Wait() // ends ctx
	<-closed        // the next responder may listen at once
	return err
}

// checkUpstreams returns an error if an upstream is the responder itself, which listens at local.
// Each forwarded query would come back until ResponderConfig.Lookups queries wait.
func (r *Responder) checkUpstreams(local net.Addr) error {
	self := netip.MustParseAddrPort(local.String())
	for _, up := range r.cfg.Upstream {
		if up.Port() != self.Port() {
			continue
		}
		if up.Addr().Unmap() == self.Addr().Unmap() || self.Addr().IsUnspecified() && isLocal(up.Addr()) {
			return fmt.Errorf("the DNS upstream %s is this responder itself, listening on %s; "+
				"name the server that knows the other names, such as the nameserver of the machine's /etc/resolv.conf",
				up, r.cfg.Listen)
		}
	}
	return nil
}

// isLocal reports whether a is an address of this machine.
func isLocal(a netip.Addr) bool {
	a = a.Unmap()
	if a.IsLoopback() || a.IsUnspecified() {
		return true
	}
	ours, err := net.InterfaceAddrs()
	if err != nil {
		return false // ResponderConfig.Lookups still ends a loop of queries
	}
	for _, o := range ours {
		if p, err := netip.ParsePrefix(o.String()); err == nil && p.Addr().Unmap() == a.WithZone("") {
			return true
		}
	}
	return false
}

// openBoth opens addr for UDP and TCP. Its errors say what to do.
func openBoth(ctx context.Context, sockets *listen.Sockets, addr string) (*net.UDPConn, net.Listener, error) {
	at, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		return nil, nil, fmt.Errorf("%w; write an address and a port, such as 127.0.0.1:5353", err)
	}
	// With port 0 the kernel chooses a port that is free for UDP. It may be in use for TCP, so
	// another one is tried then.
	for tries := 0; ; tries++ {
		udp, tcp, err := tryBoth(ctx, sockets, at)
		switch {
		case errors.Is(err, syscall.EADDRINUSE) && at.Port == 0 && tries < 20:
			continue
		case errors.Is(err, syscall.EADDRINUSE):
			return nil, nil, fmt.Errorf("%w; stop what listens there (ss -lntup shows it), or choose another port", err)
		case errors.Is(err, syscall.EADDRNOTAVAIL):
			return nil, nil, fmt.Errorf("%w; this machine has no such address", err)
		case errors.Is(err, syscall.EACCES):
			return nil, nil, fmt.Errorf("%w; ports below 1024 need CAP_NET_BIND_SERVICE, choose a higher one", err)
		}
		return udp, tcp, err
	}
}

// tryBoth opens one UDP socket, and a TCP socket with the same port.
func tryBoth(ctx context.Context, sockets *listen.Sockets, at *net.UDPAddr) (*net.UDPConn, net.Listener, error) {
	family := ""
	if at.IP.To4() != nil {
		family = "4" // without it, 0.0.0.0 would open all IPv6 addresses, too
	}
	name := listen.Name{Network: "udp" + family, Address: at.String()}
	conn, err := sockets.OpenPacket(name, func() (net.PacketConn, error) {
		return new(net.ListenConfig).ListenPacket(ctx, name.Network, name.Address)
	})
	if err != nil {
		return nil, nil, err
	}
	udp := conn.(*net.UDPConn)
	if err = setSocketOptions(udp, at.IP); err == nil {
		var tcp net.Listener
		tcp, err = sockets.Listen(ctx, listen.Operators, net.ListenConfig{}, "tcp"+family, udp.LocalAddr().String())
		if err == nil {
			return udp, tcp, nil
		}
	}
	udp.Close() // no query has been read yet
	return nil, nil, err
}

// setSocketOptions sets the options of the UDP socket that is bound to ip.
func setSocketOptions(udp *net.UDPConn, ip net.IP) error {
	if err := udp.SetReadBuffer(receiveBuffer); err != nil {
		return err
	}
	if ip != nil && !ip.IsUnspecified() {
		return nil
	}
	// A socket that is bound to all addresses must answer from the address to which the query was
	// sent, since clients ignore answers from any other address. These options give the packet's
	// destination address. An IPv6 socket does so for both families.
	err4 := ipv4.NewPacketConn(udp).SetControlMessage(ipv4.FlagDst, true)
	err6 := ipv6.NewPacketConn(udp).SetControlMessage(ipv6.FlagDst, true)
	if err4 != nil && err6 != nil {
		return err4
	}
	return nil
}
