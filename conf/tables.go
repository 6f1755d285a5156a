package conf

// The types of this file mirror the tables of a configuration file, key by key. decode fills them, and
// [Cloud] and [Edge] are made from them. cloud.toml and edge.toml explain each key.
//
// Every field has a tag with the name of its key. A field's type is the type of its value in TOML. A
// pointer tells a missing key or table from an empty one.
//
// The other tags are for docs/configuration.md. The tag `is` says which values a number, a text or a list may
// have. Its value is a form, which valueForms in reference_test.go explains, or "one of" and the values
// themselves. The tag `from` says that SuperEdge 0.2 to 0.8.0 has the same key.

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
			GRPCPort     int      `toml:"grpcport" is:"port" from:"superedge"`
			Listen       string   `toml:"listen" is:"host:port"`
			WebSocket    string   `toml:"websocket" is:"host:port"`
			ProxyFrom    []string `toml:"proxyfrom" is:"network"`
			Cert         string   `toml:"cert" is:"path" from:"superedge"`
			Key          string   `toml:"key" is:"path" from:"superedge"`
			TokenFile    string   `toml:"tokenfile" is:"path" from:"superedge"`
			AllowShared  bool     `toml:"allowshared"`
			Congestion   string   `toml:"congestion" is:"congestion control"`
			LogPort      int      `toml:"logport" is:"port" from:"superedge"`
			ChannelzAddr string   `toml:"channelzaddr" is:"host:port" from:"superedge"`
		} `toml:"server"`
		// [mode.cloud.stream.dns]
		DNS dnsKeys `toml:"dns"`
		// [mode.cloud.stream.peers]
		Peers struct {
			Service    string   `toml:"service" is:"host:port"`
			Addresses  []string `toml:"addresses" is:"host:port"`
			CA         string   `toml:"ca" is:"path"`
			Cert       string   `toml:"cert" is:"path"`
			Key        string   `toml:"key" is:"path"`
			ServerName string   `toml:"servername" is:"name"`
		} `toml:"peers"`
	} `toml:"stream"`
	HTTPS struct {
		Cert        string       `toml:"cert" is:"path" from:"superedge"`
		Key         string       `toml:"key" is:"path" from:"superedge"`
		TLS         string       `toml:"tls" is:"one of auto passthrough terminate"`
		ClientCA    string       `toml:"clientca" is:"path"`
		ClientNames []string     `toml:"clientnames" is:"name"`
		Listen      string       `toml:"listen" is:"IP address"`
		Callers     []callerKeys `toml:"callers"`
		AllowFrom   []string     `toml:"allowfrom" is:"network"`
		ProxyFrom   []string     `toml:"proxyfrom" is:"network"`
		// nil if the key is missing: then the cloud asks Kubernetes only if another setting needs Kubernetes.
		Kubernetes *bool `toml:"kubernetes"`
		// [mode.cloud.https.addr]: the key of a line is a port that the cloud opens, the value is the target that the
		// edge dials.
		Addr    map[string]string `toml:"addr" is:"host:port" from:"superedge"`
		Kubelet struct {
			Cert     string `toml:"cert" is:"path"`
			Key      string `toml:"key" is:"path"`
			CA       string `toml:"ca" is:"path"`
			Insecure bool   `toml:"insecure"`
		} `toml:"kubelet"`
	} `toml:"https"`
	Join   joinKeys   `toml:"join"`
	Limits limitsKeys `toml:"limits"`
	// [mode.cloud.tcp]: the key of a line is the address to listen on, the value is the target. The next three tables
	// have the same addresses as keys.
	TCP          map[string]string   `toml:"tcp" is:"target" from:"superedge"`
	TCPAllow     map[string][]string `toml:"tcpallow" is:"network"`
	TCPProxyFrom map[string][]string `toml:"tcpproxyfrom" is:"network"`
	TCPSendProxy map[string]string   `toml:"tcpsendproxy" is:"one of v1 v2"`
	// [mode.cloud.udp] and [mode.cloud.udpallow] are like tcp and tcpallow, for datagrams.
	UDP      map[string]string   `toml:"udp" is:"target"`
	UDPAllow map[string][]string `toml:"udpallow" is:"network"`
	Egress   egressKeys          `toml:"egress"`
	Services *cloudServicesKeys  `toml:"services"` // nil: the table is missing, so the feature is off
	Admin    struct {
		Socket       string `toml:"socket" is:"path"`
		Inventory    string `toml:"inventory" is:"path"`
		NodeSelector string `toml:"nodeselector" is:"label selector"`
		Forwards     string `toml:"forwards" is:"path"`
		Page         string `toml:"page" is:"host:port"`
	} `toml:"admin"`
	Audit struct {
		// A path, or the word stdout.
		File string `toml:"file" is:"path"`
	} `toml:"audit"`
	Traces struct {
		Endpoint   string `toml:"endpoint" is:"collector"`
		PerMillion int    `toml:"permillion" is:"number of a million"`
	} `toml:"traces"`
}

// callerKeys is an element of callers in [mode.cloud.https].
type callerKeys struct {
	Name string   `toml:"name" is:"name"`
	May  []string `toml:"may" is:"name"`
}

// dnsKeys is [mode.cloud.stream.dns].
type dnsKeys struct {
	// With true, the cloud does not use Kubernetes for names, and ignores the keys about Kubernetes. The name of the key
	// is SuperEdge's.
	Debug     bool   `toml:"debug" from:"superedge"`
	ConfigMap string `toml:"configmap" is:"name" from:"superedge"`
	Hosts     string `toml:"hosts" is:"path" from:"superedge"`
	Service   string `toml:"service" is:"name" from:"superedge"`
	Listen    string `toml:"listen" is:"host:port"`
	// IP addresses of DNS servers, with a port or without.
	Upstream     []string `toml:"upstream" is:"IP address"`
	AllowFrom    []string `toml:"allowfrom" is:"network"`
	NodeSelector string   `toml:"nodeselector" is:"label selector"`
}

// joinKeys is [mode.cloud.join].
type joinKeys struct {
	CA              string   `toml:"ca" is:"path"`
	CAKey           string   `toml:"cakey" is:"path"`
	Signer          string   `toml:"signer" is:"one of file kubernetes"`
	SignerName      string   `toml:"signername" is:"name"`
	Lifetime        string   `toml:"lifetime" is:"duration"`
	Address         string   `toml:"address" is:"host:port"`
	CloudCA         string   `toml:"cloudca" is:"path"`
	Servers         []string `toml:"servers" is:"host:port"`
	ServiceAccounts []string `toml:"serviceaccounts" is:"name"`
	Audience        string   `toml:"audience" is:"name"`
	AnyNode         bool     `toml:"anynode"`
}

// limitsKeys is [mode.cloud.limits]. TestLimitForms checks that limits.go reads each key in the form of its tag `is`.
type limitsKeys struct {
	Joining             int `toml:"joining" is:"number"`
	JoiningPerAddress   int `toml:"joiningperaddress" is:"number"`
	JoinTimeout         int `toml:"jointimeout" is:"seconds"`
	Metadata            int `toml:"metadata" is:"KiB"`
	Conns               int `toml:"conns" is:"number"`
	Opens               int `toml:"opens" is:"number a second"`
	Dials               int `toml:"dials" is:"number"`
	Strangers           int `toml:"strangers" is:"number"`
	StrangersPerAddress int `toml:"strangersperaddress" is:"number"`
	HandshakeTimeout    int `toml:"handshaketimeout" is:"seconds"`
	ConnsPerAddress     int `toml:"connsperaddress" is:"number"`
	Flows               int `toml:"flows" is:"number"`
	FlowsPerAddress     int `toml:"flowsperaddress" is:"number"`
	Headers             int `toml:"headers" is:"KiB"`
	DNS                 int `toml:"dns" is:"number"`
	Lookups             int `toml:"lookups" is:"number"`
	Health              int `toml:"health" is:"number"`
}

// edgeLimitsKeys is [mode.edge.limits].
type edgeLimitsKeys struct {
	Conns  int `toml:"conns" is:"number"`
	Dials  int `toml:"dials" is:"number"`
	Flows  int `toml:"flows" is:"number"`
	Health int `toml:"health" is:"number"`
}

// egressKeys is [mode.cloud.egress].
type egressKeys struct {
	GRPC         []string `toml:"grpc" is:"listener"`
	HTTPConnect  []string `toml:"httpconnect" is:"listener"`
	Cert         string   `toml:"cert" is:"path"`
	Key          string   `toml:"key" is:"path"`
	ClientCA     string   `toml:"clientca" is:"path"`
	ClientNames  []string `toml:"clientnames" is:"name"`
	Strategies   []string `toml:"strategies" is:"one of destHost cidr defaultRoute default"`
	DefaultNodes []string `toml:"defaultnodes" is:"name"`
	Kubernetes   bool     `toml:"kubernetes"`
	// With true, the cloud also exports metrics under the names of Konnectivity's server.
	OldMetrics bool     `toml:"konnectivitymetrics"`
	AgentPort  int      `toml:"agentport" is:"port"`
	ProxyFrom  []string `toml:"proxyfrom" is:"network"`
}

// cloudServicesKeys is [mode.cloud.services].
type cloudServicesKeys struct {
	Namespaces []string `toml:"namespaces" is:"name"`
	Allow      []string `toml:"allow" is:"one of edge cluster"`

	ClusterDomain string `toml:"clusterdomain" is:"name"`

	Mirror *cloudMirrorKeys `toml:"mirror"` // nil: the table is missing, so the feature is off
}

// cloudMirrorKeys is [mode.cloud.services.mirror].
type cloudMirrorKeys struct {
	Ports   string `toml:"ports" is:"range of ports"`
	Service string `toml:"service" is:"name"`
}

// edgeTable is [mode.edge].
type edgeTable struct {
	Node   string   `toml:"node" is:"name"`
	Allow  []string `toml:"allow" is:"allow entry"`
	Stream struct {
		// [mode.edge.stream.client]
		Client struct {
			Token     string `toml:"token" is:"secret" from:"superedge"`
			TokenFile string `toml:"tokenfile" is:"path"`
			NodeCert  string `toml:"nodecert" is:"path"`
			NodeKey   string `toml:"nodekey" is:"path"`
			Updates   bool   `toml:"updates"`
			Cert      string `toml:"cert" is:"path" from:"superedge"`
			// The server name to verify in the cloud's certificate. The name of the key is SuperEdge's.
			DNS string `toml:"dns" is:"name" from:"superedge"`
			// The address of the cloud. The name of the key is SuperEdge's.
			ServerName   string   `toml:"servername" is:"host:port" from:"superedge"`
			Servers      []string `toml:"servers" is:"server"`
			Proxy        string   `toml:"proxy" is:"proxy"`
			ProxyFile    string   `toml:"proxyfile" is:"path"`
			ProxyCA      string   `toml:"proxyca" is:"path"`
			Sessions     string   `toml:"sessions" is:"one of one all"`
			Connections  int      `toml:"connections" is:"number"`
			Congestion   string   `toml:"congestion" is:"congestion control"`
			Multipath    bool     `toml:"multipath"`
			LogPort      int      `toml:"logport" is:"port" from:"superedge"`
			ChannelzAddr string   `toml:"channelzaddr" is:"host:port" from:"superedge"`
		} `toml:"client"`
	} `toml:"stream"`
	HTTPS struct {
		Cert string `toml:"cert" is:"path" from:"superedge"`
		Key  string `toml:"key" is:"path" from:"superedge"`
	} `toml:"https"`
	Limits edgeLimitsKeys `toml:"limits"`
	Egress struct {
		Identifiers string `toml:"identifiers" is:"identifiers"`
	} `toml:"egress"`
	Konnectivity struct {
		Servers   []string `toml:"servers" is:"tls address"`
		CA        string   `toml:"ca" is:"path"`
		Cert      string   `toml:"cert" is:"path"`
		Key       string   `toml:"key" is:"path"`
		TokenFile string   `toml:"tokenfile" is:"path"`
	} `toml:"konnectivity"`
	CNI      *cniKeys          `toml:"cni"`      // nil: the table is missing, so the feature is off
	Services *edgeServicesKeys `toml:"services"` // nil: the table is missing, so the feature is off
	Admin    struct {
		Socket string `toml:"socket" is:"path"`
	} `toml:"admin"`
	Traces struct {
		Endpoint string `toml:"endpoint" is:"collector"`
	} `toml:"traces"`
}

// edgeServicesKeys is [mode.edge.services].
type edgeServicesKeys struct {
	Mode   string   `toml:"mode" is:"name"`
	State  string   `toml:"state" is:"path"`
	Direct []string `toml:"direct" is:"network"`
	Spread bool     `toml:"spread"`

	DNS           bool   `toml:"dns"`
	ClusterDomain string `toml:"clusterdomain" is:"name"`

	Near   string `toml:"near" is:"host:port"`
	NearCA string `toml:"nearca" is:"path"`
}

// cniKeys is [mode.edge.cni].
type cniKeys struct {
	ConfDir  string   `toml:"confdir" is:"path"`
	BinDir   string   `toml:"bindir" is:"path"`
	PodCIDRs []string `toml:"podcidrs" is:"network"`

	Bandwidth bool `toml:"bandwidth"`
	Routes    bool `toml:"routes"`
}
