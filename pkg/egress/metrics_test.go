package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// All protocols count the results of their dials, under our names and those of Konnectivity.
func TestMetrics(t *testing.T) {
	r := newRig(t)
	hold := make(chan struct{})
	addr := testkit.Serve(t, func(*net.TCPConn) { <-hold })
	defer close(hold)
	r.client(t).dial(addr)
	r.ask(t, connect(addr))
	c := r.open(t)
	io.WriteString(c, greeting+socks(addr))
	want(t, c, greeted+granted)
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
		"tunnel_egress_dials_total door=socks5 result=ok 1",
		"tunnel_egress_dial_duration_seconds door=socks5 1",
		"tunnel_egress_conns door=socks5 1",
		"tunnel_egress_dials_pending door=grpc 0",
		"konnectivity_network_proxy_server_established_connections 3",
		"konnectivity_network_proxy_server_http_connections 1",
		"konnectivity_network_proxy_server_dial_failure_count reason=no_agent 1",
		// These exist before the first failure.
		"konnectivity_network_proxy_server_dial_failure_count reason=backend_dial_timeout 0",
		"tunnel_egress_dials_total door=grpc result=no-such-node 0",
		"konnectivity_network_proxy_server_dial_duration_seconds 3",
		"konnectivity_network_proxy_server_ready_backends proxy_strategy=destHost 0",
	} {
		// A conn is counted just after its caller has received the answer.
		var all string
		for late := time.Now().Add(10 * time.Second); !strings.Contains(all, want+"\n"); all = shown(t, reg) {
			if time.Now().After(late) {
				t.Fatalf("there is no %s in\n%s", want, all)
			}
		}
	}
}

// shown returns all metrics, one per line.
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
			samples := float64(m.GetHistogram().GetSampleCount())
			fmt.Fprintf(&all, " %v\n", m.GetCounter().GetValue()+m.GetGauge().GetValue()+samples)
		}
	}
	return all.String()
}

// Failed dials are counted by the reasons of Konnectivity's server. Any answer of a node is an
// error_response. A dial that the caller gives up is a frontend_close.
func TestKonnectivityReasons(t *testing.T) {
	answers := func(code tunnel.Code) func(context.Context) error {
		return func(context.Context) error { return tunnel.Refusef(code, "so it is") }
	}
	whenDone := func(ctx context.Context) error {
		<-ctx.Done()
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return tunnel.Refusef(tunnel.Timeout, "the node did not answer in time")
		}
		return tunnel.Refusef(tunnel.Gone, "the caller has gone")
	}
	afterItsOwn := func(ctx context.Context) error {
		time.Sleep(10 * time.Second)
		return tunnel.Refusef(tunnel.Timeout, "dialling: i/o timeout")
	}
	for name, tc := range map[string]struct {
		dial   func(context.Context) error
		caller time.Duration // cancels after this time; 0: never
		want   string
	}{
		"refused":                            {answers(tunnel.Refused), 0, reasonError},
		"no node":                            {answers(tunnel.NoSuchNode), 0, reasonNoNode},
		"the node has gone":                  {answers(tunnel.Gone), 0, reasonLost},
		"the target does not answer":         {afterItsOwn, 0, reasonError},
		"the node does not answer":           {whenDone, 0, reasonTimeout},
		"the caller cancels":                 {whenDone, time.Second, reasonCaller},
		"it cancels, and the node times out": {afterItsOwn, time.Second, reasonCaller},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &nodes{reach: map[tunnel.NodeName]konnectivity.Identifiers{}, changed: make(chan struct{})}
				f, err := New(Config{Identifiers: n, KonnectivityMetrics: true}, dialFunc(tc.dial), n,
					slog.New(slog.DiscardHandler))
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if tc.caller > 0 {
					time.AfterFunc(tc.caller, cancel)
				}
				if _, _, err := f.dial(ctx, doorGRPC, "10.0.0.1:1", "caller"); err == nil {
					t.Fatal("the dial has succeeded")
				}
				reg := prometheus.NewPedanticRegistry()
				reg.MustRegister(f.Collector())
				all := shown(t, reg)
				for _, reason := range []string{reasonError, reasonNoNode, reasonLost, reasonTimeout, reasonCaller} {
					n := 0
					if reason == tc.want {
						n = 1
					}
					const count = "konnectivity_network_proxy_server_dial_failure_count"
					if want := fmt.Sprintf("%s reason=%s %d\n", count, reason, n); !strings.Contains(all, want) {
						t.Errorf("there is no %s", want)
					}
				}
			})
		})
	}
}

// dialFunc is a dialer that always fails.
type dialFunc func(ctx context.Context) error

func (d dialFunc) Dial(ctx context.Context, _ tunnel.Request) (net.Conn, error) { return nil, d(ctx) }
