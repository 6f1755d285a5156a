package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/inventory"
	"tunnel.example/tunnel/pkg/peers"
	"tunnel.example/tunnel/pkg/tunnel"
)

// NodeState says whether a node can be reached.
type NodeState string

// The states of a node.
const (
	Connected NodeState = "connected" // it has a session with a replica
	Missing   NodeState = "missing"   // it has no session, and was connected before or is a Node in Kubernetes
)

// NodeList is the answer of GET /v1/nodes.
type NodeList struct {
	APIVersion string    `json:"api_version"`
	Time       time.Time `json:"time"`
	Replica    string    `json:"replica"` // the replica that has answered
	Nodes      []Node    `json:"nodes"`   // sorted by name
	// Incomplete says why nodes or facts may be missing in the list; empty: the list is complete.
	Incomplete []string `json:"incomplete,omitempty"`
}

// Node is what all replicas together know of a node. JSON leaves out times that nobody knows.
type Node struct {
	Name  string    `json:"name"`
	State NodeState `json:"state"`
	// Sessions are the live sessions, the newest first. An edge may keep a session with every replica.
	Sessions []Session `json:"sessions,omitempty"`

	// What the inventories of the replicas remember. All are zero if the cloud has no inventory.
	FirstSeen     time.Time `json:"first_seen,omitzero"`
	LastSeen      time.Time `json:"last_seen,omitzero"`
	FactsAt       time.Time `json:"facts_at,omitzero"`        // when the next five were set: a session began or ended
	LastReplica   string    `json:"last_replica,omitempty"`   // the replica that had the last session
	LastRemote    string    `json:"last_remote,omitempty"`    // the address of the edge in the last session
	LastSoftware  string    `json:"last_software,omitempty"`  // the version of the edge in the last session
	LastEnd       string    `json:"last_end,omitempty"`       // why the last session ended
	LastServices  bool      `json:"last_services,omitempty"`  // the edge of the last session serves Services
	SessionsTotal int       `json:"sessions_total,omitempty"` // how many sessions have begun since first_seen

	CertificateEnds     time.Time `json:"certificate_ends,omitzero"`
	CertificateSerial   string    `json:"certificate_serial,omitempty"` // of the last issued certificate, in hexadecimal
	CertificateIssuedAt time.Time `json:"certificate_issued_at,omitzero"`
	CertificatesIssued  int       `json:"certificates_issued,omitempty"`
	// Certificate is the newest certificate that the node has shown or got; nil: the cloud knows none.
	Certificate *Certificate `json:"certificate,omitempty"`

	Flapping   bool `json:"flapping,omitempty"`   // the node has begun four sessions with one replica within ten minutes
	Kubernetes bool `json:"kubernetes,omitempty"` // there is a Node object of this name
}

// Session is a live session of a node with a replica.
type Session struct {
	Replica          string    `json:"replica"`
	ID               string    `json:"id,omitempty"`
	Kind             string    `json:"kind"` // "edge", or "agent" for a konnectivity agent
	Since            time.Time `json:"since,omitzero"`
	Remote           string    `json:"remote,omitempty"`
	RoundTripSeconds float64   `json:"round_trip_seconds,omitempty"` // of the last heartbeat
	Conns            int64     `json:"conns"`
	SentBytes        uint64    `json:"sent_bytes"`     // payload to the node, by this session
	ReceivedBytes    uint64    `json:"received_bytes"` // payload from the node, by this session
	Software         string    `json:"software,omitempty"`
	CertificateEnds  time.Time `json:"certificate_ends,omitzero"`
}

// Newest returns the newest session, or the zero Session.
func (n *Node) Newest() Session {
	if len(n.Sessions) == 0 {
		return Session{}
	}
	return n.Sessions[0]
}

// sessionOf describes a session of this process.
func (s *Server) sessionOf(of *tunnel.Session) Session {
	sent, received := of.Traffic.Bytes()
	out := Session{
		Replica: s.cfg.Replica, ID: of.ID, Kind: "edge", Since: of.Since.UTC(), Remote: of.Remote,
		RoundTripSeconds: time.Duration(of.RTT.Load()).Seconds(), Conns: of.Conns.Load(),
		SentBytes: sent, ReceivedBytes: received, Software: of.Software,
	}
	if of.Agent {
		out.Kind = "agent"
	}
	if ends := of.CertificateEnds.Load(); ends != 0 {
		out.CertificateEnds = time.Unix(ends, 0).UTC()
	}
	return out
}

// local returns the list of the nodes that this replica knows. It asks no other replica.
func (s *Server) local() *NodeList {
	nodes := make(map[tunnel.NodeName]*Node)
	var incomplete []string
	if s.cfg.Inventory != nil {
		for name, r := range s.cfg.Inventory.All() {
			nodes[name] = s.remembered(name, r)
		}
		if !s.cfg.Inventory.Known() {
			incomplete = append(incomplete, "the inventory has not been read")
		}
	}
	get := func(name tunnel.NodeName) *Node {
		n := nodes[name]
		if n == nil {
			n = &Node{Name: string(name), State: Missing}
			nodes[name] = n
		}
		return n
	}
	incomplete = append(incomplete, s.coming()...)
	for _, of := range s.cfg.Sessions() {
		n := get(of.Node)
		n.State, n.Sessions = Connected, []Session{s.sessionOf(of)}
		n.Certificate = newest(n.Certificate, certificateOf(of))
	}
	if s.cfg.Expected != nil {
		names, known := s.cfg.Expected()
		if !known {
			incomplete = append(incomplete, "the nodes of Kubernetes have not been read yet")
		}
		for _, name := range names {
			get(name).Kubernetes = true
		}
	}
	return s.list(nodes, incomplete, time.Now())
}

// coming says that nodes have not yet come from the process before; nil: all have.
func (s *Server) coming() []string {
	if s.cfg.Coming == nil {
		return nil
	}
	n := s.cfg.Coming()
	if n == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%d nodes have not come yet from the process before: ask again in half a minute", n)}
}

// list makes the answer from nodes. incomplete says why the answer may lack something. at is when this replica read the
// counters of its sessions.
func (s *Server) list(nodes map[tunnel.NodeName]*Node, incomplete []string, at time.Time) *NodeList {
	l := &NodeList{
		APIVersion: Version, Time: at.UTC(), Replica: s.cfg.Replica,
		Nodes: make([]Node, 0, len(nodes)), Incomplete: incomplete,
	}
	for _, n := range nodes {
		if ends := n.Newest().CertificateEnds; !ends.IsZero() { // the newest counts, even if an older one ends later
			n.CertificateEnds = ends
		}
		l.Nodes = append(l.Nodes, *n)
	}
	slices.SortFunc(l.Nodes, func(a, b Node) int { return strings.Compare(a.Name, b.Name) })
	return l
}

// remembered returns what the inventory knows of a node.
func (s *Server) remembered(name tunnel.NodeName, r inventory.Record) *Node {
	here := r.Replica
	if here == "" && r.Sessions > 0 { // an empty Replica means this replica, if it has counted sessions
		here = s.cfg.Replica
	}
	return &Node{
		Name: string(name), State: Missing,
		FirstSeen: r.FirstSeen, LastSeen: r.LastSeen, FactsAt: r.FactsAt, LastReplica: here, LastRemote: r.Remote,
		LastSoftware: r.Software, LastEnd: r.Ended, LastServices: r.Services, SessionsTotal: r.Sessions,
		CertificateEnds: r.CertEnds, CertificateSerial: r.CertShown,
		CertificateIssuedAt: r.IssuedAt, CertificatesIssued: r.Issued, Certificate: rememberedCertificate(r),
		Flapping: r.Flapping,
	}
}

// Nodes returns what all replicas know of nodes.
func (s *Server) Nodes(ctx context.Context) *NodeList {
	own := s.local()
	if s.cfg.Peers == nil {
		return own
	}
	others := s.cfg.Peers.Others()
	lists, errs := make([]*NodeList, len(others)), make([]error, len(others))
	var asking sync.WaitGroup
	for i, other := range others {
		asking.Go(func() {
			lists[i] = new(NodeList)
			errs[i] = s.ask(ctx, other, http.MethodGet, "/v1/nodes", lists[i])
		})
	}
	asking.Wait()
	nodes := make(map[tunnel.NodeName]*Node, len(own.Nodes))
	merge(nodes, own)
	incomplete, silent := own.Incomplete, false
	for i, other := range others {
		if errs[i] != nil {
			incomplete, silent = append(incomplete, fmt.Sprintf("the replica at %s: %v", other.Remote, errs[i])), true
			continue
		}
		merge(nodes, lists[i])
	}
	// A replica that does not answer now has told earlier which nodes it holds.
	if silent {
		for _, name := range s.cfg.Peers.Connected() {
			n := nodes[name]
			if n == nil {
				n = &Node{Name: string(name)}
				nodes[name] = n
			}
			n.State = Connected
		}
	}
	return s.list(nodes, incomplete, own.Time) // not time.Now(): waiting for other replicas has taken time
}

// merge adds the nodes in the list of a replica to nodes.
func merge(nodes map[tunnel.NodeName]*Node, list *NodeList) {
	for i := range list.Nodes {
		from := &list.Nodes[i]
		name := tunnel.NodeName(from.Name)
		if n := nodes[name]; n != nil {
			n.add(from)
			continue
		}
		nodes[name] = from
	}
}

// add adds what another replica knows of the node.
func (n *Node) add(from *Node) {
	n.Sessions = append(n.Sessions, from.Sessions...)
	slices.SortStableFunc(n.Sessions, func(a, b Session) int { return b.Since.Compare(a.Since) })
	if from.State == Connected {
		n.State = Connected
	}
	n.Kubernetes, n.Flapping = n.Kubernetes || from.Kubernetes, n.Flapping || from.Flapping
	if n.FirstSeen.IsZero() || !from.FirstSeen.IsZero() && from.FirstSeen.Before(n.FirstSeen) {
		n.FirstSeen = from.FirstSeen
	}
	if from.LastSeen.After(n.LastSeen) {
		n.LastSeen = from.LastSeen
	}
	if from.FactsAt.After(n.FactsAt) {
		n.FactsAt, n.LastReplica, n.LastRemote = from.FactsAt, from.LastReplica, from.LastRemote
		n.LastSoftware, n.LastEnd = from.LastSoftware, cmp.Or(from.LastEnd, n.LastEnd)
		n.LastServices = from.LastServices
	}
	if from.CertificateIssuedAt.After(n.CertificateIssuedAt) {
		n.CertificateIssuedAt, n.CertificateSerial = from.CertificateIssuedAt, from.CertificateSerial
	}
	if n.Certificate = newest(n.Certificate, from.Certificate); n.Certificate != nil {
		n.CertificateEnds = n.Certificate.Ends // the newest counts, even if an older one ends later
	} else if from.CertificateEnds.After(n.CertificateEnds) {
		n.CertificateEnds = from.CertificateEnds
	}
	n.SessionsTotal += from.SessionsTotal
	n.CertificatesIssued += from.CertificatesIssued
}

// forget answers DELETE /v1/nodes/NAME: all replicas forget the node. If a replica holds the node, forget refuses.
func (s *Server) forget(w http.ResponseWriter, r *http.Request, local bool) {
	name, err := tunnel.ParseNodeName(r.PathValue("node"))
	if err != nil {
		Refuse(w, http.StatusBadRequest, "", err)
		return
	}
	had := false
	if s.cfg.Peers != nil && !local && s.cfg.Peers.Holds(name) {
		err = inventory.ErrConnected
	} else if s.cfg.Inventory != nil {
		had, err = s.cfg.Inventory.Forget(name)
	}
	if err != nil {
		Refuse(w, http.StatusConflict, "", fmt.Errorf("node %s: %w", name, err))
		return
	}
	if s.cfg.Forgotten != nil {
		s.cfg.Forgotten(name)
	}
	if s.cfg.Peers != nil && !local {
		there, err := s.forgetElsewhere(r.Context(), name)
		if err != nil {
			Refuse(w, http.StatusBadGateway, "", err)
			return
		}
		had = had || there
	}
	Answer(w, Forgotten{Had: had})
}

// forgetElsewhere makes the other replicas forget a node. had reports whether the inventory of one of them had it.
func (s *Server) forgetElsewhere(ctx context.Context, name tunnel.NodeName) (had bool, err error) {
	others := s.cfg.Peers.Others()
	answers, errs := make([]Forgotten, len(others)), make([]error, len(others))
	var asking sync.WaitGroup
	for i, other := range others {
		asking.Go(func() {
			if err := s.ask(ctx, other, http.MethodDelete, "/v1/nodes/"+string(name), &answers[i]); err != nil {
				errs[i] = fmt.Errorf("the replica at %s: %w", other.Remote, err)
			}
		})
	}
	asking.Wait()
	return slices.ContainsFunc(answers, func(f Forgotten) bool { return f.Had }), errors.Join(errs...)
}

// Forgotten is the answer of DELETE /v1/nodes/NAME.
type Forgotten struct {
	Had bool `json:"had"` // an inventory had the node
}

// ask sends a request to the API of another replica, and reads the answer into v.
func (s *Server) ask(ctx context.Context, other peers.Replica, method, path string, v any) error {
	return s.askWith(ctx, other, method, path, nil, v)
}

// askWith is ask with a body; nil: no body. If askWith panics, it returns the panic as an error: most callers ask each
// replica in a goroutine of its own, where a panic would end the process.
func (s *Server) askWith(ctx context.Context, other peers.Replica, method, path string, body, v any) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	err := tunnel.Guard(s.cfg.Log, s.cfg.Counters, "the answer of a replica is left out", func() error {
		return call(ctx, clientOf(other.Dial), method, path, body, v)
	})
	if err != nil && tunnel.CodeOf(err) == tunnel.NoSuchNode {
		return errOldReplica
	}
	return err
}
