//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/stream/tunnelv1"
)

const (
	edgeAccount   = "tunnel-edge" // of testdata/edge.yaml
	projected     = "volumes/kubernetes.io~projected/token/token"
	revokedWithin = 3 * time.Second // one second is promised, but CI lints beside the cluster
	letBack       = time.Minute     // a refused edge comes back after 10 s at first, after up to twice that the next time
	oneRefusal    = "node name and token were not accepted"
)

// A guarded cloud has been set up by `tunnel init`. edge1 joins it with a token of `tunnel token
// create` and has a certificate then; edge2 joins with the ServiceAccount token of a pod, which its
// kubelet projects. Its fields are set once, the rest by its methods.
type guarded struct {
	*tunnel
	dir    string   // what `tunnel init` has made
	node   string   // what `tunnel join` has made
	health *replica // of which only the health port counts
	admin  *admin
	token  string // the path of edge2's token, in the node

	joinSecret string            // in the join token that edge1 has joined with last
	secrets    map[string]string // by what they are: in no output
	said       bytes.Buffer      // what our commands have printed; except for `tunnel token create`, which has to
}

// identities asserts who may join as whom, for how long, and what an operator is told.
func identities(ctx context.Context, t *testing.T, tn *tunnel) {
	c := tn.c
	g := &guarded{
		tunnel: tn, dir: filepath.Join(tn.dir, "init"), node: filepath.Join(tn.dir, "joined"), admin: newAdmin(t, c),
		health: &replica{name: "cloud", ip: cloudIP, health: cloudIP + ":" + cloudLog}, secrets: make(map[string]string),
	}
	if err := c.script(ctx, "dns.sh", "forward", cloudIP+":5353"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tn.down(t) })
	for _, step := range []struct {
		name string
		do   func(ctx context.Context, t *testing.T)
	}{
		{"joined", g.joined},
		{"refused as each other", g.asEachOther},
		{"node deleted", g.nodeDeleted},
		{"revoked", g.revoked},
		{"rights withdrawn", g.rightsWithdrawn},
		{"signed by the cluster", g.signedByTheCluster},
		{"no secret is told", g.tellsNothing},
	} {
		if !c.step(t, step.name, func(t *testing.T) { step.do(ctx, t) }) {
			return
		}
	}
}

// joined takes both nodes in, each in its way, as people do it.
func (g *guarded) joined(ctx context.Context, t *testing.T) {
	if _, err := g.do(ctx, "", "", "init", "--address", cloudIP+":9000", "--dir", g.dir); err != nil {
		t.Fatal(err)
	}
	g.configure(t, "cloud.toml", `cloudca = "ca.crt"`, `cloudca = "ca.crt"
serviceaccounts = ["`+namespace+"/"+edgeAccount+`"]`)
	g.secretFile(t, "the key of the cloud", filepath.Join(g.dir, "cloud.key"))
	g.secretFile(t, "the key of the nodes' CA", filepath.Join(g.dir, "nodes-ca.key"))
	g.start(ctx, t, "cloud.toml")

	if err := g.join(ctx, t, g.node); err != nil {
		t.Fatal(err)
	}
	g.edge(ctx, t, "edge1", filepath.Join(g.node, "edge.toml"))

	if err := g.c.apply(ctx, "edge.yaml", "NODE", "edge2"); err != nil {
		t.Fatal(err)
	}
	_, err := g.c.kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=60s", "pod/edge", "-n", namespace)
	uid, err2 := g.podUID(ctx)
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	g.token = filepath.Join("/var/lib/kubelet/pods", uid, projected)
	token, err := run(g.inside(ctx, "edge2", "cat", g.token), nil)
	if err != nil {
		t.Fatal(err)
	}
	g.secretToken("the token of edge2's pod", token)
	g.edge(ctx, t, "edge2", g.edgeFile(t, "edge2", "edge2", `tokenfile = "`+g.token+`"`))

	for _, n := range g.c.nodes {
		recovers(ctx, t, g.c, n)
	}
	for n, by := range map[string]string{"edge1": "by=\"certificate ",
		"edge2": "by=\"service account " + namespace + "/" + edgeAccount} {
		if !g.logs("cloud", 0, "session started", "node="+n, by) {
			t.Errorf("the cloud's log does not say that %s has joined by %s", n, by)
		}
	}
}

func (g *guarded) podUID(ctx context.Context) (string, error) {
	return g.c.kubectl(ctx, "get", "pod", "edge", "-n", namespace, "-o", "jsonpath={.metadata.uid}")
}

// asEachOther has strangers try everything that is good for a node, or for nobody, as another node.
func (g *guarded) asEachOther(ctx context.Context, t *testing.T) {
	uid, err := g.podUID(ctx)
	if err != nil {
		t.Fatal(err)
	}
	bound := []string{edgeAccount, "--bound-object-kind=Pod", "--bound-object-name=edge", "--bound-object-uid=" + uid}
	for _, s := range []struct{ name, node, proof string }{
		{"the token of edge2's pod", "edge1", g.request(ctx, t, "pod", append(bound, "--audience=tunnel")...)},
		{"a token for others", "edge2", g.request(ctx, t, "others", bound...)},
		{"a token of no pod", "edge2", g.request(ctx, t, "unbound", edgeAccount, "--audience=tunnel")},
		{"a token of another account", "edge2", g.request(ctx, t, "account", account, "--audience=tunnel")},
		{"a token that is for joining only", "edge1", g.tokenFile(t, "joining", g.joinSecret)},
	} {
		t.Run(s.name, func(t *testing.T) { g.refuses(ctx, t, s.node, s.proof) })
	}
	t.Run("the certificate of edge1", func(t *testing.T) { g.lies(ctx, t) })
	if n, err := g.sessions(ctx); n != 2 || err != nil {
		t.Errorf("there are %v sessions, %v", n, err)
	}
	for _, n := range g.c.nodes {
		succeeds(ctx, t, g.c, n)
	}
}

// refuses starts an edge on the control plane's machine that says it is node, and waits until it is turned away.
func (g *guarded) refuses(ctx context.Context, t *testing.T, node, proof string) {
	t.Helper()
	from := g.logged()
	cmd := g.c.command(ctx, g.binary, "edge", "-c", g.edgeFile(t, "stranger", node, proof), "--log-level", "debug")
	stranger := startDaemon(t, g.c, "stranger", cmd)
	defer stranger.kill(t)
	eventually(ctx, t, 10*time.Second, "the refusal", func(context.Context) error {
		if !g.logs("stranger", from["stranger"], oneRefusal) {
			return fmt.Errorf("it is not told that it is refused:\n%s", g.c.logged("stranger", from["stranger"]))
		}
		return nil
	})
	if !g.logs("cloud", from["cloud"], "join refused", "node="+node) {
		t.Errorf("the cloud's log does not say why:\n%s", g.c.logged("cloud", from["cloud"]))
	}
	if g.logs("cloud", from["cloud"], "session started") {
		t.Errorf("there was a session:\n%s", g.c.logged("cloud", from["cloud"]))
	}
}

// lies shows edge1's certificate and says another name. An edge of ours finds out by itself, so this is none.
func (g *guarded) lies(ctx context.Context, t *testing.T) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(g.node, "node.pem"), filepath.Join(g.node, "node.pem"))
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(filepath.Join(g.dir, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	token, err := run(g.inside(ctx, "edge2", "cat", g.token), nil)
	if err != nil {
		t.Fatal(err)
	}
	bearer := func(node string) string {
		return "Bearer " + auth.EncodeToken(node, auth.Secret(strings.TrimSpace(token)))
	}
	for _, l := range []struct {
		name   string
		claims metadata.MD
		want   codes.Code
	}{
		// it is waited for
		{"its own name, and no word more", metadata.Pairs("tunnel-node", "edge1"), codes.DeadlineExceeded},
		{"the other's name", metadata.Pairs("tunnel-node", "edge2"), codes.Unauthenticated},
		{"its own name, with the other's token", metadata.Pairs("authorization", bearer("edge1")), codes.Unauthenticated},
		{"both names, with the other's token", metadata.Pairs("tunnel-node", "edge1", "authorization", bearer("edge2")),
			codes.Unauthenticated},
	} {
		cc, err := grpc.NewClient(cloudIP+":9000", grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13,
		})))
		if err != nil {
			t.Fatal(err)
		}
		lying, cancel := within(metadata.NewOutgoingContext(ctx, l.claims), 2*time.Second)
		stream, err := tunnelv1.NewStreamClient(cc).TunnelStreaming(lying)
		if err == nil {
			_, err = stream.Recv()
		}
		cancel()
		cc.Close()
		if status.Code(err) != l.want {
			t.Errorf("%s: %v, want %v", l.name, err, l.want)
		}
	}
}

// nodeDeleted takes edge2's Node away and brings it back, before Kubernetes takes its pods away as well.
func (g *guarded) nodeDeleted(ctx context.Context, t *testing.T) {
	const path = "/api/v1/nodes"
	var node map[string]any
	if err := g.admin.do(ctx, http.MethodGet, path+"/edge2", "", nil, &node); err != nil {
		t.Fatal(err)
	}
	meta := node["metadata"].(map[string]any)
	for _, k := range []string{"uid", "resourceVersion", "creationTimestamp", "managedFields"} {
		delete(meta, k)
	}
	g.losesOne(ctx, t, "edge2", func() error { return g.admin.do(ctx, http.MethodDelete, path+"/edge2", "", nil, nil) })
	if err := g.admin.do(ctx, http.MethodPost, path, "application/json", node, nil); err != nil {
		t.Fatal(err)
	}
	g.both(ctx, t, letBack)
	recovers(ctx, t, g.c, "edge2")
}

// revoked takes edge1 back by the token file.
func (g *guarded) revoked(ctx context.Context, t *testing.T) {
	g.losesOne(ctx, t, "edge1", func() error {
		_, err := g.do(ctx, "", "", "token", "revoke", "-c", filepath.Join(g.dir, "cloud.toml"), "--node", "edge1")
		return err
	})
	fails(ctx, t, g.c, "edge1", verbs[:1], gone)
	succeeds(ctx, t, g.c, "edge2")
	g.edges["edge1"].kill(t)
}

// losesOne does something that ends the session of a node, at once, and waits until the node has
// tried to come back in vain.
func (g *guarded) losesOne(ctx context.Context, t *testing.T, node string, do func() error) {
	t.Helper()
	from := g.logged()
	if err := do(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for {
		n, err := g.sessions(ctx)
		took := time.Since(began)
		if err == nil && n == 1 {
			t.Logf("the session of %s is gone after %v", node, took.Round(time.Millisecond))
			break
		}
		if took > revokedWithin {
			t.Fatalf("%v after it was revoked there are %v sessions, %v", took, n, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	eventually(ctx, t, letBack/2, node+" to be refused", func(context.Context) error {
		if !g.logs(node, from[node], oneRefusal) {
			return errors.New("its log does not say so")
		}
		return nil
	})
	if n, err := g.sessions(ctx); n != 1 || err != nil {
		t.Errorf("after the refusal there are %v sessions, %v", n, err)
	}
}

// both waits until both have a session.
func (g *guarded) both(ctx context.Context, t *testing.T, within time.Duration) {
	t.Helper()
	took := eventually(ctx, t, within, "both to have a session", func(ctx context.Context) error {
		n, err := g.sessions(ctx)
		return want(err, fmt.Sprint(n), "2")
	})
	t.Logf("both have a session after %v", took.Round(time.Millisecond))
}

// rightsWithdrawn has a cloud that may not ask whose a token is: that is no refusal, and everybody
// is told what is missing.
func (g *guarded) rightsWithdrawn(ctx context.Context, t *testing.T) {
	g.edgeAgain(ctx, t)
	if _, err := g.c.kubectl(ctx, "patch", "clusterrole", account, "--type=json", "-p", `[
		{"op": "test", "path": "/rules/1/resources", "value": ["tokenreviews"]},
		{"op": "remove", "path": "/rules/1"}]`); err != nil {
		t.Fatal(err)
	}
	from := g.logged()
	g.cloud.kill(t)
	g.start(ctx, t, "cloud.toml")
	said := []string{"tokenreviews", "deployment/cloud-rbac.yaml"}
	eventually(ctx, t, backAgain, "/readyz?verbose to name the right", func(ctx context.Context) error {
		page, err := g.health.ask(ctx, "/readyz?verbose")
		if err == nil && !contains(page, "[~]auth", said...) {
			err = errors.New(page)
		}
		return err
	})
	if !g.logs("cloud", from["cloud"], said[0], said[1:]...) {
		t.Errorf("the log does not name the right:\n%s", g.c.logged("cloud", from["cloud"]))
	}
	eventually(ctx, t, backAgain, "edge1, which needs no review", func(ctx context.Context) error {
		n, err := g.sessions(ctx)
		return want(err, fmt.Sprint(n), "1")
	})
	eventually(ctx, t, backAgain, "edge2 to be told why", func(context.Context) error {
		if g.logs("edge2", from["edge2"], oneRefusal) || !g.logs("edge2", from["edge2"], "cannot check who joins now") {
			return fmt.Errorf("edge2 is told\n%s", g.c.logged("edge2", from["edge2"]))
		}
		return nil
	})
	if _, err := g.c.kubectl(ctx, "apply", "-f", "../../deployment/cloud-rbac.yaml"); err != nil {
		t.Fatal(err)
	}
	g.both(ctx, t, backAgain)
	recovers(ctx, t, g.c, "edge2")
}

// edgeAgain lets edge1, which was revoked, join anew: what it had is still not good.
func (g *guarded) edgeAgain(ctx context.Context, t *testing.T) {
	t.Helper()
	old := filepath.Join(g.dir, "old.pem")
	if err := os.Rename(filepath.Join(g.node, "node.pem"), old); err != nil {
		t.Fatal(err)
	}
	if err := g.join(ctx, t, g.node); err != nil {
		t.Fatal(err)
	}
	g.refuses(ctx, t, "edge1", `nodecert = "`+old+`"`)
	g.edge(ctx, t, "edge1", filepath.Join(g.node, "edge.toml"))
	g.both(ctx, t, backAgain)
}

// signedByTheCluster has kube-controller-manager sign edge1's certificate.
func (g *guarded) signedByTheCluster(ctx context.Context, t *testing.T) {
	g.edges["edge1"].kill(t)
	g.cloud.kill(t)
	g.configure(t, "cluster.toml", `ca = "nodes-ca.crt"
cakey = "nodes-ca.key"`, `ca = "`+g.c.path("pki/ca.crt")+`"
signer = "kubernetes"`)
	g.start(ctx, t, "cluster.toml")
	node := g.node + "-cluster"

	from := g.logged()
	if err := g.join(ctx, t, node); err == nil {
		t.Fatal("a cloud without the right has a certificate signed")
	}
	if !g.logs("cloud", from["cloud"], "certificatesigningrequests", "deployment/cloud-rbac.yaml") {
		t.Errorf("the log does not name the right:\n%s", g.c.logged("cloud", from["cloud"]))
	}
	if _, err := g.c.kubectl(ctx, "create", "clusterrolebinding", account+"-signer", "--clusterrole="+account+"-signer",
		"--serviceaccount="+namespace+":"+account); err != nil {
		t.Fatal(err)
	}
	if err := g.join(ctx, t, node); err != nil {
		t.Fatal(err)
	}
	left, err := g.c.kubectl(ctx, "get", "csr", "-o", "name")
	if err := want(err, left, ""); err != nil {
		t.Errorf("requests stay behind: %v", err)
	}
	g.edge(ctx, t, "edge1", filepath.Join(node, "edge.toml"))
	for _, n := range g.c.nodes {
		recovers(ctx, t, g.c, n)
	}
}

// tellsNothing looks for every secret of this test in everything that was printed or can be asked for.
func (g *guarded) tellsNothing(ctx context.Context, t *testing.T) {
	told := map[string]string{"a command": g.said.String()}
	for _, page := range []string{"/metrics", "/readyz?verbose"} {
		text, err := g.health.ask(ctx, page)
		if err != nil {
			t.Fatal(err)
		}
		told[page] = text
	}
	files, err := filepath.Glob(g.c.path("log/*.log"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		told[f] = string(text)
	}
	for where, text := range told {
		for what, secret := range g.secrets {
			if strings.Contains(text, secret) {
				t.Errorf("%s tells %s", where, what)
			}
		}
	}
	t.Logf("%d secrets are in none of %d outputs", len(g.secrets), len(told))
}

// configure writes a configuration from the one of `tunnel init`, with each pair replaced.
func (g *guarded) configure(t *testing.T, file string, oldnew ...string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(g.dir, "cloud.toml"))
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	if file == "cloud.toml" { // for the first time: as the cloud of the other tests is
		oldnew = append(oldnew,
			"#logport = 7000", "logport = "+cloudLog,
			"# Names do not use Kubernetes.\ndebug = true", `configmap = "`+nodesMap+`"
listen = "`+cloudIP+`:5353"`)
		_, front, _ := strings.Cut(g.read(t, "cloud.toml"), "[mode.cloud.https]")
		text += "\n[mode.cloud.https]" + front
	}
	for i := 0; i < len(oldnew); i += 2 {
		if strings.Count(text, oldnew[i]) != 1 {
			t.Fatalf("%q stands not once in\n%s", oldnew[i], text)
		}
		text = strings.Replace(text, oldnew[i], oldnew[i+1], 1)
	}
	if err := os.WriteFile(filepath.Join(g.dir, file), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// start starts the cloud with a configuration of its folder.
func (g *guarded) start(ctx context.Context, t *testing.T, file string) {
	t.Helper()
	g.cloud = startDaemon(t, g.c, "cloud", g.asPod(ctx, "cloud", "-c", filepath.Join(g.dir, file), "--log-level", "debug"))
	eventually(ctx, t, backAgain, "the cloud to be ready", g.cloudReady)
}

// asPod is the program with the environment of the cloud's pod, which kubectl exec has, too.
func (g *guarded) asPod(ctx context.Context, args ...string) *exec.Cmd {
	cmd := g.cloudCommand(ctx, "cloud", cloudIP)
	cmd.Args = append(cmd.Args[:1], args...)
	return cmd
}

// edge starts a node's edge.
func (g *guarded) edge(ctx context.Context, t *testing.T, node, config string) {
	t.Helper()
	g.edges[node] = startDaemon(t, g.c, node, g.inside(ctx, node, g.binary, "edge", "-c", config, "--log-level", "debug"))
}

// edgeFile writes the configuration of an edge that says it is node.
func (g *guarded) edgeFile(t *testing.T, name, node, proof string) string {
	t.Helper()
	file := filepath.Join(g.dir, name+".toml")
	text := strings.NewReplacer("NODE", node, "IP", cloudIP, "DIR", g.dir, "PROOF", proof).Replace(`
[mode.edge]
node = "NODE"
[mode.edge.stream.client]
PROOF
cert = "DIR/ca.crt"
dns = "IP"
servername = "IP:9000"
`)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// inside is a command in a node.
func (g *guarded) inside(ctx context.Context, node string, args ...string) *exec.Cmd {
	cmd := g.c.command(ctx, filepath.Join(g.c.scripts, "innode.sh"), append([]string{node}, args...)...)
	cmd.Env = append(cmd.Env, "CLUSTER_HOME="+g.c.home)
	return cmd
}

// do runs one of the program's commands on a node, or as the cloud, and returns what it prints on stdout.
func (g *guarded) do(ctx context.Context, node, stdin string, args ...string) (string, error) {
	cmd := g.asPod(ctx, args...)
	if node != "" {
		cmd = g.inside(ctx, node, append([]string{g.binary}, args...)...)
	}
	cmd.Stdin = strings.NewReader(stdin)
	p, err := start(cmd)
	if err != nil {
		return "", err
	}
	<-p.done
	if args[0] != "token" || args[1] != "create" {
		fmt.Fprintf(&g.said, "%s%s%v\n", p.out, p.stderr, p.err)
	}
	return p.out.String(), p.err
}

// join has edge1 join with a new token, and its files written to a folder.
func (g *guarded) join(ctx context.Context, t *testing.T, dir string) error {
	t.Helper()
	config := "cloud.toml"
	if dir != g.node {
		config = "cluster.toml"
	}
	out, err := g.do(ctx, "", "", "token", "create", "-c", filepath.Join(g.dir, config), "--node", "edge1",
		"--ttl", "1h", "--json")
	if err != nil {
		t.Fatal(err)
	}
	var created struct{ Token string }
	if err := json.Unmarshal([]byte(out), &created); err != nil {
		t.Fatal(err)
	}
	_, inner, _ := strings.Cut(created.Token, ".")
	text, err := base64.RawURLEncoding.DecodeString(inner)
	var join struct{ Secret string }
	if err := errors.Join(err, json.Unmarshal(text, &join)); err != nil || join.Secret == "" {
		t.Fatalf("the join token holds no secret: %v", err)
	}
	g.joinSecret = join.Secret
	number := fmt.Sprint(len(g.secrets))
	g.secrets["a join token "+number], g.secrets["the secret in a join token "+number] = created.Token, join.Secret
	if _, err := g.do(ctx, "edge1", created.Token, "join", "--dir", dir); err != nil {
		return err
	}
	g.secretFile(t, "a key of edge1 "+number, filepath.Join(dir, "node.pem"))
	return nil
}

// request asks for a token, and returns the line that has an edge prove with it who it is.
func (g *guarded) request(ctx context.Context, t *testing.T, name string, args ...string) string {
	t.Helper()
	token, err := g.c.kubectl(ctx, append([]string{"create", "token", "-n", namespace}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	g.secretToken("token "+name, token)
	return g.tokenFile(t, name, strings.TrimSpace(token))
}

func (g *guarded) tokenFile(t *testing.T, name, token string) string {
	t.Helper()
	file := filepath.Join(g.dir, name+".token")
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	return `tokenfile = "` + file + `"`
}

// secretToken notes a token that Kubernetes has signed: with the signature it is good.
func (g *guarded) secretToken(what, token string) {
	token = strings.TrimSpace(token)
	g.secrets[what] = token[strings.LastIndex(token, ".")+1:]
}

// secretFile notes the private key in a file in PEM, which nobody else may read.
func (g *guarded) secretFile(t *testing.T, what, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%s: %v, %v", file, info.Mode(), err)
	}
	for {
		b, rest := pem.Decode(text)
		if b == nil {
			return
		}
		if strings.HasSuffix(b.Type, "PRIVATE KEY") {
			g.secrets[what] = strings.Split(string(pem.EncodeToMemory(b)), "\n")[1] // one line of it is enough
		}
		text = rest
	}
}

// sessions returns how many sessions the cloud has.
func (g *guarded) sessions(ctx context.Context) (float64, error) {
	return g.health.metric(ctx, "tunnel_sessions")
}

// logged returns how long the logs are.
func (g *guarded) logged() map[string]int64 {
	sizes := make(map[string]int64)
	for _, name := range []string{"cloud", "edge1", "edge2", "stranger"} {
		if info, err := os.Stat(g.c.path("log/" + name + ".log")); err == nil {
			sizes[name] = info.Size()
		}
	}
	return sizes
}

// logs reports whether a log has a line with all of words since offset.
func (g *guarded) logs(name string, offset int64, word string, words ...string) bool {
	return contains(g.c.logged(name, offset), word, words...)
}

// contains reports whether a line of text has a word and all others.
func contains(text, word string, words ...string) bool {
	for line := range strings.Lines(text) {
		found := strings.Contains(line, word)
		for _, w := range words {
			found = found && strings.Contains(line, w)
		}
		if found {
			return true
		}
	}
	return false
}
