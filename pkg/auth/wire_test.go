package auth

import (
	"strings"
	"testing"
)

func TestTokenOnTheWire(t *testing.T) {
	if got, want := EncodeToken("edge1", `a<b>&"c`), `{"nodename":"edge1","token":"a<b>&\"c"}`; got != want {
		t.Errorf("EncodeToken = %s, want %s", got, want)
	}
	for in, want := range map[string][2]string{
		`{"nodename":"edge1","token":"t"}`:            {"edge1", "t"},
		" {\"token\":\"t\",\n\"nodename\":\"edge1\"}": {"edge1", "t"},
		`{"nodename":"edge1","token":"\u0074"}`:       {"edge1", "t"},
	} {
		if got, err := DecodeToken(in); err != nil || got.Node != want[0] || got.Token.Reveal() != want[1] {
			t.Errorf("DecodeToken(%s) = %+v, %v", in, got, err)
		}
	}
	for name, in := range map[string]string{
		"empty":            ``,
		"null":             `null`,
		"array":            `["edge1","t"]`,
		"string":           `"edge1"`,
		"no token":         `{"nodename":"edge1"}`,
		"no node":          `{"token":"t"}`,
		"empty token":      `{"nodename":"edge1","token":""}`,
		"empty node":       `{"nodename":"","token":"t"}`,
		"field twice":      `{"nodename":"edge1","nodename":"edge2","token":"t"}`,
		"unknown field":    `{"nodename":"edge1","token":"t","admin":"yes"}`,
		"other case":       `{"NodeName":"edge1","token":"t"}`,
		"number":           `{"nodename":"edge1","token":7}`,
		"null field":       `{"nodename":"edge1","token":null}`,
		"nested":           `{"nodename":"edge1","token":{"a":"b"}}`,
		"bytes behind":     `{"nodename":"edge1","token":"t"}x`,
		"two objects":      `{"nodename":"edge1","token":"t"}{}`,
		"cut short":        `{"nodename":"edge1","token":"t"`,
		"not UTF-8":        "{\"nodename\":\"edge1\",\"token\":\"\xff\"}",
		"a byte too long":  `{"nodename":"edge1","token":"t"}` + strings.Repeat(" ", maxWire),
		"bare old token":   `edge1:t`,
		"deep nesting":     strings.Repeat("[", 4000),
		"comma at the end": `{"nodename":"edge1","token":"t",}`,
	} {
		if got, err := DecodeToken(in); err == nil {
			t.Errorf("%s: accepted as %q %q", name, got.Node, got.Token.Reveal())
		}
	}
}

func TestLongestTokenFitsTheWire(t *testing.T) {
	// By default, pkg/stream accepts 16 KiB of metadata from a peer. RFC 9113 section 6.5.2 says how
	// to count them. Metadata other than the token takes some 500 bytes.
	if len("authorization"+"Bearer ")+32+maxWire+500 > 16<<10 {
		t.Errorf("an access token of %d bytes leaves no room for other metadata", maxWire)
	}
	for _, char := range []string{`"`, "\u2028", "x", "é"} {
		token := strings.Repeat(char, maxToken/len(char))
		wire := EncodeToken(strings.Repeat("a", 253), Secret(token))
		if c, err := DecodeToken(wire); err != nil || c.Token.Reveal() != token {
			t.Errorf("a token of %d × %q does not survive the wire: %v", maxToken/len(char), char, err)
		}
	}
}

func FuzzDecodeToken(f *testing.F) {
	f.Add(`{"nodename":"edge1","token":"t"}`)
	f.Add(`{"nodename":"edge1","token":"\ud800"}`)
	f.Add(`{"nodename":"edge1","nodename":"edge2"}`)
	f.Fuzz(func(t *testing.T, s string) {
		c, err := DecodeToken(s)
		if err != nil {
			return
		}
		if c.Node == "" || c.Token == "" || len(s) > maxWire {
			t.Fatalf("accepted %q", s)
		}
		again, err := DecodeToken(EncodeToken(c.Node, c.Token))
		if err == nil && (again.Node != c.Node || again.Token != c.Token) {
			t.Fatalf("%q became %q", s, EncodeToken(c.Node, c.Token))
		}
	})
}
