package https

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"tunnel/pkg/tunnel"
)

// dialTimeout bounds the dialling of a target, its TLS handshake included. It is
// below the 15 s after which a caller must know that its node does not answer.
const dialTimeout = 10 * time.Second

// decision is what becomes of a connection.
type decision struct {
	what   Mode            // Auto: it is closed
	node   tunnel.NodeName // Passthrough: to here
	reason string          // closed: why, and what to do
	alert  byte            // closed: how the caller is told
}

// decide says what becomes of a connection that started with h.
func (f *FrontDoor) decide(h hello) decision {
	if f.cfg.Mode == Terminate {
		return decision{what: Terminate}
	}
	node, err := tunnel.ParseNodeName(h.serverName)
	if err == nil && f.nodes.Holds(node) {
		return decision{what: Passthrough, node: node}
	}
	switch {
	case f.serverTLS != nil:
		return decision{what: Terminate}
	case f.cfg.Mode == Passthrough && h.serverName == "":
		return decision{reason: `it has no SNI, and tls = "passthrough" in [mode.cloud.https] terminates nothing`, alert: alertMissingExtension}
	case h.serverName == "":
		return decision{reason: "it has no SNI and there is nothing to terminate it with: set clientca, cert and key in [mode.cloud.https], or give kube-apiserver --kubelet-certificate-authority", alert: alertMissingExtension}
	default:
		f.cfg.Counters.Refuse(tunnel.NoSuchNode) // nobody dials, so nobody else counts it
		return decision{reason: fmt.Sprintf("its SNI %q is not a connected node", h.serverName), alert: alertUnrecognizedName}
	}
}

// pass splices c to a target of node. An error means that nothing has been done with
// c; otherwise it has ended.
func (f *FrontDoor) pass(live context.Context, c *clientConn, node tunnel.NodeName, target string, log *slog.Logger) error {
	start := time.Now()
	ctx, cancel := context.WithTimeout(live, dialTimeout)
	defer cancel()
	conn, err := f.dialer.Dial(ctx, tunnel.Request{
		Node:     node,
		Category: Name,
		Network:  "tcp",
		Addr:     target,
		Caller:   c.RemoteAddr().String(),
	})
	if err != nil {
		return dialError(ctx, err)
	}
	in, out, err := tunnel.Splice(live, c, conn)
	log.Debug("https connection passed through", "node", string(node), "bytes", in+out, "dur", time.Since(start), "err", err)
	return nil
}

// dialError makes a timeout of our own a refusal like that of the other side.
func dialError(ctx context.Context, err error) error {
	if ctx.Err() == context.DeadlineExceeded {
		return tunnel.Refusef(tunnel.Timeout, "no answer within %v: %v", dialTimeout, err)
	}
	return err
}
