package auth

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// nodes is a Nodes with names that a test sets.
type nodes struct {
	mu      sync.Mutex // guards the following
	names   map[tunnel.NodeName]bool
	known   bool
	changed chan struct{}
}

func newNodes(names ...tunnel.NodeName) *nodes {
	n := &nodes{changed: make(chan struct{})}
	n.set(names...)
	return n
}

func (n *nodes) set(names ...tunnel.NodeName) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.names, n.known = make(map[tunnel.NodeName]bool), true
	for _, name := range names {
		n.names[name] = true
	}
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *nodes) May(node tunnel.NodeName) (may, known bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.names[node], n.known
}

func (n *nodes) Changed() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.changed
}

func TestLinesWithAttributes(t *testing.T) {
	const past, future = "2020-01-02T03:04:05Z", "2999-01-02T03:04:05+01:00"
	for _, tc := range []struct {
		name, file     string
		opens, enrolls bool
		hasExpiry      bool
	}{
		{"plain", "edge1:t", true, false, false},
		{"join", "edge1:t join", false, true, false},
		{"expires later", "edge1:t expires=" + future, true, false, true},
		{"join, expires later", "edge1:t\texpires=" + future + "  join", false, true, false},
		{"expired", "edge1:t expires=" + past, false, false, false},
		{"join, expired", "edge1:t join expires=" + past, false, false, false},
		{"a plain token and a join token", "edge1:t\nedge1:t join", true, true, false},
		{"one expired, one later", "edge1:t expires=" + past + "\nedge1:t expires=" + future, true, false, true},
		{"one expires later, one never", "edge1:t expires=" + future + "\nedge1:t", true, false, false},
		{"revoked", "edge1:t\nedge1:revoked", false, false, false},
		{"join, revoked", "edge1:revoked\nedge1:t join", false, false, false},
		{"certificates revoked", "edge1:revoked before=" + future + "\nedge1:t\n", true, false, false},
		{"certificates revoked, join", "edge1:revoked before=" + future + "\nedge1:t join\n", false, true, false},
		{"shared", "default:t", true, false, false},
		{"shared join", "default:t join", false, true, false},
		{"shared, revoked", "default:t\nedge1:revoked", false, false, false},
		{"shared, certificates revoked", "default:t\nedge1:revoked before=" + future, true, false, false},
		{"shared, own line expired", "default:t\nedge1:x expires=" + past, false, false, false},
		{"shared, own line for joining", "default:t\nedge1:x join", false, false, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			log, _ := testkit.NewLog()
			tokens, err := NewTokens(TokensConfig{Path: tokenFile(t, tc.file), AllowShared: true, Log: log})
			if err != nil {
				t.Fatal(err)
			}
			gate := NewGate(GateConfig{Tokens: tokens, Hosts: []string{"api.example.com"}, Log: log})
			c := Credential{Node: "edge1", Token: "t"}
			g, err := gate.Authenticate(t.Context(), c)
			if (err == nil) != tc.opens || err != nil && !errors.Is(err, ErrUnauthenticated) ||
				!g.Expires.IsZero() != tc.hasExpiry {
				t.Errorf("opens a session: %+v, %v", g, err)
			}
			node, err := gate.Enroll(t.Context(), c)
			if (err == nil) != tc.enrolls || err != nil && !errors.Is(err, ErrUnauthenticated) ||
				err == nil && node != "edge1" {
				t.Errorf("gets a certificate: %v", err)
			}
			for _, reserved := range []string{"10.0.0.1", "kubernetes", "kubernetes.default.svc", "api.example.com"} {
				bad := Credential{Node: reserved, Token: "t"}
				_, err := gate.Authenticate(t.Context(), bad)
				_, err2 := gate.Enroll(t.Context(), bad)
				if !errors.Is(err, ErrUnauthenticated) || !errors.Is(err2, ErrUnauthenticated) {
					t.Errorf("%s may join: %v, %v", reserved, err, err2)
				}
			}
			for _, bad := range []Credential{
				{}, {Node: "edge1"}, {Node: "edge1", Token: "T"}, {Node: "Edge1", Token: "t"},
			} {
				if _, err := gate.Enroll(t.Context(), bad); !errors.Is(err, ErrUnauthenticated) {
					t.Errorf("Enroll %v: %v", bad, err)
				}
			}
		})
	}
}

// A keyword in place of the token is refused. If it were a token, a misspelt revocation would open
// the node to everybody who guesses the word.
func TestMisplacedKeywords(t *testing.T) {
	for _, bad := range []string{
		"edge1:Revoked", "edge1:REVOKED before=2020-01-02T03:04:05Z", "edge1:revoke", "edge1:revoked,",
		"edge1:revoked: yes", "default:revoke",
		"edge1:join", "edge1: join expires=2020-01-02T03:04:05Z", "edge1:expires=2020-01-02T03:04:05Z join",
		"edge1:before=2020-01-02T03:04:05Z",
		"edge1:SHA256:" + strings.Repeat("ab", 32), "edge1:Join",
	} {
		_, err := parseTokens("tokens", "edge1:good\n"+bad, true, false)
		if err == nil || !strings.HasPrefix(err.Error(), "tokens:2: ") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestBadAttributes(t *testing.T) {
	const when = "2020-01-02T03:04:05Z"
	for _, bad := range []string{
		"edge1:c4n4ry joins", "edge1:c4n4ry join join", "edge1:c4n4ry expires=tomorrow", "edge1:c4n4ry expires=",
		"edge1:c4n4ry expires=2020-01-02T03:04:05", "edge1:c4n4ry expires=" + when + " expires=" + when,
		"edge1:c4n4ry expires=0001-01-01T00:00:00Z", "edge1:c4n4ry before=" + when, "edge1:c4n4ry revoked",
		"edge1:c4n4ry c4n4ry",
		"edge1:revoked c4n4ry", "edge1:revoked join", "edge1:revoked before=x", "edge1:revoked expires=" + when,
		"edge1:revoked before=" + when + " before=" + when, "default:revoked", "default:revoked before=" + when,
	} {
		_, err := parseTokens("tokens", "edge1:good\n"+bad, true, false)
		if err == nil || !strings.HasPrefix(err.Error(), "tokens:2: ") || strings.Contains(err.Error(), "c4n4ry") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestFileWithoutTokens(t *testing.T) {
	for _, content := range []string{"", "# nothing\n", "edge1:revoked\n"} {
		if _, err := parseTokens("tokens", content, false, false); err == nil {
			t.Errorf("%q: nobody can join, and that is accepted", content)
		}
		if _, err := parseTokens("tokens", content, false, true); err != nil {
			t.Errorf("%q: %v", content, err)
		}
	}
	log, _ := testkit.NewLog()
	if _, err := NewTokens(TokensConfig{Path: "/nonexistent/tokens", MayBeEmpty: true, Log: log}); err == nil {
		t.Error("a file that is not there is accepted")
	}
}

func TestExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		end := time.Now().Add(time.Hour).UTC()
		line := "edge1:t expires=" + end.Format(time.RFC3339)
		gate, _ := newCertificateGate(t, line, newNodeCA(t), nil)
		g := grantFor(t, gate, "edge1", "t")
		if !g.Expires.Equal(end) {
			t.Errorf("expires %v, want %v", g.Expires, end)
		}
		setTokens(t, gate, line+"\nedge2:x\n")
		wantLive(t, g)
		time.Sleep(time.Hour)
		_, err := gate.Authenticate(t.Context(), Credential{Node: "edge1", Token: "t"})
		if !errors.Is(err, ErrUnauthenticated) {
			t.Errorf("an expired token: %v", err)
		}
	})
}

func TestEarlierExpiryEndsAGrant(t *testing.T) {
	gate, _ := newCertificateGate(t, "edge1:t\nedge2:t expires=2999-01-02T03:04:05Z", newNodeCA(t), nil)
	one, two := grantFor(t, gate, "edge1", "t"), grantFor(t, gate, "edge2", "t")
	setTokens(t, gate, "edge1:t expires=2998-01-02T03:04:05Z\nedge2:t")
	wantRevoked(t, one) // its session knows no expiry
	wantLive(t, two)
}

func TestEveryProofIsRevoked(t *testing.T) {
	ca := newNodeCA(t)
	known := newNodes()
	var roots atomic.Pointer[x509.CertPool]
	token := Credential{Node: "edge1", Token: "t"}
	cert := certCredential("edge1", ca.sign(t, "edge1", nil))
	account := Credential{Node: "edge1", Token: jwt(time.Now().Add(time.Hour).Unix())}
	file := func(content string) func(*testing.T, *Gate) {
		return func(t *testing.T, g *Gate) { writeFile(t, g.cfg.Tokens.path, content) }
	}
	node := func(*testing.T, *Gate) { known.set("edge2") }
	for name, tc := range map[string]struct {
		credential Credential
		revoke     func(*testing.T, *Gate)
	}{
		"token":                                 {token, file("edge1:revoked\nedge1:t")},
		"token becomes a join token":            {token, file("edge1:t join")},
		"token, Node deleted":                   {token, node},
		"certificate":                           {cert, file("edge1:revoked")},
		"certificate older than the revocation": {cert, file("edge1:revoked before=" + timeAfter(time.Minute))},
		"certificate, Node deleted":             {cert, node},
		"certificate, CA replaced":              {cert, func(t *testing.T, _ *Gate) { roots.Store(newNodeCA(t).pool) }},
		"ServiceAccount":                        {account, file("edge1:revoked")},
		"ServiceAccount, Node deleted":          {account, node},
	} {
		t.Run(name, func(t *testing.T) {
			known.set("edge1", "edge2")
			roots.Store(ca.pool)
			gate, _ := newCertificateGate(t, "edge1:t\n", ca, func(c *GateConfig) {
				c.Nodes, c.NodeCA = known, roots.Load
				c.Reviewer, c.ServiceAccounts = &reviewer{node: "edge1"}, []string{"ns/edge"}
			})
			g, err := gate.Authenticate(t.Context(), tc.credential)
			if err != nil {
				t.Fatal(err)
			}
			testkit.Run(t, gate.Run)
			wantLive(t, g)
			tc.revoke(t, gate)
			wantRevoked(t, g)
			if _, err := gate.Authenticate(t.Context(), tc.credential); !errors.Is(err, ErrUnauthenticated) {
				t.Errorf("it can come back: %v", err)
			}
		})
	}
}

// While a process drains, its sessions go on, and can still be revoked. The Gate ends with the last of them.
func TestRevokedWhileDraining(t *testing.T) {
	gate, _ := newGate(t, "edge1:t\nedge2:t\n", false)
	session, end := context.WithCancel(t.Context())
	defer end()
	stays, err := gate.Authenticate(session, Credential{Node: "edge2", Token: "t"})
	if err != nil {
		t.Fatal(err)
	}
	revoked := grantFor(t, gate, "edge1", "t")
	ctx, stop := context.WithCancel(t.Context())
	stop()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		gate.Run(ctx)
	}()
	writeFile(t, gate.cfg.Tokens.path, "edge1:revoked\nedge2:t\n")
	wantRevoked(t, revoked)
	wantLive(t, stays)
	select {
	case <-ended:
		t.Error("the Gate ends while a session goes on")
	default:
	}
	end()
	<-ended
}

func TestAnotherCABesideTheOldOneKeepsTheGrant(t *testing.T) {
	ca := newNodeCA(t)
	gate, _ := newCertificateGate(t, "", ca, nil)
	g, err := gate.Authenticate(t.Context(), certCredential("edge1", ca.sign(t, "edge1", nil)))
	if err != nil {
		t.Fatal(err)
	}
	if n := gate.recheckCA(poolOf(ca.cert, newNodeCA(t).cert)); n != 0 {
		t.Errorf("%d grants ended", n)
	}
	wantLive(t, g)
}

func TestWhileNodesAreNotKnownEverybodyMayJoin(t *testing.T) {
	known := &nodes{changed: make(chan struct{})}
	gate, _ := newCertificateGate(t, "edge1:t\nedge2:t\n", newNodeCA(t), func(c *GateConfig) { c.Nodes = known })
	one, two := grantFor(t, gate, "edge1", "t"), grantFor(t, gate, "edge2", "t")
	testkit.Run(t, gate.Run)
	known.set("edge2")
	wantRevoked(t, one)
	wantLive(t, two)
}

func TestNoteSaysThatTheFileIsBad(t *testing.T) {
	gate, _ := newCertificateGate(t, "edge1:t\n", newNodeCA(t), nil)
	testkit.Run(t, gate.Run)
	if note := gate.Note(); note != "" {
		t.Errorf("note %q", note)
	}
	writeFile(t, gate.cfg.Tokens.path, "edge1\n")
	testkit.Eventually(t, "the note says so", func() bool { return strings.Contains(gate.Note(), ":1: no colon") })
	writeFile(t, gate.cfg.Tokens.path, "edge1:t\n")
	testkit.Eventually(t, "the note is gone", func() bool { return gate.Note() == "" })
}

func BenchmarkRecheck(b *testing.B) {
	const n = 10_000
	var file strings.Builder
	known := newNodes()
	for i := range n {
		fmt.Fprintf(&file, "edge%d:%s\n", i, Secret(fmt.Sprint(i)).Hashed())
		known.names[tunnel.NodeName(fmt.Sprintf("edge%d", i))] = true
	}
	gate, _ := newCertificateGate(b, file.String(), newNodeCA(b), func(c *GateConfig) { c.Nodes = known })
	for i := range n {
		c := Credential{Node: fmt.Sprintf("edge%d", i), Token: Secret(fmt.Sprint(i))}
		if _, err := gate.Authenticate(b.Context(), c); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		if gate.recheck() != 0 {
			b.Fatal("a grant ended")
		}
	}
}
