package auth

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"
)

// jwtMost is how far ahead a token's end may lie. A later one is as none: nothing of the
// kind is meant, and times that far do not fit our arithmetic.
const jwtMost = 100 * 365 * 24 * time.Hour

// looksLikeJWT reports whether a token has the form of a ServiceAccount's: a JWT in
// compact form (RFC 7515 section 3.1). The token file's own have no dots.
func looksLikeJWT(token Secret) bool {
	header, rest, _ := strings.Cut(token.Reveal(), ".")
	payload, signature, _ := strings.Cut(rest, ".")
	return strings.HasPrefix(header, "eyJ") && strings.HasPrefix(payload, "eyJ") && // {"
		signature != "" && !strings.Contains(signature, ".")
}

// expiryOfJWT returns the exp claim (RFC 7519 section 4.1.4) of a token that somebody else
// has found good; zero when it says none that can be used.
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
	if exp := *claims.Exp; exp <= 0 || exp > float64(time.Now().Add(jwtMost).Unix()) {
		return time.Time{}
	}
	return time.Unix(int64(*claims.Exp), 0)
}
