package setup

import (
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"slices"
	"sync"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/reload"
)

// rooted appends to the server's certificate the CA that join tokens pin. An edge that joins
// has only the SHA-256 of this CA, and finds the CA itself in the chain.
type rooted struct {
	// Set once.
	pair *reload.Pair
	cas  *reload.Pool // cas.Pool() returns another pool after the file has changed
	cert string       // the file of the server's certificate
	file string       // the file of cas
	log  *slog.Logger

	mu     sync.Mutex // guards the following
	leaf   *tls.Certificate
	pool   *x509.CertPool
	chain  *tls.Certificate // what get made of leaf and pool
	unread bool             // the last try to read file has failed, and was logged
}

// ServerCertificate returns the GetCertificate of the gRPC port's tls.Config. With cloudca in
// [mode.cloud.join] the certificate has the CA behind it that join tokens pin.
func ServerCertificate(
	c *conf.Cloud, files *reload.Files, pair *reload.Pair, log *slog.Logger,
) (func(*tls.ClientHelloInfo) (*tls.Certificate, error), error) {
	if c.Join.CloudCA == "" {
		return pair.GetCertificate, nil
	}
	cas, err := files.Pool("mode.cloud.join cloudca", c.Join.CloudCA)
	if err != nil {
		return nil, err
	}
	return (&rooted{pair: pair, cas: cas, cert: c.Server.Cert, file: c.Join.CloudCA, log: log}).get, nil
}

// get returns the chain. It makes a new chain if the file of the certificate or of cloudca has changed.
func (r *rooted) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	pair, pool := r.pair.Certificate(), r.cas.Pool()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.leaf == pair && r.pool == pool {
		return r.chain, nil
	}
	cas, err := readCertificates("mode.cloud.join: cloudca", r.file)
	if err != nil { // the next handshake reads the file again
		if !r.unread {
			r.log.Error("no edge can join by a join token", "err", rootProblem(err, r.cert, r.file))
		}
		r.unread = true
		return pair, nil
	}
	r.leaf, r.pool, r.unread = pair, pool, false
	if r.chain, err = withRoot(pair, cas); err != nil {
		r.log.Error("no edge can join by a join token", "err", rootProblem(err, r.cert, r.file))
	}
	return r.chain, nil
}

// withRoot appends to pair's chain the CA of cas that the chain leads to. It returns pair itself if the chain
// holds this CA already, or leads to none of cas.
//
// An error says why no edge accepts the chain. If only dates or usages are wrong, withRoot appends the CA
// nevertheless. An edge that finds its token's CA in the chain can tell its user what is wrong. Without the CA,
// the edge would take the cloud for another server.
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
	if err != nil {
		root = signerOf(chain, cas)
	}
	if root == nil || slices.ContainsFunc(chain, root.Equal) {
		return pair, err
	}
	whole := *pair
	whole.Certificate = append(slices.Clone(pair.Certificate), root.Raw)
	return &whole, err
}
