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

// This file decides what counts of what Nodes say.
//
// A kubelet writes the status of its own Node, and a stolen one can write any address there.
// So an address counts only if nobody else has it:
//
//   - An address of the control plane or of a Service never counts.
//   - An address that two Nodes claim counts for both: pkg/egress then refuses to dial it, and
//     can name them. A Node claims the addresses in its status and those of its pods' networks.
//   - Of a Node's addresses the first 64 count, so that none makes work for all.
//   - A name counts only if it is the Node's own. pkg/egress refuses to dial any other name that
//     a Node claims, unless another Node has it as its own.
//
// A kubelet can also set spec.podCIDRs of its own Node, once, before kube-controller-manager
// does. So neither an address nor a pods' network is believed against the other: what is in both
// is nobody's, and the rest of the network still counts. A network that holds addresses of
// Services or of the control plane, or is too wide for one Node, does not count.

// mostAddresses is how many entries of a Node's status.addresses are looked at. Machines have
// a few; a status has room for tens of thousands.
const mostAddresses = 64

// node is what a Node says.
type node struct {
	controlPlane bool
	addresses    []nodeAddress // mostAddresses at most
	left         int           // how many more there are
	first        string        // the first of them
	podCIDRs     []netip.Prefix
}

func (n node) equal(other node) bool {
	return n.controlPlane == other.controlPlane && n.left == other.left && n.first == other.first && slices.Equal(n.addresses, other.addresses) && slices.Equal(n.podCIDRs, other.podCIDRs)
}

// nodeOf reads a Node. What is no network in it is left out: it is not ours to complain.
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
	if left := len(n.addresses) - mostAddresses; left > 0 {
		n.left, n.first = left, n.addresses[mostAddresses].Address
		n.addresses = slices.Clone(n.addresses[:mostAddresses]) // so that the others are not kept
	}
	for _, text := range object.Spec.PodCIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			n.podCIDRs = append(n.podCIDRs, unmapped(p))
		}
	}
	return name, n, nil
}

// unmapped returns a network in IPv4's form if it is one of IPv4.
func unmapped(p netip.Prefix) netip.Prefix {
	if a := p.Addr(); a.Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
	}
	return p.Masked()
}

// settled is what counts.
type settled struct {
	reach     map[tunnel.NodeName]Reach
	contested []contested // sorted by node and address
}

// The widest network that the pods of one Node can need; usual are /24 and /64. So a Node
// that lies about its pods makes no more addresses than these nobody's.
const (
	widest4 = 16
	widest6 = 48
)

// contested is an address, or a network of pods, that does not count, or that two Nodes
// claim.
type contested struct {
	node    tunnel.NodeName
	address string
	why     string
}

// settle decides what counts of what nodes say. services are the networks of Services; api is
// the host of the API server.
func settle(nodes map[tunnel.NodeName]node, services []netip.Prefix, api string) *settled {
	s := &settled{reach: make(map[tunnel.NodeName]Reach, len(nodes))}
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
			widest := widest4
			if p.Addr().Is6() {
				widest = widest6
			}
			switch {
			case n.controlPlane: // its pods may be reached in another way: nobody may be asked for them here
			case p.Bits() < widest:
				s.refuse(name, p.String(), fmt.Sprintf("it is wider than the pods of one Node can need: /%d at most", widest))
			case slices.ContainsFunc(services, p.Overlaps):
				s.refuse(name, p.String(), "it holds addresses of Services")
			case holdsAny(p, reserved):
				s.refuse(name, p.String(), "it holds an address of the control plane")
			default:
				r.PodCIDRs = append(r.PodCIDRs, p)
				networks[p] = append(networks[p], name)
			}
		}
		s.reach[name] = r
	}
	lengths := networks.lengths()
	owners := make(map[netip.Addr]tunnel.NodeName)
	for name, n := range nodes {
		r := s.reach[name]
		if n.left > 0 {
			s.refuse(name, n.first, fmt.Sprintf("a Node may have %d addresses: this one and the %d behind it do not count", mostAddresses, n.left-1))
		}
		for _, p := range r.PodCIDRs {
			if other := networks.other(p.Addr(), lengths, name); other != "" {
				s.refuse(name, p.String(), fmt.Sprintf("the network of the pods of %s overlaps it: nobody has the addresses in both", other))
			}
		}
		// A name that looks like an address is a claim like others.
		for _, a := range append([]nodeAddress{{"Hostname", string(name)}}, n.addresses...) {
			ip, isIP := parseAddr(a.Address)
			called := tunnel.NodeName(strings.ToLower(strings.TrimSuffix(a.Address, ".")))
			why := ""
			switch {
			case slices.Contains(r.Hosts, a.Address):
				continue
			case n.controlPlane:
			case !isIP && called == name:
			case !isIP:
				if called.MayJoin(api) == nil { // else it is another machine's, which this Node does not keep anybody from
					r.Refused = append(r.Refused, a.Address)
				}
				if a.Type != "Hostname" {
					continue // a cloud provider's; nobody means harm
				}
				why = "it is not the name of the Node"
			case !ip.IsGlobalUnicast():
				why = "every machine has such an address"
			case reserved[ip]:
				why = "it is an address of the control plane"
			case slices.ContainsFunc(services, func(p netip.Prefix) bool { return p.Contains(ip) }):
				why = "it is an address of Services"
			}
			if why != "" {
				s.refuse(name, a.Address, why)
				continue
			}
			r.Hosts = append(r.Hosts, a.Address)
			if !isIP {
				continue
			}
			if other := networks.other(ip, lengths, name); other != "" {
				s.refuse(name, a.Address, fmt.Sprintf("it is in the network of the pods of %s: nobody has it", other))
			}
			if other, taken := owners[ip]; taken && other != name {
				s.refuse(max(name, other), a.Address, fmt.Sprintf("%s claims it as well: nobody has it", min(name, other)))
			}
			owners[ip] = name
		}
		s.reach[name] = r
	}
	slices.SortFunc(s.contested, func(a, b contested) int {
		return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.address, b.address))
	})
	return s
}

func (s *settled) refuse(node tunnel.NodeName, address, why string) {
	s.contested = append(s.contested, contested{node, address, why})
}

// parseAddr reads an address as pkg/egress does.
func parseAddr(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(strings.TrimSuffix(s, "."))
	return a.WithZone("").Unmap(), err == nil
}

func holdsAny(p netip.Prefix, all map[netip.Addr]bool) bool {
	for a := range all {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// podNetworks are networks and whose pods are in them.
type podNetworks map[netip.Prefix][]tunnel.NodeName

// lengths returns the lengths of prefixes that there are.
func (n podNetworks) lengths() []int {
	var all []int
	for p := range n {
		if !slices.Contains(all, p.Bits()) {
			all = append(all, p.Bits())
		}
	}
	return all
}

// other returns a node besides name that has a network which holds a; "" if there is none.
func (n podNetworks) other(a netip.Addr, lengths []int, name tunnel.NodeName) tunnel.NodeName {
	for _, bits := range lengths {
		p, err := a.Prefix(bits)
		if err != nil {
			continue // a length of the other family
		}
		for _, owner := range n[p] {
			if owner != name {
				return owner
			}
		}
	}
	return ""
}

// Hostname returns the name or the address of the API server, without a port.
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
	// serviceCIDRsEvery is how often the networks of Services are read. They change when an
	// administrator adds one.
	serviceCIDRsEvery = time.Minute
	// serviceCIDRsAgain is how long after a failure.
	serviceCIDRsAgain = 5 * time.Second

	serviceCIDRs = "/apis/networking.k8s.io/v1/servicecidrs"
)

// serviceCIDRList is the list, as far as we look (k8s.io/api/networking/v1).
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
			r.heardServices(all, err)
		}
		pause := serviceCIDRsEvery
		if err != nil && !apierrors.IsNotFound(err) {
			pause = serviceCIDRsAgain
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
	}
}

// heardServices takes the networks of Services, or why they cannot be read. Without the
// right to read them, or on a cluster that has none to read (before Kubernetes 1.33),
// everything else goes on.
func (r *Reaches) heardServices(all []netip.Prefix, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	first, was := !r.asked, r.errCIDRs
	switch {
	case apierrors.IsNotFound(err):
		if first {
			r.log.Info("this cluster has no ServiceCIDRs (Kubernetes 1.33 has): a Node that claims the address of a Service cannot be told from others")
		}
		r.asked, r.errCIDRs = true, nil
	case err != nil:
		r.errCIDRs = err
		r.asked = r.asked || ReasonFor(err) == Forbidden
		if was == nil {
			r.log.Warn("the networks of Services cannot be read; a Node that claims the address of a Service may not be noticed", "err", Explain(err))
		}
	default:
		r.asked, r.errCIDRs = true, nil
		if was != nil {
			r.log.Info("the networks of Services can be read again")
		}
		if !slices.Equal(all, r.services) {
			r.services, first = all, true
		}
	}
	if first && r.asked {
		(*reachStore)(r).noteLocked()
	}
}
