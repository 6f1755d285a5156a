package test

import (
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
)

// TestLint is helm lint, for each values file of the folder ci.
func TestLint(t *testing.T) {
	for _, overlay := range overlays(t) {
		t.Run(overlay, func(t *testing.T) {
			for _, m := range lint.All(chartDir, readValues(t, overlay), "tunnel-system", true).Messages {
				// Charts without an icon get an information, which does not count.
				if m.Severity > support.InfoSev {
					t.Error(m)
				}
			}
		})
	}
}

// TestWrongValues: the chart refuses each of these values files, and says what is wrong. The values are added to
// those of an overlay, which the chart accepts.
func TestWrongValues(t *testing.T) {
	for _, c := range []struct{ name, overlay, add, want string }{
		{"unknown key", "single", `cloud: {replica: 2}`, `'replica' not allowed`},
		{"unknown key of cloud.toml", "single", `cloud: {config: {stream: {server: {grpc_port: 9000}}}}`,
			`'grpc_port' not allowed`},
		{"text for a number", "single", `cloud: {replicas: "2"}`, "got string, want integer"},
		{"no port", "single", `cloud: {config: {stream: {server: {grpcport: 70000}}}}`, "maximum: got 70,000"},
		{"unknown kind of Service", "single", `cloud: {service: {type: Loadbalancer}}`, "must be one of"},
		{"address without port", "single", `certificates: {address: tunnel.example.com}`, "does not match pattern"},

		{"nothing", "single", `cloud: {enabled: false}`, "set one of them to true"},
		{"no address", "single", `certificates: {address: ""}`, "write the address that edges dial"},
		{"tokens in the wrong place", "single", `certificates: {tokens: "edge1:revoked"}`,
			"in tokens of the Secret tunnel-cloud"},
		{"replicas without peers", "single", `cloud: {replicas: 2}`, "write cloud.config.stream.peers"},
		{"peers without a CA", "ha", `cloud: {config: {stream: {peers: {ca: ""}}}}`, "or anybody could be a replica"},
		{"CoreDNS without names", "ha-responder", `coredns: {enabled: true}`,
			"write cloud.config.stream.dns.configmap: tunnel-nodes"},
		{"names of pods and of the Service", "ha", `cloud: {config: {stream: {dns: {service: tunnel-cloud}}}}`,
			"no name leads to a pod"},
		{"selector without names", "ha-responder", `cloud: {config: {stream: {dns: {nodeselector: a=b}}}}`,
			"nodeselector has no effect without configmap"},
		{"no front door", "single", `cloud: {config: {https: {addr: {"10250": ""}}}}`, "write https.addr, tcp or egress"},
		{"egress open to all", "egress-httpconnect", `cloud: {config: {egress: {clientca: ""}}}`,
			"egress.clientca is missing"},
		{"egress without names of callers", "egress-httpconnect", `cloud: {config: {egress: {clientnames: []}}}`,
			"egress.clientnames is missing"},
		{"socket in any pod", "egress-grpc", `cloud: {controlPlane: {enabled: false}}`,
			"set cloud.controlPlane.enabled: true"},
		{"socket elsewhere", "egress-grpc", `cloud: {config: {egress: {grpc: ["unix:///tmp/egress.sock"]}}}`,
			"write unix:///run/tunnel/NAME.sock"},
		{"control plane without a socket", "egress-grpc", `cloud: {config: {egress: {grpc: []}}}`,
			"cloud.controlPlane.enabled is for unix sockets"},
		{"terminate without a CA", "single", `cloud: {config: {https: {tls: terminate}}}`,
			"write the CA that signs the callers' certificates"},
		{"key for kubelets unused", "ha", `cloud: {kubeletSecret: tunnel-kubelet}`,
			"kubeletSecret has no effect without cloud.config.https.kubelet"},
		{"TCP port for nobody", "single", `cloud: {config: {tcp: {"0.0.0.0:2222": "edge1/127.0.0.1:22"}}}`,
			"write who may connect in cloud.config.tcpallow"},
		{"edge without a cloud", "edge-host-network", `edge: {config: {stream: {client: {servername: ""}}}}`,
			"write the address of the cloud"},
		{"edge that reaches only itself", "edge-host-network", `edge: {hostNetwork: false}`,
			"write the networks that the cloud may dial"},
	} {
		t.Run(c.name, func(t *testing.T) {
			add, err := chartutil.ReadValues([]byte(c.add))
			if err != nil {
				t.Fatal(err)
			}
			values := readValues(t, c.overlay)
			if _, _, err := helm(t, "tunnel-system", values); err != nil {
				t.Fatalf("the values of %s are refused without the change: %v", c.overlay, err)
			}
			_, _, err = helm(t, "tunnel-system", chartutil.CoalesceTables(add, values))
			switch {
			case err == nil:
				t.Error("accepted")
			case !strings.Contains(err.Error(), c.want):
				t.Errorf("refused, but does not say %q:\n%v", c.want, err)
			}
		})
	}
}

// TestExtraTOML: the escape hatch appends to the file, and leaves the keys of config as they are.
func TestExtraTOML(t *testing.T) {
	values := readValues(t, "single")
	add, err := chartutil.ReadValues([]byte("cloud:\n  extraToml: |\n    [mode.cloud.limits]\n    conns = 100\n"))
	if err != nil {
		t.Fatal(err)
	}
	text, _, err := helm(t, "tunnel-system", chartutil.CoalesceTables(add, values))
	if err != nil {
		t.Fatal(err)
	}
	o := find(t, parse(t, text), "ConfigMap", "tunnel-cloud")
	parseTOML(t, o)
	if got := o.at("data", "cloud.toml", "mode", "cloud", "limits", "conns"); got != int64(100) {
		t.Errorf("conns is %v", got)
	}
	if got := o.at("data", "cloud.toml", "mode", "cloud", "stream", "server", "grpcport"); got != int64(9000) {
		t.Errorf("grpcport is %v", got)
	}
}
