package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"tunnel/pkg/tunnel"
)

// This file decides which addresses and names that Node objects claim are accepted.
//
// A kubelet writes the status of its own Node, and a stolen kubelet can write any address there.
// These rules prevent a Node from taking addresses of others:
//
//   - An edge's Node never gets an address of the control plane or of a Service.
//   - An address that two Nodes claim is accepted for both: pkg/egress then refuses to dial it, and
//     can name both. A Node claims the addresses in its status and those of its pods' networks.
//   - Only the first 64 addresses of a Node are accepted, so that no Node causes work for all.
//   - A name is accepted only if it is the Node's own. pkg/egress refuses to dial any other name
//     that a Node claims, unless it is the own name of another Node.
//
// A kubelet can also set spec.podCIDRs of its own Node, once, before kube-controller-manager sets
// it. So neither a Node's address nor a pods' network overrides the other: pkg/egress refuses to
// dial an address that is both, and the rest of the network counts. A network is rejected if it
// holds addresses of Services or of the control plane, or is too wide for one Node.

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
		n.addresses = slices.Clone(n.addresses[:maxAddresses]) // frees the memory of the skipped ones
	}
	for _, text := range object.Spec.PodCIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			n.podCIDRs = append(n.podCIDRs, unmapped(p))
		}
	}
	return name, n, nil
}

// unmapped returns p as an IPv4 network if it is an IPv4-mapped IPv6 network, else p. It clears the
// bits behind the prefix.
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

// The shortest prefix that a network for the pods of one Node may have, in bits; usual are /24 and
// /64. The limit bounds how many addresses a Node can block by a false claim.
const (
	minPodBits4 = 16 // IPv4
	minPodBits6 = 48 // IPv6
)

// contested is an address, or a network of pods, that is not accepted, or that two Nodes claim.
type contested struct {
	node    tunnel.NodeName
	address string
	reason  string
}

// resolveClaims decides which claims of nodes are accepted. services are the networks of Services.
// api is the host of the API server.
func resolveClaims(nodes map[tunnel.NodeName]node, services []netip.Prefix, api string) *claims {
	result := &claims{reach: make(map[tunnel.NodeName]Reach, len(nodes))}
	reserved := map[netip.Addr]bool{}
	if ip, ok := parseAddr(api); ok {
		reserved[ip] = true
	}
	for _, n := range nodes {
		for _, a := range n.addresses {
			if ip, ok := parseAddr(a.Address); ok && n.controlPlane {
				reserved[ip] = true
			}
		}
	}
	networks := make(podNetworks)
	for name, n := range nodes {
		r := Reach{}
		for _, p := range n.podCIDRs {
			minBits := minPodBits4
			if p.Addr().Is6() {
				minBits = minPodBits6
			}
			switch {
			case n.controlPlane: // no node is dialled for its pods, which may be reached in another way
			case p.Bits() < minBits:
				result.contest(name, p.String(),
					fmt.Sprintf("it is wider than the pods of one Node can need: /%d at most", minBits))
			case slices.ContainsFunc(services, p.Overlaps):
				result.contest(name, p.String(), "it holds addresses of Services")
			case holdsAny(p, reserved):
				result.contest(name, p.String(), "it holds an address of the control plane")
			default:
				r.PodCIDRs = append(r.PodCIDRs, p)
				networks[p] = append(networks[p], name)
			}
		}
		result.reach[name] = r
	}
	lengths := networks.lengths()
	owners := make(map[netip.Addr]tunnel.NodeName)
	for name, n := range nodes {
		r := result.reach[name]
		if n.skipped > 0 {
			result.contest(name, n.firstSkipped, fmt.Sprintf(
				"a Node may have %d addresses: this one and the %d behind it do not count", maxAddresses, n.skipped-1))
		}
		for _, p := range r.PodCIDRs {
			if other := networks.other(p.Addr(), lengths, name); other != "" {
				result.contest(name, p.String(),
					fmt.Sprintf("the network of the pods of %s overlaps it: nobody has the addresses in both", other))
			}
		}
		// The Node's own name comes first. If it looks like an address, it is a claim like any other.
		for _, a := range append([]nodeAddress{{"Hostname", string(name)}}, n.addresses...) {
			ip, isIP := parseAddr(a.Address)
			dnsName := tunnel.NodeName(strings.ToLower(strings.TrimSuffix(a.Address, ".")))
			reason := ""
			switch {
			case slices.Contains(r.Hosts, a.Address):
				continue
			case n.controlPlane:
			case !isIP && dnsName == name:
			case !isIP:
				// MayJoin fails for names by which callers reach other machines. A Node must not be able
				// to block such a name.
				if dnsName.MayJoin(api) == nil {
					r.Refused = append(r.Refused, a.Address)
				}
				if a.Type != "Hostname" {
					continue // a name from the cloud provider: usual, so it is not reported
				}
				reason = "it is not the name of the Node"
			case !ip.IsGlobalUnicast():
				reason = "every machine has such an address"
			case reserved[ip]:
				reason = "it is an address of the control plane"
			case slices.ContainsFunc(services, func(p netip.Prefix) bool { return p.Contains(ip) }):
				reason = "it is an address of Services"
			}
			if reason != "" {
				result.contest(name, a.Address, reason)
				continue
			}
			r.Hosts = append(r.Hosts, a.Address)
			if !isIP {
				continue
			}
			if other := networks.other(ip, lengths, name); other != "" {
				result.contest(name, a.Address,
					fmt.Sprintf("it is in the network of the pods of %s: nobody has it", other))
			}
			if other, taken := owners[ip]; taken && other != name {
				result.contest(max(name, other), a.Address,
					fmt.Sprintf("%s claims it as well: nobody has it", min(name, other)))
			}
			owners[ip] = name
		}
		result.reach[name] = r
	}
	slices.SortFunc(result.contested, func(a, b contested) int {
		return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.address, b.address))
	})
	return result
}

// contest records a claim that is not accepted, or that two Nodes make.
func (c *claims) contest(node tunnel.NodeName, address, reason string) {
	c.contested = append(c.contested, contested{node, address, reason})
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

// other returns a node other than name whose network contains a; "" if there is none. lengths are
// those of n.
func (n podNetworks) other(a netip.Addr, lengths []int, name tunnel.NodeName) tunnel.NodeName {
	for _, bits := range lengths {
		p, err := a.Prefix(bits)
		if err != nil {
			continue // a prefix length of IPv6, and a is IPv4
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

const (
	// serviceCIDRsInterval is how often the networks of Services are read. They change only when
	// an administrator adds or removes one.
	serviceCIDRsInterval = time.Minute
	// serviceCIDRsRetry is how long to wait after a failure.
	serviceCIDRsRetry = 5 * time.Second

	serviceCIDRs = "/apis/networking.k8s.io/v1/servicecidrs"
)

// serviceCIDRList holds the fields that are used of a ServiceCIDRList (k8s.io/api/networking/v1).
type serviceCIDRList struct {
	Items []struct {
		Spec struct {
			CIDRs []string `json:"cidrs"`
		} `json:"spec"`
	} `json:"items"`
}

// followServices keeps the networks of Services up to date until ctx is done.
func (r *Reaches) followServices(ctx context.Context) {
	for ctx.Err() == nil {
		var list serviceCIDRList
		err := r.client.objects.list(ctx, serviceCIDRs, "", &list)
		var all []netip.Prefix
		for _, item := range list.Items {
			for _, text := range item.Spec.CIDRs {
				if p, bad := netip.ParsePrefix(text); bad == nil {
					all = append(all, unmapped(p))
				}
			}
		}
		if ctx.Err() == nil {
			r.setServices(all, err)
		}
		pause := serviceCIDRsInterval
		if err != nil && !apierrors.IsNotFound(err) {
			pause = serviceCIDRsRetry
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
	}
}

// setServices stores the networks of Services, or the error why they cannot be read. If the right
// to read them is missing, or the cluster has no ServiceCIDRs (before Kubernetes 1.33), Reaches
// works without them.
func (r *Reaches) setServices(all []netip.Prefix, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed, before := !r.servicesKnown, r.errServices
	switch {
	case apierrors.IsNotFound(err):
		if changed {
			r.log.Info("this cluster has no ServiceCIDRs (Kubernetes 1.33 has): " +
				"a Node that claims the address of a Service cannot be told from others")
		}
		r.servicesKnown, r.errServices = true, nil
	case err != nil:
		r.errServices = err
		r.servicesKnown = r.servicesKnown || ReasonFor(err) == Forbidden
		if before == nil {
			r.log.Warn("the networks of Services cannot be read; a Node that claims the address of a Service may not be noticed",
				"err", Explain(err))
		}
	default:
		r.servicesKnown, r.errServices = true, nil
		if before != nil {
			r.log.Info("the networks of Services can be read again")
		}
		if !slices.Equal(all, r.services) {
			r.services, changed = all, true
		}
	}
	if changed && r.servicesKnown {
		(*reachStore)(r).notifyLocked()
	}
}
