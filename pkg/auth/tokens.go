package auth

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tunnel.example/tunnel/pkg/reload"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Tokens is the token file. It says which token proves which node, and which nodes are revoked. It
// follows its file while Run runs; a [Gate] calls Run.
//
//	# node:token, better node:sha256:HEX
//	edge1:sha256:3f5c…
//	edge2:sha256:91aa…
//	edge2:sha256:07de…      a second line for a node: both are good, for rotation
//	edge3:sha256:5b1e… join expires=2026-11-22T10:00:00Z
//	                        gets a certificate until then, and opens no session
//	edge-*:sha256:77e0… join uses=10 expires=2026-11-22T10:00:00Z
//	                        gets certificates for ten nodes with such names that have not joined before
//	edge4:revoked           no proof of this node is good
//	edge5:revoked before=2026-11-21T09:30:00Z
//	                        certificates issued earlier do not prove this node
//	default:correct-horse   any node without a line of its own; only with allowshared
//
// (The explanations on the right are not part of the file: a comment needs a line of its own.)
// Tokens keeps the SHA-256 sums of tokens in memory, never tokens. The token of an expired line is
// good for nothing, but its node still counts as one with a line of its own.
type Tokens struct {
	// Set once.
	path        string
	allowShared bool
	mayBeEmpty  bool
	log         *slog.Logger
	audit       tunnel.Trail // is told what changes in the file; nil: nobody is told
	// onChange is called after each change of table. It returns how many grants it has ended.
	// NewGate sets it, before Run.
	onChange func() (revoked int)

	// Owned by Run's goroutine, and by NewTokens before Run.
	content     [sha256.Size]byte // SHA-256 of the content that table was made from
	loggedFault string            // identifies the fault that was logged last; "": the file is good

	counting sync.Mutex // guards the file of uses within this process

	table atomic.Pointer[table]         // the content in force; replaced as a whole by adopt
	seen  atomic.Pointer[reload.FileID] // the file when it was last read; stored after table
	fault atomic.Pointer[error]         // what is wrong with the file now; nil: nothing. Only Run's goroutine stores it
}

// sum is the SHA-256 of a token.
type sum = [sha256.Size]byte

// TokensConfig configures Tokens.
type TokensConfig struct {
	Path        string
	AllowShared bool // permits default: lines
	// MayBeEmpty permits a file without a token, for a cloud that accepts other proofs of a node.
	// The file itself must exist: nodes are revoked there.
	MayBeEmpty bool
	Log        *slog.Logger
	Audit      tunnel.Trail // is told what changes in the file while Run runs; nil: nobody is told
}

// NewTokens reads the token file. If the file is missing, empty or malformed, the error names the
// line and what to do. An error never holds a token.
func NewTokens(cfg TokensConfig) (*Tokens, error) {
	t := &Tokens{
		path:        cfg.Path,
		allowShared: cfg.AllowShared,
		mayBeEmpty:  cfg.MayBeEmpty,
		log:         cfg.Log,
		audit:       cfg.Audit,
		onChange:    func() int { return 0 },
	}
	id := reload.Identify(t.path)
	content, _, err := readSecretFile(t.path, MaxTokenFile, t.log)
	if err != nil {
		return nil, fmt.Errorf("token file: %w; "+
			"create it with a line node:sha256:HEX for each edge, readable by its owner alone", err)
	}
	tb, err := parseTokens(t.path, string(content), t.allowShared, t.mayBeEmpty)
	if err != nil {
		return nil, err
	}
	t.content = sha256.Sum256(content)
	t.adopt(tb)
	t.seen.Store(&id)
	tb.warn(t.log)
	return t, nil
}

// adopt puts tb in force, and ends the grants that are no longer good. It returns how many.
func (t *Tokens) adopt(tb *table) (revoked int) {
	t.table.Store(tb)
	return t.onChange()
}

// currentTables returns the tables for a decision that outlives the next reload, such as the issue of
// a certificate: the table in force, and a table of the file's content at this moment, if the file
// has changed and is good. currentTables does not put the new content in force: somebody may still be
// writing the file.
func (t *Tokens) currentTables() []*table {
	content, _, err := readSecretFile(t.path, MaxTokenFile, slog.New(slog.DiscardHandler))
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

// table is the parsed token file. It never changes.
type table struct {
	digest    [sha256.Size]byte          // SHA-256 of the content that it was made from
	byNode    map[tunnel.NodeName]*entry // nodes that have lines of their own
	patterns  []token                    // tokens for several nodes, each with a pattern of names
	shared    []token                    // good for every node without a token in byNode
	short     []int                      // numbers of the lines with short tokens
	maxTokens int                        // the largest number of tokens of one node; each check makes so many comparisons
}

// entry is what the file says about one node.
type entry struct {
	tokens  []token
	revoked bool      // no proof of the node is good
	before  time.Time // certificates issued earlier are revoked; zero: none
}

// add adds a line while the table is being built.
func (tb *table) add(l line) {
	if l.short {
		tb.short = append(tb.short, l.number)
	}
	if l.token.nodes != "" {
		tb.patterns = append(tb.patterns, l.token)
		return
	}
	if l.node == "" {
		tb.shared = append(tb.shared, l.token)
		tb.maxTokens = max(tb.maxTokens, len(tb.shared))
		return
	}
	e := tb.byNode[l.node]
	if e == nil {
		e = new(entry)
		tb.byNode[l.node] = e
	}
	switch {
	case !l.revoked:
		e.tokens = append(e.tokens, l.token)
		tb.maxTokens = max(tb.maxTokens, len(e.tokens))
	case l.before.IsZero():
		e.revoked = true
	case l.before.After(e.before):
		e.before = l.before
	}
}

// revoked returns whether every proof of node is revoked, and the time before which certificates of
// node are revoked.
func (tb *table) revoked(node tunnel.NodeName) (all bool, before time.Time) {
	if e := tb.byNode[node]; e != nil {
		return e.revoked, e.before
	}
	return false, time.Time{}
}

// token returns the token of node with the sum s: a join token if join is true, else a token for
// sessions. If several tokens match and are good at now, it returns the one that expires last. Its
// running time must not tell a stranger which nodes exist. So it compares in constant time, and makes
// as many comparisons for an unknown node as for a known one.
func (tb *table) token(node tunnel.NodeName, s sum, join bool, now time.Time) (token, error) {
	tokens := tb.shared
	e := tb.byNode[node]
	if e != nil && len(e.tokens) > 0 {
		// The shared token is not good for a node with a line of its own.
		tokens = e.tokens
	}
	var best token
	some, found, fits, ok := false, false, false, false
	for i := range tb.maxTokens + len(tb.patterns) {
		var t token
		present := 0
		if i < len(tokens) {
			t, present = tokens[i], 1
		} else if p := i - tb.maxTokens; p >= 0 && e == nil && tb.patterns[p].nodes.Match(node) {
			// A token for several nodes is not good for a node with any line of its own.
			t, present = tb.patterns[p], 1
		}
		some = some || present == 1
		if present&subtle.ConstantTimeCompare(t.sum[:], s[:]) == 0 {
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
	case !some:
		return token{}, refusal("the token file has no token for this node")
	case !found:
		return token{}, refusal("the token is not this node's")
	case fits:
		return token{}, refusal("the token has expired; make another with tunnel token create")
	case join:
		return token{}, refusal("the token opens sessions; " +
			"for a certificate there must be a join token (tunnel token create)")
	}
	return token{}, refusal("a join token opens no session; run tunnel join with it")
}

// outlasts reports whether the end a is later than the end b. The zero time means that there is no end.
func outlasts(a, b time.Time) bool {
	return !b.IsZero() && (a.IsZero() || a.After(b))
}

// warn logs a warning about short tokens, and about a token that two nodes share.
func (tb *table) warn(log *slog.Logger) {
	if n := len(tb.short); n > 0 {
		log.Warn(fmt.Sprintf("lines of the token file have tokens of fewer than %d characters, "+
			"which may be guessed; make others with tunnel token create", minTokenChars),
			"lines", tb.short[:min(n, maxProblems)], "count", n)
	}
	owner := make(map[sum]tunnel.NodeName)
	for _, node := range slices.Sorted(maps.Keys(tb.byNode)) {
		for _, t := range tb.byNode[node].tokens {
			if first, taken := owner[t.sum]; taken && first != node {
				log.Warn("two nodes have the same token and can join as each other; give each its own",
					"node", first, "other", node)
				return
			}
			owner[t.sum] = node
		}
	}
}
