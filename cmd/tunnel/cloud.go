package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/https"
	"tunnel.example/tunnel/pkg/peers"
	"tunnel.example/tunnel/pkg/reload"
	"tunnel.example/tunnel/pkg/setup"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tcp"
	"tunnel.example/tunnel/pkg/tunnel"
)

func newCloudCommand(logs *logFlags) *cobra.Command {
	var file configFlag
	cmd := &cobra.Command{
		Use:   "cloud [-c FILE]",
		Short: "Run the end that edges dial",
		Args:  noArgs,
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
func runCloud(ctx context.Context, file string, log *slog.Logger, level *slog.LevelVar) error {
	c, err := conf.LoadCloud(file, environment())
	if err != nil {
		return configError(err)
	}
	warn(log, c.Warnings)
	d, err := newCloud(c, log)
	if err != nil {
		return configError(err)
	}
	d.level = level
	roomyHeap()
	return d.run(ctx)
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
	pair      *reload.Pair // of [mode.cloud.stream.server]
	cluster   cluster
	gate      *auth.Gate
	issuer    stream.Issuer // nil: the cloud makes no certificates
	// certificate is shown on grpcport and agentport.
	certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	grpc        *tls.Config      // of grpcport
	peers       *peers.Peers     // the other replicas; nil: none
	relayed     *tunnel.Counters // what is relayed to and from peers; nil without peers
	reach       everywhere

	collectors []prometheus.Collector // of the modules
}

// everywhere reaches nodes through this replica, and through it the other replicas.
type everywhere interface {
	tunnel.Dialer
	egress.Claims
	Holds(tunnel.NodeName) bool
}

// newCloud wires a replica together. It opens no listener and connects to nothing.
func newCloud(c *conf.Cloud, log *slog.Logger) (*daemon, error) {
	warnings, err := setup.CheckTrust(c)
	if err != nil {
		return nil, err
	}
	warn(log, warnings)
	counters := new(tunnel.Counters)
	w := &cloudWiring{
		daemon: &daemon{mode: "cloud", log: log}, conf: c, counters: counters,
		directory: &tunnel.Directory{Counters: counters}, files: reload.NewFiles(log),
	}
	if err = w.identify(); err != nil {
		return nil, err
	}
	config := stream.ServerConfig{
		Listen:       fmt.Sprintf(":%d", c.Server.GRPCPort),
		Limits:       streamLimits(c.Limits),
		TLS:          w.grpc,
		Auth:         w.gate,
		Certificates: c.Join.CA != "",
		Issuer:       w.issuer,
		Counters:     w.counters,
		Log:          log,
		Software:     software(),
	}
	if w.peers != nil {
		config.Replicas = w.peers
	}
	server, err := stream.NewServer(config, w.directory)
	if err != nil {
		return nil, err
	}
	w.routes, w.leave = server.Router().Routes(), server.Leave

	// The modules of a cloud, in order.
	w.add(server, server.Ready, fmt.Sprintf(":%d", c.Server.GRPCPort))
	w.add(w.gate, nil)
	w.add(w.files, nil)
	w.cluster.add(w.daemon)
	if w.peers != nil {
		w.add(w.peers, w.peers.Ready)
	}
	w.addTCP()
	if err = w.addHTTPS(); err != nil {
		return nil, err
	}
	if err = w.addEgress(); err != nil {
		return nil, err
	}
	w.addAgents()
	w.addDNS()
	if w.peers != nil {
		w.collectors = append(w.collectors, admin.NewRelayCollector(w.relayed, w.peers.Replicas))
	}
	if c.Server.ChannelzAddr != "" {
		w.add(admin.NewChannelz(c.Server.ChannelzAddr, log), nil, c.Server.ChannelzAddr)
	}
	w.serveHealth(shown{
		port: c.Server.LogPort, socket: c.AdminSocket, conns: c.Limits.Health,
		counters: w.counters, sessions: w.directory.Sessions,
		collectors: append(w.collectors, w.files.Collector(), w.gate.Collector()),
	})
	return w.daemon, nil
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
		Server: w.grpc, Counters: w.relayed, Log: w.log, Software: software(),
	}, w.directory)
	if err != nil {
		return fmt.Errorf("mode.cloud.stream.peers: %w", err)
	}
	return nil
}

func (w *cloudWiring) addTCP() {
	if len(w.conf.TCP) == 0 {
		return
	}
	var listeners []tcp.Listener
	var addrs []string
	for _, l := range w.conf.TCP {
		listeners = append(listeners, tcp.Listener(l))
		addrs = append(addrs, l.Listen)
	}
	door := tcp.New(listeners, w.reach, w.log)
	door.Counters = w.counters
	w.add(door, door.Ready, addrs...)
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
	cfg.Limits, cfg.Counters = httpsLimits(w.conf.Limits), w.counters
	if w.cluster.pods != nil {
		cfg.Pods = w.cluster.pods
	}
	door, err := https.New(cfg, w.reach, w.reach, w.log)
	if err != nil {
		return err
	}
	listen := cmp.Or(c.Listen, https.DefaultListen)
	var addrs []string
	for port := range c.Ports {
		addrs = append(addrs, net.JoinHostPort(listen, port))
	}
	slices.Sort(addrs)
	w.add(door, door.Ready, addrs...)
	if !net.ParseIP(listen).IsLoopback() && len(c.AllowFrom) == 0 {
		w.log.Warn("anyone may connect to the https ports, though not past the kubelet: " +
			"name kube-apiserver's network in allowfrom of [mode.cloud.https]")
	}
	return nil
}

// httpsConfig translates the configuration of the HTTPS front door, and reads its files.
func httpsConfig(c conf.HTTPS, files *reload.Files) (https.Config, error) {
	cfg := https.Config{
		Mode: https.Mode(c.TLS), Listen: c.Listen, Ports: c.Ports,
		ClientNames: c.ClientNames, AllowFrom: c.AllowFrom,
		Kubelet: https.Kubelet{Insecure: c.Kubelet.Insecure},
	}
	for _, caller := range c.Callers {
		cfg.Callers = append(cfg.Callers, https.Caller(caller))
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
