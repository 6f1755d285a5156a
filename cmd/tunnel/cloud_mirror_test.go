package main

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"testing"

	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
)

// mayDialIsAsked checks that the mirror decides whether the cloud dials an endpoint.
func mayDialIsAsked(t *testing.T, w *cloudWiring) {
	t.Helper()
	ports := []*services.Port{{Protocol: "TCP", Port: 20000}}
	service, err := proto.Marshal(&services.Service{Headless: true, Ports: ports})
	if err != nil {
		t.Fatal(err)
	}
	pod, err := proto.Marshal(&services.Endpoint{Address: "192.0.2.1", Ready: true, Cluster: true, Ports: ports})
	if err != nil {
		t.Fatal(err)
	}
	w.services.Set(services.ServicePath("shop", "loop"), service)
	w.services.Set(services.EndpointPath("shop", "loop", "loop-a", "192.0.2.1"), pod)
	found, err := w.endpoints("loop.shop.svc:20000")
	if err != nil || len(found) != 1 || found[0].Dial == nil {
		t.Fatalf("the endpoints are %v, %v", found, err)
	}
	refusal := errors.New("refused")
	var asked netip.AddrPort
	w.mayDial = func(_ context.Context, at netip.AddrPort) error {
		asked = at
		return refusal
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel() // so that nothing is dialled
	if _, err = found[0].Dial(gone); !errors.Is(err, refusal) || asked.String() != "192.0.2.1:20000" {
		t.Errorf("%s is dialled: %v", asked, err)
	}
}

// A cloud with [mode.cloud.services.mirror] has the front door for egress without a listener, finds Services by their
// names, and serves and writes twins. Without the table it does none of this.
func TestMirrorWiring(t *testing.T) {
	metricFiles(t)
	t.Setenv("KUBECONFIG", testkit.Kubeconfig(t, "http://127.0.0.1:1"))
	for table, on := range map[string]bool{
		"": false,
		"[mode.cloud.services.mirror]\nports = \"20000-20999\"\nservice = \"cloud\"\n": true,
	} {
		text := plainCloud + "[mode.cloud.egress]\nkubernetes = true\n[mode.cloud.services]\nallow = [\"cluster\"]\n" + table
		if err := os.WriteFile("cloud.toml", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := conf.LoadCloud("cloud.toml", conf.Env{HostName: "cloud", PodNamespace: "tunnel-system"})
		if err != nil {
			t.Fatal(err)
		}
		w, err := wireCloud(c, slog.New(slog.DiscardHandler), place{})
		if err != nil {
			t.Fatal(err)
		}
		names := make(map[string]bool)
		for _, m := range w.modules {
			names[m.Name()] = true
		}
		w.services.Set(services.ServicePath("shop", "web"), nil)
		w.services.Synced()
		_, err = w.endpoints("web.shop.svc:80")
		if names["mirror"] != on || names["mirror-twins"] != on || names["egress"] != on || names["node-reach"] != on ||
			(err != nil) != on || (w.mayDial != nil) != on {
			t.Errorf("%q: the modules are %v; a Service: %v", table, names, err)
		}
		if on {
			mayDialIsAsked(t, w)
		}
	}
}
