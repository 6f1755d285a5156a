package auth

import (
	"context"
	"fmt"

	"tunnel/pkg/tunnel"
)

// Issuer gives nodes their certificates: the first by a join token, later ones by a
// session that a certificate has opened.
type Issuer struct {
	gate   *Gate
	signer Signer
}

// NewIssuer returns an Issuer that asks g who may have a certificate, and s for it.
func NewIssuer(g *Gate, s Signer) *Issuer { return &Issuer{gate: g, signer: s} }

// First issues the certificate of the node whose join token c is. Its errors are as those
// of Authenticate: one that is ErrUnauthenticated for the log alone.
func (i *Issuer) First(ctx context.Context, c Credential, request []byte) (node tunnel.NodeName, chain []byte, err error) {
	if node, err = i.gate.Enroll(ctx, c); err != nil {
		return "", nil, err
	}
	chain, err = i.Again(ctx, node, request)
	return node, chain, err
}

// Again issues another certificate for node, whose session a certificate has opened.
func (i *Issuer) Again(ctx context.Context, node tunnel.NodeName, request []byte) (chain []byte, err error) {
	r, err := ParseRequest(node, request)
	if err != nil {
		return nil, err
	}
	if chain, err = i.signer.Sign(ctx, node, request); err != nil {
		return nil, fmt.Errorf("signing the certificate of node %s: %w", node, err)
	}
	leaf, err := checkIssued(chain, node, r.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("what was signed for node %s is not what was asked for: %w", node, err)
	}
	// The node may have been revoked meanwhile, and times in certificates are whole
	// seconds: better a refusal now than a certificate that opens nothing.
	if _, err := i.gate.decide(node, newCertificateProof(i.gate.cfg.Backdate, leaf)); err != nil {
		return nil, fmt.Errorf("the certificate that was just signed for node %s is good for nothing, try again: %w", node, err)
	}
	return chain, nil
}
