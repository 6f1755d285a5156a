package dns

import (
	"net/netip"
	"slices"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// goneGrace is how long the line of a node stays after the node has disconnected. If the node
	// comes back meanwhile, the file does not change. An edge needs less time to reconnect.
	goneGrace = 30 * time.Second

	// sizeLimit is the size in bytes from which on no nodes are added. The rest up to fullSize is
	// for other writers, and for the lines of nodes that move to another replica.
	sizeLimit = 900 << 10

	// fullSize is the limit of Kubernetes for the size of all values of a ConfigMap together, in
	// bytes (ValidateConfigMap, pkg/apis/core/validation).
	fullSize = 1 << 20
)

// A ledger decides which lines of the Writer the file shall have. It remembers only one thing: for
// lines whose node no replica holds, since when.
type ledger struct {
	gone map[Entry]time.Time // since when no replica holds the node of an entry
}

// facts are the input of a decision.
type facts struct {
	truth Truth
	names Names                 // nil: every name may be published; else the names are known
	alive func(netip.Addr) bool // whether a replica that truth does not cover may still exist
	now   time.Time
}

// decision is the content that the file shall have, and numbers for the operator.
type decision struct {
	hosts    Hosts
	omitted  int       // nodes without a line because the file is full
	shadowed int       // nodes without a line of the Writer because another writer has written one
	withheld int       // connected nodes that may not be published
	again    time.Time // when the same facts will lead to another decision; zero: never
}

// decide returns the content that the file shall have. file is its present content, and others the
// size in bytes of the other values of the ConfigMap. Foreign lines stay unchanged.
func (l *ledger) decide(file Hosts, others int, f facts) decision {
	d := decision{hosts: Hosts{Foreign: file.Foreign}}
	foreign := readNames(file.Foreign)
	wanted := make(map[tunnel.NodeName][]netip.Addr)
	var order []tunnel.NodeName
	for _, r := range f.truth.Records() {
		switch _, taken := foreign[string(r.Node)]; {
		case !f.may(r.Node):
			d.withheld++
		case taken:
			d.shadowed++
		default:
			wanted[r.Node] = r.Addrs
			order = append(order, r.Node)
		}
	}

	had := make(map[tunnel.NodeName]bool, len(file.Own)) // nodes that have a line now
	gone := make(map[Entry]time.Time)
	for _, e := range file.Own {
		had[e.Node] = true
		_, taken := foreign[string(e.Node)]
		addrs, held := wanted[e.Node]
		switch {
		case taken || !f.may(e.Node):
			continue
		case held:
			if !slices.Contains(addrs, e.Addr) {
				continue // the node has moved to another replica
			}
		case !f.truth.Hears(e.Addr) && f.alive(e.Addr):
			// The replica at e.Addr may still hold the node, but does not tell this replica: keep the line.
		default:
			since, ok := l.gone[e]
			if !ok {
				since = f.now
			}
			if f.now.Sub(since) >= goneGrace {
				continue
			}
			gone[e] = since
			if end := since.Add(goneGrace); d.again.IsZero() || end.Before(d.again) {
				d.again = end
			}
		}
		d.hosts.Own = append(d.hosts.Own, e)
	}
	l.gone = gone
	l.add(&d, others, order, wanted, had)
	return d
}

// may reports whether the name n may be published.
func (f facts) may(n tunnel.NodeName) bool {
	if f.names == nil {
		return true
	}
	may, _ := f.names.May(n)
	return may
}

// add adds the missing entries of wanted while there is room. Nodes that have moved come first,
// since they had a line and must not lose it. New nodes come last.
func (l *ledger) add(
	d *decision, others int, order []tunnel.NodeName, wanted map[tunnel.NodeName][]netip.Addr,
	had map[tunnel.NodeName]bool,
) {
	size := others + len(d.hosts.Foreign) + 1
	there := make(map[Entry]bool, len(d.hosts.Own))
	for _, e := range d.hosts.Own {
		size += len(e.line())
		there[e] = true
	}
	for _, moved := range []bool{true, false} {
		limit := sizeLimit
		if moved {
			limit = fullSize
		}
		for _, n := range order {
			if had[n] != moved {
				continue
			}
			var missing []Entry
			more := 0
			for _, a := range wanted[n] {
				if e := (Entry{a, n}); !there[e] {
					missing = append(missing, e)
					more += len(e.line())
				}
			}
			if more > 0 && size+more > limit {
				d.omitted++
				continue
			}
			size += more
			d.hosts.Own = append(d.hosts.Own, missing...)
		}
	}
	slices.SortFunc(d.hosts.Own, Entry.compare)
}
