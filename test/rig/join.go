package rig

import (
	"crypto/tls"
	"crypto/x509"
)

// GRPC returns the address at which edges join.
func (p *Pair) GRPC() string { return p.cfg.CloudHost.Address(p.ports.GRPC) }

// EdgeTLS returns how an edge of a test's own verifies the cloud.
func (p *Pair) EdgeTLS() *tls.Config { return EdgeTLS(p.ca.CertPEM()) }

// EdgeTLS returns how an edge verifies the cloud of a pair whose authority ca is, in PEM.
func EdgeTLS(ca []byte) *tls.Config {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	return &tls.Config{RootCAs: roots, ServerName: cloudName, MinVersion: tls.VersionTLS13}
}
