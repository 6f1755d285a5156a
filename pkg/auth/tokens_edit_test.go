package auth

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"tunnel.example/tunnel/pkg/tunnel"
)

func editTime(t testing.TB) time.Time {
	t.Helper()
	now, err := time.Parse(time.RFC3339Nano, "2026-11-21T09:30:00.25Z")
	if err != nil {
		t.Fatal(err)
	}
	return now
}

func TestAddToken(t *testing.T) {
	now := editTime(t)
	sum := Secret("s").Hashed()
	for _, tc := range []struct {
		name, file string
		line       TokenLine
		want       string
	}{
		{"empty", "", TokenLine{Node: "edge1", Secret: "s"}, "edge1:" + sum + "\n"},
		{"the end has no newline", "# c", TokenLine{Node: "edge1", Secret: "s"}, "# c\nedge1:" + sum + "\n"},
		{
			"join", "", TokenLine{Node: "edge1", Secret: "s", Join: true, Expires: now.Add(time.Hour)},
			"edge1:" + sum + " join expires=2026-11-21T10:30:00Z\n",
		},
		{
			"another zone", "", TokenLine{Node: "edge1", Secret: "s", Expires: now.In(time.FixedZone("", 7200))},
			"edge1:" + sum + " expires=2026-11-21T09:30:00Z\n",
		},
		{
			"behind its node's", "edge1:a\n# about edge2\nedge2:b\n", TokenLine{Node: "edge1", Secret: "s"},
			"edge1:a\nedge1:" + sum + "\n# about edge2\nedge2:b\n",
		},
		{"line ends", "edge2:b\r\n", TokenLine{Node: "edge1", Secret: "s"}, "edge2:b\r\nedge1:" + sum + "\r\n"},
		{
			"revoked", "a:x\nedge1:revoked\nb:y\n", TokenLine{Node: "edge1", Secret: "s", Join: true},
			"a:x\nedge1:revoked before=2026-11-21T09:30:01Z\nedge1:" + sum + " join\nb:y\n",
		},
		{
			"revoked, and a token is left", "edge1:old join\nedge1:revoked\nedge2:y\n", TokenLine{Node: "edge1", Secret: "s"},
			"edge1:revoked before=2026-11-21T09:30:01Z\nedge1:" + sum + "\nedge2:y\n",
		},
		{
			"revoked before", "edge1:revoked before=2020-01-01T00:00:00Z\n", TokenLine{Node: "edge1", Secret: "s"},
			"edge1:revoked before=2020-01-01T00:00:00Z\nedge1:" + sum + "\n",
		},
		{"default stays", "default:x\n", TokenLine{Node: "edge1", Secret: "s"}, "default:x\nedge1:" + sum + "\n"},
	} {
		got, err := AddToken(tc.file, tc.line, now)
		if err != nil || got != tc.want {
			t.Errorf("%s: %v\n%q, want\n%q", tc.name, err, got, tc.want)
		}
	}
	for name, line := range map[string]TokenLine{
		"no node": {Secret: "s"}, "default": {Node: "Default", Secret: "s"}, "no token": {Node: "edge1"},
		"a line more": {Node: "edge1", Secret: "s\nx:y"},
	} {
		if got, err := AddToken("", line, now); err == nil {
			t.Errorf("%s: %q", name, got)
		}
	}
	_, err := AddToken("edge1:x\nc4n4ry\n", TokenLine{Node: "edge1", Secret: "s"}, now)
	if err == nil || !strings.Contains(err.Error(), "line 2") || strings.Contains(err.Error(), "c4n4ry") {
		t.Errorf("a malformed file: %v", err)
	}
}

func TestRevokeNode(t *testing.T) {
	for _, tc := range []struct{ name, file, want string }{
		{"unknown", "a:x\n", "a:x\nedge1:revoked\n"},
		{"all its lines", "# c\nedge1:a\nb:y\n\nedge1:b join\n", "# c\nedge1:revoked\nb:y\n\n"},
		{"again", "edge1:revoked\n", "edge1:revoked\n"},
		{"revoked before", "a:x\r\nedge1:revoked before=2020-01-01T00:00:00Z\r\n", "a:x\r\nedge1:revoked\r\n"},
		{"default stays", "default:x", "default:x\nedge1:revoked\n"},
	} {
		got, err := RevokeNode(tc.file, "edge1")
		if err != nil || got != tc.want {
			t.Errorf("%s: %v\n%q, want\n%q", tc.name, err, got, tc.want)
		}
	}
	if _, err := RevokeNode("", "Edge 1"); err == nil {
		t.Error("no node name")
	}
	if _, err := RevokeNode("x", "edge1"); err == nil {
		t.Error("a malformed file")
	}
}

func TestList(t *testing.T) {
	lines, err := List("# c\nedge1:" + Secret("s").Hashed() + " join expires=2026-11-21T10:30:00Z\n\n" +
		"edge2:c4n4ry\ndefault:x\nedge3:revoked\nedge3:revoked before=2026-11-21T10:30:00Z")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, l := range lines {
		got = append(got, fmt.Sprintf("%d %s %s %s %v %v %v",
			l.Number, l.Node, l.Kind, l.ID, l.Hashed, !l.Expires.IsZero(), !l.Before.IsZero()))
	}
	id := func(s Secret) string { return strings.TrimPrefix(s.Hashed(), hashPrefix)[:8] }
	want := []string{
		"2 edge1 join token " + id("s") + " true true false",
		"4 edge2 token " + id("c4n4ry") + " false false false",
		"5  shared " + id("x") + " false false false",
		"6 edge3 revoked  false false false",
		"7 edge3 revoked before  false false true",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if _, err := List("edge1"); err == nil {
		t.Error("a malformed file")
	}
}

// The result of each edit parses, means what the edit says, and keeps all other lines.
func TestEditsProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pick := rapid.SampledFrom([]string{
			"# a comment", "", "a:x", "b:y expires=2999-01-01T00:00:00Z", "a:revoked",
			"b:revoked before=2020-01-01T00:00:00Z", " c : z ", "default:d", "b:" + Secret("q").Hashed() + " join",
		})
		end := rapid.SampledFrom([]string{"\n", "\r\n"}).Draw(t, "end")
		content := strings.Join(rapid.SliceOfN(pick, 0, 12).Draw(t, "lines"), end)
		others := func(content string, node tunnel.NodeName) []string {
			var kept []string
			for l := range strings.Lines(content) {
				if name, _, _ := strings.Cut(l, ":"); strings.TrimSpace(name) != string(node) {
					kept = append(kept, strings.TrimRight(l, "\r\n"))
				}
			}
			return kept
		}
		now := time.Now()
		for range rapid.IntRange(1, 5).Draw(t, "edits") {
			node := rapid.SampledFrom([]tunnel.NodeName{"a", "b", "c", "d"}).Draw(t, "node")
			var edited string
			var err error
			add := rapid.Bool().Draw(t, "add")
			secret := NewToken()
			if add {
				line := TokenLine{
					Node: node, Secret: secret, Join: rapid.Bool().Draw(t, "join"), Expires: now.Add(time.Hour),
				}
				edited, err = AddToken(content, line, now)
			} else {
				edited, err = RevokeNode(content, node)
			}
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(others(content, node), others(edited, node)) {
				t.Fatalf("%q became %q", content, edited)
			}
			tb, err := parseTokens("tokens", edited, true, true)
			if err != nil {
				t.Fatal(err)
			}
			if all, _ := tb.revoked(node); all == add {
				t.Fatalf("revoked: %v in %q", all, edited)
			}
			i := slices.IndexFunc(tb.byNode[node].tokens, func(k token) bool {
				return hashPrefix+fmt.Sprintf("%x", k.sum) == secret.Hashed()
			})
			if (i >= 0) != add {
				t.Fatalf("the token is at %d in %q", i, edited)
			}
			if !add && len(tb.byNode[node].tokens) != 0 {
				t.Fatalf("tokens are left in %q", edited)
			}
			content = edited
		}
	})
}

func FuzzTokenEdits(f *testing.F) {
	f.Add("edge1:token join\n# c\n\nedge2:revoked before=2020-01-01T00:00:00Z\r\n" +
		"default:x expires=2020-01-01T00:00:00Z")
	f.Add("edge1:revoked\nedge1:x")
	f.Fuzz(func(t *testing.T, content string) {
		lines, err := List(content)
		if err != nil {
			return
		}
		added, err := AddToken(content, TokenLine{Node: "edge1", Secret: "s"}, time.Now())
		if err != nil {
			t.Fatalf("%q is listed and cannot be added to: %v", content, err)
		}
		ours := func(kinds ...Kind) (n int) {
			for _, l := range lines {
				if l.Node == "edge1" && slices.Contains(kinds, l.Kind) {
					n++
				}
			}
			return n
		}
		want := len(lines) + 1
		if ours(KindRevoked) > 0 {
			want -= ours(KindToken, KindJoin) // old tokens of a revoked node
		}
		if more, err := List(added); err != nil || len(more) != want {
			t.Fatalf("%q became %q: %v", content, added, err)
		}
		revoked, err := RevokeNode(added, "edge1")
		if err != nil {
			t.Fatal(err)
		}
		tb, err := parseTokens("tokens", revoked, true, true)
		if err != nil || !tb.byNode["edge1"].revoked || len(tb.byNode["edge1"].tokens) != 0 {
			t.Fatalf("%q became %q: %v", added, revoked, err)
		}
	})
}
