package auth

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"golang.org/x/oauth2"

	"tunnel.example/tunnel/internal/testkit"
)

func TestSecretIsNeverPrinted(t *testing.T) {
	const canary = "c4n4ry"
	hexed := fmt.Sprintf("%x", canary)
	s := Secret(canary)
	c := Credential{Node: "edge1", Token: s}
	log, j := testkit.NewLog()
	log.Info("x", "secret", s, "credential", c, "pointer", &c, "slice", []Secret{s})
	out := []string{j.String()}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%08b", "%T", "%!"} {
		out = append(out, fmt.Sprintf(verb, s), fmt.Sprintf(verb, &s), fmt.Sprintf(verb, c),
			fmt.Sprintf(verb, []Secret{s}), fmt.Sprintf(verb, map[Secret]Secret{s: s}))
	}
	for _, v := range []any{s, c, map[string]any{"a": s}, []Secret{s}} {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, string(b))
	}
	b, err := xml.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	out = append(out, string(b), fmt.Errorf("joining: %v", s).Error())
	for _, o := range out {
		if strings.Contains(o, canary) || strings.Contains(strings.ToLower(o), hexed) {
			t.Errorf("a printed form shows the secret: %s", o)
		}
	}
	if s.Reveal() != canary {
		t.Errorf("Reveal() = %q", s.Reveal())
	}
}

// A source of tokens is a part of configurations, which may be printed.
func TestSourcesAreNeverPrinted(t *testing.T) {
	const canary = "c4n4ry"
	for _, source := range []oauth2.TokenSource{StaticToken(canary), TokenFile(tokenFile(t, canary))} {
		config := struct{ Token, unexported oauth2.TokenSource }{source, source}
		var j strings.Builder
		// Not testkit.NewLog: it refuses a line with a value that has no JSON.
		log := slog.New(slog.NewMultiHandler(slog.NewTextHandler(&j, nil), slog.NewJSONHandler(&j, nil)))
		log.Info("x", "source", source, "config", config, "pointer", &config)
		out := []string{j.String()}
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x"} {
			out = append(out, fmt.Sprintf(verb, source), fmt.Sprintf(verb, config), fmt.Sprintf(verb, &config))
		}
		b, err := json.Marshal(config) // a func has no JSON
		for _, o := range append(out, string(b), fmt.Sprint(err)) {
			if strings.Contains(o, canary) || strings.Contains(strings.ToLower(o), fmt.Sprintf("%x", canary)) {
				t.Errorf("a printed form shows the secret: %s", o)
			}
		}
		if token, err := TokenOf(source); err != nil || token.Reveal() != canary {
			t.Errorf("TokenOf: %q, %v", token.Reveal(), err)
		}
	}
}

func TestNewToken(t *testing.T) {
	a, b := NewToken(), NewToken()
	if a == b || len(a) < 43 { // 256 bits in base64
		t.Errorf("tokens are not 256 random bits: %d and %d bytes, equal %v", len(a), len(b), a == b)
	}
	if err := checkToken(a.Reveal()); err != nil {
		t.Errorf("a new token is not fit for a token file: %v", err)
	}
}
