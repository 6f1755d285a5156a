package auth

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel/pkg/tunnel"
)

const (
	// Thousands of edges that come back at once must not take the API server with them
	// (kubernetes/kubernetes#102784: 11 minutes for 5,000 nodes).
	maxReviews  = 32                   // at once
	reviewEvery = 5 * time.Millisecond // 200 a second
	reviewMost  = 10 * time.Second     // for one answer
	// Each stranger who waits for an answer costs memory, and behind a long queue none of
	// them is served in time. Who finds it full tries again later.
	maxStrangers          = maxReviews + 64
	maxStrangersOfASource = maxStrangers / 4
	keepUnknown           = time.Minute      // a good answer about a token that says no end
	keepBad               = 10 * time.Second // a bad answer
	maxKept               = 1 << 16          // answers; a token's is some 200 bytes
	accountUser           = "system:serviceaccount:"
)

// errUnavailable is the question that could not be answered now.
var errUnavailable = errors.New("no answer from Kubernetes about ServiceAccount tokens")

// errManyReviews is the question that was not asked, since too many wait.
var errManyReviews = fmt.Errorf("%w: too many of them wait for a review", errUnavailable)

// reviews asks the Reviewer, and remembers what it has said.
type reviews struct {
	// Set once.
	reviewer Reviewer
	log      *slog.Logger
	busy     chan struct{} // holds a value per review under way
	total    *prometheus.CounterVec

	mu        sync.Mutex           // guards the following
	strangers int                  // who wait for an answer
	sources   map[netip.Prefix]int // of them, by source
	kept      map[sum]answer
	asking    map[sum]chan struct{} // closed, under mu, when nobody asks about that token any more
	next      time.Time             // when the next review may start
	fault     string                // why the last one had no answer, "" when it had one
}

// answer is what the Reviewer has said. It never changes.
type answer struct {
	review Review
	until  time.Time // of the token; zero: it says no end
	keep   time.Time // how long the answer is good
}

func newReviews(r Reviewer, log *slog.Logger) *reviews {
	return &reviews{
		reviewer: r,
		log:      log,
		busy:     make(chan struct{}, maxReviews),
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tunnel_auth_reviews_total",
			Help: "ServiceAccount tokens looked at: good and bad by a review, error without an answer, cached without a review, full without one because too many strangers wait.",
		}, []string{"result"}),
		sources: make(map[netip.Prefix]int),
		kept:    make(map[sum]answer),
		asking:  make(map[sum]chan struct{}),
	}
}

// ask returns the answer about a token, from memory or from Kubernetes. One caller at a
// time asks about the same token; an error is that of this caller alone, and the next
// one asks again. A caller from an address is a stranger.
func (r *reviews) ask(ctx context.Context, token Secret, from netip.Addr) (answer, error) {
	key := sha256.Sum256([]byte(token))
	counted := false
	for {
		r.mu.Lock()
		if a, ok := r.kept[key]; ok && time.Now().Before(a.keep) {
			r.mu.Unlock()
			r.total.WithLabelValues("cached").Inc()
			return a, nil
		}
		if from.IsValid() && !counted {
			if !r.enterLocked(Group(from)) {
				r.mu.Unlock()
				r.total.WithLabelValues("full").Inc()
				return answer{}, errManyReviews
			}
			counted = true
			defer r.leave(Group(from))
		}
		other, asked := r.asking[key]
		if !asked {
			r.asking[key] = make(chan struct{})
		}
		r.mu.Unlock()
		if !asked {
			break
		}
		select {
		case <-other:
		case <-ctx.Done():
			return answer{}, fmt.Errorf("%w: %w", errUnavailable, context.Cause(ctx))
		}
	}
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		close(r.asking[key])
		delete(r.asking, key)
	}()
	a, err := r.review(ctx, token)
	if err == nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.keepLocked(key, a)
	}
	return a, err
}

// enterLocked counts a stranger who waits, unless that is one too many. The caller holds mu.
func (r *reviews) enterLocked(source netip.Prefix) bool {
	if r.strangers >= maxStrangers || r.sources[source] >= maxStrangersOfASource {
		return false
	}
	r.strangers++
	r.sources[source]++
	return true
}

func (r *reviews) leave(source netip.Prefix) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.strangers--
	if r.sources[source]--; r.sources[source] == 0 {
		delete(r.sources, source)
	}
}

// review asks Kubernetes when it is this one's turn.
func (r *reviews) review(ctx context.Context, token Secret) (answer, error) {
	select {
	case r.busy <- struct{}{}:
		defer func() { <-r.busy }()
	case <-ctx.Done():
		return answer{}, fmt.Errorf("%w: %w", errUnavailable, context.Cause(ctx))
	}
	select {
	case <-time.After(r.turn()):
	case <-ctx.Done():
		return answer{}, fmt.Errorf("%w: %w", errUnavailable, context.Cause(ctx))
	}
	asking, cancel := context.WithTimeout(ctx, reviewMost)
	defer cancel()
	review, err := r.reviewer.Review(asking, token)
	if err != nil && ctx.Err() != nil {
		return answer{}, fmt.Errorf("%w: %w", errUnavailable, err) // who asked has gone: no fault of Kubernetes
	}
	r.heard(err)
	now := time.Now()
	switch {
	case err != nil:
		r.total.WithLabelValues("error").Inc()
		return answer{}, fmt.Errorf("%w: %w", errUnavailable, err)
	case !review.Authenticated:
		r.total.WithLabelValues("bad").Inc()
		return answer{keep: now.Add(keepBad)}, nil
	}
	r.total.WithLabelValues("good").Inc()
	a := answer{review: review, until: expiryOfJWT(token), keep: now.Add(keepUnknown)}
	if !a.until.IsZero() {
		a.keep = a.until
	}
	return a, nil
}

// turn returns how long to wait for the next review.
func (r *reviews) turn() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if r.next.Before(now) {
		r.next = now
	}
	wait := r.next.Sub(now)
	r.next = r.next.Add(reviewEvery)
	return wait
}

// keepLocked remembers an answer. The caller holds mu.
func (r *reviews) keepLocked(key sum, a answer) {
	if len(r.kept) >= maxKept {
		now := time.Now()
		for k, old := range r.kept {
			if !now.Before(old.keep) {
				delete(r.kept, k)
			}
		}
	}
	for k := range r.kept { // any one makes room: it is only asked again
		if len(r.kept) < maxKept {
			break
		}
		delete(r.kept, k)
	}
	r.kept[key] = a
}

// heard notes whether Kubernetes has answered, and logs the change.
func (r *reviews) heard(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err == nil && r.fault != "":
		r.fault = ""
		r.log.Info("Kubernetes answers about ServiceAccount tokens again")
	case err != nil:
		if r.fault == "" {
			r.log.Error("no answer from Kubernetes about ServiceAccount tokens; the edges that have one wait", "err", err)
		}
		r.fault = err.Error()
	}
}

func (r *reviews) note() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fault == "" {
		return ""
	}
	return fmt.Sprintf("%v: %s", errUnavailable, r.fault)
}

// byReview turns a ServiceAccount token into the proof that it is for node.
func (g *Gate) byReview(ctx context.Context, node tunnel.NodeName, token Secret, from netip.Addr) (accountProof, error) {
	a, err := g.reviews.ask(ctx, token, from)
	if err != nil {
		return accountProof{}, err
	}
	if !a.review.Authenticated {
		return accountProof{}, refusal("Kubernetes does not accept the ServiceAccount token for our audience")
	}
	i := slices.IndexFunc(g.cfg.ServiceAccounts, func(account string) bool {
		return a.review.User == accountUser+strings.Replace(account, "/", ":", 1)
	})
	switch {
	case i < 0:
		return accountProof{}, refusal(fmt.Sprintf("the token is of %q, which is not in serviceaccounts of [mode.cloud.join]", a.review.User))
	case a.review.Node == "":
		return accountProof{}, refusal("the ServiceAccount token names no node; it must be projected into the pod (serviceAccountToken), by Kubernetes 1.32 or later")
	case a.review.Node != string(node):
		return accountProof{}, refusal("the ServiceAccount token is of a pod on another node")
	}
	return accountProof{account: g.cfg.ServiceAccounts[i], until: a.until}, nil
}

// Collector returns the metrics of the Gate.
func (g *Gate) Collector() prometheus.Collector {
	if g.reviews == nil {
		return newReviews(nil, g.cfg.Log).total // with nothing in it
	}
	return g.reviews.total
}
