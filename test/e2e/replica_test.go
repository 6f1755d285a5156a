//go:build e2e

package e2e

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A field is where replicas and edges of their own are played with: clouds without front doors, and
// edges that only have to be connected, all in the root namespace. Its fields are set once, edges
// by its methods.
type field struct {
	c       *cluster
	program string
	dir     string
	admin   *admin
	tokens  map[string]string  // by node
	edges   map[string]*daemon // by node
	port    map[string]int     // of an edge's health, by node
}

func newField(t *testing.T, c *cluster, program string, nodes ...string) *field {
	t.Helper()
	f := &field{
		c: c, program: program, dir: c.path("dnstest"), admin: newAdmin(t, c),
		tokens: make(map[string]string), edges: make(map[string]*daemon), port: make(map[string]int),
	}
	if err := os.MkdirAll(f.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	var tokens strings.Builder
	for i, n := range nodes {
		f.tokens[n], f.port[n] = rand.Text(), 7100+i
		fmt.Fprintf(&tokens, "%s:%s\n", n, f.tokens[n])
	}
	f.write(t, "tokens", tokens.String())
	t.Cleanup(func() {
		for _, e := range f.edges {
			e.kill(t)
		}
	})
	return f
}

func (f *field) write(t *testing.T, file, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(f.dir, file), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A replica is one cloud. Its fields are set once, daemon by start.
type replica struct {
	f      *field
	name   string // of its pod
	ip     string // of its pod
	netns  string // of its pod; "": the root namespace
	grpc   string // host:port
	health string // host:port
	daemon *daemon
}

// replica makes a cloud that can be started; number tells it from the others. server is
// kube-apiserver as it knows it. Any name may join, so that it is seen which ones appear.
func (f *field) replica(ctx context.Context, t *testing.T, number int, server, hosts, nodeselector string) *replica {
	t.Helper()
	r := f.configure(ctx, t, number, server, hosts, nodeselector)
	if _, err := run(command(ctx, "ip", "addr", "add", r.ip+"/24", "dev", "te2e0"), nil); err != nil {
		t.Fatal(err) // it goes with the bridge
	}
	return r
}

// configure writes the files of a replica, which has no address yet.
func (f *field) configure(ctx context.Context, t *testing.T, number int, server, hosts, nodeselector string) *replica {
	t.Helper()
	ip := "10.77.0." + strconv.Itoa(200+number)
	r := &replica{
		f: f, name: account + "-" + strconv.Itoa(number), ip: ip,
		grpc: ip + ":" + strconv.Itoa(9000+number), health: ip + ":" + strconv.Itoa(7000+number),
	}
	f.c.kubeconfig(ctx, t, filepath.Join(f.dir, r.name+".kubeconfig"), server)
	f.write(t, r.name+".toml", strings.NewReplacer("PKI", f.c.path("pki"), "IP", ip, "NUMBER", strconv.Itoa(number),
		"MAP", nodesMap, "SERVICE", account, "HOSTS", hosts, "SELECTOR", nodeselector).Replace(`
[mode.cloud.stream.server]
grpcport = 900NUMBER
cert = "PKI/tunnel-join.crt"
key = "PKI/tunnel-join.key"
tokenfile = "tokens"
logport = 700NUMBER

[mode.cloud.stream.dns]
configmap = "MAP"
service = "SERVICE"
hosts = "HOSTS"
listen = "IP:5353"
nodeselector = "SELECTOR"

[mode.cloud.join]
anynode = true
`))
	t.Cleanup(func() { r.kill(t) })
	return r
}

func (r *replica) start(ctx context.Context, t *testing.T) {
	t.Helper()
	args := []string{r.f.program, "cloud", "-c", filepath.Join(r.f.dir, r.name+".toml")}
	if r.netns != "" {
		args = append([]string{"/usr/bin/nsenter", "--net=" + r.netns}, args...)
	}
	cmd := r.f.c.command(ctx, args[0], args[1:]...)
	cmd.Env = append(cmd.Env, "KUBECONFIG="+filepath.Join(r.f.dir, r.name+".kubeconfig"),
		"POD_NAMESPACE="+namespace, "POD_NAME="+r.name, "POD_IP="+r.ip)
	r.daemon = startDaemon(t, r.f.c, r.name, cmd)
	// It waits up to 7 s for a replica whose address refuses.
	eventually(ctx, t, 20*time.Second, r.name+" to be ready", func(ctx context.Context) error {
		return is200(get(ctx, new(http.Transport), "http://"+r.health+"/readyz?verbose"))
	})
}

// kill is kill -9.
func (r *replica) kill(t *testing.T) {
	t.Helper()
	if r.daemon != nil {
		r.daemon.kill(t)
		r.daemon = nil
	}
}

// leave is what Kubernetes does to a pod that is to go: SIGTERM. It must end by itself, with code 0.
func (r *replica) leave(t *testing.T) {
	t.Helper()
	d := r.daemon
	r.daemon = nil
	if d.ended() {
		t.Fatalf("%s ended by itself: %v", d.name, d.err)
	}
	if err := syscall.Kill(d.cmd.Process.Pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := d.endsWithin(t, 30*time.Second); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	d.killed = true
	d.log.Close()
}

// ask gets a page of the health port.
func (r *replica) ask(ctx context.Context, page string) (string, error) {
	tr := &http.Transport{DisableKeepAlives: true}
	status, body, err := get(ctx, tr, "http://"+r.health+page)
	return body, is200(status, body, err)
}

// metric returns one value of /metrics, by its name with its labels.
func (r *replica) metric(ctx context.Context, name string) (float64, error) {
	page, err := r.ask(ctx, "/metrics")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(page) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), name+" "); ok {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, fmt.Errorf("%s has no metric %s", r.name, name)
}

// leads returns nil when the replica says that it is the one that writes.
func (r *replica) leads(ctx context.Context) error {
	v, err := r.metric(ctx, leader)
	if err == nil && v != 1 {
		err = fmt.Errorf("%s has %s %v", r.name, leader, v)
	}
	return err
}

const leader = "tunnel_dns_configmap_leader"

// errNoAddress says that a name server answered: no such name, or no such address.
var errNoAddress = errors.New("no address")

// lookup asks a name server for the address of a node.
func lookup(ctx context.Context, server, node string) (string, error) {
	r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, server)
	}}
	a, err := r.LookupHost(ctx, node+".")
	var no *net.DNSError
	switch {
	case errors.As(err, &no) && no.IsNotFound:
		return "", fmt.Errorf("%s: %w", node, errNoAddress)
	case err != nil:
		return "", err
	case len(a) != 1:
		return "", fmt.Errorf("%s has the addresses %q", node, a)
	}
	return a[0], nil
}

// answers asks the replica itself.
func (r *replica) answers(ctx context.Context, node string) (string, error) {
	return lookup(ctx, r.ip+":5353", node)
}

// join starts an edge and waits until it has a session.
func (f *field) join(ctx context.Context, t *testing.T, node string, r *replica) {
	t.Helper()
	f.dial(ctx, t, node, r)
	f.joined(ctx, t, node)
}

// dial starts an edge.
func (f *field) dial(ctx context.Context, t *testing.T, node string, r *replica) {
	t.Helper()
	f.write(t, node+".toml",
		strings.NewReplacer("NODE", node, "TOKEN", f.tokens[node], "PKI", f.c.path("pki"), "GRPC", r.grpc,
			"NAME", joinName, "LOGPORT", strconv.Itoa(f.port[node])).Replace(`
[mode.edge]
node = "NODE"
[mode.edge.stream.client]
token = "TOKEN"
cert = "PKI/ca.crt"
dns = "NAME"
servername = "GRPC"
logport = LOGPORT
`))
	f.edges[node] = startDaemon(t, f.c, "edge-"+node,
		f.c.command(ctx, f.program, "edge", "-c", filepath.Join(f.dir, node+".toml")))
}

// joined waits until an edge has a session.
func (f *field) joined(ctx context.Context, t *testing.T, node string) {
	t.Helper()
	page := fmt.Sprintf("http://127.0.0.1:%d/readyz?verbose", f.port[node])
	eventually(ctx, t, backAgain, "edge "+node+" to have a session", func(ctx context.Context) error {
		return is200(get(ctx, &http.Transport{DisableKeepAlives: true}, page))
	})
}

// leave ends an edge as a power cut does.
func (f *field) leave(t *testing.T, node string) {
	t.Helper()
	f.edges[node].kill(t)
	delete(f.edges, node)
}

// stranger asks to join with an access token that no edge of ours would send, and returns the gRPC
// status that came back; "" when it was let in.
func (f *field) stranger(ctx context.Context, t *testing.T, r *replica, accessToken string) string {
	t.Helper()
	ctx, cancel := within(ctx, 2*time.Second) // who is let in is not answered before it has said hello
	defer cancel()
	in, out := io.Pipe()
	defer out.Close()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+r.grpc+"/tunnel.v1.Stream/TunnelStreaming", in)
	if err != nil {
		t.Fatal(err)
	}
	req.Header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"},
		"Authorization": {"Bearer " + accessToken}}
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: f.c.pool(t), ServerName: joinName},
		ForceAttemptHTTP2: true}
	defer tr.CloseIdleConnections()
	resp, err := tr.RoundTrip(req)
	if errors.Is(err, context.DeadlineExceeded) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if s := resp.Header.Get("Grpc-Status"); s != "" {
		return s
	}
	_, err = io.Copy(io.Discard, resp.Body)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	return resp.Trailer.Get("Grpc-Status")
}
