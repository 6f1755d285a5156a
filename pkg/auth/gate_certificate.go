package auth

import (
	"context"
	"crypto/x509"
	"fmt"
	"slices"
	"time"

	"tunnel/pkg/tunnel"
)

// certificateProof is a certificate of the node.
type certificateProof struct {
	chain  []*x509.Certificate
	issued time.Time
	until  time.Time
	roots  *x509.CertPool // guarded by the Gate's mu: with which it was last found good
}

// newCertificateProof returns what a chain proves until its leaf expires.
func newCertificateProof(backdate time.Duration, chain ...*x509.Certificate) *certificateProof {
	return &certificateProof{chain: chain, issued: chain[0].NotBefore.Add(backdate), until: chain[0].NotAfter}
}

// genuine returns what a chain proves that is of node and of the CA. What the file says of
// it is another question.
func (g *Gate) genuine(node tunnel.NodeName, chain []*x509.Certificate) (*certificateProof, error) {
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
		return nil, refusal("the certificate is not good: " + err.Error())
	}
	return p, nil
}

func (p *certificateProof) standing(tb *table, node tunnel.NodeName, now time.Time) (time.Time, error) {
	if _, before := tb.revoked(node); p.issued.Before(before) {
		return time.Time{}, refusal("the token file revokes the certificates of this node that were issued before " + before.Format(time.RFC3339))
	}
	if !now.Before(p.until) {
		return time.Time{}, refusal("the certificate has expired")
	}
	return p.until, nil
}

func (p *certificateProof) String() string {
	return fmt.Sprintf("certificate %x", p.chain[0].SerialNumber)
}

// poolPoll is how often the CA is looked at: it comes from a file, which says nothing.
const poolPoll = 500 * time.Millisecond

// followCA looks at the grants by certificate again whenever the CA is another.
func (g *Gate) followCA(ctx context.Context) error {
	tick := time.NewTicker(poolPoll)
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

// recheckCA verifies the certificates that were not verified with roots, and returns how
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
	// Not under the lock: ten thousand take a second.
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
