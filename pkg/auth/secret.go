package auth

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
)

// Secret is a token. Every printed form of it is ***, so that it can stand in a
// configuration or a credential that somebody logs one day. Two places know
// no methods and show it all the same: an unexported field printed by fmt, and a key
// of a map encoded as JSON. Keep secrets out of both.
type Secret string

// redacted is what a secret looks like. It says nothing, not even how long it is.
const redacted = "***"

// tokenBytes is how much randomness a new token has.
const tokenBytes = 32

// NewToken makes a token of 256 random bits, in letters, digits, '-' and '_'.
func NewToken() Secret {
	b := make([]byte, tokenBytes)
	rand.Read(b)
	return Secret(base64.RawURLEncoding.EncodeToString(b))
}

// Reveal returns the token itself, for sending it or writing it to its file.
func (s Secret) Reveal() string { return string(s) }

// Hashed returns the token as the token file should hold it: sha256:HEX.
func (s Secret) Hashed() string {
	digest := sha256.Sum256([]byte(s))
	return hashPrefix + hex.EncodeToString(digest[:])
}

// String implements fmt.Stringer.
func (Secret) String() string { return redacted }

// GoString implements fmt.GoStringer.
func (Secret) GoString() string { return redacted }

// Format implements fmt.Formatter, so that %x and %d reveal no more than %s.
func (Secret) Format(f fmt.State, _ rune) { io.WriteString(f, redacted) } //nolint:errcheck // fmt.State takes everything

// MarshalText implements encoding.TextMarshaler.
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// MarshalJSON implements json.Marshaler.
func (Secret) MarshalJSON() ([]byte, error) { return []byte(`"` + redacted + `"`), nil }

// LogValue implements slog.LogValuer.
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }
