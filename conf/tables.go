package conf

// The tables of the file, key by key. What they mean is said where they become a
// [Cloud] or an [Edge], and in cloud.toml and edge.toml.

type tables struct {
	Mode struct {
		Cloud *cloudTable `toml:"cloud"`
		Edge  *edgeTable  `toml:"edge"`
	} `toml:"mode"`
}

type cloudTable struct {
	Stream struct {
		Server struct {
			GRPCPort     int    `toml:"grpcport"`
			Cert         string `toml:"cert"`
			Key          string `toml:"key"`
			TokenFile    string `toml:"tokenfile"`
			AllowShared  bool   `toml:"allowshared"`
			LogPort      int    `toml:"logport"`
			ChannelzAddr string `toml:"channelzaddr"`
		} `toml:"server"`
		DNS   dnsKeys `toml:"dns"`
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
		Cert        string            `toml:"cert"`
		Key         string            `toml:"key"`
		TLS         string            `toml:"tls"`
		ClientCA    string            `toml:"clientca"`
		ClientNames []string          `toml:"clientnames"`
		Listen      string            `toml:"listen"`
		Callers     []callerKeys      `toml:"callers"`
		AllowFrom   []string          `toml:"allowfrom"`
		Kubernetes  *bool             `toml:"kubernetes"`
		Addr        map[string]string `toml:"addr"`
		Kubelet     struct {
			Cert     string `toml:"cert"`
			Key      string `toml:"key"`
			CA       string `toml:"ca"`
			Insecure bool   `toml:"insecure"`
		} `toml:"kubelet"`
	} `toml:"https"`
	Join     joinKeys            `toml:"join"`
	Limits   limitsKeys          `toml:"limits"`
	TCP      map[string]string   `toml:"tcp"`
	TCPAllow map[string][]string `toml:"tcpallow"`
	Egress   egressKeys          `toml:"egress"`
	Admin    struct {
		Socket string `toml:"socket"`
	} `toml:"admin"`
}

type callerKeys struct {
	Name string   `toml:"name"`
	May  []string `toml:"may"`
}

type dnsKeys struct {
	Debug        bool     `toml:"debug"`
	ConfigMap    string   `toml:"configmap"`
	Hosts        string   `toml:"hosts"`
	Service      string   `toml:"service"`
	Listen       string   `toml:"listen"`
	Upstream     []string `toml:"upstream"`
	AllowFrom    []string `toml:"allowfrom"`
	NodeSelector string   `toml:"nodeselector"`
}

type joinKeys struct {
	CA              string   `toml:"ca"`
	CAKey           string   `toml:"cakey"`
	Signer          string   `toml:"signer"`
	SignerName      string   `toml:"signername"`
	Lifetime        string   `toml:"lifetime"`
	Address         string   `toml:"address"`
	CloudCA         string   `toml:"cloudca"`
	ServiceAccounts []string `toml:"serviceaccounts"`
	Audience        string   `toml:"audience"`
	AnyNode         bool     `toml:"anynode"`
}

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

type edgeLimitsKeys struct {
	Conns  int `toml:"conns"`
	Dials  int `toml:"dials"`
	Health int `toml:"health"`
}

type egressKeys struct {
	GRPC         []string `toml:"grpc"`
	HTTPConnect  []string `toml:"httpconnect"`
	Cert         string   `toml:"cert"`
	Key          string   `toml:"key"`
	ClientCA     string   `toml:"clientca"`
	ClientNames  []string `toml:"clientnames"`
	Strategies   []string `toml:"strategies"`
	DefaultNodes []string `toml:"defaultnodes"`
	Kubernetes   bool     `toml:"kubernetes"`
	OldMetrics   bool     `toml:"konnectivitymetrics"`
	AgentPort    int      `toml:"agentport"`
}

type edgeTable struct {
	Node   string   `toml:"node"`
	Allow  []string `toml:"allow"`
	Stream struct {
		Client struct {
			Token        string `toml:"token"`
			TokenFile    string `toml:"tokenfile"`
			NodeCert     string `toml:"nodecert"`
			NodeKey      string `toml:"nodekey"`
			Cert         string `toml:"cert"`
			DNS          string `toml:"dns"`
			ServerName   string `toml:"servername"`
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
