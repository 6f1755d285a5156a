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

// Secret is a token. All its printed forms are ***, so a configuration or a credential that holds a
// Secret can be logged. In two places Go calls no methods and prints the token: in an unexported
// field printed by fmt, and in a map key encoded as JSON. Put no Secret there.
type Secret string

// redacted is the printed form of a secret. It does not reveal the length either.
const redacted = "***"

// tokenBytes is the number of random bytes in a new token.
const tokenBytes = 32

// NewToken makes a token of 256 random bits, encoded in unpadded base64url.
func NewToken() Secret {
	b := make([]byte, tokenBytes)
	rand.Read(b)
	return Secret(base64.RawURLEncoding.EncodeToString(b))
}

// Reveal returns the token itself, for sending it or writing it to its file.
func (s Secret) Reveal() string { return string(s) }

// Hashed returns the form in which the token file should hold the token: sha256:HEX.
func (s Secret) Hashed() string {
	digest := sha256.Sum256([]byte(s))
	return hashPrefix + hex.EncodeToString(digest[:])
}

// String implements fmt.Stringer.
func (Secret) String() string { return redacted }

// GoString implements fmt.GoStringer.
func (Secret) GoString() string { return redacted }

// Format implements fmt.Formatter, so that %x and %d reveal no more than %s.
func (Secret) Format(f fmt.State, _ rune) {
	io.WriteString(f, redacted) //nolint:errcheck // fmt.State takes everything
}

// MarshalText implements encoding.TextMarshaler.
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// MarshalJSON implements json.Marshaler.
func (Secret) MarshalJSON() ([]byte, error) { return []byte(`"` + redacted + `"`), nil }

// LogValue implements slog.LogValuer.
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }
