package stream

import (
	"testing"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Two nodes with many conns, or their pods, leave room for all other nodes of another replica.
func TestShare(t *testing.T) {
	s := &share{max: 32}
	fill := func(c claim) (n int) {
		for s.enter(c) == nil {
			if n++; n > 100 {
				t.Fatalf("%v has no limit", c)
			}
		}
		return n
	}
	busy, other := claim{node: "busy"}, claim{node: "other"}
	if n := fill(busy); n != 16 {
		t.Errorf("a node alone has %d conns, want half of all", n)
	}
	refusal := s.enter(busy)
	if refusal == nil || refusal.Code != tunnel.Overloaded {
		t.Errorf("one more: %v", refusal)
	}
	if n := fill(other); n != 2 {
		t.Errorf("another node has %d conns, want a part", n)
	}
	for range 16 {
		s.over(busy)
	}
	for range 2 {
		s.over(other)
	}
	pods := 0
	for _, node := range []tunnel.NodeName{"a", "b", "c"} {
		pods += fill(claim{node, true})
	}
	if pods != 16 {
		t.Errorf("pods have %d conns, want half of all", pods)
	}
	if n := fill(other); n != 2 {
		t.Errorf("beside the pods, a node has %d conns, want a part", n)
	}
	(*share)(nil).over(other)
	if s.conns != 18 || len(s.of) != 4 && len(s.of) != 2 {
		t.Errorf("%d conns of %v", s.conns, s.of)
	}
}
