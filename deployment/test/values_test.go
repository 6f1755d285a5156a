package test

import (
	"fmt"
	"slices"
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

		{"no port for edges", "single", `cloud: {config: {stream: {server: {grpcport: 0}}}}`,
			"write grpcport or listen"},
		{"nothing", "single", `cloud: {enabled: false}`, "set one of them to true"},
		{"edges that the cloud refuses", "edge-host-network", `cloud: {enabled: true}`,
			"write tunnel-system/tunnel-edge into cloud.config.join.serviceaccounts"},
		{"a front door for nobody", "single", `cloud: {config: {https: {allowfrom: []}}}`, "minItems: got 0, want 1"},
		{"pods for nobody", "ha-cert-manager", `networkPolicy: {callers: []}`, "minItems: got 0, want 1"},
		{"no address", "single", `certificates: {address: ""}`, "write the address that edges dial"},
		{"tokens in the wrong place", "single", `certificates: {tokens: "edge1:revoked"}`,
			"in tokens of the Secret tunnel-cloud"},
		{"replicas without peers", "single", `cloud: {replicas: 2}`, "write cloud.config.stream.peers"},
		{"peers at another port", "ha", `cloud: {config: {stream: {server: {grpcport: 9443}}}}`,
			"peers.service has port 9000, and replicas listen on another"},
		{"peers without a CA", "ha", `cloud: {config: {stream: {peers: {ca: ""}}}}`, "or anybody could be a replica"},
		{"CoreDNS without names", "ha-responder", `coredns: {enabled: true}`,
			"write cloud.config.stream.dns.configmap: tunnel-nodes"},
		{"names of pods and of the Service", "ha", `cloud: {config: {stream: {dns: {service: tunnel-cloud}}}}`,
			"no name leads to a pod"},
		{"selector without names", "ha-responder", `cloud: {config: {stream: {dns: {nodeselector: a=b}}}}`,
			"nodeselector has no effect without configmap"},
		{
			"no front door", "single", `cloud: {config: {https: {addr: {"10250": ""}}}}`,
			"write https.addr, tcp, udp or egress",
		},
		{"egress open to all", "egress-httpconnect", `cloud: {config: {egress: {clientca: ""}}}`,
			"egress.clientca is missing"},
		{"egress without names of callers", "egress-httpconnect", `cloud: {config: {egress: {clientnames: []}}}`,
			"minItems: got 0, want 1"},
		{"egress without the key", "egress-httpconnect", `cloud: {config: {egress: {clientnames: null}}}`,
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
		{"TCP port for an empty list", "single",
			`cloud: {config: {tcp: {"0.0.0.0:2222": "edge1/127.0.0.1:22"}, tcpallow: {"0.0.0.0:2222": []}}}`,
			"write who may connect in cloud.config.tcpallow"},
		{"every strategy by an empty list", "egress-httpconnect", `cloud: {config: {egress: {strategies: []}}}`,
			"minItems: got 0, want 1"},
		{"every port of the node by an empty list", "edge-host-network", `edge: {config: {allow: []}}`,
			"minItems: got 0, want 1"},
		{"UDP port for nobody", "single", `cloud: {config: {udp: {"0.0.0.0:5353": "edge1/127.0.0.1:53"}}}`,
			"write who may send in cloud.config.udpallow"},
		{"admin socket in the root", "single", `cloud: {config: {admin: {socket: /admin.sock}}}`, "socket"},
		{"admin socket of an edge in the root", "edge-host-network", `edge: {config: {admin: {socket: /admin.sock}}}`,
			"socket"},
		{"edge without a cloud", "edge-host-network", `edge: {config: {stream: {client: {servername: ""}}}}`,
			"write the address of the cloud"},
		{"edge with two kinds of addresses", "edge-websocket",
			`edge: {config: {stream: {client: {servername: "tunnel.example.com:9000"}}}}`, "remove servername"},
		{"edge that reaches only itself", "edge-host-network", `edge: {hostNetwork: false}`,
			"write the networks that the cloud may dial"},
		{"network of the node from a pod's", "edge-cni", `edge: {hostNetwork: false, config: {allow: ["10.0.0.0/8:10250"]}}`,
			"write hostNetwork: true, or remove cni"},
		{"Services of the node from a pod's network", "edge-services",
			`edge: {hostNetwork: false, config: {allow: ["10.0.0.0/8:10250"]}}`, "write hostNetwork: true, or remove services"},
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

// TestAdminSocketFolder: the folder of the admin socket has one volume, the user's own if there is one.
func TestAdminSocketFolder(t *testing.T) {
	for values, want := range map[string]string{
		"cloud: {}": "admin /run/tunnel-cloud",
		"cloud: {config: {admin: {socket: /run/other/a.sock}}}":                                 "admin /run/other",
		"cloud: {extraVolumeMounts: [{name: mine, mountPath: /run/tunnel-cloud/}]}":             "mine /run/tunnel-cloud/",
		`cloud: {config: {admin: {socket: ""}}}`:                                                "",
		"cloud: {controlPlane: {enabled: true}, config: {admin: {socket: /run/tunnel/a.sock}}}": "sockets /run/tunnel",
		"edge: {hostNetwork: true}":                                                             "admin /run/tunnel-edge",
		"edge: {config: {admin: {socket: /run/other/a.sock}}}":                                  "admin /run/other",
		"edge: {extraVolumeMounts: [{name: mine, mountPath: /run/tunnel-edge}]}":                "mine /run/tunnel-edge",
		`edge: {config: {admin: {socket: ""}}}`:                                                 "",
	} {
		add, err := chartutil.ReadValues([]byte(values))
		if err != nil {
			t.Fatal(err)
		}
		base, kind, name := "single", "Deployment", "tunnel-cloud"
		switch {
		case strings.Contains(values, "controlPlane"):
			base, kind = "egress-grpc", "DaemonSet" // whose sockets are in a folder of the machine
		case strings.HasPrefix(values, "edge"):
			base, kind, name = "edge-host-network", "DaemonSet", "tunnel-edge"
		}
		text, _, err := helm(t, "tunnel-system", chartutil.CoalesceTables(add, readValues(t, base)))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		pod := templates(t, []object{find(t, parse(t, text), kind, name)})[0]
		for _, m := range pod.Spec.Containers[0].VolumeMounts {
			if strings.HasPrefix(m.MountPath, "/run/") {
				got = append(got, m.Name+" "+m.MountPath)
			}
		}
		if strings.Join(got, ", ") != want {
			t.Errorf("%s: the mounts are %q, want %q", values, got, want)
		}
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

// TestPortsOfEdges: the port of gRPC, the one port and the port of stock agents are in the Service of edges. The port
// for WebSockets, which is plain HTTP, is in a Service of its own that only the cluster reaches. The NetworkPolicy has
// all of them. Ports on loopback are nowhere.
func TestPortsOfEdges(t *testing.T) {
	for name, tt := range map[string]struct {
		server, service        string // values of cloud.config.stream.server and of cloud.service
		edges, ingress, opened []string
		peers                  string // the port of the Service of replicas
		replicas               int    // the port of peers.service
		agents                 int    // egress.agentport
	}{
		"all": {
			`{listen: ":8443", websocket: ":8080"}`, `{}`,
			[]string{"9000 grpc 30900", "443 8443"}, []string{"8080 8080"}, []string{"9000", "8443", "8080"}, "grpc", 9000, 0,
		},
		"listen alone": {
			`{grpcport: null, listen: "0.0.0.0:8443"}`, `{listenPort: 8443}`,
			[]string{"8443 8443 30900"}, nil, []string{"8443"}, "8443", 8443, 0,
		},
		"loopback": {
			`{listen: "127.0.0.1:8443", websocket: "[::1]:8080"}`, `{}`,
			[]string{"9000 grpc 30900"}, nil, []string{"9000"}, "grpc", 9000, 0,
		},
		"stock agents": {
			`{}`, `{}`, []string{"9000 grpc 30900", "8091 8091"}, nil, []string{"9000", "8091"}, "grpc", 9000, 8091,
		},
	} {
		t.Run(name, func(t *testing.T) {
			add, err := chartutil.ReadValues(fmt.Appendf(nil, `
certificates: {address: "tunnel.example.com:443"}
cloud:
  service: %s
  config:
    stream:
      server: %s
      peers: {service: "tunnel-cloud-peers:%d", ca: /etc/tunnel/secret/ca.crt, servername: tunnel-cloud}
    https: {addr: {"10250": "127.0.0.1:10250"}}
    egress: {agentport: %d}
networkPolicy: {enabled: true}
`, tt.service, tt.server, tt.replicas, tt.agents))
			if err != nil {
				t.Fatal(err)
			}
			text, _, err := helm(t, "tunnel-system", add)
			if err != nil {
				t.Fatal(err)
			}
			objects := parse(t, text)
			service := func(name string) (kind string, ports []string) {
				for _, o := range objects {
					if o.kind() != "Service" || o.name() != name {
						continue
					}
					for _, p := range o.at("spec", "ports").([]any) {
						port := object(p.(map[string]any))
						line := fmt.Sprint(port["port"], " ", port["targetPort"])
						if n := port["nodePort"]; n != nil {
							line += fmt.Sprint(" ", n)
						}
						ports = append(ports, line)
					}
					return o.text("spec", "type"), ports
				}
				return "", nil
			}
			if _, got := service("tunnel-cloud"); !slices.Equal(got, tt.edges) {
				t.Errorf("edges reach the ports %q, want %q", got, tt.edges)
			}
			kind, got := service("tunnel-cloud-websocket")
			if !slices.Equal(got, tt.ingress) || kind != "" && kind != "ClusterIP" {
				t.Errorf("an ingress reaches the ports %q by a Service of type %q, want %q", got, kind, tt.ingress)
			}
			if _, got := service("tunnel-cloud-peers"); len(got) != 1 || !strings.HasSuffix(got[0], " "+tt.peers) {
				t.Errorf("replicas reach the ports %q, want %q", got, tt.peers)
			}
			policy := find(t, objects, "NetworkPolicy", "tunnel-cloud").at("spec", "ingress").([]any)
			var opened []string
			for _, p := range policy[0].(map[string]any)["ports"].([]any) {
				opened = append(opened, fmt.Sprint(p.(map[string]any)["port"]))
			}
			if !slices.Equal(opened, tt.opened) {
				t.Errorf("the NetworkPolicy opens %q, want %q", opened, tt.opened)
			}
		})
	}
}

// TestProxyOfEdges: edges get the variables and files of a proxy, beside their own.
func TestProxyOfEdges(t *testing.T) {
	values := readValues(t, "edge-websocket")
	add, err := chartutil.ReadValues([]byte(`
edge:
  config: {stream: {client: {proxyfile: /etc/tunnel/proxy/url, proxyca: /etc/tunnel/proxy/ca.crt}}}
  extraEnv: [{name: HTTPS_PROXY, value: "http://proxy.example.com:3128"}]
  extraVolumes: [{name: proxy, secret: {secretName: proxy}}]
  extraVolumeMounts: [{name: proxy, mountPath: /etc/tunnel/proxy, readOnly: true}]
`))
	if err != nil {
		t.Fatal(err)
	}
	text, _, err := helm(t, "tunnel-edge", chartutil.CoalesceTables(add, values))
	if err != nil {
		t.Fatal(err)
	}
	objects := parse(t, text)
	pod := templates(t, objects)[0].Spec
	var variables, mounts, volumes []string
	for _, e := range pod.Containers[0].Env {
		variables = append(variables, e.Name+"="+e.Value)
	}
	for _, m := range pod.Containers[0].VolumeMounts {
		mounts = append(mounts, m.Name)
	}
	for _, v := range pod.Volumes {
		volumes = append(volumes, v.Name)
	}
	for what, names := range map[string][]string{"mounts": mounts, "volumes": volumes} {
		if want := []string{"config", "ca", "token", "admin", "proxy"}; !slices.Equal(names, want) {
			t.Errorf("the %s are %q, want %q", what, names, want)
		}
	}
	for _, want := range []string{"NODE_NAME=", "HTTPS_PROXY=http://proxy.example.com:3128"} {
		if !slices.Contains(variables, want) {
			t.Errorf("the variables %q lack %q", variables, want)
		}
	}
	config := find(t, objects, "ConfigMap", "tunnel-edge").text("data", "edge.toml")
	for _, want := range []string{"wss://tunnel.example.com/tunnel", "/etc/tunnel/proxy/url", "/etc/tunnel/proxy/ca.crt"} {
		if !strings.Contains(config, want) {
			t.Errorf("edge.toml has no %s:\n%s", want, config)
		}
	}
}
