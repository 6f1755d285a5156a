package choices

import "tunnel.example/tunnel/pkg/services"

func conditions() []row {
	return []row{{
		name: "no endpoint",
	}, {
		name: "only ready endpoints count",
		endpoints: []string{
			"10.0.0.1 node1 ready", "10.0.0.2 node2 ready",
			"10.0.0.3 node2 unready", "10.0.0.4 node3 draining",
		},
		cluster: "10.0.0.1:8080 10.0.0.2:8080",
	}, {
		name:      "an endpoint without a node counts",
		endpoints: []string{"10.0.0.1 - ready"},
		cluster:   "10.0.0.1:8080",
	}, {
		name: "none is ready: those which drain",
		endpoints: []string{
			"10.0.0.1 node1 unready", "10.0.0.2 node2 draining",
			"10.0.0.3 node3 ending", "10.0.0.4 node1 draining",
		},
		cluster: "10.0.0.2:8080 10.0.0.4:8080",
	}, {
		name:      "none is ready and none drains",
		endpoints: []string{"10.0.0.1 node1 unready", "10.0.0.2 node2 ending"},
	}}
}

func hints() []row {
	return []row{{
		name:      "endpoints for the zone",
		endpoints: []string{"10.0.0.1 node1 ready zones=b", "10.0.0.2 node2 ready zones=a", "10.0.0.3 node3 ready zones=b,a"},
		cluster:   "10.0.0.2:8080 10.0.0.3:8080",
	}, {
		name:      "an endpoint without a hint: none count",
		endpoints: []string{"10.0.0.1 node1 ready zones=a", "10.0.0.2 node2 ready"},
		cluster:   "10.0.0.1:8080 10.0.0.2:8080",
	}, {
		name:      "an endpoint that is not ready needs no hint",
		endpoints: []string{"10.0.0.1 node1 ready zones=a", "10.0.0.2 node2 ready zones=b", "10.0.0.3 node3 unready"},
		cluster:   "10.0.0.1:8080",
	}, {
		name:      "the only endpoint for the zone is not ready",
		endpoints: []string{"10.0.0.1 node1 unready zones=a", "10.0.0.2 node2 ready zones=b"},
		cluster:   "10.0.0.2:8080",
	}, {
		name:      "no hint is for the zone",
		endpoints: []string{"10.0.0.1 node1 ready zones=b", "10.0.0.2 node2 ready zones=c"},
		cluster:   "10.0.0.1:8080 10.0.0.2:8080",
	}, {
		name:      "the node has no zone",
		self:      &services.Self{Node: "node1"},
		endpoints: []string{"10.0.0.1 node1 ready zones=a", "10.0.0.2 node2 ready zones=b"},
		cluster:   "10.0.0.1:8080 10.0.0.2:8080",
	}, {
		name:      "hints do not count when endpoints drain",
		endpoints: []string{"10.0.0.1 node1 draining zones=a", "10.0.0.2 node2 draining zones=b"},
		cluster:   "10.0.0.1:8080 10.0.0.2:8080",
	}, {
		name: "endpoints for the node, and not for the zone",
		endpoints: []string{
			"10.0.0.1 node1 ready zones=a nodes=node1", "10.0.0.2 node2 ready zones=a nodes=node2",
			"10.0.0.3 node3 ready zones=b nodes=node3,node1",
		},
		cluster: "10.0.0.1:8080 10.0.0.3:8080",
	}, {
		name:      "no endpoint for the node: those for the zone",
		endpoints: []string{"10.0.0.2 node2 ready zones=a nodes=node2", "10.0.0.3 node3 ready zones=b nodes=node3"},
		cluster:   "10.0.0.2:8080",
	}, {
		name: "an endpoint without a hint for a node: those for the zone",
		endpoints: []string{
			"10.0.0.1 node1 ready zones=a nodes=node1", "10.0.0.2 node2 ready zones=a",
			"10.0.0.3 node3 ready zones=b",
		},
		cluster: "10.0.0.1:8080 10.0.0.2:8080",
	}, {
		name:      "hints for nodes without hints for zones",
		endpoints: []string{"10.0.0.1 node1 ready nodes=node1", "10.0.0.2 node2 ready nodes=node2"},
		cluster:   "10.0.0.1:8080",
	}, {
		name:      "the wish of the Service without hints",
		svc:       &services.Service{Distribution: "PreferSameNode"},
		endpoints: []string{"10.0.0.1 node1 ready", "10.0.0.2 node2 ready"},
		cluster:   "10.0.0.1:8080 10.0.0.2:8080",
	}}
}

func policies() []row {
	nodePort := []*services.Port{{Name: "http", Protocol: "TCP", Port: 80, NodePort: 30080}}
	both := []string{"10.0.0.1 node1 ready", "10.0.0.2 node2 ready"}
	return []row{{
		name:      "internal traffic stays on the node",
		svc:       &services.Service{InternalLocal: true},
		endpoints: both,
		local:     "10.0.0.1:8080",
	}, {
		name:          "internal traffic stays on the node, which has no endpoint",
		svc:           &services.Service{InternalLocal: true},
		endpoints:     []string{"10.0.0.2 node2 ready", "10.0.0.3 - ready", "10.0.0.4 node1 unready"},
		onlyElsewhere: true,
	}, {
		name:          "the node has no name, so no endpoint is local",
		svc:           &services.Service{InternalLocal: true},
		self:          &services.Self{},
		endpoints:     []string{"10.0.0.1 - ready"},
		onlyElsewhere: true,
	}, {
		name:      "a local endpoint drains, and one elsewhere is ready",
		svc:       &services.Service{InternalLocal: true},
		endpoints: []string{"10.0.0.1 node1 draining", "10.0.0.2 node2 ready"},
		local:     "10.0.0.1:8080",
	}, {
		name:      "a ready local endpoint goes before one that drains",
		svc:       &services.Service{InternalLocal: true},
		endpoints: []string{"10.0.0.1 node1 draining", "10.0.0.2 node1 ready"},
		local:     "10.0.0.2:8080",
	}, {
		name:      "hints do not count on the node itself",
		svc:       &services.Service{InternalLocal: true},
		endpoints: []string{"10.0.0.1 node1 ready zones=b nodes=node2"},
		local:     "10.0.0.1:8080",
	}, {
		name:      "a policy for external traffic that the Service does not have",
		svc:       &services.Service{ExternalLocal: true},
		endpoints: both,
		cluster:   "10.0.0.1:8080 10.0.0.2:8080",
	}, {
		name:      "external traffic stays on the node",
		svc:       &services.Service{ExternalLocal: true, Ports: nodePort},
		endpoints: both,
		cluster:   "10.0.0.1:8080 10.0.0.2:8080",
		local:     "10.0.0.1:8080",
	}, {
		name:      "external traffic to an external IP stays on the node",
		svc:       &services.Service{ExternalLocal: true, ExternalIps: []string{"192.0.2.1"}},
		endpoints: both,
		cluster:   "10.0.0.1:8080 10.0.0.2:8080",
		local:     "10.0.0.1:8080",
	}, {
		name:      "the load balancer's IP has the other family",
		svc:       &services.Service{ExternalLocal: true, LoadBalancerIps: []string{"2001:db8::1"}},
		endpoints: both,
		cluster:   "10.0.0.1:8080 10.0.0.2:8080",
	}, {
		name:      "internal traffic stays on the node, external traffic does not",
		svc:       &services.Service{InternalLocal: true, LoadBalancerIps: []string{"192.0.2.1"}},
		endpoints: both,
		cluster:   "10.0.0.1:8080 10.0.0.2:8080",
		local:     "10.0.0.1:8080",
	}, {
		name:      "all traffic stays on the node, which has no endpoint",
		svc:       &services.Service{InternalLocal: true, ExternalLocal: true, Ports: nodePort},
		endpoints: []string{"10.0.0.2 node2 ready"},
		cluster:   "10.0.0.2:8080", // for external traffic from the node itself
	}, {
		name:      "a local endpoint that drains is reachable, too",
		svc:       &services.Service{ExternalLocal: true, Ports: nodePort},
		endpoints: []string{"10.0.0.1 node1 draining", "10.0.0.2 node2 ready"},
		cluster:   "10.0.0.2:8080",
		local:     "10.0.0.1:8080",
		reachable: "10.0.0.2:8080 10.0.0.1:8080",
	}, {
		name:      "a local endpoint for another zone is reachable, too",
		svc:       &services.Service{ExternalLocal: true, Ports: nodePort},
		endpoints: []string{"10.0.0.1 node1 ready zones=b", "10.0.0.2 node2 ready zones=a", "10.0.0.3 node1 ready zones=a"},
		cluster:   "10.0.0.2:8080 10.0.0.3:8080",
		local:     "10.0.0.1:8080 10.0.0.3:8080",
		reachable: "10.0.0.2:8080 10.0.0.3:8080 10.0.0.1:8080",
	}}
}

func ports() []row {
	three := &services.Service{ExternalLocal: true, Ports: []*services.Port{
		{Name: "http", Protocol: "TCP", Port: 80, NodePort: 30080},
		{Name: "metrics", Protocol: "TCP", Port: 9090},
		{Name: "dns", Protocol: "UDP", Port: 53},
	}}
	served := []string{
		"10.0.0.1 node1 ready ports=http/TCP/8080,dns/UDP/5353",
		"10.0.0.2 node2 ready slice=web-2 ports=http/TCP/8081,metrics/TCP/9090,dns/TCP/53",
	}
	return []row{{
		name:      "each slice has its own number for a port",
		svc:       three,
		endpoints: served,
		cluster:   "10.0.0.1:8080 10.0.0.2:8081",
		local:     "10.0.0.1:8080",
	}, {
		name:      "only one slice has the port, which no node port leads to",
		svc:       three,
		port:      1,
		endpoints: served,
		cluster:   "10.0.0.2:9090",
	}, {
		name:      "the protocol has to be the same, too",
		svc:       three,
		port:      2,
		endpoints: served,
		cluster:   "10.0.0.1:5353",
	}, {
		name:      "a port without a name",
		svc:       &services.Service{Ports: []*services.Port{{Protocol: "TCP", Port: 80}}},
		endpoints: []string{"10.0.0.1 node1 ready ports=/TCP/8080", "10.0.0.2 node2 ready slice=web-2 ports=http/TCP/80"},
		cluster:   "10.0.0.1:8080",
	}, {
		name: "hints of endpoints that do not serve the port do not matter",
		svc:  three,
		port: 1,
		endpoints: []string{
			"10.0.0.1 node1 ready", "10.0.0.2 node2 ready zones=a slice=web-2 ports=metrics/TCP/9090",
			"10.0.0.3 node3 ready zones=b slice=web-2 ports=metrics/TCP/9090",
		},
		cluster: "10.0.0.2:9090",
	}}
}

func families() []row {
	both := []string{
		"10.0.0.1 node1 ready zones=a", "10.0.0.2 node2 ready zones=b",
		"fd00::1 node1 ready slice=web-6", "fd00::2 node2 ready slice=web-6",
	}
	return []row{{
		name:      "the family of IPv4",
		endpoints: both,
		cluster:   "10.0.0.1:8080",
	}, {
		name:      "the family of IPv6 has hints of its own",
		at:        "fd00:96::1",
		endpoints: both,
		cluster:   "[fd00::1]:8080 [fd00::2]:8080",
	}, {
		name: "an address that moves from one slice to another",
		endpoints: []string{
			"10.0.0.1 node1 ready", "10.0.0.2 node2 ready",
			"10.0.0.2 node2 ready slice=web-2", "10.0.0.3 node3 ready slice=web-2",
		},
		cluster: "10.0.0.1:8080 10.0.0.2:8080 10.0.0.3:8080",
	}, {
		name:      "a new pod has the address of one that terminates",
		endpoints: []string{"10.0.0.1 node1 draining", "10.0.0.1 node2 ready slice=web-2", "10.0.0.2 node2 ready"},
		cluster:   "10.0.0.1:8080 10.0.0.2:8080",
	}, {
		name:      "a new pod, not yet ready, has the address of one that drains",
		endpoints: []string{"10.0.0.1 node2 draining", "10.0.0.1 node1 unready slice=web-2"},
	}, {
		name:      "an address serves the port at two numbers",
		endpoints: []string{"10.0.0.1 node1 ready", "10.0.0.1 node1 ready slice=web-2 ports=http/TCP/8081"},
		cluster:   "10.0.0.1:8080 10.0.0.1:8081",
	}}
}
