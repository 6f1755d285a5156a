package api

import (
	"context"
	"net/http"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/inventory"
	"tunnel.example/tunnel/pkg/tunnel"
)

// learnPause is how long learn waits after a change of the other replicas before it looks at them. Many changes come
// close together: each node that joins or leaves is one.
const learnPause = time.Second

// learn asks each replica that joins this one for its missing nodes, and remembers these nodes, until ctx is done. So
// the memory of missing nodes outlives a rolling update, in which every replica restarts.
func (s *Server) learn(ctx context.Context) {
	asked := make(map[string]bool) // ids of replicas
	for {
		changed := s.cfg.Peers.Changed()
		for _, other := range s.cfg.Peers.Others() {
			if asked[other.ID] {
				continue
			}
			var list NodeList
			if err := s.ask(ctx, other, http.MethodGet, "/v1/nodes", &list); err != nil {
				s.cfg.Log.Debug("another replica does not tell which nodes it misses", "remote", other.Remote, "err", err)
				continue // ask this replica again at the next change
			}
			asked[other.ID] = true
			s.adopt(&list)
		}
		select {
		case <-changed:
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
			Software: n.LastSoftware, Ended: n.LastEnd, CertEnds: n.CertificateEnds,
		}
		if c := n.Certificate; c != nil {
			record.CertShown, record.CertBy, record.CertFrom, record.CertEnds = c.Serial, c.Signer, c.Starts, c.Ends
			record.CertTrusts = strings.Join(c.Trusts, " ")
		}
		s.cfg.Inventory.Adopt(name, record)
	}
}
