package relay

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// The relay's own addresses, on loopback. The IPv4 one is link-local, so that no network of a site has it; the
// IPv6 one is of a random network of unique local addresses (RFC 4193): fd74:756e:6e65:6c is fd and "tunnel".
var (
	addr4 = netip.MustParseAddr(services.RelayAddress)  //nolint:gochecknoglobals // a constant
	addr6 = netip.MustParseAddr("fd74:756e:6e65:6c::1") //nolint:gochecknoglobals // a constant
)

// plan is what follows from a state. It never changes.
type plan struct {
	frontends map[address]frontend   // the ports of Services that the relay serves
	own       map[address]struct{}   // the ports of the endpoints on this node
	dns       addresses              // where pods ask the cluster's DNS
	parts     map[services.Path]part // what each Service adds to them
}

// part is what one Service adds to a plan.
type part struct {
	frontends []frontend
	own       []address
	dns       []netip.AddrPort
}

// frontend is one port of a Service at one of its addresses.
type frontend struct {
	at      address
	path    services.Path
	service *services.Service
	port    *services.Port
}

// planner makes plans.
type planner struct {
	node   string
	direct []netip.Prefix // networks that the node reaches by itself
}

// plan returns what the node has to do, by its state.
func (n planner) plan(s *services.State) plan {
	parts := make(map[services.Path]part)
	for path, service := range s.Services() {
		parts[path] = n.part(s, path, service)
	}
	return newPlan(parts)
}

// next returns the plan after p, by what has changed since then.
func (n planner) next(p plan, s *services.State, d *services.Difference) plan {
	changed := make(map[services.Path]struct{})
	for _, path := range slices.Concat(d.Deleted, pathsOf(d.Set)) {
		switch {
		case strings.HasPrefix(path, "node/"):
			return n.plan(s) // any endpoint may be on it
		case strings.HasPrefix(path, "endpoint/"):
			path = services.ServiceOf(path)
		}
		changed[path] = struct{}{}
	}
	parts := maps.Clone(p.parts)
	for path := range changed {
		namespace, name, _ := strings.Cut(nameOf(path), "/")
		if service := s.Service(namespace, name); service != nil {
			parts[path] = n.part(s, path, service)
		} else {
			delete(parts, path)
		}
	}
	return newPlan(parts)
}

func pathsOf(items []*pb.Item) []services.Path {
	all := make([]services.Path, len(items))
	for i, item := range items {
		all[i] = item.GetPath()
	}
	return all
}

// newPlan puts parts together. Of Services that have one address and port, which Kubernetes does not permit, the first
// path counts.
func newPlan(parts map[services.Path]part) plan {
	p := plan{
		frontends: make(map[address]frontend), own: make(map[address]struct{}), dns: make(addresses), parts: parts,
	}
	for _, one := range parts {
		for _, f := range one.frontends {
			if had, double := p.frontends[f.at]; !double || f.path < had.path {
				p.frontends[f.at] = f
			}
		}
		for _, at := range one.own {
			p.own[at] = struct{}{}
		}
		for _, at := range one.dns {
			p.dns[at] = struct{}{}
		}
	}
	return p
}

// part returns what a Service adds to a plan: nothing if it has no ClusterIP, or if another proxy serves it.
func (n planner) part(s *services.State, path services.Path, service *services.Service) (p part) {
	if len(service.GetClusterIps()) == 0 || service.GetOtherProxy() {
		return p
	}
	if service.GetClusterDns() {
		p.dns = queryAddresses(service)
	}
	endpoints := s.Endpoints(path)
	for _, e := range endpoints {
		addr, ok := addressOf(s, e.Endpoint)
		if !ok || e.GetNode() != n.node {
			continue
		}
		for _, port := range e.GetPorts() {
			if at, ok := number(port); ok && served(port) {
				p.own = append(p.own, address{netip.AddrPortFrom(addr, at), port.GetProtocol()})
			}
		}
	}
	for f := range frontends(path, service) {
		if n.ways(s, f, endpoints).relayed() {
			p.frontends = append(p.frontends, f)
		}
	}
	return p
}

// addressOf returns the address of an endpoint. ok is false if it can be the address of no endpoint: Kubernetes takes a
// ClusterIP in an EndpointSlice, and a connection to it would come back to the relay.
func addressOf(s *services.State, e *services.Endpoint) (addr netip.Addr, ok bool) {
	addr, err := netip.ParseAddr(e.GetAddress())
	addr = addr.Unmap()
	return addr, err == nil && addr.IsGlobalUnicast() && !s.IsClusterIP(addr)
}

// dnsPort is where clients ask DNS servers.
const dnsPort = 53

// queryAddresses returns where pods ask a Service that is the cluster's DNS.
func queryAddresses(service *services.Service) (all []netip.AddrPort) {
	for _, text := range service.GetClusterIps() {
		addr, err := netip.ParseAddr(text)
		serves := slices.ContainsFunc(service.GetPorts(), func(p *services.Port) bool { return p.GetPort() == dnsPort })
		if addr = addr.Unmap(); err == nil && serves && mayRedirect(addr) {
			all = append(all, netip.AddrPortFrom(addr, dnsPort))
		}
	}
	return all
}

// mayRedirect reports whether an address can be a ClusterIP. A network of Services has no other addresses, and others
// would cut the node off.
func mayRedirect(addr netip.Addr) bool { return addr.IsGlobalUnicast() && addr != addr6 }

func number(p *services.Port) (uint16, bool) {
	n := p.GetPort()
	return uint16(n), n > 0 && n <= 0xffff //nolint:gosec // checked beside it
}

// served reports whether the relay serves the protocol of a port.
func served(p *services.Port) bool {
	return p.GetProtocol() == protocolTCP || p.GetProtocol() == protocolUDP
}

// frontends yields the TCP and UDP ports of a Service at each of its ClusterIPs.
func frontends(path services.Path, service *services.Service) func(yield func(frontend) bool) {
	return func(yield func(frontend) bool) {
		if service.GetOtherProxy() {
			return
		}
		for _, text := range service.GetClusterIps() {
			addr, err := netip.ParseAddr(text)
			if addr = addr.Unmap(); err != nil || !mayRedirect(addr) {
				continue
			}
			for _, port := range service.GetPorts() {
				n, ok := number(port)
				if !ok || !served(port) {
					continue
				}
				if !yield(frontend{address{netip.AddrPortFrom(addr, n), port.GetProtocol()}, path, service, port}) {
					return
				}
			}
		}
	}
}

// way is an endpoint that a connection may use.
type way struct {
	services.Named
	port     uint16
	protocol string
}

// address returns where the endpoint listens.
func (w way) address() netip.AddrPort {
	addr, _ := netip.ParseAddr(w.GetAddress()) // the state has no others
	return netip.AddrPortFrom(addr.Unmap(), w.port)
}

// target returns what the edge asks the cloud for.
func (w way) target() string {
	return services.Target{Endpoint: w.Path, Protocol: w.protocol, Port: w.port}.String()
}

// ways are the endpoints that connections to a frontend may use.
type ways struct {
	direct []way // this node reaches them by itself
	far    []way // the cloud reaches them
	none   []way // nobody does
}

// relayed reports whether the relay serves the frontend. kube-proxy does not know which endpoints are out of reach, and
// would send its share of the connections to each of them.
func (w ways) relayed() bool {
	return len(w.far)+len(w.none) > 0 && len(w.direct)+len(w.far) > 0
}

// ways returns the ways of a frontend. endpoints are those of its Service.
func (n planner) ways(s *services.State, f frontend, endpoints []services.Named) (w ways) {
	self := services.Self{Node: n.node, Zone: s.Node(n.node).GetZone()}
	for _, e := range chosen(f, endpoints, self) {
		one := way{e, services.TargetPort(e.Endpoint, f.port), f.at.protocol}
		_, ok := addressOf(s, e.Endpoint)
		switch {
		case !ok:
			w.none = append(w.none, one)
		case n.isDirect(e.Endpoint):
			w.direct = append(w.direct, one)
		case e.GetCluster() || s.Node(e.GetNode()).GetEdge():
			w.far = append(w.far, one)
		default:
			w.none = append(w.none, one)
		}
	}
	return w
}

// chosen returns the endpoints that Kubernetes' rules permit for connections to a ClusterIP.
func chosen(f frontend, endpoints []services.Named, self services.Self) []services.Named {
	c := services.Choose(f.service, f.port, f.at.Addr(), endpoints, self)
	if f.service.GetInternalLocal() {
		return c.Local
	}
	return c.Cluster
}

// isDirect reports whether this node reaches an endpoint by itself.
func (n planner) isDirect(e *services.Endpoint) bool {
	return e.GetNode() == n.node || n.isRouted(e)
}

// isRouted reports whether an endpoint is in a network that this node reaches by itself.
func (n planner) isRouted(e *services.Endpoint) bool {
	addr, err := netip.ParseAddr(e.GetAddress())
	return err == nil && slices.ContainsFunc(n.direct, func(p netip.Prefix) bool { return p.Contains(addr.Unmap()) })
}

// nameOf returns NAMESPACE/NAME of the Service with a path.
func nameOf(path services.Path) string {
	_, name, _ := strings.Cut(path, "/")
	return name
}
