// Package auth decides who may join as which node, who may call a front door, and
// what an edge may dial.
//
// Joining: the cloud has one [Gate], which knows the three proofs of a node (a token of
// the token file, a node certificate, a Kubernetes ServiceAccount token) and what
// revokes them. Who has a session asks it once, and listens.
//
//	tokens, err := auth.NewTokens(auth.TokensConfig{Path: "/etc/tunnel/tokens", Log: log}) // fatal when bad
//	gate := auth.NewGate(auth.GateConfig{Tokens: tokens, NodeCA: pool.Pool, Backdate: auth.Backdate, Log: log})
//	go gate.Run(ctx)                        // follows the file, the CA, Kubernetes' nodes
//	…
//	c, err := auth.DecodeToken(bearer)      // what the edge sent; or Credential{Node, Chain}
//	g, err := gate.Authenticate(ctx, c)     // ctx: the session's own
//	select {
//	case <-g.Revoked:                       // the line has left the file: end the session
//	case <-time.After(time.Until(g.Expires)): // unless it is zero
//	case <-ctx.Done():
//	}
//
// Certificates: an [Issuer] gives a node its first one by a join token and the next ones
// by its session; a [Signer] writes them, [FileSigner] with a CA in files.
//
//	signer, err := auth.NewFileSigner("nodes-ca.crt", "nodes-ca.key", 0) // fatal when bad
//	issuer := auth.NewIssuer(gate, signer)
//	node, chain, err := issuer.First(ctx, c, request)
//
// An edge reads its [JoinToken], makes sure that the cloud is the one that the token
// names, has its first certificate signed, and from then on renews it:
//
//	t, err := auth.ParseJoinToken(line)
//	tlsConfig, ca := auth.PinnedTLS(t)      // no secret is sent to anybody else
//	key, request, err := auth.NewRequest(t.Node)
//	…                                       // send the request with t.Secret
//	err = auth.WriteNodeFile("node.pem", chain, key)
//	go auth.NewRenewal(auth.RenewalConfig{Node: t.Node, File: "node.pem", Renew: client.Renew, Log: log}).Run(ctx)
//
// The token file is changed by [AddToken] and [RevokeNode] and shown by [List], which
// work on its content.
//
// Calling a front door: [Sources] is a list of networks that may connect.
//
// Dialling on the edge: [Policy] resolves a target, checks the addresses that came
// out, and dials one of those, so that a name cannot change its mind in between.
//
// [CA] makes certificates for a demo, a test or a small installation, and can be stored.
// [Secret] keeps a token out of everything that is printed.
//
// The package opens no listener and starts no goroutine of its own except inside
// Run. It speaks no TLS itself: the handshake has proven that a peer has the key of its
// certificate. Nodes' certificates are verified here; those of a front door's callers
// are the business of the front door. It knows no Kubernetes but what a [Reviewer], a
// [Signer] and a [Nodes] tell. It makes no statement about what an
// authenticated node may do beyond being that node.
package auth

import (
	"context"
	"crypto/x509"
	"errors"
	"net/netip"
	"time"

	"tunnel/pkg/tunnel"
)

// Credential is what an edge presents when it joins: a token, or the certificate of its
// TLS connection.
type Credential struct {
	Node  string // a claim, to be checked against the proof
	Token Secret // "": the proof is a certificate
	// Chain is the client certificate of the connection, leaf first. The handshake has
	// proven that the edge has its key; nothing else of it has been looked at.
	Chain []*x509.Certificate
	// From is the address of a stranger who shows it. What strangers may have reviewed at
	// once is bounded. Zero: somebody who has joined already shows a new one.
	From netip.Addr
}

// Grant is the answer to a good credential.
type Grant struct {
	Node    tunnel.NodeName // proven
	By      string          // what has proven it, for people: "token", "certificate 3f…", "service account ns/name"
	Expires time.Time       // when the credential stops being good by itself; zero: never
	// Revoked is closed when the credential stops being good before that. It is never
	// closed once the context that was given to Authenticate is done.
	Revoked <-chan struct{}
}

// Authenticator turns a credential into the node that it proves.
type Authenticator interface {
	// Authenticate checks c. ctx is the context of the session that the grant is
	// for: when it is done the grant is forgotten, so nothing needs to be released.
	// A credential that is not good gives an error that is ErrUnauthenticated and
	// whose text is the reason, for the log alone; any other error means that the
	// question could not be answered now.
	Authenticate(ctx context.Context, c Credential) (Grant, error)
}

// Signer makes certificates for nodes.
type Signer interface {
	// Sign returns a certificate for node with the key of the request (PKCS #10, DER),
	// which ParseRequest has accepted for that node: the chain in PEM, leaf first.
	Sign(ctx context.Context, node tunnel.NodeName, request []byte) (chain []byte, err error)
}

// Reviewer asks Kubernetes whose a ServiceAccount token is.
type Reviewer interface {
	// Review returns what the token proves. An error means that the question could not
	// be answered; a token that is not good has a Review without Authenticated.
	Review(ctx context.Context, token Secret) (Review, error)
}

// Review is what Kubernetes says of a ServiceAccount token for our audience.
type Review struct {
	Authenticated bool
	User          string // "system:serviceaccount:NAMESPACE:NAME"
	Node          string // that the pod runs on, to which the token is bound; "": it says none
}

// Nodes tells which nodes there are in Kubernetes.
type Nodes interface {
	// May reports whether there is a node of that name; known is false until the names
	// have been read once.
	May(node tunnel.NodeName) (may, known bool)
	// Changed returns a channel that is closed at the next change of any name.
	Changed() <-chan struct{}
}

// ErrUnauthenticated is the one refusal of every credential that is not good. It
// says the same for an unknown node, a wrong token and a malformed name: the reason
// is for the log of the side that refuses, not for a stranger. Send a stranger this
// text, never that of an error that is ErrUnauthenticated (errors.Is).
var ErrUnauthenticated = errors.New("node name and token were not accepted; the cloud's log says why")

// refusal is why a credential is not good. It is ErrUnauthenticated.
type refusal string

func (r refusal) Error() string { return string(r) }

// Unwrap makes it ErrUnauthenticated for errors.Is.
func (refusal) Unwrap() error { return ErrUnauthenticated }
