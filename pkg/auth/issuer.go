package auth

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"

	"tunnel/pkg/tunnel"
)

// Issuer gives nodes their certificates: the first by a join token, later ones by a
// session that a certificate has opened.
type Issuer struct {
	// Set once.
	gate   *Gate
	signer Signer

	mu      sync.Mutex                   // guards the following
	signing map[tunnel.NodeName]struct{} // nodes whose first certificate is being made
}

// ErrSigning refuses a node a first certificate while another one is being made for it. Who
// has one join token cannot take all places of a signer that has few.
var ErrSigning = errors.New("a certificate of this node is being made")

// NewIssuer returns an Issuer that asks g who may have a certificate, and s for it.
func NewIssuer(g *Gate, s Signer) *Issuer {
	return &Issuer{gate: g, signer: s, signing: make(map[tunnel.NodeName]struct{})}
}

// First issues the certificate of the node whose join token c is. Its errors are as those
// of Authenticate: one that is ErrUnauthenticated for the log alone; or ErrSigning.
func (i *Issuer) First(ctx context.Context, c Credential, request []byte) (node tunnel.NodeName, chain []byte, err error) {
	if node, err = i.gate.Enroll(ctx, c); err != nil {
		return "", nil, err
	}
	if !i.begin(node) {
		return "", nil, ErrSigning
	}
	defer i.end(node)
	chain, err = i.sign(ctx, node, joinProof(sha256.Sum256([]byte(c.Token))), request)
	return node, chain, err
}

// begin reports whether nobody is making a first certificate for node. end undoes it.
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

// Again issues another certificate for the node whose certificate c is; a session stands
// on that. Its errors are as those of First.
func (i *Issuer) Again(ctx context.Context, c Credential, request []byte) (chain []byte, err error) {
	node := tunnel.NodeName(c.Node)
	p, err := i.gate.genuine(node, c.Chain)
	if err != nil {
		return nil, err
	}
	if _, err = i.gate.decide(node, p); err != nil {
		return nil, err
	}
	if chain, err = i.sign(ctx, node, p, request); err != nil {
		return nil, err
	}
	if _, err = i.gate.genuine(node, c.Chain); err != nil { // the CA may be another one now
		return nil, err
	}
	return chain, nil
}

// sign has a certificate signed for node, which p has proven.
func (i *Issuer) sign(ctx context.Context, node tunnel.NodeName, p proof, request []byte) (chain []byte, err error) {
	r, err := ParseRequest(node, request)
	if err != nil {
		return nil, err
	}
	chain, err = i.signer.Sign(ctx, node, request)
	if err == nil || ctx.Err() == nil { // else who asked has gone: no fault of the signer
		i.gate.unsigned.Store(err != nil)
	}
	if err != nil {
		return nil, fmt.Errorf("signing the certificate of node %s: %w", node, err)
	}
	leaf, err := checkIssued(chain, node, r.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("what was signed for node %s is not what was asked for: %w", node, err)
	}
	// A revocation tells certificates by their age, so a new one must not come of what was
	// revoked, not even in the moment before the file is read again. It is looked at behind
	// the signing: a time that is written later than that is later than the certificate's.
	if err := i.gate.decideNow(node, p); err != nil {
		return nil, err
	}
	// Times in certificates are whole seconds: better a refusal now than a certificate that
	// opens nothing.
	if err := i.gate.decideNow(node, newCertificateProof(i.gate.cfg.Backdate, leaf)); err != nil {
		return nil, fmt.Errorf("the certificate that was just signed for node %s is good for nothing, try again: %w", node, err)
	}
	return chain, nil
}
