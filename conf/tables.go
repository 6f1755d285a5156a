package conf

// The types of this file mirror the tables of a configuration file, key by key. decode fills them, and
// [Cloud] and [Edge] are made from them. cloud.toml and edge.toml explain each key.
//
// Every field has a tag with the name of its key. A field's type is the type of its value in TOML. A
// pointer tells a missing key or table from an empty one.

// tables is a whole file.
type tables struct {
	Mode struct {
		Cloud *cloudTable `toml:"cloud"`
		Edge  *edgeTable  `toml:"edge"`
	} `toml:"mode"`
}

// cloudTable is [mode.cloud].
type cloudTable struct {
	Stream struct {
		// [mode.cloud.stream.server]
		Server struct {
			GRPCPort     int    `toml:"grpcport"`
			Cert         string `toml:"cert"`
			Key          string `toml:"key"`
			TokenFile    string `toml:"tokenfile"`
			AllowShared  bool   `toml:"allowshared"`
			LogPort      int    `toml:"logport"`
			ChannelzAddr string `toml:"channelzaddr"`
		} `toml:"server"`
		// [mode.cloud.stream.dns]
		DNS dnsKeys `toml:"dns"`
		// [mode.cloud.stream.peers]
		Peers struct {
			Service    string   `toml:"service"`
			Addresses  []string `toml:"addresses"`
			CA         string   `toml:"ca"`
			Cert       string   `toml:"cert"`
			Key        string   `toml:"key"`
			ServerName string   `toml:"servername"`
		} `toml:"peers"`
	} `toml:"stream"`
	HTTPS struct {
		Cert string `toml:"cert"`
		Key  string `toml:"key"`
		// "auto", "passthrough" or "terminate".
		TLS         string       `toml:"tls"`
		ClientCA    string       `toml:"clientca"`
		ClientNames []string     `toml:"clientnames"`
		Listen      string       `toml:"listen"`
		Callers     []callerKeys `toml:"callers"`
		AllowFrom   []string     `toml:"allowfrom"`
		// nil: the key is missing, which is neither true nor false.
		Kubernetes *bool `toml:"kubernetes"`
		// [mode.cloud.https.addr]: port here = target on the edge.
		Addr    map[string]string `toml:"addr"`
		Kubelet struct {
			Cert     string `toml:"cert"`
			Key      string `toml:"key"`
			CA       string `toml:"ca"`
			Insecure bool   `toml:"insecure"`
		} `toml:"kubelet"`
	} `toml:"https"`
	Join   joinKeys   `toml:"join"`
	Limits limitsKeys `toml:"limits"`
	// [mode.cloud.tcp]: address to listen on = target. [mode.cloud.tcpallow]: the same address = networks.
	TCP      map[string]string   `toml:"tcp"`
	TCPAllow map[string][]string `toml:"tcpallow"`
	Egress   egressKeys          `toml:"egress"`
	Admin    struct {
		Socket string `toml:"socket"`
	} `toml:"admin"`
}

// callerKeys is an element of callers in [mode.cloud.https].
type callerKeys struct {
	Name string   `toml:"name"`
	May  []string `toml:"may"`
}

// dnsKeys is [mode.cloud.stream.dns].
type dnsKeys struct {
	// true: Kubernetes is not used, and its keys are ignored. The name of the key is SuperEdge's.
	Debug     bool   `toml:"debug"`
	ConfigMap string `toml:"configmap"`
	Hosts     string `toml:"hosts"`
	Service   string `toml:"service"`
	Listen    string `toml:"listen"`
	// IP addresses of DNS servers, with a port or without.
	Upstream     []string `toml:"upstream"`
	AllowFrom    []string `toml:"allowfrom"`
	NodeSelector string   `toml:"nodeselector"`
}

// joinKeys is [mode.cloud.join].
type joinKeys struct {
	CA    string `toml:"ca"`
	CAKey string `toml:"cakey"`
	// "file" or "kubernetes".
	Signer     string `toml:"signer"`
	SignerName string `toml:"signername"`
	// A Go duration, such as "720h".
	Lifetime string `toml:"lifetime"`
	Address  string `toml:"address"`
	CloudCA  string `toml:"cloudca"`
	// "namespace/name" each.
	ServiceAccounts []string `toml:"serviceaccounts"`
	Audience        string   `toml:"audience"`
	AnyNode         bool     `toml:"anynode"`
}

// limitsKeys is [mode.cloud.limits]. Times are in seconds; metadata and headers are in KiB.
type limitsKeys struct {
	Joining             int `toml:"joining"`
	JoiningPerAddress   int `toml:"joiningperaddress"`
	JoinTimeout         int `toml:"jointimeout"`
	Metadata            int `toml:"metadata"`
	Conns               int `toml:"conns"`
	Opens               int `toml:"opens"`
	Dials               int `toml:"dials"`
	Strangers           int `toml:"strangers"`
	StrangersPerAddress int `toml:"strangersperaddress"`
	HandshakeTimeout    int `toml:"handshaketimeout"`
	ConnsPerAddress     int `toml:"connsperaddress"`
	Headers             int `toml:"headers"`
	DNS                 int `toml:"dns"`
	Lookups             int `toml:"lookups"`
	Health              int `toml:"health"`
}

// edgeLimitsKeys is [mode.edge.limits].
type edgeLimitsKeys struct {
	Conns  int `toml:"conns"`
	Dials  int `toml:"dials"`
	Health int `toml:"health"`
}

// egressKeys is [mode.cloud.egress].
type egressKeys struct {
	GRPC        []string `toml:"grpc"`
	HTTPConnect []string `toml:"httpconnect"`
	Cert        string   `toml:"cert"`
	Key         string   `toml:"key"`
	ClientCA    string   `toml:"clientca"`
	ClientNames []string `toml:"clientnames"`
	// Some of "destHost", "cidr", "defaultRoute", "default", in the order in which they are tried.
	Strategies   []string `toml:"strategies"`
	DefaultNodes []string `toml:"defaultnodes"`
	Kubernetes   bool     `toml:"kubernetes"`
	// Metrics also under the names of Konnectivity's server.
	OldMetrics bool `toml:"konnectivitymetrics"`
	AgentPort  int  `toml:"agentport"`
}

// edgeTable is [mode.edge].
type edgeTable struct {
	Node   string   `toml:"node"`
	Allow  []string `toml:"allow"`
	Stream struct {
		// [mode.edge.stream.client]
		Client struct {
			Token     string `toml:"token"`
			TokenFile string `toml:"tokenfile"`
			NodeCert  string `toml:"nodecert"`
			NodeKey   string `toml:"nodekey"`
			Cert      string `toml:"cert"`
			// The server name to verify in the cloud's certificate. The name of the key is SuperEdge's.
			DNS string `toml:"dns"`
			// The address of the cloud, host:port. The name of the key is SuperEdge's.
			ServerName string `toml:"servername"`
			// "one" or "all".
			Sessions     string `toml:"sessions"`
			Connections  int    `toml:"connections"`
			LogPort      int    `toml:"logport"`
			ChannelzAddr string `toml:"channelzaddr"`
		} `toml:"client"`
	} `toml:"stream"`
	HTTPS struct {
		Cert string `toml:"cert"`
		Key  string `toml:"key"`
	} `toml:"https"`
	Limits edgeLimitsKeys `toml:"limits"`
	Egress struct {
		Identifiers string `toml:"identifiers"`
	} `toml:"egress"`
	Konnectivity struct {
		Servers   []string `toml:"servers"`
		CA        string   `toml:"ca"`
		Cert      string   `toml:"cert"`
		Key       string   `toml:"key"`
		TokenFile string   `toml:"tokenfile"`
	} `toml:"konnectivity"`
	Admin struct {
		Socket string `toml:"socket"`
	} `toml:"admin"`
}
