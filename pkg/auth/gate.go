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

	"tunnel.example/tunnel/pkg/tunnel"
)

// GateConfig configures a Gate.
type GateConfig struct {
	Tokens *Tokens // the token file: tokens and revocations
	// NodeCA returns the CAs that sign node certificates; nil: node certificates are refused.
	// The Gate calls it often. NodeCA must return the same pool until the CAs change.
	NodeCA func() *x509.CertPool
	// Backdate is the time between NotBefore of a node certificate and its issue. The Gate
	// adds it to NotBefore to get the time of issue. If it is too long, a certificate that was
	// issued just before a revocation stays good.
	Backdate        time.Duration
	Reviewer        Reviewer // nil: no ServiceAccount tokens
	ServiceAccounts []string // "namespace/name": the accounts whose tokens are accepted
	Nodes           Nodes    // nil: any node may join; else only the nodes of Kubernetes
	// Known reports whether the cloud has seen a node before. The Gate refuses a token for several nodes to such a node.
	// nil: the cloud does not remember nodes after a restart, so the Gate refuses all tokens for several nodes.
	Known func(tunnel.NodeName) bool
	Hosts []string // names that no node may have, such as the API server's
	Log   *slog.Logger
}

// Gate is the Authenticator of the cloud. It accepts three proofs of a node: a token of the
// file, a node certificate and a Kubernetes ServiceAccount token. Rules for all three, such as
// a revoked node, are applied here. The Gate remembers each grant for as long as its session
// lives, and decides again about every grant when one of its inputs changes.
type Gate struct {
	// Set once.
	cfg     GateConfig
	reviews *reviews // nil: no ServiceAccount tokens

	signingFailed atomic.Bool // the last call of the Issuer's Signer failed; set by Issuer, read by Note

	// A goroutine that needs both mu and the mutex of cfg.Nodes locks mu first.
	mu sync.Mutex // guards the following
	// grants are the live grants. admit adds one; recheck, recheckCA and the end of the
	// session's context remove it.
	grants map[*grant]struct{}
	idle   func() // called when no grant is left, once Run's context is done; nil: before
}

var (
	_ Authenticator = (*Gate)(nil)
	_ tunnel.Module = (*Gate)(nil)
)

// grant is the Gate's record of a Grant. It never changes.
type grant struct {
	node    tunnel.NodeName
	proof   proof
	expires time.Time
	revoked chan struct{} // no sends; endLocked closes it when the proof is no longer good
}

// proof is a credential that has passed the checks that need no token file. validUntil checks the
// proof against the token file. The Gate repeats validUntil whenever the file changes.
type proof interface {
	// validUntil checks the proof of node against tb. It returns until when the proof is good;
	// zero: no expiry.
	validUntil(tb *table, node tunnel.NodeName, now time.Time) (until time.Time, err error)
	// String describes the proof, for people.
	String() string
}

// NewGate returns a Gate. It follows its inputs only while Run runs. It becomes the listener of
// cfg.Tokens, so each Tokens belongs to one Gate.
func NewGate(cfg GateConfig) *Gate {
	g := &Gate{cfg: cfg, grants: make(map[*grant]struct{})}
	if cfg.Reviewer != nil {
		g.reviews = newReviews(cfg.Reviewer, cfg.Log)
	}
	cfg.Tokens.onChange = g.recheck
	return g
}

// Name implements tunnel.Module.
func (*Gate) Name() string { return "auth" }

// Run follows the token file, the nodes of Kubernetes and the node CA until ctx is done and no grant is left: a
// session that goes on while the process drains can be revoked, too. Run ends each grant that is no longer good after a
// change.
func (g *Gate) Run(ctx context.Context) error {
	lasts, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	context.AfterFunc(ctx, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.idle = end
		g.forgetLocked(nil)
	})
	children, ctx := errgroup.WithContext(lasts)
	children.Go(func() error { return g.cfg.Tokens.Run(ctx) })
	if g.cfg.Nodes != nil {
		children.Go(func() error { return g.followNodes(ctx) })
	}
	if g.cfg.NodeCA != nil {
		children.Go(func() error { return g.followCA(ctx) })
	}
	return children.Wait()
}

// followNodes decides about all grants again whenever the nodes of Kubernetes change.
func (g *Gate) followNodes(ctx context.Context) error {
	for {
		changed := g.cfg.Nodes.Changed() // taken before the check, so that no change is missed
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

// Authenticate implements Authenticator. If c has a token, its certificate is ignored. ctx is
// the session's context. When a session replaces its credential, give each grant a context of
// its own, so that the Gate can forget the old grant.
func (g *Gate) Authenticate(ctx context.Context, c Credential) (Grant, error) {
	node, err := g.claimedNode(c)
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

// claimedNode returns the node name that a credential claims. It refuses names that no node may have.
func (g *Gate) claimedNode(c Credential) (tunnel.NodeName, error) {
	node, err := tunnel.ParseNodeName(c.Node)
	if err != nil {
		return "", refusal("the claimed node name is not RFC 1123")
	}
	if err := node.MayJoin(g.cfg.Hosts...); err != nil {
		return "", refusal(err.Error())
	}
	return node, nil
}

// byToken admits node by a token of the file, or else by a ServiceAccount token.
func (g *Gate) byToken(ctx context.Context, node tunnel.NodeName, secret Secret, from netip.Addr) (Grant, error) {
	got, err := g.admit(ctx, node, tokenProof(sha256.Sum256([]byte(secret))))
	if err == nil || g.reviews == nil || !looksLikeJWT(secret) {
		return got, err
	}
	// Review also the tokens of nodes that may not join. Otherwise a stranger could tell from
	// the time until the refusal which nodes may join.
	account, err := g.byReview(ctx, node, secret, from)
	if err != nil {
		return Grant{}, err
	}
	return g.admit(ctx, node, account)
}

// byCertificate admits node by the certificate chain of its connection.
func (g *Gate) byCertificate(ctx context.Context, node tunnel.NodeName, chain []*x509.Certificate) (Grant, error) {
	p, err := g.verifiedProof(node, chain)
	if err != nil {
		return Grant{}, err
	}
	return g.admit(ctx, node, p)
}

// Enroll returns the node whose join token c holds, if that node may get a certificate. A node can
// use a join token for nothing else, and Enroll accepts no other proof. A token counts from the moment at which the
// token file holds it.
func (g *Gate) Enroll(ctx context.Context, c Credential) (tunnel.NodeName, error) {
	node, err := g.claimedNode(c)
	switch {
	case err != nil:
		return "", err
	case c.Token == "":
		return "", refusal("there is no join token")
	}
	p, tb := joinProof(sha256.Sum256([]byte(c.Token))), g.cfg.Tokens.table.Load()
	_, err = g.decideWith(tb, node, p)
	if err != nil {
		if latest := g.cfg.Tokens.latest(ctx); latest != tb {
			_, err = g.decideWith(latest, node, p)
		}
	}
	if err != nil {
		return "", err
	}
	return node, nil
}

// decide checks whether node may join now by p, and returns until when.
func (g *Gate) decide(node tunnel.NodeName, p proof) (until time.Time, err error) {
	return g.decideWith(g.cfg.Tokens.table.Load(), node, p)
}

// decideNow checks whether node may join by each of proofs. It checks against the table in force,
// and also against the content that the token file has at this moment.
func (g *Gate) decideNow(node tunnel.NodeName, proofs ...proof) error {
	for _, tb := range g.cfg.Tokens.currentTables() {
		for _, p := range proofs {
			if _, err := g.decideWith(tb, node, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// decideWith checks p and node against tb, the revocations and the nodes of Kubernetes.
func (g *Gate) decideWith(tb *table, node tunnel.NodeName, p proof) (until time.Time, err error) {
	// Check the proof first. Only a caller with a good proof may learn about the node from the
	// time that the refusal takes.
	if until, err = p.validUntil(tb, node, time.Now()); err != nil {
		return time.Time{}, err
	}
	if all, _ := tb.revoked(node); all {
		return time.Time{}, refusal("the token file revokes this node")
	}
	if g.cfg.Nodes != nil {
		if may, known := g.cfg.Nodes.May(node); known && !may {
			return time.Time{}, ErrNoNode
		}
	}
	return until, nil
}

// ErrNoNode is the refusal of a good proof, for a node that Kubernetes does not have (yet). It is ErrUnauthenticated.
var ErrNoNode error = refusal("Kubernetes has no node of this name; " +
	"set anynode = true under [mode.cloud.join] if it need not have one")

// admit checks p and grants node what p proves. The grant lasts until ctx is done.
func (g *Gate) admit(ctx context.Context, node tunnel.NodeName, p proof) (Grant, error) {
	gr := &grant{node: node, proof: p, revoked: make(chan struct{})}
	g.mu.Lock()
	var err error
	if gr.expires, err = g.decide(node, p); err == nil {
		// Decision and registration hold the same lock, so that no later change misses the grant.
		g.grants[gr] = struct{}{}
	}
	g.mu.Unlock()
	if err != nil {
		return Grant{}, err
	}
	context.AfterFunc(ctx, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.forgetLocked(gr)
	})
	return Grant{Node: node, By: p.String(), Expires: gr.expires, Revoked: gr.revoked}, nil
}

// recheck decides about every grant again, and returns how many it has ended. It also ends a
// grant that would now expire earlier, since its session knows only the old time.
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

// endLocked ends a grant: its session sees Revoked closed. The caller holds mu.
func (g *Gate) endLocked(gr *grant) {
	g.forgetLocked(gr)
	close(gr.revoked)
}

// forgetLocked removes a grant, if there is such a one. The caller holds mu.
func (g *Gate) forgetLocked(gr *grant) {
	delete(g.grants, gr)
	if g.idle != nil && len(g.grants) == 0 {
		g.idle()
	}
}

// Note describes the Gate's current problem, for the health page of the replica; "": none.
func (g *Gate) Note() string {
	if fault := g.cfg.Tokens.fault.Load(); fault != nil {
		first, _, _ := strings.Cut((*fault).Error(), "\n") // the error may have one line per bad line
		return "the token file is bad, and the tokens read before stay in force: " + first
	}
	if g.signingFailed.Load() {
		return "the last certificate that a node asked for could not be signed; the log says why"
	}
	if g.reviews != nil {
		return g.reviews.note()
	}
	return ""
}

// tokenProof is the SHA-256 of a token by which an edge wants to open a session.
type tokenProof sum

func (p tokenProof) validUntil(tb *table, node tunnel.NodeName, now time.Time) (time.Time, error) {
	t, err := tb.token(node, sum(p), false, now)
	return t.expires, err
}

func (tokenProof) String() string { return "token" }

// joinProof is the SHA-256 of a token by which an edge wants to get a certificate.
type joinProof sum

func (p joinProof) validUntil(tb *table, node tunnel.NodeName, now time.Time) (time.Time, error) {
	t, err := tb.token(node, sum(p), true, now)
	return t.expires, err
}

func (joinProof) String() string { return "join token" }

// accountProof is a ServiceAccount whose token Kubernetes has accepted for the node.
type accountProof struct {
	account string    // "namespace/name"
	until   time.Time // end of the token; zero: unknown
}

func (p accountProof) validUntil(_ *table, _ tunnel.NodeName, now time.Time) (time.Time, error) {
	if !p.until.IsZero() && !now.Before(p.until) {
		return time.Time{}, refusal("the ServiceAccount token has expired")
	}
	return p.until, nil
}

func (p accountProof) String() string { return "service account " + p.account }
