package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/inventory"
	"tunnel.example/tunnel/pkg/tunnel"
)

// CertificateList is the answer of GET /v1/certificates.
type CertificateList struct {
	APIVersion string    `json:"api_version"`
	Time       time.Time `json:"time"`
	Mode       string    `json:"mode"`           // "cloud" or "edge"
	Node       string    `json:"node,omitempty"` // the node of an edge
	// Processes has one entry for each replica of the cloud, first for the replica that answers. For an edge, it has one
	// entry: the edge.
	Processes []Held `json:"processes"`
	// Nodes are the nodes of which the cloud knows a certificate, sorted by the end of the certificate.
	Nodes []NodeCertificate `json:"nodes,omitempty"`
	// Without is how many nodes have connected but have no certificate that the cloud knows: they have joined by a token,
	// or as a konnectivity agent.
	Without    int      `json:"nodes_without_certificate,omitempty"`
	Incomplete []string `json:"incomplete,omitempty"` // as in NodeList
}

// Held describes the certificates and CAs that a process has. It contains no key.
type Held struct {
	Replica string `json:"replica"` // the pod or the machine of the process
	// Own is the certificate that a cloud shows to edges, or an edge to its cloud. nil: the edge has no certificate.
	Own *Certificate `json:"own,omitempty"`
	// RenewAt is when an edge renews Own at the latest. It is zero in a cloud, and if the edge does not renew Own.
	RenewAt time.Time `json:"renew_at,omitzero"`
	// CloudCAs are the CAs by which edges verify the cloud. A cloud lists the CAs that it tells its edges; an edge lists
	// the CAs that it trusts.
	CloudCAs []Certificate `json:"cloud_cas,omitempty"`
	// NodeCAs are the CAs by which a cloud verifies its nodes. An edge lists those that its cloud has told.
	NodeCAs []Certificate `json:"node_cas,omitempty"`
	// Signer says who signs certificates of nodes: the name of one of NodeCAs, or a signer of Kubernetes.
	Signer string `json:"signer,omitempty"`
	Err    string `json:"error,omitempty"` // why some of the other fields are missing
}

// Certificate describes a certificate.
type Certificate struct {
	Name   string    `json:"name,omitempty"` // the subject; for a CA followed by the start of its key's identifier
	Signer string    `json:"signer,omitempty"`
	Serial string    `json:"serial"` // hexadecimal
	Starts time.Time `json:"starts,omitzero"`
	Ends   time.Time `json:"ends"`
	ID     string    `json:"id,omitempty"` // for a CA: the start of the SHA-256 of the certificate (auth.CAID)
	// Trusts are the IDs of the CAs by which the edge verified the cloud when it got this certificate. The edge itself
	// has said so; empty: the cloud does not know them.
	Trusts []string `json:"trusts,omitempty"`
}

// NewCertificate describes a certificate.
func NewCertificate(c tunnel.Certificate) Certificate {
	return Certificate{Name: c.Name, Signer: c.Signer, Serial: c.Serial, Starts: c.Starts, Ends: c.Ends}
}

// NodeCertificate is the newest certificate of a node that a cloud knows.
type NodeCertificate struct {
	Node  string    `json:"node"`
	State NodeState `json:"state"`
	Certificate
}

// newest returns the newer one of two certificates of a node, for instance of the inventory's and the session's.
// Both may be nil.
func newest(a, b *Certificate) *Certificate {
	if a == nil || b != nil && (b.Starts.After(a.Starts) || b.Serial == a.Serial && len(a.Trusts) == 0) {
		return b
	}
	return a
}

// certificateOf returns the certificate that a session shows; nil: none.
func certificateOf(s *tunnel.Session) *Certificate {
	shown := s.Certificate.Load()
	if shown == nil {
		return nil
	}
	c := NewCertificate(*shown)
	return &c
}

// rememberedCertificate returns the certificate that the inventory remembers; nil: none.
func rememberedCertificate(r inventory.Record) *Certificate {
	if r.CertShown == "" {
		return nil
	}
	return &Certificate{
		Signer: r.CertBy, Serial: r.CertShown, Starts: r.CertFrom, Ends: r.CertEnds, Trusts: strings.Fields(r.CertTrusts),
	}
}

// held returns the certificates of this process.
func (s *Server) held() Held {
	var h Held
	if s.cfg.Certificates != nil {
		h = s.cfg.Certificates()
	}
	h.Replica = s.cfg.Replica
	return h
}

// certificates returns the certificates of this process, without those of nodes.
func (s *Server) certificates() *CertificateList {
	return &CertificateList{
		APIVersion: Version, Time: time.Now().UTC(), Mode: s.cfg.Mode, Node: s.cfg.Node, Processes: []Held{s.held()},
	}
}

// allCertificates returns the certificates of every replica, and of the nodes.
func (s *Server) allCertificates(ctx context.Context) *CertificateList {
	list := s.certificates()
	if s.cfg.Mode != "cloud" {
		return list
	}
	var asking sync.WaitGroup
	asking.Go(func() {
		err := tunnel.Guard(s.cfg.Log, s.cfg.Counters, "the certificates of nodes are left out", func() error {
			nodes := s.Nodes(ctx)
			list.Incomplete = nodes.Incomplete
			list.takeNodes(nodes.Nodes)
			return nil
		})
		if err != nil {
			list.Incomplete = append(list.Incomplete, fmt.Sprintf("the certificates of nodes: %v", err))
		}
	})
	var missing []string
	if s.cfg.Peers != nil {
		others := s.cfg.Peers.Others()
		lists, errs := make([]CertificateList, len(others)), make([]error, len(others))
		for i, other := range others {
			asking.Go(func() { errs[i] = s.ask(ctx, other, http.MethodGet, "/v1/certificates", &lists[i]) })
		}
		asking.Wait()
		for i, other := range others {
			if errs[i] != nil {
				missing = append(missing, fmt.Sprintf("the certificates of the replica at %s: %v", other.Remote, errs[i]))
			}
			list.Processes = append(list.Processes, lists[i].Processes...)
		}
	}
	asking.Wait()
	if s.cfg.Peers != nil {
		if why := s.cfg.Peers.Note(); why != "" { // nobody could ask a replica that was not joined
			missing = append(missing, why)
		}
	}
	list.Incomplete = append(list.Incomplete, missing...)
	return list
}

// takeNodes sets Nodes and Without.
func (l *CertificateList) takeNodes(nodes []Node) {
	for i := range nodes {
		n := &nodes[i]
		if n.Certificate == nil {
			if n.State == Connected || !n.LastSeen.IsZero() { // else only Kubernetes knows the node
				l.Without++
			}
			continue
		}
		l.Nodes = append(l.Nodes, NodeCertificate{n.Name, n.State, *n.Certificate})
	}
	slices.SortFunc(l.Nodes, func(a, b NodeCertificate) int {
		return cmp.Or(a.Ends.Compare(b.Ends), strings.Compare(a.Node, b.Node))
	})
}

// Certificates returns the certificates of a cloud and its nodes, or of an edge.
func (c *Client) Certificates(ctx context.Context) (*CertificateList, error) {
	list := new(CertificateList)
	return list, c.Call(ctx, http.MethodGet, "/v1/certificates", nil, list)
}

// RenewRequest is the body of POST /v1/certificates/renew of a cloud.
type RenewRequest struct {
	Nodes []string `json:"nodes,omitempty"` // the nodes to ask; empty: all connected nodes
	// WithinSeconds is the time within which each edge chooses a random moment to renew. 0: the cloud chooses this time
	// by the number of nodes.
	WithinSeconds int `json:"within_seconds,omitempty"`
}

// RenewAnswer says which edges were asked to renew their certificates.
type RenewAnswer struct {
	Asked         []string `json:"asked"` // nodes
	WithinSeconds int      `json:"within_seconds"`
	// NotAsked are the connected nodes that the cloud could not ask, each with the reason.
	NotAsked   []NotAsked `json:"not_asked,omitempty"`
	Away       []string   `json:"away,omitempty"` // nodes of the request that are connected to no replica
	Incomplete []string   `json:"incomplete,omitempty"`
}

// NotAsked is a node that was not asked to renew its certificate.
type NotAsked struct {
	Node string `json:"node"`
	Why  string `json:"why"`
}

const (
	// renewalsPerSecond is how many nodes renew their certificates in a second, on average, when a cloud asks all. A
	// signature by a CA in files takes about a millisecond; a cluster's signer is slower.
	renewalsPerSecond = 10
	// maxRenewRequest is the longest body of a RenewRequest, in bytes: it has room for some 100,000 names.
	maxRenewRequest = 16 << 20
)

// renew answers POST /v1/certificates/renew of a cloud.
func (s *Server) renew(w http.ResponseWriter, r *http.Request, local bool) {
	var request RenewRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRenewRequest)).Decode(&request); err != nil {
		Refuse(w, http.StatusBadRequest, "", fmt.Errorf("the body is a RenewRequest: %w", err))
		return
	}
	if request.WithinSeconds == 0 && !local {
		n := len(request.Nodes)
		if n == 0 {
			n = len(s.cfg.Sessions())
			if s.cfg.Peers != nil {
				n = len(s.cfg.Peers.Connected())
			}
		}
		request.WithinSeconds = n / renewalsPerSecond
	}
	answer := s.renewHere(request)
	if s.cfg.Peers != nil && !local {
		s.renewElsewhere(r.Context(), request, answer)
	}
	answer.Away = nil
	if !local {
		answer.Away = answer.away(request.Nodes)
	}
	Answer(w, answer)
}

// renewHere asks the nodes that have a session with this replica.
func (s *Server) renewHere(request RenewRequest) *RenewAnswer {
	answer := &RenewAnswer{Asked: []string{}, WithinSeconds: request.WithinSeconds, Incomplete: s.coming()}
	wanted := make(map[string]bool, len(request.Nodes))
	for _, n := range request.Nodes {
		wanted[n] = true
	}
	for _, of := range s.cfg.Sessions() {
		name := string(of.Node)
		if len(wanted) > 0 && !wanted[name] {
			continue
		}
		if err := s.askToRenew(of, time.Duration(request.WithinSeconds)*time.Second); err != nil {
			answer.NotAsked = append(answer.NotAsked, NotAsked{name, err.Error()})
			continue
		}
		answer.Asked = append(answer.Asked, name)
	}
	return answer
}

// askToRenew asks the edge of a session to renew its certificate within a time.
func (s *Server) askToRenew(of *tunnel.Session, within time.Duration) error {
	switch {
	case of.Certificate.Load() == nil:
		return errors.New("it has no certificate")
	case !of.Renews:
		return errors.New("its edge is older than this cloud, or another program renews its certificate")
	}
	return s.cfg.AskToRenew(of, within)
}

// renewElsewhere makes the other replicas ask their nodes, and adds their answers to answer.
func (s *Server) renewElsewhere(ctx context.Context, request RenewRequest, answer *RenewAnswer) {
	others := s.cfg.Peers.Others()
	answers, errs := make([]RenewAnswer, len(others)), make([]error, len(others))
	var asking sync.WaitGroup
	for i, other := range others {
		asking.Go(func() {
			errs[i] = s.askWith(ctx, other, http.MethodPost, "/v1/certificates/renew", request, &answers[i])
		})
	}
	asking.Wait()
	for i, other := range others {
		if errs[i] != nil {
			answer.Incomplete = append(answer.Incomplete, fmt.Sprintf("the replica at %s: %v", other.Remote, errs[i]))
		}
		answer.Asked = append(answer.Asked, answers[i].Asked...)
		answer.NotAsked = append(answer.NotAsked, answers[i].NotAsked...)
	}
	// An edge may have a session with every replica, so several replicas may have asked it.
	slices.Sort(answer.Asked)
	answer.Asked = slices.Compact(answer.Asked)
	slices.SortFunc(answer.NotAsked, func(a, b NotAsked) int { return strings.Compare(a.Node, b.Node) })
	answer.NotAsked = slices.CompactFunc(answer.NotAsked, func(a, b NotAsked) bool { return a.Node == b.Node })
}

// away returns the nodes that no replica has found.
func (a *RenewAnswer) away(nodes []string) (away []string) {
	found := make(map[string]bool)
	for _, n := range a.Asked {
		found[n] = true
	}
	for _, n := range a.NotAsked {
		found[n.Node] = true
	}
	for _, n := range nodes {
		if !found[n] {
			away = append(away, n)
		}
	}
	return away
}

// renewOwn answers POST /v1/certificates/renew of an edge.
func (s *Server) renewOwn(w http.ResponseWriter, r *http.Request) {
	if s.cfg.RenewNow == nil {
		Refuse(w, http.StatusConflict, "", errors.New("this edge renews no certificate: it has a token, "+
			"or another program replaces its certificate"))
		return
	}
	if err := s.cfg.RenewNow(r.Context()); err != nil {
		Refuse(w, http.StatusBadGateway, "", err)
		return
	}
	Answer(w, s.certificates())
}

// Renew asks a cloud to have nodes renew their certificates. none: all that are connected.
func (c *Client) Renew(ctx context.Context, nodes []string) (*RenewAnswer, error) {
	answer := new(RenewAnswer)
	return answer, c.Call(ctx, http.MethodPost, "/v1/certificates/renew", RenewRequest{Nodes: nodes}, answer)
}

// RenewOwn has an edge renew its certificate. It returns the certificates that the edge has then.
func (c *Client) RenewOwn(ctx context.Context) (*CertificateList, error) {
	list := new(CertificateList)
	return list, c.Call(ctx, http.MethodPost, "/v1/certificates/renew", nil, list)
}
