package stream

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
)

// tickets holds the TLS sessions that a client can resume. Neither end needs a signature to resume
// a session (RFC 8446 section 2.2).
//
// A resumed session keeps the certificates that both ends showed in the first handshake. So the
// cache is valid only for one client certificate, one set of CAs and one name of the cloud.
type tickets struct {
	mu    sync.Mutex // guards the following
	leaf  []byte     // the client certificate, DER; empty: no certificate
	roots *x509.CertPool
	name  string                 // the name that the cloud's certificate must have
	cache tls.ClientSessionCache // the TLS sessions for leaf, roots and name; nil: not used yet
}

// handshake records the facts of a TLS handshake that hints for people depend on.
type handshake struct {
	leaf          *x509.Certificate     // the certificate to show when the cloud asks; nil: none
	certRequested atomic.Bool           // the cloud has requested a certificate
	other         atomic.Bool           // the other end's certificate is valid for the cloud, but it chose no protocol
	done          atomic.Bool           // the TLS handshake has succeeded: the other end has the cloud's certificate
	failed        atomic.Pointer[error] // why the TLS handshake failed; nil: it has not failed
}

// cause returns err, wrapped together with the error of a failed TLS handshake if there is one.
// gRPC passes on the text of the handshake error, but not the error value.
func (h *handshake) cause(err error) error {
	if h == nil || status.Code(err) != codes.Unavailable {
		return err
	}
	if cause := h.failed.Load(); cause != nil {
		return &handshakeError{error: err, cause: *cause}
	}
	return err
}

// handshakeError is a gRPC error with the error of a failed TLS handshake as its cause. Its text is
// the text of the gRPC error, because that text contains the text of the cause.
type handshakeError struct {
	error       // from gRPC
	cause error // why the TLS handshake failed
}

// Unwrap returns both errors, for errors.Is and errors.As.
func (e *handshakeError) Unwrap() []error { return []error{e.error, e.cause} }

// errNoHTTP2 is the error of a handshake with a server that has chosen no protocol (RFC 7301): it is no cloud.
var errNoHTTP2 = errors.New("the server speaks no HTTP/2")

// handshakeCredentials are TLS credentials that record in handshake how a TLS handshake ended.
type handshakeCredentials struct {
	credentials.TransportCredentials
	handshake *handshake
}

// ClientHandshake implements credentials.TransportCredentials.
func (c handshakeCredentials) ClientHandshake(
	ctx context.Context, authority string, raw net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		if c.handshake.other.Load() {
			err = errNoHTTP2
		}
		c.handshake.failed.Store(&err)
	} else {
		c.handshake.done.Store(true)
	}
	return conn, info, err
}

// Clone implements credentials.TransportCredentials.
func (c handshakeCredentials) Clone() credentials.TransportCredentials {
	return handshakeCredentials{c.TransportCredentials.Clone(), c.handshake}
}

// tlsConfig returns the TLS configuration of the next connection, and a handshake that records the
// facts of that connection. Several goroutines may call tlsConfig at once.
func (c *Client) tlsConfig() (*tls.Config, *handshake, error) {
	conf := c.cfg.TLS().Clone()
	// tlsConfig chooses the certificate now, so that a resumed TLS session belongs to the
	// certificate that the client shows.
	cert := new(tls.Certificate)
	if get := conf.GetClientCertificate; get != nil {
		var err error
		if cert, err = get(&tls.CertificateRequestInfo{}); err != nil {
			return nil, nil, fmt.Errorf("the certificate to show: %w", err)
		}
	} else if len(conf.Certificates) > 0 {
		cert = &conf.Certificates[0]
	}
	h := &handshake{leaf: cert.Leaf}
	var leaf []byte
	if len(cert.Certificate) > 0 {
		leaf = cert.Certificate[0]
		if h.leaf == nil {
			var err error
			if h.leaf, err = x509.ParseCertificate(leaf); err != nil {
				return nil, nil, fmt.Errorf("the certificate to show: %w", err)
			}
		}
	}
	conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		h.certRequested.Store(true)
		return cert, nil
	}
	verify := conf.VerifyConnection
	conf.VerifyConnection = func(state tls.ConnectionState) error {
		if state.DidResume { // a resumed TLS session: the cloud asks for certificates only in full handshakes
			h.certRequested.Store(true)
		}
		if verify != nil {
			if err := verify(state); err != nil {
				return err
			}
		}
		h.other.Store(state.NegotiatedProtocol == "")
		return nil
	}
	if conf.ClientSessionCache == nil {
		t := &c.tickets
		t.mu.Lock()
		if t.cache == nil || !bytes.Equal(t.leaf, leaf) || t.name != conf.ServerName || !samePool(t.roots, conf.RootCAs) {
			t.leaf, t.roots, t.name, t.cache = leaf, conf.RootCAs, conf.ServerName, tls.NewLRUClientSessionCache(0)
		}
		conf.ClientSessionCache = t.cache
		t.mu.Unlock()
	}
	return conf, h, nil
}

// samePool reports whether a and b are both nil, or hold the same certificates.
func samePool(a, b *x509.CertPool) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Equal(b)
}

// hint says what a person can do about err, if the cloud does not accept the certificate.
func (h *handshake) hint(err error) string {
	switch reason := reasonOf(err); {
	case reason == reasonRevoked:
		return "this node's certificate was revoked; with a new join token, `tunnel join` gets another one"
	case reason == reasonExpired, time.Now().After(h.leaf.NotAfter):
		return fmt.Sprintf("this node's certificate has expired on %s; check this machine's clock, or get another one by "+
			"`tunnel join` with a new join token", h.leaf.NotAfter.UTC().Format(time.RFC3339))
	case !h.certRequested.Load():
		return "the cloud asks for no certificate: set ca in [mode.cloud.join] there, " +
			"or a token in [mode.edge.stream.client] here; if both are set, " +
			"a balancer or a proxy in between ends TLS, and must pass it through instead"
	}
	return "nodecert in [mode.edge.stream.client] must be signed by ca in [mode.cloud.join], be made out to this node, " +
		"and not be revoked; else get another one by `tunnel join` with a new join token"
}
