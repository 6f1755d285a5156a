//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	podPort  = "8080"  // of the pods of testdata/cni.yaml
	hostPort = "18080" // of the pods web-NODE
	// again is how long a node may take to be as before: a kubelet starts, and starts pods.
	again = 90 * time.Second
)

// TestCNI installs the CNI plugin by the overlay edge-cni on nodes that have no network for pods, as a user does. The
// nodes are behind one NAT. No other plugin gives pods addresses there.
func TestCNI(t *testing.T) {
	ctx := contextOf(t)
	program := binary(ctx, t)
	dir := t.TempDir()
	images := []string{makeImage(ctx, t, dir, firstVersion), makeImage(ctx, t, dir, nextVersion)}
	c := upCluster(ctx, t, "CNI=none", "ONELAN=1")
	for _, image := range images {
		if err := c.script(ctx, "load.sh", image); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.kubectl(ctx, "apply", "-f", "../../deployment/cloud-rbac.yaml"); err != nil {
		t.Fatal(err)
	}
	n := &podNetwork{c: c, tn: newEgress(ctx, t, c, program), addresses: make(map[string][]netip.Addr)}
	n.tn.write(t, "cloud.toml", n.tn.read(t, "cloud.toml")+
		"[mode.cloud.join]\nserviceaccounts = [\""+edgeNamespace+"/tunnel-edge\"]\n")
	t.Cleanup(func() { n.tn.down(t) })
	for _, s := range []struct {
		name string
		do   func(ctx context.Context, t *testing.T)
	}{
		{"without a plugin", n.notReady}, {"installed", n.install}, {"pods", n.pods}, {"reach", n.reach},
		{"upgrade", n.upgrade}, {"offline reboot", n.reboot}, {"the cloud is back", n.back}, {"removed", n.remove},
	} {
		if !n.step(t, s.name, func(t *testing.T) { s.do(ctx, t) }) {
			return
		}
	}
}

// A podNetwork is what the steps of TestCNI work on.
type podNetwork struct {
	c         *cluster
	tn        *tunnel                 // its cloud; the edges are pods
	addresses map[string][]netip.Addr // of pods, by name; IPv4 first
}

// step is t.Run. When the step fails, it prints what the edges and the kubelets say.
func (n *podNetwork) step(t *testing.T, name string, f func(t *testing.T)) bool {
	t.Helper()
	return n.c.step(t, name, func(t *testing.T) {
		t.Cleanup(func() {
			if !t.Failed() {
				return
			}
			logs, err := filepath.Glob(n.c.path("node/*/logs/pods/*/*/*.log"))
			if err != nil {
				t.Error(err)
			}
			for _, file := range logs {
				if b, err := os.ReadFile(file); err == nil {
					t.Logf("%s:\n%s", file, tail(string(b), 20))
				}
			}
			ctx := context.Background()
			out, err := n.c.kubectl(ctx, "get", "nodes,pods,events", "-A", "-o", "wide")
			t.Logf("nodes, pods and events: %v\n%s", err, tail(out, 60))
			for _, node := range n.c.nodes {
				out, err := run(n.c.inside(ctx, node, "sh", "-c", "ip address; ip route; ip -6 route; "+
					"grep -H . /etc/cni/net.d/* /var/lib/cni/tunnel/*; ls -l /opt/cni/bin"), nil)
				t.Logf("%s: %v\n%s", node, err, out)
			}
		})
		f(t)
	})
}

// notReady asserts that the nodes have no network for pods of anybody.
func (n *podNetwork) notReady(ctx context.Context, t *testing.T) {
	for _, node := range n.c.nodes {
		eventually(ctx, t, 30*time.Second, node+" to lack a network for pods", func(ctx context.Context) error {
			out, err := n.c.kubectl(ctx, "get", "node", node, "-o",
				`jsonpath={.status.conditions[?(@.type=="Ready")].message}`)
			if err == nil && !strings.Contains(out, "cni plugin not initialized") {
				err = fmt.Errorf("the condition Ready says %q", out)
			}
			return err
		})
	}
}

// install starts the cloud, and installs the edges by the overlay. The nodes then are ready.
func (n *podNetwork) install(ctx context.Context, t *testing.T) {
	c := n.c
	n.tn.startCloud(ctx, t)
	for _, node := range c.nodes {
		if _, err := c.kubectl(ctx, "label", "node", node, "node-role.kubernetes.io/edge="); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.apply(ctx, firstVersion); err != nil {
		t.Fatal(err)
	}
	if _, err := c.kubectl(ctx, "create", "configmap", "tunnel-ca", "-n", edgeNamespace,
		"--from-file="+c.path("pki/ca.crt")); err != nil {
		t.Fatal(err)
	}
	if err := c.settled(ctx, edgeNamespace, "daemonset/tunnel-edge"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=60s", "node", "--all"); err != nil {
		t.Fatal(err)
	}
	// kubectl exec and the like go through the tunnel, too.
	selector := n.tn.selector(t, "GRPC", "uds: {udsName: "+n.tn.dir+"/egress-grpc.sock}")
	if err := c.script(ctx, "apiserver.sh", "kubelet-ca", selector,
		"--kubelet-preferred-address-types=InternalIP"); err != nil {
		t.Fatal(err)
	}
}

// apply applies an overlay of the user's own on edge-cni.
func (n *podNetwork) apply(ctx context.Context, version string) error {
	config, err := os.ReadFile(filepath.Join(deploy, "kustomize/overlays/edge-cni/edge.toml"))
	if err != nil {
		return err
	}
	text := string(config)
	for _, change := range [][2]string{
		{`"tunnel.example.com:9000"`, `"` + cloudIP + `:9000"`}, {`"tunnel-cloud"`, `"` + joinName + `"`},
		{"#routes = true", "routes = true"},
	} {
		if !strings.Contains(text, change[0]) {
			return fmt.Errorf("edge.toml of the overlay has no %s", change[0])
		}
		text = strings.Replace(text, change[0], change[1], 1)
	}
	dir := n.c.path("install/edges")
	overlays, err := filepath.Abs(filepath.Join(deploy, "kustomize/overlays"))
	if err == nil {
		overlays, err = filepath.Rel(dir, overlays)
	}
	if err != nil {
		return err
	}
	k := kustomize{c: n.c, dir: n.c.path("install")}
	if dir, err = k.write("edges", map[string]string{"edge.toml": text,
		"kustomization.yaml": `resources: [` + overlays + `/edge-cni]
images: [{name: tunnel, newTag: ` + version + `}]
configMapGenerator:
- {name: tunnel-edge, namespace: ` + edgeNamespace + `, behavior: replace, files: [edge.toml]}
generatorOptions: {disableNameSuffixHash: true}
`}); err != nil {
		return err
	}
	_, err = n.c.kubectl(ctx, "apply", "-k", dir)
	return err
}

// pods starts pods: web-NODE and peer-NODE by the API server, then static-NODE without. After a boot without the API
// server, static-NODE starts first: then it has its address again only if the node remembers the address.
func (n *podNetwork) pods(ctx context.Context, t *testing.T) {
	for _, kind := range []string{"web", "peer", "static"} {
		ports := ""
		if kind == "web" {
			ports = "{containerPort: " + podPort + ", hostPort: " + hostPort + "}"
		}
		for _, node := range n.c.nodes {
			name := kind + "-" + node
			text, err := manifestOf(name, node, ports)
			switch {
			case err != nil:
			case kind == "static":
				err = os.WriteFile(n.c.path("node/"+node+"/static/"+name+".yaml"), []byte(text), 0o600)
			default:
				_, err = n.c.kubectlIn(ctx, strings.NewReader(text), "apply", "-f", "-")
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		for _, node := range n.c.nodes {
			n.learn(ctx, t, kind+"-"+node, node)
		}
	}
	seen := make(map[netip.Addr]string)
	for name, all := range n.addresses {
		for _, a := range all {
			if seen[a] != "" {
				t.Errorf("%s and %s have the address %s", name, seen[a], a)
			}
			seen[a] = name
		}
	}
}

// manifestOf returns the manifest of a pod of testdata/cni.yaml.
func manifestOf(name, node, ports string) (string, error) {
	manifest, err := os.ReadFile("testdata/cni.yaml")
	return strings.NewReplacer("NAME", name, "NODE", node, "PORTS", ports).Replace(string(manifest)), err
}

// object returns the name of a pod for the API server: the kubelet adds the node's name to that of a static pod.
func object(pod string) string {
	if node, ok := strings.CutPrefix(pod, "static-"); ok {
		return pod + "-" + node
	}
	return pod
}

// learn waits until a pod is ready, and notes its addresses: one of each of its node's networks.
func (n *podNetwork) learn(ctx context.Context, t *testing.T, pod, node string) {
	t.Helper()
	eventually(ctx, t, time.Minute, "pod "+pod, func(ctx context.Context) error {
		_, err := n.c.kubectl(ctx, "get", "pod", object(pod))
		return err
	})
	if _, err := n.c.kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=60s", "pod", object(pod)); err != nil {
		t.Fatal(err)
	}
	out, err := n.c.kubectl(ctx, "get", "pod", object(pod), "-o", "jsonpath={.status.podIPs[*].ip}")
	if err != nil {
		t.Fatal(err)
	}
	var got []netip.Addr
	for _, text := range strings.Fields(out) {
		got = append(got, netip.MustParseAddr(text))
	}
	number := strings.TrimPrefix(node, "edge")
	for i, network := range []string{"10.88." + number + ".0/24", "fd00:88:" + number + "::/64"} {
		if len(got) != 2 || !netip.MustParsePrefix(network).Contains(got[i]) {
			t.Fatalf("%s has the addresses %v; want one of IPv4 and one of IPv6, in the networks of %s", pod, got, node)
		}
	}
	n.addresses[pod] = got
}

// page asks an address from within a node, for what a pod serves there.
func (n *podNetwork) page(ctx context.Context, node string, addr netip.Addr, port, path string) (string, error) {
	status, body, err := n.c.getInside(ctx, node, "http://"+net.JoinHostPort(addr.String(), port)+path)
	if err := is200(status, body, err); err != nil {
		return "", err
	}
	return body, nil
}

// isAt returns nil if a pod answers at all addresses that it had first.
func (n *podNetwork) isAt(ctx context.Context, node, pod string) error {
	var errs []error
	for _, a := range n.addresses[pod] {
		body, err := n.page(ctx, node, a, podPort, "/")
		if err := want(err, body, pod+"\n"); err != nil {
			errs = append(errs, fmt.Errorf("%s at %s: %w", pod, a, err))
		}
	}
	return errors.Join(errs...)
}

// gets returns nil if a pod of a node gets from an address what is wanted. The pod is asked by its own node.
func (n *podNetwork) gets(ctx context.Context, node, pod string, addr netip.Addr, port, path, wanted string) error {
	at := n.addresses[pod][0]
	if addr.Is6() {
		at = n.addresses[pod][1]
	}
	body, err := n.page(ctx, node, at, podPort, "/cgi-bin/get?"+addr.String()+","+port+","+path)
	if err == nil && !strings.Contains(body, wanted) {
		err = fmt.Errorf("it got %q, want %q", body, wanted)
	}
	if err != nil {
		return fmt.Errorf("%s at %s gets %s of %s: %w", pod, at, path, net.JoinHostPort(addr.String(), port), err)
	}
	return nil
}

// nodeAddresses returns the addresses of a node in the LAN: IPv4 and IPv6.
func nodeAddresses(node string) []netip.Addr {
	last := map[string]string{"edge1": "2", "edge2": "3"}[node]
	return []netip.Addr{netip.MustParseAddr("192.168.7." + last), netip.MustParseAddr("fd00:77::" + last)}
}

// overTLS is the answer of a server that speaks TLS alone.
const overTLS = "Client sent an HTTP request to an HTTPS server"

// noServer is what a pod says when a host answers that no program listens at the port. The answer found its way back.
const noServer = "Connection refused"

// reached returns nil if pods of a node reach what pods should: each other, the node, the other node and its pods, and
// the outside. Pods of the other node see them under their own addresses. The outside has no route to pods, so answers
// from there show that the node hides them. For IPv6 the outside is a host without servers (OUTSIDE6 of test/cluster).
func (n *podNetwork) reached(ctx context.Context, node, other string) error {
	web, peer := "web-"+node, "peer-"+node
	errs := []error{
		n.isAt(ctx, node, web), n.isAt(ctx, node, peer), n.isAt(ctx, node, "web-"+other),
		n.gets(ctx, node, web, netip.MustParseAddr("10.77.0.1"), "6443", "/", overTLS),
		n.gets(ctx, node, web, netip.MustParseAddr("fd00:66::1"), "9", "/", noServer),
	}
	for i := range 2 {
		own := n.addresses[web][i]
		errs = append(errs,
			n.gets(ctx, node, web, n.addresses[peer][i], podPort, "/", peer),
			n.gets(ctx, node, web, n.addresses[peer][i], podPort, "/cgi-bin/from", own.String()),
			n.gets(ctx, node, web, n.addresses["web-"+other][i], podPort, "/", "web-"+other),
			n.gets(ctx, node, web, n.addresses["web-"+other][i], podPort, "/cgi-bin/from", own.String()),
			n.gets(ctx, node, web, nodeAddresses(node)[i], kubelet, "/", overTLS),
			n.gets(ctx, node, web, nodeAddresses(other)[i], kubelet, "/", overTLS))
		for _, from := range n.c.nodes { // hostPort, also from the node itself
			body, err := n.page(ctx, from, nodeAddresses(node)[i], hostPort, "/")
			if err := want(err, body, web+"\n"); err != nil {
				errs = append(errs, fmt.Errorf("hostPort of %s from %s: %w", nodeAddresses(node)[i], from, err))
			}
		}
	}
	return errors.Join(errs...)
}

// reach checks who reaches whom.
func (n *podNetwork) reach(ctx context.Context, t *testing.T) {
	n.allReached(ctx, t, 20*time.Second) // an edge looks every 10 s
	for _, node := range n.c.nodes {
		out, err := n.c.kubectl(ctx, "exec", "web-"+node, "--", "hostname")
		if err := want(err, out, "web-"+node+"\n"); err != nil {
			t.Errorf("kubectl exec: %v", err)
		}
		if err := edgeContent(ctx, n.c, node); err != nil {
			t.Error(err)
		}
	}
}

// edgeContent returns an error if the edge of a node is not ready, or has something to say about the network of pods.
func edgeContent(ctx context.Context, c *cluster, node string) error {
	status, body, err := c.getInside(ctx, node, "http://127.0.0.1:"+edgeLog+"/readyz?verbose")
	if err := is200(status, body, err); err != nil {
		return err
	}
	if strings.Contains(body, "[~]cni") || !strings.Contains(body, "cni") {
		return fmt.Errorf("the edge of %s says %s", node, body)
	}
	return nil
}

func (n *podNetwork) allReached(ctx context.Context, t *testing.T, within time.Duration) {
	t.Helper()
	for i, node := range n.c.nodes {
		took := eventually(ctx, t, within, "the pods of "+node+" to reach all", func(ctx context.Context) error {
			return n.reached(ctx, node, n.c.nodes[1-i])
		})
		t.Logf("the pods of %s reach all after %v", node, took.Round(time.Millisecond))
	}
}

// upgrade replaces the edges by those of the next version, with its plugin. At no moment is a node without plugin or
// network configuration. Meanwhile, pods reach each other, and the pods new-NODE start.
func (n *podNetwork) upgrade(ctx context.Context, t *testing.T) {
	plugin := func(node string) string { return n.c.path("node/" + node + "/cni-bin/tunnel-cni") }
	before := make(map[string][]byte)
	for _, node := range n.c.nodes {
		b, err := os.ReadFile(plugin(node))
		if err != nil {
			t.Fatal(err)
		}
		before[node] = b
	}
	stop, done := make(chan struct{}), make(chan struct{})
	looks, asked := 0, 0
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
			}
			for _, node := range n.c.nodes {
				_, err := os.Stat(plugin(node))
				_, confErr := os.Stat(n.c.path("node/" + node + "/cni.d/10-tunnel.conflist"))
				if err := errors.Join(err, confErr); err != nil {
					t.Errorf("during the upgrade: %v", err)
					return
				}
			}
			if looks%100 == 0 {
				if err := n.gets(ctx, "edge1", "web-edge1", n.addresses["web-edge2"][0], podPort, "/", "web-edge2"); err != nil {
					t.Errorf("during the upgrade: %v", err)
					return
				}
				asked++
			}
			looks++
			time.Sleep(time.Millisecond)
		}
	}()
	err := n.apply(ctx, nextVersion)
	if err == nil {
		err = n.startNew(ctx)
	}
	if err == nil {
		err = n.c.settled(ctx, edgeNamespace, "daemonset/tunnel-edge")
	}
	close(stop)
	<-done
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d looks, %d requests", looks, asked)
	for _, node := range n.c.nodes {
		now, err := os.ReadFile(plugin(node))
		if err != nil || slices.Equal(now, before[node]) || !strings.Contains(string(now), nextVersion) {
			t.Errorf("%s has the old plugin, %v", node, err)
		}
	}
	n.newAreThere(ctx, t)
	n.allReached(ctx, t, 20*time.Second)
}

// startNew has each node start a pod new-NODE. It does not wait for them.
func (n *podNetwork) startNew(ctx context.Context) error {
	for _, node := range n.c.nodes {
		text, err := manifestOf("new-"+node, node, "")
		if err == nil {
			_, err = n.c.kubectlIn(ctx, strings.NewReader(text), "apply", "-f", "-")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// newAreThere asserts that the pods new-NODE answer, and that the first ADD of each succeeded: the kubelet tries again,
// so a pod that runs does not show it. Then it deletes the pods, which the steps after it do not expect.
func (n *podNetwork) newAreThere(ctx context.Context, t *testing.T) {
	remove := []string{"delete", "pod", "--timeout=60s"}
	for _, node := range n.c.nodes {
		pod := "new-" + node
		n.learn(ctx, t, pod, node)
		eventually(ctx, t, 20*time.Second, pod+" to answer", func(ctx context.Context) error {
			return n.isAt(ctx, node, pod)
		})
		out, err := n.c.kubectl(ctx, "get", "events", "--field-selector",
			"involvedObject.name="+pod+",reason=FailedCreatePodSandBox", "-o", "jsonpath={.items[*].message}")
		if err != nil || out != "" {
			t.Errorf("during the upgrade, %s was not started at once: %v, %s", pod, err, out)
		}
		delete(n.addresses, pod)
		remove = append(remove, pod)
	}
	if _, err := n.c.kubectl(ctx, remove...); err != nil {
		t.Fatal(err)
	}
}

// reboot has edge1 boot without its uplink, and then without the cloud. All that its kernel had is gone. Every pod has
// its old addresses again.
func (n *podNetwork) reboot(ctx context.Context, t *testing.T) {
	c := n.c
	boot := func() string {
		b, err := os.ReadFile(c.path("node/edge1/boot_id"))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	first := boot()
	n.tn.cloud.kill(t)
	for _, verb := range []string{"cut", "kill", "forget"} {
		if err := c.script(ctx, "node.sh", verb, "edge1"); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.isAt(ctx, "edge1", "static-edge1"); err == nil {
		t.Fatal("a pod of edge1 is there while the node is down: the test proves nothing")
	}
	if err := c.script(ctx, "node.sh", "start", "edge1"); err != nil {
		t.Fatal(err)
	}
	took := eventually(ctx, t, again, "the static pod without uplink", func(ctx context.Context) error {
		return n.isAt(ctx, "edge1", "static-edge1")
	})
	t.Logf("without uplink, the static pod has its addresses after %v", took.Round(time.Millisecond))
	if boot() == first {
		t.Error("the boot id is the same: the test proves nothing")
	}
	if err := c.script(ctx, "node.sh", "join", "edge1"); err != nil {
		t.Fatal(err)
	}
	took = eventually(ctx, t, again, "the pods without the cloud", func(ctx context.Context) error {
		return errors.Join(n.isAt(ctx, "edge1", "web-edge1"), n.isAt(ctx, "edge1", "peer-edge1"),
			n.isAt(ctx, "edge1", "static-edge1"))
	})
	t.Logf("without the cloud, the other pods have their addresses after %v more", took.Round(time.Millisecond))
	// The edge of edge1 has its routes and rules from its disk.
	n.allReached(ctx, t, again)
	status, body, err := c.getInside(ctx, "edge1", "http://127.0.0.1:"+edgeLog+"/readyz?verbose")
	if err == nil && status == 200 {
		t.Errorf("the edge of edge1 has a session: the test proves nothing: %s", body)
	}
}

// back starts the cloud again: everything is as before.
func (n *podNetwork) back(ctx context.Context, t *testing.T) {
	n.tn.startCloud(ctx, t)
	for _, node := range n.c.nodes {
		eventually(ctx, t, again, "the edge of "+node+" to be ready", func(ctx context.Context) error {
			return edgeContent(ctx, n.c, node)
		})
	}
	n.allReached(ctx, t, 20*time.Second)
	for name := range n.addresses {
		var texts []string
		for _, a := range n.addresses[name] {
			texts = append(texts, a.String())
		}
		out, err := n.c.kubectl(ctx, "get", "pod", object(name), "-o", "jsonpath={.status.podIPs[*].ip}")
		if err := want(err, out, strings.Join(texts, " ")); err != nil {
			t.Errorf("the addresses of %s: %v", name, err)
		}
	}
}

// remove removes edges and plugin as deployment/README.md says. Nothing of ours is left on the node.
func (n *podNetwork) remove(ctx context.Context, t *testing.T) {
	c := n.c
	if out := n.tables(ctx, t, "edge2"); !strings.Contains(out, edgeTable) {
		t.Errorf("before the removal, there is no table of the edge on edge2: the test proves nothing: %s", out)
	}
	if _, err := c.kubectl(ctx, "delete", "-k", c.path("install/edges"), "--timeout=120s"); err != nil {
		t.Fatal(err)
	}
	manifest, err := os.ReadFile("../../deployment/cni-remove.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.kubectlIn(ctx, strings.NewReader(strings.ReplaceAll(string(manifest), "NODE", "edge2")), "apply", "-f",
		"-"); err != nil {
		t.Fatal(err)
	}
	// The pods are there still: the removal waits for their end.
	const remover = "tunnel-cni-remove-edge2"
	eventually(ctx, t, time.Minute, "the removal to refuse", func(ctx context.Context) error {
		out, err := c.kubectl(ctx, "get", "pod", remover, "-n", "kube-system", "-o",
			"jsonpath={.status.containerStatuses[0].restartCount}{.status.containerStatuses[0].lastState.terminated.exitCode}")
		if err == nil && (out == "" || out == "0") {
			err = fmt.Errorf("the removal has not failed: %q", out)
		}
		return err
	})
	if err := n.isAt(ctx, "edge2", "web-edge2"); err != nil {
		t.Errorf("a refused removal has removed something: %v", err)
	}
	if err := os.Remove(c.path("node/edge2/static/static-edge2.yaml")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.kubectl(ctx, "delete", "pod", "web-edge2", "peer-edge2"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.kubectl(ctx, "wait", "-n", "kube-system", "--for=jsonpath={.status.phase}=Succeeded", "pod/"+remover,
		"--timeout=120s"); err != nil {
		t.Fatal(err)
	}
	out, err := run(c.inside(ctx, "edge2", "sh", "-c", "ls -A /etc/cni/net.d; ls -A /opt/cni/bin; "+
		"ls -d /var/lib/cni/tunnel 2>/dev/null; "+
		"ip -o link | grep -o 'tunnel0' || true; ip route show proto 117; ip -6 route show proto 117"), nil)
	left := strings.Fields(out)
	slices.Sort(left)
	if err != nil || !slices.Equal(left, []string{"loopback", "portmap"}) {
		t.Errorf("on the node there is %q, %v; want the stock plugins alone", left, err)
	}
	if out := n.tables(ctx, t, "edge2"); strings.Contains(out, edgeTable) {
		t.Errorf("on the node, nft lists the table of the edge still: %s", out)
	}
}

// edgeTable is the table with the rules of an edge, as nft lists it.
const edgeTable = "table inet tunnel-cni\n"

// tables returns what nft lists of a node, a line for each table.
func (n *podNetwork) tables(ctx context.Context, t *testing.T, node string) string {
	t.Helper()
	out, err := run(n.c.inside(ctx, node, n.c.home+"/nodebin/nft", "list", "tables"), nil)
	if err != nil {
		t.Fatalf("nft list tables on %s: %v: %s", node, err, out)
	}
	return out
}
