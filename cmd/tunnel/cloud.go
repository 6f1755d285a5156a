package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/audit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/https"
	"tunnel.example/tunnel/pkg/inventory"
	"tunnel.example/tunnel/pkg/oneport"
	"tunnel.example/tunnel/pkg/peers"
	"tunnel.example/tunnel/pkg/reload"
	"tunnel.example/tunnel/pkg/services/hub"
	"tunnel.example/tunnel/pkg/setup"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tap"
	"tunnel.example/tunnel/pkg/tcp"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

func newCloudCommand(logs *logFlags) *cobra.Command {
	var file configFlag
	cmd := &cobra.Command{
		Use:   "cloud [-c FILE]",
		Short: "Run the end that edges dial",
		Long: `cloud runs the end that edges dial, until SIGTERM or Ctrl-C. Then it drains for up to 25 s. SIGHUP has it read
its configuration again.

Exit codes: 0 stopped by a signal, 1 failed while running, 2 wrong command line, 3 the configuration has a problem.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			path, err := file.path()
			if err != nil {
				return err
			}
			return runCloud(cmd.Context(), path, logs.logger(cmd.ErrOrStderr()), &logs.now)
		},
	}
	file.register(cmd, cloudFile)
	return cmd
}

// runCloud runs a replica until ctx is done.
func runCloud(ctx context.Context, file string, log *slog.Logger, level *slog.LevelVar) (err error) {
	hangups := takeHangups()
	at, err := newPlace()
	if err != nil {
		return &exitError{exitRuntime, err}
	}
	defer func() { at.failed(err) }()
	c, err := conf.LoadCloud(file, environment())
	if err != nil {
		return configError(err)
	}
	warn(log, c.Warnings)
	w, err := wireCloud(c, log, at)
	if err != nil {
		return configError(err)
	}
	w.level = level
	if w.cluster.client != nil {
		klog.SetSlogLogger(log) // client-go logs by klog; not set in newCloud, since a reload calls newCloud as a check
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	r := newCloudReloader(w, file, hangups, stop)
	w.add(r, nil)
	w.handlers = r.handlers()
	(&restarter{
		daemon: w.daemon, reloader: r.reloader, edges: w.server, peers: w.peers != nil, inventory: w.inventory,
	}).handle(w.handlers)
	w.expect = w.moved
	roomyHeap()
	return w.run(ctx)
}

// cloudWiring is a cloud that newCloud wires together. Each method adds one kind of module, and
// takes all that it needs from the fields.
type cloudWiring struct {
	*daemon

	// Set in this order by newCloud, before any add method runs.
	conf      *conf.Cloud
	counters  *tunnel.Counters
	directory *tunnel.Directory
	files     *reload.Files
	pair      *reload.Pair // cert and key of [mode.cloud.stream.server]
	cluster   cluster
	gate      *auth.Gate
	issuer    stream.Issuer // nil: the cloud makes no certificates
	// certificate is shown on grpcport, on the one port, and on agentport.
	certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	grpc        *tls.Config      // TLS of grpcport
	peers       *peers.Peers     // the other replicas; nil: none
	relayed     *tunnel.Counters // counts conns that are relayed to and from peers; nil without peers
	reach       everywhere
	inventory   *inventory.Inventory // nil: the cloud does not remember nodes
	port        *oneport.Port        // the one port; nil: the cloud has none
	server      *stream.Server
	services    *hub.Hub // tells edges the cluster's Services; nil: off
	// anyEndpoint dials endpoints that are on no edge node. It permits all addresses except those of metadata services.
	anyEndpoint *auth.Policy
	// mayDial returns an error if callers of [mode.cloud.services.mirror] may not dial an endpoint; nil: there is no
	// mirror.
	mayDial   func(ctx context.Context, at netip.AddrPort) error
	datagrams *udp.Edge     // sends datagrams to endpoints that are on no edge node
	udp       *udp.Counters // counts for the udp front door and for datagrams

	collectors []prometheus.Collector // the metrics of the modules
	trail      tunnel.Trail           // takes events of modules other than front doors; nil: off
	tap        *tap.Hub               // shows conns to operators who watch
	tracer     *tunnel.Tracer         // makes spans of conns; nil: off
	refusals   *tunnel.Refusals       // keeps refusals for the status page; nil: there is no page
	doors      cloudDoors
}

// everywhere reaches all nodes: those of this replica, and those of other replicas through this one.
type everywhere interface {
	tunnel.Dialer
	egress.Claims
	Holds(tunnel.NodeName) bool
	ServesServices(tunnel.NodeName) (connected, serves bool)
}

// newCloud wires a replica together. It opens no listener and connects to nothing.
func newCloud(c *conf.Cloud, log *slog.Logger) (*daemon, error) {
	w, err := wireCloud(c, log, place{})
	if err != nil {
		return nil, err
	}
	return w.daemon, nil
}

// wireCloud is newCloud, and returns the whole wiring.
func wireCloud(c *conf.Cloud, log *slog.Logger, at place) (*cloudWiring, error) {
	warnings, err := setup.CheckTrust(c)
	if err != nil {
		return nil, err
	}
	warn(log, warnings)
	counters := new(tunnel.Counters)
	w := &cloudWiring{
		daemon: &daemon{mode: "cloud", log: log, place: at}, conf: c, counters: counters,
		directory: &tunnel.Directory{Counters: counters}, files: reload.NewFiles(log), udp: new(udp.Counters),
	}
	w.doors.servers.Store(&c.Join.Servers)
	w.addAudit()
	w.tap = tap.New(processName())
	w.addTracer()
	if err = w.controlCongestion("mode.cloud.stream.server", c.Server.Congestion, w.counters); err != nil {
		return nil, err
	}
	w.newInventory()
	if err = w.identify(); err != nil {
		return nil, err
	}
	w.newAPI()
	w.newPort()
	if err = w.newEgress(); err != nil {
		return nil, err
	}
	if err = w.newServices(); err != nil {
		return nil, err
	}
	server, err := w.newServer()
	if err != nil {
		return nil, err
	}
	w.server, w.routes, w.leave = server, server.Router().Routes(), server.Leave

	// The modules of a cloud, in order.
	w.addServer()
	w.add(w.gate, nil)
	w.add(w.files, nil)
	w.showCongestion()
	w.checks = append(w.checks, admin.Check{Name: "multipath", Status: w.paths})
	w.cluster.add(w.daemon)
	if w.peers != nil {
		w.add(w.peers, w.peers.Ready)
		w.add(w.api, nil)
	}
	w.addInventory()
	w.addTCP()
	w.addUDP()
	if err = w.addHTTPS(); err != nil {
		return nil, err
	}
	w.addEgress()
	w.addAgents()
	w.addDNS()
	w.addServices()
	w.addMirror()
	w.collectors = append(w.collectors, admin.NewDoorCollector(w.counters))
	if w.peers != nil {
		joined := func() int { return len(w.peers.Joined()) } // also replicas that are about to stop
		w.collectors = append(w.collectors, admin.NewRelayCollector(w.relayed, joined))
	}
	if c.Server.ChannelzAddr != "" {
		channelz := admin.NewChannelz(c.Server.ChannelzAddr, log)
		channelz.Sockets = w.sockets
		w.add(channelz, nil, c.Server.ChannelzAddr)
	}
	w.addPage()
	if w.port != nil {
		w.servePublicHealth(w.port.Health, w.grpc)
	}
	w.serveHealth(shown{
		port: c.Server.LogPort, socket: c.AdminSocket, conns: c.Limits.Health,
		counters: w.counters, sessions: w.directory.Sessions,
		collectors: append(w.collectors, w.files.Collector(), w.gate.Collector()),
	})
	return w, nil
}

// addAudit sets trail, if the configuration has an audit or a status page.
func (w *cloudWiring) addAudit() {
	if w.conf.Page != "" {
		w.refusals = new(tunnel.Refusals)
		w.trail = w.refusals.Record
	}
	if w.conf.Audit == "" {
		return
	}
	w.audit = audit.New(audit.Config{Path: w.conf.Audit, Log: w.log})
	w.trail = w.trail.And(w.audit.Record)
	w.collectors = append(w.collectors, w.audit.Collector())
}

// addTracer sets tracer, if the configuration has a collector of traces.
func (w *cloudWiring) addTracer() {
	w.tracer = w.newTracer(w.conf.Traces.Endpoint, processName(), w.conf.Traces.PerMillion)
	if w.spans != nil {
		w.collectors = append(w.collectors, w.spans.Collector())
	}
}

// sink returns what front doors tell of their conns.
func (w *cloudWiring) sink() tunnel.Sink {
	s := tunnel.Sink{Tap: w.tap, Refusals: w.refusals, Tracer: w.tracer}
	if w.audit != nil {
		s.Audit = w.audit.Record
	}
	return s
}

// addServer adds the server that edges join, and before it the one port, if the configuration has one.
func (w *cloudWiring) addServer() {
	c := w.conf.Server
	if w.port != nil {
		w.add(w.port, w.port.Ready, c.Listen)
	}
	var listeners []string
	if c.GRPCPort != 0 {
		listeners = append(listeners, fmt.Sprintf(":%d", c.GRPCPort))
	}
	if c.WebSocket != "" {
		listeners = append(listeners, c.WebSocket)
	}
	w.add(w.server, w.server.Ready, listeners...)
}

// addInventory adds the inventory of nodes, if there is one.
func (w *cloudWiring) addInventory() {
	if w.inventory == nil {
		return
	}
	if w.peers != nil {
		w.inventory.Others = w.peers
	}
	w.shareInventory()
	w.addWriter(w.inventory)
	w.collectors = append(w.collectors, w.inventory.Collector(w.cluster.expected(), w.conf.Join.Lifetime))
}

// newServer returns the server that edges join.
func (w *cloudWiring) newServer() (*stream.Server, error) {
	c := w.conf
	config := stream.ServerConfig{
		WebSocket:    c.Server.WebSocket,
		ProxyFrom:    c.Server.ProxyFrom,
		Limits:       streamLimits(c.Limits),
		TLS:          w.grpc,
		Auth:         w.gate,
		Certificates: c.Join.CA != "",
		Issuer:       w.remembering(w.issuer),
		Tell:         w.tell,
		Trusts:       w.trusts,
		Counters:     w.counters,
		Log:          w.log,
		Software:     software(),
		Congestion:   w.congestion,
		Audit:        w.trail,
		Tracer:       w.tracer,
		Sockets:      w.sockets,
	}
	if c.Server.GRPCPort != 0 {
		config.Listen = fmt.Sprintf(":%d", c.Server.GRPCPort)
	}
	if w.port != nil {
		config.OnePort = w.port.Edges
	}
	if w.peers != nil {
		config.Replicas = w.peers
	}
	w.serveServices(&config)
	var mods []tunnel.Module
	if w.doors.egress != nil {
		mods = append(mods, w.doors.egress)
	}
	return stream.NewServer(config, w.directory, mods...)
}

// newPort sets port, if the configuration has the key listen.
func (w *cloudWiring) newPort() {
	c := w.conf
	if c.Server.Listen == "" {
		return
	}
	edges, callers := stream.DefaultLimits(), https.DefaultLimits()
	l := c.Limits
	w.port = oneport.New(oneport.Config{
		Listen: c.Server.Listen, ProxyFrom: c.Server.ProxyFrom, DataProtocol: stream.DataProtocol, Nodes: w.reach,
		Certificate: func() *x509.Certificate { return w.pair.Certificate().Leaf },
		HasDoor:     len(c.HTTPS.Ports) > 0,
		Strangers:   cmp.Or(l.Joining, edges.Joining) + cmp.Or(l.Strangers, callers.Strangers),
		StrangersPerAddress: cmp.Or(l.JoiningPerAddress, edges.JoiningPerAddress) +
			cmp.Or(l.StrangersPerAddress, callers.StrangersPerAddress),
		Timeout: cmp.Or(l.HandshakeTimeout, callers.HandshakeTimeout), Counters: w.counters, Sockets: w.sockets, Log: w.log,
	})
}

// identify sets who this replica is, who may join it, and who the other replicas are.
func (w *cloudWiring) identify() (err error) {
	w.pair, err = w.files.Pair("mode.cloud.stream.server", w.conf.Server.Cert, w.conf.Server.Key)
	if err != nil {
		return err
	}
	if w.cluster, err = newCluster(w.conf, w.log); err != nil {
		return err
	}
	if err = w.newGate(); err != nil {
		return err
	}
	if w.certificate, err = setup.ServerCertificate(w.conf, w.files, w.pair, w.log); err != nil {
		return err
	}
	w.grpc = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: w.certificate}
	if err = w.newPeers(); err != nil {
		return err
	}
	w.reach = w.directory
	if w.peers != nil {
		w.reach = w.peers
	}
	return nil
}

// newPeers sets peers and relayed, if the configuration names other replicas.
func (w *cloudWiring) newPeers() error {
	c := w.conf
	if !c.Peers.Configured() {
		return nil
	}
	pair := w.pair
	if certFile, keyFile := c.Pair(); certFile != c.Server.Cert || keyFile != c.Server.Key {
		var err error
		if pair, err = w.files.Pair("mode.cloud.stream.peers", certFile, keyFile); err != nil {
			return err
		}
	}
	pool, err := w.files.Pool("mode.cloud.stream.peers ca", c.Peers.CA)
	if err != nil {
		return err
	}
	w.relayed = new(tunnel.Counters)
	w.peers, err = peers.New(peers.Config{
		Service: c.Peers.Service, Addresses: c.Peers.Addresses, Addrs: c.DNS.Addrs,
		TLS: func() *tls.Config {
			return &tls.Config{
				MinVersion: tls.VersionTLS12, GetClientCertificate: pair.GetClientCertificate,
				RootCAs: pool.Pool(), ServerName: c.Peers.ServerName,
			}
		},
		Server: w.grpc, Counters: w.relayed, Log: w.log, Software: software(), Congestion: w.congestion,
		Tracer: w.tracer,
		API:    func(ctx context.Context) (net.Conn, error) { return w.api.Dial(ctx) }, // newAPI sets api later
	}, w.directory)
	if err != nil {
		return fmt.Errorf("mode.cloud.stream.peers: %w", err)
	}
	return nil
}

// paths says how many sessions have Multipath TCP, for /readyz.
func (w *cloudWiring) paths() string {
	sessions, paths := tunnel.CountPaths(w.directory.Sessions())
	return fmt.Sprintf("%d sessions have %d paths", sessions, paths)
}

// addTCP adds the TCP front door, even without ports: a reload may open some.
func (w *cloudWiring) addTCP() {
	var addrs []string
	for _, l := range w.conf.TCP {
		addrs = append(addrs, l.Listen)
	}
	w.doors.tcp = tcp.New(tcpListeners(w.conf), w.reach, w.log)
	w.doors.tcp.Counters, w.doors.tcp.Sink, w.doors.tcp.Sockets = w.counters, w.sink(), w.sockets
	w.add(w.doors.tcp, w.doors.tcp.Ready, addrs...)
}

// addUDP adds the UDP front door, even without ports: a reload may open some.
func (w *cloudWiring) addUDP() {
	w.collectors = append(w.collectors, w.udp.Collector())
	var addrs []string
	for _, l := range w.conf.UDP {
		addrs = append(addrs, l.Listen)
	}
	w.doors.udp = udp.New(udpListeners(w.conf), w.reach, udp.Config{
		Limits: udpLimits(w.conf.Limits), Counters: w.udp, Core: w.counters, Sink: w.sink(), Software: software(),
		Sockets: w.sockets, Log: w.log,
	})
	w.add(w.doors.udp, w.doors.udp.Ready, addrs...)
}

func (w *cloudWiring) addHTTPS() error {
	c := w.conf.HTTPS
	if len(c.Ports) == 0 {
		return nil
	}
	cfg, err := httpsConfig(c, w.files)
	if err != nil {
		return err
	}
	cfg.Limits, cfg.Counters, cfg.Sink, cfg.Sockets = httpsLimits(w.conf.Limits), w.counters, w.sink(), w.sockets
	if w.port != nil {
		cfg.OnePort, cfg.OnePortAs = w.port.Callers, c.OnePort()
	}
	if w.cluster.pods != nil {
		cfg.Pods = w.cluster.pods
	}
	door, err := https.New(cfg, w.reach, w.reach, w.log)
	if err != nil {
		return err
	}
	w.doors.https = door
	listen := cmp.Or(c.Listen, https.DefaultListen)
	var addrs []string
	for port := range c.Ports {
		addrs = append(addrs, net.JoinHostPort(listen, port))
	}
	slices.Sort(addrs)
	w.add(door, door.Ready, addrs...)
	onePort, _, _ := net.SplitHostPort(w.conf.Server.Listen)
	isOpen := !net.ParseIP(listen).IsLoopback() || w.port != nil && !net.ParseIP(onePort).IsLoopback()
	if isOpen && len(c.AllowFrom) == 0 {
		w.log.Warn("the https ports accept all source addresses, and only the kubelet authenticates callers: " +
			"set allowfrom in [mode.cloud.https] to kube-apiserver's network")
	}
	return nil
}

// httpsConfig translates the configuration of the HTTPS front door, and reads its files.
func httpsConfig(c conf.HTTPS, files *reload.Files) (https.Config, error) {
	cfg := https.Config{
		Mode: https.Mode(c.TLS), Listen: c.Listen, Ports: c.Ports,
		ClientNames: c.ClientNames, AllowFrom: c.AllowFrom, ProxyFrom: c.ProxyFrom,
		Callers: httpsCallers(c), Kubelet: https.Kubelet{Insecure: c.Kubelet.Insecure},
	}
	if c.Cert != "" {
		pair, err := files.Pair("mode.cloud.https", c.Cert, c.Key)
		if err != nil {
			return https.Config{}, err
		}
		cfg.Certificate = pair.Certificate
	}
	if c.ClientCA != "" {
		pool, err := files.Pool("mode.cloud.https clientca", c.ClientCA)
		if err != nil {
			return https.Config{}, err
		}
		cfg.ClientCA = pool.Pool
	}
	if c.Kubelet.Cert != "" {
		pair, err := files.Pair("mode.cloud.https.kubelet", c.Kubelet.Cert, c.Kubelet.Key)
		if err != nil {
			return https.Config{}, err
		}
		cfg.Kubelet.Certificate = pair.Certificate
	}
	if c.Kubelet.CA != "" {
		pool, err := files.Pool("mode.cloud.https.kubelet ca", c.Kubelet.CA)
		if err != nil {
			return https.Config{}, err
		}
		cfg.Kubelet.CA = pool.Pool
	}
	return cfg, nil
}
