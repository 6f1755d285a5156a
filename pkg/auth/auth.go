// Package auth decides who may join as which node, who may call a front door, and
// what an edge may dial.
//
// Joining: the cloud is given an [Authenticator] and asks it once per session.
//
//	tokens, err := auth.NewTokens("/etc/tunnel/tokens", false, log) // fatal when bad
//	go tokens.Run(ctx)                                              // follows the file
//	…
//	c, err := auth.DecodeToken(bearer)      // what the edge sent
//	g, err := tokens.Authenticate(ctx, c)   // ctx: the session's own
//	select {
//	case <-g.Revoked:                       // the line has left the file: end the session
//	case <-ctx.Done():
//	}
//
// Calling a front door: [Sources] is a list of networks that may connect.
//
// Dialling on the edge: [Policy] resolves a target, checks the addresses that came
// out, and dials one of those, so that a name cannot change its mind in between.
//
// [CA] makes certificates for a demo, a test or a small installation. [Secret] keeps
// a token out of everything that is printed.
//
// The package opens no listener and starts no goroutine of its own except inside
// Run. It does not speak TLS: who verified a client certificate, and against what,
// is the business of the front door that did it. It makes no statement about what an
// authenticated node may do beyond being that node.
package auth

import (
	"context"
	"errors"

	"tunnel/pkg/tunnel"
)

// Credential is what an edge presents when it joins.
type Credential struct {
	Node  string // a claim, to be checked against the token
	Token Secret
}

// Grant is the answer to a good credential.
type Grant struct {
	Node tunnel.NodeName // proven
	// Revoked is closed when the credential stops being good. It is never closed
	// once the context that was given to Authenticate is done.
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
