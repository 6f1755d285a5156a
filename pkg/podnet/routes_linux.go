package podnet

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"tunnel.example/tunnel/pkg/cni"
)

// Neighbour is another node with an address in a network of this machine's network interfaces.
type Neighbour struct {
	Addresses []netip.Addr   `json:"addresses"`
	Networks  []netip.Prefix `json:"networks"` // the networks of its pods
}

func (n Neighbour) equal(other Neighbour) bool {
	return slices.Equal(n.Addresses, other.Addresses) && slices.Equal(n.Networks, other.Networks)
}

// neighboursFile keeps the last neighbours for a start without the cloud. It is beside the network configuration.
// Runtimes do not read it: they read only *.conf, *.conflist and *.json.
const neighboursFile = "10-tunnel.neighbours"

// link is one network of a network interface of this machine.
type link struct {
	index   int          // the index of the interface
	own     netip.Addr   // the address of this machine
	network netip.Prefix // masked
	bridge  bool         // it is the bridge of this node's pods
}

// takes reports whether packets to a network leave by the link although there is a route to the network. The kernel
// prefers the longest prefix. If both prefixes are equally long, it prefers the link.
func (l link) takes(network netip.Prefix) bool {
	return l.network.Overlaps(network) && l.network.Bits() >= network.Bits()
}

// route leads to the pods of a neighbour.
type route struct {
	to   netip.Prefix
	by   netip.Addr // the address of the neighbour
	link int        // the index of the network interface
}

// SetNeighbours sets the other nodes that have an address in one of Links. Without Config.Routes it changes nothing.
func (n *Node) SetNeighbours(all []Neighbour) {
	if !n.cfg.Routes {
		return
	}
	n.mu.Lock()
	changed := !slices.EqualFunc(n.neighbours, all, Neighbour.equal)
	n.neighbours, n.told = slices.Clone(all), true
	n.mu.Unlock()
	if changed {
		n.log.Info("the cloud has told the neighbours of this node", "nodes", len(all))
		n.wakeUp()
	}
}

// Links returns the networks of this machine's network interfaces, without the network of pods. If it cannot find out,
// ok is false.
func (n *Node) Links() (networks []netip.Prefix, ok bool) {
	all, err := n.kernel.links(cni.DefaultBridge)
	if err != nil {
		n.log.Warn("the links of this machine cannot be read, so routes to other nodes' pods stay as they are", "err", err)
		return nil, false
	}
	for _, l := range all {
		if !l.bridge && !slices.Contains(networks, l.network) {
			networks = append(networks, l.network)
		}
	}
	return networks, true
}

// The shortest prefix of a network of pods that comes from the cloud, in bits. The cloud accepts no other networks of
// pods. A larger one would lead packets for other machines to pods.
const (
	minRouteBits4 = 16 // IPv4
	minRouteBits6 = 48 // IPv6
)

func isTooLarge(p netip.Prefix) bool {
	if p.Addr().Is6() {
		return p.Bits() < minRouteBits6
	}
	return p.Bits() < minRouteBits4
}

// wantRoutes returns the routes that the kernel should have. wrong says why networks of neighbours get no route. With
// err, it is not known which routes the kernel should have.
func (n *Node) wantRoutes(conf *cni.Conf) (routes []route, wrong, err error) {
	n.mu.Lock()
	neighbours := n.neighbours
	n.mu.Unlock()
	if len(neighbours) == 0 {
		return nil, nil, nil
	}
	links, err := n.kernel.links(conf.Bridge)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the links of this machine: %w", err)
	}
	foreign, err := n.kernel.foreign(conf.Bridge)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the routes of this machine: %w", err)
	}
	var all []route
	for _, neighbour := range neighbours {
		for _, network := range neighbour.Networks {
			r, ok := routeTo(network.Masked(), neighbour.Addresses, links)
			if !ok {
				continue // a neighbour without this family, or on a link that has gone
			}
			if why := refuses(r, conf, links, foreign); why != "" {
				wrong = cmp.Or(wrong, fmt.Errorf("no route leads to %s by %s: %s", r.to, r.by, why))
				continue
			}
			all = append(all, r)
		}
	}
	for i, r := range all {
		overlaps := func(o route) bool { return o.to.Overlaps(r.to) }
		if slices.ContainsFunc(all[:i], overlaps) || slices.ContainsFunc(all[i+1:], overlaps) {
			wrong = cmp.Or(wrong, fmt.Errorf("no route leads to %s by %s: the network overlaps the pod network of another node",
				r.to, r.by))
			continue // a node could divert the traffic of another one, so neither gets a route
		}
		routes = append(routes, r)
	}
	return routes, wrong, nil
}

// routeTo returns the route to a network by one of the addresses: on the link with the narrowest network that has an
// address.
func routeTo(network netip.Prefix, by []netip.Addr, links []link) (best route, found bool) {
	bits := -1
	for _, addr := range by {
		if addr.Is4() != network.Addr().Is4() {
			continue
		}
		for _, l := range links {
			if !l.bridge && l.network.Contains(addr) && l.network.Bits() > bits {
				best, bits = route{to: network, by: addr, link: l.index}, l.network.Bits()
			}
		}
	}
	return best, bits >= 0
}

// refuses returns why a route must not be made; "": it may be made. Otherwise a cloud could divert the traffic of this
// machine.
func refuses(r route, conf *cni.Conf, links []link, foreign []netip.Prefix) string {
	hides := func(p netip.Prefix) bool { return p.Bits() >= r.to.Bits() && p.Overlaps(r.to) }
	other := slices.IndexFunc(foreign, hides)
	switch {
	case isTooLarge(r.to):
		return "the network is too large for pods of one node"
	case !r.to.Addr().IsGlobalUnicast():
		return "the network has no addresses of pods"
	case slices.ContainsFunc(conf.Subnets, r.to.Overlaps):
		return "the network overlaps a network of this node's pods"
	case slices.ContainsFunc(links, func(l link) bool { return l.bridge && l.takes(r.to) }):
		return "this node's pods had the network before: when no pod uses it any more, " +
			"remove its gateway from the bridge, or reboot the node"
	case slices.ContainsFunc(links, func(l link) bool { return !l.bridge && l.network.Overlaps(r.to) }):
		return "the network overlaps the network of a link of this machine"
	case slices.ContainsFunc(links, func(l link) bool { return l.own == r.by }):
		return "the address is this machine's own"
	case other >= 0:
		return fmt.Sprintf("another program has a route to %s: remove it, or switch routes off in [mode.edge.cni]",
			foreign[other])
	}
	return ""
}

// keepNeighbours writes the neighbours to the disk, for a start without the cloud. Without Config.Routes it removes the
// file.
func (n *Node) keepNeighbours() error {
	file := filepath.Join(n.cfg.ConfDir, neighboursFile)
	if !n.cfg.Routes {
		return remove(file)
	}
	n.mu.Lock()
	neighbours := n.neighbours
	n.mu.Unlock()
	old, err := os.ReadFile(file)
	if neighbours == nil && errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	data, marshalErr := json.Marshal(neighbours)
	if marshalErr != nil {
		return marshalErr
	}
	if err == nil && bytes.Equal(old, data) {
		return nil
	}
	err = os.MkdirAll(n.cfg.ConfDir, 0o755)
	if err == nil {
		err = replace(n.cfg.ConfDir, neighboursFile, data)
	}
	if err != nil {
		return fmt.Errorf("writing the neighbours of this node: %w", err)
	}
	return nil
}

// rememberNeighbours takes the neighbours from the file that an earlier run has written.
func (n *Node) rememberNeighbours() {
	if !n.cfg.Routes {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.told {
		return
	}
	data, err := os.ReadFile(filepath.Join(n.cfg.ConfDir, neighboursFile))
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		err = json.Unmarshal(data, &n.neighbours)
	}
	if err != nil {
		n.neighbours = nil
		n.log.Warn("the neighbours of an earlier run cannot be read; the cloud tells them again", "err", err)
	}
}
