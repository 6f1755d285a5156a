// Package egress is the front door for kube-apiserver's egress selector and other clients of
// Konnectivity. A caller names an address, and reaches it through a node.
//
//	door, err := egress.New(egress.Config{
//		GRPC:        []string{"unix:///run/tunnel/egress-grpc.sock"},
//		HTTPConnect: []string{"unix:///run/tunnel/egress-connect.sock", "tls://0.0.0.0:8090"},
//		TLS:         callers,     // required by tls://
//		Identifiers: identifiers, // what each node reaches
//	}, directory, directory, log)
//	err = door.Run(ctx)
//
// The cloud runs a [FrontDoor], the edge an [Edge]. A request passes these files:
//
//  1. proxy.go or connect.go accepts the caller and its address. proxy.go speaks Konnectivity's gRPC, in
//     the packets of package konnectivity; connect.go speaks HTTP CONNECT, and socks.go SOCKS5 at the same listeners.
//  2. choose.go finds the nodes that reach the address, by the table of table.go, and dials one. Each
//     strategy is tried in order. If a node cannot serve now, the next one is tried. service.go does this for
//     the endpoints of a Service.
//  3. tunnel.Splice copies bytes between caller and target.
//
// networks.go lets an edge dial the pods of its own node. neighbours.go tells an edge the other nodes of its LAN.
//
// Over HTTP CONNECT and SOCKS5 a conn behaves as a TCP connection, half-closes included. Konnectivity's gRPC has no
// half-close: after either side has ended, the bytes in flight still arrive, and then the conn is over.
//
// Callers are authenticated by the permissions of a unix socket, or by a client certificate.
//
// The package does not carry bytes to nodes: a [tunnel.Dialer] does. Nodes may be edges, or stock agents
// of Konnectivity that have joined our cloud (package konnectivity). It does not decide what an edge may
// dial; the edge does (package auth).
package egress

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/balancer"
	"tunnel.example/tunnel/pkg/konnectivity"
	ports "tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/socket"
	"tunnel.example/tunnel/pkg/tunnel"
)

// name is the name of the modules FrontDoor and Edge, and the category of their dials and messages.
const name = "egress"

// Config configures a [FrontDoor].
type Config struct {
	GRPC        []string         // listeners of ProxyService: unix:///path or tls://host:port
	HTTPConnect []string         // listeners of HTTP CONNECT and SOCKS5: unix:///path or tls://host:port
	TLS         *tls.Config      // for tls://: our certificate, and the CAs of callers
	Strategies  []Strategy       // in order; none: all, in the order of [Strategies]
	Among       tunnel.Selector  // nodes that Default may choose; empty: any node
	Counters    *tunnel.Counters // counts panics, limits that are reached, and results of dials; nil: not counted
	Sink        tunnel.Sink      // learns of each conn
	// KonnectivityMetrics adds metrics under the names of Konnectivity's server.
	KonnectivityMetrics bool

	// The largest number of callers over TLS that have not finished their handshake, at each
	// listener: in all, and of one source. 0: the default of package listen.
	Strangers, StrangersPerAddress int

	ProxyFrom auth.Sources // balancers in front of tls:// that send a PROXY header; see package balancer

	Identifiers Source   // what each node reaches
	Kubernetes  bool     // Identifiers come from Node objects, not from claims of edges
	Sessions    Sessions // the sessions whose edges get the networks of their pods; nil: none
	// Services returns the endpoints of the Service at an address, host:port, in the order in which dials try them. It
	// returns none if no Service has the address. Its errors are refusals. nil: no dial looks for Services.
	Services func(addr string) ([]Endpoint, error)

	Sockets *ports.Sockets // opens the listeners; nil: no other process can take them over
}

// Source knows what nodes reach.
type Source interface {
	// Identifiers returns the identifiers of all known nodes, whether connected or not.
	Identifiers() map[tunnel.NodeName]konnectivity.Identifiers
	// Known reports whether the source has been read. Until then every dial fails.
	Known() bool
	// Changed returns a channel that is closed at the next change of Identifiers or Known. To miss
	// no change, call Changed before Identifiers and Known.
	Changed() <-chan struct{}
}

// Endpoint is an endpoint of a Service.
type Endpoint struct {
	Addr string          // host:port
	Node tunnel.NodeName // the node where its pod runs; empty: no node
	// Dial connects to the endpoint without a node. It is used if no other node has the endpoint's address. nil: the
	// strategies find a node for the endpoint.
	Dial func(ctx context.Context) (net.Conn, error)
}

// FrontDoor is the cloud's module: it accepts callers, and dials for them.
type FrontDoor struct {
	// Set once.
	cfg       Config
	listeners []listener
	chooser   *chooser
	balancers *balancer.Balancers // in front of tls:// listeners
	askers    *askers             // edges that ask for their neighbours
	metrics   *metrics
	log       *slog.Logger
	grace     time.Duration // how long conns may continue after Run's ctx is done

	mu sync.Mutex // guards the following
	up bool       // all listeners are open; set by Run
}

var (
	_ tunnel.Routed = (*FrontDoor)(nil)
	_ tunnel.Module = (*Edge)(nil)
)

// listener is one address of the front door.
type listener struct {
	url string      // as configured
	tls *tls.Config // nil: callers are authenticated by the permissions of the socket
	// serve serves ln until ctx is done.
	serve func(ctx context.Context, ln net.Listener, callers *tls.Config) error
}

// New returns a front door that dials through dialer. nodes knows which nodes are connected.
func New(cfg Config, dialer tunnel.Dialer, nodes tunnel.Nodes, log *slog.Logger) (*FrontDoor, error) {
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	c, err := newChooser(cfg, dialer, nodes)
	if err != nil {
		return nil, err
	}
	f := &FrontDoor{
		cfg: cfg, chooser: c, askers: new(askers), metrics: newMetrics(),
		log: log.With("module", name), grace: tunnel.GracePeriod,
	}
	f.balancers = balancer.New(balancer.Config{
		From: cfg.ProxyFrom, Key: "proxyfrom", Table: "[mode.cloud.egress]", Counters: cfg.Counters, Log: f.log,
	})
	if cfg.KonnectivityMetrics {
		f.metrics.konnectivity = newKonnectivityMetrics(f.metrics, c)
	}
	for _, u := range cfg.GRPC {
		f.listeners = append(f.listeners, listener{u, cfg.callers(u), f.serveGRPC})
	}
	for _, u := range cfg.HTTPConnect {
		f.listeners = append(f.listeners, listener{u, cfg.callers(u), f.serveConnect})
	}
	return f, nil
}

// SetStrategies replaces Config.Strategies and Config.Among for the next dials.
func (f *FrontDoor) SetStrategies(strategies []Strategy, among tunnel.Selector) error {
	return f.chooser.setRules(strategies, among)
}

// callers returns the TLS configuration of a listener, or nil for a unix socket.
func (c Config) callers(url string) *tls.Config {
	if strings.HasPrefix(url, unixScheme) {
		return nil
	}
	return c.TLS
}

const (
	unixScheme = "unix://"
	tlsScheme  = "tls://"
)

// Name implements tunnel.Module.
func (f *FrontDoor) Name() string { return name }

// Ready returns nil while all listeners are open and dials can find nodes. Before the source knows the nodes, Ready
// looks at the listeners only: the source has a line of its own in /readyz.
func (f *FrontDoor) Ready() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case !f.up:
		return errors.New("egress listeners are not open")
	case f.chooser.table.Load() == nil && f.chooser.source.Known():
		return errors.New("the table of the nodes' addresses is not complete")
	}
	return nil
}

// Run opens all listeners, or fails and opens none. It serves until ctx is done. Then the listeners close
// at once, and conns may go on for tunnel.GracePeriod before they are reset.
func (f *FrontDoor) Run(ctx context.Context) error {
	open, err := f.openAll(ctx)
	if err != nil {
		return err
	}
	f.setUp(true)
	defer f.setUp(false)
	g, ctx := errgroup.WithContext(ctx) // a listener that fails stops the others
	g.Go(func() error { return f.chooser.run(ctx, f.guard) })
	if f.cfg.Sessions != nil {
		g.Go(func() error { return f.announceNetworks(ctx) })
		g.Go(func() error { return f.announceNeighbours(ctx) })
	}
	for i, ln := range open {
		g.Go(func() error {
			if err := f.listeners[i].serve(ctx, ln, f.listeners[i].tls); err != nil {
				return fmt.Errorf("serving %s of [mode.cloud.egress]: %w", f.listeners[i].url, err)
			}
			return nil
		})
	}
	return g.Wait()
}

func (f *FrontDoor) setUp(up bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.up = up
}

// guard calls do, which handles a peer's input, and returns a panic in do as an error. In the log,
// the parameter what names the thing that the panic ends.
func (f *FrontDoor) guard(what string, do func() error) error {
	return tunnel.Guard(f.log, f.cfg.Counters, what, do)
}

// verifiesCallers reports whether a TLS server admits only clients whose certificate it has verified.
func verifiesCallers(c *tls.Config) bool {
	return c != nil && (c.ClientAuth == tls.RequireAndVerifyClientCert ||
		c.ClientAuth == tls.RequireAnyClientCert && c.VerifyPeerCertificate != nil)
}

// openAll opens all listeners, or none.
func (f *FrontDoor) openAll(ctx context.Context) ([]net.Listener, error) {
	return ports.OpenAll(f.listeners, func(l listener) (net.Listener, error) {
		ln, err := f.open(ctx, l)
		if err != nil {
			return nil, fmt.Errorf("listening on %s of [mode.cloud.egress]: %w", l.url, err)
		}
		return ln, nil
	}, func(ln net.Listener) { ln.Close() })
}

func (f *FrontDoor) open(ctx context.Context, l listener) (net.Listener, error) {
	if path, ok := strings.CutPrefix(l.url, unixScheme); ok {
		ln, err := f.cfg.Sockets.Open(ports.Callers, ports.Name{Network: "unix", Address: path},
			func() (net.Listener, error) { return socket.ListenGroup(ctx, path) })
		if err != nil {
			return nil, err
		}
		return ports.Steady(ln, f.log), nil
	}
	addr, ok := strings.CutPrefix(l.url, tlsScheme)
	switch {
	case !ok:
		return nil, errors.New("write unix:///PATH or tls://HOST:PORT")
	case !verifiesCallers(l.tls):
		return nil, errors.New("anybody who reaches this address could reach every node: write cert, key and clientca")
	}
	ln, err := f.cfg.Sockets.Listen(ctx, ports.Callers, net.ListenConfig{}, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return ports.NewListener(f.balancers.Listener(ports.Steady(ln, f.log)), ports.ListenerConfig{
		Max: f.cfg.Strangers, MaxPerSource: f.cfg.StrangersPerAddress,
		Timeout: requestTimeout, Bytes: konnectivity.StrangerBytes, Counters: f.cfg.Counters,
		OverMax: tunnel.LimitStrangers, OverMaxPerSource: tunnel.LimitStrangersPerAddress,
		TooLate: tunnel.LimitHandshakeTimeout,
	}), nil
}
