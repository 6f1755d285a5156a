package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"tunnel/conf"
	"tunnel/pkg/dns"
	"tunnel/pkg/kube"
	"tunnel/pkg/tunnel"
)

// hostsKey is the key of the ConfigMap that holds the hosts file.
const hostsKey = "hosts"

// addDNS adds what makes nodes' names lead to this replica, and returns its metrics.
func (d *daemon) addDNS(c conf.DNS, limits conf.Limits, truth dns.Truth, counters *tunnel.Counters) ([]prometheus.Collector, error) {
	var names dns.Names // nil without Kubernetes: then every connected node may appear
	var collectors []prometheus.Collector
	if c.ConfigMap != "" {
		klog.SetSlogLogger(d.log) // what client-go has to say
		client, err := kube.New(os.Getenv("KUBECONFIG"), "tunnel/"+software())
		if err != nil {
			return nil, fmt.Errorf("mode.cloud.stream.dns.configmap: %w", err)
		}
		nodes, err := client.Nodes(c.NodeSelector, d.log)
		if err != nil {
			return nil, fmt.Errorf("mode.cloud.stream.dns.nodeselector: %w", err)
		}
		names = nodes
		d.add(nodeNames{nodes}, nil)
		writer := newDNSWriter(c, client, truth, names, d)
		d.add(writer, nil)
		collectors = append(collectors, writer.Collector())
		d.about = append(d.about, "kubernetes", client.Host())
	}
	if c.Hosts != "" {
		file := dns.NewHostsFile(c.Hosts, truth, names, d.log)
		d.add(file, nil)
		collectors = append(collectors, file.Collector())
	}
	if c.Listen != "" {
		responder := dns.NewResponder(dns.ResponderConfig{
			Listen: c.Listen, Upstream: c.Upstream, Truth: truth, Names: names, Counters: counters, Log: d.log,
			Conns: limits.DNS, Lookups: limits.Lookups,
		})
		d.add(responder, responder.Ready, c.Listen)
		collectors = append(collectors, responder.Collector())
	}
	return collectors, nil
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

// nodeNames is the module that follows which nodes there are.
type nodeNames struct{ *kube.Nodes }

func (nodeNames) Name() string                      { return "dns-names" }
func (nodeNames) Routes() map[string]tunnel.Handler { return nil }

// Note says why the names may be out of date.
func (n nodeNames) Note() string {
	if err := n.Err(); err != nil {
		return "the names of the nodes cannot be read: " + kube.Explain(err).Error()
	}
	return ""
}
