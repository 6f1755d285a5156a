package stream

import (
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/auth"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A session ends when the proof of its node is no longer good. The edge may replace the proof: a
// token by sending a new one, a certificate by having a new one signed (sign.go).

// proof is how a node has proven its identity. The session ends when the proof is no longer good. A
// proof never changes. The proof of a replica is empty and stays good, because a replica's certificate is
// checked only when the replica joins.
type proof struct {
	grant       auth.Grant          // node, expiry and revocation of the credential
	release     func()              // makes the authenticator forget the grant
	certificate bool                // the node has shown a certificate, not a token
	chain       []*x509.Certificate // the certificate and the certificates that signed it; set for a certificate
	token       [sha256.Size]byte   // SHA-256 of the token; set for a token
}

// certificateEnds returns when the node's certificate ends, in seconds since 1970; 0 if p is a token.
func (p *proof) certificateEnds() int64 {
	if len(p.chain) == 0 {
		return 0
	}
	return p.chain[0].NotAfter.Unix()
}

// described describes the node's certificate for operators; nil if p is a token.
func (p *proof) described() *tunnel.Certificate {
	if len(p.chain) == 0 {
		return nil
	}
	c := tunnel.CertificateOf(p.chain[0])
	return &c
}

const (
	// clockStep is how often the expiry of a proof is compared with the clock. One timer until the
	// expiry is not enough, because the clock may be set while the session lives.
	clockStep = time.Minute
	// askAgain is how long after a request to renew a late certificate the cloud asks again.
	askAgain = 10 * time.Minute
	// In each renewInterval, an edge may have renewBurst certificates signed, and renewBurst
	// credentials checked. That allows a few failures in a row, but no flood.
	renewInterval = 10 * time.Second
	renewBurst    = 3
)

// The reasons for which a session ends when its proof is no longer good.
var (
	errRevoked = withReason(codes.Unauthenticated, reasonRevoked, "the credential of this node was revoked")
	errExpired = withReason(codes.Unauthenticated, reasonExpired, "the credential of this node has expired")
)

// standOn makes p the proof of the session.
func (s *cloudSession) standOn(p *proof) {
	old := s.proof.Swap(p)
	s.pub.CertificateEnds.Store(p.certificateEnds())
	s.pub.Certificate.Store(p.described())
	if old == nil {
		return
	}
	old.release()
	select {
	case s.proven <- struct{}{}:
	default:
	}
}

// endWhenExpiredOrRevoked ends the session when its proof is no longer good. It returns when the session has
// ended. If the cloud issues certificates, it asks the edge to renew a certificate that the edge should have renewed.
func (s *cloudSession) endWhenExpiredOrRevoked(issues bool) {
	var asked time.Time // when the edge was last asked to renew its certificate; zero: never
	for {
		p := s.proof.Load()
		var expires <-chan time.Time
		if e := p.grant.Expires; !e.IsZero() {
			expires = time.After(min(time.Until(e), clockStep))
		}
		var end error
		select {
		case <-p.grant.Revoked:
			end = errRevoked
		case <-expires:
			switch now := time.Now(); {
			case !now.Before(p.grant.Expires):
				end = errExpired
			case issues && s.pub.Renews && p.isLate(now) && now.Sub(asked) >= askAgain:
				asked = now
				AskToRenew(s.pub, askAgain/10) //nolint:errcheck // the session has ended, or it is asked again
			}
		case <-s.proven:
		case <-s.done:
			return
		}
		if end != nil && s.proof.Load() == p { // a session whose proof was replaced meanwhile continues
			s.Close(end)
			return
		}
	}
}

// isLate reports whether the edge should have renewed its certificate: less than a quarter of its life is left by this
// machine's clock. An edge whose clock stands behind does not know that.
func (p *proof) isLate(now time.Time) bool {
	if len(p.chain) == 0 {
		return false
	}
	leaf := p.chain[0]
	return leaf.NotAfter.Sub(now) < leaf.NotAfter.Sub(leaf.NotBefore)/4
}

// newCredential checks a token that is to replace the session's proof. A bad token changes nothing.
// A goroutine of the session checks the token, since the check may have to ask Kubernetes.
func (s *cloudSession) newCredential(m *tunnel.Message) error {
	var in pb.Credential
	if err := proto.Unmarshal(m.Data, &in); err != nil {
		return fmt.Errorf("credential: %w", err)
	}
	c, err := auth.DecodeToken(in.GetAccessToken())
	if err != nil {
		s.ignored(&refusedJoin{node: string(s.pub.Node), told: uniform(), err: fmt.Errorf("no usable token: %w", err)})
		return nil
	}
	if p := s.proof.Load(); !p.certificate && p.token == sha256.Sum256([]byte(c.Token)) && c.Node == string(s.pub.Node) {
		return nil // edges send a token again, for a cloud that learns of the token late
	}
	if _, ok := s.credentials.Allow(); !ok || s.checking.Swap(true) {
		s.log.Debug("new credential ignored: too many new credentials")
		return nil
	}
	s.wg.Go(s.guarded(func() {
		defer s.checking.Store(false)
		p, refusal := s.prove(c)
		if refusal != nil {
			s.ignored(refusal)
			return
		}
		s.standOn(p)
		s.log.Info("the session has a new proof", "by", text(p.grant.By))
	}))
	return nil
}

// prove checks a credential for the session's own node. The grant lives as long as the session.
func (s *cloudSession) prove(c auth.Credential) (*proof, *refusedJoin) {
	if c.Node != string(s.pub.Node) {
		err := fmt.Errorf("it is that of node %s", text(c.Node))
		return nil, &refusedJoin{node: string(s.pub.Node), told: uniform(), err: err}
	}
	return s.authenticate(c)
}
