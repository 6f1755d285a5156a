package stream

import (
	"sync"

	"tunnel.example/tunnel/pkg/tunnel"
)

// share divides the conns of a session with another replica among the nodes of that replica. The session has as many
// conns as four nodes may have. Without share, callers of four nodes could use up the conns of all nodes. A session
// with a node has no share: nil, which has no limits.
type share struct {
	max int // the most conns of the session; set once

	mu     sync.Mutex              // guards the following
	conns  int                     // conns, and opens without an answer
	byPods int                     // of these, those that any pod can cause
	of     map[tunnel.NodeName]int // conns and opens of each node
}

// nodePart: while half of the conns are in use, a node with a sixteenth of all conns gets no more.
const nodePart = 16

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
	case s.conns >= (s.max+1)/2 && s.of[c.node] >= max(1, s.max/nodePart):
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
