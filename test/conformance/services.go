package conformance

// Services returns the tests of Services. They run once with kube-proxy on nodes that reach each other's pods, and
// once on nodes behind NAT, where edges in mode full take the place of kube-proxy and no route leads to a pod of
// another node.
func Services() Suite {
	const direct = "A pod of the test dials a pod of another node by its own address, not by a Service."
	return Suite{
		Heading: "Services with Kubernetes",
		Groups:  servicesGroups(),
		Control: Door{Key: "kube-proxy", Title: "kube-proxy, direct reach"},
		Doors:   []Door{{Key: "full", Title: "mode `full`, behind NAT"}},
		Excused: map[string]string{
			"[sig-network] Networking Granular Checks: Services should function for endpoint-Service: http": direct,
			"[sig-network] Networking Granular Checks: Services should function for endpoint-Service: udp":  direct,
			"[sig-network] Networking Granular Checks: Services should function for multiple endpoint-Services with same " +
				"selector": direct,
			"[sig-network] Services should implement NodePort and HealthCheckNodePort correctly when " +
				"ExternalTrafficPolicy changes": "A pod sees an address of its own node if the caller is on another one.",
		},
	}
}

// servicesGroups returns the groups of Services in the order of the table. Tests of load balancers, of SCTP, and those
// that restart kube-proxy are in none of them.
func servicesGroups() []Group {
	const (
		services = `^\[sig-network\] Services should `
		checks   = `^\[sig-network\] Networking Granular Checks: Services should `
		traffic  = `^\[sig-network\] Traffic Distribution should `
		resolves = `^\[sig-network\] DNS should `
	)
	return []Group{
		group("session affinity", false,
			services+`have session affinity `,
			services+`be able to switch session affinity `,
			checks+`function for client IP based session affinity: (http|udp)\b`),
		group("NodePort", false,
			services+`be able to create a functioning NodePort service`,
			services+`be able to update service type to NodePort listening on same port number but different protocols`,
			services+`(prevent NodePort collisions|check NodePort out-of-range|release NodePorts on delete)`,
			checks+`update nodePort: (http|udp)\b`,
			checks+`support basic nodePort: udp functionality`),
		group("endpoints that end, or are not ready", false,
			services+`(not )?be able to connect to terminating and unready endpoints `,
			services+`create endpoints for unready pods`,
			services+`fallback to (local )?terminating endpoints `,
			services+`be rejected `,
			`^\[sig-network\] Connectivity Pod Lifecycle should be able to have zero downtime on a Blue Green deployment `),
		group("policies and hints", false,
			services+`respect internalTrafficPolicy=Local `,
			services+`support externalTrafficPolicy=Local for type=NodePort`,
			services+`implement NodePort and HealthCheckNodePort correctly `,
			services+`fail health check node port if there are only terminating endpoints`,
			traffic+`route traffic `,
			`^\[sig-network\] Topology Hints should distribute endpoints evenly`),
		group("UDP", false,
			`^\[sig-network\] Conntrack should be able to `,
			checks+`(function for (endpoint|node|pod)-Service|update endpoints|be able to handle large requests): udp\b`),
		group("DNS", false,
			resolves+`provide (/etc/hosts entries|DNS for (ExternalName|pods|services|the cluster))`,
			resolves+`resolve DNS of partial qualified names for `,
			resolves+`support configurable pod DNS nameservers`,
			resolves+`work with (a search path containing|the pod containing) `,
			`^\[sig-network\] DNS HostNetwork should resolve DNS of partial qualified names `),
		group("EndpointSlices", false,
			`^\[sig-network\] EndpointSlice should `,
			`^\[sig-network\] EndpointSliceMirroring should `),
		group("other tests of Services", true,
			services+`(allow pods to hairpin|be able to (change the type|up and down)|be possible to connect|be updated) `,
			services+`(complete a service|connect to the .*ports|delete a collection|find a service) `,
			services+`(implement service\.kubernetes\.io/|provide secure|serve|support named) ?`,
			services+`(test the lifecycle of an Endpoint|work after the service has been recreated)`,
			checks+`(function for (endpoint|node|pod)-Service|update endpoints|be able to handle large requests): http\b`,
			checks+`function for (multiple endpoint-Services with same selector|service endpoints using hostNetwork)`,
			`^\[sig-network\] Service endpoints latency should not be very high`,
			`^\[sig-network\] Service CIDRs should create Services and serve on different Service CIDRs`),
	}
}
