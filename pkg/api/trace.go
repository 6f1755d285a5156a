package api

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"time"

	"tunnel.example/tunnel/pkg/ping"
	"tunnel.example/tunnel/pkg/trace"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The steps of a trace that the cloud does. The steps of the edge are in package trace.
const (
	StepHold  = "hold"  // the cloud finds the replica that holds the node
	StepReach = "reach" // a replica reaches the edge through the tunnel
	StepDial  = "dial"  // an old edge, which knows no traces, dials the target: all its steps in one
)

// Traced is the answer of POST /v1/trace: the hops up to the target, or up to the first hop that was refused.
type Traced struct {
	Node   string `json:"node"`
	Target string `json:"target"`
	Hops   []Hop  `json:"hops"`
}

// Hop is one step on the way to a target.
type Hop struct {
	At      string  `json:"at"` // the replica or the node that did the step
	Step    string  `json:"step"`
	Text    string  `json:"text"`
	Seconds float64 `json:"seconds,omitempty"`
	Code    string  `json:"code,omitempty"` // the code of the refusal; "": the step has succeeded
	Next    string  `json:"next,omitempty"` // what an operator can do about the refusal
}

// Holder is the answer of GET /v1/holds/NAME.
type Holder struct {
	Replica string   `json:"replica"`           // the replica that has answered
	Session *Session `json:"session,omitempty"` // the session of the node with this replica; nil: there is none
}

// Trace asks the cloud to dial a target through a node, step by step. Each hop of the result is one step. The last hop
// says whether the target was reached, or why its step was refused. An error means that the request itself has failed.
func (c *Client) Trace(ctx context.Context, node, target string) (*Traced, error) {
	traced := new(Traced)
	query := url.Values{"node": {node}, "target": {target}}
	return traced, c.Call(ctx, http.MethodPost, "/v1/trace?"+query.Encode(), nil, traced)
}

// holds answers GET /v1/holds/NAME.
func (s *Server) holds(w http.ResponseWriter, r *http.Request) {
	Answer(w, Holder{Replica: s.cfg.Replica, Session: s.session(tunnel.NodeName(r.PathValue("node")))})
}

// session describes the session of a node with this replica; nil: there is none.
func (s *Server) session(node tunnel.NodeName) *Session {
	for _, of := range s.cfg.Sessions() {
		if of.Node == node {
			out := s.sessionOf(of)
			return &out
		}
	}
	return nil
}

// trace answers POST /v1/trace.
func (s *Server) trace(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	node, err := tunnel.ParseNodeName(query.Get("node"))
	target := query.Get("target")
	if err == nil {
		_, _, err = net.SplitHostPort(target)
	}
	if err != nil {
		Refuse(w, http.StatusBadRequest, "", err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), pingTimeout)
	defer cancel()
	t := Traced{Node: string(node), Target: target}
	if t.Hops = append(t.Hops, s.holder(ctx, node)); t.Hops[0].Code == "" {
		t.Hops = append(t.Hops, s.edgeHops(ctx, node, target)...)
	}
	last := &t.Hops[len(t.Hops)-1]
	last.Next = next(last, string(node))
	Answer(w, &t)
}

// holder returns the hop to the replica that holds the node.
func (s *Server) holder(ctx context.Context, node tunnel.NodeName) Hop {
	hop := Hop{At: "replica " + s.cfg.Replica, Step: StepHold}
	began := time.Now()
	held := s.session(node)
	if s.cfg.Peers != nil {
		other, here, ok := s.cfg.Peers.Way(node)
		switch {
		case !ok:
			held = nil
		case !here:
			var there Holder
			hop.At = "the replica at " + other.Remote
			err := s.ask(ctx, other, http.MethodGet, "/v1/holds/"+string(node), &there)
			hop.Seconds = time.Since(began).Seconds()
			if err != nil || there.Session == nil { // the replica is old, or the node has left: then the next hop fails
				hop.Text = fmt.Sprintf("it holds %s", node)
				return hop
			}
			hop.At += " (" + there.Replica + ")"
			held = there.Session
		}
	}
	if held == nil {
		hop.Code, hop.Text = tunnel.NoSuchNode.String(), fmt.Sprintf("no replica holds %s", node)
		if s.cfg.Inventory != nil {
			if r, ok := s.cfg.Inventory.All()[node]; ok {
				hop.Text += fmt.Sprintf("; it was last seen %s", r.LastSeen.Format(time.RFC3339))
				if r.Ended != "" {
					hop.Text += ", and its session ended: " + r.Ended
				}
			}
		}
		return hop
	}
	hop.Text = fmt.Sprintf("it holds %s, which is connected from %s since %s", node, held.Remote,
		held.Since.Format(time.RFC3339))
	if held.Kind == "agent" {
		hop.Text += "; the node runs a konnectivity agent"
	}
	return hop
}

// edgeHops returns the hops behind the hop of holder: reaching the edge, and the steps of the edge.
func (s *Server) edgeHops(ctx context.Context, node tunnel.NodeName, target string) []Hop {
	at := "node " + string(node)
	began := time.Now()
	traced, err := trace.Target(ctx, s.cfg.Dialer, node, target)
	switch {
	case errors.Is(err, trace.ErrOld):
		hops := []Hop{{
			At: at, Step: StepReach, Seconds: time.Since(began).Seconds(),
			Text: "it is an edge older than tunnel trace, or a konnectivity agent: its steps cannot be told apart",
		}}
		trip, failure := ping.Target(ctx, s.cfg.Dialer, node, target)
		hop := Hop{At: at, Step: StepDial, Text: "connected to " + target, Seconds: trip.Open.Seconds()}
		if failure != nil {
			hop.Text, hop.Code = failure.Error(), tunnel.CodeOf(failure).String()
		}
		return append(hops, hop)
	case err != nil:
		return []Hop{{
			At: at, Step: StepReach, Text: err.Error(), Seconds: time.Since(began).Seconds(), Code: tunnel.CodeOf(err).String(),
		}}
	}
	hops := []Hop{{At: at, Step: StepReach, Text: "it answers through the tunnel", Seconds: traced.Open.Seconds()}}
	for _, step := range traced.Report.Steps {
		hops = append(hops, Hop{At: at, Step: step.Step, Text: step.Text, Seconds: step.Seconds, Code: step.Code})
	}
	return hops
}

// next returns what to do about the refusal of a hop; "" if there is none.
func next(hop *Hop, node string) string {
	if hop.Code == "" {
		return ""
	}
	byCode := map[string]string{ // the same advice for every step
		tunnel.Overloaded.String(): "a limit is reached: see docs/limits.md, and tunnel status",
		tunnel.Draining.String():   "the edge or the cloud is about to stop: try again in half a minute",
		tunnel.Gone.String():       "the session has just ended: try again, then tunnel ls " + node,
		tunnel.NoSuchNode.String(): "see tunnel ls " + node + " -o wide; on the node, tunnel status and the log of its edge",
	}
	if text, ok := byCode[hop.Code]; ok {
		return text
	}
	switch hop.Step + " " + hop.Code {
	case trace.StepResolve + " unreachable":
		return "the edge asks the resolver of its machine: look the name up there, and see the log of the edge"
	case trace.StepAllow + " denied", StepDial + " denied":
		return "if callers may reach the target, add it to allow in [mode.edge] on the node, and run tunnel reload there"
	case trace.StepConnect + " refused", StepDial + " refused":
		return "nothing listens at the target: start the program there, or correct the port"
	case trace.StepConnect + " timeout", StepDial + " timeout":
		return "the target does not answer: it is off, or a firewall between the node and the target drops packets"
	case trace.StepConnect + " unreachable", StepDial + " unreachable":
		return "the node has no way to the target: look at the routes and the firewall of the node"
	case StepReach + " timeout":
		return "the node has a session and does not answer: see tunnel ping " + node + ", and the log of its edge"
	}
	return "see the log of the edge on the node"
}
