package auth

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"tunnel.example/tunnel/pkg/tunnel"
)

func testJoinToken() JoinToken {
	return JoinToken{
		Address: "tunnel.example.com:9000", ServerName: "tunnel.example.com",
		CA: [32]byte{1, 2, 31: 3}, Node: "edge1", Secret: NewToken(),
	}
}

func TestJoinToken(t *testing.T) {
	for _, address := range []string{"tunnel.example.com:9000", "10.0.0.1:1", "[fd00::1]:65535", "Cloud.Example:443"} {
		for _, name := range []string{"tunnel.example.com", "10.0.0.1", "fd00::1", "TUNNEL"} {
			want := testJoinToken()
			want.Address, want.ServerName = address, name
			got, err := ParseJoinToken(want.Encode().Reveal())
			if err != nil || got != want {
				t.Errorf("%s, %s: became %+v, %v", address, name, got, err)
			}
		}
	}
	shared := testJoinToken()
	shared.Node, shared.Nodes = "", "edge-*"
	if got, err := ParseJoinToken(shared.Encode().Reveal()); err != nil || got != shared {
		t.Errorf("a token for several nodes became %+v, %v", got, err)
	}
	token := testJoinToken()
	s := fmt.Sprintf("%v %+v %#v %s", token, token, token, token.Encode())
	if strings.Contains(s, token.Secret.Reveal()) || strings.Count(s, redacted) != 4 {
		t.Errorf("printed as %s", s)
	}
	if n := len(token.Encode()); n > 400 {
		t.Errorf("it has %d bytes, much to paste", n)
	}
}

func TestJoinTokenProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		host := rapid.StringMatching(`[a-z0-9]{1,20}(\.[a-z0-9]{1,20}){0,3}`)
		want := JoinToken{
			Address:    fmt.Sprintf("%s:%d", host.Draw(t, "host"), rapid.IntRange(1, 65535).Draw(t, "port")),
			ServerName: host.Draw(t, "name"),
			CA:         [32]byte(rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "ca")),
			Node:       tunnel.NodeName(rapid.StringMatching(`[a-z0-9]{1,20}`).Draw(t, "node")),
			Secret:     Secret(rapid.StringMatching(`[!-~]{1,150}`).Draw(t, "secret")),
		}
		if got, err := ParseJoinToken(want.Encode().Reveal()); err != nil || got != want {
			t.Fatalf("%+v became %+v, %v", want, got, err)
		}
	})
}

func TestBadJoinTokens(t *testing.T) {
	const canary = "c4n4ry"
	wrap := func(text string) string { return JoinPrefix + base64.RawURLEncoding.EncodeToString([]byte(text)) }
	good := testJoinToken()
	good.Secret = canary
	text := good.Encode().Reveal()
	inner, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(text, JoinPrefix))
	if err != nil {
		t.Fatal(err)
	}
	with := func(change func(*JoinToken)) string {
		changed := good
		change(&changed)
		return changed.Encode().Reveal()
	}
	for name, in := range map[string]string{
		"empty":             "",
		"a plain token":     canary,
		"another version":   strings.Replace(text, "tunnel1", "tunnel2", 1),
		"nothing behind it": JoinPrefix,
		"cut short":         text[:len(text)-4],
		"a blank":           text + " ",
		"a newline":         text[:50] + "\n" + text[50:],
		"padding":           text + "=",
		"standard base64":   JoinPrefix + "+/+/",
		"no JSON":           wrap(canary),
		"array":             wrap("[]"),
		"null":              wrap("null"),
		"bytes behind":      wrap(string(inner) + " "),
		"two objects":       wrap(string(inner) + string(inner)),
		"a field more":      wrap(strings.Replace(string(inner), "{", `{"x":1,`, 1)),
		"a field twice":     wrap(strings.Replace(string(inner), "{", `{"node":"edge1",`, 1)),
		"another case":      wrap(strings.Replace(string(inner), "node", "Node", 1)),
		"another order":     wrap(`{"node":"edge1",` + strings.Replace(string(inner)[1:], `"node":"edge1",`, "", 1)),
		"short hash":        wrap(`{"address":"a:1","servername":"a","ca":"AAAA","node":"edge1","secret":"c4n4ry"}`),
		"no port":           with(func(t *JoinToken) { t.Address = "cloud" }),
		"no host":           with(func(t *JoinToken) { t.Address = ":9000" }),
		"port 0":            with(func(t *JoinToken) { t.Address = "cloud:0" }),
		"port 65536":        with(func(t *JoinToken) { t.Address = "cloud:65536" }),
		"a URL":             with(func(t *JoinToken) { t.Address = "https://cloud:9000" }),
		"a line":            with(func(t *JoinToken) { t.Address = "cloud\nx:9000" }),
		"no server name":    with(func(t *JoinToken) { t.ServerName = "" }),
		"bad server name":   with(func(t *JoinToken) { t.ServerName = "a b" }),
		"no node":           with(func(t *JoinToken) { t.Node = "" }),
		"bad node":          with(func(t *JoinToken) { t.Node = "Edge1" }),
		"node and nodes":    with(func(t *JoinToken) { t.Nodes = "edge-*" }),
		"no pattern":        with(func(t *JoinToken) { t.Node, t.Nodes = "", "edge" }),
		"no secret":         with(func(t *JoinToken) { t.Secret = "" }),
		"a secret in two":   with(func(t *JoinToken) { t.Secret = canary + " " + canary }),
		"too long":          with(func(t *JoinToken) { t.Secret = Secret(strings.Repeat(canary, 300)) }),
		"a megabyte":        JoinPrefix + strings.Repeat("A", 1<<20),
	} {
		_, err := ParseJoinToken(in)
		if err == nil {
			t.Errorf("%s: accepted", name)
		} else if strings.Contains(err.Error(), canary) || len(err.Error()) > 300 {
			t.Errorf("%s: the error shows it: %v", name, err)
		}
	}
}

func FuzzParseJoinToken(f *testing.F) {
	f.Add(testJoinToken().Encode().Reveal())
	f.Add(JoinPrefix + "e30")
	f.Fuzz(func(t *testing.T, s string) {
		token, err := ParseJoinToken(s)
		if err != nil {
			return
		}
		if len(s) > maxJoinToken || token.Encode() != Secret(s) || token.check() != nil {
			t.Fatalf("accepted %q", s)
		}
	})
}
