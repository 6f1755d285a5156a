package auth

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"tunnel/pkg/tunnel"
)

// GateConfig is what a Gate decides by.
type GateConfig struct {
	Tokens *Tokens // the file: tokens and revocations
	// NodeCA returns who signs nodes' certificates; nil: there are none. It is asked
	// often and returns the same pool until it changes.
	NodeCA func() *x509.CertPool
	// Backdate is how long before its issue the NotBefore of a node's certificate lies.
	// One that is too long keeps a certificate good that was issued just before its
	// node's were revoked.
	Backdate        time.Duration
	Reviewer        Reviewer // nil: no ServiceAccount tokens
	ServiceAccounts []string // "namespace/name": whose tokens are taken
	Nodes           Nodes    // nil: any node may join; else only those that Kubernetes knows
	Hosts           []string // names that no node may have, such as the API server's
	Log             *slog.Logger
}

// Gate is the one Authenticator of the cloud: it knows the three proofs of a node, a
// token of the file, a node certificate and a Kubernetes ServiceAccount token, and what
// holds for all of them. It remembers the grants that it gives, for as long as their
// sessions last, and looks at each of them again whenever something has changed.
type Gate struct {
	// Set once.
	cfg     GateConfig
	reviews *reviews // nil: no ServiceAccount tokens

	unsigned atomic.Bool // the Issuer's Signer has failed the last time

	mu     sync.Mutex // guards the following
	grants map[*grant]struct{}
}

var (
	_ Authenticator = (*Gate)(nil)
	_ tunnel.Module = (*Gate)(nil)
)

// grant is what the Gate remembers of a Grant. It never changes.
type grant struct {
	node    tunnel.NodeName
	proof   proof
	expires time.Time
	revoked chan struct{} // closed by end, under the Gate's mu, when the proof is no longer good
}

// proof is what a credential is, once it has been found genuine: what is left is to ask
// the file, which changes.
type proof interface {
	// standing says whether tb lets the proof stand for node, and until when (zero: no
	// end is known).
	standing(tb *table, node tunnel.NodeName, now time.Time) (until time.Time, err error)
	// String says what it is, for people.
	String() string
}

// NewGate returns the Gate. It follows the file and Kubernetes while Run runs.
func NewGate(cfg GateConfig) *Gate {
	g := &Gate{cfg: cfg, grants: make(map[*grant]struct{})}
	if cfg.Reviewer != nil {
		g.reviews = newReviews(cfg.Reviewer, cfg.Log)
	}
	cfg.Tokens.adopted = g.recheck
	return g
}

// Name implements tunnel.Module.
func (*Gate) Name() string { return "auth" }

// Routes implements tunnel.Module: there are none.
func (*Gate) Routes() map[string]tunnel.Handler { return nil }

// Run follows what the Gate decides by until ctx is done, and ends the grants that a
// change does not bear out.
func (g *Gate) Run(ctx context.Context) error {
	children, ctx := errgroup.WithContext(ctx)
	children.Go(func() error { return g.cfg.Tokens.Run(ctx) })
	if g.cfg.Nodes != nil {
		children.Go(func() error { return g.followNodes(ctx) })
	}
	if g.cfg.NodeCA != nil {
		children.Go(func() error { return g.followCA(ctx) })
	}
	return children.Wait()
}

// followNodes looks at the grants again whenever Kubernetes has other nodes.
func (g *Gate) followNodes(ctx context.Context) error {
	for {
		changed := g.cfg.Nodes.Changed() // before the look, so that no change is missed
		if n := g.recheck(); n > 0 {
			g.cfg.Log.Info("nodes have left Kubernetes", "sessions_ended", n)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// Authenticate implements Authenticator. A token counts before a certificate. ctx is the
// session's; for a grant that takes the place of another, give each a context of its own,
// so that the Gate can forget the one that is replaced.
func (g *Gate) Authenticate(ctx context.Context, c Credential) (Grant, error) {
	node, err := g.claimed(c)
	switch {
	case err != nil:
		return Grant{}, err
	case c.Token != "":
		return g.byToken(ctx, node, c.Token, c.From)
	case len(c.Chain) > 0:
		return g.byCertificate(ctx, node, c.Chain)
	}
	return Grant{}, refusal("there is neither a token nor a certificate")
}

// claimed returns the node that a credential claims, if a node may have that name.
func (g *Gate) claimed(c Credential) (tunnel.NodeName, error) {
	node, err := tunnel.ParseNodeName(c.Node)
	if err != nil {
		return "", refusal("the claimed node name is not RFC 1123")
	}
	if err := node.MayJoin(g.cfg.Hosts...); err != nil {
		return "", refusal(err.Error())
	}
	return node, nil
}

// byToken admits node by a token of the file or of Kubernetes.
func (g *Gate) byToken(ctx context.Context, node tunnel.NodeName, secret Secret, from netip.Addr) (Grant, error) {
	got, err := g.admit(ctx, node, tokenProof(sha256.Sum256([]byte(secret))))
	if err == nil || g.reviews == nil || !looksLikeJWT(secret) {
		return got, err
	}
	// Also for a node that may not join: a stranger must not learn which ones may by
	// how long the refusal takes.
	account, err := g.byReview(ctx, node, secret, from)
	if err != nil {
		return Grant{}, err
	}
	return g.admit(ctx, node, account)
}

// byCertificate admits node by the certificate of its connection.
func (g *Gate) byCertificate(ctx context.Context, node tunnel.NodeName, chain []*x509.Certificate) (Grant, error) {
	p, err := g.genuine(node, chain)
	if err != nil {
		return Grant{}, err
	}
	return g.admit(ctx, node, p)
}

// Enroll returns the node that may get a certificate by a join token. The token is good
// for nothing else, and no other proof is good for this.
func (g *Gate) Enroll(_ context.Context, c Credential) (tunnel.NodeName, error) {
	node, err := g.claimed(c)
	switch {
	case err != nil:
		return "", err
	case c.Token == "":
		return "", refusal("there is no join token")
	}
	if _, err := g.decide(node, joinProof(sha256.Sum256([]byte(c.Token)))); err != nil {
		return "", err
	}
	return node, nil
}

// decide says whether p lets node in now, and until when.
func (g *Gate) decide(node tunnel.NodeName, p proof) (until time.Time, err error) {
	return g.decideBy(g.cfg.Tokens.table.Load(), node, p)
}

// decideNow says whether all of proofs let node in, by the file as it is at this moment as
// well.
func (g *Gate) decideNow(node tunnel.NodeName, proofs ...proof) error {
	for _, tb := range g.cfg.Tokens.asOfNow() {
		for _, p := range proofs {
			if _, err := g.decideBy(tb, node, p); err != nil {
				return err
			}
		}
	}
	return nil
}

func (g *Gate) decideBy(tb *table, node tunnel.NodeName, p proof) (until time.Time, err error) {
	// The proof first: only who has one learns, by the time it takes, about the node.
	if until, err = p.standing(tb, node, time.Now()); err != nil {
		return time.Time{}, err
	}
	if all, _ := tb.revoked(node); all {
		return time.Time{}, refusal("the token file revokes this node")
	}
	if g.cfg.Nodes != nil {
		if may, known := g.cfg.Nodes.May(node); known && !may {
			return time.Time{}, refusal("Kubernetes has no node of this name; set anynode = true under [mode.cloud.join] if it need not have one")
		}
	}
	return until, nil
}

// admit grants node what p proves.
func (g *Gate) admit(ctx context.Context, node tunnel.NodeName, p proof) (Grant, error) {
	gr := &grant{node: node, proof: p, revoked: make(chan struct{})}
	g.mu.Lock()
	var err error
	if gr.expires, err = g.decide(node, p); err == nil {
		// Under the same lock as the decision: whatever changes then sees the grant.
		g.grants[gr] = struct{}{}
	}
	g.mu.Unlock()
	if err != nil {
		return Grant{}, err
	}
	context.AfterFunc(ctx, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.grants, gr)
	})
	return Grant{Node: node, By: p.String(), Expires: gr.expires, Revoked: gr.revoked}, nil
}

// recheck decides about every grant again, and returns how many it has ended. It ends
// those too that would now expire earlier: the session knows only of the old time.
func (g *Gate) recheck() (revoked int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for gr := range g.grants {
		until, err := g.decide(gr.node, gr.proof)
		if err != nil || outlasts(gr.expires, until) {
			g.endLocked(gr)
			revoked++
		}
	}
	return revoked
}

// endLocked ends a grant. The caller holds mu.
func (g *Gate) endLocked(gr *grant) {
	delete(g.grants, gr)
	close(gr.revoked)
}

// Note says, for people who look at the health of the replica, what is wrong with what
// the Gate decides by; "" is nothing.
func (g *Gate) Note() string {
	if fault := g.cfg.Tokens.fault.Load(); fault != nil {
		first, _, _ := strings.Cut((*fault).Error(), "\n") // there may be one for each line
		return "the token file is bad, and what was read before it stays in force: " + first
	}
	if g.unsigned.Load() {
		return "the last certificate that a node asked for could not be signed; the log says why"
	}
	if g.reviews != nil {
		return g.reviews.note()
	}
	return ""
}

// tokenProof is the sum of a token that should open a session.
type tokenProof sum

func (p tokenProof) standing(tb *table, node tunnel.NodeName, now time.Time) (time.Time, error) {
	t, err := tb.token(node, sum(p), false, now)
	return t.expires, err
}

func (tokenProof) String() string { return "token" }

// joinProof is the sum of a token that should get a certificate.
type joinProof sum

func (p joinProof) standing(tb *table, node tunnel.NodeName, now time.Time) (time.Time, error) {
	t, err := tb.token(node, sum(p), true, now)
	return t.expires, err
}

func (joinProof) String() string { return "join token" }

// accountProof is a ServiceAccount whose token Kubernetes has found good for the node.
type accountProof struct {
	account string // "namespace/name"
	until   time.Time
}

func (p accountProof) standing(_ *table, _ tunnel.NodeName, now time.Time) (time.Time, error) {
	if !p.until.IsZero() && !now.Before(p.until) {
		return time.Time{}, refusal("the ServiceAccount token has expired")
	}
	return p.until, nil
}

func (p accountProof) String() string { return "service account " + p.account }
