package auth

import (
	"log/slog"

	"golang.org/x/oauth2"
)

// An [oauth2.Token] prints its secret. Only this package handles one (TestOnlyAuthHandlesTokens in test/arch);
// every other package gets a [Secret] from TokenOf.

// StaticToken returns a source that always returns the same token.
func StaticToken(token Secret) oauth2.TokenSource {
	return unprinted(oauth2.StaticTokenSource(&oauth2.Token{AccessToken: token.Reveal()}).Token)
}

// unprinted is a source that prints as an address, even inside an unexported field. Printed by %s, a source of
// oauth2.StaticTokenSource shows its token.
type unprinted func() (*oauth2.Token, error)

// Token implements oauth2.TokenSource.
func (f unprinted) Token() (*oauth2.Token, error) { return f() }

// TokenFile is the path of an edge's token file, see [ReadTokenFile]. It is a source that reads the file for
// each token, because the file may change: the kubelet replaces a ServiceAccount token before the token expires.
// TokenFile does not warn if other users can read the file.
type TokenFile string

// Token implements oauth2.TokenSource.
func (f TokenFile) Token() (*oauth2.Token, error) {
	token, err := ReadTokenFile(string(f), slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	return &oauth2.Token{AccessToken: token.Reveal()}, nil
}

// TokenOf asks source for a token.
func TokenOf(source oauth2.TokenSource) (Secret, error) {
	token, err := source.Token()
	if err != nil {
		return "", err
	}
	return Secret(token.AccessToken), nil
}
