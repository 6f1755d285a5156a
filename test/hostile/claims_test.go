package hostile

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/test/rig"
)

// A thief is an edge with a good token that claims what belongs to others: their pods,
// their addresses, their share of what any node may serve. The cloud is the real program.
// Edges are the test's own, so that a stolen one dials what it likes.

// thefts is how often each theft is tried.
const thefts = 20

// claims is a cloud, an honest edge (rig.Node) and a thief.
type claims struct {
	*rig.Pair
	t     *testing.T
	cloud *rig.Process
	stole func() int // how many conns the thief was given since the last call
}

const thief = "thief"

// newClaims starts a cloud with more lines of configuration. kube is its Kubernetes, if it
// is to have one. The honest node serves its own name to who asks, over TCP, and is a
// kubelet that has the pod default/payroll.
func newClaims(t *testing.T, kube *apiServer, lines string) *claims {
	t.Helper()
	if kube != nil {
		t.Setenv("KUBECONFIG", kube.config)
	}
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	c := &claims{t: t}
	c.Pair, err = rig.NewPair(rig.Config{
		Binary: program, Dir: t.TempDir(), CA: ca, Others: []string{thief},
		TCP:   map[string]string{"any": "*/127.0.0.1:9", "some": "edge*,gw/127.0.0.1:9"},
		HTTPS: "127.0.0.1:10250", Cloud: lines,
	})
	if err != nil {
		t.Fatal(err)
	}
	if c.cloud, err = c.StartCloud(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		alive := c.cloud.Alive()
		c.cloud.Kill()
		if log := c.CloudLog.String(); !alive || t.Failed() || strings.Contains(log, "panic") {
			t.Errorf("log of the cloud:\n%s", log)
		}
	})
	c.edge(rig.Node, has("/portForward/default/payroll"))
	stolen := c.edge(thief, func(string) bool { return true })
	seen := 0
	c.stole = func() int {
		before := seen
		seen = stolen()
		return seen - before
	}
	testkit.Within(t, readyWithin, "the cloud is ready and has both edges", func() error {
		if err := rig.Ready(c.CloudHealth()); err != nil {
			return err
		}
		if n := c.metric("tunnel_sessions"); n != 2 {
			return fmt.Errorf("%v sessions", n)
		}
		return nil
	})
	return c
}

func (c *claims) metric(name string) float64 {
	c.t.Helper()
	values, err := rig.Metrics(c.CloudHealth())
	if err != nil {
		c.t.Fatal(err)
	}
	return values[name]
}

func has(paths ...string) func(string) bool {
	return func(path string) bool { return slices.Contains(paths, path) }
}

// edge joins a node. Its kubelet has the pods whose paths say so, and serves the rest.
// serves returns how many requests and TCP connections the node has served, those about
// pods that it has not started apart.
func (c *claims) edge(node string, pods func(path string) bool) (serves func() int) {
	c.t.Helper()
	var mu sync.Mutex // guards the following
	served := 0
	count := func() {
		mu.Lock()
		defer mu.Unlock()
		served++
	}
	kubelet := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/portForward/") && r.Header.Get("Upgrade") == "" {
			if node != thief {
				time.Sleep(20 * time.Millisecond) // the thief's link is the fastest
			}
			if pods(r.URL.Path) {
				http.Error(w, "Upgrade request required", http.StatusBadRequest)
				return
			}
			http.Error(w, "pod does not exist", http.StatusNotFound)
			return
		}
		count()
		io.WriteString(w, node)
	}))
	leaf := auth.Leaf{CommonName: "system:node:" + node, DNSNames: []string{node}, Server: true}
	pair := testca.CA{CA: c.CA()}.Pair(c.t, leaf)
	kubelet.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}
	kubelet.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	kubelet.StartTLS()
	c.t.Cleanup(kubelet.Close)
	plain := serve(c.t, func(conn net.Conn) {
		count()
		io.WriteString(conn, node+"\n")
		io.Copy(io.Discard, conn)
	})

	ca, err := os.ReadFile(c.Path("ca.crt"))
	if err != nil {
		c.t.Fatal(err)
	}
	client, err := stream.NewClient(stream.ClientConfig{
		Address: c.GRPC(), Node: tunnel.NodeName(node), Software: "test", Log: slog.New(slog.DiscardHandler),
		Grace: time.Millisecond,
		TLS:   func() *tls.Config { return rig.EdgeTLS(ca) },
		Token: auth.StaticToken(c.Token(node)),
	}, opener{"https", kubelet.Listener.Addr().String()}, opener{"tcp", plain}, opener{"egress", plain})
	if err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		client.Run(ctx)
	}()
	c.t.Cleanup(func() {
		cancel()
		<-done
	})
	return func() int {
		mu.Lock()
		defer mu.Unlock()
		return served
	}
}

// opener is a module of an edge. Whatever it is asked to dial, it dials addr.
type opener struct{ category, addr string }

func (o opener) Name() string { return o.category }

func (o opener) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error {
			return in.Serve(func(ctx context.Context, _ tunnel.Request) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "tcp", o.addr)
			})
		},
	}
}

func (opener) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// ask sends a request to the HTTPS front door as a caller of some name, without SNI.
func (c *claims) ask(caller, host, path string) (status int, body string) {
	c.t.Helper()
	ca := testca.CA{CA: c.CA()}
	pair := ca.Pair(c.t, auth.Leaf{CommonName: caller, Client: true})
	transport := &http.Transport{TLSClientConfig: &tls.Config{
		RootCAs: ca.Pool(), Certificates: []tls.Certificate{pair},
	}}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequest(http.MethodGet, "https://"+c.HTTPSDoor()+path, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	req.Host = host
	res, err := transport.RoundTrip(req)
	if err != nil {
		c.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

// tally counts answers.
type tally map[string]int

// want fails unless the thief has got nothing and all thefts have had one answer.
func (c *claims) want(got tally, answer string) {
	c.t.Helper()
	if n := c.stole(); n != 0 {
		c.t.Errorf("the thief got %d of %d", n, thefts)
	}
	if !maps.Equal(got, tally{answer: thefts}) {
		c.t.Errorf("answers %v, want %d times %q", got, thefts, answer)
	}
}

// wantEgress dials what at the egress socket. It fails unless the thief has got nothing and each answer
// contains answer.
func (c *claims) wantEgress(socket, what, answer string) {
	c.t.Helper()
	got := make(tally)
	for range thefts {
		a := dialEgress(c.t, socket, what)
		if strings.Contains(a, answer) {
			a = answer
		}
		got[a]++
	}
	c.t.Log(what)
	c.want(got, answer)
}

const apiserver = "kube-apiserver-kubelet-client"

// TestHostileClaims is a thief that claims what others have.
func TestHostileClaims(t *testing.T) {
	t.Run("a pod, beside kubelets", func(t *testing.T) {
		c := newClaims(t, nil, "")
		got := make(tally)
		for range thefts {
			status, _ := c.ask(apiserver, "10.0.0.1:6443", "/exec/default/payroll/app?command=sh")
			got[fmt.Sprint(status)]++
		}
		c.want(got, "409")
		if n := c.metric("tunnel_contested_pods_total"); n != thefts {
			t.Errorf("%v contested pods are counted", n)
		}
	})
	t.Run("a pod, beside Kubernetes", func(t *testing.T) {
		k := newAPIServer(t)
		k.pods["default/payroll"] = rig.Node
		socket := filepath.Join(t.TempDir(), "s")
		c := newClaims(t, k,
			"[mode.cloud.join]\nanynode = true\n[mode.cloud.egress]\ngrpc = [\"unix://"+socket+"\"]\nkubernetes = true\n")
		named, unnamed := make(tally), make(tally)
		for range thefts {
			status, _ := c.ask(apiserver, thief, "/exec/default/payroll/app?command=sh") // as if kube-apiserver had that name
			named[fmt.Sprint(status)]++
			_, body := c.ask(apiserver, "10.0.0.1:6443", "/exec/default/payroll/app?command=sh")
			unnamed[body]++
		}
		c.want(named, "421")
		c.want(unnamed, rig.Node)
	})
	t.Run("addresses, by its Node", func(t *testing.T) {
		k := newAPIServer(t)
		k.services = []string{"10.96.0.0/12"}
		k.nodes = []any{
			k.node(rig.Node, "10.88.1.0/24", "10.0.0.1"),
			k.node(thief, "10.88.2.0/24", "10.88.1.7", "10.96.0.10", "10.0.0.1", "192.168.7.1", rig.Node),
			k.node("cp", "", "192.168.7.1"),
		}
		socket := filepath.Join(t.TempDir(), "s")
		c := newClaims(t, k,
			"[mode.cloud.join]\nanynode = true\n[mode.cloud.egress]\nhttpconnect = [\"unix://"+socket+"\"]\n"+
				"kubernetes = true\nstrategies = [\"destHost\", \"cidr\"]\n")
		for what, want := range map[string]string{
			"10.88.1.7:80":          "both claim",          // a pod
			"[::ffff:10.88.1.7]:80": "both claim",          // likewise
			"10.88.1.8:80":          rig.Node,              // another pod
			rig.Node + ":10250":     rig.Node,              // the node by its name
			"10.0.0.1:10250":        "both claim 10.0.0.1", // by its address
			"192.168.7.1:6443":      "cp is not connected", // the control plane
			"10.96.0.10:53":         "No agent available",  // a Service, which is nobody's
		} {
			c.wantEgress(socket, what, want)
		}
		if n := c.metric("tunnel_egress_contested_addresses"); n != 5 {
			t.Errorf("%v contested addresses are counted, want 5", n)
		}
	})
	t.Run("addresses, as those of its pods", func(t *testing.T) {
		k := newAPIServer(t)
		k.services = []string{"10.96.0.0/12"}
		k.nodes = []any{k.node(rig.Node, "10.88.1.0/24", "10.1.0.5"),
			k.node(thief, "10.1.0.0/16,::/0", "10.2.0.6", "lb.example.com")}
		socket := filepath.Join(t.TempDir(), "s")
		c := newClaims(t, k,
			"[mode.cloud.join]\nanynode = true\n[mode.cloud.egress]\nhttpconnect = [\"unix://"+socket+"\"]\n"+
				"kubernetes = true\nstrategies = [\"destHost\", \"cidr\"]\n")
		for what, want := range map[string]string{
			"10.1.0.5:10250":      "nodes " + rig.Node + " and " + thief + " both claim 10.1.0.5",
			rig.Node + ":10250":   rig.Node,
			rig.Node + ".:10250":  rig.Node,
			"LB.example.com.:443": "node " + thief + " claims",
			"10.88.1.7:80":        rig.Node,
			"[2001:db8::7]:6443":  "No agent available",
		} {
			c.wantEgress(socket, what, want)
		}
		if n := c.metric("tunnel_egress_contested_addresses"); n != 2 {
			t.Errorf("%v contested addresses are counted, want 2", n)
		}
	})
	t.Run("what any node may serve, by being idle", func(t *testing.T) {
		c := newClaims(t, nil, "")
		for range 2 { // so the honest node is not
			quiet, err := net.Dial("tcp", c.Door("some"))
			if err != nil {
				t.Fatal(err)
			}
			defer quiet.Close()
			bufio.NewReader(quiet).ReadString('\n')
		}
		served := func(door string) tally {
			got := make(tally)
			for range thefts {
				conn, err := net.Dial("tcp", c.Door(door))
				if err != nil {
					t.Fatal(err)
				}
				conn.SetDeadline(time.Now().Add(hangs))
				line, err := bufio.NewReader(conn).ReadString('\n')
				if err != nil {
					t.Fatal(err)
				}
				got[strings.TrimSpace(line)]++
				conn.Close()
			}
			return got
		}
		got := served("any")
		t.Logf("any node: %v", got)
		// By chance it has all of them once in a million times.
		if got[thief] == thefts || got[rig.Node] == thefts {
			t.Errorf("one of two nodes has them all: %v", got)
		}
		c.stole()
		c.want(served("some"), rig.Node)
	})
	t.Run("exec, by a caller of metrics", func(t *testing.T) {
		c := newClaims(t, nil, "[[mode.cloud.https.callers]]\nname = \"metrics-server\"\nmay = [\"metrics\"]\n")
		if status, body := c.ask("metrics-server", thief, "/metrics/resource"); status != http.StatusOK || body != thief {
			t.Errorf("metrics: %d %q", status, body)
		}
		c.stole()
		got := make(tally)
		for i := range thefts {
			path := []string{"/exec/default/payroll/app?command=sh", "/metrics/../exec/default/payroll/app",
				"/metrics%2f..%2fexec/default/payroll/app", "//exec/default/payroll/app"}[i%4]
			status, _ := c.ask("metrics-server", thief, path) // GET, as a WebSocket's
			got[fmt.Sprint(status)]++
		}
		c.want(got, "403")
	})
}

// dialEgress dials through the egress front door. It returns what the target says, or why there is none.
func dialEgress(t *testing.T, socket, addr string) string {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(hangs))
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", addr, addr)
	r := bufio.NewReader(conn)
	res, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != http.StatusOK {
		return res.Status
	}
	line, err := r.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

// apiServer is as much of a Kubernetes API server as the cloud asks.
type apiServer struct {
	config   string            // kubeconfig file
	pods     map[string]string // namespace/name → node; set before it is asked
	nodes    []any             // likewise
	services []string          // likewise: networks of Services
	reviews  atomic.Int64      // tokens that it was asked about, and says nothing of
	listed   map[string]any    // likewise: what else it lists, by path
	events   chan string       // lines of the watch of Services
}

// node is a Node with some addresses. podCIDR may be several, with commas between. One without
// pods is of the control plane.
func (*apiServer) node(name, podCIDR string, addresses ...string) any {
	metadata := map[string]any{"name": name, "resourceVersion": "1"}
	spec := map[string]any{"podCIDRs": strings.Split(podCIDR, ",")}
	if podCIDR == "" {
		metadata["labels"] = map[string]string{"node-role.kubernetes.io/control-plane": ""}
		spec = nil
	}
	all := []any{map[string]string{"type": "Hostname", "address": name}}
	for _, a := range addresses {
		typ := "InternalIP"
		if a == rig.Node {
			typ = "Hostname"
		}
		all = append(all, map[string]string{"type": typ, "address": a})
	}
	return map[string]any{"kind": "Node", "apiVersion": "v1", "metadata": metadata, "spec": spec,
		"status": map[string]any{"addresses": all}}
}

func newAPIServer(t *testing.T) *apiServer {
	t.Helper()
	k := &apiServer{
		pods: make(map[string]string), listed: make(map[string]any), events: make(chan string),
	}
	done := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := func(status int, v any) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			json.NewEncoder(w).Encode(v)
		}
		list := func(kind, version string, items []any) {
			answer(http.StatusOK,
				map[string]any{"kind": kind, "apiVersion": version,
					"metadata": map[string]any{"resourceVersion": "1"}, "items": items})
		}
		refuse := func(status int, reason string) {
			answer(status, map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure",
				"reason": reason, "code": status})
		}
		path, ofPod := strings.CutPrefix(r.URL.Path, "/api/v1/namespaces/")
		q := r.URL.Query()
		switch {
		case q.Get("sendInitialEvents") != "":
			refuse(http.StatusUnprocessableEntity, "Invalid")
		case q.Get("watch") != "":
			w.WriteHeader(http.StatusOK)
			events := k.events
			if r.URL.Path != servicesPath {
				events = nil
			}
			for {
				http.NewResponseController(w).Flush()
				select {
				case e := <-events:
					fmt.Fprintln(w, e)
				case <-r.Context().Done():
					return
				case <-done:
					return
				}
			}
		case r.URL.Path == "/apis/authentication.k8s.io/v1/tokenreviews":
			k.reviews.Add(1)
			io.Copy(io.Discard, r.Body) // then it is noticed when the cloud hangs up
			select {
			case <-r.Context().Done():
			case <-done:
			}
		case r.URL.Path == "/api/v1/nodes":
			list("NodeList", "v1", k.nodes)
		case r.URL.Path == "/apis/networking.k8s.io/v1/servicecidrs":
			list("ServiceCIDRList", "networking.k8s.io/v1", []any{map[string]any{"spec": map[string]any{"cidrs": k.services}}})
		case ofPod:
			node, ok := k.pods[strings.Replace(path, "/pods/", "/", 1)]
			if !ok {
				refuse(http.StatusNotFound, "NotFound")
				return
			}
			answer(http.StatusOK, map[string]any{"kind": "Pod", "apiVersion": "v1", "spec": map[string]any{"nodeName": node}})
		default:
			if all := k.listed[r.URL.Path]; all != nil {
				answer(http.StatusOK, all)
				return
			}
			refuse(http.StatusNotFound, "NotFound")
		}
	}))
	t.Cleanup(func() {
		close(done)
		server.Close()
	})
	k.config = testkit.Kubeconfig(t, server.URL)
	return k
}
