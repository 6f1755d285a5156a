package hub

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Endpoint is one endpoint of a Service to which a connection may go.
type Endpoint struct {
	Addr netip.AddrPort
	Node tunnel.NodeName // the node of the endpoint; empty: the endpoint is on no node
	// Cloud says that the cloud itself may dial the endpoint: Config.Cluster allows it, and the edge of the endpoint's
	// node serves no Services.
	Cloud bool
}

// Endpoints returns the endpoints for TCP connections to a port of a Service, in random order. host is a ClusterIP, the
// name of a Service (web.shop.svc, with or without the cluster's domain), or the name of one endpoint of a headless
// Service (db-0.db.shop.svc). For any other host, Endpoints returns nothing and no error. The same holds for the
// ClusterIP of a Service that another proxy serves, or that only callers on its own nodes may use
// (internalTrafficPolicy).
//
// The endpoints are those that kube-proxy would use: see [services.Choose]. Hints for nodes and zones have no effect,
// since Endpoints does not know the caller's node. The names are those of Kubernetes' DNS specification
// (docs/specification.md of github.com/kubernetes/dns).
func (h *Hub) Endpoints(host string, port uint16) ([]Endpoint, error) {
	path, below, ok := h.serviceAt(host)
	if !ok {
		return nil, nil
	}
	_, err := netip.ParseAddr(host)
	byAddress := err == nil
	service, endpoints, synced := h.service(path)
	switch {
	case byAddress && (!synced || service == nil || service.GetOtherProxy() || service.GetInternalLocal()):
		return nil, nil
	case !synced:
		return nil, tunnel.Refusef(tunnel.Unreachable, "the cloud does not know the Services yet: try again")
	case service == nil:
		return nil, tunnel.Refusef(tunnel.Unreachable, "there is no Service %s in the namespaces of [mode.cloud.services]",
			host)
	case below != "" && !service.GetHeadless():
		return nil, tunnel.Refusef(tunnel.Unreachable, "only a headless Service has names of endpoints, such as %s", host)
	case service.GetOtherProxy() && !service.GetHeadless():
		return nil, tunnel.Refusef(tunnel.Unreachable, "no edge serves the Service %s: "+
			"it has a label for another proxy, or for none", host)
	case service.GetExternalName() != "":
		return nil, tunnel.Refusef(tunnel.Unreachable, "the Service %s is an alias: connect to %s", host,
			service.GetExternalName())
	}
	var found []Endpoint
	var refusal error
	if service.GetHeadless() {
		found, refusal = headless(host, service, endpoints, below, port)
	} else {
		found, refusal = behind(host, service, endpoints, port)
	}
	if refusal != nil {
		return nil, refusal
	}
	for i, e := range found {
		found[i].Cloud = e.Cloud && !h.isEdge(e.Node)
	}
	rand.Shuffle(len(found), func(i, j int) { found[i], found[j] = found[j], found[i] })
	return found, nil
}

// serviceAt returns the path of the Service that host names. below are the labels before the Service's name, such as
// db-0 in db-0.db.shop.svc. ok is false if host names no Service.
func (h *Hub) serviceAt(host string) (path services.Path, below string, ok bool) {
	if h.index == nil {
		return "", "", false
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if addr, err := netip.ParseAddr(host); err == nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		path, ok = h.index.at[addr.Unmap()]
		return path, "", ok
	}
	name, ok := strings.CutSuffix(strings.TrimSuffix(host, "."+h.cfg.Domain), ".svc")
	if !ok {
		return "", "", false
	}
	labels := strings.Split(name, ".")
	n := len(labels)
	if n < 2 || n > 3 || slices.Contains(labels, "") {
		return "", "", false
	}
	return services.ServicePath(labels[n-1], labels[n-2]), strings.Join(labels[:n-2], "."), true
}

// service returns a Service or nil, the Service's endpoints, and whether the hub knows all objects.
func (h *Hub) service(path services.Path) (*services.Service, []services.Named, bool) {
	h.mu.Lock()
	item := h.itemLocked(path)
	synced := h.synced
	var values []services.Named
	var encoded [][]byte
	if item != nil {
		for p, c := range h.groups[path].all() {
			values, encoded = append(values, services.Named{Path: p}), append(encoded, c.value)
		}
	}
	h.mu.Unlock() // the value of a change never changes
	service := new(services.Service)
	if item == nil || proto.Unmarshal(item.value, service) != nil {
		return nil, nil, synced
	}
	known := values[:0]
	for i, v := range values {
		if v.Endpoint = new(services.Endpoint); proto.Unmarshal(encoded[i], v.Endpoint) == nil {
			known = append(known, v)
		}
	}
	return service, known, synced
}

// behind returns the endpoints of a port of a Service with a ClusterIP. If host is an address, they are of its family,
// otherwise of both families.
func behind(host string, s *services.Service, all []services.Named, port uint16) (found []Endpoint, err error) {
	i := slices.IndexFunc(s.GetPorts(), func(p *services.Port) bool {
		return p.GetProtocol() == "TCP" && p.GetPort() == uint32(port)
	})
	if i < 0 {
		return nil, tunnel.Refusef(tunnel.Refused, "the Service %s has no TCP port %d", host, port)
	}
	served := s.GetPorts()[i]
	_, err = netip.ParseAddr(host)
	byAddress := err == nil
	for _, ip := range s.GetClusterIps() {
		at, err := netip.ParseAddr(ip)
		if err != nil || byAddress && at.Is4() != strings.Contains(host, ".") {
			continue
		}
		choice := services.Choose(s, served, at, all, services.Self{})
		list := choice.Cluster
		if s.GetInternalLocal() {
			list = choice.Local
		}
		for _, e := range list {
			found = add(found, e.Endpoint, services.TargetPort(e.Endpoint, served))
		}
	}
	switch {
	case len(found) > 0:
		return found, nil
	case s.GetInternalLocal():
		return nil, tunnel.Refusef(tunnel.Refused, "only callers on the nodes of its endpoints may use the Service %s "+
			"(internalTrafficPolicy: Local)", host)
	}
	return nil, tunnel.Refusef(tunnel.Refused, "no endpoint of the Service %s is ready", host)
}

// headless returns the endpoints of a headless Service that have a port. With below, it returns only the endpoint with
// that name.
func headless(
	host string, s *services.Service, all []services.Named, below string, port uint16,
) (found []Endpoint, err error) {
	for _, e := range all {
		named := below == "" || services.Hostname(e.Endpoint) == below
		has := slices.ContainsFunc(e.GetPorts(), func(p *services.Port) bool {
			return p.GetProtocol() == "TCP" && p.GetPort() == uint32(port)
		})
		if named && has && (e.GetReady() || s.GetPublishNotReady()) {
			found = add(found, e.Endpoint, port)
		}
	}
	if len(found) == 0 {
		return nil, tunnel.Refusef(tunnel.Refused, "no endpoint of the Service %s is ready and has the TCP port %d",
			host, port)
	}
	return found, nil
}

// add appends an endpoint, unless no endpoint may have its address.
func add(found []Endpoint, e *services.Endpoint, port uint16) []Endpoint {
	addr, err := netip.ParseAddr(e.GetAddress())
	if err != nil || !addr.IsGlobalUnicast() { // Kubernetes accepts no others. It would be a port of the machine itself.
		return found
	}
	return append(found, Endpoint{
		Addr: netip.AddrPortFrom(addr, port), Node: tunnel.NodeName(services.Home(e)), Cloud: e.GetCluster(),
	})
}

// index finds Services by their ClusterIPs. A nil index keeps nothing.
type index struct {
	at    map[netip.Addr]services.Path // the Service with a ClusterIP
	addrs map[services.Path][]netip.Addr
}

func newIndex() *index {
	return &index{at: make(map[netip.Addr]services.Path), addrs: make(map[services.Path][]netip.Addr)}
}

// set adds or changes an item.
func (x *index) set(p services.Path, value []byte) {
	if x == nil {
		return
	}
	if _, _, ok := services.CutService(p); !ok {
		return
	}
	x.forget(p)
	var s services.Service
	if proto.Unmarshal(value, &s) != nil {
		return
	}
	for _, ip := range s.GetClusterIps() {
		if addr, err := netip.ParseAddr(ip); err == nil {
			x.at[addr.Unmap()], x.addrs[p] = p, append(x.addrs[p], addr.Unmap())
		}
	}
}

// forget removes an item.
func (x *index) forget(p services.Path) {
	if x == nil {
		return
	}
	for _, addr := range x.addrs[p] {
		if x.at[addr] == p { // else another Service has got the address
			delete(x.at, addr)
		}
	}
	delete(x.addrs, p)
}
