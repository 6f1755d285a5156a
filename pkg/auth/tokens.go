package auth

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"tunnel/pkg/tunnel"
)

// Tokens is the token file: which token proves which node. It is an Authenticator
// that follows its file while Run runs.
//
//	# node:token, better node:sha256:HEX
//	edge1:sha256:3f5c…
//	edge2:sha256:91aa…
//	edge2:sha256:07de…      a second line for a node: both are good, for rotation
//	default:correct-horse   any node without a line of its own; only with allowshared
//
// It holds sums, never tokens.
type Tokens struct {
	// Set once.
	path        string
	allowShared bool
	log         *slog.Logger

	// Owned by Run, and by NewTokens before it.
	content [sha256.Size]byte // of the content that table was made from
	badness string            // what has been logged about the file, "" while it is good

	mu     sync.Mutex // guards the following
	table  *table
	grants map[*grant]struct{} // those whose context is not done
}

var _ Authenticator = (*Tokens)(nil)

// grant is what Tokens remembers of a Grant. It never changes.
type grant struct {
	node    tunnel.NodeName
	sum     sum
	revoked chan struct{} // closed by adopt when sum is no longer good for node
}

type sum = [sha256.Size]byte

// NewTokens reads the token file. A file that is missing, empty or malformed is an
// error that names the line and what to do; it never shows a token.
func NewTokens(path string, allowShared bool, log *slog.Logger) (*Tokens, error) {
	t := &Tokens{
		path:        path,
		allowShared: allowShared,
		log:         log,
		grants:      make(map[*grant]struct{}),
	}
	content, _, err := readSecretFile(path, maxTokenFile, log)
	if err != nil {
		return nil, fmt.Errorf("token file: %w; create it with a line node:sha256:HEX for each edge, readable by its owner alone", err)
	}
	tb, err := parseTokens(path, string(content), allowShared)
	if err != nil {
		return nil, err
	}
	t.content = sha256.Sum256(content)
	t.adopt(tb)
	tb.warn(log)
	return t, nil
}

// Authenticate implements Authenticator. It compares sums, in constant time and as
// many of them for an unknown node as for a known one.
func (t *Tokens) Authenticate(ctx context.Context, c Credential) (Grant, error) {
	node, err := tunnel.ParseNodeName(c.Node)
	if err != nil {
		return Grant{}, refusal("the claimed node name is not RFC 1123")
	}
	if c.Token == "" {
		return Grant{}, refusal("the token is empty")
	}
	g := &grant{node: node, sum: sha256.Sum256([]byte(c.Token)), revoked: make(chan struct{})}

	t.mu.Lock()
	known, ok := t.table.accepts(node, g.sum)
	if ok {
		// Under the same lock as the check: a change of the file sees the grant.
		t.grants[g] = struct{}{}
	}
	t.mu.Unlock()

	switch {
	case !known:
		return Grant{}, refusal("the token file has no line for this node")
	case !ok:
		return Grant{}, refusal("the token is not this node's")
	}
	context.AfterFunc(ctx, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.grants, g)
	})
	return Grant{Node: node, Revoked: g.revoked}, nil
}

// adopt makes tb the truth and revokes the grants that it does not bear out.
func (t *Tokens) adopt(tb *table) (revoked int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.table = tb
	for g := range t.grants {
		if _, ok := tb.accepts(g.node, g.sum); !ok {
			delete(t.grants, g)
			close(g.revoked)
			revoked++
		}
	}
	return revoked
}

// table is a parsed token file. It never changes.
type table struct {
	own    map[tunnel.NodeName][]sum
	shared []sum // good for every node that own does not have
	most   int   // the most sums that one node has: how many are compared every time
}

// accepts reports whether the file has a line for node, and whether sum is on one.
func (tb *table) accepts(node tunnel.NodeName, s sum) (known, ok bool) {
	sums, own := tb.own[node]
	if !own {
		// A node with a line of its own cannot be had with the shared token.
		sums = tb.shared
	}
	match := 0
	for i := range tb.most {
		var want sum
		there := 0
		if i < len(sums) {
			want, there = sums[i], 1
		}
		match |= there & subtle.ConstantTimeCompare(want[:], s[:])
	}
	return len(sums) > 0, match == 1
}

// warn logs what is allowed in a token file but not wise.
func (tb *table) warn(log *slog.Logger) {
	owner := make(map[sum]tunnel.NodeName)
	for _, node := range slices.Sorted(maps.Keys(tb.own)) {
		for _, s := range tb.own[node] {
			if first, taken := owner[s]; taken && first != node {
				log.Warn("two nodes have the same token and can join as each other; give each its own", "node", first, "other", node)
				return
			}
			owner[s] = node
		}
	}
}
