package auth

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"sync/atomic"
)

// ErrPin refuses a server that is not the server of the join token.
var ErrPin = errors.New("the server's certificate is not signed by the CA that the join token names: " +
	"the token belongs to another cloud, the cloud has a new CA, or a machine on the way intercepts TLS; " +
	"make a new token on the cloud, and let nothing on the way end TLS")

// PinnedTLS returns the TLS configuration for the cloud of a join token. The server must present
// the CA certificate whose hash is in the token, and a certificate for the token's server name
// that this CA has signed. The pinned certificate may also be the server's own. Any other server
// is refused within the handshake, so that it receives no data.
//
// ca returns the CA certificate in PEM; nil before the first successful handshake.
func PinnedTLS(t JoinToken) (cfg *tls.Config, ca func() []byte) {
	var verified atomic.Pointer[x509.Certificate]
	cfg = &tls.Config{
		MinVersion: tls.VersionTLS12,
		ServerName: t.ServerName,
		// The system's CAs do not sign the cloud. VerifyConnection verifies the chain instead.
		InsecureSkipVerify: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			root, err := verifyPinned(t, s.PeerCertificates)
			if err != nil {
				return err
			}
			verified.Store(root)
			return nil
		},
	}
	return cfg, func() []byte {
		root := verified.Load()
		if root == nil {
			return nil
		}
		return encodePEM("CERTIFICATE", root.Raw)
	}
}

// verifyPinned verifies a server's chain, leaf first, and returns the pinned certificate in it.
func verifyPinned(t JoinToken, chain []*x509.Certificate) (*x509.Certificate, error) {
	if len(chain) == 0 {
		return nil, ErrPin
	}
	var root *x509.Certificate
	roots, intermediates := x509.NewCertPool(), x509.NewCertPool()
	for _, c := range chain {
		if sha256.Sum256(c.Raw) == t.CA {
			root = c
			roots.AddCert(c)
		} else {
			intermediates.AddCert(c)
		}
	}
	if root == nil {
		return nil, ErrPin
	}
	_, err := chain[0].Verify(x509.VerifyOptions{
		Roots:         roots,
		Intermediates: intermediates,
		DNSName:       t.ServerName,
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	if _, stranger := errors.AsType[x509.UnknownAuthorityError](err); stranger {
		return nil, ErrPin // the pinned CA is in the chain, but has not signed the server's certificate
	}
	if err != nil {
		return nil, fmt.Errorf("the CA is the one that the join token names, "+
			"but the server's certificate is not valid for %s: %w", t.ServerName, err)
	}
	return root, nil
}
