package main

import (
	"context"
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel/conf"
	"tunnel/pkg/dns"
	"tunnel/pkg/kube"
	"tunnel/pkg/tunnel"
)

// hostsKey is the key of the ConfigMap that holds the hosts file.
const hostsKey = "hosts"

// addDNS adds what makes nodes' names lead to this replica, and returns its metrics.
func (d *daemon) addDNS(c conf.DNS, limits conf.Limits, k cluster, truth dns.Truth, counters *tunnel.Counters) []prometheus.Collector {
	var names dns.Names // nil without Kubernetes: then every connected node may appear
	var collectors []prometheus.Collector
	if c.ConfigMap != "" {
		names = k.names
		writer := newDNSWriter(c, k.client, truth, names, d)
		d.add(writer, nil)
		collectors = append(collectors, writer.Collector())
	}
	if c.Hosts != "" {
		file := dns.NewHostsFile(c.Hosts, truth, names, d.log)
		d.add(file, nil)
		collectors = append(collectors, file.Collector())
	}
	if c.Listen != "" {
		responder := dns.NewResponder(dns.ResponderConfig{
			Listen: c.Listen, Upstream: c.Upstream, AllowFrom: c.AllowFrom, Truth: truth, Names: names, Counters: counters, Log: d.log,
			Conns: limits.DNS, Lookups: limits.Lookups,
		})
		d.add(responder, responder.Ready, c.Listen)
		collectors = append(collectors, responder.Collector())
	}
	return collectors
}

func newDNSWriter(c conf.DNS, client *kube.Client, truth dns.Truth, names dns.Names, d *daemon) *dns.Writer {
	cfg := dns.WriterConfig{
		Truth: truth, Names: names, Log: d.log,
		Store:    client.ConfigMap(c.Namespace, c.ConfigMap, hostsKey),
		Election: client.Lease(c.Namespace, c.ConfigMap, c.Identity, d.log),
	}
	if c.Service != "" {
		cfg.Replicas = func(ctx context.Context) ([]netip.Addr, error) {
			return client.Replicas(ctx, c.Namespace, c.Service)
		}
	}
	return dns.NewWriter(cfg)
}
