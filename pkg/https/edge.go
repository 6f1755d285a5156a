package https

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Edge is the edge's module "https". It dials the targets that the front door asks for.
type Edge struct {
	// Set once.
	dial       tunnel.DialFunc
	cert       func() *tls.Certificate    // nil without a client certificate
	ca         *x509.CertPool             // nil: targets are not verified, see NewEdge
	localAddrs func() ([]net.Addr, error) // this machine's addresses; replaced in tests
}

var _ tunnel.Routed = (*Edge)(nil)

// NewEdge returns the edge's module. dial opens TCP conns and decides which targets are permitted.
//
// cert returns the client certificate for kubelets, for the next conn; cert may be nil. With cert,
// the cloud may ask for the network "tls", as in SuperEdge: the edge speaks TLS to the kubelet, and
// the cloud needs no key. But then a key that every kubelet accepts is on a machine that may stand
// on a factory floor. So prefer [mode.cloud.https.kubelet] on the cloud.
//
// ca verifies the target's certificate for the node's name. If ca is nil, the module accepts any
// certificate, because a kubelet's default certificate is self-signed. But then the target must have
// an address of this machine, so the bytes never leave the machine. To answer in the target's place,
// an attacker would need a process on the node that listens on the kubelet's port while the kubelet
// does not. The private key never leaves this process.
func NewEdge(dial tunnel.DialFunc, cert func() *tls.Certificate, ca *x509.CertPool) *Edge {
	return &Edge{dial: dial, cert: cert, ca: ca, localAddrs: net.InterfaceAddrs}
}

// Name implements tunnel.Module.
func (e *Edge) Name() string { return Name }

// Routes implements tunnel.Routed.
func (e *Edge) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error { return in.Serve(e.Dial) },
	}
}

// Run implements tunnel.Module. The sessions own the conns.
func (e *Edge) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Dial is a tunnel.DialFunc for the networks "tcp" and "tls".
func (e *Edge) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	switch r.Network {
	case "", "tcp":
		return e.dial(ctx, r)
	case "tls":
		return e.dialTLS(ctx, r)
	default:
		return nil, tunnel.Refusef(tunnel.Denied, "https targets are dialled by tcp or tls, not by %q", r.Network)
	}
}

// dialTLS dials r.Addr and does a TLS handshake with the edge's client certificate.
func (e *Edge) dialTLS(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	if e.cert == nil {
		return nil, tunnel.Refusef(tunnel.Denied,
			"this edge has no client certificate for %s: "+
				"set cert and key in [mode.edge.https], or [mode.cloud.https.kubelet] on the cloud", r.Addr)
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	r.Network = "tcp"
	raw, err := e.dial(ctx, r)
	if err != nil {
		return nil, err
	}
	if err := e.mayTrust(raw.RemoteAddr()); err != nil {
		tunnel.Reset(raw)
		return nil, err
	}
	host, _, _ := net.SplitHostPort(r.Addr)
	tc := tls.Client(raw, &tls.Config{
		MinVersion:         tls.VersionTLS12,
		Certificates:       []tls.Certificate{*e.cert()},
		RootCAs:            e.ca,
		InsecureSkipVerify: e.ca == nil, // see NewEdge; mayTrust has checked the address
		ServerName:         cmp.Or(string(r.Node), host),
		NextProtos:         []string{"http/1.1"},
	})
	if err := tc.HandshakeContext(ctx); err != nil {
		tunnel.Reset(raw)
		return nil, handshakeRefusal(ctx, r, err)
	}
	return &tlsConn{Conn: tc, raw: raw}, nil
}

// mayTrust returns nil if the target at a may show any certificate, or if its certificate will be
// verified. Otherwise it returns a refusal.
func (e *Edge) mayTrust(a net.Addr) error {
	if e.ca != nil {
		return nil
	}
	at, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return tunnel.Refusef(tunnel.Denied,
			"%s is not an IP address with a port, and there is no CA to verify its certificate with", a)
	}
	ip := at.Addr().Unmap().WithZone("")
	if ip.IsLoopback() {
		return nil
	}
	addrs, err := e.localAddrs()
	if err != nil {
		return tunnel.Refusef(tunnel.Internal, "listing this machine's addresses: %v", err)
	}
	for _, addr := range addrs {
		if p, err := netip.ParsePrefix(addr.String()); err == nil && p.Addr().Unmap().WithZone("") == ip {
			return nil
		}
	}
	return tunnel.Refusef(tunnel.Denied,
		"%s is not an address of this machine, and there is no CA to verify its certificate with", ip)
}

// handshakeRefusal returns the refusal for a TLS handshake with a target that failed with err.
func handshakeRefusal(ctx context.Context, r tunnel.Request, err error) error {
	err = fmt.Errorf("TLS handshake with %s: %w", r.Addr, err)
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return tunnel.Refusef(tunnel.Denied, "%v", err)
	}
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return tunnel.Refusef(tunnel.Timeout, "%v", err)
	case ctx.Err() != nil:
		return tunnel.Refusef(tunnel.Gone, "%v", err)
	default:
		return tunnel.Refusef(tunnel.Internal, "%v", err)
	}
}
