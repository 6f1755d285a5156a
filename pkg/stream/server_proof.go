package stream

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel/pkg/auth"
	pb "tunnel/pkg/stream/tunnelv1"
	"tunnel/pkg/tunnel"
)

// A session lives no longer than what has proven its node. The edge may put another proof
// in its place: a token by a message, a certificate by having one made (sign.go).

// proof says how a node has proven its identity. The session ends when the proof is no longer good.
// A proof never changes.
type proof struct {
	grant       auth.Grant
	release     func()              // makes the authenticator forget the grant
	certificate bool                // the node has shown a certificate, not a token
	chain       []*x509.Certificate // the certificate and those that signed it
	token       [sha256.Size]byte   // SHA-256 of the token
}

const (
	// clockStep is how often an expiry is compared with the clock, which may be set.
	clockStep = time.Minute
	// An edge may have renewBurst certificates made in each renewInterval, and as many
	// credentials looked at: a few failures in a row, and no flood.
	renewInterval = 10 * time.Second
	renewBurst    = 3
)

// What a session ends with whose proof is no longer good.
var (
	errRevoked = withReason(codes.Unauthenticated, reasonRevoked, "the credential of this node was revoked")
	errExpired = withReason(codes.Unauthenticated, reasonExpired, "the credential of this node has expired")
)

// standOn puts p in the place of the proof that there was.
func (s *cloudSession) standOn(p *proof) {
	old := s.proof.Swap(p)
	if old == nil {
		return
	}
	old.release()
	select {
	case s.proven <- struct{}{}:
	default:
	}
}

// whileProven ends the session when its proof is no longer good. It returns when the
// session has ended.
func (s *cloudSession) whileProven() {
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
			if !time.Now().Before(p.grant.Expires) {
				end = errExpired
			}
		case <-s.proven:
		case <-s.done:
			return
		}
		if end != nil && s.proof.Load() == p { // else it stands on another one now
			s.Close(end)
			return
		}
	}
}

// newCredential takes a token that is to be the session's proof from now on. One that is
// not good changes nothing. It is looked at in a goroutine of the session, since Kubernetes
// may have to be asked.
func (s *Server) newCredential(ctx context.Context, cs *cloudSession, m *tunnel.Message) error {
	var in pb.Credential
	if err := proto.Unmarshal(m.Data, &in); err != nil {
		return status.Errorf(codes.InvalidArgument, "credential: %v", err)
	}
	ignored := func(r *refusedJoin) {
		r.what = "new credential ignored"
		s.refused(ctx, cs.transport, r)
	}
	c, err := auth.DecodeToken(in.GetAccessToken())
	if err != nil {
		ignored(&refusedJoin{node: string(cs.pub.Node), told: uniform(), err: fmt.Errorf("no usable token: %w", err)})
		return nil
	}
	if p := cs.proof.Load(); !p.certificate && p.token == sha256.Sum256([]byte(c.Token)) && c.Node == string(cs.pub.Node) {
		return nil // edges say it again, for a cloud that has learnt of the token late
	}
	if _, ok := cs.credentials.Allow(); !ok || cs.checking.Swap(true) {
		cs.log.Debug("new credential ignored: too many of them")
		return nil
	}
	cs.wg.Go(func() {
		defer cs.checking.Store(false)
		if err := cs.guard(func() error {
			p, refusal := cs.prove(c)
			if refusal != nil {
				ignored(refusal)
				return nil
			}
			cs.standOn(p)
			cs.log.Info("the session has a new proof", "by", text(p.grant.By))
			return nil
		}); err != nil {
			cs.Close(err)
		}
	})
	return nil
}

// prove checks a credential for the session's own node, for as long as the session lives.
func (s *cloudSession) prove(c auth.Credential) (*proof, *refusedJoin) {
	if c.Node != string(s.pub.Node) {
		return nil, &refusedJoin{node: string(s.pub.Node), told: uniform(), err: fmt.Errorf("it is that of node %s", text(c.Node))}
	}
	return s.authenticate(c)
}
