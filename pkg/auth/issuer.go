package auth

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Issuer issues certificates to nodes: the first for a join token, later ones for a session that
// a certificate opened.
type Issuer struct {
	// Set once.
	gate   *Gate
	signer Signer

	mu      sync.Mutex                   // guards the following
	signing map[tunnel.NodeName]struct{} // nodes whose first certificate is being signed
}

// ErrSigning is the error of First while another first certificate is being signed for the same
// node. So the holder of one join token cannot keep all workers of a signer busy.
var ErrSigning = errors.New("another certificate of this node is being signed")

// NewIssuer returns an Issuer. Gate g decides who may have a certificate; s signs it.
func NewIssuer(g *Gate, s Signer) *Issuer {
	return &Issuer{gate: g, signer: s, signing: make(map[tunnel.NodeName]struct{})}
}

// First issues the certificate of the node whose join token c holds. An error that is
// ErrUnauthenticated holds the reason, for the log only. ErrSigning means that another request
// of the node is in progress. ErrNoUse means that a token for several nodes is not good for this node.
func (i *Issuer) First(
	ctx context.Context, c Credential, request []byte,
) (node tunnel.NodeName, chain []byte, err error) {
	if node, err = i.gate.Enroll(ctx, c); err != nil {
		return "", nil, err
	}
	if !i.begin(node) {
		return "", nil, ErrSigning
	}
	defer i.end(node)
	if _, err = ParseRequest(node, request); err != nil { // before spend: a bad request does not use up the token
		return node, nil, err
	}
	token := sum(sha256.Sum256([]byte(c.Token)))
	giveBack, err := i.gate.cfg.Tokens.spend(node, token, i.gate.cfg.Known)
	if err != nil {
		return node, nil, err
	}
	if chain, err = i.sign(ctx, node, joinProof(token), request); err != nil {
		giveBack()
	}
	return node, chain, err
}

// begin notes that a certificate for node is being made, until end removes the note. It returns
// false if a certificate for node is being made already.
func (i *Issuer) begin(node tunnel.NodeName) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	_, busy := i.signing[node]
	i.signing[node] = struct{}{}
	return !busy
}

func (i *Issuer) end(node tunnel.NodeName) {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.signing, node)
}

// Again issues another certificate for the node whose certificate c holds. The node's session
// was opened by that certificate. Errors are as for First, without ErrSigning.
func (i *Issuer) Again(ctx context.Context, c Credential, request []byte) (chain []byte, err error) {
	node := tunnel.NodeName(c.Node)
	p, err := i.gate.verifiedProof(node, c.Chain)
	if err != nil {
		return nil, err
	}
	if _, err = i.gate.decide(node, p); err != nil {
		return nil, err
	}
	if chain, err = i.sign(ctx, node, p, request); err != nil {
		return nil, err
	}
	if _, err = i.gate.verifiedProof(node, c.Chain); err != nil { // the CA may have changed during signing
		return nil, err
	}
	return chain, nil
}

// sign checks the request, has the certificate signed for node, and checks the result. p is the
// proof of node.
func (i *Issuer) sign(ctx context.Context, node tunnel.NodeName, p proof, request []byte) (chain []byte, err error) {
	r, err := ParseRequest(node, request)
	if err != nil {
		return nil, err
	}
	if err = i.waitOutRevocation(ctx, node); err != nil {
		return nil, err
	}
	chain, err = i.signer.Sign(ctx, node, request)
	if err == nil || ctx.Err() == nil { // if the caller has gone, the error is not the signer's fault
		i.gate.signingFailed.Store(err != nil)
	}
	if err != nil {
		return nil, fmt.Errorf("signing the certificate of node %s: %w", node, err)
	}
	leaf, err := CheckIssued(chain, node, r.PublicKey, time.Now())
	if err != nil {
		return nil, fmt.Errorf("the certificate signed for node %s does not match its request: %w", node, err)
	}
	// A revocation with before=TIME tells certificates apart by their time of issue. So a revoked
	// proof must not get a newer certificate, not even before the file is read again. Check after
	// signing: a revocation that is written after this check has a later time than the certificate.
	if err := i.gate.decideNow(node, p); err != nil {
		return nil, err
	}
	// The signer's clock can be behind, so the new certificate can fall under a revocation. Refuse now: the
	// node could not join with such a certificate.
	if err := i.gate.decideNow(node, newCertificateProof(i.gate.cfg.Backdate, leaf)); err != nil {
		return nil, fmt.Errorf("the certificate just signed for node %s is refused: %s",
			node, err.Error()) // not ErrUnauthenticated: the edge should try again
	}
	return chain, nil
}

// longestWait is how long waitOutRevocation waits at most: a second, and what two clocks may differ.
const longestWait = 5 * time.Second

// waitOutRevocation waits until a certificate that is issued now is newer than a revocation of node's certificates.
// Times in certificates are whole seconds, and `tunnel token create` revokes the certificates of a revoked node until
// the end of the current second, by its own clock. A time further ahead is no reason to wait: an operator has written
// it.
func (i *Issuer) waitOutRevocation(ctx context.Context, node tunnel.NodeName) error {
	var wait time.Duration
	for _, tb := range i.gate.cfg.Tokens.currentTables() {
		if _, before := tb.revoked(node); time.Until(before) <= longestWait {
			wait = max(wait, time.Until(before))
		}
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(wait):
		return nil
	}
}
