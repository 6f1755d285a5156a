package conf

// rule says what to do with a key that SuperEdge's tunnel has and this program does not have. Exactly one
// field is set.
type rule struct {
	rename string // our name for the key, in the same table; accepted with a warning
	ignore string // why the key has no effect; accepted with this warning
	refuse string // what to write instead; refused with this error, since without the key callers would miss something
}

// superEdgeRule returns the rule for a key, if there is one.
func superEdgeRule(key string) (rule, bool) {
	r, ok := superEdgeRules()[key]
	return r, ok
}

// superEdgeRules returns all rules by key. SuperEdge 0.2 to 0.8.0 has our names. 0.5 added metricsport,
// and 0.7 the egress table. 0.8.2 renamed nearly every key. The source is pkg/tunnel/conf/config.go of
// each version.
func superEdgeRules() map[string]rule {
	const (
		server = "mode.cloud.stream.server."
		client = "mode.edge.stream.client."
		egress = "mode.cloud.egress."

		onLogPort = "/metrics is served on logport"
		egressTLS = `SuperEdge's egress port is a line of grpc here: write grpc = ["tls://0.0.0.0:PORT"]`
		connect   = "there is no such proxy here: remove it; " +
			"[mode.cloud.egress] httpconnect is what speaks HTTP CONNECT"
		noProxy = "an edge has no HTTP proxy here: remove it; pods reach Services of other nodes by [mode.edge.services]"
	)
	// A key that has another name here is renamed. Any other key is refused if callers would miss something
	// without it. Otherwise the key is ignored.
	return map[string]rule{
		server + "metricsport":   {ignore: onLogPort},
		server + "metrics_port":  {ignore: onLogPort},
		server + "grpc_port":     {rename: "grpcport"},
		server + "log_port":      {rename: "logport"},
		client + "log_port":      {rename: "logport"},
		server + "channelz_addr": {rename: "channelzaddr"},
		client + "channelz_addr": {rename: "channelzaddr"},
		client + "server_name":   {rename: "servername"},
		"mode.cloud.tls": {
			ignore: "TLS versions and cipher suites are not configurable; the weak ones are not offered",
		},
		"mode.cloud.stream.register": {
			refuse: "SuperEdge's [mode.cloud.stream.register] is [mode.cloud.stream.dns] here: " +
				"write configmap, hosts and service there",
		},
		egress + "port":         {refuse: egressTLS},
		egress + "egressport":   {refuse: egressTLS},
		egress + "servercert":   {rename: "cert"},
		egress + "serverkey":    {rename: "key"},
		egress + "kubeconfig":   {ignore: "the egress front door needs no kubeconfig"},
		"mode.cloud.http_proxy": {refuse: connect},
		"mode.cloud.httpproxy":  {refuse: connect},
		"mode.cloud.ssh": {
			refuse: `there is no such proxy here: remove it, and write a line per node in [mode.cloud.tcp], ` +
				`"127.0.0.1:2222" = "NODE/127.0.0.1:22"`,
		},
		"mode.edge.http_proxy": {refuse: noProxy},
		"mode.edge.httpproxy":  {refuse: noProxy},
	}
}
