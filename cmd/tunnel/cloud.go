package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"slices"

	"github.com/spf13/cobra"

	"tunnel/conf"
	"tunnel/pkg/admin"
	"tunnel/pkg/dns"
	"tunnel/pkg/https"
	"tunnel/pkg/reload"
	"tunnel/pkg/setup"
	"tunnel/pkg/stream"
	"tunnel/pkg/tcp"
	"tunnel/pkg/tunnel"
)

func newCloudCommand(logs *logFlags) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "cloud -c FILE",
		Short: "Run the end that edges dial",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runCloud(cmd.Context(), file, logs.logger(cmd.ErrOrStderr()), &logs.now)
		},
	}
	fileFlag(cmd, &file)
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

// newCloud wires a replica together.
func newCloud(c *conf.Cloud, log *slog.Logger) (*daemon, error) {
	counters := new(tunnel.Counters)
	directory := &tunnel.Directory{Counters: counters}

	warnings, err := setup.CheckTrust(c)
	if err != nil {
		return nil, err
	}
	warn(log, warnings)
	files := reload.NewFiles(log)
	cert, err := files.Pair("mode.cloud.stream.server", c.Server.Cert, c.Server.Key)
	if err != nil {
		return nil, err
	}
	k, err := newCluster(c, log)
	if err != nil {
		return nil, err
	}
	gate, issuer, err := newGate(c, files, k, log)
	if err != nil {
		return nil, err
	}
	peers, relayed, err := newPeers(c, files, cert, directory, log)
	if err != nil {
		return nil, err
	}
	// What front doors ask: this replica, and through it the others.
	var reach everywhere = directory
	if peers != nil {
		reach = peers
	}
	certificate, err := setup.ServerCertificate(c, files, cert, log)
	if err != nil {
		return nil, err
	}
	server, err := stream.NewServer(stream.ServerConfig{
		Listen:       fmt.Sprintf(":%d", c.Server.GRPCPort),
		Limits:       streamLimits(c.Limits),
		TLS:          &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: certificate},
		Auth:         gate,
		Certificates: c.Join.CA != "",
		Issuer:       issuer,
		Counters:     counters,
		Log:          log,
		Software:     software(),
		Peers:        peers,
	}, directory)
	if err != nil {
		return nil, err
	}

	d := &daemon{mode: "cloud", log: log, routes: server.Router().Routes(), leave: server.Leave}
	d.add(server, server.Ready, fmt.Sprintf(":%d", c.Server.GRPCPort))
	d.add(gate, nil)
	d.add(files, nil)
	k.add(d)
	if peers != nil {
		d.add(peers, peers.Ready)
	}
	d.addTCP(c.TCP, reach, counters)
	if err = d.addHTTPS(c, files, k, reach, counters); err != nil {
		return nil, err
	}
	collectors, err := d.addEgress(c.Egress, c.Limits, counters, files, k, reach, directory, log)
	if err != nil {
		return nil, err
	}
	d.addAgents(c, certificate, gate, peers, directory, counters, log)
	collectors = append(collectors, d.addDNS(c.DNS, c.Limits, k, truthOf(c.DNS, directory, peers), counters)...)
	if peers != nil {
		collectors = append(collectors, admin.NewRelayCollector(relayed, peers.Replicas))
	}
	if c.Server.ChannelzAddr != "" {
		d.add(admin.NewChannelz(c.Server.ChannelzAddr, log), nil, c.Server.ChannelzAddr)
	}
	d.serveHealth(shown{
		port: c.Server.LogPort, socket: c.AdminSocket, conns: c.Limits.Health,
		counters: counters, sessions: directory.Sessions,
		collectors: append(collectors, files.Collector(), gate.Collector()),
	})
	return d, nil
}

// newPeers returns the other replicas and the counters of what is relayed to and from
// them; nil when this one is alone. server is what it shows to edges.
func newPeers(c *conf.Cloud, files *reload.Files, server *reload.Pair, directory *tunnel.Directory, log *slog.Logger) (*stream.Peers, *tunnel.Counters, error) {
	if !c.Peers.Configured() {
		return nil, nil, nil
	}
	pair := server
	if certFile, keyFile := c.Pair(); certFile != c.Server.Cert || keyFile != c.Server.Key {
		var err error
		if pair, err = files.Pair("mode.cloud.stream.peers", certFile, keyFile); err != nil {
			return nil, nil, err
		}
	}
	pool, err := files.Pool("mode.cloud.stream.peers ca", c.Peers.CA)
	if err != nil {
		return nil, nil, err
	}
	conf := func() *tls.Config {
		return &tls.Config{MinVersion: tls.VersionTLS12, GetClientCertificate: pair.GetClientCertificate, RootCAs: pool.Pool(), ServerName: c.Peers.ServerName}
	}
	relayed := new(tunnel.Counters)
	peers, err := stream.NewPeers(stream.PeersConfig{
		Service: c.Peers.Service, Addresses: c.Peers.Addresses, Addrs: c.DNS.Addrs,
		TLS:      conf,
		Counters: relayed, Log: log, Software: software(),
	}, directory)
	if err != nil {
		return nil, nil, fmt.Errorf("mode.cloud.stream.peers: %w", err)
	}
	return peers, relayed, nil
}

// truthOf returns where each node is held: here, and on the other replicas if there are any.
func truthOf(c conf.DNS, directory *tunnel.Directory, peers *stream.Peers) dns.Truth {
	if peers != nil {
		return dns.Merged{Replicas: peers}
	}
	return dns.Local{Nodes: directory, Addrs: c.Addrs}
}

func (d *daemon) addTCP(lines []conf.TCPListener, reach everywhere, counters *tunnel.Counters) {
	if len(lines) == 0 {
		return
	}
	var listeners []tcp.Listener
	var addrs []string
	for _, l := range lines {
		listeners = append(listeners, tcp.Listener(l))
		addrs = append(addrs, l.Listen)
	}
	door := tcp.New(listeners, reach, d.log)
	door.Counters = counters
	d.add(door, door.Ready, addrs...)
}

func (d *daemon) addHTTPS(c *conf.Cloud, files *reload.Files, k cluster, reach everywhere, counters *tunnel.Counters) error {
	if len(c.HTTPS.Ports) == 0 {
		return nil
	}
	cfg, err := httpsConfig(c.HTTPS, files)
	if err != nil {
		return err
	}
	cfg.Limits, cfg.Counters = httpsLimits(c.Limits), counters
	if k.pods != nil {
		cfg.Pods = k.pods
	}
	door, err := https.New(cfg, reach, reach, d.log)
	if err != nil {
		return err
	}
	listen := cmp.Or(c.HTTPS.Listen, https.DefaultListen)
	var addrs []string
	for port := range c.HTTPS.Ports {
		addrs = append(addrs, net.JoinHostPort(listen, port))
	}
	slices.Sort(addrs)
	d.add(door, door.Ready, addrs...)
	if !net.ParseIP(listen).IsLoopback() && len(c.HTTPS.AllowFrom) == 0 {
		d.log.Warn("anyone may connect to the https ports, though not past the kubelet: name kube-apiserver's network in allowfrom of [mode.cloud.https]")
	}
	return nil
}

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
