package egress

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// In a cluster an edge may dial the pods of its own node without any configuration. Both sides must agree:
//
//   - The cloud tells the edge the networks that Kubernetes has assigned to the pods of its node. So
//     the edge dials no containers that are not pods.
//   - The edge checks that its machine routes an address in these networks to its own containers. So a cloud
//     cannot reach the network around the edge.

// typeNetworks is the type of the message with the networks of an edge's pods. Its data is the protobuf
// message { repeated string cidr = 1; }.
const typeNetworks = "networks"

// maxNetworks bounds the networks in a message. A Node has one of each address family.
const maxNetworks = 16

// encodeNetworks returns the data of a message with these networks.
func encodeNetworks(all []netip.Prefix) []byte {
	var b []byte
	for _, p := range all {
		b = protowire.AppendString(protowire.AppendTag(b, 1, protowire.BytesType), p.String())
	}
	return b
}

// decodeNetworks reads the data of a message.
func decodeNetworks(b []byte) ([]netip.Prefix, error) {
	var all []netip.Prefix
	err := fields(b, func(number protowire.Number, cidr []byte) error {
		if number != 1 {
			return nil
		}
		if len(all) == maxNetworks {
			return fmt.Errorf("more than %d", maxNetworks)
		}
		p, err := netip.ParsePrefix(string(cidr))
		all = append(all, p)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("networks: %w", err)
	}
	return all, nil
}

// Sessions are the sessions of nodes that are connected to this replica.
type Sessions interface {
	Sessions() []*tunnel.Session
	// Changed returns a channel that is closed at the next change.
	Changed() <-chan struct{}
}

// announceNetworks tells every edge the networks of its pods, now and after each change, until ctx is done.
// The networks come from Kubernetes, never from the identifiers that edges send: otherwise a change of its
// identifiers would change what an edge permits. An edge without networks gets an empty list once, since it
// remembers the networks of an earlier session.
func (f *FrontDoor) announceNetworks(ctx context.Context) error {
	announced := make(map[*tunnel.Session][]netip.Prefix)
	for {
		sessionsChanged, reachChanged := f.cfg.Sessions.Changed(), f.chooser.source.Changed()
		if f.chooser.source.Known() {
			//nolint:errcheck // the next change tries again
			f.guard("edges do not learn the networks of their pods", func() error {
				announced = f.announceOnce(announced)
				return nil
			})
		}
		select {
		case <-sessionsChanged:
		case <-reachChanged:
		case <-ctx.Done():
			return nil
		}
		select {
		case <-time.After(settle): // many changes cost one look at all sessions
		case <-ctx.Done():
			return nil
		}
	}
}

// announceOnce sends its networks to each session for which they differ from those in announced. It returns the
// networks that each live session now knows.
func (f *FrontDoor) announceOnce(announced map[*tunnel.Session][]netip.Prefix) map[*tunnel.Session][]netip.Prefix {
	var all map[tunnel.NodeName]konnectivity.Identifiers
	if f.cfg.Kubernetes {
		all = f.chooser.source.Identifiers()
	}
	live := make(map[*tunnel.Session][]netip.Prefix)
	for _, s := range f.cfg.Sessions.Sessions() {
		now := all[s.Node].Networks
		if before, ok := announced[s]; !ok || !slices.Equal(before, now) {
			m := &tunnel.Message{Category: name, Type: typeNetworks, Data: encodeNetworks(now)}
			s.Send(m) //nolint:errcheck // it fails only if the session has ended
		}
		live[s] = now
	}
	return live
}

// pods decides at an edge which addresses are pods of its node.
type pods struct {
	networks atomic.Pointer[[]netip.Prefix] // from the latest message of the cloud; nil: none yet
	routes   func() ([]route, error)        // reads the routing tables; tests replace it
	devices  devices                        // knows which devices lead to containers
	tell     func([]netip.Prefix)           // gets the networks from each message of the cloud; nil: not called
	log      *slog.Logger
	warnings tunnel.Limiter // limits warnings about routing tables that cannot be read
}

// setNetworks handles the cloud's message with the networks of this node's pods.
func (p *pods) setNetworks(_ context.Context, in *tunnel.Incoming) error {
	all, err := decodeNetworks(in.Data)
	if err != nil {
		return err
	}
	p.networks.Store(&all)
	if p.tell != nil {
		p.tell(all)
	}
	return nil
}

// has reports whether a is the address of a pod of this node.
func (p *pods) has(a netip.Addr) bool {
	networks := p.networks.Load()
	return networks != nil && slices.ContainsFunc(*networks, func(n netip.Prefix) bool { return n.Contains(a) }) &&
		p.inContainer(a)
}

// inContainer reports whether packets to a go to a container of this machine, and nowhere else.
//
// The routes are read at each call: a container that starts or ends changes the routes, and nothing
// tells the edge. If the routing tables cannot be read, inContainer returns false.
func (p *pods) inContainer(a netip.Addr) bool {
	routes, err := p.routes()
	if err != nil {
		if skipped, ok := p.warnings.Allow(); ok {
			p.log.Warn("the routes of this machine cannot be read, so only `allow` permits pods", "err", err, "skipped", skipped)
		}
		return false
	}
	return routedToContainers(a, routes, p.devices.linkLeadsToContainers)
}

// route is an entry of the kernel's routing tables.
type route struct {
	to     netip.Prefix // the destination
	direct bool         // without a gateway, or the gateway is an address of this machine
	link   int          // the index of the device; 0: the route has none
}

// routedToContainers reports whether packets to a stay on this machine. They do if the narrowest
// route is direct, inside returns true for its device, and the device has no default route out of the
// machine.
func routedToContainers(a netip.Addr, routes []route, inside func(link int) bool) bool {
	best := -1 // index of the narrowest route to a
	for i, r := range routes {
		if r.to.Contains(a) && (best < 0 || r.to.Bits() > routes[best].to.Bits()) {
			best = i
		}
	}
	if best < 0 || !routes[best].direct {
		return false
	}
	out := slices.ContainsFunc(routes, func(r route) bool { return r.to.Bits() == 0 && r.link == routes[best].link })
	return !out && inside(routes[best].link)
}

// devices knows the kinds of network devices of this machine.
type devices struct {
	sysfs  string                     // the folder with an entry for each device
	name   func(link int) string      // returns the name of the device with an index; "" for an unknown device
	driver func(device string) string // returns the driver of a device; "" for an unknown device
}

func systemDevices() devices {
	return devices{sysfs: "/sys/class/net", name: nameOf, driver: driverOf}
}

// linkLeadsToContainers is leadsToContainers for the device with that index.
func (d devices) linkLeadsToContainers(link int) bool { return d.leadsToContainers(d.name(link)) }

// leadsToContainers reports whether a device leads to containers only. It does if it is one end of a
// virtual pair, or a bridge all of whose ports are ends of virtual pairs. Every other device may lead
// out of the machine: a VLAN, a bond, a VPN, a bridge of virtual machines.
func (d devices) leadsToContainers(device string) bool {
	isPair := func(device string) bool {
		driver := d.driver(device)
		return driver == "veth" || driver == "netkit"
	}
	if isPair(device) {
		return true
	}
	if d.driver(device) != "bridge" {
		return false
	}
	ports, err := os.ReadDir(filepath.Join(d.sysfs, device, "brif"))
	return err == nil && !slices.ContainsFunc(ports, func(p os.DirEntry) bool { return !isPair(p.Name()) })
}
