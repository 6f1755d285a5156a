// Package auth decides which node may join, who may call a front door, and which targets an
// edge may dial.
//
// Joining: the cloud has one [Gate]. The Gate accepts three proofs of a node: a token of the
// token file, a node certificate, and a Kubernetes ServiceAccount token. It also knows what
// revokes each proof. A session calls Authenticate once and then waits for the end of its grant:
//
//	tokens, err := auth.NewTokens(auth.TokensConfig{Path: "/etc/tunnel/tokens", Log: log})
//	gate := auth.NewGate(auth.GateConfig{Tokens: tokens, NodeCA: pool.Pool, Backdate: auth.Backdate, Log: log})
//	go gate.Run(ctx)                        // follows the token file, the CA and the nodes of Kubernetes
//	…
//	c, err := auth.DecodeToken(bearer)      // what the edge sent; or Credential{Node, Chain}
//	g, err := gate.Authenticate(ctx, c)     // ctx: the context of the session
//	select {
//	case <-g.Revoked:                       // the credential was revoked: end the session
//	case <-time.After(time.Until(g.Expires)): // a zero Expires means never
//	case <-ctx.Done():
//	}
//
// Certificates: an [Issuer] issues the first certificate of a node for a join token, and later
// ones for a session that a certificate opened. A [Signer] signs them; [FileSigner] is a Signer
// whose CA is in files.
//
//	signer, err := auth.NewFileSigner("nodes-ca.crt", "nodes-ca.key", 0)
//	issuer := auth.NewIssuer(gate, signer)
//	node, chain, err := issuer.First(ctx, c, request)
//
// An edge reads its [JoinToken] and verifies that it talks to the cloud that the token names.
// Then it requests its first certificate, and from then on renews it:
//
//	t, err := auth.ParseJoinToken(line)
//	tlsConfig, ca := auth.PinnedTLS(t)      // the secret is sent to this cloud only
//	key, request, err := auth.NewRequest(t.Node)
//	…                                       // send the request with t.Secret
//	err = auth.WriteNodeFile("node.pem", chain, key)
//	go auth.NewRenewal(auth.RenewalConfig{Node: t.Node, File: "node.pem", Renew: client.Renew, Log: log}).Run(ctx)
//
// [AddToken] and [RevokeNode] edit the token file, and [List] lists it. All three work on the
// content of the file; reading and writing the file is left to the caller.
//
// Calling a front door: [Sources] is a list of networks that may connect.
//
// Dialling on the edge: [Policy] resolves a target, checks the addresses of the answer, and
// dials one of the checked addresses. The name is resolved once, so DNS cannot change the
// address between check and dial.
//
// [CA] makes certificates for a demo, a test or a small installation, and can be stored.
// [Secret] is a token whose printed form is always ***. [StaticToken] and [TokenFile] are the
// sources of an edge's token, and [TokenOf] asks a source for the token.
//
// The package opens no listener. It starts goroutines only inside Run, except for short
// ones in which [Gate] forgets a grant (context.AfterFunc). It runs no TLS handshake: its
// caller does, and the handshake proves that the peer holds the key of its certificate. The
// package verifies the certificates of nodes; each front door verifies its own callers. It
// reaches Kubernetes only through a [Reviewer], a [Signer] and [Nodes]. The package proves
// which node an edge is. It does not decide what the node may do.
package auth

import (
	"context"
	"crypto/x509"
	"errors"
	"net/netip"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Credential is what an edge presents when it joins: a token, or the certificate chain of its
// TLS connection.
type Credential struct {
	Node  string // the name that the edge claims; it must match the proof
	Token Secret // "": the proof is a certificate
	// Chain is the client certificate of the connection, leaf first. The handshake has
	// proven that the edge has its key. Everything else is still unverified.
	Chain []*x509.Certificate
	// From is the address of an edge that has not joined yet (a stranger). The Gate limits
	// the token reviews of strangers. The zero address means that a joined edge presents a
	// new credential.
	From netip.Addr
}

// Grant is the Gate's answer to a good credential.
type Grant struct {
	Node    tunnel.NodeName // the node that the credential proves
	By      string          // the proof, for people: "token", "certificate 3f…", "service account ns/name"
	Expires time.Time       // when the credential expires by itself; zero: never
	// Revoked is closed when the credential stops being good before Expires. The Gate forgets
	// the grant once the context of Authenticate is done, and then leaves Revoked open.
	Revoked <-chan struct{}
}

// Authenticator turns a credential into the node that it proves.
type Authenticator interface {
	// Authenticate checks c. ctx is the context of the session that gets the grant. When ctx
	// is done, the grant is forgotten, so the caller has nothing to release.
	//
	// A bad credential gives an error that is ErrUnauthenticated. Its text is the reason, for
	// the log only. Any other error means that the credential cannot be checked now.
	Authenticate(ctx context.Context, c Credential) (Grant, error)
}

// Signer makes certificates for nodes.
type Signer interface {
	// Sign returns a certificate for node, with the key of the request (PKCS #10, DER).
	// ParseRequest has already accepted the request for node. The result is the chain in
	// PEM, leaf first.
	Sign(ctx context.Context, node tunnel.NodeName, request []byte) (chain []byte, err error)
}

// Reviewer asks Kubernetes to which ServiceAccount a token belongs.
type Reviewer interface {
	// Review returns what the token proves. An error means that Kubernetes gave no answer.
	// For a bad token, Review returns a Review without Authenticated and no error.
	Review(ctx context.Context, token Secret) (Review, error)
}

// Review is the answer of Kubernetes about a ServiceAccount token for our audience.
type Review struct {
	Authenticated bool
	User          string // "system:serviceaccount:NAMESPACE:NAME"
	Node          string // the node of the pod to which the token is bound; "": the token names no node
}

// Nodes lists the nodes of Kubernetes.
type Nodes interface {
	// May reports whether Kubernetes has a node of that name. known is false until the
	// names have been read once.
	May(node tunnel.NodeName) (may, known bool)
	// Changed returns a channel that is closed at the next change of the set of names.
	Changed() <-chan struct{}
}

// ErrUnauthenticated refuses every bad credential. Its text is the same for an unknown node,
// a wrong token and a malformed name. An error that wraps ErrUnauthenticated holds the reason
// for the log of this side. The reason would help an attacker, so send the peer only the text
// of ErrUnauthenticated.
var ErrUnauthenticated = errors.New("node name and token were not accepted; the cloud's log says why")

// refusal is the reason why a credential is bad. It wraps ErrUnauthenticated.
type refusal string

func (r refusal) Error() string { return string(r) }

// Unwrap makes errors.Is(r, ErrUnauthenticated) true.
func (refusal) Unwrap() error { return ErrUnauthenticated }
