package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Nodes that share a network, such as a LAN behind one NAT, can send packets to each other's pods without the tunnel.
// An edge that is configured for it asks the cloud for its neighbours:
//
//   - The edge tells the cloud the networks of its network interfaces, which Linux calls links.
//   - The cloud answers with the other nodes that have an address in one of these networks, now and after each change.
//     It ignores networks that are wider than a LAN, and networks in which the edge's own Node has no address. So an
//     edge learns of no nodes but its neighbours.

// Types of messages about neighbours. typeLinks holds an edge's networks, in the same form as typeNetworks. The data of
// typeNeighbours is the protobuf message { repeated Neighbour neighbour = 1; }, with Neighbour { repeated string
// address = 1; repeated string cidr = 2; }.
const (
	typeLinks      = "links"
	typeNeighbours = "neighbours"
)

// maxNeighbours and maxNeighbourBytes bound the neighbours in one message. A session takes messages of 64 KiB. If a
// node has more neighbours, those whose names sort last are left out.
const (
	maxNeighbours     = 1024
	maxNeighbourBytes = 60 << 10
)

// The shortest prefix of a network in which a node can have neighbours, in bits.
const (
	minLinkBits4 = 16 // IPv4
	minLinkBits6 = 48 // IPv6
)

// Neighbour is another node with an address in one of an edge's networks.
type Neighbour struct {
	Addresses []netip.Addr   // its addresses that are in networks of the edge's machine
	Networks  []netip.Prefix // the networks of its pods
}

func (n Neighbour) equal(other Neighbour) bool {
	return slices.Equal(n.Addresses, other.Addresses) && slices.Equal(n.Networks, other.Networks)
}

// encodeNeighbours returns the data of a message with these neighbours.
func encodeNeighbours(all []Neighbour) []byte {
	var b []byte
	for _, n := range all {
		var one []byte
		for _, a := range n.Addresses {
			one = protowire.AppendString(protowire.AppendTag(one, 1, protowire.BytesType), a.String())
		}
		for _, p := range n.Networks {
			one = protowire.AppendString(protowire.AppendTag(one, 2, protowire.BytesType), p.String())
		}
		if len(b)+len(one) > maxNeighbourBytes {
			break
		}
		b = protowire.AppendBytes(protowire.AppendTag(b, 1, protowire.BytesType), one)
	}
	return b
}

// decodeNeighbours reads the data of a message. Unknown fields are skipped, as protobuf requires.
func decodeNeighbours(b []byte) ([]Neighbour, error) {
	var all []Neighbour
	err := fields(b, func(number protowire.Number, one []byte) error {
		if number != 1 {
			return nil
		}
		if len(all) == maxNeighbours {
			return fmt.Errorf("more than %d", maxNeighbours)
		}
		all = append(all, Neighbour{})
		last := &all[len(all)-1]
		return fields(one, func(number protowire.Number, text []byte) error {
			switch number {
			case 1:
				a, err := netip.ParseAddr(string(text))
				if err != nil || a.Zone() != "" {
					return fmt.Errorf("%q is no address", text)
				}
				last.Addresses = append(last.Addresses, a)
			case 2:
				p, err := netip.ParsePrefix(string(text))
				if err != nil {
					return err
				}
				last.Networks = append(last.Networks, p)
			}
			if len(last.Addresses) > maxNetworks || len(last.Networks) > maxNetworks {
				return fmt.Errorf("more than %d addresses or networks of a node", maxNetworks)
			}
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("neighbours: %w", err)
	}
	return all, nil
}

var errNotProtobuf = errors.New("not a protobuf")

// fields calls f with each length-delimited field (text, bytes, message) of a protobuf message. It skips fields of
// other types, as protobuf requires for unknown fields.
func fields(b []byte, f func(number protowire.Number, data []byte) error) error {
	for len(b) > 0 {
		number, kind, size := protowire.ConsumeTag(b)
		if size < 0 {
			return errNotProtobuf
		}
		b = b[size:]
		var data []byte
		if kind == protowire.BytesType {
			data, size = protowire.ConsumeBytes(b)
		} else {
			size = protowire.ConsumeFieldValue(number, kind, b)
		}
		if size < 0 {
			return errNotProtobuf
		}
		b = b[size:]
		if kind != protowire.BytesType {
			continue
		}
		if err := f(number, data); err != nil {
			return err
		}
	}
	return nil
}

// askers knows which edges of this replica ask for their neighbours: by session, the networks that the edge has told.
type askers struct {
	mu      sync.Mutex // guards the following
	links   map[*tunnel.Session][]netip.Prefix
	changed tunnel.Change
}

// setLinks handles an edge's message with the networks of its interfaces.
func (a *askers) setLinks(_ context.Context, in *tunnel.Incoming) error {
	all, err := decodeNetworks(in.Data)
	if err != nil {
		return fmt.Errorf("links: %w", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.links == nil {
		a.links = make(map[*tunnel.Session][]netip.Prefix)
	}
	if before, ok := a.links[in.From]; ok && slices.Equal(before, all) {
		return nil
	}
	a.links[in.From] = all
	a.changed.Notify()
	return nil
}

// next returns a channel that is closed at the next message of an edge.
func (a *askers) next() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.changed.Next()
}

// all returns, by session, the networks that edges have told. It forgets the sessions that have ended.
func (a *askers) all() map[*tunnel.Session][]netip.Prefix {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.links, func(s *tunnel.Session, _ []netip.Prefix) bool { return tunnel.IsClosed(s.Done()) })
	return maps.Clone(a.links)
}

// Routes implements tunnel.Routed.
func (f *FrontDoor) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{typeLinks: func(ctx context.Context, in *tunnel.Incoming) error {
		if !f.cfg.Kubernetes {
			return nil // announceNeighbours, which forgets ended sessions, does not run
		}
		return f.askers.setLinks(ctx, in)
	}}
}

// announceNeighbours tells each edge that asks which neighbours it has, now and after each change, until ctx is done.
// Without Kubernetes it sends nothing, and edges keep the neighbours that they know.
func (f *FrontDoor) announceNeighbours(ctx context.Context) error {
	if !f.cfg.Kubernetes {
		<-ctx.Done()
		return nil
	}
	announced := make(map[*tunnel.Session][]Neighbour)
	for {
		sessionsChanged, reachChanged, asked := f.cfg.Sessions.Changed(), f.chooser.source.Changed(), f.askers.next()
		if f.chooser.source.Known() {
			//nolint:errcheck // the next change tries again
			f.guard("edges do not learn of their neighbours", func() error {
				announced = f.announceNeighboursOnce(announced)
				return nil
			})
		}
		select {
		case <-sessionsChanged:
		case <-reachChanged:
		case <-asked:
		case <-ctx.Done():
			return nil
		}
		select {
		case <-time.After(neighboursPause):
		case <-ctx.Done():
			return nil
		}
	}
}

// neighboursPause is the least time between two looks at all neighbours: an edge decides how often it asks.
const neighboursPause = time.Second

// announceNeighboursOnce sends its neighbours to each session for which they differ from those in announced. It returns
// the neighbours that each asking session now knows.
func (f *FrontDoor) announceNeighboursOnce(announced map[*tunnel.Session][]Neighbour) map[*tunnel.Session][]Neighbour {
	now := make(map[*tunnel.Session][]Neighbour)
	asking := f.askers.all()
	if len(asking) == 0 {
		return now
	}
	table := newLANs(f.chooser.source.Identifiers())
	for s, links := range asking {
		now[s] = table.neighbours(s.Node, links)
		if before, ok := announced[s]; !ok || !slices.EqualFunc(before, now[s], Neighbour.equal) {
			m := &tunnel.Message{Category: name, Type: typeNeighbours, Data: encodeNeighbours(now[s])}
			s.Send(m) //nolint:errcheck // it fails only if the session has ended
		}
	}
	return now
}

// lans finds the nodes with an address in a network.
type lans struct {
	owners []owner // sorted by address
	// networks has the networks of each node's pods. It leaves out a network that overlaps one of another node: a
	// kubelet may claim any network.
	networks map[tunnel.NodeName][]netip.Prefix
}

type owner struct {
	addr netip.Addr
	node tunnel.NodeName
}

func newLANs(nodes map[tunnel.NodeName]konnectivity.Identifiers) *lans {
	l := &lans{networks: make(map[tunnel.NodeName][]netip.Prefix, len(nodes))}
	for node, id := range nodes {
		for _, host := range id.Hosts {
			if a, err := netip.ParseAddr(host); err == nil {
				l.owners = append(l.owners, owner{a.WithZone("").Unmap(), node})
			}
		}
	}
	shared := sharedNetworks(nodes)
	for node, id := range nodes {
		l.networks[node] = slices.DeleteFunc(slices.Clone(id.Networks), func(p netip.Prefix) bool { return shared[p] })
	}
	slices.SortFunc(l.owners, func(a, b owner) int {
		if c := a.addr.Compare(b.addr); c != 0 {
			return c
		}
		return cmp.Compare(a.node, b.node)
	})
	return l
}

// sharedNetworks returns the networks of pods that overlap the network of another node.
func sharedNetworks(nodes map[tunnel.NodeName]konnectivity.Identifiers) map[netip.Prefix]bool {
	type claim struct {
		network netip.Prefix
		node    tunnel.NodeName
	}
	var all []claim
	for node, id := range nodes {
		for _, p := range id.Networks {
			all = append(all, claim{p, node})
		}
	}
	slices.SortFunc(all, func(a, b claim) int { // wide networks come before those inside them
		return cmp.Or(a.network.Addr().Compare(b.network.Addr()), cmp.Compare(a.network.Bits(), b.network.Bits()),
			cmp.Compare(a.node, b.node))
	})
	shared := make(map[netip.Prefix]bool)
	var around []claim // networks that hold the current address, the widest first
	for _, c := range all {
		for len(around) > 0 && !around[len(around)-1].network.Overlaps(c.network) {
			around = around[:len(around)-1]
		}
		for _, a := range around {
			if a.node != c.node {
				shared[a.network], shared[c.network] = true, true
			}
		}
		around = append(around, c)
	}
	return shared
}

// neighbours returns the other nodes that have networks of pods, and an address in one of the networks in links. It
// ignores a network in which node itself has no address, and an address that two nodes have. The result is sorted by
// node name.
func (l *lans) neighbours(node tunnel.NodeName, links []netip.Prefix) []Neighbour {
	found := make(map[tunnel.NodeName]*Neighbour)
	for _, link := range links {
		if link.Addr().Is4() && link.Bits() < minLinkBits4 || link.Addr().Is6() && link.Bits() < minLinkBits6 {
			continue
		}
		in := l.in(link)
		if !slices.ContainsFunc(in, func(o owner) bool { return o.node == node }) {
			continue
		}
		for i, o := range in {
			networks := l.networks[o.node]
			twice := i > 0 && in[i-1].addr == o.addr || i+1 < len(in) && in[i+1].addr == o.addr
			if o.node == node || twice || len(networks) == 0 {
				continue
			}
			if found[o.node] == nil {
				found[o.node] = &Neighbour{Networks: networks[:min(len(networks), maxNetworks)]}
			}
			n := found[o.node]
			if !slices.Contains(n.Addresses, o.addr) && len(n.Addresses) < maxNetworks {
				n.Addresses = append(n.Addresses, o.addr)
			}
		}
	}
	names := slices.Sorted(maps.Keys(found))
	var all []Neighbour
	for _, name := range names[:min(len(names), maxNeighbours)] {
		all = append(all, *found[name])
	}
	return all
}

// in returns the owners of addresses in a network.
func (l *lans) in(network netip.Prefix) []owner {
	first, _ := slices.BinarySearchFunc(l.owners, network.Masked().Addr(), func(o owner, a netip.Addr) int {
		return o.addr.Compare(a)
	})
	last := first
	for last < len(l.owners) && network.Contains(l.owners[last].addr) {
		last++
	}
	return l.owners[first:last]
}

// asker is the part of an edge that asks for its neighbours.
type asker struct {
	// Set once, before Run.
	// links returns the networks of this machine's network interfaces; ok is false if it cannot find out.
	links func() (networks []netip.Prefix, ok bool)
	tell  func([]Neighbour) // called with each answer; nil: the edge does not ask

	mu   sync.Mutex // guards the following
	told map[*tunnel.Session][]netip.Prefix
}

// linksInterval is how often an edge checks whether the networks of its interfaces have changed.
const linksInterval = 10 * time.Second

// ask sends the networks of this machine's interfaces over session s, unless it has sent the same networks over s
// before. The cloud answers with the neighbours.
func (a *asker) ask(s *tunnel.Session) {
	if a.tell == nil || s == nil {
		return
	}
	now, known := a.links()
	now = now[:min(len(now), maxNetworks)]
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.told == nil {
		a.told = make(map[*tunnel.Session][]netip.Prefix)
	}
	before, asked := a.told[s]
	switch {
	case !known && !asked:
		a.told[s] = []netip.Prefix{{}} // equal to no networks: run asks as soon as they are known
		return
	case !known, asked && slices.Equal(before, now): // what was told still counts
		return
	}
	a.told[s] = now
	s.Send(&tunnel.Message{Category: name, Type: typeLinks, //nolint:errcheck // it fails only if the session has ended
		Data: encodeNetworks(now)})
}

// run asks again over each session when the networks of the interfaces have changed, until ctx is done.
func (a *asker) run(ctx context.Context) {
	if a.tell == nil {
		<-ctx.Done()
		return
	}
	ticker := time.NewTicker(linksInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		for _, s := range a.live() {
			a.ask(s)
		}
	}
}

// live returns the live sessions over which the edge has asked. It forgets the ended ones.
func (a *asker) live() []*tunnel.Session {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.told, func(s *tunnel.Session, _ []netip.Prefix) bool { return tunnel.IsClosed(s.Done()) })
	return slices.Collect(maps.Keys(a.told))
}

// setNeighbours handles the cloud's message with the neighbours of this node.
func (a *asker) setNeighbours(_ context.Context, in *tunnel.Incoming) error {
	all, err := decodeNeighbours(in.Data)
	if err == nil && a.tell != nil {
		a.tell(all)
	}
	return err
}
