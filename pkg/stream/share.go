package stream

import (
	"sync"

	"tunnel.example/tunnel/pkg/tunnel"
)

// share bounds what parts of the nodes of another replica may have of the session with that replica. The replica that
// holds a node limits the conns of the node, but the session has room for the conns of a few such nodes only. Without
// share, callers of these nodes would take the conns of all others. A nil share has no limits: a session with a node.
type share struct {
	max int // the most conns of the session; set once

	mu     sync.Mutex              // guards the following
	conns  int                     // conns, and opens without an answer
	byPods int                     // of these, those that any pod can cause
	of     map[tunnel.NodeName]int // conns and opens of each node
}

// part is how many conns one node may have, as a part of all, while more than half of all are in use.
const part = 16

// claim is what a conn counts for.
type claim struct {
	node   tunnel.NodeName
	byPods bool // any pod can cause the conn, and leave it idle
}

func claimOf(r tunnel.Request) claim {
	return claim{r.Node, r.ByPods || r.Category == categoryServices}
}

// enter counts an open, or returns why there is no room for it.
func (s *share) enter(c claim) *tunnel.Refusal {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case c.byPods && s.byPods >= (s.max+1)/2:
		return tunnel.Refusef(tunnel.Overloaded, "limit conns: endpoints of Services have %d conns by another replica, "+
			"half of all", s.byPods)
	case s.conns >= (s.max+1)/2 && s.of[c.node] >= max(1, s.max/part):
		return tunnel.Refusef(tunnel.Overloaded, "limit conns: node %s has %d of the %d conns by another replica",
			c.node, s.of[c.node], s.conns)
	}
	if s.of == nil {
		s.of = make(map[tunnel.NodeName]int)
	}
	s.conns++
	s.of[c.node]++
	if c.byPods {
		s.byPods++
	}
	return nil
}

// over undoes enter.
func (s *share) over(c claim) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns--
	if s.of[c.node]--; s.of[c.node] == 0 {
		delete(s.of, c.node)
	}
	if c.byPods {
		s.byPods--
	}
}
