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

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sync/errgroup"

	"tunnel/pkg/auth"
	"tunnel/pkg/listen"
	"tunnel/pkg/tunnel"
)

// Strangers may ask, so everything they can hold is bounded.
const (
	maxConnQueries = 128              // on one TCP connection; then the asker connects again
	maxQuery       = 4 << 10          // bytes; longer ones are no questions
	idleTimeout    = 10 * time.Second // of a TCP connection (RFC 7766 section 6.2.3: a few seconds)
	writeTimeout   = 2 * time.Second  // of an answer over TCP
	// A socket's receive buffer in bytes: the queries of a burst that we have not read
	// yet. The kernel gives less where net.core.rmem_max says so.
	receiveBuffer = 1 << 20
	// Accepting and reading are tried again after backoffFirst, then twice that, up to
	// backoffMost.
	backoffFirst = 5 * time.Millisecond
	backoffMost  = time.Second
)

// ResponderConfig says what a Responder answers.
type ResponderConfig struct {
	Listen   string           // host:port, UDP and TCP
	Upstream []netip.AddrPort // asked in order for names that are no node's; empty: NXDOMAIN
	// AllowFrom is for whom an upstream is asked: others are refused, since the answers are
	// up to 31 times as long as the questions, and the asker's address may be forged. Empty:
	// private addresses and loopback.
	AllowFrom auth.Sources
	Truth     Truth
	Names     Names            // nil: every connected node may appear
	Counters  *tunnel.Counters // counts panics and limits; nil: nobody looks
	Log       *slog.Logger
	Conns     int // TCP connections at once, an eighth of them of one source, see listen.Strangers; 0: DefaultConns
	Lookups   int // queries that wait for an upstream; further ones fail at once; 0: DefaultLookups
}

// What zero fields stand for.
const (
	DefaultConns   = 512
	DefaultLookups = 512
)

// Responder answers DNS queries for the names of nodes, and hands the others on. It is
// the module "dns".
//
//	r := dns.NewResponder(dns.ResponderConfig{Listen: "10.0.0.5:5353", Truth: truth, Log: log})
//	err := r.Run(ctx)
//
// A node's name is a whole domain name: edge1 is "edge1.". What is true is asked at
// every query; nothing is remembered, so a node that has gone is gone with the next
// query, plus what the asker itself remembers (see ttl).
//
//	a node that may appear   its addresses; NODATA when it has none of that kind
//	... not known yet        SERVFAIL: late is better than untrue
//	any other name           what the upstream says; without one NXDOMAIN, REFUSED for PTR
//
// The responder has no zone transfer, no DNSSEC, no recursion of its own and no cache.
// Whoever reaches it may ask for nodes; for other names ResponderConfig.AllowFrom decides.
//
// The messages are those of github.com/miekg/dns. The loops are not its Server, which
// has a goroutine for every packet however many come, unpacks outside of any recover,
// and writes to a TCP connection without a deadline.
type Responder struct {
	// Set once.
	cfg     ResponderConfig
	forward forwarder

	addr  atomic.Pointer[net.Addr] // nil while not listening
	stats responderStats

	tired, unanswered, panicked, denied tunnel.Limiter // of log lines, one a minute each
}

var _ tunnel.Module = (*Responder)(nil)

// NewResponder returns a responder. It opens nothing before Run.
func NewResponder(cfg ResponderConfig) *Responder {
	cfg.Conns, cfg.Lookups = cmp.Or(cfg.Conns, DefaultConns), cmp.Or(cfg.Lookups, DefaultLookups)
	if len(cfg.AllowFrom) == 0 {
		cfg.AllowFrom = privateSources()
	}
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	return &Responder{cfg: cfg, forward: newForwarder(cfg.Upstream, cfg.Lookups)}
}

// privateSources returns loopback and the addresses that are not routed on the Internet: a
// packet from there comes from a network of ours.
func privateSources() auth.Sources {
	return auth.Sources{
		netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"),
		netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"), // RFC 1918
		netip.MustParsePrefix("100.64.0.0/10"),                                      // RFC 6598
		netip.MustParsePrefix("fc00::/7"),                                           // RFC 4193
		netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("fe80::/10"), // link-local
	}
}

// Name implements tunnel.Module.
func (r *Responder) Name() string { return "dns" }

// Routes implements tunnel.Module. No peer may ask for any of this.
func (r *Responder) Routes() map[string]tunnel.Handler { return nil }

// Ready returns nil while queries are answered.
func (r *Responder) Ready() error {
	if r.addr.Load() == nil {
		return errors.New("the dns responder does not listen")
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

// Run listens and answers until ctx is done. Then it is silent at once: who waits for
// an upstream's answer asks another server.
func (r *Responder) Run(ctx context.Context) error {
	udp, tcp, err := openBoth(ctx, r.cfg.Listen)
	if err != nil {
		return fmt.Errorf("listening on %s for DNS: %w", r.cfg.Listen, err)
	}
	if err = r.refuseSelf(udp.LocalAddr()); err != nil {
		udp.Close() //nolint:errcheck // nobody has asked yet
		tcp.Close()
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(ctx, func() {
		udp.Close() //nolint:errcheck // an answer that is lost is asked for again
		tcp.Close()
	})()
	addr := udp.LocalAddr()
	r.addr.Store(&addr)
	defer r.addr.Store(nil)

	// A packet at a time each: what a query costs is the processor's time, so more
	// would only wait for each other.
	for range runtime.GOMAXPROCS(0) {
		g.Go(func() error { r.serveUDP(ctx, g, udp); return nil })
	}
	g.Go(func() error {
		r.serveTCP(ctx, tcp, listen.NewStrangers(r.cfg.Conns, max(1, r.cfg.Conns/8)))
		return nil
	})
	return g.Wait()
}

// refuseSelf refuses an upstream that is the responder itself, listening at local: each
// query would come back until ResponderConfig.Lookups are waiting.
func (r *Responder) refuseSelf(local net.Addr) error {
	self := netip.MustParseAddrPort(local.String())
	for _, up := range r.cfg.Upstream {
		if up.Port() != self.Port() {
			continue
		}
		if up.Addr().Unmap() == self.Addr().Unmap() || self.Addr().IsUnspecified() && isOurs(up.Addr()) {
			return fmt.Errorf("the DNS upstream %s is this responder itself, listening on %s; "+
				"name the server that knows the other names, such as the nameserver of the machine's /etc/resolv.conf", up, r.cfg.Listen)
		}
	}
	return nil
}

// isOurs reports whether a leads to this machine.
func isOurs(a netip.Addr) bool {
	a = a.Unmap()
	if a.IsLoopback() || a.IsUnspecified() {
		return true
	}
	ours, err := net.InterfaceAddrs()
	if err != nil {
		return false // the bound of exchanges is left
	}
	for _, o := range ours {
		if p, err := netip.ParsePrefix(o.String()); err == nil && p.Addr().Unmap() == a.WithZone("") {
			return true
		}
	}
	return false
}

// openBoth opens addr for UDP and TCP, or says what to do.
func openBoth(ctx context.Context, addr string) (*net.UDPConn, net.Listener, error) {
	at, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		return nil, nil, fmt.Errorf("%w; write an address and a port, such as 127.0.0.1:5353", err)
	}
	// Port 0 is one that is free for UDP; it may be taken for TCP, another is not.
	for tries := 0; ; tries++ {
		udp, tcp, err := tryBoth(ctx, at)
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

func tryBoth(ctx context.Context, at *net.UDPAddr) (*net.UDPConn, net.Listener, error) {
	family := ""
	if at.IP.To4() != nil {
		family = "4" // else 0.0.0.0 would open every IPv6 address too
	}
	conn, err := new(net.ListenConfig).ListenPacket(ctx, "udp"+family, at.String())
	if err != nil {
		return nil, nil, err
	}
	udp := conn.(*net.UDPConn)
	if err = prepare(udp, at.IP); err == nil {
		var tcp net.Listener
		if tcp, err = new(net.ListenConfig).Listen(ctx, "tcp"+family, udp.LocalAddr().String()); err == nil {
			return udp, tcp, nil
		}
	}
	udp.Close() //nolint:errcheck // nobody has asked yet
	return nil, nil, err
}

// prepare sets the options of the socket, bound to ip.
func prepare(udp *net.UDPConn, ip net.IP) error {
	if err := udp.SetReadBuffer(receiveBuffer); err != nil {
		return err
	}
	if ip != nil && !ip.IsUnspecified() {
		return nil
	}
	// A socket for all addresses learns which one was asked, and answers from that one:
	// an asker takes no answer from another. One of IPv6 does it for both families.
	err4 := ipv4.NewPacketConn(udp).SetControlMessage(ipv4.FlagDst, true)
	err6 := ipv6.NewPacketConn(udp).SetControlMessage(ipv6.FlagDst, true)
	if err4 != nil && err6 != nil {
		return err4
	}
	return nil
}
