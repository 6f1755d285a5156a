//go:build e2e

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The addresses of testdata/services.yaml.
var clusterIPOf = map[string]string{"edge1": "10.96.20.1", "edge2": "10.96.20.2", "both": "10.96.20.3"}

// TestServices has pods and processes of nodes behind NAT use Services whose pods are on the other node, beside
// kube-proxy. No route leads from one node to the pods of the other.
func TestServices(t *testing.T) {
	ctx := contextOf(t)
	program := binary(ctx, t)
	for _, variant := range []struct {
		mode     string // of kube-proxy
		settings []string
		more     func(s *farServices) []servicesStep
	}{
		{"iptables", []string{"DIRECT=" + controlNode, "NODES=edge1 edge2 " + controlNode},
			func(s *farServices) []servicesStep { return []servicesStep{{"mirror", s.mirror}} }},
		{"nftables", nil, func(s *farServices) []servicesStep {
			return []servicesStep{{"slow uplinks", s.slowUplinks}, {"same site", s.sameSite}}
		}},
	} {
		t.Run(variant.mode, func(t *testing.T) {
			c := upCluster(ctx, t, append(variant.settings, "KUBEPROXY="+variant.mode)...)
			if _, err := c.kubectl(ctx, "apply", "-f", "../../deployment/cloud-rbac.yaml"); err != nil {
				t.Fatal(err)
			}
			if err := c.apply(ctx, "services.yaml"); err != nil {
				t.Fatal(err)
			}
			s := &farServices{c: c, tn: newEgress(ctx, t, c, program), mode: "relay", pods: make(map[string]string)}
			t.Cleanup(func() { s.tn.down(t) })
			s.run(ctx, t, slices.Concat([]servicesStep{
				{"pods", s.start}, {"foreign tables", s.foreign}, {"out of reach", s.outOfReach}, {"relayed", s.relayed},
				{"rules", s.listed}, {"datagrams", s.datagrams}, {"bulk", s.bulk}, {"from the cluster", s.fromCluster},
				{"a node is away", s.nodeAway}, {"without the cloud", s.offline}, {"names without the cloud", s.names},
				{"the cloud is back", s.back},
			}, variant.more(s), []servicesStep{{"removed", s.remove}}))
		})
	}
}

// TestServicesFull has edges serve all Services of nodes without kube-proxy.
func TestServicesFull(t *testing.T) {
	ctx := contextOf(t)
	program := binary(ctx, t)
	c := upCluster(ctx, t, "KUBEPROXY=none")
	if _, err := c.kubectl(ctx, "apply", "-f", "../../deployment/cloud-rbac.yaml"); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"services.yaml", "services-full.yaml"} {
		if err := c.apply(ctx, file); err != nil {
			t.Fatal(err)
		}
	}
	s := &farServices{c: c, tn: newEgress(ctx, t, c, program), mode: "full", pods: make(map[string]string)}
	t.Cleanup(func() { s.tn.down(t) })
	s.run(ctx, t, []servicesStep{
		{"pods", s.start}, {"foreign tables", s.foreign}, {"nobody serves", s.unserved}, {"served", s.relayed},
		{"rules", s.listed}, {"node ports", s.nodePorts}, {"no endpoint", s.refused}, {"datagrams", s.datagrams},
		{"bulk", s.bulk}, {"a node is away", s.nodeAway}, {"without the cloud", s.offline},
		{"names without the cloud", s.names}, {"the cloud is back", s.back}, {"removed", s.remove},
		{"wire", s.wire}, {"without the edge", s.withoutEdge}, {"beside kube-proxy", s.besideProxy},
	})
}

// A servicesStep is a step of TestServices or TestServicesFull.
type servicesStep struct {
	name string
	do   func(ctx context.Context, t *testing.T)
}

// farServices is what the steps of TestServices and TestServicesFull work on.
type farServices struct {
	c    *cluster
	tn   *tunnel
	mode string            // of the edges
	pods map[string]string // the address of the pod on each node
}

// run runs steps up to the first that fails.
func (s *farServices) run(ctx context.Context, t *testing.T, steps []servicesStep) {
	for _, step := range steps {
		if !s.c.step(t, step.name, func(t *testing.T) { step.do(ctx, t) }) {
			return
		}
	}
}

// The addresses and the node port of testdata/services-full.yaml.
const (
	emptyClusterIP = "10.96.20.6"
	nodePort       = "30080"
)

// unserved asserts that nobody serves Services yet.
func (s *farServices) unserved(ctx context.Context, t *testing.T) {
	for _, node := range s.c.nodes {
		if out, err := s.fromNode(ctx, node, node); err == nil {
			t.Fatalf("%s gets %q without kube-proxy and without the edge: the test proves nothing", node, out)
		}
	}
}

// nodePorts has processes and pods of each node get the page of the pod of their node by a node port.
func (s *farServices) nodePorts(ctx context.Context, t *testing.T) {
	for _, node := range s.c.nodes {
		addr := s.internalIP(ctx, t, node)
		for _, url := range []string{
			"http://" + addr + ":" + nodePort + "/",
			"http://" + s.pods[node] + ":" + podPort + "/cgi-bin/get?" + addr + "," + nodePort + ",/",
		} {
			eventually(ctx, t, time.Minute, "the node port of "+node, func(ctx context.Context) error {
				status, body, err := s.c.getInside(ctx, node, url)
				if err := is200(status, body, err); err != nil {
					return err
				}
				if !strings.Contains(body, "web-"+node) {
					return fmt.Errorf("%s: got %q", url, body)
				}
				return nil
			})
		}
	}
}

// internalIP returns the first address of a node.
func (s *farServices) internalIP(ctx context.Context, t *testing.T, node string) string {
	t.Helper()
	addrs, err := s.c.kubectl(ctx, "get", "node", node, "-o",
		`jsonpath={.status.addresses[?(@.type=="InternalIP")].address}`)
	if err != nil {
		t.Fatal(err)
	}
	addr, _, _ := strings.Cut(addrs, " ")
	return addr
}

// refused asserts that connections to a Service without endpoints, and to a port that no Service has, are refused at
// once.
func (s *farServices) refused(ctx context.Context, t *testing.T) {
	for _, addr := range []string{emptyClusterIP + ":80", clusterIPOf["edge1"] + ":81"} {
		began := time.Now()
		conn, err := dialInside(ctx, "/run/netns/te2e-edge1", "tcp", addr)
		if err == nil {
			conn.Close()
		}
		if took := time.Since(began); !errors.Is(err, syscall.ECONNREFUSED) || took > 10*time.Second {
			t.Errorf("%s: %v after %v", addr, err, took)
		}
	}
}

// withoutEdge kills the edge of edge1, and lets that of edge2 end: the pods of their own nodes still answer.
func (s *farServices) withoutEdge(ctx context.Context, t *testing.T) {
	s.tn.edges["edge1"].kill(t)
	s.tn.edges["edge2"].terminate(ctx, t)
	for _, node := range s.c.nodes {
		if err := s.gets(ctx, node, node, "web-"+node); err != nil {
			t.Error(err)
		}
	}
	for _, node := range s.c.nodes {
		s.tn.startEdge(ctx, t, node)
	}
	s.all(ctx, t, time.Minute)
}

// besideProxy gives edge1 a table of kube-proxy's name. Its next edge does not write rules, and says why, until the
// table is gone.
func (s *farServices) besideProxy(ctx context.Context, t *testing.T) {
	nft := func(args ...string) string {
		t.Helper()
		out, err := s.c.inside(ctx, "edge1", append([]string{s.c.home + "/nodebin/nft"}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("nft %v: %v: %s", args, err, out)
		}
		return string(out)
	}
	const ours = "tunnel-services"
	s.tn.edges["edge1"].kill(t)
	nft("delete", "table", "inet", ours)
	nft("add", "table", "inet", "kube-proxy")
	s.tn.startEdge(ctx, t, "edge1")
	eventually(ctx, t, time.Minute, "the edge to say that kube-proxy's rules are there", func(context.Context) error {
		log, err := os.ReadFile(s.tn.edges["edge1"].log.Name())
		if err == nil && !bytes.Contains(log, []byte("takes the place of kube-proxy")) {
			err = errors.New("its log does not say so")
		}
		return err
	})
	if out := nft("list", "tables"); strings.Contains(out, ours+"\n") {
		t.Errorf("the edge writes rules beside kube-proxy: %s", out)
	}
	nft("delete", "table", "inet", "kube-proxy")
	s.all(ctx, t, time.Minute)
}

// start starts a pod on each node.
func (s *farServices) start(ctx context.Context, t *testing.T) {
	for _, node := range s.c.nodes {
		name := "web-" + node
		err := s.c.apply(ctx, "cni.yaml", "NAME", name, "NODE", node, "PORTS", "", "app: cni", "app: cni, of: "+node)
		if err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, again, name+" to have an address", func(ctx context.Context) error {
			out, err := s.c.kubectl(ctx, "get", "pod", name, "-o", "jsonpath={.status.podIP}")
			if err == nil && out == "" {
				err = fmt.Errorf("it has none")
			}
			s.pods[node] = out
			return err
		})
		eventually(ctx, t, again, name+" to answer", func(ctx context.Context) error {
			return is200(s.c.getInside(ctx, node, "http://"+s.pods[node]+":"+podPort+"/"))
		})
	}
}

// fromNode has a process of a node get the page of a Service.
func (s *farServices) fromNode(ctx context.Context, node, service string) (string, error) {
	status, body, err := s.c.getInside(ctx, node, "http://"+clusterIPOf[service]+"/")
	return strings.TrimSpace(body), is200(status, body, err)
}

// fromPod has the pod of a node get it.
func (s *farServices) fromPod(ctx context.Context, node, service string) (string, error) {
	status, body, err := s.c.getInside(ctx, node,
		"http://"+s.pods[node]+":"+podPort+"/cgi-bin/get?"+clusterIPOf[service]+",80,/")
	if err := is200(status, body, err); err != nil {
		return "", err
	}
	for line := range strings.Lines(body) {
		if strings.HasPrefix(line, "web-") {
			return strings.TrimSpace(line), nil
		}
	}
	return "", fmt.Errorf("the pod got %q", body)
}

// gets has a process and the pod of a node get the page of a Service, several times each.
func (s *farServices) gets(ctx context.Context, node, service, pod string) error {
	for range 10 {
		out, err := s.fromNode(ctx, node, service)
		if err := want(err, out, pod); err != nil {
			return fmt.Errorf("from %s to the Service of %s: %w", node, service, err)
		}
		out, err = s.fromPod(ctx, node, service)
		if err := want(err, out, pod); err != nil {
			return fmt.Errorf("from the pod of %s to the Service of %s: %w", node, service, err)
		}
	}
	return nil
}

// foreign adds tables of another program to the nodes, in the hooks and at the priorities of ours.
func (s *farServices) foreign(ctx context.Context, t *testing.T) {
	const table = `table inet foreign {
		chain in { type nat hook prerouting priority -110; tcp dport 4 redirect to :5; }
		chain out { type nat hook output priority -110; tcp dport 4 redirect to :5; }
		chain seen { type filter hook prerouting priority mangle; counter accept; }
	}`
	for _, node := range s.c.nodes {
		nft := s.c.inside(ctx, node, s.c.home+"/nodebin/nft", "-f", "-")
		nft.Stdin = strings.NewReader(table)
		if out, err := nft.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
}

// listed asserts that nft can list the rules of the nodes, with those of the edge and of the other program.
func (s *farServices) listed(ctx context.Context, t *testing.T) {
	for _, node := range s.c.nodes {
		for _, format := range []string{"--stateless", "--json"} {
			out, err := s.c.inside(ctx, node, s.c.home+"/nodebin/nft", format, "list", "ruleset").CombinedOutput()
			for _, table := range []string{"tunnel-services", "foreign"} {
				if err != nil || !bytes.Contains(out, []byte(table)) {
					t.Fatalf("on %s, nft %s lists no table %s: %v: %.2000s", node, format, table, err, out)
				}
			}
		}
	}
}

// outOfReach asserts that kube-proxy alone leads to the pods of the own node only.
func (s *farServices) outOfReach(ctx context.Context, t *testing.T) {
	for _, node := range s.c.nodes {
		eventually(ctx, t, time.Minute, "kube-proxy of "+node, func(ctx context.Context) error {
			return s.gets(ctx, node, node, "web-"+node)
		})
	}
	if out, err := s.fromNode(ctx, "edge1", "edge2"); err == nil {
		t.Fatalf("edge1 gets %q from edge2 without the tunnel: the test proves nothing", out)
	}
	if out, err := s.fromPod(ctx, "edge1", "edge2"); err == nil {
		t.Fatalf("the pod of edge1 gets %q from edge2 without the tunnel: the test proves nothing", out)
	}
}

// relayed starts cloud and edges. Each Service then answers on each node; the pod of the own node comes first.
func (s *farServices) relayed(ctx context.Context, t *testing.T) {
	tn := s.tn
	tn.write(t, "cloud.toml", tn.read(t, "cloud.toml")+strings.NewReplacer("SERVICE", cloudService, "DOOR", bulkDoor,
		"POD", s.pods["edge2"]+":"+bulkPort).Replace(`
[mode.cloud.services]
[mode.cloud.services.mirror]
ports = "20000-20999"
service = "SERVICE"

[mode.cloud.tcp]
"DOOR" = "edge2/POD"
[mode.cloud.tcpallow]
"DOOR" = ["10.0.0.0/8"]
`))
	for _, node := range s.c.nodes {
		text := strings.Replace(tn.read(t, node+".toml"), "[mode.edge]\n", // the front door needs the permission
			"[mode.edge]\nallow = [\"self:*\", \""+s.pods[node]+":"+bulkPort+"\"]\n", 1)
		tn.write(t, node+".toml", text+
			"\n[mode.edge.services]\nmode = \""+s.mode+"\"\nstate = \""+tn.dir+"/"+node+".services.db\"\n"+
			map[string]string{"edge1": "dns = true\n"}[node])
	}
	tn.startCloud(ctx, t)
	for _, node := range s.c.nodes {
		tn.startEdge(ctx, t, node)
	}
	s.all(ctx, t, time.Minute)
	s.caller(ctx, t)
}

// all waits until every Service answers on every node.
func (s *farServices) all(ctx context.Context, t *testing.T, within time.Duration) {
	t.Helper()
	for _, node := range s.c.nodes {
		for service, pod := range map[string]string{"edge1": "web-edge1", "edge2": "web-edge2", "both": "web-" + node} {
			took := eventually(ctx, t, within, "Services on "+node, func(ctx context.Context) error {
				return s.gets(ctx, node, service, pod)
			})
			t.Logf("%s reaches the Service of %s after %v", node, service, took.Round(time.Millisecond))
		}
	}
}

// caller logs whom a pod sees as its caller.
func (s *farServices) caller(ctx context.Context, t *testing.T) {
	t.Helper()
	status, body, err := s.c.getInside(ctx, "edge1", "http://"+clusterIPOf["edge2"]+"/cgi-bin/from")
	if err := is200(status, body, err); err != nil {
		t.Fatal(err)
	}
	t.Logf("the pod of edge2 sees %s as its caller", strings.TrimSpace(body))
}

// fromCluster has a caller in the cluster name Services to the egress front door, by HTTP CONNECT and by SOCKS5.
func (s *farServices) fromCluster(ctx context.Context, t *testing.T) {
	toDoor := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", s.tn.dir+"/egress-connect.sock")
	}
	connect := func(ctx context.Context, _, addr string) (net.Conn, error) {
		conn, err := toDoor(ctx, "", "")
		if err != nil {
			return nil, err
		}
		r := bufio.NewReader(conn)
		fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", addr)
		answer, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
		if err == nil && answer.StatusCode != http.StatusOK {
			err = fmt.Errorf("CONNECT %s: %s %s", addr, answer.Status, answer.Header.Get("X-Error"))
		}
		if err != nil {
			conn.Close()
			return nil, err
		}
		return conn, nil // the pod speaks after the client, so r has no bytes of its
	}
	socks := http.ProxyURL(&url.URL{Scheme: "socks5h", Host: "egress.invalid:1080"}) // toDoor does not use the address
	for protocol, transport := range map[string]*http.Transport{
		"HTTP CONNECT": {DisableKeepAlives: true, DialContext: connect},
		"SOCKS5":       {DisableKeepAlives: true, DialContext: toDoor, Proxy: socks},
	} {
		s.byName(t, protocol, &http.Client{Transport: transport})
	}
}

// byName has a client of the egress front door name Services.
func (s *farServices) byName(t *testing.T, protocol string, client *http.Client) {
	t.Helper()
	for service, pods := range map[string][]string{
		"edge1": {"web-edge1"}, "edge2": {"web-edge2"}, "both": {"web-edge1", "web-edge2"},
	} {
		name := "of-" + service + ".default.svc"
		for _, host := range []string{clusterIPOf[service], name, name + ".cluster.local"} {
			missing := slices.Clone(pods)
			for range 100 {
				r, err := client.Get("http://" + host + "/")
				if err != nil {
					t.Fatalf("%s over %s: %v", host, protocol, err)
				}
				page, err := io.ReadAll(r.Body)
				r.Body.Close()
				pod := strings.TrimSpace(string(page))
				if err != nil || !slices.Contains(pods, pod) {
					t.Fatalf("%s over %s: %q, %v", host, protocol, page, err)
				}
				if missing = slices.DeleteFunc(missing, func(p string) bool { return p == pod }); len(missing) == 0 {
					break
				}
			}
			if len(missing) > 0 {
				t.Errorf("%s over %s: no connection of 100 led to %v", host, protocol, missing)
			}
		}
	}
	if r, err := client.Get("http://none.default.svc/"); err == nil {
		r.Body.Close()
		t.Errorf("a Service that there is not, over %s: %s", protocol, r.Status)
	}
}

// datagrams has a process of edge1 ask a UDP server of edge2, by a Service that lists an address of the bridge of
// edge2's pods.
func (s *farServices) datagrams(ctx context.Context, t *testing.T) {
	pod, err := netip.ParseAddr(s.pods["edge2"])
	if err != nil {
		t.Fatal(err)
	}
	network, err := pod.Prefix(24)
	if err != nil {
		t.Fatal(err)
	}
	bridge := network.Addr().Next()
	server, err := openInside("/run/netns/te2e-edge2", func() (*net.UDPConn, error) {
		return net.ListenUDP("udp4", &net.UDPAddr{Port: 5353})
	})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	t.Cleanup(func() { server.Close(); <-ended })
	go func() {
		defer close(ended)
		for b := make([]byte, 1<<16); ; {
			n, from, err := server.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			server.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	if err := s.c.apply(ctx, "datagrams.yaml", "ADDRESS", bridge.String()); err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{1, 1400, 60_000} {
		eventually(ctx, t, time.Minute, fmt.Sprintf("%d bytes by UDP", size), func(ctx context.Context) error {
			return s.asks(ctx, bytes.Repeat([]byte("x"), size))
		})
	}
}

// asks sends a datagram from edge1 to the Service, and wants it back.
func (s *farServices) asks(ctx context.Context, question []byte) error {
	c, err := dialInside(ctx, "/run/netns/te2e-edge1", "udp", "10.96.20.4:53")
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err = c.Write(question); err != nil {
		return err
	}
	answer := make([]byte, 1<<16)
	n, err := c.Read(answer)
	if err == nil && !bytes.Equal(answer[:n], question) {
		err = fmt.Errorf("%d bytes come back as %d", len(question), n)
	}
	return err
}

// nodeAway kills the edge of edge2. Its Service is refused on edge1, and the Service of both goes on.
func (s *farServices) nodeAway(ctx context.Context, t *testing.T) {
	s.tn.edges["edge2"].kill(t)
	eventually(ctx, t, time.Minute, "the Service of edge2 to be refused", func(ctx context.Context) error {
		out, err := s.fromNode(ctx, "edge1", "edge2")
		if err == nil {
			return fmt.Errorf("it answers %q", out)
		}
		return nil
	})
	if err := s.gets(ctx, "edge1", "both", "web-edge1"); err != nil {
		t.Fatal(err)
	}
	s.tn.startEdge(ctx, t, "edge2")
	s.all(ctx, t, time.Minute)
}

// offline restarts the edge of edge1 without a cloud: it serves from its file what the node can serve.
func (s *farServices) offline(ctx context.Context, t *testing.T) {
	s.tn.cloud.kill(t)
	s.tn.edges["edge1"].kill(t)
	s.tn.startEdge(ctx, t, "edge1")
	took := eventually(ctx, t, 10*time.Second, "the Service of both on edge1", func(ctx context.Context) error {
		return s.gets(ctx, "edge1", "both", "web-edge1")
	})
	t.Logf("without the cloud, the Service of both answers %v after the edge starts", took.Round(time.Millisecond))
	if out, err := s.fromNode(ctx, "edge1", "edge2"); err == nil {
		t.Fatalf("edge1 gets %q from edge2 without the cloud", out)
	}
	if s.mode == "full" {
		s.withoutDefaultRoute(ctx, t)
	}
}

// withoutDefaultRoute takes the default route of edge1 away for a while, as when its uplink loses its address.
func (s *farServices) withoutDefaultRoute(ctx context.Context, t *testing.T) {
	route := func(args ...string) string {
		out, err := run(command(ctx, "ip", append([]string{"-n", "te2e-edge1", "route"}, args...)...), nil)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	by := strings.Fields(route("show", "default"))
	if len(by) == 0 {
		t.Fatal("edge1 has no default route")
	}
	route("del", "default")
	defer func() { route(append([]string{"add"}, by...)...) }()
	if err := s.gets(ctx, "edge1", "both", "web-edge1"); err != nil {
		t.Errorf("without a default route: %v", err)
	}
}

// names takes the cluster's DNS away. The pod of edge1 resolves the names of Services nevertheless, since its edge
// answers them, soon after offline has started that edge. The steps after it need no names.
func (s *farServices) names(ctx context.Context, t *testing.T) {
	lookup := func(ctx context.Context, node, name, addr string) error {
		status, body, err := s.c.getInside(ctx, node, "http://"+s.pods[node]+":"+podPort+"/cgi-bin/lookup?"+name)
		if err = is200(status, body, err); err == nil && !strings.Contains(body, addr) {
			err = fmt.Errorf("the pod of %s gets for %s: %s", node, name, body)
		}
		return err
	}
	const far = "of-edge2.default.svc.cluster.local"
	if err := lookup(ctx, "edge2", far, clusterIPOf["edge2"]); err != nil {
		t.Fatalf("from the cluster's DNS: %v", err)
	}
	// Its endpoints stay: in mode full, the edges have not heard of a change since the cloud is away.
	if err := s.c.script(ctx, "services.sh", "stop"); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, time.Minute, "the cluster's DNS to be away", func(ctx context.Context) error {
		if lookup(ctx, "edge2", far, clusterIPOf["edge2"]) == nil {
			return fmt.Errorf("the pod of edge2 resolves %s", far)
		}
		return nil
	})
	for service, addr := range clusterIPOf {
		name := "of-" + service + ".default.svc.cluster.local"
		eventually(ctx, t, 10*time.Second, "edge1 to answer for "+name, func(ctx context.Context) error {
			return lookup(ctx, "edge1", name, addr)
		})
	}
}

// back starts the cloud again.
func (s *farServices) back(ctx context.Context, t *testing.T) {
	s.tn.startCloud(ctx, t)
	s.all(ctx, t, time.Minute)
}

// remove takes the pod of edge2 away and starts it again: the nodes follow.
func (s *farServices) remove(ctx context.Context, t *testing.T) {
	if _, err := s.c.kubectl(ctx, "delete", "pod", "web-edge2", "--grace-period=1"); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, time.Minute, "the Service of both on edge2 to lead to edge1", func(ctx context.Context) error {
		out, err := s.fromNode(ctx, "edge2", "both")
		return want(err, out, "web-edge1")
	})
	s.start(ctx, t)
	s.all(ctx, t, time.Minute)
}
