package auth

import (
	"context"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/reload"
	"tunnel.example/tunnel/pkg/tunnel"
)

func writeFile(t testing.TB, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func tokenFile(t testing.TB, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tokens")
	writeFile(t, path, content)
	return path
}

// newGate returns a Gate with a token file and no other proof.
func newGate(t *testing.T, content string, shared bool) (*Gate, *testkit.Log) {
	t.Helper()
	log, j := testkit.NewLog()
	tokens, err := NewTokens(TokensConfig{Path: tokenFile(t, content), AllowShared: shared, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	return NewGate(GateConfig{Tokens: tokens, Log: log}), j
}

// grantCount returns how many grants the Gate remembers.
func grantCount(g *Gate) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.grants)
}

func TestAuthenticate(t *testing.T) {
	hashed := Secret("second").Hashed()
	file := "# a comment\n\nedge1:first\nedge2:" + hashed + "\r\nedge3:old\n edge3 : new \nwith.colon:a:b\n"
	for _, tc := range []struct {
		name   string
		shared bool
		node   string
		token  Secret
		ok     bool
	}{
		{"plain", false, "edge1", "first", true},
		{"hashed", false, "edge2", "second", true},
		{"rotation, old", false, "edge3", "old", true},
		{"rotation, new", false, "edge3", "new", true},
		{"a token may have colons", false, "with.colon", "a:b", true},
		{"wrong", false, "edge1", "firs", false},
		{"another node's", false, "edge1", "second", false},
		{"the hash is not the token", false, "edge2", Secret(hashed), false},
		{"empty for a known node", false, "edge1", "", false},
		{"empty for an unknown node", false, "edge9", "", false},
		{"unknown node", false, "edge9", "first", false},
		{"empty node", false, "", "first", false},
		{"node is not RFC 1123", false, "edge1\nedge2", "first", false},
		{"upper case is another name", false, "EDGE1", "first", false},
		{"shared: any node", true, "edge9", "everyone", true},
		{"shared: own line still good", true, "edge1", "first", true},
		{"shared: not for a node with a line", true, "edge1", "everyone", false},
		{"shared: wrong", true, "edge9", "first", false},
		{"shared: empty", true, "edge9", "", false},
		{"shared: a node named default has no line", true, "default", "everyone", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			content := file
			if tc.shared {
				content += "default:everyone\n"
			}
			gate, j := newGate(t, content, tc.shared)
			before := j.String() // the warnings about the file
			ctx, cancel := context.WithCancel(t.Context())
			g, err := gate.Authenticate(ctx, Credential{Node: tc.node, Token: tc.token})
			if tc.ok && (err != nil || string(g.Node) != tc.node || g.Revoked == nil) {
				t.Fatalf("refused: %+v, %v; log: %s", g, err, j)
			}
			if !tc.ok {
				if !errors.Is(err, ErrUnauthenticated) || err.Error() == ErrUnauthenticated.Error() {
					t.Fatalf("want a refusal with its reason, got %v", err)
				}
				if tc.token != "" && strings.Contains(err.Error(), tc.token.Reveal()) {
					t.Errorf("the reason shows the token: %v", err)
				}
				if j.String() != before {
					t.Errorf("it is logged here, and by the caller again: %s", j)
				}
			}
			cancel()
			testkit.Eventually(t, "the grant is forgotten when its context is done", func() bool {
				return grantCount(gate) == 0
			})
		})
	}
}

func TestBadTokenFiles(t *testing.T) {
	const canary = "c4n4ry"
	for _, tc := range []struct{ name, content, want string }{
		{"empty", "", "it holds no token"},
		{"comments alone", "# edge1:c4n4ry\n", "it holds no token"},
		{"no colon", "edge1:x\nc4n4ry\n", "tokens:2: no colon"},
		{"empty token", "edge1:\n", "tokens:1: the token is empty"},
		{"node and token mixed up", "C4n4ry c4n4ry:edge1\n", "tokens:1: the text before the colon"},
		{"default not allowed", "edge1:x\n\ndefault:c4n4ry\n", "tokens:3: a default: line"},
		{"default says what to set", "default:c4n4ry\n", "allowshared = true"},
		{"short hash", "edge1:sha256:abc\n", "64 hexadecimal digits"},
		{"long hash", "edge1:sha256:" + strings.Repeat("a", 66) + "\n", "64 hexadecimal digits"},
		{"no hash", "edge1:sha256:\n", "64 hexadecimal digits"},
		{"comment behind a token", "edge1:c4n4ry # mine\n", "comment needs a line of its own"},
		{"too long", "edge1:" + strings.Repeat("c4n4ry", 1000) + "\n", "3584 are allowed"},
		{"not UTF-8", "edge1:c4n4ry\xff\n", "not UTF-8"},
		{"two faults", "a\nedge1:x\nb\n", "tokens:3: no colon"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			log, j := testkit.NewLog()
			_, err := NewTokens(TokensConfig{Path: tokenFile(t, tc.content), Log: log})
			if err == nil {
				t.Fatal("accepted")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %q does not say %q", err, tc.want)
			}
			if all := strings.ToLower(err.Error() + j.String()); strings.Contains(all, canary) {
				t.Errorf("a token is shown: %s", all)
			}
		})
	}
	log, _ := testkit.NewLog()
	for name, path := range map[string]string{
		"missing": filepath.Join(t.TempDir(), "none"), "a directory": t.TempDir(),
	} {
		if _, err := NewTokens(TokensConfig{Path: path, Log: log}); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error %v does not name the file", name, err)
		}
	}
}

func TestTokenFileThatOthersCanReadIsAWarning(t *testing.T) {
	path := tokenFile(t, "edge1:x\n")
	for mode, warn := range map[os.FileMode]bool{0o600: false, 0o400: false, 0o640: true, 0o604: true} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		log, j := testkit.NewLog()
		if _, err := NewTokens(TokensConfig{Path: path, Log: log}); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(j.String(), "chmod 600"); got != warn {
			t.Errorf("mode %o: warned %v, want %v", mode, got, warn)
		}
	}
}

// The log names the lines of tokens that may be guessed, at the start and after a change. It never
// shows a token.
func TestShortTokensAreAWarning(t *testing.T) {
	const short, long = "correct-horse", "MzQ1Njc4OTAxMjM0NTY3OD"
	log, j := testkit.NewLog()
	path := tokenFile(t, "# a comment\nedge1:"+short+"\nedge2:"+long+"\nedge3:"+Secret(short).Hashed()+"\n"+
		"edge4:"+short+"4 join\nedge5:revoked\n")
	tokens, err := NewTokens(TokensConfig{Path: path, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	if s := j.String(); strings.Count(s, "may be guessed") != 1 || !strings.Contains(s, `lines="[2 5]"`) ||
		!strings.Contains(s, "count=2") || strings.Contains(s, short) {
		t.Errorf("the log is:\n%s", s)
	}
	if err := os.WriteFile(path, []byte("edge1:"+long+"\n\nedge2:"+short+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tokens.onChange = func() int { return 0 }
	tokens.reload()
	if s := j.String(); strings.Count(s, "may be guessed") != 2 || !strings.Contains(s, "lines=[3]") {
		t.Errorf("the log is:\n%s", s)
	}
	many, j := testkit.NewLog()
	_, err = NewTokens(TokensConfig{Path: tokenFile(t, strings.Repeat("edge1:x\n", 1000)), Log: many})
	if err != nil || len(j.String()) > 1000 || !strings.Contains(j.String(), "count=1000") {
		t.Errorf("%v; the log is:\n%s", err, j.String())
	}
}

func TestSameTokenForTwoNodesIsAWarning(t *testing.T) {
	_, j := newGate(t, "edge1:x\nedge2:"+Secret("x").Hashed()+"\n", false)
	if !strings.Contains(j.String(), "same token") {
		t.Errorf("no warning: %s", j)
	}
}

func TestReadTokenFile(t *testing.T) {
	log, _ := testkit.NewLog()
	for content, want := range map[string]string{"abc": "abc", "abc\n": "abc", "abc\r\n": "abc"} {
		if got, err := ReadTokenFile(tokenFile(t, content), log); err != nil || got.Reveal() != want {
			t.Errorf("%q: %q, %v", content, got.Reveal(), err)
		}
	}
	for _, content := range []string{"", "\n", "c4n4ry\n\n", "c4n4ry c4n4ry", strings.Repeat("c4n4ry", 1000)} {
		_, err := ReadTokenFile(tokenFile(t, content), log)
		if err == nil || strings.Contains(err.Error(), "c4n4ry") {
			t.Errorf("%q: error %v", content, err)
		}
	}
	if _, err := ReadTokenFile(filepath.Join(t.TempDir(), "none"), log); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}

// The file is read for each token, and errors are those of ReadTokenFile.
func TestTokenFile(t *testing.T) {
	path := tokenFile(t, "first\n")
	source := TokenFile(path)
	for _, want := range []string{"first", "second"} {
		if err := os.WriteFile(path, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := TokenOf(source); err != nil || got.Reveal() != want {
			t.Errorf("%q, %v; want %q", got.Reveal(), err, want)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	log, _ := testkit.NewLog()
	_, want := ReadTokenFile(path, log)
	if got, err := TokenOf(source); got != "" || !errors.Is(err, os.ErrNotExist) || err.Error() != want.Error() {
		t.Errorf("without the file: %q, %v; want %v", got.Reveal(), err, want)
	}
}

func grantFor(t *testing.T, gate *Gate, node string, token Secret) Grant {
	t.Helper()
	g, err := gate.Authenticate(t.Context(), Credential{Node: node, Token: token})
	if err != nil {
		t.Fatalf("%s: %v", node, err)
	}
	return g
}

// wantRevoked waits for a revocation. That it takes one second at most is shown by pkg/reload, on a fake clock.
func wantRevoked(t *testing.T, g Grant) {
	t.Helper()
	testkit.Eventually(t, string(g.Node)+" is revoked", func() bool { return tunnel.IsClosed(g.Revoked) })
}

func wantLive(t *testing.T, g Grant) {
	t.Helper()
	select {
	case <-g.Revoked:
		t.Errorf("%s is revoked", g.Node)
	default:
	}
}

func TestRevocation(t *testing.T) {
	// Each way replaces the content of the file as an administrator or a kubelet does.
	ways := map[string]func(t testing.TB, path, content string){
		"written in place": writeFile,
		"renamed over": func(t testing.TB, path, content string) {
			writeFile(t, path+".new", content)
			if err := os.Rename(path+".new", path); err != nil {
				t.Fatal(err)
			}
		},
		"removed and written": func(t testing.TB, path, content string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			writeFile(t, path, content)
		},
	}
	for name, change := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			gate, _ := newGate(t, "edge1:one\nedge2:two\n", false)
			gone, stays := grantFor(t, gate, "edge1", "one"), grantFor(t, gate, "edge2", "two")
			testkit.Run(t, gate.Run)
			change(t, gate.cfg.Tokens.path, "edge2:two\nedge3:three\n")
			wantRevoked(t, gone)
			wantLive(t, stays)
			if _, err := gate.Authenticate(t.Context(), Credential{Node: "edge1", Token: "one"}); err == nil {
				t.Error("a revoked token can come back")
			}
			grantFor(t, gate, "edge3", "three")
		})
	}
}

func TestRevocationBySecretSwap(t *testing.T) {
	// The layout of a kubelet's volume: tokens -> ..data/tokens, ..data -> ..1. An update renames a new
	// link over ..data.
	dir := t.TempDir()
	version := func(name, content string) {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		writeFile(t, filepath.Join(dir, name, "tokens"), content)
		if err := os.Symlink(name, filepath.Join(dir, "..tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	version("..1", "edge1:one\nedge2:two\n")
	path := filepath.Join(dir, "tokens")
	if err := os.Symlink(filepath.Join("..data", "tokens"), path); err != nil {
		t.Fatal(err)
	}
	log, _ := testkit.NewLog()
	tokens, err := NewTokens(TokensConfig{Path: path, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	gate := NewGate(GateConfig{Tokens: tokens, Log: log})
	gone, stays := grantFor(t, gate, "edge1", "one"), grantFor(t, gate, "edge2", "two")
	testkit.Run(t, gate.Run)
	version("..2", "edge2:two\n")
	wantRevoked(t, gone)
	wantLive(t, stays)
}

func TestBadReloadKeepsTheLastGoodStateAndTriesAgain(t *testing.T) {
	gate, j := newGate(t, "edge1:one\nedge2:two\n", false)
	g := grantFor(t, gate, "edge1", "one")
	testkit.Run(t, gate.Run)
	bad := func(n int) func() bool {
		return func() bool { return strings.Count(j.String(), "token file is bad") == n }
	}
	writeFile(t, gate.cfg.Tokens.path, "edge1\n")
	testkit.Eventually(t, "the bad file is logged", bad(1))
	wantLive(t, g)
	grantFor(t, gate, "edge2", "two")

	writeFile(t, gate.cfg.Tokens.path, "edge1\n") // written again with the same fault: not logged again
	testkit.Eventually(t, "the file is read again", func() bool {
		return gate.cfg.Tokens.seen.Load().Equal(reload.Identify(gate.cfg.Tokens.path))
	})
	if err := os.Remove(gate.cfg.Tokens.path); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the missing file is logged", bad(2))
	wantLive(t, g)

	writeFile(t, gate.cfg.Tokens.path, "edge2:two\n")
	wantRevoked(t, g)
}

// A join token is good as soon as the file holds it, even before Run has read the file.
func TestTokenIsGoodAtOnce(t *testing.T) {
	gate, _ := newGate(t, "edge1:one\n", false)
	testkit.Run(t, gate.Run)
	for _, node := range []string{"edge2", "edge3"} {
		writeFile(t, gate.cfg.Tokens.path, "edge1:one\n"+node+":new join\n")
		if _, err := gate.Enroll(t.Context(), Credential{Node: node, Token: "new"}); err != nil {
			t.Errorf("%s: %v", node, err)
		}
	}
	// A token that is no longer in the file is not good any more.
	if _, err := gate.Enroll(t.Context(), Credential{Node: "edge2", Token: "new"}); !errors.Is(err, ErrUnauthenticated) {
		t.Errorf("a token that was removed: %v", err)
	}
}

// Nobody waits for a file that Run does not read, or longer than the caller does.
func TestCatchUpEnds(t *testing.T) {
	gate, _ := newGate(t, "edge1:one\n", false)
	tokens := gate.cfg.Tokens
	before := tokens.table.Load()
	writeFile(t, tokens.path, "edge1:one\nedge2:new join\n")
	if tokens.latest(t.Context()) != before {
		t.Error("the file was read by somebody else than Run")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if tokens.latest(ctx) != before {
		t.Error("the file was read although the caller has gone")
	}
	if err := os.Remove(tokens.path); err != nil {
		t.Fatal(err)
	}
	tokens.reload()
	if tokens.latest(t.Context()) != before {
		t.Error("a missing file has replaced the table")
	}
}

func TestUnreadableFileIsTriedAgain(t *testing.T) {
	gate, j := newGate(t, "edge1:one\n", false)
	g := grantFor(t, gate, "edge1", "one")
	good := gate.cfg.Tokens.path + ".good"
	writeFile(t, good, "edge2:two\n")
	// For a while the path is a directory. It exists but cannot be read, as a file when no descriptor
	// is left.
	if err := os.Remove(gate.cfg.Tokens.path); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(gate.cfg.Tokens.path, 0o700); err != nil {
		t.Fatal(err)
	}
	testkit.Run(t, gate.Run)
	testkit.Eventually(t, "the fault is logged", func() bool { return strings.Contains(j.String(), "token file is bad") })
	if err := os.Remove(gate.cfg.Tokens.path); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(good, gate.cfg.Tokens.path); err != nil {
		t.Fatal(err)
	}
	wantRevoked(t, g)
}

func TestGrantsAreForgotten(t *testing.T) {
	gate, _ := newGate(t, "edge1:one\n", false)
	for range 100 {
		ctx, cancel := context.WithCancel(t.Context())
		if _, err := gate.Authenticate(ctx, Credential{Node: "edge1", Token: "one"}); err != nil {
			t.Fatal(err)
		}
		cancel()
	}
	testkit.Eventually(t, "no grant is left", func() bool { return grantCount(gate) == 0 })
}

func TestUnknownNodeCostsAsMuchAsAKnownOne(t *testing.T) {
	// The test asserts the number of comparisons: times on a busy machine would vary.
	tb, err := parseTokens("tokens", "edge1:a\nedge1:b\nedge1:c\nedge2:d\ndefault:e\n", true, false)
	if err != nil {
		t.Fatal(err)
	}
	if tb.maxTokens != 3 {
		t.Errorf("compares %d sums for every node, want 3", tb.maxTokens)
	}
	// A node without a token must not be accepted with the zero sum, which fills missing comparisons.
	if _, err := (&table{maxTokens: 3}).token("edge9", sum{}, false, time.Now()); err == nil {
		t.Error("an unknown node is accepted with the zero sum")
	}
}

func FuzzTokenFile(f *testing.F) {
	f.Add("edge1:token\n# c\n\nedge2:sha256:"+strings.Repeat("0a", 32)+"\r\ndefault:x", true)
	f.Add("edge1:sha256:zz\n:\n", false)
	f.Fuzz(func(t *testing.T, content string, shared bool) {
		tb, err := parseTokens("tokens", content, shared, true)
		if err != nil {
			return
		}
		if !shared && len(tb.shared) > 0 {
			t.Fatal("a shared token without allowshared")
		}
		for node := range tb.byNode {
			if _, err := tb.token(node, sha256.Sum256(nil), false, time.Now()); err == nil {
				t.Fatalf("%q: an empty token is accepted", content)
			}
		}
	})
}
