package main

import (
	"context"
	"net/netip"

	"tunnel.example/tunnel/pkg/dns"
)

// hostsKey is the key under which the ConfigMap holds the hosts file.
const hostsKey = "hosts"

// addDNS adds the modules that make the names of nodes resolve to this replica.
func (w *cloudWiring) addDNS() {
	c, limits := w.conf.DNS, w.conf.Limits
	truth := w.truth()
	var names dns.Names // nil without Kubernetes: DNS serves every connected node
	if c.ConfigMap != "" {
		names = w.cluster.names
		writer := w.newDNSWriter(truth, names)
		w.addWriter(writer)
		w.collectors = append(w.collectors, writer.Collector())
	}
	if c.Hosts != "" {
		file := dns.NewHostsFile(c.Hosts, truth, names, w.log)
		w.add(file, nil)
		w.collectors = append(w.collectors, file.Collector())
	}
	if c.Listen != "" {
		responder := dns.NewResponder(dns.ResponderConfig{
			Listen: c.Listen, Upstream: c.Upstream, AllowFrom: c.AllowFrom, Truth: truth, Names: names,
			Counters: w.counters, Sockets: w.sockets, Log: w.log, Conns: limits.DNS, Lookups: limits.Lookups,
		})
		w.add(responder, responder.Ready, c.Listen)
		w.collectors = append(w.collectors, responder.Collector())
	}
}

// truth returns where each node is connected: here, or on another replica if there are any.
func (w *cloudWiring) truth() dns.Truth {
	if w.peers != nil {
		return dns.Merged{Replicas: w.peers}
	}
	return dns.Local{Nodes: w.directory, Addrs: w.conf.DNS.Addrs}
}

func (w *cloudWiring) newDNSWriter(truth dns.Truth, names dns.Names) *dns.Writer {
	c, client := w.conf.DNS, w.cluster.client
	cfg := dns.WriterConfig{
		Truth: truth, Names: names, Log: w.log,
		Store:    client.ConfigMap(c.Namespace, c.ConfigMap, hostsKey),
		Election: client.Lease(c.Namespace, c.ConfigMap, c.Identity, w.log),
	}
	if c.Service != "" {
		cfg.Replicas = func(ctx context.Context) ([]netip.Addr, error) {
			return client.Replicas(ctx, c.Namespace, c.Service)
		}
	}
	return dns.NewWriter(cfg)
}
