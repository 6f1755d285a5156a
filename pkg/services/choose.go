package services

import (
	"math"
	"net/netip"
	"slices"
	"strings"
)

// Self is the node for whose callers Choose chooses.
type Self struct {
	Node string // the name of its Node. Empty: no endpoint is local.
	Zone string // the zone of its Node (label topology.kubernetes.io/zone). Empty: none.
}

// Choice has the endpoints that connections to a port of a Service may use on one node. The lists keep the order of the
// endpoints that Choose got. The lists may share memory with each other and with that argument, so change only a copy.
//
// Traffic to a ClusterIP uses Local if internalTrafficPolicy is Local (Service.internal_local), else Cluster. Traffic
// to a node port, an external IP or an IP of a load balancer uses Local if externalTrafficPolicy is Local
// (Service.external_local), else Cluster. Such traffic always uses Cluster if it comes from the node itself or from one
// of its pods.
type Choice struct {
	// Cluster is for traffic with the policy Cluster: endpoints on any node, or only the near ones if hints name them. It
	// is empty if the port has no such traffic.
	Cluster []Named
	// Local is for traffic with the policy Local: endpoints on this node, whatever their hints. It is empty if the
	// port has no such traffic.
	Local []Named
	// Reachable is Cluster and Local together, each endpoint once.
	Reachable []Named
	// Anywhere reports whether the port has usable endpoints on any node. If it has some, but the list for a
	// connection is empty, kube-proxy drops the connection. If it has none, kube-proxy rejects it.
	Anywhere bool
}

// Choose returns which endpoints connections to a port of a Service may use on the node self. at is the address of
// the Service that the connections go to, and port is one of the Service's ports. endpoints are those of the Service,
// of all its slices.
//
// It decides as kube-proxy 1.37 does; test/services compares the two. These functions of Kubernetes are the source:
//
//   - CategorizeEndpoints (pkg/proxy/topology.go): readiness, hints and policies.
//   - EndpointSliceCache.addEndpoints (pkg/proxy/endpointslicecache.go): families, ports, and addresses in two slices.
//   - BaseServicePortInfo.UsesClusterEndpoints and UsesLocalEndpoints (pkg/proxy/serviceport.go): which policies count.
//
// An endpoint is usable if it is ready. If no endpoint is ready, endpoints that terminate and still serve are usable.
// So a Service whose last pods are about to end keeps its connections until they end. Choose applies this rule to
// Cluster and to Local separately.
//
// Hints count only if every ready endpoint has hints, and one of the hints is for this node: for its name, or else for
// its zone. Choose does not read Service.distribution, since kube-controller-manager has made hints of it. Choose does
// not read Service.publish_not_ready, since the endpoints of such a Service are marked as ready.
//
// Where kube-proxy leaves the result to chance, Choose does not: of several endpoints with one address and port it
// takes the first that does not terminate. Choose compares addresses as text, in the form of [netip.Addr.String].
func Choose(svc *Service, port *Port, at netip.Addr, endpoints []Named, self Self) Choice {
	v6 := at.Unmap().Is6()
	sameFamily := func(addr string) bool { return strings.Contains(addr, ":") == v6 }
	all := candidates(port, at, endpoints)
	ready := keep(all, (*Endpoint).GetReady)

	external := port.GetNodePort() != 0 || slices.ContainsFunc(svc.GetExternalIps(), sameFamily) ||
		slices.ContainsFunc(svc.GetLoadBalancerIps(), sameFamily)
	// With externalTrafficPolicy Local, external traffic that starts on this node has the policy Cluster.
	usesCluster := !svc.GetInternalLocal() || external
	usesLocal := svc.GetInternalLocal() || svc.GetExternalLocal() && external

	c := Choice{Anywhere: len(ready) > 0 || slices.ContainsFunc(all, func(e Named) bool { return drains(e.Endpoint) })}
	if usesCluster {
		c.Cluster = near(ready, self)
		if len(ready) == 0 {
			c.Cluster = keep(all, drains)
		}
	}
	if usesLocal && self.Node != "" {
		local := func(e *Endpoint) bool { return e.GetNode() == self.Node }
		c.Local = keep(ready, local)
		if len(c.Local) == 0 {
			c.Local = keep(all, func(e *Endpoint) bool { return local(e) && drains(e) })
		}
	}
	c.Reachable = union(c.Cluster, c.Local)
	return c
}

// Serving returns the endpoints of a port of a Service that serve, whether or not new connections may go to them. at is
// an address of the Service: the endpoints are of its family. An existing flow of UDP may continue with such an
// endpoint (kubernetes/pkg/proxy/conntrack/cleanup.go).
func Serving(port *Port, at netip.Addr, endpoints []Named) []Named {
	return keep(candidates(port, at, endpoints), func(e *Endpoint) bool { return e.GetServing() || e.GetReady() })
}

// candidates returns the endpoints of a port of a Service in the family of the address at.
func candidates(port *Port, at netip.Addr, endpoints []Named) []Named {
	v6 := at.Unmap().Is6()
	return unique(keep(endpoints, func(e *Endpoint) bool {
		return strings.Contains(e.GetAddress(), ":") == v6 && TargetPort(e, port) != 0
	}), port)
}

// TargetPort returns the port at which an endpoint serves a port of its Service: the one of its slice with the same
// name and protocol. It returns 0 if there is none. The number of the Service's port does not matter.
func TargetPort(e *Endpoint, port *Port) uint16 {
	for _, p := range e.GetPorts() {
		if p.GetName() == port.GetName() && p.GetProtocol() == port.GetProtocol() && p.GetPort() <= math.MaxUint16 {
			return uint16(p.GetPort())
		}
	}
	return 0
}

// drains reports whether an endpoint terminates and still serves.
func drains(e *Endpoint) bool { return e.GetServing() && e.GetTerminating() }

// near returns the endpoints whose hints name this node. If there are none, it returns those whose hints name the
// zone. If there are none either, it returns all.
func near(ready []Named, self Self) []Named {
	if list := hinted(ready, (*Endpoint).GetNodeHints, self.Node); len(list) > 0 {
		return list
	}
	if list := hinted(ready, (*Endpoint).GetZoneHints, self.Zone); len(list) > 0 {
		return list
	}
	return ready
}

// hinted returns the endpoints that have a hint for a place, or none if an endpoint has no hint at all.
func hinted(ready []Named, hints func(*Endpoint) []string, place string) []Named {
	if slices.ContainsFunc(ready, func(e Named) bool { return len(hints(e.Endpoint)) == 0 }) {
		return nil
	}
	return keep(ready, func(e *Endpoint) bool { return slices.Contains(hints(e), place) })
}

// unique returns list with only one endpoint for each address and port. Two slices hold the same address while an
// endpoint moves between slices, and when a new pod gets the address of a pod that terminates.
func unique(list []Named, port *Port) []Named {
	ascending := true // the list of one slice, as a State sorts it, has no address twice
	for i := 1; i < len(list) && ascending; i++ {
		ascending = list[i-1].GetAddress() < list[i].GetAddress()
	}
	if ascending {
		return list
	}
	type place struct {
		address string
		port    uint16
	}
	at := func(e *Endpoint) place { return place{e.GetAddress(), TargetPort(e, port)} }
	best := make(map[place]*Endpoint, len(list))
	for _, e := range list {
		if b := best[at(e.Endpoint)]; b == nil || b.GetTerminating() && !e.GetTerminating() {
			best[at(e.Endpoint)] = e.Endpoint
		}
	}
	return keep(list, func(e *Endpoint) bool { return best[at(e)] == e })
}

// union returns the endpoints of a, and then those of b that are not in a.
func union(a, b []Named) []Named {
	if len(b) == 0 {
		return a
	}
	has := make(map[*Endpoint]bool, len(a))
	for _, e := range a {
		has[e.Endpoint] = true
	}
	more := keep(b, func(e *Endpoint) bool { return !has[e] })
	if len(more) == 0 {
		return a
	}
	return append(slices.Clip(a), more...)
}

// keep returns the endpoints for which ok returns true. If ok is true for all of them, keep returns list itself.
func keep(list []Named, ok func(*Endpoint) bool) []Named {
	n := 0
	for _, e := range list {
		if ok(e.Endpoint) {
			n++
		}
	}
	if n == 0 || n == len(list) {
		return list[:n]
	}
	kept := make([]Named, 0, n)
	for _, e := range list {
		if ok(e.Endpoint) {
			kept = append(kept, e)
		}
	}
	return kept
}
