//go:build e2e && conformance

package e2e

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/test/conformance"
	"tunnel.example/tunnel/test/rig"
)

// page has a table for each suite and version. A version that passes replaces its table.
const page = "../../docs/conformance.md"

// TestConformance runs the e2e tests of Kubernetes that have kube-apiserver open connections, for each version: once
// with direct reach, and once through each front door. A test that passes with direct reach must pass through the door.
// The environment variable CONFORMANCE lists the versions to run, separated by blanks; without it all versions run.
func TestConformance(t *testing.T) {
	ctx := contextOf(t)
	program := binary(ctx, t)
	of := conformance.FrontDoors()
	eachVersion(ctx, t, of, []string{"edge1", "edge2"}, func(t *testing.T, s *suite, run *conformance.Run) {
		direct := s.control(ctx, t, run, "KUBEPROXY=1")
		if t.Failed() {
			return // without a control nothing can be compared
		}
		t.Run("nat", func(t *testing.T) {
			c := s.up(ctx, t, run, "KUBEPROXY=1")
			volume := c.mounted(ctx, t, "edge2")
			for _, d := range of.Doors {
				t.Run(d.Key, func(t *testing.T) {
					door := newDoor(ctx, t, c, program, volume, d.Key)
					received := s.receivedAsWebSocket(ctx, t, c)
					s.through(ctx, t, c, run, d, direct)
					door.used(ctx, t)
					s.webSockets(ctx, t, c, received)
				})
			}
		})
	})
}

// TestConformanceServices runs the e2e tests of Services, for each version: once with kube-proxy and direct reach, and
// once with edges in mode full on nodes behind NAT. These are in one LAN, since a test dials the node ports of other
// nodes; the pods of the nodes do not reach each other. Each node is in a zone of its own. Each endpoint of a Service
// has the same chance to get a connection, as with kube-proxy: some tests want an answer from each endpoint.
func TestConformanceServices(t *testing.T) {
	ctx := contextOf(t)
	program := binary(ctx, t)
	of := conformance.Services()
	eachVersion(ctx, t, of, []string{"edge1", "edge2", "edge3"}, func(t *testing.T, s *suite, run *conformance.Run) {
		direct := s.control(ctx, t, run, "KUBEPROXY=nftables")
		if t.Failed() {
			return
		}
		full := of.Doors[0]
		t.Run(full.Key, func(t *testing.T) {
			c := s.up(ctx, t, run, "KUBEPROXY=none", "ONELAN=1")
			door := &openDoor{key: full.Key}
			door.egress(ctx, t, c, program, "GRPC", "egress-grpc.sock", func(tn *tunnel) {
				tn.write(t, "cloud.toml", tn.read(t, "cloud.toml")+"\n[mode.cloud.services]\n")
				for _, n := range c.nodes {
					tn.write(t, n+".toml", tn.read(t, n+".toml")+fmt.Sprintf(
						"\n[mode.edge.services]\nmode = \"full\"\nspread = true\ndns = true\nstate = %q\n", tn.dir+"/"+n+".services.db"))
				}
			})
			door.opened(ctx, t, c)
			edges := &farServices{c: c, tn: door.tunnel}
			before := edges.ways(ctx, t)["cloud"]
			s.through(ctx, t, c, run, full, direct)
			relayed := edges.ways(ctx, t)["cloud"] - before
			t.Logf("%d connections from edge1 to Services of other nodes went through the cloud", relayed)
			if relayed < 100 {
				t.Error("the tests took another way")
			}
		})
	})
}

// eachVersion calls f for each version that CONFORMANCE names, and writes the table of a version that has passed whole.
func eachVersion(ctx context.Context, t *testing.T, of conformance.Suite, nodes []string,
	f func(*testing.T, *suite, *conformance.Run)) {
	t.Helper()
	chosen := strings.Fields(os.Getenv("CONFORMANCE"))
	for _, v := range conformance.Versions() {
		if len(chosen) > 0 && !slices.Contains(chosen, v) {
			continue
		}
		run := conformance.Run{Version: "v" + v, Results: make(map[string][]conformance.Result)}
		passed := t.Run(v, func(t *testing.T) {
			s := &suite{Suite: of, version: v, home: filepath.Join(clusterHome(t), "kubernetes-"+v), nodes: nodes}
			s.knowsAllTests(ctx, t)
			f(t, s, &run)
			s.addLast(t, run)
		})
		t.Logf("\n%s", of.Table(run))
		ran := run.Version != "v"+v                               // a cluster has told its version
		if passed && ran && len(run.Results) == 1+len(of.Doors) { // each door has a report that passes
			replace(t, of, run)
		}
	}
}

// replace writes the table of a run into the page.
func replace(t *testing.T, of conformance.Suite, run conformance.Run) {
	t.Helper()
	old, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	text, err := of.Replace(string(old), run)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(page, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A suite is e2e.test of one version. Its fields are set once.
type suite struct {
	conformance.Suite
	version string   // such as 1.34
	home    string   // what test/conformance/build.sh has made
	nodes   []string // each is in a zone of its own
}

// up starts a cluster of this version, with pods on its nodes. metrics-server does not run: with egress, kube-apiserver
// could not reach it beside itself, and an aggregated API that is unavailable spoils what clients discover.
func (s *suite) up(ctx context.Context, t *testing.T, run *conformance.Run, settings ...string) *cluster {
	t.Helper()
	settings = append(settings, "IMAGES="+filepath.Join(s.home, "images"), "NODES="+strings.Join(s.nodes, " "))
	if _, err := os.Stat(filepath.Join(s.home, "bin", "kubeall")); err == nil {
		settings = append(settings, "KUBERNETES="+s.version) // else it is the version that test/cluster/build.sh makes
	}
	c := upCluster(ctx, t, settings...)
	c.nodes = s.nodes
	run.Version = s.serverVersion(ctx, t, c)
	for _, n := range c.nodes {
		if _, err := c.kubectl(ctx, "label", "node", n, "topology.kubernetes.io/zone=of-"+n); err != nil {
			t.Fatal(err)
		}
	}
	preparePods(ctx, t, c)
	return c
}

// control returns the results of the control. It runs in a cluster of its own, unless the flag -run leaves it out: then
// its last report counts.
func (s *suite) control(ctx context.Context, t *testing.T, run *conformance.Run,
	settings ...string) []conformance.Result {
	t.Helper()
	control := s.Control
	t.Run(control.Key, func(t *testing.T) {
		c := s.up(ctx, t, run, append(settings, "MODE=direct")...)
		run.Results[control.Key] = s.run(ctx, t, c, control)
		for _, r := range run.Results[control.Key] { // the page has only the names
			if r.State == conformance.Failed {
				t.Logf("failed in the control: %s: %s", r.Test, r.Message)
			}
		}
		for _, p := range s.Judge(control, run.Results[control.Key], run.Results[control.Key]) {
			t.Error(p)
		}
	})
	if run.Results[control.Key] == nil && !t.Failed() {
		run.Results[control.Key] = s.results(t, control)
	}
	return run.Results[control.Key]
}

// through runs the tests through a door that is open, and judges them.
func (s *suite) through(ctx context.Context, t *testing.T, c *cluster, run *conformance.Run, d conformance.Door,
	direct []conformance.Result) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() { // a later run must not count this report; the log names the failures, too
			os.Rename(s.report(t, d), s.report(t, d)+".failed")
		}
	})
	run.Results[d.Key] = s.run(ctx, t, c, d)
	for _, p := range s.Judge(d, direct, run.Results[d.Key]) {
		t.Error(p)
	}
}

// addLast looks for doors that did not run now, because the flag -run left them out. If the last report of such a door
// passes, addLast adds the results in it to run.
func (s *suite) addLast(t *testing.T, run conformance.Run) {
	t.Helper()
	for _, d := range s.Doors {
		if _, err := os.Stat(s.report(t, d)); run.Results[d.Key] != nil || err != nil {
			continue
		}
		if last := s.results(t, d); len(s.Judge(d, run.Results[s.Control.Key], last)) == 0 {
			run.Results[d.Key] = last
		}
	}
}

// knowsAllTests asserts that each pattern of the list matches a test of this version.
func (s *suite) knowsAllTests(ctx context.Context, t *testing.T) {
	t.Helper()
	out, err := run(command(ctx, filepath.Join(s.home, "bin", "e2e.test"), "--list-tests"), nil)
	if err != nil {
		t.Fatalf("listing the tests of %s (test/conformance/build.sh makes them): %v", s.version, err)
	}
	tests, err := conformance.ReadList(strings.NewReader(out))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range s.Missing(tests) {
		t.Errorf("no test of Kubernetes %s matches %s", s.version, p)
	}
	if t.Failed() {
		t.FailNow()
	}
}

// serverVersion asks kube-apiserver, so that the table cannot name another version than the one that ran.
func (s *suite) serverVersion(ctx context.Context, t *testing.T, c *cluster) string {
	t.Helper()
	running := c.kubernetes(ctx, t)
	if !strings.HasPrefix(running, "v"+s.version+".") {
		t.Fatalf("the cluster runs Kubernetes %s, not %s", running, s.version)
	}
	return running
}

// run runs the tests that a door has to pass, and returns what became of each. The tests' own output is in the
// cluster's logs.
func (s *suite) run(ctx context.Context, t *testing.T, c *cluster, door conformance.Door) []conformance.Result {
	t.Helper()
	const processes = "6" // most of a test's time is spent waiting
	report := s.report(t, door)
	if err := errors.Join(os.MkdirAll(filepath.Dir(report), 0o755), removed(report)); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(c.path("log/e2e-" + door.Key + ".log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := c.command(ctx, filepath.Join(s.home, "bin", "ginkgo"), "--procs="+processes, "--timeout=1h", "--no-color",
		"--output-dir="+filepath.Dir(report), "--junit-report="+filepath.Base(report),
		"--focus="+s.Focus(door),
		filepath.Join(s.home, "bin", "e2e.test"), "--", "--provider=skeleton", "--kubeconfig="+c.path("admin.kubeconfig"),
		"--kubectl-path="+filepath.Join(s.home, "bin", "kubectl"), "--node-os-arch="+runtime.GOARCH, "--disable-log-dump",
		"--num-nodes="+strconv.Itoa(len(s.nodes)))
	// Not by --kube-test-repo-list: test/e2e/common/util.go of Kubernetes chooses images before it reads its flags.
	cmd.Env = append(cmd.Environ(), "KUBE_TEST_REPO_LIST="+filepath.Join(s.home, "registries.yaml"))
	cmd.Stdout, cmd.Stderr = log, log
	began := time.Now()
	p, err := start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	<-p.done // its exit code says only that a test failed, which the report says too
	t.Logf("%s: %v; %v; output in %s, report in %s", door.Title, time.Since(began).Round(time.Second), p.err,
		log.Name(), report)
	return s.results(t, door)
}

// report is where ginkgo's report of a door is, also when the cluster is gone.
func (s *suite) report(t *testing.T, door conformance.Door) string {
	t.Helper()
	return filepath.Join(clusterHome(t), "conformance", s.version, door.Key+".xml")
}

// results reads the report of a door.
func (s *suite) results(t *testing.T, door conformance.Door) []conformance.Result {
	t.Helper()
	f, err := os.Open(s.report(t, door))
	if err != nil {
		t.Fatalf("no report of %s: %v", door.Title, err)
	}
	defer f.Close()
	results, err := conformance.ReadJUnit(f)
	if err != nil {
		t.Fatal(err)
	}
	return results
}

func removed(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// webSockets asserts that exec, attach and port-forward went to the kubelets as WebSocket, where
// kube-apiserver can pass it on: since 1.36 (ExtendWebSocketsToKubelet). kube-apiserver's counter
// starts at 0, as each door restarts it. It counts requests that might be WebSocket
// (pkg/registry/core/pod/rest/subresources.go), so the kubelets are asked too: they count what
// arrived as WebSocket (pkg/kubelet/server/server.go). before are their counts before the tests.
func (s *suite) webSockets(ctx context.Context, t *testing.T, c *cluster, before map[string]float64) {
	t.Helper()
	if s.version == "1.34" {
		return
	}
	metrics, err := c.kubectl(ctx, "get", "--raw", "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	now := s.receivedAsWebSocket(ctx, t, c)
	for _, verb := range []string{"exec", "attach", "portforward"} {
		passedOn := value(metrics, fmt.Sprintf(
			`apiserver_websocket_streaming_requests_total{proxy_type="proxied_to_kubelet",subresource=%q}`, verb))
		received := now[verb] - before[verb]
		t.Logf("%s: kube-apiserver passed %.0f on, kubelets received %.0f as WebSocket", verb, passedOn, received)
		if passedOn == 0 || received == 0 {
			t.Errorf("no %s went to a kubelet as WebSocket", verb)
		}
	}
}

// receivedAsWebSocket returns what the kubelets have received as WebSocket so far, by verb. It asks them without the
// tunnel, from within the nodes.
func (s *suite) receivedAsWebSocket(ctx context.Context, t *testing.T, c *cluster) map[string]float64 {
	t.Helper()
	received := make(map[string]float64)
	if s.version == "1.34" {
		return received
	}
	pair, err := tls.LoadX509KeyPair(c.path("pki/apiserver-kubelet.crt"), c.path("pki/apiserver-kubelet.key"))
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range c.nodes {
		tr := &http.Transport{DisableKeepAlives: true,
			TLSClientConfig: &tls.Config{RootCAs: c.pool(t), ServerName: n, Certificates: []tls.Certificate{pair}},
			DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
				return dialInside(ctx, "/run/netns/te2e-"+n, network, addr)
			}}
		status, page, err := get(ctx, tr, "https://127.0.0.1:"+kubelet+"/metrics")
		if err := is200(status, page, err); err != nil {
			t.Fatalf("the metrics of the kubelet of %s: %v", n, err)
		}
		for _, verb := range []string{"exec", "attach", "portforward"} {
			received[verb] += value(page, fmt.Sprintf(`kubelet_websocket_streaming_requests_total{subresource=%q}`, verb))
		}
	}
	return received
}

// value returns the value of a metric in a page of metrics, 0 where the page does not have it.
func value(page, metric string) float64 {
	for line := range strings.Lines(page) {
		if text, ok := strings.CutPrefix(line, metric+" "); ok {
			if v, err := strconv.ParseFloat(strings.TrimSpace(text), 64); err == nil {
				return v
			}
		}
	}
	return 0
}

// An openDoor is a tunnel through which kube-apiserver reaches the nodes.
type openDoor struct {
	key    string
	tunnel *tunnel
	before map[string]float64 // the cloud's metrics
}

// newDoor starts the tunnel of a door and restarts kube-apiserver so that it uses the door.
func newDoor(ctx context.Context, t *testing.T, c *cluster, program, volume, key string) *openDoor {
	t.Helper()
	d := &openDoor{key: key}
	switch key {
	case "names-passthrough":
		d.byNames(ctx, t, c, program, volume, "kubelet-ca")
	case "names-terminate":
		d.byNames(ctx, t, c, program, volume, "no-kubelet-ca")
	case "names-relayed":
		d.relayed(ctx, t, c, program, volume)
	case "egress-grpc":
		d.egress(ctx, t, c, program, "GRPC", "egress-grpc.sock", func(*tunnel) {})
	case "egress-connect":
		d.egress(ctx, t, c, program, "HTTPConnect", "egress-connect.sock", func(*tunnel) {})
	default:
		t.Fatalf("no door %s", key)
	}
	d.opened(ctx, t, c)
	return d
}

// opened waits until logs of all nodes come through the door. Then it begins to count the conns that the tests open.
func (d *openDoor) opened(ctx context.Context, t *testing.T, c *cluster) {
	t.Helper()
	for _, n := range c.nodes {
		succeeds(ctx, t, c, n)
	}
	if t.Failed() {
		t.FailNow()
	}
	before, err := rig.Metrics(net.JoinHostPort(cloudIP, cloudLog))
	if err != nil {
		t.Fatal(err)
	}
	d.before = before
}

// byNames has CoreDNS ask the cloud where the nodes are.
func (d *openDoor) byNames(ctx context.Context, t *testing.T, c *cluster, program, volume, verify string) {
	t.Helper()
	if err := errors.Join(c.script(ctx, "apiserver.sh", verify),
		c.script(ctx, "dns.sh", "forward", cloudIP+":5353")); err != nil {
		t.Fatal(err)
	}
	d.tunnel = newTunnel(ctx, t, c, program, volume)
	t.Cleanup(func() { d.tunnel.down(t) })
	d.tunnel.up(ctx, t, time.Second)
}

// relayed leads each node's name to the replica that does not hold the node.
func (d *openDoor) relayed(ctx context.Context, t *testing.T, c *cluster, program, volume string) {
	t.Helper()
	d.tunnel = newTunnel(ctx, t, c, program, volume)
	p := newPairOfClouds(ctx, t, d.tunnel)
	t.Cleanup(func() { d.tunnel.down(t) })
	for i := range p.run {
		p.start(ctx, t, i)
	}
	p.joined(ctx, t)
	d.tunnel.joinsAt(t, "edge1", p.grpc[0])
	d.tunnel.joinsAt(t, "edge2", p.grpc[1])
	for _, n := range c.nodes {
		d.tunnel.startEdge(ctx, t, n)
		eventually(ctx, t, backAgain, "edge "+n+" to be ready",
			func(ctx context.Context) error { return d.tunnel.edgeReady(ctx, n) })
	}
	hosts := fmt.Sprintf("%s edge1\n%s edge2\n", p.ip[1], p.ip[0])
	if err := errors.Join(os.WriteFile(c.path("dns/hosts"), []byte(hosts), 0o644),
		c.script(ctx, "apiserver.sh", "kubelet-ca"), c.script(ctx, "dns.sh", "kit")); err != nil {
		t.Fatal(err)
	}
}

// egress has kube-apiserver ask the cloud for everything in the cluster. configure may change the configuration.
func (d *openDoor) egress(ctx context.Context, t *testing.T, c *cluster, program, protocol, socket string,
	configure func(*tunnel)) {
	t.Helper()
	d.tunnel = newEgress(ctx, t, c, program)
	configure(d.tunnel)
	t.Cleanup(func() { d.tunnel.down(t) })
	d.tunnel.startCloud(ctx, t)
	for _, n := range c.nodes {
		d.tunnel.startEdge(ctx, t, n)
		eventually(ctx, t, backAgain, "edge "+n+" to be ready",
			func(ctx context.Context) error { return d.tunnel.edgeReady(ctx, n) })
	}
	eventually(ctx, t, 5*time.Second, "the cloud to be ready", d.tunnel.cloudReady)
	transport := "uds: {udsName: " + filepath.Join(d.tunnel.dir, socket) + "}"
	if err := c.script(ctx, "apiserver.sh", "kubelet-ca", d.tunnel.selector(t, protocol, transport),
		"--kubelet-preferred-address-types=InternalIP"); err != nil {
		t.Fatal(err)
	}
}

// used asserts that the tests' connections went through this door: a test may pass by another way only where there is
// none of them.
func (d *openDoor) used(ctx context.Context, t *testing.T) {
	t.Helper()
	const tests = 500 // one of them makes 1000 execs, and not every request opens a connection
	now, err := rig.Metrics(net.JoinHostPort(cloudIP, cloudLog))
	if err != nil {
		t.Fatal(err)
	}
	metric := "tunnel_conns_opened_total"
	if d.key == "names-relayed" {
		metric = "tunnel_relay_conns_opened_total"
	}
	opened := now[metric] - d.before[metric]
	t.Logf("%s: %.0f during the tests", metric, opened)
	if opened < tests {
		t.Errorf("%s: %s grew by %.0f only: the tests took another way", d.key, metric, opened)
	}
}
