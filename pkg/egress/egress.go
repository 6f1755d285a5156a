// Package egress is the front door that kube-apiserver's egress selector and the clients
// of Konnectivity speak: they name an address, and reach it through a node.
//
//	door, err := egress.New(egress.Config{
//		GRPC:        []string{"unix:///run/tunnel/egress-grpc.sock"},
//		HTTPConnect: []string{"unix:///run/tunnel/egress-connect.sock", "tls://0.0.0.0:8090"},
//		TLS:         callers,                      // of tls://
//		Identifiers: identifiers,                  // what each node reaches
//	}, directory, log)
//	err = door.Run(ctx)
//
// The cloud runs a [FrontDoor], the edge an [Edge]. One request's way: proxy.go or
// connect.go takes a caller's connection and the address that it wants, choose.go finds
// the nodes that reach the address, one of them is dialled, and tunnel.Splice does the
// rest. packet.go is Konnectivity's wire.
//
// Which node it is: strategies are asked in order, until one knows a node that is
// connected (choose.go). A node that cannot serve just now passes the dial on to the next.
//
// A conn is what the caller's protocol can make of it. Over HTTP CONNECT it is a TCP
// connection with all its ends. Konnectivity's gRPC knows no half-close: when either side
// has ended, what has been written still arrives, and then the conn is over.
//
// Callers are known by the permissions of a unix socket, or by a client certificate.
// The package does not decide what an edge may dial; the edge does (pkg/auth).
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

	"tunnel/pkg/konnectivity"
	ports "tunnel/pkg/listen"
	"tunnel/pkg/socket"
	"tunnel/pkg/tunnel"
)

// name is the name of both modules, and the category of their messages.
const name = "egress"

// Config is what a [FrontDoor] needs.
type Config struct {
	GRPC        []string        // where Konnectivity's ProxyService is served: unix:///path or tls://host:port
	HTTPConnect []string        // where HTTP CONNECT is
	TLS         *tls.Config     // for tls://: our certificate, and who may call
	Strategies  []Strategy      // none: all of them
	Among       tunnel.Selector // whom Default takes; empty: any node
	Counters    *tunnel.Counters
	// KonnectivityMetrics adds some under the names that its server has.
	KonnectivityMetrics bool

	Strangers, StrangersPerAddress int      // over TLS; 0: the default
	Identifiers                    Source   // what each node reaches
	Kubernetes                     bool     // Identifiers are those of Node objects, not what edges claim
	Sessions                       Sessions // whose edges are told the networks of their pods; nil: none is
}

// Source says what nodes reach.
type Source interface {
	// Identifiers returns it for the nodes that are known; they need not be connected.
	Identifiers() map[tunnel.NodeName]konnectivity.Identifiers
	// Known reports whether it is known yet.
	Known() bool
	// Changed returns a channel that is closed when either has become something else. To miss
	// nothing, ask for it before them.
	Changed() <-chan struct{}
}

// FrontDoor is the cloud's module.
type FrontDoor struct {
	// Set once.
	cfg       Config
	listeners []listener
	chooser   *chooser
	sessions  Sessions
	metrics   *metrics
	log       *slog.Logger
	grace     time.Duration

	mu sync.Mutex // guards the following
	up bool
}

var (
	_ tunnel.Module = (*FrontDoor)(nil)
	_ tunnel.Module = (*Edge)(nil)
)

// listener is one address of the front door.
type listener struct {
	url   string // as it is configured
	tls   *tls.Config
	serve func(ctx context.Context, ln net.Listener, callers *tls.Config) error // until ctx is done
}

// New returns a front door that dials through dialer, and asks nodes who is connected.
func New(cfg Config, dialer tunnel.Dialer, nodes tunnel.Nodes, log *slog.Logger) (*FrontDoor, error) {
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	c, err := newChooser(cfg, dialer, nodes)
	if err != nil {
		return nil, err
	}
	f := &FrontDoor{cfg: cfg, chooser: c, metrics: newMetrics(), sessions: cfg.Sessions, log: log.With("module", name), grace: tunnel.GracePeriod}
	if cfg.KonnectivityMetrics {
		f.metrics.old = newKonnectivityMetrics(f.metrics, c)
	}
	for _, u := range cfg.GRPC {
		f.listeners = append(f.listeners, listener{u, cfg.callers(u), f.serveGRPC})
	}
	for _, u := range cfg.HTTPConnect {
		f.listeners = append(f.listeners, listener{u, cfg.callers(u), f.serveConnect})
	}
	return f, nil
}

// callers returns how callers at an address are known; nil: by the permissions of its socket.
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

// Routes implements tunnel.Module. The cloud handles no message: an edge may not open.
func (f *FrontDoor) Routes() map[string]tunnel.Handler { return nil }

// Ready returns nil while all listeners are open.
func (f *FrontDoor) Ready() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.up {
		return errors.New("egress listeners are not open")
	}
	return nil
}

// Run opens every listener, or none, and serves until ctx is done. Then the listeners
// close at once, and conns may go on for tunnel.GracePeriod before they are reset.
func (f *FrontDoor) Run(ctx context.Context) error {
	open, err := f.openAll(ctx)
	if err != nil {
		return err
	}
	f.setUp(true)
	defer f.setUp(false)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return f.chooser.run(ctx, f.guard) })
	if f.sessions != nil {
		g.Go(func() error { return f.tell(ctx) })
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

// guard calls do, which handles what a peer has said. A panic in it ends what names, and
// nothing else.
func (f *FrontDoor) guard(what string, do func() error) error {
	return tunnel.Guard(f.log, f.cfg.Counters, what, do)
}

// openAll opens every listener. All that is in the way of that is reported in one error,
// and then nothing stays open.
func (f *FrontDoor) openAll(ctx context.Context) ([]net.Listener, error) {
	var open []net.Listener
	var errs []error
	for _, l := range f.listeners {
		ln, err := f.open(ctx, l)
		if err != nil {
			errs = append(errs, fmt.Errorf("listening on %s of [mode.cloud.egress]: %w", l.url, err))
			continue
		}
		open = append(open, ln)
	}
	if err := errors.Join(errs...); err != nil {
		for _, ln := range open {
			ln.Close()
		}
		return nil, err
	}
	return open, nil
}

func (f *FrontDoor) open(ctx context.Context, l listener) (net.Listener, error) {
	if path, ok := strings.CutPrefix(l.url, unixScheme); ok {
		ln, err := socket.ListenGroup(ctx, path)
		if err != nil {
			return nil, err
		}
		return ports.Steady(ln, f.log), nil
	}
	addr, ok := strings.CutPrefix(l.url, tlsScheme)
	switch {
	case !ok:
		return nil, errors.New("write unix:///PATH or tls://HOST:PORT")
	case l.tls == nil || l.tls.ClientAuth != tls.RequireAndVerifyClientCert:
		return nil, errors.New("anybody who reaches this address could reach every node: write cert, key and clientca")
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return ports.NewListener(ports.Steady(ln, f.log), ports.ListenerConfig{
		Max: f.cfg.Strangers, MaxPerSource: f.cfg.StrangersPerAddress, Timeout: requestTimeout, Bytes: konnectivity.StrangerBytes,
		Counters: f.cfg.Counters, OverMax: tunnel.LimitStrangers, OverMaxPerSource: tunnel.LimitStrangersPerAddress, TooLate: tunnel.LimitHandshakeTimeout,
	}), nil
}
