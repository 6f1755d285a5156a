package peers

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
)

// Authenticate implements stream.Replicas: the other end of the connection must show a replica's
// certificate.
func (p *Peers) Authenticate(state tls.ConnectionState) error {
	if len(state.PeerCertificates) == 0 {
		return errors.New("it shows no certificate")
	}
	return p.verify(state.PeerCertificates, x509.ExtKeyUsageClientAuth)
}

// verify returns nil if a certificate is a replica's. The replicas' CA must have signed it. It
// must be valid for usage, and contain the name that only replicas have.
func (p *Peers) verify(chain []*x509.Certificate, usage x509.ExtKeyUsage) error {
	intermediates := x509.NewCertPool()
	for _, c := range chain[1:] {
		intermediates.AddCert(c)
	}
	conf := p.cfg.TLS()
	_, err := chain[0].Verify(x509.VerifyOptions{
		Roots: conf.RootCAs, Intermediates: intermediates, DNSName: conf.ServerName,
		KeyUsages: []x509.ExtKeyUsage{usage},
	})
	return err
}

// verifyOwn checks that the other replicas would accept this replica's certificate.
func (p *Peers) verifyOwn(conf *tls.Config, usage x509.ExtKeyUsage, what string) error {
	var own *tls.Certificate
	var err error
	switch {
	case len(conf.Certificates) > 0:
		own = &conf.Certificates[0]
	case usage == x509.ExtKeyUsageServerAuth && conf.GetCertificate != nil:
		own, err = conf.GetCertificate(&tls.ClientHelloInfo{ServerName: p.cfg.TLS().ServerName})
	case usage == x509.ExtKeyUsageClientAuth && conf.GetClientCertificate != nil:
		own, err = conf.GetClientCertificate(&tls.CertificateRequestInfo{})
	}
	if err != nil {
		return fmt.Errorf("this replica's certificate %s: %w", what, err)
	}
	if own == nil || len(own.Certificate) == 0 {
		return fmt.Errorf("this replica has no certificate %s", what)
	}
	var chain []*x509.Certificate
	for _, der := range own.Certificate {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return fmt.Errorf("this replica's certificate %s: %w", what, err)
		}
		chain = append(chain, c)
	}
	if err := p.verify(chain, usage); err != nil {
		return fmt.Errorf("other replicas would not accept this replica's certificate %s: %w "+
			"(it must be signed by ca, hold the name %q, and allow client and server authentication)",
			what, err, p.cfg.TLS().ServerName)
	}
	return nil
}
