// Package https is the front door that looks like a kubelet. It opens HTTPS ports on the cloud and
// connects each caller to a port of the node that the caller names.
//
//	door, err := https.New(https.Config{
//		Ports:       map[string]string{"10250": "127.0.0.1:10250"},
//		Certificate: pair.Certificate, ClientCA: pool.Pool, // to terminate what cannot be passed through
//		Kubelet:     https.Kubelet{Certificate: client.Certificate, CA: kubeletCA.Pool},
//	}, directory, directory, log)
//	err = door.Run(ctx) // as a tunnel.Module
//
// It handles a connection in one of two ways, chosen by the ClientHello (see [Mode]):
//
//	passthrough  The SNI names a connected node: the bytes go through unchanged. The caller
//	             and the kubelet authenticate each other, and we hold no key.
//	terminate    There is no such SNI (kube-apiserver without
//	             --kubelet-certificate-authority sends none on upgrades): we verify the
//	             caller's client certificate. Each request goes to the node that its Host,
//	             the SNI or its path names (whichnode.go), over TLS through the tunnel, with
//	             a client certificate of our own.
//
// On the edge the module is [Edge]. It dials the target and, if the cloud asks for the network
// "tls" (SuperEdge's way, see [NewEdge]), speaks TLS to it.
//
// One goroutine owns a connection from accept on. It hands the connection over to Splice, which
// owns both ends, or to net/http, which owns it until a handler hijacks it. [FrontDoor.Run] returns
// after all connections have ended.
//
// The package does not follow redirects, cache, rewrite paths or bodies, compress, or add
// forwarding headers (it strips those that a client sends). It upgrades to SPDY/3.1 and websocket
// only. It does not authenticate a caller that is passed through: the kubelet does, and
// [Config.AllowFrom] limits who may try. It does not parse HTTP itself, except that framing.go
// looks for heads that state the length of their body twice. A caller of HTTP/2 that expects
// 100-continue receives it before the target has sent it: net/http does not tell a handler about
// the expectation.
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
	"sync/atomic"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/balancer"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Name is the front door's name and the category that its edge module handles.
const Name = "https"

// Mode says how connections are handled.
type Mode int

const (
	// Auto passes a connection through if its SNI names a connected node, and terminates others.
	Auto Mode = iota
	// Passthrough never terminates a connection.
	Passthrough
	// Terminate terminates every connection.
	Terminate
)

// String returns the mode as it is written in the configuration.
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

// DefaultListen is the IP address on which the ports are opened. net.Listen opens it for IPv4 and IPv6.
const DefaultListen = "0.0.0.0"

// DefaultClientName is the common name of kube-apiserver's client certificate for kubelets, as
// kubeadm creates it.
const DefaultClientName = "kube-apiserver-kubelet-client"

// Config is the configuration of a FrontDoor. It does not change after [New]; [FrontDoor.SetLists] replaces
// ClientNames, Callers, AllowFrom and Limits.ConnsPerAddress.
type Config struct {
	Mode   Mode              // which connections are passed through, and which are terminated
	Listen string            // IP address; empty: DefaultListen
	Ports  map[string]string // port on the cloud → host:port on the edge

	// Our certificate, and the CAs of callers, for connections that we terminate. Auto without
	// ClientCA only passes through. Both are called for each new connection; open connections are
	// not affected when their results change.
	Certificate func() *tls.Certificate
	ClientCA    func() *x509.CertPool
	ClientNames []string // common names that may send any request, compared exactly; empty: DefaultClientName
	Callers     []Caller // other callers, which may send some classes of requests
	Kubelet     Kubelet  // for terminated connections

	// AllowFrom lists the sources that may connect; nil: any. Its sources may exceed
	// Limits.ConnsPerAddress, except those that only a network of all addresses contains.
	AllowFrom auth.Sources
	ProxyFrom auth.Sources // balancers that send a PROXY header to Ports; see package balancer

	// OnePort gives the callers that connect to the one port (package oneport); nil: none. They are served as if they
	// had connected to the port of Ports whose name is in OnePortAs.
	OnePort   *listen.Handover
	OnePortAs string

	// Pods finds the node of the pod that a request's path names, unless the SNI names a connected
	// node (see proxy.whichNode); nil: the kubelets are asked.
	Pods Pods

	Limits Limits // a zero field: its default

	Sockets *listen.Sockets // opens the ports; nil: nobody can take them over

	// Counters counts panics, limits, callers of nodes that are not connected, and what became of each
	// caller; nil: not counted.
	Counters *tunnel.Counters

	// Sink is told of each connection that is passed through, and of each terminated request. Of the requests, the audit
	// records only those that run a command in a pod or connect to a pod.
	Sink tunnel.Sink
}

// Kubelet says how we speak to the kubelet behind a terminated connection. Its functions are called
// for each new conn to a kubelet; pooled conns are not affected when their results change.
type Kubelet struct {
	// Certificate is our client certificate. If it is nil, the edge's module https speaks TLS to
	// the kubelet with its own certificate, and CA and Insecure are ignored.
	Certificate func() *tls.Certificate
	// CA verifies the kubelet's certificate for its node's name.
	CA func() *x509.CertPool
	// Insecure accepts any certificate if there is no CA.
	Insecure bool
}

func (c *Config) listen() string { return cmp.Or(c.Listen, DefaultListen) }

// terminates reports whether any connection may be terminated.
func (c *Config) terminates() bool {
	return c.Mode != Passthrough && c.Certificate != nil && c.ClientCA != nil
}

// validate returns all errors in c.
func (c *Config) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if _, err := netip.ParseAddr(c.listen()); err != nil {
		bad("listen = %q in [mode.cloud.https] is not an IP address", c.Listen)
	}
	for number, target := range c.Ports {
		if _, err := strconv.ParseUint(number, 10, 16); err != nil {
			bad("%q in [mode.cloud.https.addr] is not a port number", number)
		}
		if _, port, err := net.SplitHostPort(target); err != nil || port == "" {
			bad("%q = %q in [mode.cloud.https.addr]: the target is not host:port", number, target)
		}
	}
	switch {
	case c.Mode < Auto || c.Mode > Terminate:
		bad("tls mode %d is unknown", c.Mode)
	case c.Mode == Terminate && c.Certificate == nil:
		bad(`tls = "terminate" needs cert and key in [mode.cloud.https]`)
	case c.Mode == Auto && c.ClientCA != nil && c.Certificate == nil:
		bad("clientca in [mode.cloud.https] has no effect without cert and key: set them, or tls = \"passthrough\"")
	}
	if c.Mode == Terminate && c.ClientCA == nil {
		bad(`tls = "terminate" needs clientca in [mode.cloud.https]: ` +
			"without it anyone who reaches the port would be a cluster administrator")
	}
	if _, ok := c.Ports[c.OnePortAs]; !ok && c.OnePort != nil {
		bad("the port %q, as which callers of the one port are served, is not in [mode.cloud.https.addr]", c.OnePortAs)
	}
	if k := c.Kubelet; c.terminates() && k.Certificate != nil && k.CA == nil && !k.Insecure {
		bad("set ca in [mode.cloud.https.kubelet] (the CA that signed the kubelets' serving certificates), " +
			"or insecure = true to accept any certificate")
	}
	return errors.Join(errs...)
}

// port is one line of Config.Ports: the port on the cloud, and host:port on the edge.
type port struct{ number, target string }

// FrontDoor is the cloud's module "https".
type FrontDoor struct {
	// Set once.
	cfg             Config
	ports           []port        // by port number; the index is part of a pooled connection's key (see hop)
	dialer          tunnel.Dialer // opens conns to targets
	nodes           tunnel.Nodes  // knows which nodes are connected
	log             *slog.Logger
	grace           time.Duration // how long connections may go on after Run's ctx is done
	strangerTimeout time.Duration // how long a caller that may not call stays connected: Limits.HandshakeTimeout

	balancers    *balancer.Balancers       // in front of the ports
	strangers    *listen.Strangers         // connections whose callers have not authenticated yet
	lists        atomic.Pointer[Lists]     // who may call now
	passthroughs passthroughCounter        // connections that are passed through, by source and node
	denials      [denyKinds]tunnel.Limiter // limits warnings; one for each kind, so that one kind does not hide another

	mu    sync.Mutex // guards the following
	addrs []net.Addr // of the open listeners, in the order of ports; nil unless all are open
	web   *web       // nil unless it runs
}

var _ tunnel.Module = (*FrontDoor)(nil)

// New checks cfg and returns the front door. It opens nothing; [FrontDoor.Run] does.
func New(cfg Config, dialer tunnel.Dialer, nodes tunnel.Nodes, log *slog.Logger) (*FrontDoor, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	cfg.Limits = cfg.Limits.orDefault()
	f := &FrontDoor{
		cfg:             cfg,
		dialer:          dialer,
		nodes:           nodes,
		log:             log,
		grace:           tunnel.GracePeriod,
		strangerTimeout: cfg.Limits.HandshakeTimeout,
	}
	f.balancers = balancer.New(balancer.Config{
		From: cfg.ProxyFrom, Key: "proxyfrom", Table: "[mode.cloud.https]",
		Counters: cfg.Counters, Log: log.With("module", Name),
	})
	for k := denyFailure; k < denyKinds; k++ {
		f.denials[k].Burst = failureBurst
	}
	f.strangers = listen.NewStrangers(cfg.Limits.Strangers, cfg.Limits.StrangersPerAddress)
	f.SetLists(Lists{
		ClientNames: cfg.ClientNames, Callers: cfg.Callers, AllowFrom: cfg.AllowFrom,
		ConnsPerAddress: cfg.Limits.ConnsPerAddress,
	})
	for number, target := range cfg.Ports {
		f.ports = append(f.ports, port{number, target})
	}
	slices.SortFunc(f.ports, func(a, b port) int {
		return cmp.Or(cmp.Compare(len(a.number), len(b.number)), cmp.Compare(a.number, b.number))
	})
	return f, nil
}

// Name implements tunnel.Module.
func (f *FrontDoor) Name() string { return Name }

// Ready returns nil while every port is open, otherwise an error.
func (f *FrontDoor) Ready() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.addrs) < len(f.ports) {
		return errors.New("the https ports are not open")
	}
	return nil
}

// Addrs returns the addresses of the open listeners, ordered by port number; nil unless all are
// open.
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

// hops returns the number of targets that have a request or an open conn now. It counts only callers
// whose TLS ends here. Tests use it to check that no target is kept for ever.
func (f *FrontDoor) hops() int {
	f.mu.Lock()
	w := f.web
	f.mu.Unlock()
	if w == nil {
		return 0
	}
	return w.proxy.pool.size()
}
