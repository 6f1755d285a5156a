// Package https is the front door that looks like a kubelet: HTTPS ports on the cloud
// whose connections reach a port of the node that the caller names.
//
//	door, err := https.New(https.Config{
//		Ports:       map[string]string{"10250": "127.0.0.1:10250"},
//		Certificate: pair.Certificate, ClientCA: pool.Pool, // to terminate what cannot be passed through
//		Kubelet:     https.Kubelet{Certificate: client.Certificate, CA: kubeletCA.Pool},
//	}, directory, directory, log)
//	err = door.Run(ctx) // as a tunnel.Module
//
// Two ways lead through it, and the ClientHello decides (see [Mode]):
//
//	passthrough  the SNI names a node: the bytes go through untouched. The caller and
//	             the kubelet authenticate each other, and we hold no key.
//	terminate    no such SNI (kube-apiserver without --kubelet-certificate-authority
//	             sends none on upgrades): we verify the caller's client certificate,
//	             and each request goes to the node that its Host, the SNI or its path
//	             names (whichnode.go), over TLS through the tunnel, with a client
//	             certificate of our own.
//
// On the edge the module is [Edge]: it dials the target and, if it is asked for the
// network "tls" (SuperEdge's way, see [NewEdge]), speaks TLS to it.
//
// A connection belongs to one goroutine from accept on, until it is spliced (which
// owns both ends) or handed to net/http (which owns it until a handler hijacks it).
// [FrontDoor.Run] returns after all of them have ended.
//
// It does not: follow redirects, cache, rewrite paths or bodies, compress, add
// forwarding headers (those that a client sends are stripped), upgrade to anything
// but SPDY/3.1 and websocket, authenticate a caller that is passed through (the
// kubelet does; [Config.AllowFrom] narrows who may try), or parse HTTP by itself
// (framing.go only looks for heads that say twice how long their body is). To a caller
// of HTTP/2 that asks for 100-continue it says so before the target has: net/http does
// not tell a handler that it was asked.
package https

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"tunnel/pkg/auth"
	"tunnel/pkg/listen"
	"tunnel/pkg/tunnel"
)

// Name is the front door's name and the category that its edge module owns.
const Name = "https"

// Mode says what happens to a connection.
type Mode int

const (
	// Auto passes through what names a connected node by SNI and terminates the rest.
	Auto Mode = iota
	// Passthrough never terminates.
	Passthrough
	// Terminate always does.
	Terminate
)

// String returns the mode as the configuration writes it.
func (m Mode) String() string {
	switch m {
	case Passthrough:
		return "passthrough"
	case Terminate:
		return "terminate"
	default:
		return "auto"
	}
}

// DefaultListen is the address that the ports are opened on.
const DefaultListen = "0.0.0.0"

// DefaultClientName is the common name that kubeadm gives to the certificate with
// which kube-apiserver calls kubelets.
const DefaultClientName = "kube-apiserver-kubelet-client"

// Config is what [New] needs. It is not changed afterwards.
type Config struct {
	Mode   Mode
	Listen string            // IP address; empty: DefaultListen
	Ports  map[string]string // port here → host:port on the edge

	// For connections that we terminate. Auto without ClientCA passes through only. Both
	// are asked for every new connection; those that are open have been let in.
	Certificate func() *tls.Certificate
	ClientCA    func() *x509.CertPool
	ClientNames []string // common names that may send any request, compared exactly; empty: DefaultClientName
	Callers     []Caller // others that may call
	Kubelet     Kubelet

	// AllowFrom says who may connect; nil: anyone. Who is in it may also have more than
	// Limits.ConnsPerAddress.
	AllowFrom auth.Sources

	// Pods says which node a pod is on, where the path alone names the pod; nil: the
	// kubelets are asked.
	Pods Pods

	Limits Limits

	Counters *tunnel.Counters // counts panics, limits and callers of nodes that are not connected; nil: nobody looks
}

// Kubelet says how we speak to the kubelet behind a terminated connection. Its funcs are
// asked for every new conn to one; those that are pooled go on.
type Kubelet struct {
	// Certificate is our client certificate. Without one the edge's module https
	// speaks TLS to the kubelet with its own, and the two fields below do not count.
	Certificate func() *tls.Certificate
	// CA verifies the kubelet's certificate for its node's name.
	CA func() *x509.CertPool
	// Insecure takes any certificate when there is no CA.
	Insecure bool
}

func (c *Config) listen() string { return cmp.Or(c.Listen, DefaultListen) }

func (c *Config) clientNames() []string {
	if len(c.ClientNames) == 0 {
		return []string{DefaultClientName}
	}
	return c.ClientNames
}

// terminates reports whether any connection may be terminated.
func (c *Config) terminates() bool {
	return c.Mode != Passthrough && c.Certificate != nil && c.ClientCA != nil
}

// validate returns all that is wrong with c.
func (c *Config) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if _, err := netip.ParseAddr(c.listen()); err != nil {
		bad("listen = %q in [mode.cloud.https] is not an IP address", c.Listen)
	}
	for here, target := range c.Ports {
		if _, err := strconv.ParseUint(here, 10, 16); err != nil {
			bad("%q in [mode.cloud.https.addr] is not a port number", here)
		}
		if _, port, err := net.SplitHostPort(target); err != nil || port == "" {
			bad("%q = %q in [mode.cloud.https.addr]: the target is not host:port", here, target)
		}
	}
	switch {
	case c.Mode < Auto || c.Mode > Terminate:
		bad("tls mode %d is unknown", c.Mode)
	case c.Mode == Terminate && c.Certificate == nil:
		bad(`tls = "terminate" needs cert and key in [mode.cloud.https]`)
	case c.Mode == Auto && c.ClientCA != nil && c.Certificate == nil:
		bad("clientca in [mode.cloud.https] is of no use without cert and key: set them, or tls = \"passthrough\"")
	}
	if c.Mode == Terminate && c.ClientCA == nil {
		bad(`tls = "terminate" needs clientca in [mode.cloud.https]: without it anyone who reaches the port would be a cluster administrator`)
	}
	if k := c.Kubelet; c.terminates() && k.Certificate != nil && k.CA == nil && !k.Insecure {
		bad("set ca in [mode.cloud.https.kubelet] (who signed the kubelets' serving certificates), or insecure = true to take any")
	}
	return errors.Join(errs...)
}

// port is one line of Config.Ports.
type port struct{ here, target string }

// FrontDoor is the cloud's module "https".
type FrontDoor struct {
	// Set once.
	cfg     Config
	ports   []port // by port number; the index is part of a pooled connection's key (proxy.go)
	dialer  tunnel.Dialer
	nodes   tunnel.Nodes
	log     *slog.Logger
	grace   time.Duration
	hearing time.Duration // Limits.HandshakeTimeout

	strangers *listen.Strangers
	passed    passed
	denials   [denyKinds]tunnel.Limiter // one for each kind, so that one does not hide another

	mu    sync.Mutex // guards the following
	addrs []net.Addr // of the open listeners, in the order of ports; nil unless all are open
	web   *web       // nil unless it runs
}

var _ tunnel.Module = (*FrontDoor)(nil)

// New checks cfg and returns the front door. It opens nothing: [FrontDoor.Run] does.
func New(cfg Config, dialer tunnel.Dialer, nodes tunnel.Nodes, log *slog.Logger) (*FrontDoor, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	cfg.Limits = cfg.Limits.orDefault()
	f := &FrontDoor{
		cfg:     cfg,
		dialer:  dialer,
		nodes:   nodes,
		log:     log,
		grace:   tunnel.GracePeriod,
		hearing: cfg.Limits.HandshakeTimeout,
	}
	f.strangers = listen.NewStrangers(cfg.Limits.Strangers, cfg.Limits.StrangersPerAddress)
	f.passed.most = cfg.Limits.ConnsPerAddress
	for here, target := range cfg.Ports {
		f.ports = append(f.ports, port{here, target})
	}
	slices.SortFunc(f.ports, func(a, b port) int {
		return cmp.Or(cmp.Compare(len(a.here), len(b.here)), cmp.Compare(a.here, b.here))
	})
	return f, nil
}

// Name implements tunnel.Module.
func (f *FrontDoor) Name() string { return Name }

// Routes implements tunnel.Module. Edges have nothing to ask of a front door.
func (f *FrontDoor) Routes() map[string]tunnel.Handler { return nil }

// Ready returns nil while every port is open, else what is missing.
func (f *FrontDoor) Ready() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.addrs) < len(f.ports) {
		return errors.New("the https ports are not open")
	}
	return nil
}

// Addrs returns the addresses of the open listeners, in the order of their port
// numbers, or nil before they are open.
func (f *FrontDoor) Addrs() []net.Addr {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.addrs)
}

func (f *FrontDoor) setAddrs(addrs []net.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.addrs = addrs
}

func (f *FrontDoor) setWeb(w *web) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.web = w
}

// hops returns how many targets of nodes the front door has a request or an open conn
// to, on behalf of callers that it terminates: tests see that none is kept.
func (f *FrontDoor) hops() int {
	f.mu.Lock()
	w := f.web
	f.mu.Unlock()
	if w == nil {
		return 0
	}
	return w.proxy.pool.size()
}
