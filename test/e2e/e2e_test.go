//go:build e2e

package e2e

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	transport "tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/test/rig"
)

// gone is how long a user may wait at a node that is not there before kubectl says so: 15 s, until the cloud has
// noticed it, and what a busy machine takes.
const gone = 25 * time.Second

// TestTunnel is one test because there is one cluster. The order matters: first without the tunnel,
// then each way in which kube-apiserver can be set up, with each way in which CoreDNS has the
// nodes' names, and for each first that everything works and then that outages are seen and healed.
// At last the names alone, with more clouds than one, and with clouds that are cut off from each
// other.
func TestTunnel(t *testing.T) {
	ctx := contextOf(t)
	program := binary(ctx, t)
	c := upCluster(ctx, t)
	prepare(ctx, t, c)
	volume := c.mounted(ctx, t, "edge2")
	tn := newTunnel(ctx, t, c, program, volume)

	c.step(t, "without the tunnel", func(t *testing.T) {
		nowhere(ctx, t, c, "no route to host") // by the node's own address
		if err := c.script(ctx, "dns.sh", "file", filepath.Join(volume, "hosts")); err != nil {
			t.Fatal(err)
		}
		nowhere(ctx, t, c, "lookup edge1 on 127.0.77.53:53: server misbehaving") // the ConfigMap is not there yet
		fails(ctx, t, c, "edge1", verbs, gone)
		fails(ctx, t, c, "edge2", []verb{top}, gone)
	})
	for _, mode := range []struct {
		apiserver string
		dns       []string
		named     time.Duration // until a name is seen
	}{
		// kube-apiserver has just been restarted: the kubelet that mounts the ConfigMap may watch it again only after 10 s.
		// Then 2 s for the ConfigMap, 3 s for the kubelet (test/cluster/lib/node-init.sh), 0.5 s for CoreDNS.
		{"kubelet-ca", []string{"file", filepath.Join(volume, "hosts")}, 30 * time.Second},
		{"no-kubelet-ca", []string{"forward", cloudIP + ":5353"}, 10 * time.Second},
	} {
		t.Run(mode.apiserver, func(t *testing.T) {
			if err := c.script(ctx, "apiserver.sh", mode.apiserver); err != nil {
				t.Fatal(err)
			}
			if err := c.script(ctx, "dns.sh", mode.dns...); err != nil {
				t.Fatal(err)
			}
			ok := c.step(t, "up", func(t *testing.T) { tn.up(ctx, t, mode.named) })
			t.Cleanup(func() { tn.down(t) })
			if !ok {
				return
			}
			works(ctx, t, tn, append(verbs[:len(verbs):len(verbs)], top))
			c.step(t, "front door", func(t *testing.T) { frontDoor(ctx, t, tn) })
			outages(ctx, t, tn)
		})
	}
	t.Run("two replicas", func(t *testing.T) { twoReplicas(ctx, t, tn) })
	t.Run("identities", func(t *testing.T) { identities(ctx, t, tn) })
	t.Run("dns", func(t *testing.T) { dnsWorks(ctx, t, c, program, volume) })
	t.Run("replicas apart", func(t *testing.T) { replicasApart(ctx, t, c, program) })
}

// contextOf is the context of a test, done by Ctrl-C and some time before the test's own is up.
func contextOf(t *testing.T) context.Context {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	t.Cleanup(stop)
	if deadline, ok := t.Deadline(); ok { // leave time to clean up: a test binary that runs into its timeout does not
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline.Add(-time.Minute))
		t.Cleanup(cancel)
	}
	return ctx
}

// nowhere asserts why there is no way to a node.
func nowhere(ctx context.Context, t *testing.T, c *cluster, why string) {
	t.Helper()
	_, err := c.kubectl(ctx, "logs", pod("edge1"), "-c", "web")
	if err == nil || !strings.Contains(err.Error(), why) {
		t.Errorf("without the tunnel nothing may lead to the node; logs said %v, not %s", err, why)
	}
}

// prepare puts pods on the nodes, starts metrics-server, and says what the cloud may do.
func prepare(ctx context.Context, t *testing.T, c *cluster) {
	t.Helper()
	preparePods(ctx, t, c)
	if err := c.script(ctx, "metrics-server.sh"); err != nil {
		t.Fatal(err)
	}
}

// preparePods puts pods on the nodes and waits until they are ready. It says what the cloud may do: in Kubernetes what
// deployment/ says.
func preparePods(ctx context.Context, t *testing.T, c *cluster) {
	t.Helper()
	_, err := c.kubectl(ctx, "apply", "-f", "../../deployment/cloud-rbac.yaml")
	if err := errors.Join(err, c.apply(ctx, "rbac.yaml"), c.apply(ctx, "coredns.yaml", "NODE", "edge2")); err != nil {
		t.Fatal(err)
	}
	for _, n := range c.nodes {
		if err := c.apply(ctx, "pods.yaml", "NODE", n); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=60s", "pod", "--all",
		"--all-namespaces"); err != nil {
		t.Fatal(err)
	}
}

// works checks each verb for all that a user would notice, that the bytes went through the tunnel,
// and that nothing stays behind.
func works(ctx context.Context, t *testing.T, tn *tunnel, verbs []verb) {
	if err := errors.Join(tryLogs(ctx, tn.c, "edge1"), tryLogs(ctx, tn.c, "edge2")); err != nil {
		t.Fatal(err)
	}
	open, carried := tn.descriptors(t), tn.carried(ctx, t)
	for _, v := range verbs {
		tn.c.step(t, v.name, func(t *testing.T) {
			ctx, cancel := within(ctx, time.Minute)
			defer cancel()
			v.works(ctx, t, tn.c)
		})
	}
	const copied = 2 * 100 << 20
	if got := tn.carried(ctx, t) - carried; got < copied {
		t.Errorf("the cloud carried %.0f bytes while %d went to and from the pods: they took another way", got, copied)
	}
	// kube-apiserver and metrics-server keep a few connections to each node for the next request, and
	// so does each session; nothing else may stay.
	const pooled = 12
	eventually(ctx, t, 10*time.Second, "conns to end on both sides", func(context.Context) error {
		metrics, err := rig.Metrics(net.JoinHostPort(cloudIP, cloudLog))
		if err != nil {
			return err
		}
		all := int(metrics["tunnel_data_connections"]) // of both sessions
		for name, now := range tn.descriptors(t) {
			data := all
			if name != tn.cloud.name {
				data = min(all, transport.DefaultConnections-1)
			}
			if now > open[name]+pooled+data {
				return fmt.Errorf("%s has %d descriptors open, it was %d; %d data connections may wait", name,
					now, open[name], data)
			}
		}
		return nil
	})
}

// fails asserts that every verb says no by itself, in time, for a node that cannot be reached. All run at once.
func fails(ctx context.Context, t *testing.T, c *cluster, node string, verbs []verb, limit time.Duration) {
	t.Helper()
	var wg sync.WaitGroup
	for _, v := range verbs {
		wg.Go(func() {
			ctx, cancel := within(ctx, limit)
			defer cancel()
			began := time.Now()
			err := v.try(ctx, c, node)
			if _, ok := exitCode(err); !ok {
				t.Errorf("%s: want an exit code other than 0 within %v; after %v: %v", v.name, limit, time.Since(began), err)
				return
			}
			t.Logf("%-12s says so after %v", v.name, time.Since(began).Round(time.Millisecond))
		})
	}
	wg.Wait()
}

// succeeds asserts that every verb works for a node. All run at once.
func succeeds(ctx context.Context, t *testing.T, c *cluster, node string) {
	t.Helper()
	var wg sync.WaitGroup
	for _, v := range verbs {
		wg.Go(func() {
			ctx, cancel := within(ctx, gone)
			defer cancel()
			if err := v.try(ctx, c, node); err != nil {
				t.Errorf("%s on %s: %v", v.name, node, err)
			}
		})
	}
	wg.Wait()
}

// outages takes edge1 away in every way, and the cloud, each in the middle of traffic.
func outages(ctx context.Context, t *testing.T, tn *tunnel) {
	c := tn.c
	signalEdge := func(t *testing.T, s syscall.Signal) {
		pid, err := tn.edges["edge1"].inside()
		if err == nil {
			err = syscall.Kill(pid, s)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, o := range []struct {
		name       string
		top        bool // whether top has been working long enough to be seen failing
		stop, back func(t *testing.T)
	}{
		{"edge killed", true, func(t *testing.T) { tn.edges["edge1"].kill(t) },
			func(t *testing.T) { tn.startEdge(ctx, t, "edge1") }},
		{"edge stopped", false, func(t *testing.T) { signalEdge(t, syscall.SIGSTOP) },
			func(t *testing.T) { signalEdge(t, syscall.SIGCONT) }},
		{"uplink cut", false, func(t *testing.T) { nodeScript(ctx, t, c, "cut") },
			func(t *testing.T) { nodeScript(ctx, t, c, "join") }},
	} {
		c.step(t, o.name, func(t *testing.T) {
			flight := takeOff(ctx, t, c, "edge1")
			o.stop(t)
			began := time.Now()
			var wg sync.WaitGroup
			wg.Go(func() { fails(ctx, t, c, "edge1", verbs, gone) })
			wg.Go(func() { flight.lands(t, began.Add(gone)) })
			wg.Go(func() {
				if err := tryExec(ctx, c, "edge2"); err != nil {
					t.Errorf("the other node suffers: %v", err)
				}
			})
			if o.top {
				wg.Go(func() { ages(ctx, t, c, "edge1", began.Add(gone)) })
			}
			wg.Wait()
			o.back(t)
			recovers(ctx, t, c, "edge1")
		})
	}
	c.step(t, "top node works again", func(t *testing.T) { topWorks(ctx, t, c) })
	c.step(t, "cloud killed", func(t *testing.T) {
		flight := takeOff(ctx, t, c, "edge2")
		tn.cloud.kill(t)
		began := time.Now()
		fails(ctx, t, c, "edge1", verbs, gone)
		flight.lands(t, began.Add(gone))
		tn.startCloud(ctx, t)
		for _, n := range c.nodes {
			recovers(ctx, t, c, n)
		}
	})
}

// ages asserts that top stops knowing a node, once what it knows is from before the outage.
func ages(ctx context.Context, t *testing.T, c *cluster, node string, deadline time.Time) {
	for {
		err := tryTop(ctx, c, node)
		if _, ok := exitCode(err); ok {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("top still answers for a node that is gone: %v", err)
			return
		}
		time.Sleep(time.Second)
	}
}

func nodeScript(ctx context.Context, t *testing.T, c *cluster, verb string) {
	t.Helper()
	if err := c.script(ctx, "node.sh", verb, "edge1"); err != nil {
		t.Fatal(err)
	}
}

// recovers waits for the first success after an outage and then wants everything to work.
func recovers(ctx context.Context, t *testing.T, c *cluster, node string) {
	t.Helper()
	took := eventually(ctx, t, backAgain, "logs of "+node+" to work again",
		func(ctx context.Context) error { return tryLogs(ctx, c, node) })
	t.Logf("%s is back after %v", node, took.Round(time.Millisecond))
	succeeds(ctx, t, c, node)
}

// A flight is the traffic that an outage interrupts.
type flight struct {
	streams []*process // logs -f, exec, attach
	forward *process   // port-forward
}

// takeOff starts every verb that lasts, and waits until each has brought something.
func takeOff(ctx context.Context, t *testing.T, c *cluster, node string) *flight {
	t.Helper()
	begin := func(match func(string) bool, stdin string, args ...string) *process {
		cmd := c.command(ctx, "kubectl", args...)
		// Not by websocket: there kube-apiserver (1.34) tells an idle port-forward of a lost kubelet only
		// after its kubectl's next ping, up to 10 s later (tunnelingWebsocketUpgraderConn.Close waits for
		// the lock that Read holds).
		cmd.Env = append(cmd.Env, spdy...)
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { in.Close() })
		p, err := start(cmd)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.kill)
		ctx, cancel := within(ctx, gone)
		defer cancel()
		_, err = io.WriteString(in, stdin)
		if err := errors.Join(err, p.until(ctx, match)); err != nil {
			t.Fatalf("before the outage: %v", err)
		}
		return p
	}
	return &flight{
		streams: []*process{
			begin(ticks(1), "", "logs", "-f", "--tail=1", pod(node), "-c", "web"),
			begin(func(out string) bool { return out == "hello\n" }, "hello\n", "exec", "-i", pod(node), "-c",
				"web", "--", "cat"),
			begin(ticks(1), "", "attach", pod(node), "-c", "web"),
		},
		forward: begin(forwarding.MatchString, "", "port-forward", "--address=127.0.0.1", "pod/"+pod(node), ":8080"),
	}
}

// lands asserts that all of it ends by itself before the deadline. Only port-forward has to say so
// by its exit code: where a kubelet dies without any tunnel, logs -f, exec and attach end with code
// 0 as well (kube-apiserver ends its answer as if the log were at its end, and kubectl takes a lost
// error stream for success: client-go, tools/remotecommand/errorstream.go).
func (f *flight) lands(t *testing.T, deadline time.Time) {
	t.Helper()
	for _, p := range f.streams {
		p.endsWithin(t, time.Until(deadline))
	}
	err := f.forward.endsWithin(t, time.Until(deadline))
	if _, ok := exitCode(err); !ok {
		t.Errorf("%s was interrupted, and it said %v", f.forward.name, err)
	}
}

// frontDoor looks at the cloud's port as a stranger on the control plane's network would.
func frontDoor(ctx context.Context, t *testing.T, tn *tunnel) {
	c := tn.c
	ask := func(sni, host, certificate string) (*http.Response, string, error) {
		ctx, cancel := within(ctx, 10*time.Second)
		defer cancel()
		conf := &tls.Config{InsecureSkipVerify: true, ServerName: sni} // the address in the URL is never sent as SNI
		if certificate != "" {
			pair, err := tls.LoadX509KeyPair(c.path("pki/"+certificate+".crt"), c.path("pki/"+certificate+".key"))
			if err != nil {
				t.Fatal(err)
			}
			conf.Certificates = []tls.Certificate{pair}
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+cloudIP+":"+kubelet+"/healthz", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		resp, err := (&http.Transport{TLSClientConfig: conf, DisableKeepAlives: true}).RoundTrip(req)
		if err != nil {
			return nil, "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return resp, string(b), err
	}
	const apiserver = "apiserver-kubelet"

	// By name: the kubelet itself answers, nobody in between holds a key.
	for _, n := range c.nodes {
		resp, body, err := ask(n, n, apiserver)
		if err != nil || body != "ok" {
			t.Errorf("%s by its name: %q, %v", n, body, err)
			continue
		}
		own, err := tls.LoadX509KeyPair(c.path("pki/kubelet-"+n+"-serving.crt"), c.path("pki/kubelet-"+n+"-serving.key"))
		if err != nil {
			t.Fatal(err)
		}
		if !resp.TLS.PeerCertificates[0].Equal(own.Leaf) {
			t.Errorf("%s by its name showed the certificate of %v, not the kubelet's", n, resp.TLS.PeerCertificates[0].Subject)
		}
	}

	// Without a name the cloud stands in for the kubelet, so it has to look whom it lets in.
	for _, n := range c.nodes {
		if _, body, err := ask("", n+":"+kubelet, apiserver); err != nil || body != "ok" {
			t.Errorf("kube-apiserver without SNI at %s: %q, %v", n, body, err)
		}
	}
	impostor := c.command(ctx, "pki", "leaf", "-dir", c.path("pki"), "-ca", "front", "-name", "tunnel-impostor", "-cn",
		"kube-apiserver-kubelet-client", "-client")
	if _, err := run(impostor, nil); err != nil {
		t.Fatal(err)
	}
	for who, certificate := range map[string]string{
		"without a certificate":                      "",
		"the administrator, who may not call":        "admin",
		"kube-apiserver's name from another CA":      "tunnel-impostor",
		"a kubelet, whose certificate is of this CA": "kubelet-edge2",
	} {
		resp, body, err := ask("", "edge1:"+kubelet, certificate)
		if err == nil && resp.StatusCode != http.StatusUnauthorized && resp.StatusCode != http.StatusForbidden {
			t.Errorf("%s was let in without SNI: status %d, %q", who, resp.StatusCode, body)
		}
	}
	resp, body, err := ask("", "nosuch:"+kubelet, apiserver)
	if err != nil || resp.StatusCode != http.StatusBadGateway || strings.TrimSpace(body) == "" {
		t.Errorf("a node that nobody knows: want status 502 with a reason, got %+v, %q, %v", resp, body, err)
	}
}

// descriptors returns how many each of our processes has open.
func (tn *tunnel) descriptors(t *testing.T) map[string]int {
	t.Helper()
	count := make(map[string]int)
	for _, d := range tn.daemons() {
		pid := d.cmd.Process.Pid
		if d != tn.cloud {
			var err error
			if pid, err = d.inside(); err != nil {
				t.Fatal(err)
			}
		}
		open, err := os.ReadDir(filepath.Join("/proc", fmt.Sprint(pid), "fd"))
		if err != nil {
			t.Fatal(err)
		}
		count[d.name] = len(open)
	}
	return count
}
