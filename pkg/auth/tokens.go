package auth

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"tunnel/pkg/tunnel"
)

// Tokens is the token file: which token proves which node, and which node is revoked. It
// follows its file while Run runs; a [Gate] does that for it.
//
//	# node:token, better node:sha256:HEX
//	edge1:sha256:3f5c…
//	edge2:sha256:91aa…
//	edge2:sha256:07de…      a second line for a node: both are good, for rotation
//	edge3:sha256:5b1e… join expires=2026-11-22T10:00:00Z
//	                        gets a certificate until then, and opens no session
//	edge4:revoked           nothing proves this node
//	edge5:revoked before=2026-11-21T09:30:00Z
//	                        certificates issued earlier do not prove this node
//	default:correct-horse   any node without a line of its own; only with allowshared
//
// (What stands on the right is no part of the file: a comment has a line of its own.) It
// holds sums, never tokens. A line whose time has come is good for nothing, but its node
// still has a line of its own.
type Tokens struct {
	// Set once.
	path        string
	allowShared bool
	mayBeEmpty  bool
	log         *slog.Logger
	// adopted is told of every change, and says how many grants it has ended. The Gate
	// sets it before Run.
	adopted func() (revoked int)

	// Owned by Run, and by NewTokens before it.
	content [sha256.Size]byte // of the content that table was made from
	badness string            // what has been logged about the file, "" while it is good

	table atomic.Pointer[table]
	fault atomic.Pointer[error] // what is wrong with the file now; nil: nothing
}

type sum = [sha256.Size]byte

// TokensConfig is what Tokens needs.
type TokensConfig struct {
	Path        string
	AllowShared bool // default: lines are allowed
	// MayBeEmpty allows a file without a token, for a cloud that has other proofs of a
	// node. It must be there, for that is where nodes are revoked.
	MayBeEmpty bool
	Log        *slog.Logger
}

// NewTokens reads the token file. A file that is missing, empty or malformed is an
// error that names the line and what to do; it never shows a token.
func NewTokens(cfg TokensConfig) (*Tokens, error) {
	t := &Tokens{
		path:        cfg.Path,
		allowShared: cfg.AllowShared,
		mayBeEmpty:  cfg.MayBeEmpty,
		log:         cfg.Log,
		adopted:     func() int { return 0 },
	}
	content, _, err := readSecretFile(t.path, maxTokenFile, t.log)
	if err != nil {
		return nil, fmt.Errorf("token file: %w; create it with a line node:sha256:HEX for each edge, readable by its owner alone", err)
	}
	tb, err := parseTokens(t.path, string(content), t.allowShared, t.mayBeEmpty)
	if err != nil {
		return nil, err
	}
	t.content = sha256.Sum256(content)
	t.adopt(tb)
	tb.warn(t.log)
	return t, nil
}

// adopt makes tb the truth and ends the grants that it does not bear out.
func (t *Tokens) adopt(tb *table) (revoked int) {
	t.table.Store(tb)
	return t.adopted()
}

// asOfNow returns what decides about something that outlives the next look at the file:
// what is in force, and what the file holds at this moment if that is something else, and
// good. It is not adopted here: somebody may be writing it.
func (t *Tokens) asOfNow() []*table {
	content, _, err := readSecretFile(t.path, maxTokenFile, slog.New(slog.DiscardHandler))
	inForce := t.table.Load()
	if err != nil || sha256.Sum256(content) == inForce.digest {
		return []*table{inForce}
	}
	next, err := parseTokens(t.path, string(content), t.allowShared, t.mayBeEmpty)
	if err != nil {
		return []*table{inForce}
	}
	return []*table{inForce, next}
}

// table is a parsed token file. It never changes.
type table struct {
	digest [sha256.Size]byte // of the content that it was made from
	own    map[tunnel.NodeName]*entry
	shared []token // good for every node that has no token in own
	short  []int   // numbers of the lines with short tokens
	most   int     // the most tokens that one node has: how many are compared every time
}

// entry is what the file says of one node.
type entry struct {
	tokens  []token
	revoked bool
	before  time.Time // certificates issued earlier are not good; zero: any may be
}

// add takes a line while the table is made.
func (tb *table) add(l line) {
	if l.short {
		tb.short = append(tb.short, l.number)
	}
	if l.node == "" {
		tb.shared = append(tb.shared, l.token)
		tb.most = max(tb.most, len(tb.shared))
		return
	}
	e := tb.own[l.node]
	if e == nil {
		e = new(entry)
		tb.own[l.node] = e
	}
	switch {
	case !l.revoked:
		e.tokens = append(e.tokens, l.token)
		tb.most = max(tb.most, len(e.tokens))
	case l.before.IsZero():
		e.revoked = true
	case l.before.After(e.before):
		e.before = l.before
	}
}

// revoked says whether nothing proves node, and before when certificates were issued
// that do not.
func (tb *table) revoked(node tunnel.NodeName) (all bool, before time.Time) {
	if e := tb.own[node]; e != nil {
		return e.revoked, e.before
	}
	return false, time.Time{}
}

// token finds the token of node with the sum s that is for joining, or not, and good for
// the longest time from now. It compares sums, in constant time and as many of them for
// an unknown node as for a known one.
func (tb *table) token(node tunnel.NodeName, s sum, join bool, now time.Time) (token, error) {
	tokens := tb.shared
	if e := tb.own[node]; e != nil && len(e.tokens) > 0 {
		// A node with a line of its own cannot be had with the shared token.
		tokens = e.tokens
	}
	var best token
	found, fits, ok := false, false, false
	for i := range tb.most {
		var t token
		there := 0
		if i < len(tokens) {
			t, there = tokens[i], 1
		}
		if there&subtle.ConstantTimeCompare(t.sum[:], s[:]) == 0 {
			continue
		}
		found = true
		if t.join != join {
			continue
		}
		fits = true
		if t.live(now) && (!ok || outlasts(t.expires, best.expires)) {
			best, ok = t, true
		}
	}
	switch {
	case ok:
		return best, nil
	case len(tokens) == 0:
		return token{}, refusal("the token file has no token for this node")
	case !found:
		return token{}, refusal("the token is not this node's")
	case fits:
		return token{}, refusal("the token has expired; make another with tunnel token create")
	case join:
		return token{}, refusal("the token opens sessions; for a certificate there must be a join token (tunnel token create)")
	}
	return token{}, refusal("a join token opens no session; run tunnel join with it")
}

// outlasts reports whether a is later than b, where zero is never.
func outlasts(a, b time.Time) bool {
	return !b.IsZero() && (a.IsZero() || a.After(b))
}

// warn logs what is allowed in a token file but not wise.
func (tb *table) warn(log *slog.Logger) {
	if n := len(tb.short); n > 0 {
		log.Warn(fmt.Sprintf("lines of the token file have tokens of fewer than %d characters, which may be guessed; make others with tunnel token create", longEnough),
			"lines", tb.short[:min(n, maxProblems)], "count", n)
	}
	owner := make(map[sum]tunnel.NodeName)
	for _, node := range slices.Sorted(maps.Keys(tb.own)) {
		for _, t := range tb.own[node].tokens {
			if first, taken := owner[t.sum]; taken && first != node {
				log.Warn("two nodes have the same token and can join as each other; give each its own", "node", first, "other", node)
				return
			}
			owner[t.sum] = node
		}
	}
}
