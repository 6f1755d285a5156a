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

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// When thousands of edges reconnect at once, their reviews must not overload the API server
	// (kubernetes/kubernetes#102784: 11 minutes for 5,000 nodes).
	maxReviews     = 32                   // in progress at once
	reviewInterval = 5 * time.Millisecond // between the starts of two reviews: 200 a second
	reviewTimeout  = 10 * time.Second     // for the answer to one review
	// Each waiting stranger costs memory, and at the end of a long queue a stranger would time out
	// anyway. So the queue has a limit, and strangers beyond the limit try again later.
	maxStrangers          = maxReviews + 64
	maxStrangersPerSource = maxStrangers / 4

	cacheNoExpiry    = time.Minute      // how long to cache a good answer for a token without expiry
	cacheRejected    = 10 * time.Second // how long to cache the answer for a bad token
	maxCachedAnswers = 1 << 16          // each takes some 200 bytes

	accountUser = "system:serviceaccount:" // the user name of a ServiceAccount starts with it
)

// errUnavailable means that the token cannot be checked now. It is not a refusal.
var errUnavailable = errors.New("no answer from Kubernetes about ServiceAccount tokens")

// errTooManyReviews means that the token was not checked, because too many strangers wait already.
var errTooManyReviews = fmt.Errorf("%w: too many tokens wait for a review", errUnavailable)

// reviews asks the Reviewer about tokens, and caches its answers.
type reviews struct {
	// Set once.
	reviewer Reviewer
	log      *slog.Logger
	// slots is a semaphore of maxReviews. A review puts a value in when it starts, and takes one out
	// when it ends. Never closed.
	slots chan struct{}
	total *prometheus.CounterVec // reviews by result

	mu        sync.Mutex           // guards the following
	strangers int                  // strangers that wait for an answer
	sources   map[netip.Prefix]int // waiting strangers by source; a source without one has no entry
	cache     map[sum]answer       // by SHA-256 of the token; at most maxCachedAnswers
	// inFlight has an entry for each token under review. Nobody sends. When a review is over, the
	// caller that asked for it closes the channel and removes the entry, under mu.
	inFlight map[sum]chan struct{}
	next     time.Time // when the next review may start
	fault    string    // error of the last review; "": Kubernetes answered
}

// answer is the Reviewer's answer about one token. It never changes.
type answer struct {
	review      Review
	until       time.Time // end of the token; zero: the token has no usable expiry
	cachedUntil time.Time // until when the answer is cached
}

// Values of the label result of tunnel_auth_reviews_total.
const (
	resultGood   = "good"
	resultBad    = "bad"
	resultError  = "error"
	resultCached = "cached"
	resultFull   = "full"
)

func newReviews(r Reviewer, log *slog.Logger) *reviews {
	all := &reviews{
		reviewer: r,
		log:      log,
		slots:    make(chan struct{}, maxReviews),
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tunnel_auth_reviews_total",
			Help: "ServiceAccount tokens checked, by result: good or bad by a review, error without an answer, " +
				"cached without a review, full because too many strangers wait for a review.",
		}, []string{"result"}),
		sources:  make(map[netip.Prefix]int),
		cache:    make(map[sum]answer),
		inFlight: make(map[sum]chan struct{}),
	}
	// Create the counter of every result now: an alert on a rate needs a first value of 0.
	for _, result := range []string{resultGood, resultBad, resultError, resultCached, resultFull} {
		all.total.WithLabelValues(result)
	}
	return all
}

// ask returns the answer about a token, from the cache or from Kubernetes. Callers with the same
// token wait for one review. If that review fails, only the caller that asked gets its error, and
// the next caller asks again. A valid from marks the caller as a stranger.
func (r *reviews) ask(ctx context.Context, token Secret, from netip.Addr) (answer, error) {
	key := sha256.Sum256([]byte(token))
	counted := false
	for {
		r.mu.Lock()
		if a, ok := r.cache[key]; ok && time.Now().Before(a.cachedUntil) {
			r.mu.Unlock()
			r.total.WithLabelValues(resultCached).Inc()
			return a, nil
		}
		if from.IsValid() && !counted {
			if !r.admitLocked(Group(from)) {
				r.mu.Unlock()
				r.total.WithLabelValues(resultFull).Inc()
				return answer{}, errTooManyReviews
			}
			counted = true
			defer r.release(Group(from))
		}
		ended, underWay := r.inFlight[key]
		if !underWay {
			r.inFlight[key] = make(chan struct{})
		}
		r.mu.Unlock()
		if !underWay {
			break
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return answer{}, fmt.Errorf("%w: %w", errUnavailable, context.Cause(ctx))
		}
	}
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		close(r.inFlight[key])
		delete(r.inFlight, key)
	}()
	a, err := r.review(ctx, token)
	if err == nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.cacheLocked(key, a)
	}
	return a, err
}

// admitLocked counts a waiting stranger. It reports false at a limit. The caller holds mu.
func (r *reviews) admitLocked(source netip.Prefix) bool {
	if r.strangers >= maxStrangers || r.sources[source] >= maxStrangersPerSource {
		return false
	}
	r.strangers++
	r.sources[source]++
	return true
}

// release counts one waiting stranger less.
func (r *reviews) release(source netip.Prefix) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.strangers--
	if r.sources[source]--; r.sources[source] == 0 {
		delete(r.sources, source)
	}
}

// review asks Kubernetes, after waiting for a free place and for its start time.
func (r *reviews) review(ctx context.Context, token Secret) (answer, error) {
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	case <-ctx.Done():
		return answer{}, fmt.Errorf("%w: %w", errUnavailable, context.Cause(ctx))
	}
	select {
	case <-time.After(r.nextDelay()):
	case <-ctx.Done():
		return answer{}, fmt.Errorf("%w: %w", errUnavailable, context.Cause(ctx))
	}
	reviewCtx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	review, err := r.reviewer.Review(reviewCtx, token)
	if err != nil && ctx.Err() != nil {
		// The caller has gone, so the error says nothing about Kubernetes.
		return answer{}, fmt.Errorf("%w: %w", errUnavailable, err)
	}
	r.recordOutcome(err)
	now := time.Now()
	switch {
	case err != nil:
		r.total.WithLabelValues(resultError).Inc()
		return answer{}, fmt.Errorf("%w: %w", errUnavailable, err)
	case !review.Authenticated:
		r.total.WithLabelValues(resultBad).Inc()
		return answer{cachedUntil: now.Add(cacheRejected)}, nil
	}
	r.total.WithLabelValues(resultGood).Inc()
	a := answer{review: review, until: expiryOfJWT(token), cachedUntil: now.Add(cacheNoExpiry)}
	if !a.until.IsZero() {
		a.cachedUntil = a.until
	}
	return a, nil
}

// nextDelay returns how long to wait before the next review may start, and reserves that moment.
func (r *reviews) nextDelay() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if r.next.Before(now) {
		r.next = now
	}
	wait := r.next.Sub(now)
	r.next = r.next.Add(reviewInterval)
	return wait
}

// cacheLocked caches an answer. It evicts expired answers, then any others, to make room. The caller
// holds mu.
func (r *reviews) cacheLocked(key sum, a answer) {
	if len(r.cache) >= maxCachedAnswers {
		now := time.Now()
		for k, old := range r.cache {
			if !now.Before(old.cachedUntil) {
				delete(r.cache, k)
			}
		}
	}
	for k := range r.cache { // evict in any order: an evicted token is only reviewed again
		if len(r.cache) < maxCachedAnswers {
			break
		}
		delete(r.cache, k)
	}
	r.cache[key] = a
}

// recordOutcome records whether Kubernetes answered the last review, and logs when that changes.
func (r *reviews) recordOutcome(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err == nil && r.fault != "":
		r.fault = ""
		r.log.Info("Kubernetes answers about ServiceAccount tokens again")
	case err != nil:
		if r.fault == "" {
			r.log.Error("no answer from Kubernetes about ServiceAccount tokens; edges that join with one must wait",
				"err", err)
		}
		r.fault = err.Error()
	}
}

// note says why the last review got no answer; "": it got an answer.
func (r *reviews) note() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fault == "" {
		return ""
	}
	return fmt.Sprintf("%v: %s", errUnavailable, r.fault)
}

// byReview reviews a ServiceAccount token and returns the proof that it is for node.
func (g *Gate) byReview(
	ctx context.Context, node tunnel.NodeName, token Secret, from netip.Addr,
) (accountProof, error) {
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
		return accountProof{}, refusal(fmt.Sprintf(
			"the token is of %q, which is not in serviceaccounts of [mode.cloud.join]", a.review.User))
	case a.review.Node == "":
		return accountProof{}, refusal("the ServiceAccount token names no node; " +
			"it must be projected into the pod (serviceAccountToken), by Kubernetes 1.30 or later")
	case a.review.Node != string(node):
		return accountProof{}, refusal("the ServiceAccount token is of a pod on another node")
	}
	return accountProof{account: g.cfg.ServiceAccounts[i], until: a.until}, nil
}

// Collector returns the metrics of the Gate.
func (g *Gate) Collector() prometheus.Collector {
	if g.reviews == nil {
		return newReviews(nil, g.cfg.Log).total // no reviews: the metric exists and stays 0
	}
	return g.reviews.total
}
