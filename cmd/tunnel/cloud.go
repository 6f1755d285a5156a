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
	"tunnel/pkg/auth"
	"tunnel/pkg/https"
	"tunnel/pkg/stream"
	"tunnel/pkg/tcp"
	"tunnel/pkg/tunnel"
)

func newCloudCommand(logs *logFlags) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "cloud -c FILE",
		Short: "Run the end that edges dial",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runCloud(cmd.Context(), file, logs.logger(cmd.ErrOrStderr()))
		},
	}
	fileFlag(cmd, &file)
	return cmd
}

// runCloud runs a replica until ctx is done.
func runCloud(ctx context.Context, file string, log *slog.Logger) error {
	c, err := conf.LoadCloud(file, environment())
	if err != nil {
		return configError(err)
	}
	warn(log, c.Warnings)
	d, err := newCloud(c, log)
	if err != nil {
		return configError(err)
	}
	return d.run(ctx)
}

// newCloud wires a replica together.
func newCloud(c *conf.Cloud, log *slog.Logger) (*daemon, error) {
	counters := new(tunnel.Counters)
	directory := &tunnel.Directory{Counters: counters}

	cert, err := loadPair("mode.cloud.stream.server", c.Server.Cert, c.Server.Key)
	if err != nil {
		return nil, err
	}
	tokens, err := auth.NewTokens(c.Server.TokenFile, c.Server.AllowShared, log)
	if err != nil {
		return nil, err
	}
	server, err := stream.NewServer(stream.ServerConfig{
		Listen:   fmt.Sprintf(":%d", c.Server.GRPCPort),
		TLS:      &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{*cert}},
		Auth:     tokens,
		Counters: counters,
		Log:      log,
		Software: software(),
	}, directory)
	if err != nil {
		return nil, err
	}

	d := &daemon{mode: "cloud", log: log, routes: server.Router().Routes()}
	d.add(server, server.Ready, fmt.Sprintf(":%d", c.Server.GRPCPort))
	d.add(task{"tokens", tokens.Run}, nil)
	if len(c.TCP) > 0 {
		var listeners []tcp.Listener
		var addrs []string
		for _, l := range c.TCP {
			listeners = append(listeners, tcp.Listener(l))
			addrs = append(addrs, l.Listen)
		}
		door := tcp.New(listeners, directory, log)
		d.add(door, door.Ready, addrs...)
	}
	if len(c.HTTPS.Ports) > 0 {
		door, err := newHTTPSDoor(c.HTTPS, directory, counters, log)
		if err != nil {
			return nil, err
		}
		var addrs []string
		for port := range c.HTTPS.Ports {
			addrs = append(addrs, net.JoinHostPort(cmp.Or(c.HTTPS.Listen, https.DefaultListen), port))
		}
		slices.Sort(addrs)
		d.add(door, door.Ready, addrs...)
		if ip := net.ParseIP(cmp.Or(c.HTTPS.Listen, https.DefaultListen)); !ip.IsLoopback() && len(c.HTTPS.AllowFrom) == 0 {
			log.Warn("anyone may connect to the https ports, though not past the kubelet: name kube-apiserver's network in allowfrom of [mode.cloud.https]")
		}
	}
	collectors, err := d.addDNS(c.DNS, directory, counters)
	if err != nil {
		return nil, err
	}
	if c.Server.ChannelzAddr != "" {
		d.add(admin.NewChannelz(c.Server.ChannelzAddr, log), nil, c.Server.ChannelzAddr)
	}
	if c.Server.LogPort != 0 {
		registry := admin.NewRegistry(software(), counters, directory.Sessions)
		registry.MustRegister(collectors...)
		d.serveHealth(c.Server.LogPort, registry)
	}
	return d, nil
}

func newHTTPSDoor(c conf.HTTPS, directory *tunnel.Directory, counters *tunnel.Counters, log *slog.Logger) (*https.FrontDoor, error) {
	cfg := https.Config{
		Mode: https.Mode(c.TLS), Listen: c.Listen, Ports: c.Ports,
		ClientNames: c.ClientNames, AllowFrom: c.AllowFrom, Counters: counters,
		Kubelet: https.Kubelet{Insecure: c.Kubelet.Insecure},
	}
	var err error
	if c.Cert != "" {
		if cfg.Certificate, err = loadPair("mode.cloud.https", c.Cert, c.Key); err != nil {
			return nil, err
		}
	}
	if c.ClientCA != "" {
		if cfg.ClientCA, err = loadPool("mode.cloud.https clientca", c.ClientCA); err != nil {
			return nil, err
		}
	}
	if c.Kubelet.Cert != "" {
		if cfg.Kubelet.Certificate, err = loadPair("mode.cloud.https.kubelet", c.Kubelet.Cert, c.Kubelet.Key); err != nil {
			return nil, err
		}
	}
	if c.Kubelet.CA != "" {
		if cfg.Kubelet.CA, err = loadPool("mode.cloud.https.kubelet ca", c.Kubelet.CA); err != nil {
			return nil, err
		}
	}
	return https.New(cfg, directory, directory, log)
}
