package https

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
)

// podKubelet is a kubelet that has some pods and answers with its name.
type podKubelet struct {
	name   string
	denies atomic.Int64 // status for each probe of a pod; 0: none
	probes atomic.Int64
	slow   chan struct{} // a probe waits until it is closed; nil: no wait

	mu   sync.Mutex // guards the following
	pods map[string]bool
}

func newPodKubelet(name string, pods ...string) *podKubelet {
	k := &podKubelet{name: name}
	k.put(pods...)
	return k
}

// put sets the pods that k has.
func (k *podKubelet) put(pods ...string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods = make(map[string]bool)
	for _, p := range pods {
		k.pods[p] = true
	}
}

func (k *podKubelet) has(pod string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.pods[pod]
}

// ServeHTTP answers like getPortForward and proxyStream of a kubelet.
func (k *podKubelet) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ref, ok := podOf(r.URL.Path)
	if r.Method == http.MethodGet && strings.HasPrefix(r.URL.Path, "/portForward/") &&
		r.Header.Get("Upgrade") == "" && r.Header.Get("X-Test") == "" {
		k.probes.Add(1)
		if k.slow != nil {
			select {
			case <-k.slow:
			case <-r.Context().Done():
			}
		}
		if s := k.denies.Load(); s != 0 {
			http.Error(w, "denied", int(s))
			return
		}
		if k.has(ref.String()) {
			http.Error(w, "Upgrade request required", http.StatusBadRequest)
			return
		}
	}
	if ok && !k.has(ref.String()) {
		http.Error(w, "pod does not exist", http.StatusNotFound)
		return
	}
	io.WriteString(w, k.name)
}

// podRig returns a rig with the nodes edge1, which has the pod ns/one, and edge2, which has ns/two.
func podRig(t *testing.T, configure func(*rig, *Config)) (r *rig, k1, k2 *podKubelet) {
	t.Helper()
	k1, k2 = newPodKubelet("edge1", "ns/one"), newPodKubelet("edge2", "ns/two")
	r = newRig(t, k1, configure)
	r.addKubelet("edge2", k2)
	return r.start(), k1, k2
}

// ask sends a request as kube-apiserver does and returns the response.
func ask(t testing.TB, c *http.Client, host, path string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequest("GET", "https://door"+path, nil)
	must(t, err)
	req.Host = host
	req.Header.Set("X-Test", "not a probe")
	res, err := c.Do(req)
	must(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	must(t, err)
	return res, string(b)
}

// Which node a request reaches, by SNI, Host and path. "away" is a node that is not connected;
// apiserver is a name or an address that kubectl used.
func TestWhichNode(t *testing.T) {
	const noSNI, ip = "127.0.0.1", "10.77.0.1:6443"
	for _, way := range []struct {
		name      string
		configure func(*rig, *Config)
	}{
		{"kubelet certificate", func(_ *rig, c *Config) { c.Mode = Terminate }},
		{"edge", func(r *rig, c *Config) { c.Mode = Terminate; edgeTLS(r, c) }},
	} {
		t.Run(way.name, func(t *testing.T) {
			r, _, _ := podRig(t, way.configure)
			for _, test := range []struct {
				sni, host, path string
				status          int
				want            string
			}{
				// Host names a connected node.
				{noSNI, "edge1:10250", "/pods", 200, "edge1"},
				{noSNI, "EDGE2.", "/pods", 200, "edge2"},
				{noSNI, "edge2", "/exec/ns/one/c", 404, "does not exist"}, // Host wins over the path
				{"edge2", "edge2", "/pods", 200, "edge2"},
				{"away", "edge2", "/pods", 200, "edge2"},
				{"front.example", "edge2", "/pods", 200, "edge2"},
				{"edge1", "edge2", "/pods", 421, "opened for node edge1"},
				// Host does not: the SNI decides.
				{"edge1", ip, "/pods", 200, "edge1"},
				{"edge2", ip, "/exec/ns/two/c", 200, "edge2"},
				{"edge2", "[::1]:6443", "/pods", 200, "edge2"},
				{"edge2", "apiserver", "/pods", 200, "edge2"},
				{"edge2", "a_b", "/pods", 200, "edge2"},
				{"away", ip, "/pods", 502, "node away is not connected"},
				{"away", ip, "/exec/ns/one/c", 502, "node away is not connected"},
				{"away", "away", "/pods", 502, "node away is not connected"},
				{"away", "apiserver", "/pods", 502, "node away is not connected"},
				// Neither Host nor SNI does: the path decides.
				{noSNI, ip, "/portForward/ns/one", 200, "edge1"},
				{noSNI, ip, "/portForward/ns/two", 200, "edge2"},
				{noSNI, ip, "/portForward/ns/two/uid", 200, "edge2"},
				{noSNI, "apiserver:6443", "/exec/ns/two/c?command=sh", 200, "edge2"},
				{noSNI, "[::1]:6443", "/attach/ns/two/uid/c", 200, "edge2"},
				{noSNI, "a_b", "/run/ns/one/c", 200, "edge1"},
				{noSNI, ip, "/exec/ns/none/c", 502, "no connected node has pod ns/none"},
				{noSNI, "away", "/exec/ns/none/c", 502, "node away is not connected"},
				// None of them does.
				{noSNI, ip, "/pods", 502, "node 10.77.0.1 is not connected"},
				{noSNI, ip, "/exec/ns", 502, "is not connected"},
				{noSNI, ip, "/exec/NS/one/c", 502, "is not connected"},
				{noSNI, ip, "/containerLogs/ns/one/c", 502, "is not connected"},
				{noSNI, "away", "/pods", 502, "node away is not connected"},
				{noSNI, "[::1]:6443", "/pods", 400, "must name a node"},
			} {
				cfg := r.caller(test.sni)
				cfg.InsecureSkipVerify = true // the door's certificate is for edge1
				res, body := ask(t, r.client(cfg, false), test.host, test.path)
				if res.StatusCode != test.status || !strings.Contains(body, test.want) {
					t.Errorf("SNI %s, Host %s, %s: %d %q, want %d %q",
						test.sni, test.host, test.path, res.StatusCode, body, test.status, test.want)
				}
				if code := res.Header.Get(RefusalHeader); (code == "no-such-node") != (test.status == 502) {
					t.Errorf("SNI %s, Host %s, %s: %s %q", test.sni, test.host, test.path, RefusalHeader, code)
				}
			}
		})
	}
}

// A search asks the pod's last node first, and asks all nodes again when the pod has moved.
func TestPodMoves(t *testing.T) {
	r, k1, k2 := podRig(t, nil)
	c := r.client(r.caller("127.0.0.1"), false)
	want := func(node string) {
		t.Helper()
		if res, body := ask(t, c, "10.77.0.1", "/portForward/ns/two"); res.StatusCode != 200 || body != node {
			t.Errorf("answer %d %q, want that of %s", res.StatusCode, body, node)
		}
	}
	want("edge2")
	want("edge2") // TestPodBurst checks that edge1 is not asked
	k1.put("ns/two")
	k2.put()
	want("edge1")
	r.hold("edge1", false)
	res, body := ask(t, c, "10.77.0.1", "/portForward/ns/two")
	if res.StatusCode != 502 || !strings.Contains(body, "1 asked") {
		t.Errorf("answer %d %q for a pod on a node that has gone", res.StatusCode, body)
	}
}

// Many simultaneous requests for one pod reach its node. TestPodBurst counts the probes.
func TestPodBurstThroughDoor(t *testing.T) {
	k1, k2 := newPodKubelet("edge1"), newPodKubelet("edge2", "ns/two")
	k2.slow = make(chan struct{})
	r := newRig(t, k1, nil)
	r.addKubelet("edge2", k2)
	r.start()
	c := r.client(r.caller("127.0.0.1"), true)
	const burst = 50
	answers := make(chan string, burst)
	for range burst {
		go func() {
			req, err := http.NewRequest("POST", "https://10.77.0.1/exec/ns/two/c", nil)
			if err != nil {
				answers <- err.Error()
				return
			}
			res, err := c.Do(req)
			if err != nil {
				answers <- err.Error()
				return
			}
			defer res.Body.Close()
			b, _ := io.ReadAll(res.Body)
			answers <- string(b)
		}()
	}
	testkit.Eventually(t, "edge2 is asked", func() bool { return k2.probes.Load() == 1 })
	close(k2.slow)
	for range burst {
		if a := <-answers; a != "edge2" {
			t.Errorf("answer %q", a)
		}
	}
}

// A kubelet that denies the probe does not count as having the pod.
func TestPodDenied(t *testing.T) {
	for _, status := range []int64{401, 403, 405} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			r, k1, _ := podRig(t, nil)
			k1.denies.Store(status)
			c := r.client(r.caller("127.0.0.1"), false)
			if res, body := ask(t, c, "10.77.0.1", "/portForward/ns/two"); res.StatusCode != 200 || body != "edge2" {
				t.Errorf("answer %d %q", res.StatusCode, body)
			}
			for range 3 {
				res, body := ask(t, c, "10.77.0.1", "/portForward/ns/one")
				wantStatus(t, res, body, 502, "2 asked, 1 denied the request")
			}
			if n := strings.Count(r.logs.String(), "level=WARN msg=\"a kubelet refuses to say"); n != 1 {
				t.Errorf("%d warnings, want 1", n)
			}
		})
	}
}

// A caller that may not call cannot make us ask kubelets.
func TestPodAskedByDeniedCaller(t *testing.T) {
	r, k1, k2 := podRig(t, nil)
	cfg := r.caller("127.0.0.1")
	cfg.Certificates = []tls.Certificate{*r.clientCA.issue("mallory")}
	res, body := ask(t, r.client(cfg, false), "10.77.0.1", "/portForward/ns/two")
	wantStatus(t, res, body, 403, "callers")
	if n := k1.probes.Load() + k2.probes.Load() + int64(len(r.tunnel.requests())); n != 0 {
		t.Errorf("%d things were asked for a stranger", n)
	}
}

func TestHints(t *testing.T) {
	var f finder
	for i := range 2 * maxHints {
		f.remember(podRef{0, "ns", fmt.Sprint(i)}, "edge1")
		f.remember(podRef{0, "ns", fmt.Sprint(i)}, "edge2")
	}
	if len(f.hints) != maxHints {
		t.Errorf("%d hints are kept, want %d", len(f.hints), maxHints)
	}
	if h := f.hint(podRef{0, "ns", fmt.Sprint(2*maxHints - 1)}); h.node != "edge2" {
		t.Errorf("the last hint is %v", h)
	}
}

// A connection was terminated because its node was away. When the node is back, the connection is
// closed, and requests in flight on it end normally.
func TestNodeComesBack(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("h2=%v", h2), func(t *testing.T) {
			release := make(chan struct{})
			h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/logs" {
					io.WriteString(w, "first ")
					http.NewResponseController(w).Flush()
					<-release
				}
				io.WriteString(w, "pong")
			})
			r := newRig(t, h, nil).start()
			r.hold("edge1", false)
			r.hold("edge2", true) // with edge1's kubelet
			r.door.cfg.Kubelet.CA = nil
			cfg := r.caller("edge1")
			cfg.InsecureSkipVerify = true // the certificate is the door's, later the kubelet's
			c := r.client(cfg, h2)

			// While it is away, a request to another node is in flight.
			req, err := http.NewRequest("GET", "https://door/logs", nil)
			must(t, err)
			req.Host = "edge2"
			logs, err := c.Do(req)
			must(t, err)
			defer logs.Body.Close()
			res, body := ask(t, c, "10.77.0.1", "/stats")
			wantStatus(t, res, body, 502, "node edge1 is not connected")
			if !h2 && !res.Close {
				t.Error("the connection is to be used again")
			}
			r.hold("edge1", true)
			by := func() string {
				res, body := ask(t, c, "10.77.0.1", "/stats")
				wantStatus(t, res, body, 200, "pong")
				return res.TLS.PeerCertificates[0].Subject.CommonName
			}
			testkit.Eventually(t, "the caller passes through", // with HTTP/2, the GOAWAY may still be under way
				func() bool { return by() == "system:node:edge1" })
			if cn := by(); cn != "system:node:edge1" {
				t.Errorf("after edge1 has come back the caller speaks with %q", cn)
			}
			close(release)
			if b, err := io.ReadAll(logs.Body); err != nil || string(b) != "first pong" {
				t.Errorf("the answer in flight came as %q, %v", b, err)
			}
		})
	}
}

// A connection that is in a pool when its node comes back serves one more response.
func TestTerminatedWhileAway(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("h2=%v", h2), func(t *testing.T) {
			r := newRig(t, nil, nil).start()
			r.hold("edge1", false)
			r.hold("edge2", true)
			r.door.cfg.Kubelet.CA = nil
			cfg := r.caller("edge1")
			cfg.InsecureSkipVerify = true
			c := r.client(cfg, h2)
			by := func(host string) string {
				t.Helper()
				res, body := ask(t, c, host, "/")
				wantStatus(t, res, body, 200, "pong")
				return res.TLS.PeerCertificates[0].Subject.CommonName
			}
			open := by
			if !h2 {
				k := r.keep(cfg)
				open = func(host string) string {
					t.Helper()
					res, body := k.ask(host, "/")
					wantStatus(t, res, body, 200, "pong")
					if back := host == "10.77.0.1"; res.Close != back {
						t.Errorf("the answer for %s ends the connection: %v", host, res.Close)
					}
					return k.ConnectionState().PeerCertificates[0].Subject.CommonName
				}
			}
			for range 2 {
				if cn := open("edge2"); cn != "front" {
					t.Errorf("met %q while edge1 is away", cn)
				}
			}
			r.hold("edge1", true)
			if cn := open("10.77.0.1"); cn != "front" {
				t.Errorf("met %q on the connection that is open", cn)
			}
			testkit.Eventually(t, "the caller passes through", // with HTTP/2, the GOAWAY may still be under way
				func() bool { return by("10.77.0.1") == "system:node:edge1" })
		})
	}
}

// A caller that can only be passed through is told what is wrong while its node is away, and
// nothing else.
func TestPassthroughOnlyCallerWhileAway(t *testing.T) {
	r := newRig(t, nil, nil).start()
	r.hold("edge1", false)
	r.hold("edge2", true)
	as := func(sni string) *http.Client {
		cfg := r.caller(sni)
		cfg.Certificates = []tls.Certificate{*r.clientCA.issue("admin")}
		cfg.InsecureSkipVerify = true
		return r.client(cfg, false)
	}
	for _, host := range []string{"edge1", "10.77.0.1", "edge2"} {
		res, body := ask(t, as("edge1"), host, "/exec/ns/one/c")
		wantStatus(t, res, body, 502, "node edge1 is not connected")
		if !res.Close || res.Header.Get(RefusalHeader) != "no-such-node" {
			t.Errorf("close %v, header %v", res.Close, res.Header)
		}
	}
	res, body := ask(t, as("127.0.0.1"), "edge1", "/")
	wantStatus(t, res, body, 403, "callers")
	if log := r.logs.String(); !strings.Contains(log, "node edge1, which its SNI names, is not connected") {
		t.Error("the log does not say why")
	}
	if n := len(r.tunnel.requests()); n != 0 {
		t.Errorf("%d conns were dialled", n)
	}

	// It learns that the node is back, and its next connection passes through.
	c := r.raw(func() *tls.Config {
		cfg := r.caller("edge1")
		cfg.Certificates = []tls.Certificate{*r.clientCA.issue("admin")}
		return cfg
	}())
	r.hold("edge1", true)
	_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: edge1\r\n\r\n")
	must(t, err)
	b, err := io.ReadAll(c)
	must(t, err)
	if !strings.HasPrefix(string(b), "HTTP/1.1 503") || !strings.Contains(string(b), "open another") {
		t.Errorf("answer %q", b)
	}
	res, body = ask(t, as("edge1"), "edge1", "/")
	wantStatus(t, res, body, 200, "pong")

	// With tls = "terminate" nothing is passed through.
	r = newRig(t, nil, func(_ *rig, c *Config) { c.Mode = Terminate }).start()
	r.hold("edge1", false)
	res, body = ask(t, as("edge1"), "edge1", "/")
	wantStatus(t, res, body, 403, "callers")
}
