package services

import (
	"maps"
	"net/netip"
	"slices"
)

// View says which endpoints of a Service the edge of each node needs. For these endpoints, Choose returns the same as
// for all endpoints of the Service. Most Services have one list for all nodes. Two kinds have shorter lists:
//
//   - Only callers on the node of an endpoint may use the endpoint (NodeLocal). A node needs its own endpoints. So that
//     Choice.Anywhere stays true, each node also gets one usable endpoint of each port.
//   - All ready endpoints have hints, for example by trafficDistribution. A node needs its own endpoints, and those
//     with a hint for it, or else for its zone. The node needs all endpoints if for some port, no ready endpoint has
//     such a hint. Of its zone, it also needs those that are not ready and still serve, for flows of UDP (Serving).
//
// While no endpoint is usable, a node needs its own endpoints.
//
// So that a View stays cheap, a Service has one list for all nodes if it has too many ports and endpoints.
//
// A View does not change, and any goroutine may call its methods.
type View struct {
	all   []int            // of all endpoints
	local bool             // a node needs those in nodes and in some
	some  []int            // with local: a usable endpoint of each port that has one
	near  map[string]set   // its keys are the nodes that need only those in nodes
	zones map[string][]int // what the nodes of a zone need beside those in nodes
	nodes map[string][]int // the endpoints on a node, or with a hint for it
}

// maxView is the most ports times endpoints of a Service with several lists.
const maxView = 5_000

// set is a set of addresses of endpoints.
type set map[string]struct{}

// ViewOf returns the view of a Service with these endpoints, of all its slices.
func ViewOf(svc *Service, endpoints []Named) *View {
	v := &View{all: make([]int, len(endpoints)), zones: make(map[string][]int), nodes: make(map[string][]int)}
	for i := range endpoints {
		v.all[i] = i
	}
	if svc.GetHeadless() || svc.GetExternalName() != "" || svc.GetOtherProxy() { // its endpoints are for names alone
		return v
	}
	if len(endpoints)*len(svc.GetPorts()) > maxView {
		return v
	}
	usable := usableOf(svc, endpoints)
	v.local = NodeLocal(svc) || len(usable) == 0
	var zones map[string]set
	if !v.local && !slices.ContainsFunc(usable, hintsMissing) {
		zones = inAll(usable, (*Endpoint).GetZoneHints)
		v.near = inAll(usable, (*Endpoint).GetNodeHints)
	}
	if !v.local && len(zones) == 0 && len(v.near) == 0 {
		return v
	}
	// Two slices may have one address, and Choose takes one of the two. So each list has an address of both slices, or of
	// none.
	at := make(map[string][]int, len(endpoints))
	for i, e := range endpoints {
		at[e.GetAddress()] = append(at[e.GetAddress()], i)
	}
	positions := func(addresses set) (all []int) {
		for address := range addresses {
			all = append(all, at[address]...)
		}
		slices.Sort(all)
		return all
	}
	some, nodes := make(set), make(map[string]set)
	for _, list := range usable {
		some[list[0].GetAddress()] = struct{}{}
	}
	for _, e := range endpoints {
		for _, node := range append([]string{Home(e.Endpoint)}, e.GetNodeHints()...) {
			add(nodes, node, e.Endpoint)
		}
		if zones[e.GetZone()] != nil && e.GetServing() && !e.GetReady() {
			add(zones, e.GetZone(), e.Endpoint)
		}
	}
	v.some = positions(some)
	for zone, addresses := range zones {
		v.zones[zone] = positions(addresses)
	}
	for node, addresses := range nodes {
		v.nodes[node] = positions(addresses)
	}
	return v
}

// NodeLocal reports whether only callers on the node of an endpoint may use the endpoint: internalTrafficPolicy is
// Local, and the Service has no address for callers outside the cluster.
func NodeLocal(svc *Service) bool {
	return svc.GetInternalLocal() && len(svc.GetExternalIps()) == 0 && len(svc.GetLoadBalancerIps()) == 0 &&
		!slices.ContainsFunc(svc.GetPorts(), func(p *Port) bool { return p.GetNodePort() != 0 })
}

// usableOf returns the usable endpoints of each port of the Service, in each family, as Choose defines them. It leaves
// out ports without such endpoints: callers of these are refused on each node.
func usableOf(svc *Service, endpoints []Named) (all [][]Named) {
	for _, port := range svc.GetPorts() {
		for _, family := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
			list := candidates(port, family, endpoints)
			usable := keep(list, (*Endpoint).GetReady)
			if len(usable) == 0 {
				usable = keep(list, drains)
			}
			if len(usable) > 0 {
				all = append(all, usable)
			}
		}
	}
	return all
}

// hintsMissing reports whether the usable endpoints of a port are not ready, or only some of them have hints for zones,
// or only some for nodes.
func hintsMissing(usable []Named) bool {
	some := func(has func(*Endpoint) bool) bool { n := len(keep(usable, has)); return 0 < n && n < len(usable) }
	return !usable[0].GetReady() || some(func(e *Endpoint) bool { return len(e.GetZoneHints()) > 0 }) ||
		some(func(e *Endpoint) bool { return len(e.GetNodeHints()) > 0 })
}

// inAll returns the zones (or the nodes) for which each of the lists has a hint, with the addresses that have it.
func inAll(lists [][]Named, hints func(*Endpoint) []string) (places map[string]set) {
	for i, list := range lists {
		of := make(map[string]set)
		for _, e := range list {
			for _, place := range hints(e.Endpoint) {
				add(of, place, e.Endpoint)
			}
		}
		if i == 0 {
			places = of
		}
		for place, addresses := range places {
			if of[place] == nil {
				delete(places, place)
			}
			maps.Copy(addresses, of[place])
		}
	}
	return places
}

// add adds the address of an endpoint to the set of a zone or of a node.
func add(sets map[string]set, place string, e *Endpoint) {
	if sets[place] == nil {
		sets[place] = make(set)
	}
	sets[place][e.GetAddress()] = struct{}{}
}

// Narrow reports whether some nodes may need fewer endpoints than all.
func (v *View) Narrow() bool { return v.local || len(v.zones) > 0 || len(v.near) > 0 }

// For returns which endpoints the edge of a node needs, as sorted positions in the endpoints that ViewOf got. The
// caller does not change the list.
func (v *View) For(self Self) []int {
	list := v.some
	if !v.local {
		_, near := v.near[self.Node]
		zone, covered := v.zones[self.Zone]
		if !near && !covered {
			return v.all
		}
		if list = zone; near {
			list = nil
		}
	}
	return merge(list, v.nodes[self.Node])
}

// merge returns the elements of two sorted lists, sorted, each once.
func merge(a, b []int) []int {
	isNew := func(i int) bool { _, has := slices.BinarySearch(a, i); return !has }
	if !slices.ContainsFunc(b, isNew) {
		return a
	}
	all := slices.Concat(a, b)
	slices.Sort(all)
	return slices.Compact(all)
}
