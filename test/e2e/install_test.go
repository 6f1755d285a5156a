//go:build e2e

package e2e

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/test/rig"
)

const (
	deploy        = "../../deployment"
	controlNode   = "control3"               // beside the control plane; the nodes behind NAT are edge1 and edge2
	joinAddress   = "10.77.0.13:30900"       // control3, and the nodePort of the Service tunnel-cloud
	edgeNamespace = "tunnel-edge"            // as the manifests have it
	firstVersion  = "v0.1.0"                 // as the manifests have it
	nextVersion   = "v0.1.1"                 // this tree
	coreDNSImage  = "coredns/coredns:1.13.2" // as the manifests have it
	helmVersion   = "v3.22.0"
)

// TestInstall installs everything by the manifests alone, as a user does: images in containerd, a cloud of two replicas
// and CoreDNS beside the control plane, edges as a DaemonSet on nodes behind NAT. Then it upgrades, goes back, and
// removes all of it. No daemon of ours runs outside a pod. The first version comes from an older commit with its own
// manifests, if olderTree finds one.
func TestInstall(t *testing.T) {
	ctx := contextOf(t)
	older := olderTree(ctx, t)
	images := makeImages(ctx, t, older)
	for _, way := range []struct {
		name string
		tool func(ctx context.Context, t *testing.T, c *cluster, m manifests) tool
	}{{"kustomize", newKustomize}, {"helm", newHelm}} {
		t.Run(way.name, func(t *testing.T) {
			c := upCluster(ctx, t, "KUBEPROXY=1", "DIRECT="+controlNode, "NODES=edge1 edge2 "+controlNode)
			for _, image := range images {
				if err := c.script(ctx, "load.sh", image); err != nil {
					t.Fatal(err)
				}
			}
			i := &installation{c: c, tool: way.tool(ctx, t, c, manifestsOf(t, older))}
			for _, s := range []struct {
				name string
				do   func(ctx context.Context, t *testing.T)
			}{
				{"before", i.prepare}, {"installed", i.install}, {"verbs", i.works}, {"upgrade", i.upgrade},
				{"verbs after upgrade", i.works}, {"plugin", i.plugin}, // a cloud of the first version may lack its commands
				{"rollback", i.rollback}, {"verbs after rollback", i.works}, {"removed", i.remove},
			} {
				if !i.step(t, s.name, func(t *testing.T) { s.do(ctx, t) }) {
					return
				}
			}
		})
	}
}

// A tool is what a user installs with.
type tool interface {
	// cloud installs the cloud of a version, or changes the one that is there. It waits until all replicas are ready.
	cloud(ctx context.Context, version string) error
	// edges does so for the edges.
	edges(ctx context.Context, version string) error
	// back returns the cloud to the version before.
	back(ctx context.Context) error
	// remove removes cloud and edges, and both namespaces.
	remove(ctx context.Context) error
}

// thisTree is the root folder of the repository.
const thisTree = "../.."

// upgradesFrom names the environment variable with the commit or tag of the first version.
const upgradesFrom = "TUNNEL_E2E_FROM"

// olderTree returns a folder with the repository at the commit from which TestInstall upgrades: the commit that
// upgradesFrom names, or else that of the newest tag before this commit. Without both, it returns thisTree: both
// versions are then the same program under two names.
func olderTree(ctx context.Context, t *testing.T) string {
	t.Helper()
	commit := os.Getenv(upgradesFrom)
	if commit == "" {
		tag, err := run(command(ctx, "git", "-C", thisTree, "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*",
			"HEAD^"), nil)
		if err != nil {
			t.Logf("the upgrade is between two names of this program: %s is not set, and there is no older tag: %v",
				upgradesFrom, err)
			return thisTree
		}
		commit = strings.TrimSpace(tag)
	}
	root, err := filepath.Abs(thisTree)
	if err != nil {
		t.Fatal(err)
	}
	tree := filepath.Join(t.TempDir(), "older")
	// A clone and no worktree: a test that is killed leaves nothing in the repository. tools/release asks git for the
	// time of the commit.
	for _, args := range [][]string{
		{"clone", "--quiet", "--shared", "--no-checkout", root, tree},
		{"-C", tree, "checkout", "--quiet", "--detach", commit},
	} {
		if _, err := run(command(ctx, "git", args...), nil); err != nil {
			t.Fatalf("the older version %s (a shallow clone has none): %v", commit, err)
		}
	}
	t.Logf("the upgrade is from %s", commit)
	return tree
}

// manifests are the folders deployment of the trees of the versions.
type manifests map[string]string

// manifestsOf returns the manifests of both versions. An operator who installs a version has the manifests of this
// version: an older program refuses configurations with newer keys.
func manifestsOf(t *testing.T, older string) manifests {
	t.Helper()
	m := manifests{firstVersion: filepath.Join(older, "deployment"), nextVersion: deploy}
	for version, folder := range m {
		absolute, err := filepath.Abs(folder)
		if err != nil {
			t.Fatal(err)
		}
		m[version] = absolute
	}
	return m
}

// makeImages builds the images of two releases, and CoreDNS', and returns the images' files. The first release is made
// of the tree older.
func makeImages(ctx context.Context, t *testing.T, older string) []string {
	t.Helper()
	dir := t.TempDir()
	images := []string{makeImageOf(ctx, t, older, dir, firstVersion), makeImage(ctx, t, dir, nextVersion)}
	file := filepath.Join(dir, "coredns.tar")
	if _, err := run(command(ctx, "../cluster/image.sh", file, "docker.io/"+coreDNSImage,
		filepath.Join(clusterHome(t), "bin", "coredns")), nil); err != nil {
		t.Fatal(err)
	}
	return append(images, file)
}

// makeImage builds the image of a release of this tree, and returns its file, which is below dir.
func makeImage(ctx context.Context, t *testing.T, dir, version string) string {
	t.Helper()
	return makeImageOf(ctx, t, thisTree, dir, version)
}

// makeImageOf is makeImage for another tree. The tree's own tools/release builds it.
func makeImageOf(ctx context.Context, t *testing.T, tree, dir, version string) string {
	t.Helper()
	out := filepath.Join(dir, version)
	if _, err := run(command(ctx, "go", "-C", filepath.Join(tree, "tools/release"), "run", ".", "-out", out,
		"-version", version, "-snapshot", "-platforms", "linux/"+runtime.GOARCH), nil); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(out, "tunnel_"+version+"_image.tar")
}

// An installation is what the steps of TestInstall work on.
type installation struct {
	c      *cluster
	tool   tool
	before map[string]bool // the objects of the cluster before
}

// step is t.Run. When the step fails, it prints what the pods have logged.
func (i *installation) step(t *testing.T, name string, f func(t *testing.T)) bool {
	t.Helper()
	return i.c.step(t, name, func(t *testing.T) {
		t.Cleanup(func() {
			if !t.Failed() {
				return
			}
			// Through no tunnel: kubelets of NATed nodes cannot be asked, containerd's files can be read.
			logs, err := filepath.Glob(i.c.path("node/*/logs/pods/tunnel-*/*/*.log"))
			if err != nil {
				t.Error(err)
			}
			for _, file := range logs {
				if b, err := os.ReadFile(file); err == nil {
					t.Logf("%s:\n%s", file, tail(string(b), 20))
				}
			}
			// Callers reach the Service by kube-proxy. Its log says when it has written its rules.
			if b, err := os.ReadFile(i.c.path("log/" + controlNode + "-kube-proxy.log")); err == nil {
				t.Logf("kube-proxy of %s:\n%s", controlNode, tail(string(b), 100))
			}
			out, err := i.c.kubectl(context.Background(), "get", "pods,events", "-A", "-o", "wide")
			t.Logf("pods and events: %v\n%s", err, tail(out, 60))
		})
		f(t)
	})
}

// prepare marks the nodes as a user has to, starts what the verbs need, and looks at what there is.
func (i *installation) prepare(ctx context.Context, t *testing.T) {
	c := i.c
	_, err := c.kubectl(ctx, "taint", "node", controlNode, "node-role.kubernetes.io/control-plane=:NoSchedule")
	_, labelErr := c.kubectl(ctx, "label", "node", controlNode, "node-role.kubernetes.io/control-plane=")
	err = errors.Join(err, labelErr, c.script(ctx, "metrics-server.sh"))
	for _, n := range c.nodes {
		_, labelErr := c.kubectl(ctx, "label", "node", n, "node-role.kubernetes.io/edge=")
		err = errors.Join(err, labelErr, c.apply(ctx, "pods.yaml", "NODE", n))
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=60s", "pod", "--all"); err != nil {
		t.Fatal(err)
	}
	nowhere(ctx, t, c, "no route to host")
	if i.before, err = i.objects(ctx); err != nil {
		t.Fatal(err)
	}
}

// install installs the cloud, gives the edges its CA, installs the edges, and leads kube-apiserver to CoreDNS.
func (i *installation) install(ctx context.Context, t *testing.T) {
	c := i.c
	if err := i.tool.cloud(ctx, firstVersion); err != nil {
		t.Fatal(err)
	}
	i.isAt(ctx, t, firstVersion)
	level, err := c.kubectl(ctx, "get", "namespace", namespace, "-o",
		`jsonpath={.metadata.labels.pod-security\.kubernetes\.io/enforce}`)
	if err := want(err, level, "restricted"); err != nil {
		t.Errorf("Pod Security of the cloud's namespace: %v", err)
	}
	i.copyCA(ctx, t)
	if err := i.tool.edges(ctx, firstVersion); err != nil {
		t.Fatal(err)
	}
	i.ask(ctx, t, "tunnel-coredns")
}

// ask has kube-apiserver ask the name server behind a Service, and waits until each pod of the name server answers that
// the nodes' names lead to the cloud: to the Service for callers, or to a pod where no upgrade is in the way. A kubelet
// gives each pod the ConfigMap at another time, so that one pod may know a name, and the next one not yet.
func (i *installation) ask(ctx context.Context, t *testing.T, service string) {
	t.Helper()
	if err := i.c.script(ctx, "dns.sh", "forward", i.address(ctx, t, service)+":53"); err != nil {
		t.Fatal(err)
	}
	component := strings.TrimSuffix(strings.TrimPrefix(service, "tunnel-"), "-callers")
	for _, n := range i.c.nodes {
		eventually(ctx, t, 2*time.Minute, "the name of "+n+" to lead to the cloud", func(ctx context.Context) error {
			cloud := append(i.addresses(ctx, t, "cloud"), i.address(ctx, t, "tunnel-cloud-callers"))
			servers := []string{coreDNS}
			for _, address := range i.addresses(ctx, t, component) {
				servers = append(servers, address+":5353")
			}
			for _, server := range servers {
				address, err := lookup(ctx, server, n)
				if err == nil && !slices.Contains(cloud, address) {
					err = fmt.Errorf("%s leads to %s, want one of %s", n, address, cloud)
				}
				if err != nil {
					return fmt.Errorf("asking %s: %w", server, err)
				}
			}
			return nil
		})
	}
}

// copyCA gives the edges' namespace what edges verify the cloud with, as deployment/README.md says.
func (i *installation) copyCA(ctx context.Context, t *testing.T) {
	t.Helper()
	ca, err := i.c.kubectl(ctx, "get", "configmap", "tunnel-ca", "-n", namespace, "-o", `jsonpath={.data.ca\.crt}`)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := i.c.kubectl(ctx, "create", "namespace", edgeNamespace); err != nil {
		t.Fatal(err)
	}
	if _, err := i.c.kubectlIn(ctx, strings.NewReader(ca), "create", "configmap", "tunnel-ca", "-n", edgeNamespace,
		"--from-file=ca.crt=/dev/stdin"); err != nil {
		t.Fatal(err)
	}
}

// address returns the clusterIP of a Service in the cloud's namespace.
func (i *installation) address(ctx context.Context, t *testing.T, name string) string {
	t.Helper()
	address, err := i.c.kubectl(ctx, "get", "service", name, "-n", namespace, "-o", "jsonpath={.spec.clusterIP}")
	if err != nil {
		t.Fatal(err)
	}
	return address
}

// addresses returns the addresses of the ready pods of a component in the cloud's namespace.
func (i *installation) addresses(ctx context.Context, t *testing.T, component string) []string {
	t.Helper()
	out, err := i.c.kubectl(ctx, "get", "pods", "-n", namespace, "-l", "app.kubernetes.io/component="+component, "-o",
		`jsonpath={range .items[?(@.status.phase=="Running")]}{.status.podIP}{"\n"}{end}`)
	addresses := strings.Fields(out)
	if err != nil || len(addresses) == 0 {
		t.Fatalf("the pods of component %s: %q, %v", component, out, err)
	}
	return addresses
}

// works asks each verb of each node, and asserts that the pods of the cloud have carried it.
func (i *installation) works(ctx context.Context, t *testing.T) {
	opened := func() (sum float64) {
		for _, a := range i.addresses(ctx, t, "cloud") {
			m, err := rig.Metrics(a + ":" + cloudLog)
			if err != nil {
				t.Fatal(err)
			}
			sum += m["tunnel_conns_opened_total"]
		}
		return sum
	}
	before := opened()
	for _, n := range i.c.nodes {
		succeeds(ctx, t, i.c, n)
	}
	i.c.step(t, top.name, func(t *testing.T) { top.works(ctx, t, i.c) })
	if opened() == before {
		t.Error("the cloud has opened no conn: the verbs took another way")
	}
}

// plugin asks the cloud by `kubectl edgetunnel`, as an operator does who has only kubectl.
func (i *installation) plugin(ctx context.Context, t *testing.T) {
	program, err := rig.Build(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "kubectl-edgetunnel")
	if err = os.Symlink(program, link); err != nil {
		t.Fatal(err)
	}
	for _, n := range i.c.nodes {
		out, err := run(i.c.command(ctx, link, "ls", n), nil)
		if err != nil || !strings.Contains(out, "connected") {
			t.Errorf("ls %s: %q, %v", n, out, err)
		}
		if _, err = run(i.c.command(ctx, link, "-n", namespace, "ping", n), nil); err != nil {
			t.Errorf("ping %s: %v", n, err)
		}
	}
	missing := i.c.command(ctx, link, "ls", "no-such-node")
	if _, err = run(missing, nil); err == nil || missing.ProcessState.ExitCode() != 5 {
		t.Errorf("ls of an unknown node: %v", err)
	}

	out, err := os.Create(filepath.Join(t.TempDir(), "tap"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	tap := i.c.command(ctx, link, "tap", "-o", "json")
	tap.Stdout, tap.Stderr = out, os.Stderr
	if err = tap.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, 30*time.Second, "the tap to show a conn", func(ctx context.Context) error {
		succeeds(ctx, t, i.c, i.c.nodes[0])
		text, err := os.ReadFile(out.Name())
		if err == nil && !strings.Contains(string(text), i.c.nodes[0]) {
			err = fmt.Errorf("the tap prints %q", text)
		}
		return err
	})
	if err = errors.Join(tap.Process.Signal(os.Interrupt), tap.Wait()); err != nil {
		t.Errorf("the tap ends with %v", err)
	}
}

// isAt waits until all pods of the cloud run that version's image. The kubelet removes the last old one a moment later.
func (i *installation) isAt(ctx context.Context, t *testing.T, version string) {
	t.Helper()
	eventually(ctx, t, time.Minute, "all pods of the cloud to run "+version, func(ctx context.Context) error {
		out, err := i.c.kubectl(ctx, "get", "pods", "-n", namespace, "-l", "app.kubernetes.io/component=cloud",
			"--field-selector=status.phase=Running", "-o", "jsonpath={.items[*].spec.containers[0].image}")
		images := slices.Compact(strings.Fields(out))
		if err == nil && (len(images) != 1 || !strings.HasSuffix(images[0], "tunnel:"+version)) {
			err = fmt.Errorf("they run %q", out)
		}
		return err
	})
}

func (i *installation) upgrade(ctx context.Context, t *testing.T) {
	i.underLoad(ctx, t, func() error { return i.tool.cloud(ctx, nextVersion) })
	i.isAt(ctx, t, nextVersion)
	// An edge that is replaced takes its node's conns along: a new one is there within seconds.
	if err := i.tool.edges(ctx, nextVersion); err != nil {
		t.Fatal(err)
	}
	for _, n := range i.c.nodes {
		recovers(ctx, t, i.c, n)
	}
}

func (i *installation) rollback(ctx context.Context, t *testing.T) {
	i.underLoad(ctx, t, func() error { return i.tool.back(ctx) })
	i.isAt(ctx, t, firstVersion)
}

// underLoad changes the cloud while both nodes are asked all the time. No request may fail.
func (i *installation) underLoad(ctx context.Context, t *testing.T, change func() error) {
	t.Helper()
	i.jobGone(ctx, t)
	callers := i.address(ctx, t, "tunnel-cloud-callers") + ":10250"
	asks, stop := context.WithCancel(ctx)
	defer stop()
	asked := make([]int, len(i.c.nodes))
	dialled := make([]int, len(i.c.nodes))
	var wg sync.WaitGroup
	again := func(node string, count *int, pause time.Duration, ask func(ctx context.Context) error) {
		wg.Go(func() {
			for ; asks.Err() == nil; time.Sleep(pause) {
				ctx, cancel := within(ctx, gone)
				began := time.Now()
				if err := ask(ctx); err != nil {
					t.Errorf("request %d to %s, from %s on, %v: %v",
						*count, node, began.Format(time.StampMilli), time.Since(began), err)
				}
				cancel()
				*count++
			}
		})
	}
	for at, n := range i.c.nodes {
		again(n, &asked[at], 0, func(ctx context.Context) error {
			return errors.Join(tryExec(ctx, i.c, n), tryLogs(ctx, i.c, n))
		})
		// kube-apiserver keeps its connections for later requests; these are new ones.
		again(n, &dialled[at], 50*time.Millisecond, func(ctx context.Context) error { return handshake(ctx, callers, n) })
	}
	began := time.Now()
	err := change()
	took := time.Since(began)
	// Replicas that were replaced drain for 25 s; the Service must not lead to them then.
	if err == nil {
		select {
		case <-time.After(40 * time.Second):
		case <-ctx.Done():
		}
	}
	stop()
	wg.Wait()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the change took %v; %d rounds of exec and logs, %d handshakes", took.Round(time.Millisecond), asked, dialled)
	if slices.Min(slices.Concat(asked, dialled)) < 20 {
		t.Error("fewer than 20 rounds prove nothing")
	}
}

// handshake connects to the kubelet of a node, as kube-apiserver does: by the Service for callers.
func handshake(ctx context.Context, callers, node string) error {
	d := tls.Dialer{Config: &tls.Config{
		ServerName: node, InsecureSkipVerify: true, //nolint:gosec // kubelets sign their certificates themselves
	}}
	c, err := d.DialContext(ctx, "tcp", callers)
	if err != nil {
		return fmt.Errorf("a TLS connection to the kubelet: %w", err)
	}
	return c.Close()
}

// jobGone waits until Kubernetes has removed the finished Job: an unfinished one cannot be changed.
func (i *installation) jobGone(ctx context.Context, t *testing.T) {
	t.Helper()
	_, err := i.c.kubectl(ctx, "wait", "--for=delete", "job/tunnel-init", "-n", namespace, "--timeout=120s")
	if err != nil {
		t.Fatal(err)
	}
}

// remove asserts that no object stays, and that nothing leads to the nodes any more.
func (i *installation) remove(ctx context.Context, t *testing.T) {
	if err := i.tool.remove(ctx); err != nil {
		t.Fatal(err)
	}
	i.nothingLeft(ctx, t)
	fails(ctx, t, i.c, "edge1", verbs, gone)
}

// nothingLeft waits until the cluster has the objects of before, and no others.
func (i *installation) nothingLeft(ctx context.Context, t *testing.T) {
	t.Helper()
	eventually(ctx, t, time.Minute, "the objects to be as before", func(ctx context.Context) error {
		objects, err := i.objects(ctx)
		if err != nil {
			return err
		}
		var left []string
		for object := range objects {
			if !i.before[object] {
				left = append(left, object)
			}
		}
		if len(left) > 0 {
			slices.Sort(left)
			return fmt.Errorf("left:\n%s", strings.Join(left, "\n"))
		}
		return nil
	})
}

// objects returns "KIND NAMESPACE/NAME" of every object of the cluster, but of kinds that Kubernetes makes by itself.
func (i *installation) objects(ctx context.Context) (map[string]bool, error) {
	kinds, err := i.c.kubectl(ctx, "api-resources", "--verbs=list,delete", "-o", "name")
	if err != nil {
		return nil, err
	}
	own := slices.DeleteFunc(strings.Fields(kinds), func(kind string) bool {
		name, group, _ := strings.Cut(kind, ".")
		return name == "events" || group == "metrics.k8s.io"
	})
	out, err := i.c.kubectl(ctx, "get", strings.Join(own, ","), "-A", "-o", "json")
	if err != nil {
		return nil, err
	}
	var list struct {
		Items []struct {
			Kind     string
			Metadata struct{ Namespace, Name string }
		}
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return nil, err
	}
	objects := make(map[string]bool)
	for _, item := range list.Items {
		if item.Metadata.Namespace == "kube-node-lease" {
			continue // of the kubelets
		}
		objects[item.Kind+" "+item.Metadata.Namespace+"/"+item.Metadata.Name] = true
	}
	return objects, nil
}

// settled waits until a workload is as it was last described.
func (c *cluster) settled(ctx context.Context, namespace, workload string) error {
	_, err := c.kubectl(ctx, "rollout", "status", workload, "-n", namespace, "--timeout=120s")
	return err
}

// podSecurity has Kubernetes enforce a level of Pod Security in a namespace.
func (c *cluster) podSecurity(ctx context.Context, namespace, level string) error {
	_, err := c.kubectl(ctx, "label", "--overwrite", "namespace", namespace, "pod-security.kubernetes.io/enforce="+level)
	return err
}

// removeNamespaces removes what the program itself has created: Secret, ConfigMaps and Lease are in the namespaces.
func (c *cluster) removeNamespaces(ctx context.Context) error {
	_, err := c.kubectl(ctx, "delete", "namespace", edgeNamespace, namespace, "--ignore-not-found", "--timeout=120s")
	return err
}

// A kustomize is an overlay of the user's own on the repository's overlays. Its fields are set once, but for applied.
type kustomize struct {
	c       *cluster
	dir     string
	from    manifests
	applied []string // the folders in dir that were applied, in this order
}

func newKustomize(_ context.Context, _ *testing.T, c *cluster, from manifests) tool {
	return &kustomize{c: c, dir: c.path("install"), from: from}
}

// overlay returns the path to an overlay of a version from a folder in dir: kustomize takes no absolute paths.
func (k *kustomize) overlay(version, name string) (string, error) {
	return filepath.Rel(filepath.Join(k.dir, "cloud"), filepath.Join(k.from[version], "kustomize/overlays", name))
}

// write writes the files of one of the user's folders and returns the folder.
func (k *kustomize) write(folder string, files map[string]string) (string, error) {
	dir := filepath.Join(k.dir, folder)
	err := os.MkdirAll(dir, 0o755)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), []byte(files[name]), 0o644))
	}
	k.applied = append(k.applied, dir)
	return dir, err
}

func (k *kustomize) cloud(ctx context.Context, version string) error {
	overlay, err := k.overlay(version, "ha")
	if err != nil {
		return err
	}
	dir, err := k.write("cloud-"+version, map[string]string{"kustomization.yaml": `resources: [` + overlay + `]
images: [{name: tunnel, newTag: ` + version + `}]
patches:
- target: {kind: Job, name: tunnel-init}
  patch: |-
    - {op: replace, path: /spec/template/spec/containers/0/args/1, value: "--address=` + joinAddress + `"}
`})
	if err != nil {
		return err
	}
	if _, err := k.c.kubectl(ctx, "apply", "-k", dir); err != nil {
		return err
	}
	return errors.Join(k.c.settled(ctx, namespace, "deployment/tunnel-cloud"),
		k.c.settled(ctx, namespace, "deployment/tunnel-coredns"))
}

func (k *kustomize) edges(ctx context.Context, version string) error {
	overlay, err := k.overlay(version, "edge-host-network")
	if err != nil {
		return err
	}
	config, err := os.ReadFile(filepath.Join(k.from[version], "kustomize/overlays/edge-host-network/edge.toml"))
	if err != nil {
		return err
	}
	const example = `"tunnel.example.com:9000"`
	if !strings.Contains(string(config), example) {
		return errors.New("edge.toml of the overlay names no " + example)
	}
	dir, err := k.write("edges-"+version, map[string]string{
		"edge.toml": strings.Replace(string(config), example, `"`+joinAddress+`"`, 1),
		"kustomization.yaml": `resources: [` + overlay + `]
images: [{name: tunnel, newTag: ` + version + `}]
configMapGenerator:
- {name: tunnel-edge, namespace: ` + edgeNamespace + `, behavior: replace, files: [edge.toml]}
generatorOptions: {disableNameSuffixHash: true}
`})
	if err != nil {
		return err
	}
	if _, err := k.c.kubectl(ctx, "apply", "-k", dir); err != nil {
		return err
	}
	return k.c.settled(ctx, edgeNamespace, "daemonset/tunnel-edge")
}

func (k *kustomize) back(ctx context.Context) error { return k.cloud(ctx, firstVersion) }

func (k *kustomize) remove(ctx context.Context) error {
	var errs []error
	for _, dir := range slices.Backward(k.applied) { // an older version may lack an object of a newer one
		_, err := k.c.kubectl(ctx, "delete", "-k", dir, "--ignore-not-found", "--timeout=120s")
		errs = append(errs, err)
	}
	return errors.Join(errors.Join(errs...), k.c.removeNamespaces(ctx))
}

// A helm is the command of that name, with two releases of the chart: tunnel and edges.
type helm struct {
	c       *cluster
	program string
	from    manifests
}

func newHelm(ctx context.Context, t *testing.T, c *cluster, from manifests) tool {
	t.Helper()
	return &helm{c: c, program: c.helm(ctx, t), from: from}
}

// helm returns Helm's program, which it builds once.
func (c *cluster) helm(ctx context.Context, t *testing.T) string {
	t.Helper()
	program := filepath.Join(c.home, "helm-"+helmVersion, "helm")
	if _, err := os.Stat(program); err != nil {
		install := command(ctx, "go", "install", "helm.sh/helm/v3/cmd/helm@"+helmVersion)
		install.Env = append(os.Environ(), "GOBIN="+filepath.Dir(program), "CGO_ENABLED=0", "GOFLAGS=-buildvcs=false")
		if _, err := run(install, nil); err != nil {
			t.Fatal(err)
		}
	}
	return program
}

// helmEnv keeps Helm's own files with the cluster's.
func (c *cluster) helmEnv() []string {
	dir := c.path("helm")
	return []string{"HELM_CACHE_HOME=" + dir, "HELM_CONFIG_HOME=" + dir, "HELM_DATA_HOME=" + dir}
}

func (h *helm) run(ctx context.Context, args ...string) error {
	cmd := h.c.command(ctx, h.program, args...)
	cmd.Env = append(cmd.Env, h.c.helmEnv()...)
	_, err := run(cmd, nil)
	return err
}

func (h *helm) cloud(ctx context.Context, version string) error {
	if version == firstVersion { // Helm makes no namespace with labels
		_, err := h.c.kubectl(ctx, "create", "namespace", namespace)
		if err := errors.Join(err, h.c.podSecurity(ctx, namespace, "restricted")); err != nil {
			return err
		}
	}
	chart := filepath.Join(h.from[version], "helm/tunnel")
	return h.run(ctx, "upgrade", "--install", "tunnel", chart, "-n", namespace, "--wait",
		"--timeout=3m", "-f", filepath.Join(chart, "ci/ha.yaml"), "--set", "certificates.address="+joinAddress,
		"--set", "image.tag="+version, "--set", "cloud.service.type=NodePort") // or --wait waits for a load balancer
}

func (h *helm) edges(ctx context.Context, version string) error {
	if err := h.c.podSecurity(ctx, edgeNamespace, "privileged"); err != nil { // hostNetwork
		return err
	}
	chart := filepath.Join(h.from[version], "helm/tunnel")
	return h.run(ctx, "upgrade", "--install", "edges", chart, "-n", edgeNamespace,
		"--wait", "--timeout=3m", "-f", filepath.Join(chart, "ci/edge-host-network.yaml"),
		"--set", "edge.config.stream.client.servername="+joinAddress, "--set", "image.tag="+version)
}

func (h *helm) back(ctx context.Context) error {
	return h.run(ctx, "rollback", "tunnel", "-n", namespace, "--wait", "--timeout=3m")
}

func (h *helm) remove(ctx context.Context) error {
	return errors.Join(h.run(ctx, "uninstall", "edges", "-n", edgeNamespace, "--wait"),
		h.run(ctx, "uninstall", "tunnel", "-n", namespace, "--wait"), h.c.removeNamespaces(ctx))
}

// TestOverlays has the real API server look at every overlay: schema, defaults and admission.
func TestOverlays(t *testing.T) {
	ctx := contextOf(t)
	c := upCluster(ctx, t)
	if err := c.apply(ctx, "crds.yaml"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.kubectl(ctx, "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all"); err != nil {
		t.Fatal(err)
	}
	overlays, err := filepath.Glob(filepath.Join(deploy, "kustomize/overlays/*/kustomization.yaml"))
	if err != nil || len(overlays) == 0 {
		t.Fatalf("no overlays: %v", err)
	}
	for _, file := range overlays {
		dir := filepath.Dir(file)
		t.Run(filepath.Base(dir), func(t *testing.T) {
			out, err := c.kubectl(ctx, "kustomize", dir)
			if err != nil {
				t.Fatal(err)
			}
			for _, object := range strings.Split(out, "\n---\n") { // a trial creates no namespace for what follows it
				if !strings.Contains("\n"+object, "\nkind: Namespace\n") {
					continue
				}
				if _, err := c.kubectlIn(ctx, strings.NewReader(object), "apply", "-f", "-"); err != nil {
					t.Fatal(err)
				}
			}
			p := c.command(ctx, "kubectl", "apply", "--dry-run=server", "--validate=strict", "-f", "-")
			p.Stdin = strings.NewReader(out)
			applied, err := start(p)
			if err != nil {
				t.Fatal(err)
			}
			<-applied.done
			if applied.err != nil {
				t.Fatal(applied.err)
			}
			for line := range strings.Lines(applied.stderr.String()) { // of Pod Security, or of deprecated fields
				if strings.HasPrefix(line, "Warning:") {
					t.Error(strings.TrimSpace(line))
				}
			}
		})
	}
	admin := newAdmin(t, c)
	t.Run("a privileged pod is refused", func(t *testing.T) { // or the level restricted proves nothing
		pod := map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]string{"name": "p"},
			"spec": map[string]any{"containers": []map[string]any{{"name": "p", "image": "p",
				"securityContext": map[string]bool{"privileged": true}}}}}
		err := admin.do(ctx, http.MethodPost, "/api/v1/namespaces/"+namespace+"/pods?dryRun=All", "application/json",
			pod, nil)
		if !isStatus(err, http.StatusForbidden) {
			t.Errorf("want status 403, got %v", err)
		}
	})
}
