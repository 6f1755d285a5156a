package dns

import (
	"net/netip"
	"slices"
	"time"

	"tunnel/pkg/tunnel"
)

const (
	// goneGrace is how long a node's line outlives the node: one that comes back within
	// it changes nothing in the file. It is longer than an edge takes to reconnect.
	goneGrace = 30 * time.Second

	// sizeLimit is where no more nodes are added. What is left up to fullSize is for
	// others, and for the lines of nodes that move.
	sizeLimit = 900 << 10

	// fullSize is what Kubernetes lets all values of a ConfigMap take together
	// (ValidateConfigMap, pkg/apis/core/validation).
	fullSize = 1 << 20
)

// A ledger decides which lines of ours the file holds. All it remembers is since when
// it has missed what.
type ledger struct {
	gone map[Entry]time.Time // entries of nodes that nobody holds; since when
}

// facts are what a decision is made from.
type facts struct {
	truth Truth
	names Names                 // nil: every name may appear; else they are known
	alive func(netip.Addr) bool // whether a replica that the truth does not hear may still live
	now   time.Time
}

// decision is the file as it should be, and what is to be said about it.
type decision struct {
	hosts    Hosts
	omitted  int       // nodes that have no line because the file is full
	shadowed int       // nodes that have no line of ours because somebody else wrote one
	withheld int       // nodes that are held and may not appear
	again    time.Time // when the same facts would lead to another decision; zero: never
}

// decide returns what the file should hold, given what it holds and how many bytes
// there are beside it. What is foreign stays as it is.
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

	had := make(map[tunnel.NodeName]bool, len(file.Own)) // nodes that have had a line
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
				continue // another replica has it now
			}
		case !f.truth.Hears(e.Addr) && f.alive(e.Addr):
			// Its replica may hold it still: not for us to say.
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

func (f facts) may(n tunnel.NodeName) bool {
	if f.names == nil {
		return true
	}
	may, _ := f.names.May(n)
	return may
}

// add adds what is wanted and not there, while there is room: first the nodes that have
// moved, since they had a line before and are not to lose it, then the new ones.
func (l *ledger) add(d *decision, others int, order []tunnel.NodeName, wanted map[tunnel.NodeName][]netip.Addr, had map[tunnel.NodeName]bool) {
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
