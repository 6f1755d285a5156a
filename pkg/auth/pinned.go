package auth

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"sync/atomic"
)

// ErrPin is a server that is not the one that a join token is for.
var ErrPin = errors.New("the server's certificate is not of the CA that the join token names: " +
	"the token is another cloud's, its CA is a new one, or somebody stands between; make a new token on the cloud, and let nothing on the way end TLS")

// PinnedTLS returns how to connect to the cloud of a join token: the server has to show
// the CA certificate whose hash the token has, and one for the server's name that this CA
// has signed. Who is not that server is refused within the handshake, before anything
// else is sent. (A pinned certificate may be the server's own.)
//
// ca returns the CA's certificate in PEM, nil until a handshake has succeeded.
func PinnedTLS(t JoinToken) (cfg *tls.Config, ca func() []byte) {
	var seen atomic.Pointer[x509.Certificate]
	cfg = &tls.Config{
		MinVersion: tls.VersionTLS12,
		ServerName: t.ServerName,
		// The standard verification knows no CA; VerifyConnection takes its place.
		InsecureSkipVerify: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			root, err := verifyPinned(t, s.PeerCertificates)
			if err != nil {
				return err
			}
			seen.Store(root)
			return nil
		},
	}
	return cfg, func() []byte {
		root := seen.Load()
		if root == nil {
			return nil
		}
		return encodePEM("CERTIFICATE", root.Raw)
	}
}

// verifyPinned verifies a server's chain, leaf first, and returns the pinned one of it.
func verifyPinned(t JoinToken, chain []*x509.Certificate) (*x509.Certificate, error) {
	if len(chain) == 0 {
		return nil, ErrPin
	}
	var root *x509.Certificate
	roots, between := x509.NewCertPool(), x509.NewCertPool()
	for _, c := range chain {
		if sha256.Sum256(c.Raw) == t.CA {
			root = c
			roots.AddCert(c)
		} else {
			between.AddCert(c)
		}
	}
	if root == nil {
		return nil, ErrPin
	}
	_, err := chain[0].Verify(x509.VerifyOptions{
		Roots:         roots,
		Intermediates: between,
		DNSName:       t.ServerName,
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	if _, stranger := errors.AsType[x509.UnknownAuthorityError](err); stranger {
		return nil, ErrPin // who shows the CA of another
	}
	if err != nil {
		return nil, fmt.Errorf("the CA is the one that the join token names, but the server's certificate is not good for %s: %w", t.ServerName, err)
	}
	return root, nil
}
