package auth

import (
	"context"
	"crypto/x509"
	"fmt"
	"slices"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// certificateProof is a verified certificate of the node.
type certificateProof struct {
	chain  []*x509.Certificate // leaf first
	issued time.Time           // time of issue: NotBefore plus the backdate of the signer
	until  time.Time           // when the chain expires
	roots  *x509.CertPool      // guarded by the Gate's mu: the CAs of the last successful verification
}

// newCertificateProof returns the proof of an unverified chain. It expires with the leaf.
func newCertificateProof(backdate time.Duration, chain ...*x509.Certificate) *certificateProof {
	return &certificateProof{chain: chain, issued: chain[0].NotBefore.Add(backdate), until: chain[0].NotAfter}
}

// verifiedProof verifies that the chain is a certificate of node and signed by the CA. It returns the
// proof, which the caller still has to check against the token file.
func (g *Gate) verifiedProof(node tunnel.NodeName, chain []*x509.Certificate) (*certificateProof, error) {
	if g.cfg.NodeCA == nil {
		return nil, refusal("there is no token, and no [mode.cloud.join] ca to check certificates with")
	}
	if len(chain) == 0 {
		return nil, refusal("there is no certificate")
	}
	p := newCertificateProof(g.cfg.Backdate, chain...)
	p.roots = g.cfg.NodeCA()
	named, err := NodeOf(chain[0])
	if err != nil {
		return nil, refusal(err.Error())
	}
	if named != node {
		return nil, refusal("the certificate is another node's")
	}
	if p.until, err = verify(chain, p.roots); err != nil {
		return nil, refusal("the certificate is not valid: " + err.Error())
	}
	return p, nil
}

func (p *certificateProof) validUntil(tb *table, node tunnel.NodeName, now time.Time) (time.Time, error) {
	if _, before := tb.revoked(node); p.issued.Before(before) {
		return time.Time{}, refusal("the token file revokes the certificates of this node that were issued before " +
			before.Format(time.RFC3339))
	}
	if !now.Before(p.until) {
		return time.Time{}, refusal("the certificate has expired")
	}
	return p.until, nil
}

func (p *certificateProof) String() string {
	return fmt.Sprintf("certificate %x", p.chain[0].SerialNumber)
}

// caPollInterval is the interval at which the Gate compares the CA pool with the one before. The pool
// follows a file and announces no change.
const caPollInterval = 500 * time.Millisecond

// followCA verifies the grants by certificate again whenever the CA pool has changed.
func (g *Gate) followCA(ctx context.Context) error {
	tick := time.NewTicker(caPollInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			if n := g.recheckCA(g.cfg.NodeCA()); n > 0 {
				g.cfg.Log.Info("the CA of nodes' certificates has changed", "sessions_ended", n)
			}
		}
	}
}

// recheckCA verifies again every certificate that was not verified with roots, and returns how
// many grants it has ended.
func (g *Gate) recheckCA(roots *x509.CertPool) (revoked int) {
	var stale []*grant
	g.mu.Lock()
	for gr := range g.grants {
		if p, ok := gr.proof.(*certificateProof); ok && p.roots != roots {
			stale = append(stale, gr)
		}
	}
	g.mu.Unlock()
	// Verify without the lock: 10,000 verifications take a second.
	stale = slices.DeleteFunc(stale, func(gr *grant) bool {
		_, err := verify(gr.proof.(*certificateProof).chain, roots)
		if err == nil {
			return false
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		if _, live := g.grants[gr]; live {
			g.endLocked(gr)
			revoked++
		}
		return true
	})
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, gr := range stale {
		gr.proof.(*certificateProof).roots = roots
	}
	return revoked
}
