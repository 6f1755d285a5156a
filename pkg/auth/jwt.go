package auth

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"
)

// maxJWTExpiry is how far in the future the expiry of a token may lie. A later expiry is treated
// as no expiry: no such token exists in practice, and time arithmetic could overflow.
const maxJWTExpiry = 100 * 365 * 24 * time.Hour

// looksLikeJWT reports whether a token has the form of a ServiceAccount token: a JWT in compact
// form (RFC 7515 section 3.1). NewToken's tokens have no dots, so they never have this form.
func looksLikeJWT(token Secret) bool {
	header, rest, _ := strings.Cut(token.Reveal(), ".")
	payload, signature, _ := strings.Cut(rest, ".")
	return strings.HasPrefix(header, "eyJ") && strings.HasPrefix(payload, "eyJ") && // base64url of {"
		signature != "" && !strings.Contains(signature, ".")
}

// expiryOfJWT returns the exp claim (RFC 7519 section 4.1.4) of a token. It does not verify the
// token: Kubernetes has accepted it already. Without a usable claim it returns the zero time.
func expiryOfJWT(token Secret) time.Time {
	_, rest, _ := strings.Cut(token.Reveal(), ".")
	payload, _, _ := strings.Cut(rest, ".")
	text, err := base64.RawURLEncoding.DecodeString(payload)
	if err != nil {
		return time.Time{}
	}
	var claims struct {
		Exp *float64 `json:"exp"` // a NumericDate, which may have a fraction
	}
	if json.Unmarshal(text, &claims) != nil || claims.Exp == nil {
		return time.Time{}
	}
	if exp := *claims.Exp; exp <= 0 || exp > float64(time.Now().Add(maxJWTExpiry).Unix()) {
		return time.Time{}
	}
	return time.Unix(int64(*claims.Exp), 0)
}
