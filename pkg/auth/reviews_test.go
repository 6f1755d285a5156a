package auth

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/internal/testkit"
)

// reviewer is a Kubernetes whose answers a test sets.
type reviewer struct {
	mu          sync.Mutex // guards the following
	node        string     // node of the pod
	user        string     // "": system:serviceaccount:ns:edge
	bad         bool       // the token is bad: of another audience, expired, forged
	err         error
	takes       time.Duration // time until an answer
	underWay    int           // reviews under way
	maxUnderWay int
	at          []time.Time // start of each review
}

func (r *reviewer) Review(ctx context.Context, _ Secret) (Review, error) {
	r.mu.Lock()
	r.at = append(r.at, time.Now())
	r.underWay++
	r.maxUnderWay = max(r.maxUnderWay, r.underWay)
	takes := r.takes
	r.mu.Unlock()
	if takes > 0 {
		select {
		case <-time.After(takes):
		case <-ctx.Done():
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.underWay--
	if err := ctx.Err(); err != nil {
		return Review{}, err
	}
	if r.err != nil || r.bad {
		return Review{}, r.err
	}
	user := r.user
	if user == "" {
		user = "system:serviceaccount:ns:edge"
	}
	return Review{Authenticated: true, User: user, Node: r.node}, nil
}

func (r *reviewer) set(f func(*reviewer)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(r)
}

func (r *reviewer) calls() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.at)
}

// jwt returns a token in the form of a ServiceAccount token that expires at exp.
func jwt(exp any) Secret {
	enc := base64.RawURLEncoding.EncodeToString
	payload := fmt.Appendf(nil, `{"aud":["tunnel"],"exp":%v}`, exp)
	return Secret(enc([]byte(`{"alg":"RS256"}`)) + "." + enc(payload) + ".c2lnbmF0dXJl")
}

func newReviewGate(t *testing.T, r *reviewer, file string) *Gate {
	t.Helper()
	gate, _ := newCertificateGate(t, file, nodeCA{}, func(c *GateConfig) {
		c.NodeCA, c.Reviewer, c.ServiceAccounts = nil, r, []string{"ns/edge", "ns/other"}
	})
	return gate
}

// counted returns the metric's count of reviews with that result.
func counted(t *testing.T, gate *Gate, result string) float64 {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(gate.Collector())
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "tunnel_auth_reviews_total" && m.GetLabel()[0].GetValue() == result {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

func TestServiceAccounts(t *testing.T) {
	for _, tc := range []struct {
		name  string
		r     *reviewer
		file  string
		ok    bool
		calls int
	}{
		{"good", &reviewer{node: "edge1"}, "", true, 1},
		{"beside a line of the file", &reviewer{node: "edge1"}, "edge1:t", true, 1},
		{"beside revoked certificates", &reviewer{node: "edge1"}, "edge1:revoked before=2999-01-01T00:00:00Z", true, 1},
		{"another audience", &reviewer{node: "edge1", bad: true}, "", false, 1},
		{"another namespace", &reviewer{node: "edge1", user: "system:serviceaccount:default:edge"}, "", false, 1},
		{"another name", &reviewer{node: "edge1", user: "system:serviceaccount:ns:default"}, "", false, 1},
		{"account name with a suffix", &reviewer{node: "edge1", user: "system:serviceaccount:ns:edge:x"}, "", false, 1},
		{"a user that is no ServiceAccount", &reviewer{node: "edge1", user: "ns:edge"}, "", false, 1},
		{"a user with a slash", &reviewer{node: "edge1", user: "system:serviceaccount:ns/edge"}, "", false, 1},
		{"no node", &reviewer{}, "", false, 1},
		{"another node", &reviewer{node: "edge2"}, "", false, 1},
		{"revoked: reviewed all the same", &reviewer{node: "edge1"}, "edge1:revoked", false, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			gate := newReviewGate(t, tc.r, tc.file)
			end := time.Now().Add(time.Hour).Unix()
			c := Credential{Node: "edge1", Token: jwt(end)}
			g, err := gate.Authenticate(t.Context(), c)
			if (err == nil) != tc.ok || err != nil && !errors.Is(err, ErrUnauthenticated) {
				t.Errorf("got %v", err)
			}
			if tc.ok && (g.By != "service account ns/edge" || g.Expires.Unix() != end || g.Node != "edge1") {
				t.Errorf("grant %+v", g)
			}
			if n := tc.r.calls(); n != tc.calls {
				t.Errorf("asked %d times, want %d", n, tc.calls)
			}
			if _, err := gate.Enroll(t.Context(), c); !errors.Is(err, ErrUnauthenticated) {
				t.Errorf("it gets a certificate: %v", err)
			}
		})
	}
	r := &reviewer{node: "edge1"}
	gate := newReviewGate(t, r, "edge1:t\n")
	for _, token := range []Secret{"x", "a.b.c", "eyJ.eyJ.", "eyJ.eyJ", "eyJ.x.y", "eyJ.eyJ.a.b", "..", "t"} {
		gate.Authenticate(t.Context(), Credential{Node: "edge1", Token: token})
	}
	if n := r.calls(); n != 0 {
		t.Errorf("Kubernetes was asked %d times about what is no JWT", n)
	}
}

func TestReviewsAreRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reviewer{node: "edge1"}
		gate := newReviewGate(t, r, "")
		ask := func(token Secret) error {
			_, err := gate.Authenticate(t.Context(), Credential{Node: "edge1", Token: token})
			return err
		}
		want := func(why string, calls int) {
			t.Helper()
			if n := r.calls(); n != calls {
				t.Errorf("%s: asked %d times, want %d", why, n, calls)
			}
		}
		token := jwt(time.Now().Add(time.Hour).Unix())
		for range 100 {
			if err := ask(token); err != nil {
				t.Fatal(err)
			}
		}
		want("until its end a token is asked about once", 1)
		time.Sleep(time.Hour + time.Second)
		if err := ask(token); !errors.Is(err, ErrUnauthenticated) {
			t.Errorf("a token past its end, which the review still finds good: %v", err)
		}
		want("then again", 2)

		forever := jwt(1e18)
		if err := ask(forever); err != nil {
			t.Fatal(err)
		}
		time.Sleep(cacheNoExpiry - time.Second)
		ask(forever)
		want("one whose end is absurd is good for a minute", 3)
		time.Sleep(2 * time.Second)
		ask(forever)
		want("then it is asked about again", 4)

		r.set(func(r *reviewer) { r.bad = true })
		bad := jwt(time.Now().Add(2 * time.Hour).Unix())
		for range 100 {
			if err := ask(bad); !errors.Is(err, ErrUnauthenticated) {
				t.Fatalf("got %v", err)
			}
		}
		want("a refusal is remembered as well", 5)
		time.Sleep(cacheRejected + time.Second)
		r.set(func(r *reviewer) { r.bad = false })
		if err := ask(bad); err != nil {
			t.Errorf("a refusal is remembered for ever: %v", err)
		}
	})
}

func TestFailedReviewIsNoRefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reviewer{node: "edge1", err: errors.New("connection refused")}
		gate := newReviewGate(t, r, "edge2:t")
		account := Credential{Node: "edge1", Token: jwt(time.Now().Add(time.Hour).Unix())}
		for range 2 {
			if _, err := gate.Authenticate(t.Context(), account); err == nil || errors.Is(err, ErrUnauthenticated) {
				t.Errorf("got %v", err)
			}
		}
		if r.calls() != 2 {
			t.Error("no answer is remembered as one")
		}
		if note := gate.Note(); !strings.Contains(note, "connection refused") {
			t.Errorf("note %q", note)
		}
		if _, err := gate.Authenticate(t.Context(), Credential{Node: "edge2", Token: "t"}); err != nil {
			t.Errorf("a token of the file needs no Kubernetes: %v", err)
		}
		r.set(func(r *reviewer) { r.err, r.takes = nil, time.Hour })
		start := time.Now()
		_, err := gate.Authenticate(t.Context(), account)
		if err == nil || errors.Is(err, ErrUnauthenticated) || time.Since(start) > 2*reviewTimeout {
			t.Errorf("an answer that takes an hour: %v after %v", err, time.Since(start))
		}
		r.set(func(r *reviewer) { r.takes = 0 })
		if _, err := gate.Authenticate(t.Context(), account); err != nil || gate.Note() != "" {
			t.Errorf("once it answers: %v, note %q", err, gate.Note())
		}
		if got := counted(t, gate, "error"); got != 3 {
			t.Errorf("%v errors were counted, want 3", got)
		}
	})
}

func TestOneReviewPerToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reviewer{node: "edge1", takes: time.Second}
		gate := newReviewGate(t, r, "")
		c := Credential{Node: "edge1", Token: jwt(time.Now().Add(time.Hour).Unix())}
		leaves, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		all.Go(func() {
			if _, err := gate.Authenticate(leaves, c); err == nil || errors.Is(err, ErrUnauthenticated) {
				t.Errorf("the one that leaves: %v", err)
			}
		})
		synctest.Wait() // now its review is under way
		for range 100 {
			all.Go(func() {
				if _, err := gate.Authenticate(t.Context(), c); err != nil {
					t.Errorf("got %v", err)
				}
			})
		}
		time.Sleep(time.Second / 2)
		leave()
		all.Wait()
		if n := r.calls(); n != 2 {
			t.Errorf("asked %d times: want once by the one that has left, and once by another", n)
		}
		if len(gate.reviews.inFlight) != 0 || gate.Note() != "" {
			t.Errorf("left: %d that ask, note %q", len(gate.reviews.inFlight), gate.Note())
		}
	})
}

func TestStormOfReviews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const edges, second = 1000, 200
		r := &reviewer{node: "edge1", takes: 100 * time.Millisecond}
		gate := newReviewGate(t, r, "")
		start := time.Now()
		var all sync.WaitGroup
		for i := range edges {
			all.Go(func() {
				token := jwt(time.Now().Add(time.Hour + time.Duration(i)*time.Second).Unix())
				if _, err := gate.Authenticate(t.Context(), Credential{Node: "edge1", Token: token}); err != nil {
					t.Errorf("edge %d: %v", i, err)
				}
			})
		}
		synctest.Wait()
		impatient, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, err := gate.Authenticate(impatient, Credential{Node: "edge1", Token: jwt(4e9)})
		if err == nil || errors.Is(err, ErrUnauthenticated) {
			t.Errorf("one that cannot wait for its turn: %v", err)
		}
		all.Wait()
		if r.maxUnderWay > maxReviews {
			t.Errorf("%d at once", r.maxUnderWay)
		}
		for i := second; i < len(r.at); i++ {
			if d := r.at[i].Sub(r.at[i-second]); d < time.Second {
				t.Fatalf("more than %d reviews within %v", second, d)
			}
		}
		if took := time.Since(start); took > 7*time.Second {
			t.Errorf("%d took %v", edges, took)
		}
	})
}

// The number of strangers that wait for a review is bounded, in all and per source. Further strangers
// are refused at once and try again later. A joined edge with a new token always gets its review.
func TestStrangersReviews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reviewer{node: "edge1", takes: time.Second}
		gate := newReviewGate(t, r, "")
		var all sync.WaitGroup
		var n int64
		show := func(from string) error {
			c := Credential{Node: "edge1", Token: jwt(time.Now().Add(time.Hour).Unix() + n)}
			n++
			if from != "" {
				c.From = netip.MustParseAddr(from)
			}
			ended := make(chan error, 1)
			all.Go(func() {
				_, err := gate.Authenticate(t.Context(), c)
				ended <- err
			})
			synctest.Wait()
			select {
			case err := <-ended:
				return err
			default:
				return nil // it is waiting
			}
		}
		refused := func(count int, from string) (refused int) {
			for range count {
				if err := show(from); errors.Is(err, errTooManyReviews) && !errors.Is(err, ErrUnauthenticated) {
					refused++
				} else if err != nil {
					t.Errorf("from %q: %v", from, err)
				}
			}
			return refused
		}
		if n := refused(30, "10.0.0.1"); n != 6 {
			t.Errorf("%d of 30 of one source are refused, want 6", n)
		}
		for i := range 3 {
			if n := refused(24, fmt.Sprintf("10.0.1.%d", i)); n != 0 {
				t.Errorf("%d of source %d are refused", n, i)
			}
		}
		if n := refused(1, "10.0.0.2"); n != 1 {
			t.Error("one more waits than may in all")
		}
		if n := refused(10, ""); n != 0 {
			t.Errorf("%d that are no strangers are refused", n)
		}
		if got := counted(t, gate, "full"); got != 7 {
			t.Errorf("%v are counted, want 7", got)
		}
		all.Wait()
		if n := refused(24, "10.0.0.1"); n != 0 {
			t.Errorf("%d are refused when the others have been served", n)
		}
		all.Wait()
		if r := gate.reviews; r.strangers != 0 || len(r.sources) != 0 {
			t.Errorf("%d of %d sources are left", r.strangers, len(r.sources))
		}
	})
}

func TestCacheIsBounded(t *testing.T) {
	log, _ := testkit.NewLog()
	r := newReviews(&reviewer{}, log)
	now := time.Now()
	for i := range maxCachedAnswers + 100 {
		r.cacheLocked(sum{byte(i), byte(i >> 8), byte(i >> 16)}, answer{cachedUntil: now.Add(time.Hour)})
	}
	if len(r.cache) > maxCachedAnswers {
		t.Errorf("%d answers are kept", len(r.cache))
	}
	for k, a := range r.cache {
		a.cachedUntil = now.Add(-time.Second)
		r.cache[k] = a
	}
	r.cacheLocked(sum{255, 255, 255}, answer{cachedUntil: now.Add(time.Hour)})
	if len(r.cache) != 1 {
		t.Errorf("%d answers are kept, of which one is good", len(r.cache))
	}
}

func TestNodeRevokedWhileItsReviewIsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := newReviewGate(t, &reviewer{node: "edge1", takes: time.Second}, "")
		done := make(chan error)
		go func() {
			c := Credential{Node: "edge1", Token: jwt(time.Now().Add(time.Hour).Unix())}
			_, err := gate.Authenticate(t.Context(), c)
			done <- err
		}()
		time.Sleep(time.Second / 2)
		setTokens(t, gate, "edge1:revoked")
		if err := <-done; !errors.Is(err, ErrUnauthenticated) {
			t.Errorf("got %v", err)
		}
		if grantCount(gate) != 0 {
			t.Error("there is a grant")
		}
	})
}

func TestExpiryOfJWT(t *testing.T) {
	enc := base64.RawURLEncoding.EncodeToString
	hour := time.Now().Add(time.Hour).Unix()
	for _, tc := range []struct {
		name  string
		token Secret
		want  int64 // 0: none
	}{
		{"hour", jwt(hour), hour},
		{"fraction", jwt(fmt.Sprint(hour) + ".75"), hour},
		{"past", jwt(1000), 1000},
		{"a billion years", jwt(int64(1e9 * 365 * 86400)), 0},
		{"more than a number holds", jwt("1e400"), 0},
		{"more than 64 bits", jwt("123456789012345678901234567890"), 0},
		{"negative", jwt(-5), 0},
		{"null", jwt("null"), 0},
		{"text", jwt(`"1"`), 0},
		{"none", Secret("eyJ." + enc([]byte(`{}`)) + ".x"), 0},
		{"no JSON", Secret("eyJ." + enc([]byte(`{"exp"`)) + ".x"), 0},
		{"no base64", "eyJ.*.x", 0},
		{"no dots", "x", 0},
	} {
		var got int64
		if exp := expiryOfJWT(tc.token); !exp.IsZero() {
			got = exp.Unix()
		}
		if got != tc.want {
			t.Errorf("%s: %d, want %d", tc.name, got, tc.want)
		}
	}
}

func FuzzExpiryOfJWT(f *testing.F) {
	f.Add(jwt(1893456000).Reveal())
	f.Add("eyJ.eyJleHAiOjFlMzA4fQ.x")
	f.Fuzz(func(t *testing.T, s string) {
		exp := expiryOfJWT(Secret(s))
		if !exp.IsZero() && (exp.Unix() < 0 || time.Until(exp) > maxJWTExpiry+time.Minute) {
			t.Fatalf("%q ends at %v", s, exp)
		}
	})
}
