package conf

// rule says what to do with a key that SuperEdge's tunnel has and this one does not. Exactly one field is
// set.
type rule struct {
	rename string // our name for the key, in the same table; accepted with a warning
	ignore string // why the key has no effect; a warning
	refuse string // what to write instead; an error, since ignoring the key would change what is served
}

// superEdgeRule returns the rule for a key, if there is one. SuperEdge 0.2 to 0.8.0 has our names. 0.5
// added metricsport, and 0.7 the egress table. 0.8.2 renamed nearly every key. The source is
// pkg/tunnel/conf/config.go of each version.
func superEdgeRule(key string) (rule, bool) {
	const (
		server = "mode.cloud.stream.server."
		client = "mode.edge.stream.client."
		egress = "mode.cloud.egress."
	)
	// A key with another name here is renamed. Any other key is refused if ignoring it would change what is
	// served, and else ignored.
	switch key {
	case server + "metricsport", server + "metrics_port":
		return rule{ignore: "/metrics is served on logport"}, true
	case server + "grpc_port":
		return rule{rename: "grpcport"}, true
	case server + "log_port", client + "log_port":
		return rule{rename: "logport"}, true
	case server + "channelz_addr", client + "channelz_addr":
		return rule{rename: "channelzaddr"}, true
	case client + "server_name":
		return rule{rename: "servername"}, true
	case "mode.cloud.tls":
		return rule{ignore: "TLS versions and cipher suites are not configurable; the weak ones are not offered"}, true
	case "mode.cloud.stream.register":
		return rule{refuse: "SuperEdge's [mode.cloud.stream.register] is [mode.cloud.stream.dns] here: " +
			"write configmap, hosts and service there"}, true
	case egress + "port", egress + "egressport":
		return rule{refuse: `SuperEdge's egress port is a line of grpc here: write grpc = ["tls://0.0.0.0:PORT"]`}, true
	case egress + "servercert":
		return rule{rename: "cert"}, true
	case egress + "serverkey":
		return rule{rename: "key"}, true
	case egress + "kubeconfig":
		return rule{ignore: "the egress front door needs no kubeconfig"}, true
	case "mode.cloud.http_proxy", "mode.cloud.httpproxy":
		return rule{refuse: "there is no such proxy here: remove it; " +
			"[mode.cloud.egress] httpconnect is what speaks HTTP CONNECT"}, true
	case "mode.cloud.ssh":
		return rule{refuse: `there is no such proxy here: remove it, and write a line per node in [mode.cloud.tcp], ` +
			`"127.0.0.1:2222" = "NODE/127.0.0.1:22"`}, true
	case "mode.edge.http_proxy", "mode.edge.httpproxy":
		return rule{refuse: "there is no such proxy here, and an edge dials nothing through the cloud: remove it"}, true
	default:
		return rule{}, false
	}
}
