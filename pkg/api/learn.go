package api

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/inventory"
	"tunnel.example/tunnel/pkg/peers"
	"tunnel.example/tunnel/pkg/tunnel"
)

// learnPause is how long learn waits after a change of the other replicas before it looks at them. Many changes come
// close together: each node that joins or leaves is one.
const learnPause = time.Second

// learnAgain is the longest wait until learn asks a replica again that has failed to answer. The first wait is
// learnPause, and each further failure doubles it: a replica that is too busy to answer must not get busier.
const learnAgain = time.Minute

// learn asks each replica that joins this one for its missing nodes, and remembers these nodes, until ctx is done. So
// the memory of missing nodes outlives a rolling update, in which every replica restarts.
func (s *Server) learn(ctx context.Context) {
	type turn struct {
		asked bool          // the replica has answered, or is too old to answer
		wait  time.Duration // the wait after the last failure
		next  time.Time     // when that wait ends
	}
	turns := make(map[string]turn) // by id of a replica
	for {
		changed := s.cfg.Peers.Changed()
		wait := learnAgain // until the next replica has its turn
		for _, other := range s.cfg.Peers.Others() {
			t := turns[other.ID]
			if !t.asked && time.Until(t.next) <= 0 {
				err := s.learnFrom(ctx, other)
				t.asked = err == nil || errors.Is(err, errOldReplica)
				t.wait = min(max(2*t.wait, learnPause), learnAgain)
				t.next = time.Now().Add(t.wait)
				turns[other.ID] = t
			}
			if !t.asked {
				wait = min(wait, time.Until(t.next))
			}
		}
		select {
		case <-changed:
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(learnPause):
		case <-ctx.Done():
			return
		}
	}
}

// learnFrom asks another replica for its missing nodes, and remembers these nodes.
func (s *Server) learnFrom(ctx context.Context, other peers.Replica) error {
	var list NodeList
	if err := s.ask(ctx, other, http.MethodGet, "/v1/nodes", &list); err != nil {
		s.cfg.Log.Debug("another replica does not tell which nodes it misses", "remote", other.Remote, "err", err)
		return err
	}
	s.adopt(&list)
	return nil
}

// adopt adds the missing nodes of another replica's list to the inventory. It leaves out nodes that the other replica
// knows only from Kubernetes: no replica has ever seen them.
func (s *Server) adopt(list *NodeList) {
	for i := range list.Nodes {
		n := &list.Nodes[i]
		name, err := tunnel.ParseNodeName(n.Name)
		if err != nil || n.State != Missing || n.LastSeen.IsZero() {
			continue
		}
		record := inventory.Record{
			FirstSeen: n.FirstSeen, LastSeen: n.LastSeen, FactsAt: n.FactsAt, Replica: n.LastReplica, Remote: n.LastRemote,
			Software: n.LastSoftware, Ended: n.LastEnd, Services: n.LastServices, CertEnds: n.CertificateEnds,
		}
		if c := n.Certificate; c != nil {
			record.CertShown, record.CertBy, record.CertFrom, record.CertEnds = c.Serial, c.Signer, c.Starts, c.Ends
			record.CertTrusts = strings.Join(c.Trusts, " ")
		}
		s.cfg.Inventory.Adopt(name, record)
	}
}
