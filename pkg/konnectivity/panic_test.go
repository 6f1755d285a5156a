package konnectivity

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	ports "tunnel.example/tunnel/pkg/listen"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// faulty panics when it authenticates node bad.
type faulty struct{ auth.Authenticator }

func (f faulty) Authenticate(ctx context.Context, c auth.Credential) (auth.Grant, error) {
	if c.Node == "bad" {
		panic("a fault in authentication")
	}
	return f.Authenticator.Authenticate(ctx, c)
}

// A panic while an agent joins, or in a loop of its stream, ends that stream and no other.
func TestPanicInAnAgent(t *testing.T) {
	r := newAgentsRig(t, func(c *AgentsConfig) { c.Auth = faulty{c.Auth} })
	r.agent(t, "n1", nil)
	s, _ := r.raw(t, "agentid", "bad", "authorization", "Bearer token of bad")
	if err := s.RecvMsg(new(Packet)); status.Code(err) != codes.Internal ||
		strings.Contains(err.Error(), "authentication") {
		t.Errorf("joining: %v", err)
	}
	r.raw(t, "agentid", "n2", "authorization", "Bearer token of n2")
	testkit.Eventually(t, "n2 joins", func() bool { return r.dir.Holds("n2") })
	l := r.dir.Lookup("n2").Link.(*agentLink)
	l.mu.Lock()
	l.out = append(l.out, outgoing{}) // without a packet, sendLoop panics
	notify(l.wake)
	l.mu.Unlock()
	<-l.ended
	testkit.Eventually(t, "n2 has gone", func() bool { return !r.dir.Holds("n2") })
	if n := r.cfg.Counters.Panics.Load(); n != 2 || !r.dir.Holds("n1") {
		t.Errorf("%d panics counted, want 2; n1 is there: %v", n, r.dir.Holds("n1"))
	}
}

// A panic in a dial of an Agent refuses that dial. The stream and its other conns go on.
func TestPanicInADialOfAnAgent(t *testing.T) {
	r := newAgentsRig(t, nil)
	a, _ := r.agent(t, "n1", func(ctx context.Context, q tunnel.Request) (net.Conn, error) {
		if q.Addr == "bad:1" {
			panic("a fault in a dial")
		}
		return new(net.Dialer).DialContext(ctx, q.Network, q.Addr)
	})
	first := r.dir.Lookup("n1")
	if _, err := r.dir.Dial(t.Context(), tunnel.Request{Node: "n1", Category: category, Network: "tcp",
		Addr: "bad:1"}); err == nil {
		t.Error("the dial has succeeded")
	}
	r.dial(t, "n1", testkit.Serve(t, testkit.Echo))
	if n := a.cfg.Counters.Panics.Load(); n != 1 || r.dir.Lookup("n1") != first {
		t.Errorf("%d panics counted, want 1; the session lives: %v", n, r.dir.Lookup("n1") == first)
	}
	testkit.Eventually(t, "no dial is counted any more", func() bool { return r.budget.dialled.Load() == 0 })
}

// Whatever metadata an agent sends, accepted identifiers can be encoded for other replicas, and parsed.
// FuzzParseIdentifiers in package egress makes a table of any parsed identifiers.
func FuzzAgentMetadata(f *testing.F) {
	f.Add("n1", "token of n1", "host=edge1&cidr=10.1.0.0/16")
	f.Add("n1", "token of n1", "host=x\xff")
	f.Add("n\xff", "token of n\xff", "host=%ff")
	f.Fuzz(func(t *testing.T, id, token, identifiers string) {
		a := NewAgents(AgentsConfig{Auth: names{}, Log: slog.New(slog.DiscardHandler)}, new(tunnel.Directory))
		md := metadata.Pairs("agentid", id, "authorization", "Bearer "+token, "agentidentifiers", identifiers)
		grant, answer, err := a.authenticate(t.Context(), &agentTransport{conn: &ports.Conn{TCPConn: new(net.TCPConn)}}, md)
		if err != nil {
			if status.Code(answer) != codes.Unauthenticated {
				t.Errorf("refused with %v", answer)
			}
			a.refused("remote", id, err)
			return
		}
		reach, err := reachOf(md)
		if err != nil {
			return
		}
		if _, err := tunnel.ParseNodeName(string(grant.Node)); err == nil { // no credential proves another name
			if _, err := proto.Marshal(&pb.Nodes{Held: []*pb.Held{{Node: string(grant.Node), Reach: reach}}}); err != nil {
				t.Errorf("%q cannot be told: %v", reach, err)
			}
		}
		parsed, err := ParseIdentifiers(reach)
		if err != nil || !utf8.ValidString(strings.Join(parsed.Hosts, "")) {
			t.Errorf("%q, %v", parsed.Hosts, err)
		}
	})
}
