package stream

import (
	"testing"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// An open without a traceparent, or with one that is not valid, is served without a trace.
func TestTraceparentOfOpen(t *testing.T) {
	const valid = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	c := new(Client)
	c.as = nodeJoiner{c}
	s := &edgeSession{owner: c}
	s.pub = &tunnel.Session{Node: "edge1"}
	for text, want := range map[string]string{"": "", valid: valid, valid + "-x": "", "\x00": "", "00-": ""} {
		r, err := s.requestOf(message(tunnel.TypeOpen, "topic", &pb.Open{Network: "tcp", Traceparent: text}))
		if err != nil || r.Trace.Traceparent() != want {
			t.Errorf("%q is %q, %v", text, r.Trace.Traceparent(), err)
		}
	}
}
