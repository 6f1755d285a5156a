package egress

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel/pkg/tunnel"
)

// Every door counts what comes of its dials, under our names and under Konnectivity's.
func TestMetrics(t *testing.T) {
	r := newRig(t)
	hold := make(chan struct{})
	addr := listen(t, func(*net.TCPConn) { <-hold })
	defer close(hold)
	r.client(t).dial(addr)
	r.ask(t, connect(addr))
	r.nodes.mu.Lock()
	r.nodes.refuse[""] = tunnel.Refusef(tunnel.NoSuchNode, "no node is connected")
	r.nodes.mu.Unlock()
	r.ask(t, connect("10.0.0.1:1"))

	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(r.door.Collector())
	for _, want := range []string{
		"tunnel_egress_dials_total door=grpc result=ok 1",
		"tunnel_egress_dials_total door=httpconnect result=ok 1",
		"tunnel_egress_dials_total door=httpconnect result=no-such-node 1",
		"tunnel_egress_dial_duration_seconds door=grpc 1",
		"tunnel_egress_conns door=grpc 1",
		"tunnel_egress_conns door=httpconnect 1",
		"tunnel_egress_dials_pending door=grpc 0",
		"konnectivity_network_proxy_server_established_connections 2",
		"konnectivity_network_proxy_server_dial_failure_count reason=no_agent 1",
		"konnectivity_network_proxy_server_dial_failure_count reason=backend_dial_timeout 0", // never happened: an alert on a rate needs the zero
		"tunnel_egress_dials_total door=grpc result=no-such-node 0",
		"konnectivity_network_proxy_server_dial_duration_seconds 2",
		"konnectivity_network_proxy_server_ready_backends proxy_strategy=destHost 0",
	} {
		// A conn counts a moment after its caller has been told.
		var all string
		for late := time.Now().Add(10 * time.Second); !strings.Contains(all, want+"\n"); all = shown(t, reg) {
			if time.Now().After(late) {
				t.Fatalf("there is no %s in\n%s", want, all)
			}
		}
	}
}

// shown returns all metrics, a line each.
func shown(t *testing.T, reg *prometheus.Registry) string {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, f := range families {
		for _, m := range f.GetMetric() {
			fmt.Fprintf(&all, "%s", f.GetName())
			for _, l := range m.GetLabel() {
				fmt.Fprintf(&all, " %s=%s", l.GetName(), l.GetValue())
			}
			fmt.Fprintf(&all, " %v\n", m.GetCounter().GetValue()+m.GetGauge().GetValue()+float64(m.GetHistogram().GetSampleCount()))
		}
	}
	return all.String()
}
