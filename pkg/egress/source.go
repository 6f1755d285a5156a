package egress

import (
	"log/slog"
	"slices"

	"tunnel/pkg/konnectivity"
	"tunnel/pkg/tunnel"
)

// Claims is what edges say that they reach.
type Claims interface {
	// Reach returns it in Konnectivity's form, for the nodes that say anything.
	Reach() map[tunnel.NodeName]string
	// Connected returns the nodes that are connected.
	Connected() []tunnel.NodeName
	// Changed returns a channel that is closed when a node has come or gone.
	Changed() <-chan struct{}
}

// Believed is a source that believes what edges say, beside their names. It is for where
// nobody else knows better: an edge that lies attracts what is meant for others. Only the
// name of another node that is connected is not believed.
func Believed(c Claims, log *slog.Logger) Source {
	return &believed{c, log.With("module", name), new(tunnel.Limiter)}
}

type believed struct {
	Claims
	log   *slog.Logger
	wrong *tunnel.Limiter
}

// Known implements Source.
func (b *believed) Known() bool { return true }

// Identifiers implements Source.
func (b *believed) Identifiers() map[tunnel.NodeName]konnectivity.Identifiers {
	all := make(map[tunnel.NodeName]konnectivity.Identifiers)
	said := b.Reach()
	connected := make(map[tunnel.NodeName]bool)
	for _, n := range b.Connected() {
		connected[n] = true
	}
	for n := range connected {
		id, err := konnectivity.ParseIdentifiers(said[n])
		if err != nil {
			// Its own start-up has said so; only another program gets here.
			if skipped, ok := b.wrong.Allow(); ok {
				b.log.Warn("what an edge says it reaches does not count", "node", n, "err", err, "skipped", skipped)
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
