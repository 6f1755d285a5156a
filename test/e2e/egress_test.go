//go:build e2e

package e2e

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestEgress has kube-apiserver reach everything in the cluster through the cloud's egress front
// door, in each way in which it can. The nodes' names and addresses lead nowhere, and the edges
// have nothing configured.
func TestEgress(t *testing.T) {
	ctx := contextOf(t)
	program := binary(ctx, t)
	c := upCluster(ctx, t)
	prepareEgress(ctx, t, c)
	tn := newEgress(ctx, t, c, program)
	sockets, pki := tn.dir, c.path("pki")

	tn.startCloud(ctx, t)
	t.Cleanup(func() { tn.down(t) })
	for _, n := range c.nodes {
		tn.startEdge(ctx, t, n)
	}
	c.step(t, "without the selector", func(t *testing.T) {
		for _, n := range c.nodes {
			eventually(ctx, t, backAgain, "edge "+n+" to be ready",
				func(ctx context.Context) error { return tn.edgeReady(ctx, n) })
		}
		eventually(ctx, t, 5*time.Second, "the cloud to be ready", tn.cloudReady)
		nowhere(ctx, t, c, "no route to host")
		for what, try := range map[string]func(context.Context, *cluster) error{
			"pods": tryPods, "services": tryServices, "the webhook": tryWebhook, "the aggregated API": tryAggregated,
		} {
			if err := try(ctx, c); err == nil {
				t.Errorf("%s can be reached without the tunnel: the test proves nothing", what)
			}
		}
	})
	for _, mode := range []struct {
		name, protocol, transport string
		address                   string // by which kube-apiserver calls nodes
	}{
		{"GRPC over a unix socket", "GRPC", "uds: {udsName: " + sockets + "/egress-grpc.sock}", "InternalIP"},
		{"HTTPConnect over a unix socket", "HTTPConnect", "uds: {udsName: " + sockets + "/egress-connect.sock}", "Hostname"},
		{"HTTPConnect over TLS", "HTTPConnect", "tcp: {url: 'https://" + cloudIP + ":8090', tlsConfig: {caBundle: " + pki +
			"/ca.crt, clientCert: " + pki + "/egress-client.crt, clientKey: " + pki + "/egress-client.key}}", "InternalIP"},
	} {
		t.Run(mode.name, func(t *testing.T) {
			if err := c.script(ctx, "apiserver.sh", "kubelet-ca", tn.selector(t, mode.protocol, mode.transport),
				"--kubelet-preferred-address-types="+mode.address); err != nil {
				t.Fatal(err)
			}
			if !c.step(t, "verbs", func(t *testing.T) {
				works(ctx, t, tn, verbs)
				succeeds(ctx, t, c, "edge2")
			}) {
				return
			}
			for _, s := range []struct {
				name string
				try  func(context.Context, *cluster) error
			}{{"pods", tryPods}, {"services", tryServices}, {"webhook", tryWebhook}, {"aggregated API", tryAggregated}} {
				c.step(t, s.name, func(t *testing.T) {
					took := eventually(ctx, t, time.Minute, s.name, func(ctx context.Context) error { return s.try(ctx, c) })
					t.Logf("after %v", took.Round(time.Millisecond))
				})
			}
			if mode.address == "InternalIP" { // by name kube-apiserver looks it up itself before it proxies
				c.step(t, "a machine of the control plane", func(t *testing.T) {
					eventually(ctx, t, time.Minute, "the answer to name it", func(ctx context.Context) error {
						_, err := c.kubectl(ctx, "get", "--raw", "/api/v1/nodes/control1:10250/proxy/healthz")
						return failsWith(err, "control1 is not connected")
					})
				})
			}
			c.step(t, "edge killed", func(t *testing.T) { egressWithout(ctx, t, tn) })
		})
	}
	t.Run("addresses of Services", func(t *testing.T) { clusterIPs(ctx, t, tn) })
}

// selector writes an EgressSelectorConfiguration, and returns the flag that names it.
func (tn *tunnel) selector(t *testing.T, protocol, transport string) string {
	t.Helper()
	tn.write(t, "selector.yaml", `apiVersion: apiserver.k8s.io/v1beta1
kind: EgressSelectorConfiguration
egressSelections:
- name: cluster
  connection: {proxyProtocol: `+protocol+`, transport: {`+transport+`}}
`)
	return "--egress-selector-config-file=" + filepath.Join(tn.dir, "selector.yaml")
}

// clusterIPs has kube-apiserver dial the addresses of Services, behind which kube-proxy has the
// pods: without aggregator routing it does not ask which they are. Any node will do for such an
// address, and nothing routes from one node to the pods of the other, so only the node with the pod
// is connected.
func clusterIPs(ctx context.Context, t *testing.T, tn *tunnel) {
	c := tn.c
	selector := tn.selector(t, "GRPC", "uds: {udsName: "+tn.dir+"/egress-grpc.sock}")
	if err := c.script(ctx, "apiserver.sh", "kubelet-ca", selector, "--enable-aggregator-routing=false"); err != nil {
		t.Fatal(err)
	}
	for _, n := range c.nodes {
		tn.edges[n].kill(t)
		tn.write(t, n+".toml",
			strings.Replace(tn.read(t, n+".toml"), "[mode.edge]\n",
				"[mode.edge]\nallow = [\"self:*\", \"10.96.0.0/16:*\"]\n", 1))
	}
	for i, s := range []struct {
		name, node string
		try        func(context.Context, *cluster) error
	}{{"webhook", "edge1", tryWebhook}, {"aggregated API", "edge2", tryAggregated}} {
		c.step(t, s.name, func(t *testing.T) {
			tn.startEdge(ctx, t, s.node)
			eventually(ctx, t, backAgain, "edge "+s.node+" to be ready",
				func(ctx context.Context) error { return tn.edgeReady(ctx, s.node) })
			if i == 0 {
				if err := s.try(ctx, c); err == nil {
					t.Error("it can be reached without kube-proxy: the test proves nothing")
				}
			}
			proxy := startDaemon(t, c, "kube-proxy-"+s.node,
				c.inside(ctx, s.node, filepath.Join(c.home, "bin", "kubeall"), "kube-proxy",
					"--kubeconfig="+c.path("admin.kubeconfig"), "--hostname-override="+s.node, "--proxy-mode=iptables",
					"--cluster-cidr=10.88.0.0/16",
					"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s", "--conntrack-tcp-timeout-close-wait=0s"))
			t.Cleanup(func() { proxy.kill(t) })
			took := eventually(ctx, t, time.Minute, s.name, func(ctx context.Context) error { return s.try(ctx, c) })
			t.Logf("after %v", took.Round(time.Millisecond))
			tn.edges[s.node].kill(t)
		})
	}
}

// egressWithout takes edge1 away: what was under way ends, and who asks for it is told why.
func egressWithout(ctx context.Context, t *testing.T, tn *tunnel) {
	c := tn.c
	flight := takeOff(ctx, t, c, "edge1")
	tn.edges["edge1"].kill(t)
	began := time.Now()
	fails(ctx, t, c, "edge1", verbs, gone)
	flight.lands(t, began.Add(gone))
	took := eventually(ctx, t, gone, "logs to say why", func(ctx context.Context) error {
		ctx, cancel := within(ctx, gone)
		defer cancel()
		err := tryLogs(ctx, c, "edge1")
		t.Log(err)
		return failsWith(err, "edge1 is not connected")
	})
	t.Logf("logs says so in %v", took.Round(time.Millisecond))
	if err := tryLogs(ctx, c, "edge2"); err != nil {
		t.Errorf("the other node suffers: %v", err)
	}
	tn.startEdge(ctx, t, "edge1")
	recovers(ctx, t, c, "edge1")
}

// prepareEgress puts on the nodes what kube-apiserver is to reach there.
func prepareEgress(ctx context.Context, t *testing.T, c *cluster) {
	t.Helper()
	dir := c.path("extension")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	build := command(ctx, "go", "build", "-o", filepath.Join(dir, "extension"), "./extension")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if _, err := run(build, nil); err != nil {
		t.Fatal(err)
	}
	_, err := c.kubectl(ctx, "apply", "-f", "../../deployment/cloud-rbac.yaml")
	for _, n := range c.nodes {
		err = errors.Join(err, c.apply(ctx, "pods.yaml", "NODE", n))
	}
	// each a pod and a Service of that name
	for name, node := range map[string]string{"webhook": "edge1", "api": "edge2"} {
		c.leaf(ctx, t, "-name", name, "-cn", name, "-dns", name+".default.svc", "-server")
		for _, ext := range []string{".crt", ".key"} {
			err = errors.Join(err, os.Rename(c.path("pki/"+name+ext), filepath.Join(dir, name+ext)))
		}
		err = errors.Join(err, c.apply(ctx, "extension.yaml", "NAME", name, "NODE", node, "DIR", dir))
	}
	// A Node that no edge may join as.
	_, nodeErr := c.kubectlIn(ctx, strings.NewReader(`{"apiVersion": "v1", "kind": "Node",
		"metadata": {"name": "control1", "labels": {"node-role.kubernetes.io/control-plane": ""}},
		"status": {"addresses": [{"type": "InternalIP", "address": "10.79.0.9"},
			{"type": "Hostname", "address": "control1"}]}}`), "create", "-f", "-")
	err = errors.Join(err, nodeErr)
	ca, readErr := os.ReadFile(c.path("pki/ca.crt"))
	err = errors.Join(err, readErr, c.apply(ctx, "extended.yaml", "CABUNDLE", base64.StdEncoding.EncodeToString(ca)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=60s", "pod", "--all"); err != nil {
		t.Fatal(err)
	}
}

// newEgress is a tunnel whose cloud has the egress front door and no other, and no names to lead to it.
func newEgress(ctx context.Context, t *testing.T, c *cluster, program string) *tunnel {
	t.Helper()
	tn := newTunnel(ctx, t, c, program, "")
	c.leaf(ctx, t, "-name", "egress-server", "-cn", "egress-server", "-ip", cloudIP, "-server")
	c.leaf(ctx, t, "-name", "egress-client", "-cn", "kube-apiserver-egress", "-client")
	fill := strings.NewReplacer("PKI", c.path("pki"), "IP", cloudIP, "LOGPORT", cloudLog, "DIR", tn.dir)
	tn.write(t, "cloud.toml", fill.Replace(`
[mode.cloud.stream.server]
grpcport = 9000
cert = "PKI/tunnel-join.crt"
key = "PKI/tunnel-join.key"
tokenfile = "tokens"
logport = LOGPORT

[mode.cloud.stream.dns]
debug = true

[mode.cloud.egress]
grpc = ["unix://DIR/egress-grpc.sock"]
httpconnect = ["unix://DIR/egress-connect.sock", "tls://IP:8090"]
cert = "PKI/egress-server.crt"
key = "PKI/egress-server.key"
clientca = "PKI/ca.crt"
clientnames = ["kube-apiserver-egress"]
kubernetes = true
`))
	return tn
}

// tryPods asks the pod of each node for a page, by way of kube-apiserver.
func tryPods(ctx context.Context, c *cluster) error {
	var errs []error
	for _, n := range c.nodes {
		out, err := c.kubectl(ctx, "get", "--raw", "/api/v1/namespaces/default/pods/"+pod(n)+":8080/proxy/")
		errs = append(errs, want(err, out, "hello-from-pod\n"))
	}
	return errors.Join(errs...)
}

// tryServices does so for a Service of each.
func tryServices(ctx context.Context, c *cluster) error {
	var errs []error
	for _, n := range c.nodes {
		out, err := c.kubectl(ctx, "get", "--raw", "/api/v1/namespaces/default/services/"+pod(n)+":80/proxy/")
		errs = append(errs, want(err, out, "hello-from-pod\n"))
	}
	return errors.Join(errs...)
}

// tryWebhook has the webhook of edge1 let one ConfigMap in, and deny another.
func tryWebhook(ctx context.Context, c *cluster) error {
	create := func(label string) error {
		_, err := c.kubectlIn(ctx,
			strings.NewReader(`{"apiVersion": "v1", "kind": "ConfigMap",
				"metadata": {"name": "judged", "labels": {"e2e": "`+label+`"}}}`),
			"create", "--dry-run=server", "-f", "-")
		return err
	}
	if err := create("allowed"); err != nil {
		return err
	}
	return failsWith(create("denied"), `webhook "judge.x.example.com" denied the request: denied in webhook`)
}

// failsWith returns nil when kubectl failed by itself and said text.
func failsWith(err error, text string) error {
	if err == nil {
		return fmt.Errorf("it worked; want %q", text)
	}
	if _, ok := exitCode(err); !ok || !strings.Contains(err.Error(), text) {
		return fmt.Errorf("want %q: %w", text, err)
	}
	return nil
}

// tryAggregated asks the API server of edge2.
func tryAggregated(ctx context.Context, c *cluster) error {
	out, err := c.kubectl(ctx, "get", "--raw", "/apis/x.example.com/v1/greetings")
	if err == nil && !strings.Contains(out, `"from":"api"`) {
		err = fmt.Errorf("it answered %q", out)
	}
	if err != nil {
		return err
	}
	out, err = c.kubectl(ctx, "api-resources", "--api-group=x.example.com", "-o", "name")
	return want(err, out, "greetings.x.example.com\n")
}
