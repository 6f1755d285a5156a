// Package oneport serves edges, callers of kubelets and health checks on one TCP port, such as 443. It
// tells them apart by the ClientHello of their TLS connection, and hands each connection to the module
// that serves its kind:
//
//	port := oneport.New(oneport.Config{Listen: ":443", DataProtocol: stream.DataProtocol, Nodes: directory, …})
//	server, err := stream.NewServer(stream.ServerConfig{OnePort: port.Edges, …}, directory)
//	door, err := https.New(https.Config{OnePort: port.Callers, …}, directory, directory, log)
//	health := admin.NewPublic(port.Health, …)
//	err = port.Run(ctx) // as a tunnel.Module, beside the others
//
// A connection belongs to the first kind in this list that fits:
//
//  1. An edge's data connection: its ALPN is the protocol of data connections.
//  2. An edge: its ALPN is only h2, as in gRPC, and the cloud's certificate is valid for its SNI. Other
//     clients that know HTTP/2 also offer HTTP/1.1.
//  3. A health check: the cloud's certificate contains its SNI itself, not only a wildcard for it.
//  4. A caller: its SNI is the name of a connected node.
//  5. An edge, or another replica: its ALPN is only h2.
//  6. A health check: the cloud's certificate is valid for its SNI by a wildcard.
//  7. A caller, if there is an https front door; otherwise a health check.
//
// So a node with the cloud's name does not cut off edges or health checks. A node whose name a wildcard of the
// certificate covers still gets its callers. The https front door gets callers without SNI, as at a port of its own.
//
// One goroutine owns a connection until its ClientHello has come. The peer is a stranger; this package
// has places for as many strangers as the modules behind it together. Then the module counts the
// connection under its own limits, so that strangers of one kind take no places of another kind.
//
// The package does not end TLS and answers nobody, except callers that speak HTTP without TLS.
package oneport

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/balancer"
	"tunnel.example/tunnel/pkg/hello"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Name is the name of the module.
const Name = "port"

// Config is the configuration of a Port.
type Config struct {
	Listen    string       // host:port
	ProxyFrom auth.Sources // balancers that send a PROXY header; see package balancer

	DataProtocol string       // the ALPN of edges' data connections
	Nodes        tunnel.Nodes // the connected nodes, for SNIs
	// Certificate returns the cloud's certificate; nil: the Port does not know the cloud's names.
	Certificate func() *x509.Certificate
	HasDoor     bool // there is an https front door

	Strangers, StrangersPerAddress int           // connections whose ClientHello has not come, in all and of one source
	Timeout                        time.Duration // how long a ClientHello may take
	Counters                       *tunnel.Counters
	Sockets                        *listen.Sockets // opens the port; nil: nobody can take it over
	Log                            *slog.Logger
}

// Port is the cloud's module "port".
type Port struct {
	// Edges, Callers and Health are listeners for the modules behind the port. Set once.
	Edges, Callers, Health *listen.Handover

	// Set once.
	cfg       Config
	balancers *balancer.Balancers
	strangers *listen.Strangers // connections whose ClientHello has not come

	tooMany tunnel.Limiter           // limits log lines about strangers without a place
	addr    atomic.Pointer[net.Addr] // nil while the port is closed
}

var _ tunnel.Module = (*Port)(nil)

// New returns a port. It opens nothing; Run does.
func New(cfg Config) *Port {
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	cfg.Log = cfg.Log.With("module", Name)
	p := &Port{
		cfg: cfg, strangers: listen.NewStrangers(cfg.Strangers, cfg.StrangersPerAddress),
		balancers: balancer.New(balancer.Config{
			From: cfg.ProxyFrom, Key: "proxyfrom", Table: "[mode.cloud.stream.server]", Counters: cfg.Counters, Log: cfg.Log,
		}),
	}
	for _, h := range []**listen.Handover{&p.Edges, &p.Callers, &p.Health} {
		*h = listen.NewHandover(p.Addr, p.strangers)
	}
	return p
}

// Name implements tunnel.Module.
func (p *Port) Name() string { return Name }

// Ready returns nil while the port is open.
func (p *Port) Ready() error {
	if p.addr.Load() == nil {
		return errors.New("the port is not open")
	}
	return nil
}

// Addr returns the address of the open port. While the port is closed, it returns the zero TCPAddr.
func (p *Port) Addr() net.Addr {
	if a := p.addr.Load(); a != nil {
		return *a
	}
	return new(net.TCPAddr)
}

// Run implements tunnel.Module. It opens the port and hands connections over until ctx is done.
func (p *Port) Run(ctx context.Context) error {
	ln, err := p.open(ctx)
	if err != nil {
		return err
	}
	addr := ln.Addr()
	p.addr.Store(&addr)
	defer p.addr.Store(nil)
	callers := p.balancers.Listener(listen.Steady(ln, p.cfg.Log))
	defer callers.Close()
	stop := context.AfterFunc(ctx, func() { callers.Close() })
	defer stop()
	var serving sync.WaitGroup
	defer serving.Wait()
	err = listen.Accept(ctx, callers, func(c net.Conn) {
		serving.Go(func() {
			serve := func() error { p.serve(ctx, c); return nil }
			if tunnel.Guard(p.cfg.Log, p.cfg.Counters, "the connection ends", serve) != nil {
				tunnel.Reset(c)
			}
		})
	})
	if err != nil {
		return fmt.Errorf("accepting on %s, listen in [mode.cloud.stream.server]: %w", addr, err)
	}
	return nil
}

// open opens the port. If that fails, the error says what to do.
func (p *Port) open(ctx context.Context) (net.Listener, error) {
	// A caller that vanished is noticed after about a minute, as at the ports of https. The first probe comes
	// as early as Go's default: pkg/stream notices lost data connections by unanswered probes.
	lc := net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 15 * time.Second, Interval: 10 * time.Second, Count: 4,
	}}
	ln, err := p.cfg.Sockets.Listen(ctx, listen.Edges, lc, "tcp", p.cfg.Listen)
	fix := "see listen in [mode.cloud.stream.server]"
	switch {
	case err == nil:
		return ln, nil
	case errors.Is(err, syscall.EADDRINUSE):
		fix = "stop what listens there (ss -ltnp shows it), or choose another port for listen in [mode.cloud.stream.server]"
	case errors.Is(err, syscall.EACCES):
		fix = "ports below 1024 need CAP_NET_BIND_SERVICE"
	}
	return nil, fmt.Errorf("opening the one port: %w (%s)", err, fix)
}

// handOverTime is how long a module behind the port may take to accept a connection. Modules accept at
// once, except while they start.
const handOverTime = 10 * time.Second

// serve reads the ClientHello of a connection, and hands the connection over.
func (p *Port) serve(ctx context.Context, c net.Conn) {
	socket, ok := listen.Socket(c)
	if !ok {
		c.Close()
		return
	}
	stranger := p.admit(c)
	if stranger == nil {
		tunnel.Reset(c)
		return
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	h, read, err := hello.Peek(stranger)
	// From here on a module counts the connection. Nothing limits the connections that wait for a module,
	// since modules accept at once.
	stranger.Release()
	switch {
	case !stop():
		return // the connection is closed already
	case err != nil:
		p.noHello(c, err)
		return
	}
	to := p.handover(h)
	if !to.Give(hello.NewConn(socket, c.RemoteAddr(), h, read), handOverTime) {
		tunnel.Reset(c) // no module accepts the connection: the module stops, or the replica is leaving
		return
	}
	if to == p.Callers {
		p.cfg.Sockets.Accepted(listen.Callers) // the listener itself counts as one for edges
	}
}

// admit gives a place to a connection. It returns nil if there is none.
func (p *Port) admit(c net.Conn) *listen.Probation {
	count := p.cfg.Counters.Limited
	stranger, full := p.strangers.Probation(c, listen.Terms{
		Time: p.cfg.Timeout, Bytes: hello.MaxLen,
		Late:    func() { count(tunnel.LimitHandshakeTimeout) },
		Evicted: func() { count(tunnel.LimitStrangers) },
	})
	if stranger != nil {
		return stranger
	}
	reached := tunnel.LimitStrangers
	if full.Source {
		reached = tunnel.LimitStrangersPerAddress
	}
	count(reached)
	if skipped, ok := p.tooMany.Allow(); ok {
		p.cfg.Log.Warn("connection denied: too many connections have not sent their ClientHello",
			"frontend", c.LocalAddr().String(), "remote", c.RemoteAddr().String(),
			"err", "limit "+reached.String(), "skipped", skipped)
	}
	return nil
}

// noHello ends a connection that has sent no ClientHello.
func (p *Port) noHello(c net.Conn, err error) {
	p.balancers.UnexpectedIn(c, err)
	p.cfg.Log.Debug("connection closed: no ClientHello", "remote", c.RemoteAddr().String(), "err", err)
	if hello.IsPlainHTTP(err) {
		c.SetWriteDeadline(time.Now().Add(time.Second))
		io.WriteString(c, hello.PlainHTTPAnswer) //nolint:errcheck // it fails only if the caller has gone
		c.Close()
		return
	}
	tunnel.Reset(c)
}

// handover returns where a connection that begins with h belongs. See the comment of the package.
func (p *Port) handover(h hello.Hello) *listen.Handover {
	gRPC := len(h.Protocols) == 1 && h.Protocols[0] == "h2"
	own, exactly := p.isOwn(h.ServerName)
	switch {
	case slices.Contains(h.Protocols, p.cfg.DataProtocol), gRPC && own:
		return p.Edges
	case exactly:
		return p.Health
	case p.cfg.HasDoor && p.isNode(h.ServerName):
		return p.Callers
	case gRPC:
		return p.Edges
	case own, !p.cfg.HasDoor:
		return p.Health
	}
	return p.Callers
}

// isOwn reports whether the cloud's certificate is valid for name, and whether it contains name itself, not only a
// wildcard.
func (p *Port) isOwn(name string) (own, exactly bool) {
	if name == "" {
		return false, false
	}
	leaf := p.cfg.Certificate()
	if leaf == nil || leaf.VerifyHostname(name) != nil {
		return false, false
	}
	is := func(other string) bool { return strings.EqualFold(strings.TrimSuffix(name, "."), other) }
	return true, slices.ContainsFunc(leaf.DNSNames, is)
}

// isNode reports whether name is the name of a connected node.
func (p *Port) isNode(name string) bool {
	node, err := tunnel.ParseNodeName(name)
	return err == nil && p.cfg.Nodes.Holds(node)
}
