package main

import (
	"log/slog"
	"os"
	"testing"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
)

// A cloud with [mode.cloud.services.mirror] has the front door for egress without a listener, finds Services by their
// names, and serves and writes twins. Without the table it does none of this.
func TestMirrorWiring(t *testing.T) {
	metricFiles(t)
	t.Setenv("KUBECONFIG", testkit.Kubeconfig(t, "http://127.0.0.1:1"))
	for table, on := range map[string]bool{
		"": false,
		"[mode.cloud.services.mirror]\nports = \"20000-20999\"\nservice = \"cloud\"\n": true,
	} {
		text := plainCloud + "[mode.cloud.egress]\nkubernetes = true\n[mode.cloud.services]\n" + table
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
			(err != nil) != on {
			t.Errorf("%q: the modules are %v; a Service: %v", table, names, err)
		}
	}
}
