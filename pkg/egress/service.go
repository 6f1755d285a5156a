package egress

import (
	"context"
	"net"
	"net/netip"
	"slices"

	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// maxEndpoints is how many endpoints of a Service one dial tries. Their order is random, so another dial tries others.
const maxEndpoints = 5

// connect opens the conn of o: to an endpoint if its address is of a Service, otherwise to the address itself.
//
// If the node of an endpoint cannot serve now (mayRetryElsewhere), or the cloud's own dial to the endpoint has failed,
// connect tries the next endpoint. If all fail and a node was at a limit, connect waits for room at that node. If none
// of the nodes is connected, connect dials the ClusterIP itself: the strategies find a node, whose kube-proxy may reach
// the endpoints.
func (c *chooser) connect(ctx context.Context, o *opening) (net.Conn, error) {
	var endpoints []Endpoint
	if c.services != nil {
		var err error
		if endpoints, err = c.services(o.addr); err != nil {
			return nil, err
		}
	}
	if len(endpoints) == 0 {
		return c.dial(ctx, o.addr, o, wait)
	}
	ctx, cancel := context.WithTimeout(ctx, konnectivity.DialTimeout)
	defer cancel()
	var conn net.Conn
	var err error
	full, away := "", true
	for _, e := range endpoints[:min(len(endpoints), maxEndpoints)] {
		o.endpoint = e.Addr
		own := e.Dial != nil && !c.elsewhere(e)
		if own {
			o.node = ""
			conn, err = e.Dial(ctx)
		} else {
			conn, err = c.dial(ctx, e.Addr, o, noWait)
		}
		code := tunnel.CodeOf(err)
		again := mayRetryElsewhere(err) || own && (code == tunnel.Timeout || code == tunnel.Unreachable)
		if err == nil || ctx.Err() != nil || !again {
			return conn, err
		}
		if full == "" && code == tunnel.Overloaded {
			full = e.Addr
		}
		away = away && code == tunnel.NoSuchNode
	}
	host, _, splitErr := net.SplitHostPort(o.addr)
	_, addrErr := netip.ParseAddr(host)
	switch {
	case full != "":
		o.endpoint = full
		return c.dial(ctx, full, o, wait)
	case away && splitErr == nil && addrErr == nil:
		o.endpoint = ""
		return c.dial(ctx, o.addr, o, wait)
	}
	return nil, err
}

// elsewhere reports whether the table has the address of an endpoint at a node other than the endpoint's node.
func (c *chooser) elsewhere(e Endpoint) bool {
	host, _, err := net.SplitHostPort(e.Addr)
	t := c.table.Load()
	if err != nil || t == nil {
		return true
	}
	for _, n := range slices.Concat(t.host(host), t.narrowestNetwork(host)) {
		if n != e.Node {
			return true
		}
	}
	return false
}
