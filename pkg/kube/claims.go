package kube

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"tunnel.example/tunnel/pkg/tunnel"
)

// This file decides which addresses and names that Node objects claim are accepted.
//
// A kubelet writes the status of its own Node, and a stolen kubelet can write any address there.
// These rules prevent a Node from taking addresses of others:
//
//   - An edge's Node never gets an address of the control plane, of pods on its Nodes, or of a Service.
//   - An address that two Nodes claim is accepted for both: pkg/egress then refuses to dial it, and
//     can name both. A Node claims the addresses in its status and those of its pods' networks.
//   - Only the first 64 addresses of a Node are accepted, so that no Node causes work for all.
//   - A name is accepted only if it is the Node's own. pkg/egress refuses to dial any other name
//     that a Node claims, unless it is the own name of another Node.
//
// A kubelet can also set spec.podCIDRs of its own Node, once, before kube-controller-manager sets
// it. So neither a Node's address nor a network of pods overrides the other. pkg/egress refuses to
// dial an address that one Node has and that is in the network of another Node's pods; the rest of
// the network counts. A network is rejected if it holds addresses of Services, of the control plane
// or of pods on its Nodes, if it is too wide for one Node, or if pods have no such addresses.

// maxAddresses is how many entries of a Node's status.addresses are read. Machines have a few, but
// a status has room for tens of thousands.
const maxAddresses = 64

// node is the part of a Node object that this package uses.
type node struct {
	controlPlane bool
	addresses    []nodeAddress // at most maxAddresses
	skipped      int           // how many addresses beyond maxAddresses the Node has
	firstSkipped string        // the first of the skipped addresses
	podCIDRs     []netip.Prefix
}

func (n node) equal(other node) bool {
	return n.controlPlane == other.controlPlane && n.skipped == other.skipped && n.firstSkipped == other.firstSkipped &&
		slices.Equal(n.addresses, other.addresses) && slices.Equal(n.podCIDRs, other.podCIDRs)
}

// nodeOf reads a Node object. It leaves out podCIDRs that are not valid networks, without an error.
func nodeOf(o any) (tunnel.NodeName, node, error) {
	object, ok := o.(*nodeObject)
	if !ok {
		return "", node{}, errors.New("not a node")
	}
	name, err := tunnel.ParseNodeName(object.Name)
	if err != nil {
		return "", node{}, err
	}
	n := node{controlPlane: isControlPlane(object.Labels), addresses: object.Status.Addresses}
	if skipped := len(n.addresses) - maxAddresses; skipped > 0 {
		n.skipped, n.firstSkipped = skipped, n.addresses[maxAddresses].Address
		n.addresses = slices.Clone(n.addresses[:maxAddresses]) // frees the memory of the skipped addresses
	}
	for _, text := range object.Spec.PodCIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			n.podCIDRs = append(n.podCIDRs, unmapped(p))
		}
	}
	return name, n, nil
}

// unmapped turns an IPv4-mapped IPv6 network into the IPv4 network, and leaves other networks as they
// are. It clears the bits behind the prefix.
func unmapped(p netip.Prefix) netip.Prefix {
	if a := p.Addr(); a.Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
	}
	return p.Masked()
}

// claims is the result of resolveClaims.
type claims struct {
	reach     map[tunnel.NodeName]Reach // the accepted claims of each node
	contested []contested               // sorted by node and address
}

// The shortest prefix that a network for the pods of one Node may have, in bits. Usual prefixes are
// /24 and /64. The limit bounds how many addresses a Node can block by a false claim.
const (
	minPodBits4 = 16 // IPv4
	minPodBits6 = 48 // IPv6
)

func minPodBits(p netip.Prefix) int {
	if p.Addr().Is6() {
		return minPodBits6
	}
	return minPodBits4
}

// contested is a Node's claim of an address, or of a network of pods, that this package does not
// accept, or that another Node claims as well.
type contested struct {
	node    tunnel.NodeName
	address string
	reason  string
}

// resolveClaims decides which claims of nodes are accepted. services are the networks of Services.
// api is the host of the API server.
func resolveClaims(nodes map[tunnel.NodeName]node, services []netip.Prefix, api string) *claims {
	r := &resolver{
		services: services,
		api:      api,
		reserved: controlPlaneAddresses(nodes, api),
		networks: make(podNetworks),
		owners:   make(map[netip.Addr]tunnel.NodeName),
		result:   &claims{reach: make(map[tunnel.NodeName]Reach, len(nodes))},
	}
	for _, n := range nodes {
		for _, p := range n.podCIDRs {
			if n.controlPlane && p.Bits() >= minPodBits(p) { // a wider one would take the addresses of all other Nodes
				r.reservedPods = append(r.reservedPods, p)
			}
		}
	}
	for name, n := range nodes {
		r.result.reach[name] = Reach{PodCIDRs: r.acceptPodCIDRs(name, n)}
	}
	// r.networks is complete now, so the claims of each Node can be compared with the networks of all other Nodes.
	r.lengths = r.networks.lengths()
	for name, n := range nodes {
		reach := r.result.reach[name]
		r.reportSkipped(name, n)
		r.reportOverlaps(name, reach.PodCIDRs)
		reach.Hosts, reach.Refused = r.acceptAddresses(name, n)
		r.result.reach[name] = reach
	}
	slices.SortFunc(r.result.contested, func(a, b contested) int {
		return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.address, b.address))
	})
	return r.result
}

// controlPlaneAddresses returns the address of the API server, if api is one, and the addresses of
// the control plane's Nodes.
func controlPlaneAddresses(nodes map[tunnel.NodeName]node, api string) map[netip.Addr]bool {
	all := map[netip.Addr]bool{}
	if ip, ok := parseAddr(api); ok {
		all[ip] = true
	}
	for _, n := range nodes {
		for _, a := range n.addresses {
			if ip, ok := parseAddr(a.Address); ok && n.controlPlane {
				all[ip] = true
			}
		}
	}
	return all
}

// resolver holds the state of one call of resolveClaims.
type resolver struct {
	// Set once.
	services     []netip.Prefix
	api          string              // host of the API server
	reserved     map[netip.Addr]bool // addresses of the control plane
	reservedPods []netip.Prefix      // networks of the pods of control-plane Nodes

	networks podNetworks                    // the accepted networks of all Nodes' pods
	lengths  []int                          // prefix lengths in networks
	owners   map[netip.Addr]tunnel.NodeName // the last Node seen with each accepted address
	result   *claims
}

// contest records a claim that is not accepted, or that another Node makes as well.
func (r *resolver) contest(node tunnel.NodeName, address, reason string) {
	r.result.contested = append(r.result.contested, contested{node, address, reason})
}

// acceptPodCIDRs returns the networks of a Node's pods that are accepted, and records them in
// r.networks. It accepts none of a control-plane Node: such a Node has no edge that could dial its
// pods, and the cloud may reach these pods without the tunnel.
func (r *resolver) acceptPodCIDRs(name tunnel.NodeName, n node) (accepted []netip.Prefix) {
	if n.controlPlane {
		return nil
	}
	for _, p := range n.podCIDRs {
		if reason := r.rejectPodCIDR(p); reason != "" {
			r.contest(name, p.String(), reason)
			continue
		}
		accepted = append(accepted, p)
		r.networks[p] = append(r.networks[p], name)
	}
	return accepted
}

// rejectPodCIDR returns the reason why no Node may have p for its pods; "" if a Node may have it.
func (r *resolver) rejectPodCIDR(p netip.Prefix) string {
	switch {
	case p.Bits() < minPodBits(p):
		return fmt.Sprintf("it is wider than the pods of one Node can need: /%d at most", minPodBits(p))
	case slices.ContainsFunc(r.services, p.Overlaps):
		return "it holds addresses of Services"
	case holdsAny(p, r.reserved):
		return "it holds an address of the control plane"
	case slices.ContainsFunc(r.reservedPods, p.Overlaps):
		return "it overlaps the network of the pods of a control-plane Node"
	case !p.Addr().IsGlobalUnicast():
		return "pods have no such addresses"
	}
	return ""
}

// reportSkipped contests the addresses of a Node beyond maxAddresses, in one entry.
func (r *resolver) reportSkipped(name tunnel.NodeName, n node) {
	if n.skipped > 0 {
		r.contest(name, n.firstSkipped, fmt.Sprintf(
			"a Node may have %d addresses: this one and the %d after it are ignored", maxAddresses, n.skipped-1))
	}
}

// reportOverlaps contests each network of a Node's pods whose first address is in the network of
// another Node's pods. Of two overlapping networks, at least the narrower one is reported.
func (r *resolver) reportOverlaps(name tunnel.NodeName, podCIDRs []netip.Prefix) {
	for _, p := range podCIDRs {
		if other := r.networks.other(p.Addr(), r.lengths, name); other != "" {
			r.contest(name, p.String(),
				fmt.Sprintf("the network of the pods of %s overlaps it: no node gets the addresses in both", other))
		}
	}
}

// acceptAddresses returns the names and addresses of a Node that are accepted as hosts, and the
// names that pkg/egress refuses to dial. The Node's own name comes first. A name that looks like an
// address is checked like any claim of an address.
func (r *resolver) acceptAddresses(name tunnel.NodeName, n node) (hosts, refused []string) {
	for _, a := range append([]nodeAddress{{"Hostname", string(name)}}, n.addresses...) {
		if slices.Contains(hosts, a.Address) {
			continue
		}
		ip, isIP := parseAddr(a.Address)
		if !isIP {
			switch dnsName := canonicalName(a.Address); {
			case n.controlPlane || dnsName == name:
				hosts = append(hosts, a.Address)
			case r.rejectName(name, a, dnsName):
				refused = append(refused, a.Address)
			}
			continue
		}
		if reason := r.rejectAddress(ip); reason != "" && !n.controlPlane {
			r.contest(name, a.Address, reason)
			continue
		}
		hosts = append(hosts, a.Address)
		r.reportInPodCIDR(name, a.Address, ip)
		r.reportSecondClaim(name, a.Address, ip)
	}
	return hosts, refused
}

// canonicalName returns a DNS name as node names are written.
func canonicalName(address string) tunnel.NodeName {
	return tunnel.NodeName(strings.ToLower(strings.TrimSuffix(address, ".")))
}

// rejectName handles an entry that is a name, but not the Node's own name. It contests the entry if its
// type is Hostname. Names of other types are usual, since cloud providers set them. The result says
// whether pkg/egress shall refuse to dial the name. It is false where MayJoin fails: by such names
// callers reach other machines, and no Node must be able to block them.
func (r *resolver) rejectName(name tunnel.NodeName, a nodeAddress, dnsName tunnel.NodeName) (refuse bool) {
	if a.Type == "Hostname" {
		r.contest(name, a.Address, "it is not the name of the Node")
	}
	return dnsName.MayJoin(r.api) == nil
}

// rejectAddress returns the reason why no edge's Node may have ip; "" if a Node may have it.
func (r *resolver) rejectAddress(ip netip.Addr) string {
	switch {
	case !ip.IsGlobalUnicast():
		return "every machine has such an address"
	case r.reserved[ip]:
		return "it is an address of the control plane"
	case slices.ContainsFunc(r.services, func(p netip.Prefix) bool { return p.Contains(ip) }):
		return "it is an address of Services"
	case slices.ContainsFunc(r.reservedPods, func(p netip.Prefix) bool { return p.Contains(ip) }):
		return "it is in the network of the pods of a control-plane Node"
	}
	return ""
}

// reportInPodCIDR contests an accepted address that is in the network of another Node's pods.
func (r *resolver) reportInPodCIDR(name tunnel.NodeName, address string, ip netip.Addr) {
	if other := r.networks.other(ip, r.lengths, name); other != "" {
		r.contest(name, address, fmt.Sprintf("it is in the network of the pods of %s: neither node gets it", other))
	}
}

// reportSecondClaim contests an accepted address that another Node has as well. The entry names the
// Node whose name sorts last.
func (r *resolver) reportSecondClaim(name tunnel.NodeName, address string, ip netip.Addr) {
	if other, taken := r.owners[ip]; taken && other != name {
		r.contest(max(name, other), address, fmt.Sprintf("%s claims it as well: neither node gets it", min(name, other)))
	}
	r.owners[ip] = name
}

// parseAddr parses an address in the same way as pkg/egress.
func parseAddr(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(strings.TrimSuffix(s, "."))
	return a.WithZone("").Unmap(), err == nil
}

// holdsAny reports whether p contains any of the addresses.
func holdsAny(p netip.Prefix, all map[netip.Addr]bool) bool {
	for a := range all {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// podNetworks maps each network of pods to the nodes that claim it.
type podNetworks map[netip.Prefix][]tunnel.NodeName

// lengths returns the prefix lengths of the networks, each once.
func (n podNetworks) lengths() []int {
	var all []int
	for p := range n {
		if !slices.Contains(all, p.Bits()) {
			all = append(all, p.Bits())
		}
	}
	return all
}

// other returns a node other than name whose network contains a; "" if there is none. lengths is the
// result of n.lengths.
func (n podNetworks) other(a netip.Addr, lengths []int, name tunnel.NodeName) tunnel.NodeName {
	for _, bits := range lengths {
		p, err := a.Prefix(bits)
		if err != nil {
			continue // bits is a prefix length of IPv6, and a is an IPv4 address
		}
		for _, owner := range n[p] {
			if owner != name {
				return owner
			}
		}
	}
	return ""
}

// Hostname returns the host name or the address of the API server, without a port.
func (c *Client) Hostname() string {
	if u, err := url.Parse(c.host); err == nil && u.Host != "" {
		return u.Hostname()
	}
	if host, _, err := net.SplitHostPort(c.host); err == nil { // a kubeconfig may leave the scheme out
		return host
	}
	return c.host
}
