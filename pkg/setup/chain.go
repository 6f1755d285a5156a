package setup

import (
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"slices"
	"sync"

	"tunnel/conf"
	"tunnel/pkg/reload"
)

// rooted is the server's certificate with the authority behind it that join tokens pin:
// an edge that has nothing but a sum finds it there.
type rooted struct {
	// Set once.
	pair *reload.Pair
	cas  *reload.Pool // is another pool when the file has changed
	file string       // of cas
	log  *slog.Logger

	mu  sync.Mutex // guards the following
	of  *tls.Certificate
	by  *x509.CertPool
	now *tls.Certificate // made of both
}

// ServerCertificate returns what the gRPC port shows, for tls.Config.GetCertificate.
func ServerCertificate(c *conf.Cloud, files *reload.Files, pair *reload.Pair, log *slog.Logger) (func(*tls.ClientHelloInfo) (*tls.Certificate, error), error) {
	if c.Join.CloudCA == "" {
		return pair.GetCertificate, nil
	}
	cas, err := files.Pool("mode.cloud.join cloudca", c.Join.CloudCA)
	if err != nil {
		return nil, err
	}
	return (&rooted{pair: pair, cas: cas, file: c.Join.CloudCA, log: log}).get, nil
}

func (r *rooted) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	pair, pool := r.pair.Certificate(), r.cas.Pool()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of == pair && r.by == pool {
		return r.now, nil
	}
	r.of, r.by, r.now = pair, pool, pair
	cas, err := readCertificates("mode.cloud.join: cloudca", r.file)
	if err == nil {
		r.now, err = withRoot(pair, cas)
	}
	if err != nil {
		r.log.Error("no edge can join by a join token: cloudca in [mode.cloud.join] must be the CA that signed the server's certificate", "err", err)
	}
	return r.now, nil
}

// withRoot appends the authority that a certificate leads to, unless it is there.
func withRoot(pair *tls.Certificate, cas []*x509.Certificate) (*tls.Certificate, error) {
	var chain []*x509.Certificate
	for _, der := range pair.Certificate {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return pair, err
		}
		chain = append(chain, cert)
	}
	root, err := rootOf(chain, cas, "")
	if err != nil || slices.ContainsFunc(chain, root.Equal) {
		return pair, err
	}
	whole := *pair
	whole.Certificate = append(slices.Clone(pair.Certificate), root.Raw)
	return &whole, nil
}
