package auth

import (
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// changes returns an event for each token that was added or removed, and for each revocation, when the content of the
// token file changes from old to now.
func changes(old, now *table) (events []tunnel.Event) {
	nodes := make(map[tunnel.NodeName]bool)
	for _, tb := range []*table{old, now} {
		for n := range tb.byNode {
			nodes[n] = true
		}
	}
	add := func(kind tunnel.EventKind, node tunnel.NodeName, token, by string) {
		events = append(events, tunnel.Event{
			Kind: kind, Result: tunnel.ResultOK, Node: node, Token: token, By: by,
		})
	}
	for _, n := range slices.Sorted(maps.Keys(nodes)) {
		was, is := entryOf(old, n), entryOf(now, n)
		const all = "every proof"
		if is.revoked && !was.revoked {
			add(tunnel.EventRevoke, n, "", all)
		}
		if was.revoked && !is.revoked {
			add(tunnel.EventRevokeGone, n, "", all)
		}
		if is.before.Before(was.before) {
			add(tunnel.EventRevokeGone, n, "", certificatesBefore(was.before))
		}
		if !is.before.IsZero() && !is.before.Equal(was.before) {
			add(tunnel.EventRevoke, n, "", certificatesBefore(is.before))
		}
		tokenChanges(was.tokens, is.tokens, func(kind tunnel.EventKind, t token) { add(kind, n, t.id(), t.kind()) })
	}
	tokenChanges(old.shared, now.shared, func(kind tunnel.EventKind, t token) {
		add(kind, "", t.id(), "a token of any node")
	})
	tokenChanges(old.patterns, now.patterns, func(kind tunnel.EventKind, t token) { add(kind, "", t.id(), t.kind()) })
	return events
}

// certificatesBefore returns the text of an audit event for a line `revoked before=TIME` of the token file.
func certificatesBefore(t time.Time) string {
	return "certificates from before " + t.UTC().Format(time.RFC3339)
}

// entryOf returns the entry of a node in tb; the zero entry if tb has no line of the node.
func entryOf(tb *table, n tunnel.NodeName) entry {
	if e := tb.byNode[n]; e != nil {
		return *e
	}
	return entry{}
}

// tokenChanges calls report for each token that is only in old or only in now. A token with another purpose, another
// expiry, or other nodes or uses counts as another token.
func tokenChanges(old, now []token, report func(tunnel.EventKind, token)) {
	lacks := func(all []token, t token) bool {
		return !slices.ContainsFunc(all, func(other token) bool {
			return other.sum == t.sum && other.join == t.join && other.expires.Equal(t.expires) &&
				other.nodes == t.nodes && other.uses == t.uses
		})
	}
	for _, t := range now {
		if lacks(old, t) {
			report(tunnel.EventToken, t)
		}
	}
	for _, t := range old {
		if lacks(now, t) {
			report(tunnel.EventTokenGone, t)
		}
	}
}

// id returns the id of a token, as `tunnel token list` shows it: the start of its SHA-256. A token in plain form has no
// id: if the token is short, an attacker could guess it by the id.
func (t token) id() string {
	if !t.hashed {
		return ""
	}
	return hex.EncodeToString(t.sum[:])[:8]
}

// kind says what a token is good for.
func (t token) kind() string {
	kind := "a token for sessions"
	if t.join {
		kind = "a token to join"
	}
	if t.nodes != "" {
		kind = fmt.Sprintf("a token for %d nodes %s to join", t.uses, t.nodes)
	}
	if t.expires.IsZero() {
		return kind
	}
	return kind + " until " + t.expires.UTC().Format(time.RFC3339)
}
