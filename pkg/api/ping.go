package api

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"tunnel.example/tunnel/pkg/ping"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Pinged is the answer of POST /v1/ping.
type Pinged struct {
	Node   string `json:"node"`
	Target string `json:"target,omitempty"`
	// OpenSeconds is the time from the request until the conn is open: one round trip to the edge. With a target, it
	// includes the time in which the edge dials the target.
	OpenSeconds float64 `json:"open_seconds"`
	// EchoSeconds is the time in which a few bytes travel to the edge and back; 0 with a target.
	EchoSeconds float64 `json:"echo_seconds,omitempty"`
	// HeartbeatSeconds is the round trip of the session's last heartbeat; 0 if another replica has the session.
	HeartbeatSeconds float64 `json:"heartbeat_seconds,omitempty"`
	// Old is true if the edge is too old to answer pings. Then only HeartbeatSeconds is set.
	Old bool `json:"old,omitempty"`
}

// ping answers POST /v1/ping.
func (s *Server) ping(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	node, err := tunnel.ParseNodeName(query.Get("node"))
	target := query.Get("target")
	if err == nil && target != "" {
		_, _, err = net.SplitHostPort(target)
	}
	if err != nil {
		Refuse(w, http.StatusBadRequest, "", err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), pingTimeout)
	defer cancel()
	out := Pinged{Node: string(node), Target: target, HeartbeatSeconds: s.heartbeat(node)}
	var trip ping.Trip
	if target == "" {
		trip, err = ping.Node(ctx, s.cfg.Dialer, node)
	} else {
		trip, err = ping.Target(ctx, s.cfg.Dialer, node, target)
	}
	switch {
	case errors.Is(err, ping.ErrOld) && out.HeartbeatSeconds > 0:
		out.Old = true
	case err != nil:
		Refuse(w, http.StatusBadGateway, tunnel.CodeOf(err).String(), err)
		return
	}
	out.OpenSeconds, out.EchoSeconds = trip.Open.Seconds(), trip.Echo.Seconds()
	Answer(w, &out)
}

// heartbeat returns the round trip of the last heartbeat of a node's session, in seconds. It returns 0 if this replica
// has no session of the node.
func (s *Server) heartbeat(node tunnel.NodeName) float64 {
	for _, of := range s.cfg.Sessions() {
		if of.Node == node {
			return time.Duration(of.RTT.Load()).Seconds()
		}
	}
	return 0
}
