package relay

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// The relay's own addresses, on loopback. The IPv4 address is link-local, so that no network of a site has it. The IPv6
// address is of a random network of unique local addresses (RFC 4193): fd74:756e:6e65:6c is fd and "tunnel".
var (
	addr4 = netip.MustParseAddr(services.RelayAddress)  //nolint:gochecknoglobals // a constant
	addr6 = netip.MustParseAddr("fd74:756e:6e65:6c::1") //nolint:gochecknoglobals // a constant
)

// plan is what the edge has to do on this node. It follows the state: planner.update replaces only the parts of
// Services that a change affects, so a change costs the same in a cluster of any size.
type plan struct {
	parts     map[services.Path]part  // what each Service adds to the fields below
	frontends map[address]*frontend   // the ports of Services that this edge serves
	rivals    map[address][]*frontend // frontends at an address that another frontend has, sorted, see claim
	own       counted[address]        // the endpoints on this node, by address and port
	others    counted[address]        // addresses with rules that are no port of a Service, see otherKind
	dns       counted[netip.AddrPort] // the addresses at which pods ask the cluster's DNS
	health    counted[healthPort]     // the ports at which load balancers ask for endpoints on this node
	pods      []netip.Prefix          // the networks of this node's pods; nil if no rule needs them
	node      *services.Node          // the Node of this node that the parts were made with
	// changed are the addresses whose rules may have changed since the last call of take or of all, with their rules at
	// that call; nil: the address had none.
	changed map[address]*rule
}

// part is what one Service adds to a plan. It never changes.
type part struct {
	service    *services.Service // the Service that the part was made from
	frontends  []frontend
	clusterIPs []netip.Addr // ClusterIPs: the kernel refuses their other ports
	hairpins   []netip.Addr // addresses of endpoints on this node that may call themselves
	own        []address
	dns        []netip.AddrPort
	health     []healthPort // one at most
}

// frontend is one port of a Service at one of its addresses. A node port has the unspecified address of its family.
type frontend struct {
	at       address
	path     services.Path
	service  *services.Service
	port     *services.Port
	external bool // it is a node port, or an address in externalIPs
	rule     rule
}

// counted is a set. For each member it counts how many parts have added the member.
type counted[T comparable] map[T]int

func (c counted[T]) add(one T, n int) {
	if c[one] += n; c[one] == 0 {
		delete(c, one)
	}
}

func newPlan() *plan {
	return &plan{
		parts: make(map[services.Path]part), frontends: make(map[address]*frontend),
		rivals: make(map[address][]*frontend), own: make(counted[address]), others: make(counted[address]),
		dns: make(counted[netip.AddrPort]), health: make(counted[healthPort]), changed: make(map[address]*rule),
	}
}

// rule returns what the kernel has to do with packets to an address, without the ports of the relay; nil: nothing.
func (p *plan) rule(at address) *rule {
	if f := p.frontends[at]; f != nil {
		return &f.rule
	}
	if p.others[at] > 0 {
		return &rule{kind: otherKind(at)}
	}
	return nil
}

// otherKind returns the kind of the rule of an address that is no port of a Service.
func otherKind(at address) kind {
	switch at.protocol {
	case aboutClusterIP:
		return isClusterIP
	case aboutOwn:
		return isOwn
	}
	return isPods
}

// note notes the rule of an address before it may change.
func (p *plan) note(at address) {
	if _, noted := p.changed[at]; !noted {
		p.changed[at] = p.rule(at)
	}
}

// take returns the rules that have changed since the last call of take or of all: before has those that there were
// then, and after those that there are now.
func (p *plan) take() (before, after rules) {
	before, after = make(rules, len(p.changed)), make(rules, len(p.changed))
	for at, had := range p.changed {
		now := p.rule(at)
		if had != nil && now != nil && had.equal(*now) {
			continue
		}
		if had != nil {
			before[at] = *had
		}
		if now != nil {
			after[at] = *now
		}
	}
	p.changed = make(map[address]*rule) // clear would keep the memory of a large change
	return before, after
}

// all returns all rules. A later take returns what has changed since then.
func (p *plan) all() rules {
	p.changed = make(map[address]*rule)
	all := make(rules, len(p.frontends)+len(p.others))
	for at, f := range p.frontends {
		all[at] = f.rule
	}
	for at := range p.others {
		all[at] = rule{kind: otherKind(at)}
	}
	return all
}

// replace replaces what the Service with a path has added by the part next. nil: the Service is gone.
func (p *plan) replace(path services.Path, next *part) {
	had := p.parts[path]
	delete(p.parts, path)
	for i := range had.frontends {
		p.unclaim(&had.frontends[i])
	}
	p.count(had, -1)
	if next == nil {
		return
	}
	p.parts[path] = *next
	for i := range next.frontends {
		p.claim(&next.frontends[i])
	}
	p.count(*next, 1)
}

// claim adds a frontend. Several Services may have the same address and port: Kubernetes prevents that only for
// ClusterIPs. Then the Service counts for which the address is a ClusterIP, or else the Service with the first path.
// The frontends of the others are its rivals.
func (p *plan) claim(f *frontend) {
	all := p.rivals[f.at]
	if first, ok := p.frontends[f.at]; ok {
		all = slices.Insert(all, 0, first)
	}
	i, _ := slices.BinarySearchFunc(all, f, func(had, f *frontend) int {
		if f.before(had) {
			return 1
		}
		return -1 // among equal frontends, the first one stays first
	})
	p.setClaims(f.at, slices.Insert(all, i, f))
}

// before reports whether f counts before another frontend with the same address and port.
func (f *frontend) before(other *frontend) bool {
	if f.external != other.external {
		return other.external
	}
	return f.path < other.path
}

// unclaim removes a frontend.
func (p *plan) unclaim(f *frontend) {
	all := slices.Insert(p.rivals[f.at], 0, p.frontends[f.at])
	p.setClaims(f.at, slices.DeleteFunc(all, func(one *frontend) bool { return one == f }))
}

// setClaims stores all frontends at an address. The first one counts, and the others are its rivals.
func (p *plan) setClaims(at address, all []*frontend) {
	p.note(at)
	delete(p.rivals, at)
	if len(all) == 0 {
		delete(p.frontends, at)
		return
	}
	if p.frontends[at] = all[0]; len(all) > 1 {
		p.rivals[at] = slices.Clone(all[1:])
	}
}

// count adds n to the counts of what a part adds beside its frontends. n is 1 when the part comes, and -1 when it goes.
func (p *plan) count(one part, n int) {
	for _, addr := range one.clusterIPs {
		p.addOther(address{netip.AddrPortFrom(addr, 0), aboutClusterIP}, n)
	}
	for _, addr := range one.hairpins {
		p.addOther(address{netip.AddrPortFrom(addr, 0), aboutOwn}, n)
	}
	for _, at := range one.own {
		p.own.add(at, n)
	}
	for _, at := range one.dns {
		p.dns.add(at, n)
	}
	for _, at := range one.health {
		p.health.add(at, n)
	}
}

// addOther adds n to the count of an address that is no port of a Service.
func (p *plan) addOther(at address, n int) {
	p.note(at)
	p.others.add(at, n)
}

// setPods replaces the networks of this node's pods, and their rules.
func (p *plan) setPods(pods []netip.Prefix) {
	add := func(networks []netip.Prefix, n int) {
		for _, network := range networks {
			at := netip.AddrPortFrom(network.Addr(), uint16(network.Bits())) //nolint:gosec // at most 128
			p.addOther(address{at, aboutPods}, n)
		}
	}
	add(p.pods, -1)
	p.pods = pods
	add(p.pods, 1)
}

// planner makes plans and keeps them current. It has what a plan depends on beside the state.
type planner struct {
	node   string
	direct []netip.Prefix // networks that the node reaches by itself
	full   bool           // the edge serves all Services, in place of kube-proxy
	spread bool           // see Config.Spread
}

// spreads reports whether each endpoint of a frontend has the same chance to get a connection.
func (n planner) spreads(f frontend) bool { return n.spread || f.service.GetSpread() }

// plan returns a new plan for a state.
func (n planner) plan(s *services.State) *plan {
	p := newPlan()
	n.renew(p, s)
	return p
}

// renew makes p the plan of a state. It makes all parts anew.
func (n planner) renew(p *plan, s *services.State) {
	p.node = s.Node(n.node)
	p.setPods(n.pods(s))
	for path := range p.parts {
		if serviceAt(s, path) == nil {
			p.replace(path, nil)
		}
	}
	for path := range s.Services() {
		n.renewPart(p, s, path)
	}
}

// update makes p the plan of a state. d is what has changed since p was the plan of the state before.
func (n planner) update(p *plan, s *services.State, d *services.Difference) {
	changed := make(map[services.Path]struct{})
	nodes := make(map[string]struct{})
	addrs := make(map[netip.Addr]struct{}) // ClusterIPs that come or go
	for _, path := range slices.Concat(d.Deleted, pathsOf(d.Set)) {
		if node, ok := strings.CutPrefix(path, services.NodePath("")); ok {
			nodes[node] = struct{}{}
			continue
		}
		if service := services.ServiceOf(path); service != "" {
			path = service
		} else {
			differ(addrs, p.parts[path].service.GetClusterIps(), serviceAt(s, path).GetClusterIps())
		}
		changed[path] = struct{}{}
	}
	if had := p.node; had != s.Node(n.node) {
		if !sameNode(had, s.Node(n.node)) {
			n.renew(p, s)
			return
		}
		p.node = s.Node(n.node)
	}
	if len(nodes)+len(addrs) > 0 {
		for path := range s.ServicesWith(func(node, address string) bool {
			if _, ok := nodes[node]; ok {
				return true
			}
			if len(addrs) == 0 {
				return false
			}
			addr, _ := netip.ParseAddr(address) // the state has no others
			_, ok := addrs[addr.Unmap()]
			return ok
		}) {
			changed[path] = struct{}{}
		}
	}
	for path := range changed {
		n.renewPart(p, s, path)
	}
}

// differ adds to all the addresses that only one of two lists has.
func differ(all map[netip.Addr]struct{}, lists ...[]string) {
	for _, text := range slices.Concat(lists...) {
		if slices.Contains(lists[0], text) == slices.Contains(lists[1], text) {
			continue
		}
		if addr, err := netip.ParseAddr(text); err == nil {
			all[addr.Unmap()] = struct{}{}
		}
	}
}

// sameNode reports whether two versions of this node's Node lead to the same parts of Services that have no endpoint
// on this node, and to the same networks of pods.
func sameNode(a, b *services.Node) bool {
	return a.GetZone() == b.GetZone() && slices.Equal(a.GetPodCidrs(), b.GetPodCidrs())
}

// renewPart makes the part of the Service with a path again.
func (n planner) renewPart(p *plan, s *services.State, path services.Path) {
	service := serviceAt(s, path)
	if service == nil {
		p.replace(path, nil)
		return
	}
	next := n.part(s, path, service)
	p.replace(path, &next)
}

// serviceAt returns the Service with a path, or nil.
func serviceAt(s *services.State, path services.Path) *services.Service {
	namespace, name, _ := services.CutService(path)
	return s.Service(namespace, name)
}

// pods returns the networks of this node's pods. Only mode full needs them.
func (n planner) pods(s *services.State) (all []netip.Prefix) {
	if !n.full {
		return nil
	}
	for _, text := range s.Node(n.node).GetPodCidrs() {
		if p, err := netip.ParsePrefix(text); err == nil && p.Bits() > 0 {
			all = append(all, p.Masked())
		}
	}
	return withoutOverlaps(all)
}

// withoutOverlaps sorts networks, and leaves out each network that lies in another one: the kernel takes no networks
// that overlap. It changes all.
func withoutOverlaps(all []netip.Prefix) []netip.Prefix {
	slices.SortFunc(all, func(a, b netip.Prefix) int { // a network comes before those that lie in it
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	kept := all[:0]
	for _, p := range all {
		if len(kept) == 0 || !kept[len(kept)-1].Overlaps(p) {
			kept = append(kept, p)
		}
	}
	return kept
}

func pathsOf(items []*pb.Item) []services.Path {
	all := make([]services.Path, len(items))
	for i, item := range items {
		all[i] = item.GetPath()
	}
	return all
}

// part returns what a Service adds to a plan: nothing if it has no ClusterIP, or if another proxy serves it.
func (n planner) part(s *services.State, path services.Path, service *services.Service) (p part) {
	p.service = service
	if len(service.GetClusterIps()) == 0 || service.GetOtherProxy() {
		return p
	}
	if service.GetClusterDns() {
		p.dns = queryAddresses(service)
	}
	if at, ok := n.healthOf(path, service); ok {
		p.health = []healthPort{at}
	}
	endpoints := s.Endpoints(path)
	for _, e := range endpoints {
		addr, ok := addressOf(s, e.Endpoint)
		if !ok || services.Home(e.Endpoint) != n.node {
			continue
		}
		for _, port := range e.GetPorts() {
			if at, ok := number(port); ok && served(port) {
				p.own = append(p.own, address{netip.AddrPortFrom(addr, at), port.GetProtocol()})
			}
		}
	}
	for f := range n.frontends(path, service) {
		var ok bool
		if f.rule, ok = n.rule(s, f, endpoints); ok {
			p.frontends = append(p.frontends, f)
			p.hairpins = append(p.hairpins, n.hairpins(s, endpoints, f.rule.ends, f.rule.local)...)
		}
	}
	if n.full {
		p.clusterIPs = clusterIPs(service)
	}
	return p
}

// rule returns what the kernel has to do with packets to a frontend. ok is false if kube-proxy serves the frontend.
func (n planner) rule(s *services.State, f frontend, endpoints []services.Named) (r rule, ok bool) {
	self := n.self(s)
	if !n.full {
		w := n.ways(s, f, chosen(f, endpoints, self))
		if !w.relayed() {
			return r, false
		}
		return w.rule(f, true, n.spreads(f)), true
	}
	c := services.Choose(f.service, f.port, f.at.Addr(), endpoints, self)
	r = n.ways(s, f, listOf(f, c)).rule(f, c.Anywhere, n.spreads(f))
	if f.external && f.service.GetExternalLocal() && c.Anywhere {
		r.kind, r.inside = toSplit, r.kind
		if r.inside == toDrop {
			r.inside = toReject
		}
		r.sticky = f.service.GetAffinitySeconds() // for callers outside: the relay knows only those of this node
		r.local = addresses(n.ways(s, f, c.Local).direct)
	}
	if f.at.protocol == protocolUDP {
		w := n.ways(s, f, services.Serving(f.port, f.at.Addr(), endpoints))
		r.relayServes = len(w.far) > 0
		r.serving = slices.DeleteFunc(addresses(w.byKernel()), r.permits)
	}
	return r, true
}

// addresses returns where endpoints listen, sorted.
func addresses(of []way) (all []netip.AddrPort) {
	for _, one := range of {
		all = append(all, one.address())
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	return all
}

// byKernel returns the ways to endpoints to which the kernel may send packets. As kube-proxy does, the kernel tries
// endpoints of which nobody knows a way, if there are no others.
func (w ways) byKernel() []way {
	if len(w.direct)+len(w.far) == 0 {
		return w.unreached
	}
	return w.direct
}

// rule returns what the kernel has to do with packets to a frontend with these ways. anywhere says that the frontend
// has usable endpoints on some node. With spread, the relay chooses between direct and far endpoints, since the kernel
// cannot.
func (w ways) rule(f frontend, anywhere, spread bool) rule {
	r := rule{sticky: f.service.GetAffinitySeconds(), masquerade: f.external}
	direct := w.byKernel()
	switch {
	case len(direct) > 0:
		r.kind, r.ends = toEnds, addresses(direct)
		if spread && len(w.far) > 0 { // flows that the kernel has sent to ends may stay there
			r.kind, r.sticky, r.masquerade = toRelay, 0, false
		}
	case len(w.far) > 0:
		r.kind, r.sticky, r.masquerade = toRelay, 0, false // the relay itself keeps the endpoints of callers
	case anywhere && len(w.none) == 0:
		r = rule{kind: toDrop}
	default:
		r = rule{kind: toReject}
	}
	return r
}

// hairpins returns which endpoints in the lists are pods of this node.
func (n planner) hairpins(s *services.State, endpoints []services.Named, lists ...[]netip.AddrPort) (all []netip.Addr) {
	ours := make(map[netip.Addr]struct{})
	for _, e := range endpoints {
		if addr, ok := addressOf(s, e.Endpoint); ok && services.Home(e.Endpoint) == n.node {
			ours[addr] = struct{}{}
		}
	}
	for _, text := range s.Node(n.node).GetInternalIps() {
		if addr, err := netip.ParseAddr(text); err == nil {
			delete(ours, addr.Unmap()) // a connection of the node to itself needs no masquerading: loopback leads to it
		}
	}
	for _, list := range lists {
		for _, end := range list {
			if _, ok := ours[end.Addr()]; ok {
				all = append(all, end.Addr())
			}
		}
	}
	return all
}

func (n planner) self(s *services.State) services.Self {
	return services.Self{Node: n.node, Zone: s.Node(n.node).GetZone()}
}

// addressOf returns the address of an endpoint. ok is false if no endpoint can have that address. A ClusterIP is such
// an address, which Kubernetes permits in an EndpointSlice: a connection to it would come back to the relay.
func addressOf(s *services.State, e *services.Endpoint) (addr netip.Addr, ok bool) {
	addr, err := netip.ParseAddr(e.GetAddress())
	addr = addr.Unmap()
	return addr, err == nil && addr.IsGlobalUnicast() && !s.IsClusterIP(addr)
}

// dnsPort is the port of DNS servers.
const dnsPort = 53

// queryAddresses returns the addresses at which pods ask a Service that is the cluster's DNS.
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

// mayRedirect reports whether an address can be a ClusterIP. Rules for any other address, such as loopback, would cut
// off the node.
func mayRedirect(addr netip.Addr) bool { return addr.IsGlobalUnicast() && addr != addr6 }

func number(p *services.Port) (uint16, bool) {
	n := p.GetPort()
	return uint16(n), n > 0 && n <= 0xffff //nolint:gosec // checked beside it
}

// served reports whether the relay serves the protocol of a port.
func served(p *services.Port) bool {
	return p.GetProtocol() == protocolTCP || p.GetProtocol() == protocolUDP
}

// clusterIPs returns the ClusterIPs of a Service.
func clusterIPs(service *services.Service) []netip.Addr { return permitted(service.GetClusterIps()) }

// externalIPs returns the external IPs of a Service, and the addresses of its load balancers: callers on this node need
// not go by these.
func externalIPs(service *services.Service) []netip.Addr {
	all := permitted(service.GetExternalIps())
	if !service.GetLoadBalancerLimited() {
		for _, addr := range permitted(service.GetLoadBalancerIps()) {
			if !slices.Contains(all, addr) {
				all = append(all, addr)
			}
		}
	}
	return all[:min(len(all), services.MaxAddresses)]
}

// permitted returns the addresses that can be those of a Service, MaxAddresses at most.
func permitted(texts []string) (all []netip.Addr) {
	for _, text := range texts[:min(len(texts), services.MaxAddresses)] {
		if addr, err := netip.ParseAddr(text); err == nil && mayRedirect(addr.Unmap()) {
			all = append(all, addr.Unmap())
		}
	}
	return all
}

// frontends yields the ports of a Service that the edge may have to serve: TCP and UDP at each of its ClusterIPs. In
// place of kube-proxy, it also serves SCTP, externalIPs and node ports.
func (n planner) frontends(path services.Path, service *services.Service) func(yield func(frontend) bool) {
	return func(yield func(frontend) bool) {
		if service.GetOtherProxy() {
			return
		}
		cluster, ports := clusterIPs(service), service.GetPorts()
		ports = ports[:min(len(ports), services.MaxPorts)]
		each := func(addrs []netip.Addr, external bool, number func(*services.Port) (uint16, bool)) bool {
			for _, addr := range addrs {
				for _, port := range ports {
					at, ok := number(port)
					if !ok || !served(port) && (!n.full || port.GetProtocol() != protocolSCTP) {
						continue
					}
					if !yield(frontend{at: address{netip.AddrPortFrom(addr, at), port.GetProtocol()}, path: path,
						service: service, port: port, external: external}) {
						return false
					}
				}
			}
			return true
		}
		if !each(cluster, false, number) || !n.full || len(cluster) == 0 {
			return
		}
		// A Service has endpoints only of the families (IPv4, IPv6) of its ClusterIPs. Like kube-proxy, the edge writes no
		// rules for external addresses of another family: packets to them take their usual route.
		ofOtherFamily := func(one netip.Addr) bool {
			return !slices.ContainsFunc(cluster, func(a netip.Addr) bool { return a.Is4() == one.Is4() })
		}
		if !each(slices.DeleteFunc(externalIPs(service), ofOtherFamily), true, number) {
			return
		}
		every := []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
		each(slices.DeleteFunc(every, ofOtherFamily), true, func(p *services.Port) (uint16, bool) {
			at := p.GetNodePort()
			return uint16(at), at > 0 && at <= 0xffff //nolint:gosec // checked beside it
		})
	}
}

// way is an endpoint that a connection may use, with port and protocol.
type way struct {
	services.Named
	port     uint16
	protocol string
}

// address returns where the endpoint listens.
func (w way) address() netip.AddrPort {
	addr, _ := netip.ParseAddr(w.GetAddress()) // the state has only endpoints whose address can be parsed
	return netip.AddrPortFrom(addr.Unmap(), w.port)
}

// target returns the endpoint as the edge names it to the cloud.
func (w way) target() string {
	return services.Target{Endpoint: w.Path, Protocol: w.protocol, Port: w.port}.String()
}

// ways are the endpoints that connections to a frontend may use.
type ways struct {
	direct []way // this node reaches them by itself
	far    []way // the tunnel leads to them
	none   []way // neither the node nor the tunnel is known to reach them
	// unreached are the ways of none whose address an endpoint may have. Packets may get there by routes that the edge
	// does not know.
	unreached []way
}

// relayed reports whether this edge serves the frontend: one endpoint is out of reach for kube-proxy, and the node or
// the tunnel reaches another one. kube-proxy does not know which endpoints it cannot reach, and would send connections
// to all of them.
func (w ways) relayed() bool {
	return len(w.far)+len(w.none) > 0 && len(w.direct)+len(w.far) > 0
}

// ways sorts endpoints of a frontend's Service by the way that leads to them.
func (n planner) ways(s *services.State, f frontend, endpoints []services.Named) (w ways) {
	for _, e := range endpoints {
		one := way{e, services.TargetPort(e.Endpoint, f.port), f.at.protocol}
		addr, ok := addressOf(s, e.Endpoint)
		switch {
		// An IPv4 address in IPv6 form passes Choose for IPv6. The kernel refuses a table with such an endpoint.
		case !ok || addr.Is4() != f.at.Addr().Is4():
			w.none = append(w.none, one)
		case n.isDirect(e.Endpoint):
			w.direct = append(w.direct, one)
		case (e.GetCluster() || s.Node(services.Home(e.Endpoint)).GetEdge()) && served(f.port):
			w.far = append(w.far, one)
		default:
			w.none, w.unreached = append(w.none, one), append(w.unreached, one)
		}
	}
	return w
}

// chosen returns the endpoints that Kubernetes permits for connections of this node and its pods to a frontend.
func chosen(f frontend, endpoints []services.Named, self services.Self) []services.Named {
	return listOf(f, services.Choose(f.service, f.port, f.at.Addr(), endpoints, self))
}

func listOf(f frontend, c services.Choice) []services.Named {
	if f.service.GetInternalLocal() && !f.external {
		return c.Local
	}
	return c.Cluster
}

// isDirect reports whether this node reaches an endpoint by itself.
func (n planner) isDirect(e *services.Endpoint) bool {
	return services.Home(e) == n.node || n.isRouted(e)
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
