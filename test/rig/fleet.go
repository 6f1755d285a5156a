package rig

import (
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"tunnel.example/tunnel/internal/freeport"
	"tunnel.example/tunnel/pkg/auth"
)

// FleetConfig says what a fleet is made of.
type FleetConfig struct {
	Binary string            // the program, see Build
	Dir    string            // an empty folder, which the caller removes
	CA     *auth.CA          // who signs
	Hosts  []Host            // one replica for each; several may be on one host
	Nodes  []string          // who may join
	Doors  map[string]string // name of a TCP front door of every replica → node/target
	HTTPS  string            // target of the HTTPS front door of every replica; "" is none
	Cloud  string            // more lines of every replica's file: whole tables; {{.Name}} is its name
	Server string            // more lines of [mode.cloud.stream.server]; {{.Name}} is the name of the replica
	Debug  bool              // log everything
}

// Host is where a replica or an edge runs. The zero Host is our own loopback.
type Host struct {
	IP      string   // "": 127.0.0.1
	Network *Network // nil: our own
}

// Address returns where a port of the host is found.
func (h Host) Address(port int) string {
	ip := h.IP
	if ip == "" {
		ip = "127.0.0.1"
	}
	return net.JoinHostPort(ip, strconv.Itoa(port))
}

// Fleet is the replicas of one cloud, and edges that may join it.
type Fleet struct {
	// Set once.
	cfg      FleetConfig
	tokens   map[string]auth.Secret // by node
	Replicas []*Replica
}

// Member is a replica or an edge of a fleet: processes, one after the other.
type Member struct {
	// Set once.
	Name  string
	fleet *Fleet
	mode  string
	host  Host
	port  int // logport

	Log Log
}

// Replica is one cloud of a fleet.
type Replica struct {
	Member

	// Set once.
	grpc, https int
	doors       map[string]int
}

// EdgeConfig says what an edge is.
type EdgeConfig struct {
	Node        string
	Host        Host
	Cloud       string   // the address that it dials
	All         bool     // a session with every replica
	Connections int      // TCP connections of a session; 0: the default
	Allow       []string // what it may dial; empty: its own machine
	Client      string   // more lines of [mode.edge.stream.client]
	More        string   // more lines of its file: whole tables
}

// NewFleet writes the files of the replicas and chooses their ports. It starts nothing.
func NewFleet(cfg FleetConfig) (*Fleet, error) {
	f := &Fleet{cfg: cfg, tokens: make(map[string]auth.Secret)}
	var lines strings.Builder
	for _, n := range cfg.Nodes {
		token := auth.NewToken()
		f.tokens[n] = token
		lines.WriteString(n + ":" + token.Hashed() + "\n")
	}
	err := errors.Join(f.Trust(cfg.CA), write(cfg.Dir, map[string]string{"tokens": lines.String()}))
	if err != nil {
		return nil, err
	}
	for i, host := range cfg.Hosts {
		r := &Replica{Member: Member{Name: "replica" + strconv.Itoa(i), fleet: f, mode: "cloud", host: host},
			doors: make(map[string]int)}
		f.Replicas = append(f.Replicas, r)
		if err := r.choosePorts(); err != nil {
			return nil, err
		}
	}
	for _, r := range f.Replicas {
		if err := errors.Join(r.Certify(cfg.CA, CloudLeaf()), r.configure()); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// CA returns the fleet's authority.
func (f *Fleet) CA() *auth.CA { return f.cfg.CA }

// Token returns the token of a node.
func (f *Fleet) Token(node string) auth.Secret { return f.tokens[node] }

func (r *Replica) choosePorts() (err error) {
	for _, port := range []*int{&r.grpc, &r.port, &r.https} {
		if *port, err = freeport.New(); err != nil {
			return err
		}
	}
	for name := range r.fleet.cfg.Doors {
		if r.doors[name], err = freeport.New(); err != nil {
			return err
		}
	}
	return nil
}

// Certify gives the replica a certificate that ca has signed, in place of the one it has.
func (r *Replica) Certify(ca *auth.CA, leaf auth.Leaf) error {
	return issue(r.fleet.cfg.Dir, r.Name, ca, leaf)
}

// Trust makes those the authorities that replicas and edges trust.
func (f *Fleet) Trust(all ...*auth.CA) error {
	var bundle []byte
	for _, ca := range all {
		bundle = append(bundle, ca.CertPEM()...)
	}
	return write(f.cfg.Dir, map[string]string{"ca.crt": string(bundle)})
}

func (r *Replica) configure() error {
	cfg := r.fleet.cfg
	var peers []string
	for _, other := range r.fleet.Replicas {
		peers = append(peers, other.GRPC())
	}
	targets := make(map[string]string, len(cfg.Doors))
	for name, target := range cfg.Doors {
		targets[r.Door(name)] = target
	}
	ip, _, err := net.SplitHostPort(r.GRPC())
	if err != nil {
		return err
	}
	server, more, _ := strings.Cut(replicaTOML, "[mode.cloud.stream.peers]")
	text, err := fill(server+cfg.Server+"\n[mode.cloud.stream.peers]"+more+cfg.Cloud, map[string]any{
		"Name": r.Name, "GRPC": r.grpc, "Log": r.port, "Peers": peers, "ServerName": cloudName,
		"Targets": targets, "IP": ip, "HTTPS": r.https, "HTTPSTarget": cfg.HTTPS,
	})
	if err != nil {
		return err
	}
	return write(cfg.Dir, map[string]string{r.Name + ".toml": text})
}

const replicaTOML = `[mode.cloud.stream.server]
grpcport = {{.GRPC}}
cert = "{{.Name}}.crt"
key = "{{.Name}}.key"
tokenfile = "tokens"
logport = {{.Log}}
[mode.cloud.stream.peers]
addresses = [{{range .Peers}}"{{.}}", {{end}}]
ca = "ca.crt"
servername = "{{.ServerName}}"
[mode.cloud.stream.dns]
debug = true
[mode.cloud.tcp]
{{range $door, $target := .Targets}}"{{$door}}" = "{{$target}}"
{{end}}
[mode.cloud.tcpallow]
{{range $door, $target := .Targets}}"{{$door}}" = ["127.0.0.0/8", "10.0.0.0/8"]
{{end}}
{{if .HTTPSTarget}}
[mode.cloud.https]
tls = "passthrough"
listen = "{{.IP}}"
[mode.cloud.https.addr]
"{{.HTTPS}}" = "{{.HTTPSTarget}}"
{{end}}
`

// Edge writes the files of an edge. It starts nothing.
func (f *Fleet) Edge(cfg EdgeConfig) (*Member, error) {
	e := &Member{Name: cfg.Node, fleet: f, mode: "edge", host: cfg.Host}
	var err error
	if e.port, err = freeport.New(); err != nil {
		return nil, err
	}
	text, err := fill(fleetEdgeTOML+"\n"+cfg.More, map[string]any{
		"Node": cfg.Node, "Allow": cfg.Allow, "Cloud": cfg.Cloud, "ServerName": cloudName, "All": cfg.All, "Log": e.port,
		"Connections": cfg.Connections, "Client": cfg.Client,
	})
	if err != nil {
		return nil, err
	}
	return e, write(f.cfg.Dir, map[string]string{
		cfg.Node + ".toml": text, cfg.Node + ".token": f.tokens[cfg.Node].Reveal() + "\n",
	})
}

const fleetEdgeTOML = `[mode.edge]
node = "{{.Node}}"
{{if .Allow}}allow = [{{range .Allow}}"{{.}}", {{end}}]
{{end}}[mode.edge.stream.client]
servername = "{{.Cloud}}"
dns = "{{.ServerName}}"
cert = "ca.crt"
tokenfile = "{{.Node}}.token"
logport = {{.Log}}
{{if .All}}sessions = "all"
{{end}}{{if .Connections}}connections = {{.Connections}}
{{end}}{{.Client}}
`

// Start starts the process.
func (m *Member) Start() (*Process, error) {
	cfg := m.fleet.cfg
	args := []string{m.mode, "-c", filepath.Join(cfg.Dir, m.Name+".toml")}
	if cfg.Debug {
		args = append(args, "--log-level", "debug")
	}
	return StartIn(m.host.Network, &m.Log, cfg.Binary, args...)
}

// Health returns the address of the logport.
func (m *Member) Health() string { return m.host.Address(m.port) }

// Ready returns nil when the process says that it is ready: for an edge, that it has a
// session.
func (m *Member) Ready() error { return readyIn(m.host.Network, m.Health()) }

// Metrics returns the metrics of the process, by name and labels.
func (m *Member) Metrics() (map[string]float64, error) {
	return metricsIn(m.host.Network, m.Health())
}

// GRPC returns the address that edges and other replicas dial.
func (r *Replica) GRPC() string { return r.host.Address(r.grpc) }

// Door returns the address of a TCP front door.
func (r *Replica) Door(name string) string { return r.host.Address(r.doors[name]) }

// HTTPSDoor returns the address of the HTTPS front door.
func (r *Replica) HTTPSDoor() string { return r.host.Address(r.https) }

// Leaks reports whether a token of the fleet stands in what the process has printed.
func (m *Member) Leaks() bool {
	log := m.Log.String()
	for node, token := range m.fleet.tokens {
		if slices.ContainsFunc(forms(node, token), func(s string) bool { return strings.Contains(log, s) }) {
			return true
		}
	}
	return false
}
