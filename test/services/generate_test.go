package services

import (
	"fmt"
	"slices"

	"tunnel.example/tunnel/pkg/services"
)

// bytes is what a question is made of. After its end come zeros.
type bytes []byte

// below returns a number below n.
func (b *bytes) below(n int) int {
	if len(*b) == 0 {
		return 0
	}
	v := int((*b)[0]) % n
	*b = (*b)[1:]
	return v
}

// oneIn reports true once in n times.
func (b *bytes) oneIn(n int) bool { return b.below(n) == n-1 }

// some returns some elements of a list, at least so many.
func (b *bytes) some(list []string, least int) []string {
	var chosen []string
	bits := b.below(1 << len(list))
	for i, v := range list {
		if bits>>i&1 != 0 {
			chosen = append(chosen, v)
		}
	}
	if len(chosen) < least {
		return list[:least]
	}
	return chosen
}

func nodes() []string { return []string{"node1", "node2", "node3"} }

func zones() []string { return []string{"a", "b", "c"} }

// generate returns a question that the API server admits, apart from the names of ports: two ports may have one name
// if their protocols differ.
func generate(data []byte) question {
	b := bytes(data)
	q := question{svc: &services.Service{}}
	q.self.Node = append(nodes(), "")[b.below(4)]
	q.self.Zone = append(zones(), "")[b.below(4)]
	b.service(q.svc)
	habits := habits{zoneHints: b.below(3), nodeHints: b.below(3), conditions: b.below(3)}
	for i := range b.below(5) {
		q.endpoints = append(q.endpoints, b.slice(fmt.Sprint("web-", i), habits)...)
	}
	agree(q.endpoints)
	return q
}

func (b *bytes) service(svc *services.Service) {
	v4, v6 := "10.96.0.1", "fd00:96::1"
	svc.ClusterIps = [][]string{{v4}, {v6}, {v4, v6}, {v6, v4}}[b.below(4)]
	svc.InternalLocal = b.oneIn(2)
	svc.ExternalLocal = b.oneIn(2)
	svc.PublishNotReady = b.oneIn(4)
	svc.Distribution = []string{"", "PreferClose", "PreferSameZone", "PreferSameNode"}[b.below(4)]
	if b.oneIn(3) {
		svc.ExternalIps = b.some([]string{"192.0.2.1", "2001:db8::1"}, 1)
	}
	if b.oneIn(3) {
		svc.LoadBalancerIps = b.some([]string{"192.0.2.2", "2001:db8::2"}, 1)
	}
	for _, p := range b.ports() {
		if b.oneIn(3) {
			p.NodePort = 30000 + p.Port
		}
		svc.Ports = append(svc.Ports, p)
	}
}

// ports returns one to three ports. No two have the same name and protocol.
func (b *bytes) ports() []*services.Port {
	var ports []*services.Port
	for range 1 + b.below(3) {
		p := &services.Port{
			Name:     []string{"http", "", "dns", "metrics"}[b.below(4)],
			Protocol: []string{"TCP", "UDP", "SCTP"}[b.below(3)],
			Port:     []uint32{80, 8080, 53, 65535}[b.below(4)],
		}
		same := func(o *services.Port) bool { return o.Name == p.Name && o.Protocol == p.Protocol }
		if !slices.ContainsFunc(ports, same) {
			ports = append(ports, p)
		}
	}
	return ports
}

// habits are what the endpoints of a Service have in common. Without them, hardly any question would have a hint at
// every endpoint, or no ready endpoint.
type habits struct {
	zoneHints, nodeHints int // 0: none, 1: some endpoints have them, 2: all have them
	conditions           int // 0: mostly ready, 1: all combinations, 2: never ready
}

// slice returns the endpoints of an EndpointSlice. Other slices may hold the same addresses.
func (b *bytes) slice(name string, h habits) []services.Named {
	var endpoints []services.Named
	address := []string{"10.0.0.%d", "fd00::%d"}[b.below(2)]
	ports := b.ports()
	for i := range 8 {
		if !b.oneIn(2) {
			continue
		}
		e := &services.Endpoint{Address: fmt.Sprintf(address, i+1), Ports: ports}
		e.Node = append(nodes(), "")[b.below(4)]
		e.Zone = append(zones(), "")[b.below(4)]
		b.conditions(e, h.conditions)
		if h.zoneHints == 2 || h.zoneHints == 1 && b.oneIn(2) {
			e.ZoneHints = b.some(zones(), 1)
		}
		if h.nodeHints == 2 || h.nodeHints == 1 && b.oneIn(2) {
			e.NodeHints = b.some(nodes(), 1)
		}
		path := services.EndpointPath(namespace, "web", name, e.Address)
		endpoints = append(endpoints, services.Named{Path: path, Endpoint: e})
	}
	if b.oneIn(2) { // Choose asks for no order
		slices.Reverse(endpoints)
	}
	return endpoints
}

func (b *bytes) conditions(e *services.Endpoint, habit int) {
	if habit == 0 && !b.oneIn(4) {
		e.Ready, e.Serving = true, true
		return
	}
	e.Ready, e.Serving, e.Terminating = habit != 2 && b.oneIn(2), b.oneIn(2), b.oneIn(2)
}

// agree makes slices with the same address say the same of it. The endpoints with one address that terminate, and those
// that do not, may differ. If they differ otherwise, kube-proxy's answer depends on the order of a map.
func agree(endpoints []services.Named) {
	type key struct {
		address     string
		terminating bool
	}
	first := make(map[key]*services.Endpoint)
	for i, e := range endpoints {
		k := key{e.GetAddress(), e.GetTerminating()}
		f := first[k]
		if f == nil {
			first[k] = e.Endpoint
			continue
		}
		endpoints[i].Endpoint = &services.Endpoint{
			Address: f.Address, Node: f.Node, Zone: f.Zone, Ready: f.Ready, Serving: f.Serving, Terminating: f.Terminating,
			ZoneHints: f.ZoneHints, NodeHints: f.NodeHints, Ports: e.Ports,
		}
	}
}
