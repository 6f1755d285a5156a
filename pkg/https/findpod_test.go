package https

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// thief is the kubelet of a node that claims every pod.
func thief(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("X-Test") == "" {
		http.Error(w, "Upgrade request required", http.StatusBadRequest)
		return
	}
	io.WriteString(w, "stolen")
}

// behind delays each dial to node by d.
func (f *fakeTunnel) behind(node tunnel.NodeName, d time.Duration) {
	f.set(func(f *fakeTunnel) {
		f.hook = func(ctx context.Context, q tunnel.Request) error {
			if q.Node != node {
				return nil
			}
			select {
			case <-time.After(d):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
}

// execs asks n times for an exec in ns/two, which edge2 has, each time on a new connection. It
// returns how many requests went to the thief.
func execs(t *testing.T, r *rig, n, status int, words ...string) (stolen int) {
	t.Helper()
	for range n {
		res, body := ask(t, r.client(r.caller("127.0.0.1"), false), "10.77.0.1", "/exec/ns/two/c?command=sh")
		if body == "stolen" {
			stolen++
			continue
		}
		wantStatus(t, res, body, status, words...)
	}
	return stolen
}

// A node that claims another node's pod does not get its exec.
func TestContestedPod(t *testing.T) {
	r, _, _ := podRig(t, nil)
	r.addKubelet("evil", http.HandlerFunc(thief))
	r.tunnel.behind("edge2", 20*time.Millisecond) // the thief answers first
	if n := execs(t, r, 20, 409, "edge2 and evil both claim pod ns/two"); n > 0 {
		t.Errorf("%d of 20 execs have gone to the thief", n)
	}
	if n := r.door.cfg.Counters.ContestedPods.Load(); n != 20 {
		t.Errorf("%d contested pods are counted, want 20", n)
	}
	if !strings.Contains(r.logs.String(), `level=WARN msg="two nodes claim one pod`) {
		t.Error("the log does not say so")
	}
	// After the thief has been revoked, its claim has no effect.
	r.hold("evil", false)
	if n := execs(t, r, 1, 200, "edge2"); n > 0 {
		t.Error("the thief is remembered")
	}
}

// kubelets simulates kubelets without a network. They answer at once or never.
type kubelets struct {
	*fakeTunnel // which nodes are connected
	have        map[tunnel.NodeName]string
	silent      map[tunnel.NodeName]bool
}

func (k *kubelets) ask(ctx context.Context, n tunnel.NodeName, ref podRef, _ string) error {
	if k.silent[n] {
		<-ctx.Done()
		return ctx.Err()
	}
	if k.have[n] != ref.String() {
		return errNoPod
	}
	return nil
}

// Requests that share a search do not share its answer: each adds which node it has named.
func TestSharedSearch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &kubelets{
			fakeTunnel: &fakeTunnel{nodes: map[tunnel.NodeName]bool{"edge1": true}},
			silent:     map[tunnel.NodeName]bool{"edge1": true},
		}
		f, err := New(Config{}, k, k, slog.New(slog.DiscardHandler))
		must(t, err)
		p := &proxy{f: f, probeNode: k.ask}
		answers := make(chan *answer)
		for range 2 { // the second comes while the first waits for edge1
			go func() {
				_, a := p.findPod(t.Context(), podRef{0, "ns", "one"}, "caller")
				answers <- a
			}()
		}
		one, other := <-answers, <-answers
		if one == nil || other == nil || one.status != http.StatusGatewayTimeout || *one != *other {
			t.Fatalf("%+v and %+v, want two equal timeouts", one, other)
		}
		if one == other {
			t.Error("two requests have one answer")
		}
	})
}

// Simultaneous requests for one pod share one search. It asks each kubelet once. Soon after the pod was found, it asks
// only the kubelet that had it. If that one does not answer within silentProbeTimeout, it asks all kubelets once more.
func TestPodBurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &fakeTunnel{nodes: map[tunnel.NodeName]bool{"edge1": true, "edge2": true}}
		f, err := New(Config{}, k, k, slog.New(slog.DiscardHandler))
		must(t, err)
		var probes1, probes2 atomic.Int64
		var slow atomic.Pointer[chan struct{}] // edge2 answers when it is closed
		p := &proxy{f: f, probeNode: func(ctx context.Context, n tunnel.NodeName, _ podRef, _ string) error {
			if n == "edge1" {
				probes1.Add(1)
				return errNoPod
			}
			probes2.Add(1)
			select {
			case <-*slow.Load():
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}}
		for _, step := range []struct {
			name         string
			delay        time.Duration // of the answer of edge2
			edge1, edge2 int64         // how many probes each has had since the start of the test
		}{
			{"first", 0, 1, 1},
			{"soon after", 0, 1, 2},
			{"while edge2 is slow", silentProbeTimeout + time.Millisecond, 2, 4},
		} {
			const burst = 50
			release, found := make(chan struct{}), make(chan tunnel.NodeName, burst)
			slow.Store(&release)
			for range burst {
				go func() {
					n, _ := p.findPod(t.Context(), podRef{0, "ns", "two"}, "caller")
					found <- n
				}()
			}
			synctest.Wait() // all requests wait for the answer of edge2
			if len(found) != 0 {
				t.Fatalf("%s: %d requests have a node before edge2 has answered", step.name, len(found))
			}
			time.Sleep(step.delay)
			synctest.Wait()
			close(release)
			for range burst {
				if n := <-found; n != "edge2" {
					t.Errorf("%s: a request goes to %q", step.name, n)
				}
			}
			if a, b := probes1.Load(), probes2.Load(); a != step.edge1 || b != step.edge2 {
				t.Errorf("%s: edge1 was asked %d times and edge2 %d times, want %d and %d",
					step.name, a, b, step.edge1, step.edge2)
			}
		}
	})
}

// A thief does not get a pod because its owner is silent. A node that stays silent does not keep
// pods from others for ever.
func TestSilentNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &kubelets{
			fakeTunnel: &fakeTunnel{nodes: map[tunnel.NodeName]bool{"evil": true, "good": true, "other": true}},
			have:       map[tunnel.NodeName]string{"good": "ns/one"}, silent: make(map[tunnel.NodeName]bool),
		}
		logs := new(testkit.Log)
		f, err := New(Config{}, k, k, slog.New(slog.NewTextHandler(logs, nil)))
		must(t, err)
		p := &proxy{f: f, probeNode: k.ask}
		want := func(why, pod string, node tunnel.NodeName, status int, within time.Duration) {
			t.Helper()
			start := time.Now()
			n, a := p.findPod(t.Context(), podRef{0, "ns", pod}, "caller")
			got := 0
			if a != nil {
				got = a.status
			}
			if n != node || got != status {
				t.Errorf("%s: %q, %d; want %q, %d", why, n, got, node, status)
			}
			if took := time.Since(start); took > within {
				t.Errorf("%s: it took %v, want %v at most", why, took, within)
			}
		}
		want("all answer", "one", "good", 0, 0)

		k.have["evil"], k.silent["good"] = "ns/three", true
		want("the silent one may be the owner", "three", "", 503, probeTimeout)
		if s := logs.String(); !strings.Contains(s, "level=WARN") || !strings.Contains(s, "pod=ns/three nodes=[good]") {
			t.Errorf("the log does not name the silent node: %s", s)
		}
		want("and is waited for less the next time", "three", "", 503, silentProbeTimeout)
		k.silent["good"] = false
		want("it has answered: the pod is not its own", "three", "evil", 0, 0)

		k.have["evil"], k.silent["good"] = "ns/one", true
		time.Sleep(hintTTL)
		want("the owner is silent", "one", "", 503, probeTimeout)
		k.silent["good"] = false
		want("both claim it", "one", "", 409, 0)
		k.have["evil"] = ""
		want("one claims it", "one", "good", 0, 0)

		k.silent["other"] = true
		time.Sleep(hintTTL)
		want("found before, beside a silent node", "one", "good", 0, probeTimeout)
		k.have["good"] = "ns/four"
		want("new, beside a silent node", "four", "", 503, silentProbeTimeout)
		time.Sleep(maxSilence)
		want("new, beside a node that has been silent for long", "four", "good", 0, probeTimeout)
		time.Sleep(hintTTL)
		want("and is waited for less the next time", "four", "good", 0, silentProbeTimeout)
		time.Sleep(silenceKept + time.Second)
		k.have["good"] = "ns/five"
		want("nobody has asked the node for long, so it may have been well since", "five", "", 503, probeTimeout)
		k.have["good"] = "ns/four"
		k.set(func(f *fakeTunnel) { f.nodes["other"] = false })
		want("new, without it", "four", "good", 0, 0)
	})
}

// Nodes that were not asked in time are not reported as silent.
func TestNodesNotAskedInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &kubelets{
			fakeTunnel: &fakeTunnel{nodes: map[tunnel.NodeName]bool{"0good": true}}, // asked first
			have:       map[tunnel.NodeName]string{"0good": "ns/one"}, silent: make(map[tunnel.NodeName]bool),
		}
		for i := range 8 * maxProbes {
			n := tunnel.NodeName(fmt.Sprintf("slow%03d", i))
			k.nodes[n], k.silent[n] = true, true
		}
		logs := new(testkit.Log)
		f, err := New(Config{}, k, k, slog.New(slog.NewTextHandler(logs, nil)))
		must(t, err)
		p := &proxy{f: f, probeNode: k.ask}
		want := func(pod, text string) {
			t.Helper()
			_, a := p.findPod(t.Context(), podRef{0, "ns", pod}, "caller")
			if a == nil || !strings.Contains(a.text, text) {
				t.Errorf("%s: %+v, want %q", pod, a, text)
			}
		}
		want("none", "(129 asked, 128 did not answer, 384 were not asked in time)")
		for n, want := range map[tunnel.NodeName]time.Duration{
			"slow000": silentProbeTimeout, // has had its time
			"slow100": probeTimeout,       // was asked for the last second of the search
		} {
			if got := p.finder.timeoutFor(n); got != want {
				t.Errorf("%s has %v for the next answer, want %v", n, got, want)
			}
		}
		want("one", "node 0good claims pod ns/one, but node slow000 has not answered")
		for n := range k.silent { // make them silent for long
			p.finder.recordAnswer(n, false)
		}
		time.Sleep(maxSilence)
		want("one", "was not asked in time and may have it: try again")
		line := "nodes that were not asked in time may have a pod that another node claims: the request is refused" +
			`" module=https pod=ns/one nodes="[slow`
		if s := logs.String(); !strings.Contains(s, line) {
			t.Errorf("the log does not name them: %s", s)
		}
	})
}

// bound is a Kubernetes that knows the nodes of pods.
type bound struct {
	mu    sync.Mutex // guards the following
	nodes map[string]tunnel.NodeName
	err   error
}

func (b *bound) NodeOf(_ context.Context, namespace, name string) (tunnel.NodeName, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.nodes[namespace+"/"+name], b.err
}

// If Kubernetes can be asked, no kubelet is asked. A name that a caller uses for kube-apiserver
// does not lead to a node of that name.
func TestPodByKubernetes(t *testing.T) {
	b := &bound{nodes: map[string]tunnel.NodeName{"ns/two": "edge2", "ns/away": "edge9"}}
	r, k1, k2 := podRig(t, func(_ *rig, c *Config) { c.Mode, c.Pods = Terminate, b })
	r.addKubelet("evil", http.HandlerFunc(thief))
	if n := execs(t, r, 20, 200, "edge2"); n > 0 {
		t.Errorf("%d of 20 execs have gone to the thief", n)
	}
	for _, test := range []struct {
		sni, host, path string
		status          int
		want            string
	}{
		{"127.0.0.1", "apiserver.example:6443", "/exec/ns/two/c", 200, "edge2"}, // the name that kubectl used
		{"127.0.0.1", "edge2", "/exec/ns/two/c", 200, "edge2"},
		{"127.0.0.1", "edge9", "/exec/ns/two/c", 200, "edge2"}, // edge9 is not connected
		{"127.0.0.1", "edge1", "/exec/ns/two/c", 421, "names node edge1, and Kubernetes has pod ns/two on node edge2"},
		{"127.0.0.1", "evil", "/exec/ns/two/c", 421, "names node evil"},
		{"away", "evil", "/exec/ns/two/c", 421, "names node evil"},
		{"edge2", "10.77.0.1", "/exec/ns/two/c", 200, "edge2"}, // kube-apiserver named the node
		{"127.0.0.1", "edge1", "/pods", 200, "edge1"},          // not about a pod
		{"127.0.0.1", "10.77.0.1", "/exec/ns/none/c", 502, "Kubernetes has no pod ns/none"},
		{"127.0.0.1", "10.77.0.1", "/exec/ns/away/c", 502, "node edge9, which has pod ns/away, is not connected"},
	} {
		cfg := r.caller(test.sni)
		cfg.InsecureSkipVerify = true // the door's certificate is for edge1
		res, body := ask(t, r.client(cfg, false), test.host, test.path)
		if res.StatusCode != test.status || !strings.Contains(body, test.want) {
			t.Errorf("SNI %s, Host %s, %s: %d %q, want %d %q",
				test.sni, test.host, test.path, res.StatusCode, body, test.status, test.want)
		}
	}
	if n := k1.probes.Load() + k2.probes.Load(); n != 0 {
		t.Errorf("%d kubelets were asked", n)
	}
	b.mu.Lock()
	b.err = errors.New("no answer from the API server")
	b.mu.Unlock()
	execs(t, r, 1, 503, "no answer from the API server")
}
