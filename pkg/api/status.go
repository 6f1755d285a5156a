package api

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Status is the answer of GET /v1/status. It describes only the process that answers.
type Status struct {
	APIVersion string    `json:"api_version"`
	Time       time.Time `json:"time"`
	Mode       string    `json:"mode"` // "cloud" or "edge"
	Software   string    `json:"software"`
	Replica    string    `json:"replica"`        // the pod or the machine of the process
	Node       string    `json:"node,omitempty"` // the node of an edge
	Started    time.Time `json:"started"`
	Ready      bool      `json:"ready"`
	Checks     []Check   `json:"checks"`
	Listeners  []string  `json:"listeners,omitempty"`
	Counts     Counts    `json:"counts"`
	// Sessions are the sessions of an edge with replicas of the cloud. For the sessions of a cloud, see GET /v1/nodes.
	Sessions []Session `json:"sessions,omitempty"`
	// Replicas are the other replicas that have joined this cloud.
	Replicas []Replica `json:"replicas,omitempty"`
	// Refusals are the last refused callers and joins, the newest first. Only a cloud with a status page keeps them.
	Refusals []tunnel.Event `json:"refusals,omitempty"`
}

// StatusList is the answer of GET /v1/statuses.
type StatusList struct {
	APIVersion string    `json:"api_version"`
	Statuses   []*Status `json:"statuses"` // first of the process that answers, then of the other replicas
	// Incomplete says which replicas have not answered, and why.
	Incomplete []string `json:"incomplete,omitempty"`
}

// Check is one line of /readyz.
type Check struct {
	Name  string      `json:"name"`
	State admin.State `json:"state"` // "ok", "degraded" or "failed"
	Text  string      `json:"text,omitempty"`
}

// Counts are numbers of this process. A number whose JSON name ends in _total counts since the start of the process.
type Counts struct {
	Nodes         int               `json:"nodes"`            // nodes that have a session with this process
	Remembered    int               `json:"nodes_remembered"` // nodes in the inventory
	Conns         int64             `json:"conns"`            // conns that are open now
	Waiting       int64             `json:"waiting"`          // opens that wait because a limit is reached
	Sessions      uint64            `json:"sessions_total"`   // sessions that have begun
	Replaced      uint64            `json:"replaced_total"`   // sessions replaced by a newer one of the same node
	JoinsRefused  uint64            `json:"joins_refused_total"`
	Opened        uint64            `json:"conns_opened_total"`
	Resets        uint64            `json:"conns_reset_total"`
	SentBytes     uint64            `json:"sent_bytes_total"`
	ReceivedBytes uint64            `json:"received_bytes_total"`
	Refused       map[string]uint64 `json:"conns_refused_total,omitempty"` // refused conns by the code of the refusal
}

// Replica is another replica of the same cloud.
type Replica struct {
	ID       string    `json:"id"`
	Remote   string    `json:"remote"`
	Since    time.Time `json:"since"`
	Software string    `json:"software,omitempty"`
	Nodes    int       `json:"nodes"` // how many nodes the replica holds
	Leaving  bool      `json:"leaving,omitempty"`
}

// status returns what this process is and does.
func (s *Server) status() *Status {
	sessions := s.cfg.Sessions()
	st := &Status{
		APIVersion: Version, Time: time.Now().UTC(), Mode: s.cfg.Mode, Software: s.cfg.Software,
		Replica: s.cfg.Replica, Node: s.cfg.Node, Started: s.started.UTC(), Ready: true,
		Counts: s.counts(sessions), Checks: []Check{},
	}
	if s.cfg.Listeners != nil {
		st.Listeners = s.cfg.Listeners()
	}
	for _, c := range s.cfg.Checks() {
		if c.Off != nil && c.Off() {
			continue
		}
		state, text := c.Result()
		st.Ready = st.Ready && state != admin.StateFailed
		st.Checks = append(st.Checks, Check{c.Name, state, text})
	}
	if s.cfg.Mode != "cloud" {
		for _, of := range sessions {
			one := s.sessionOf(of)
			one.Replica = of.Instance // the instance of the replica at the other end
			st.Sessions = append(st.Sessions, one)
		}
	}
	if s.cfg.Peers != nil {
		for _, r := range s.cfg.Peers.Others() {
			st.Replicas = append(st.Replicas, Replica{
				ID: r.ID, Remote: r.Remote, Since: r.Since.UTC(), Software: r.Software, Nodes: r.Nodes, Leaving: r.Leaving,
			})
		}
	}
	if s.cfg.Refusals != nil {
		st.Refusals = s.cfg.Refusals.Last()
	}
	return st
}

// Statuses returns the status of this replica, and then those of the others. incomplete says which replicas have not
// answered.
func (s *Server) Statuses(ctx context.Context) (all []*Status, incomplete []string) {
	all = []*Status{s.status()}
	if s.cfg.Peers == nil {
		return all, nil
	}
	others := s.cfg.Peers.Others()
	statuses, errs := make([]*Status, len(others)), make([]error, len(others))
	var asking sync.WaitGroup
	for i, other := range others {
		asking.Go(func() {
			statuses[i] = new(Status)
			errs[i] = s.ask(ctx, other, http.MethodGet, "/v1/status", statuses[i])
		})
	}
	asking.Wait()
	for i, other := range others {
		if errs[i] != nil {
			incomplete = append(incomplete, fmt.Sprintf("the status of the replica at %s: %v", other.Remote, errs[i]))
			continue
		}
		all = append(all, statuses[i])
	}
	return all, incomplete
}

func (s *Server) counts(sessions []*tunnel.Session) Counts {
	c := s.cfg.Counters
	out := Counts{
		Waiting: c.Waiting.Load(), Sessions: c.Sessions.Load(), Replaced: c.Replaced.Load(),
		JoinsRefused: c.JoinsRefused.Load(), Opened: c.ConnsOpened.Load(), Resets: c.Resets.Load(),
		SentBytes: c.BytesSent.Load(), ReceivedBytes: c.BytesReceived.Load(),
	}
	for _, of := range sessions {
		out.Conns += of.Conns.Load()
	}
	if s.cfg.Mode == "cloud" {
		out.Nodes = len(sessions)
	}
	if s.cfg.Inventory != nil {
		out.Remembered = s.cfg.Inventory.Len()
	}
	for _, code := range tunnel.Codes() {
		if n := c.Refusals(code); n > 0 {
			if out.Refused == nil {
				out.Refused = make(map[string]uint64)
			}
			out.Refused[code.String()] = n
		}
	}
	return out
}
