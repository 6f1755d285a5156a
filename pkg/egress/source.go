package egress

import (
	"log/slog"
	"slices"

	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Claims are the identifiers that edges send about themselves.
type Claims interface {
	// Reach returns the identifiers of nodes that sent some, in the form of konnectivity.ParseIdentifiers.
	Reach() map[tunnel.NodeName]string
	// Connected returns the connected nodes.
	Connected() []tunnel.NodeName
	// Changed returns a channel that is closed when a node has connected or left.
	Changed() <-chan struct{}
}

// Believed returns a source that trusts the claims of edges. A node's name is always its own identifier, and no
// other node may claim this name while the node is connected. Every other claim is accepted, so an edge that
// lies attracts the traffic of other nodes. Use Believed only where no better source exists.
func Believed(c Claims, log *slog.Logger) Source {
	return &believed{c, log.With("module", name), new(tunnel.Limiter)}
}

type believed struct {
	Claims
	log   *slog.Logger
	wrong *tunnel.Limiter // limits log lines about wrong claims
}

// Known implements Source.
func (b *believed) Known() bool { return true }

// Identifiers implements Source.
func (b *believed) Identifiers() map[tunnel.NodeName]konnectivity.Identifiers {
	all := make(map[tunnel.NodeName]konnectivity.Identifiers)
	declared := b.Reach()
	connected := make(map[tunnel.NodeName]bool)
	for _, n := range b.Connected() {
		connected[n] = true
	}
	for n := range connected {
		id, err := konnectivity.ParseIdentifiers(declared[n])
		if err != nil {
			// An edge checks its identifiers at start, so another program has sent these.
			if skipped, ok := b.wrong.Allow(); ok {
				b.log.Warn("the identifiers of an edge are malformed, and ignored", "node", n, "err", err, "skipped", skipped)
			}
		}
		id.Hosts = slices.DeleteFunc(id.Hosts, func(h string) bool {
			other := tunnel.NodeName(canonical(h))
			if connected[other] && other != n {
				if skipped, ok := b.wrong.Allow(); ok {
					b.log.Warn("an edge claims the name of another node", "node", n, "name", other, "skipped", skipped)
				}
			}
			return connected[other]
		})
		id.Hosts = append(id.Hosts, string(n))
		all[n] = id
	}
	return all
}
