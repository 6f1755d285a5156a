//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

const (
	cloudIP   = "10.77.0.250" // the cloud's own address on the bridge
	cloudLog  = "7000"        // its health port
	edgeLog   = "7010"
	kubelet   = "10250"
	joinName  = "tunnel.e2e" // the name in the cloud's certificate
	backAgain = 12 * time.Second
)

// A tunnel is one cloud on the control plane's machine and one edge in each node: our binary, as users start it.
type tunnel struct {
	c          *cluster
	binary     string
	dir        string
	kubeconfig string // of the cloud
	cloud      *daemon
	edges      map[string]*daemon // by node
}

// binary returns the program under test.
func binary(ctx context.Context, t *testing.T) string {
	t.Helper()
	if b := os.Getenv("TUNNEL_BIN"); b != "" {
		b, err := filepath.Abs(b)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	out := filepath.Join(t.TempDir(), "tunnel")
	build := command(ctx, "go", "build", "-o", out, "./cmd/tunnel")
	build.Dir = "../.."
	if _, err := run(build, nil); err != nil {
		t.Fatalf("building the tunnel: %v", err)
	}
	return out
}

// newTunnel writes certificates, tokens and configuration; nothing runs yet. volume is where the
// cloud's ConfigMap is mounted.
func newTunnel(ctx context.Context, t *testing.T, c *cluster, binary, volume string) *tunnel {
	t.Helper()
	tn := &tunnel{c: c, binary: binary, dir: c.path("tunnel"), edges: make(map[string]*daemon)}
	if err := os.MkdirAll(tn.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	// Again where an earlier tunnel of this cluster had it. It goes with the bridge.
	if _, err := run(command(ctx, "ip", "addr", "replace", cloudIP+"/24", "dev", "te2e0"), nil); err != nil {
		t.Fatal(err)
	}
	leaf := func(args ...string) { c.leaf(ctx, t, args...) }
	leaf("-name", "tunnel-join", "-cn", joinName, "-dns", joinName, "-server", "-client") // a client to other replicas
	leaf("-name", "tunnel-https", "-cn", "tunnel-https", "-dns", "edge1", "-dns", "edge2", "-server")
	leaf("-name", "tunnel-kubelet", "-cn", "tunnel-cloud", "-client") // what it may do: testdata/rbac.yaml

	// Both forms that a token may have in the file.
	tokens, lines := make(map[string]string), ""
	for _, n := range c.nodes {
		tokens[n] = rand.Text()
		if sum := sha256.Sum256([]byte(tokens[n])); n == "edge2" {
			lines += n + ":sha256:" + hex.EncodeToString(sum[:]) + "\n"
		} else {
			lines += n + ":" + tokens[n] + "\n"
		}
	}
	tn.write(t, "tokens", lines)
	tn.kubeconfig = filepath.Join(tn.dir, "kubeconfig")
	c.kubeconfig(ctx, t, tn.kubeconfig, apiServer)
	tn.write(t, "cloud.toml",
		strings.NewReplacer("PKI", c.path("pki"), "IP", cloudIP, "LOGPORT", cloudLog, "MAP", nodesMap,
			"HOSTS", filepath.Join(volume, "hosts")).Replace(`
[mode.cloud.stream.server]
grpcport = 9000
cert = "PKI/tunnel-join.crt"
key = "PKI/tunnel-join.key"
tokenfile = "tokens"
logport = LOGPORT

[mode.cloud.stream.dns]
configmap = "MAP"
hosts = "HOSTS"
listen = "IP:5353"

[mode.cloud.https]
cert = "PKI/tunnel-https.crt"
key = "PKI/tunnel-https.key"
clientca = "PKI/ca.crt"
listen = "IP"
[mode.cloud.https.addr]
"10250" = "127.0.0.1:10250"
[mode.cloud.https.kubelet]
cert = "PKI/tunnel-kubelet.crt"
key = "PKI/tunnel-kubelet.key"
ca = "PKI/ca.crt"
`))
	for _, n := range c.nodes {
		tn.write(t, n+".toml", strings.NewReplacer("NODE", n, "TOKEN", tokens[n], "PKI", c.path("pki"), "IP", cloudIP,
			"NAME", joinName, "LOGPORT", edgeLog).Replace(`
[mode.edge]
node = "NODE"
[mode.edge.stream.client]
token = "TOKEN"
cert = "PKI/ca.crt"
dns = "NAME"
servername = "IP:9000"
logport = LOGPORT
`))
	}
	return tn
}

func (tn *tunnel) write(t *testing.T, file, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(tn.dir, file), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (tn *tunnel) read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(tn.dir, file))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func (tn *tunnel) config(name string) string { return filepath.Join(tn.dir, name+".toml") }

// up starts everything, and waits until both ends say that they are ready and the nodes' names lead to the cloud.
func (tn *tunnel) up(ctx context.Context, t *testing.T, named time.Duration) {
	t.Helper()
	tn.startCloud(ctx, t)
	for _, n := range tn.c.nodes {
		tn.startEdge(ctx, t, n)
	}
	for _, n := range tn.c.nodes {
		eventually(ctx, t, backAgain, "edge "+n+" to be ready",
			func(ctx context.Context) error { return tn.edgeReady(ctx, n) })
		took := eventually(ctx, t, named, "the name of "+n+" to lead to the cloud", func(ctx context.Context) error {
			a, err := lookup(ctx, coreDNS, n)
			return want(err, a, cloudIP)
		})
		t.Logf("%s leads to the cloud %v after it has its session", n, took.Round(time.Millisecond))
	}
	eventually(ctx, t, 5*time.Second, "the cloud to be ready", tn.cloudReady)
}

// down kills everything. None of it may have ended before.
func (tn *tunnel) down(t *testing.T) {
	t.Helper()
	for _, d := range tn.daemons() {
		d.kill(t)
	}
}

func (tn *tunnel) daemons() []*daemon {
	all := []*daemon{}
	for _, n := range tn.c.nodes {
		if d := tn.edges[n]; d != nil {
			all = append(all, d)
		}
	}
	if tn.cloud != nil {
		all = append(all, tn.cloud)
	}
	return all
}

func (tn *tunnel) startCloud(ctx context.Context, t *testing.T) {
	t.Helper()
	tn.cloud = startDaemon(t, tn.c, "cloud", tn.cloudCommand(ctx, "cloud", cloudIP))
}

// cloudCommand is a cloud with the configuration of that name, as a pod with that address.
func (tn *tunnel) cloudCommand(ctx context.Context, name, ip string) *exec.Cmd {
	cmd := tn.c.command(ctx, tn.binary, "cloud", "-c", tn.config(name))
	cmd.Env = append(cmd.Env, "KUBECONFIG="+tn.kubeconfig, "POD_NAMESPACE="+namespace,
		"POD_NAME="+account+"-"+name, "POD_IP="+ip)
	return cmd
}

// joinsAt has an edge dial another address from its next start.
func (tn *tunnel) joinsAt(t *testing.T, node, address string) {
	t.Helper()
	tn.write(t, node+".toml", strings.Replace(tn.read(t, node+".toml"), cloudIP+":9000", address, 1))
}

func (tn *tunnel) startEdge(ctx context.Context, t *testing.T, node string) {
	t.Helper()
	tn.edges[node] = startDaemon(t, tn.c, node, tn.c.inside(ctx, node, tn.binary, "edge", "-c", tn.config(node)))
}

func (tn *tunnel) cloudReady(ctx context.Context) error {
	return is200(get(ctx, &http.Transport{DisableKeepAlives: true}, "http://"+cloudIP+":"+cloudLog+"/readyz?verbose"))
}

func (tn *tunnel) edgeReady(ctx context.Context, node string) error {
	return is200(tn.c.getInside(ctx, node, "http://127.0.0.1:"+edgeLog+"/readyz?verbose"))
}

func is200(status int, body string, err error) error {
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("status %d: %s", status, strings.TrimSpace(body))
	}
	return err
}

// carried returns how many bytes the cloud says that it has carried, from /metrics.
func (tn *tunnel) carried(ctx context.Context, t *testing.T) float64 {
	t.Helper()
	status, body, err := get(ctx, &http.Transport{DisableKeepAlives: true}, "http://"+cloudIP+":"+cloudLog+"/metrics")
	if err := is200(status, body, err); err != nil {
		t.Fatalf("the cloud's /metrics: %v", err)
	}
	sum, found := 0.0, false
	for line := range strings.Lines(body) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		name, _, _ = strings.Cut(name, "{")
		if !strings.HasPrefix(name, "tunnel_") || !strings.Contains(name, "bytes") || !strings.HasSuffix(name, "_total") {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("the cloud's /metrics: %q: %v", line, err)
		}
		sum, found = sum+v, true
	}
	if !found {
		t.Fatalf("the cloud's /metrics counts no bytes:\n%s", body)
	}
	return sum
}

// A daemon is one of our processes. It must not end unless it is told to.
type daemon struct {
	*process
	log    *os.File
	killed bool // by us; owned by the test's goroutine
}

func startDaemon(t *testing.T, c *cluster, name string, cmd *exec.Cmd) *daemon {
	t.Helper()
	log, err := os.OpenFile(c.path("log/"+name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(log, "--- started %s\n", time.Now().UTC().Format("15:04:05.000"))
	cmd.Stdout, cmd.Stderr = log, log
	p, err := start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	return &daemon{process: p, log: log}
}

// kill is kill -9. An edge dies with the process that put it into its node, a moment later: kill waits for that, since
// the next edge needs its ports.
func (d *daemon) kill(t *testing.T) {
	t.Helper()
	if d.killed {
		return
	}
	d.killed = true
	if d.ended() {
		t.Errorf("%s ended by itself: %v", d.name, d.err)
	}
	edge, err := d.inside()
	d.process.kill()
	d.log.Close()
	if err == nil {
		testkit.Eventually(t, d.name+" to end", func() bool { return ended(edge) })
	}
}

// terminate asks an edge to end, and waits until it has.
func (d *daemon) terminate(ctx context.Context, t *testing.T) {
	t.Helper()
	edge, err := d.inside()
	if err == nil {
		err = syscall.Kill(edge, syscall.SIGTERM)
	}
	if err != nil {
		t.Fatal(err)
	}
	d.killed = true
	eventually(ctx, t, time.Minute, d.name+" to end", func(context.Context) error {
		if !ended(edge) {
			return errors.New("it runs")
		}
		return nil
	})
	d.process.kill() // what put the edge into its node may be there still
	d.log.Close()
}

// ended reports whether a process has ended. Nobody may have asked for its status yet.
func ended(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)) // pid (name) state …; see proc(5)
	_, rest, found := bytes.Cut(stat, []byte(") "))
	return err != nil || found && rest[0] == 'Z'
}

// inside returns the process id of an edge itself: the child of the process that put it into its node.
func (d *daemon) inside() (int, error) {
	pid := d.cmd.Process.Pid
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return 0, err
	}
	children := strings.Fields(string(b))
	if len(children) != 1 {
		return 0, fmt.Errorf("%s has children %q, want one", d.name, b)
	}
	return strconv.Atoi(children[0])
}
