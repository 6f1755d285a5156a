package auth

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestNodePattern(t *testing.T) {
	for _, text := range []string{"edge-*", "*", "*-edge", "site-*.example.com", "10.0.0.*"} {
		if p, err := ParseNodePattern(text); err != nil || string(p) != text {
			t.Errorf("%q: %q, %v", text, p, err)
		}
	}
	for _, text := range []string{
		"", "edge", "edge-**", "*-*", "Edge-*", "-*", "edge-*-", "a b*", "edge.*.", "*" + strings.Repeat("x", 300),
	} {
		if p, err := ParseNodePattern(text); err == nil {
			t.Errorf("%q became %q", text, p)
		}
	}
	for _, tc := range []struct {
		p    NodePattern
		node tunnel.NodeName
		want bool
	}{
		{"edge-*", "edge-1", true},
		{"edge-*", "edge-a-b", true},
		{"edge-*", "edge-", false},
		{"edge-*", "edge-1.example.com", false},
		{"edge-*", "other-1", false},
		{"site-*.example.com", "site-1.example.com", true},
		{"a*a", "a", false},
		{"*", "edge1", true},
		// Reserved names.
		{"*", "kubernetes", false},
		{"local*", "localhost", false},
		{"kubernetes.*", "kubernetes.default", false},
		{"kubernetes.default.*", "kubernetes.default.svc", false},
		{"10.0.0.*", "10.0.0.5", false},
		{"*", "default", false},
		{"", "edge1", false},
	} {
		if got := tc.p.Match(tc.node); got != tc.want {
			t.Errorf("%s matches %s: %t", tc.p, tc.node, got)
		}
	}
}

// sharedIssuer returns an issuer whose token file has the line of a token for several nodes, and more lines.
func sharedIssuer(t *testing.T, uses int, more string) (i *Issuer, secret Secret, tokenFile string) {
	t.Helper()
	ca, err := NewCA("nodes", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	secret, tokenFile = NewToken(), filepath.Join(t.TempDir(), "tokens")
	content, err := AddToken(more, TokenLine{
		Nodes: "edge-*", Uses: uses, Secret: secret, Join: true, Expires: time.Now().Add(time.Hour),
	}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if err = os.WriteFile(tokenFile, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return issuerOf(t, tokenFile, fileSigner(t, ca, 0)), secret, tokenFile
}

// issuerOf returns an issuer of a cloud that has just started.
func issuerOf(t *testing.T, tokenFile string, s Signer) *Issuer {
	t.Helper()
	log, _ := testkit.NewLog()
	tokens, err := NewTokens(TokensConfig{Path: tokenFile, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	never := func(tunnel.NodeName) bool { return false }
	return NewIssuer(NewGate(GateConfig{Tokens: tokens, Backdate: Backdate, Known: never, Log: log}), s)
}

// first asks for a certificate of a node.
func first(t *testing.T, i *Issuer, node tunnel.NodeName, secret Secret) error {
	t.Helper()
	_, request, err := NewRequest(node)
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = i.First(t.Context(), Credential{Node: string(node), Token: secret}, request)
	return err
}

// A token for several nodes is good for so many nodes, each once, also after a restart of the cloud.
func TestSharedJoinToken(t *testing.T) {
	i, secret, file := sharedIssuer(t, 3, "edge-9:sha256:"+strings.Repeat("0", 64)+"\n"+
		"edge-8:revoked before=2020-01-01T00:00:00Z\n")
	for _, node := range []tunnel.NodeName{"other-1", "edge-1.x", "edge-9", "edge-8", "kubernetes"} {
		if err := first(t, i, node, secret); !errors.Is(err, ErrUnauthenticated) {
			t.Errorf("%s: %v; want a refusal", node, err)
		}
	}
	if err := first(t, i, "edge-1", NewToken()); !errors.Is(err, ErrUnauthenticated) {
		t.Errorf("another token: %v", err)
	}
	for _, node := range []tunnel.NodeName{"edge-1", "edge-2"} {
		if err := first(t, i, node, secret); err != nil {
			t.Fatal(err)
		}
	}
	i = issuerOf(t, file, i.signer)
	i.gate.cfg.Known = func(n tunnel.NodeName) bool { return n == "edge-7" }
	for _, node := range []tunnel.NodeName{"edge-1", "edge-7"} {
		if err := first(t, i, node, secret); !errors.Is(err, ErrNoUse) || !strings.Contains(err.Error(), "joined already") {
			t.Errorf("%s has joined already: %v", node, err)
		}
	}
	i.gate.cfg.Known = nil
	if err := first(t, i, "edge-3", secret); !errors.Is(err, ErrNoUse) || !strings.Contains(err.Error(), "set inventory") {
		t.Errorf("a cloud that forgets nodes: %v", err)
	}
	i = issuerOf(t, file, i.signer)
	if err := first(t, i, "edge-3", secret); err != nil {
		t.Fatal(err)
	}
	if err := first(t, i, "edge-4", secret); !errors.Is(err, ErrNoUse) || !strings.Contains(err.Error(), "used up") {
		t.Errorf("the fourth node: %v", err)
	}
	if grant, err := i.gate.Authenticate(t.Context(), Credential{Node: "edge-5", Token: secret}); err == nil {
		t.Errorf("the token has opened a session: %+v", grant)
	}
	content, err := os.ReadFile(file + usesSuffix)
	if err != nil || strings.Contains(string(content), secret.Reveal()) {
		t.Errorf("the file of uses shows the token, or %v", err)
	}
	lines, err := List(string(must(os.ReadFile(file))))
	if err != nil {
		t.Fatal(err)
	}
	used, err := ReadUses(file)
	last := lines[len(lines)-1]
	if err != nil || used[last.ID].Count != 3 || time.Since(used[last.ID].Last) > time.Minute || last.Uses != 3 ||
		last.Nodes != "edge-*" {
		t.Errorf("%+v, %+v, %v", used, last, err)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// However many nodes join at the same moment, by two processes of the cloud, no use is counted twice or not at all.
func TestUsesAtOnce(t *testing.T) {
	a, secret, file := sharedIssuer(t, 5, "")
	b := issuerOf(t, file, a.signer)
	errs := make([]error, 20)
	var joining sync.WaitGroup
	for n := range errs {
		i := a
		if n%2 == 0 {
			i = b
		}
		joining.Go(func() { errs[n] = first(t, i, tunnel.NodeName(fmt.Sprintf("edge-%d", n)), secret) })
	}
	joining.Wait()
	joined := 0
	for n, err := range errs {
		switch {
		case err == nil:
			joined++
		case !errors.Is(err, ErrNoUse):
			t.Errorf("edge-%d: %v", n, err)
		}
	}
	if joined != 5 {
		t.Errorf("%d nodes have joined by 5 uses", joined)
	}
}

// A node that gets no certificate has not used the token. If the use cannot be counted, there is no certificate.
func TestUseGivenBack(t *testing.T) {
	i, secret, file := sharedIssuer(t, 1, "")
	good := i.signer
	i.signer = signerFunc(func(tunnel.NodeName, []byte) ([]byte, error) { return nil, errors.New("no signer") })
	if err := first(t, i, "edge-1", secret); err == nil || errors.Is(err, ErrNoUse) {
		t.Fatalf("without a signer: %v", err)
	}
	if content := must(os.ReadFile(file + usesSuffix)); len(content) > 0 {
		t.Errorf("a use that was given back is still in the file: %q", content)
	}
	// Another node joins before the use is given back: its line stays.
	other := useLine(sum{1}, "edge-5", "")
	i.signer = signerFunc(func(tunnel.NodeName, []byte) ([]byte, error) {
		content := must(os.ReadFile(file + usesSuffix))
		return nil, os.WriteFile(file+usesSuffix, append(content, other...), 0o600)
	})
	if err := first(t, i, "edge-1", secret); err == nil {
		t.Fatal("a certificate without content")
	}
	if u := parseUses(must(os.ReadFile(file + usesSuffix))); !u.nodes["edge-5"] || u.nodes["edge-1"] || len(u.nodes) != 1 {
		t.Errorf("after a use between: %v", u.nodes)
	}
	i.signer = good
	if _, _, err := i.First(t.Context(), Credential{Node: "edge-2", Token: secret}, []byte("no request")); err == nil {
		t.Fatal("a request that is none was signed")
	}
	if err := first(t, i, "edge-2", secret); err != nil {
		t.Errorf("after uses that were given back: %v", err)
	}
	if err := os.Truncate(file+usesSuffix, MaxTokenFile+1); err != nil {
		t.Fatal(err)
	}
	if err := first(t, i, "edge-3", secret); err == nil || !strings.Contains(err.Error(), "remove the file") {
		t.Errorf("a file that is too long: %v", err)
	}
	if err := os.Remove(file + usesSuffix); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(file+usesSuffix, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := first(t, i, "edge-3", secret); err == nil || errors.Is(err, ErrNoUse) {
		t.Errorf("a use that cannot be counted: %v", err)
	}
}

// The end of a line that a crash has cut off counts nothing, and does not spoil the next line.
func TestUsesAfterACrash(t *testing.T) {
	i, secret, file := sharedIssuer(t, 2, "")
	if err := first(t, i, "edge-1", secret); err != nil {
		t.Fatal(err)
	}
	content := must(os.ReadFile(file + usesSuffix))
	if err := os.WriteFile(file+usesSuffix, append(content, content[:len(content)-5]...), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := first(t, i, "edge-2", secret); err != nil {
		t.Fatal(err)
	}
	if err := first(t, i, "edge-3", secret); !errors.Is(err, ErrNoUse) {
		t.Errorf("the third of two uses: %v", err)
	}
}

// A line for several nodes without a limit, or with a token that anybody may read, makes the file bad.
func TestBadPatternLines(t *testing.T) {
	sum := NewToken().Hashed()
	const end = " expires=2030-01-02T03:04:05Z"
	for name, line := range map[string]string{
		"no end":       "edge-*:" + sum + " join uses=1",
		"no uses":      "edge-*:" + sum + " join" + end,
		"uses twice":   "edge-*:" + sum + " join uses=1 uses=1" + end,
		"no uses left": "edge-*:" + sum + " join uses=0" + end,
		"no number":    "edge-*:" + sum + " join uses=many" + end,
		"not to join":  "edge-*:" + sum + " uses=1" + end,
		"plain":        "edge-*:plain-text-of-some-length join uses=1" + end,
		"revoked":      "edge-*:revoked",
		"two stars":    "*-*:" + sum + " join uses=1" + end,
		"one node":     "edge1:" + sum + " join uses=1" + end,
	} {
		if _, err := parseTokens("tokens", line, false, true); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := parseTokens("tokens", "edge-*:"+sum+" join uses=1"+end, false, false); err != nil {
		t.Error(err)
	}
	edited, n, err := RemovePattern("# c\nedge-*:"+sum+" join uses=1"+end+"\nedge1:"+sum+"\n", "edge-*")
	if err != nil || n != 1 || edited != "# c\nedge1:"+sum+"\n" {
		t.Errorf("removed %d: %q, %v", n, edited, err)
	}
}

func FuzzParseUses(f *testing.F) {
	f.Add([]byte(strings.Repeat("ab", 32) + " edge-1 2026-01-02T03:04:05Z\n" + strings.Repeat("ab", 32) +
		" edge-1 2026-01-02T03:04:05Z returned\n"))
	f.Add([]byte("x y z\n\n"))
	f.Fuzz(func(t *testing.T, content []byte) {
		for s, used := range parseUses(content).byToken {
			if used.Count < 0 {
				t.Fatalf("token %x was used %d times", s, used.Count)
			}
		}
	})
}

func FuzzParseNodePattern(f *testing.F) {
	f.Add("edge-*", "edge-1")
	f.Fuzz(func(t *testing.T, text, name string) {
		p, err := ParseNodePattern(text)
		node, bad := tunnel.ParseNodeName(name)
		if err == nil && bad == nil && p.Match(node) && node.MayJoin() != nil {
			t.Fatalf("%s matches the reserved name %s", p, node)
		}
	})
}
