//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/dns"
	"tunnel.example/tunnel/pkg/kube"
	core "tunnel.example/tunnel/pkg/tunnel"
)

// BenchmarkJoins has 10,000 nodes join within a minute, evenly, and then waits until the ConfigMap
// of a real API server holds them all. It says what that took: writes, bytes sent, processor time
// of the writer (client-go and all, the joins apart), and how long after the last join the last
// line was there.
func BenchmarkJoins(b *testing.B) {
	const (
		nodes  = 10000
		minute = time.Minute
	)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	c := upCluster(ctx, b)
	client, err := kube.New(c.path("admin.kubeconfig"), "tunnel-e2e")
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		directory := new(core.Directory)
		log := slog.New(slog.DiscardHandler)
		store := client.ConfigMap("default", "bench-joins", "hosts")
		w := dns.NewWriter(dns.WriterConfig{
			Truth: dns.Local{Nodes: directory, Addrs: []netip.Addr{netip.MustParseAddr("10.77.0.250")}},
			Store: store, Election: client.Lease("default", "bench-joins", "bench", log), Log: log,
		})
		running, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- w.Run(running) }()

		used := processorTime(b)
		tick := time.NewTicker(minute / nodes)
		for i := range nodes {
			<-tick.C
			directory.Attach(&core.Session{Node: core.NodeName(fmt.Sprintf("edge-%05d.example.com", i))})
		}
		tick.Stop()
		last := time.Now()
		for {
			file, err := store.Load(ctx)
			if err != nil {
				b.Fatal(err)
			}
			if len(dns.ParseHosts(file.Text).Own) == nodes {
				b.ReportMetric(float64(len(file.Text))/1e3, "kB-in-the-end")
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		b.ReportMetric(time.Since(last).Seconds(), "s-after-the-last")
		b.ReportMetric((processorTime(b) - used).Seconds(), "cpu-s")
		counted := gather(b, w.Collector())
		b.ReportMetric(counted["tunnel_dns_configmap_writes_total"], "writes")
		b.ReportMetric(counted["tunnel_dns_configmap_written_bytes_total"]/1e6, "MB-written")
		stop()
		if err := <-ended; err != nil {
			b.Error(err)
		}
		if _, err := c.kubectl(ctx, "delete", "configmap/bench-joins", "lease/bench-joins"); err != nil {
			b.Error(err)
		}
	}
}

// processorTime is what this process has used so far.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// gather returns each metric's value, summed over its labels.
func gather(b *testing.B, c prometheus.Collector) map[string]float64 {
	b.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(c)
	families, err := registry.Gather()
	if err != nil {
		b.Fatal(err)
	}
	sum := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			sum[f.GetName()] += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return sum
}
