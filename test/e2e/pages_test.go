//go:build e2e

package e2e

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/test/docs"
)

// TestPages types the blocks of the pages that are marked `<!-- cluster: SCENARIO MACHINE -->`, in the order of the
// page. The scenarios share one cluster, with a node behind NAT and a machine beside the control plane. Each scenario
// begins where nothing of tunnel is installed, and ends there. test/docs checks that the pages and this file have the
// same scenarios.
func TestPages(t *testing.T) {
	ctx := contextOf(t)
	p := newPages(ctx, t)
	for _, s := range []scenario{
		managed(), kubeadmByEgress(), kubeadmByNames(), inTenMinutes(), byKustomize(), byHelm(),
	} {
		ok := p.i.step(t, s.name, func(t *testing.T) {
			p.clone(t)
			var err error
			if p.i.before, err = p.i.objects(ctx); err != nil {
				t.Fatal(err)
			}
			p.run(ctx, t, s)
			p.i.nothingLeft(ctx, t)
			edges := p.kubectl(ctx, t, "get", "nodes", "-l", "node-role.kubernetes.io/edge", "-o", "name")
			if err := want(nil, edges, ""); err != nil {
				t.Errorf("nodes that still have the label: %v", err)
			}
		})
		if !ok {
			return // the next scenario would not begin where nothing is installed
		}
	}
}

// A scenario is typed from top to bottom. What a page says in words between two blocks is a moment.
type scenario struct {
	name    string
	moments []moment
	swaps   map[string]string // what a block says → what it is here; some block must say it
}

// A moment comes with each block that has its text. Some block must have the text.
type moment struct {
	text   string
	before func(ctx context.Context, t *testing.T, p *pages)
	after  func(ctx context.Context, t *testing.T, p *pages, output string)
}

// exampleAddress is the pages' address that edges dial (RFC 5737).
const exampleAddress = "203.0.113.10:30900"

// managed asks for logs where no tunnel is.
func managed() scenario {
	return scenario{
		name:  "managed",
		swaps: map[string]string{"POD": pod("edge1")},
		moments: []moment{{text: "logs POD", after: func(_ context.Context, t *testing.T, _ *pages, output string) {
			// This kube-apiserver prefers Hostname: the first row of the page's table.
			if !strings.Contains(output, `Get "https://edge1:10250/containerLogs/`) {
				t.Errorf("the error does not say what kube-apiserver dials: %s", output)
			}
		}}},
	}
}

// kubeadmByEgress has kubeadm itself write a manifest of kube-apiserver, as docs/kubeadm.md says. No kubelet runs the
// manifest: this cluster's kube-apiserver is no pod.
func kubeadmByEgress() scenario {
	return scenario{name: "kubeadm-egress", moments: []moment{
		{text: "control-plane apiserver", before: configures("egress-selector-config-file", false), after: writes(
			"--egress-selector-config-file=/etc/kubernetes/tunnel/egress.yaml", "--enable-aggregator-routing=true",
			"mountPath: /etc/kubernetes/tunnel", "path: /run/tunnel",
			// The page's table says the following of kubeadm.
			"--kubelet-preferred-address-types=InternalIP,ExternalIP,Hostname",
			"--kubelet-client-certificate=/etc/kubernetes/pki/apiserver-kubelet-client.crt", "hostNetwork: true")},
		{text: "upload-config", after: stores("egress-selector-config-file")},
	}}
}

// kubeadmByNames does the same for names.
func kubeadmByNames() scenario {
	return scenario{name: "kubeadm-names", moments: []moment{
		{text: "control-plane apiserver", before: configures("kubelet-preferred-address-types", true), after: writes(
			"--kubelet-preferred-address-types=Hostname,InternalIP,ExternalIP", "dnsPolicy: None", "- 10.0.0.5")},
		{text: "upload-config", after: stores("kubelet-preferred-address-types")},
	}}
}

// inTenMinutes is docs/kubernetes.md.
func inTenMinutes() scenario {
	return scenario{
		name:  "kubernetes",
		swaps: map[string]string{exampleAddress: joinAddress},
		moments: []moment{
			{text: "logs --tail=1 daemonset/tunnel-edge", before: asks("tunnel-cloud-callers"), after: reachesPods},
			{text: "kubectl delete -k", before: asksNobody},
		},
	}
}

// byKustomize is deployment/README.md. Once tunnel is installed, the pages that need this have their turn.
func byKustomize() scenario {
	return scenario{
		name:  "deployment-kustomize",
		swaps: map[string]string{exampleAddress: joinAddress},
		moments: []moment{
			{text: "logs --tail=1 daemonset/tunnel-edge", before: asks("tunnel-coredns"),
				after: func(ctx context.Context, t *testing.T, p *pages, output string) {
					reachesPods(ctx, t, p, output)
					p.run(ctx, t, installed())
					reachesPods(ctx, t, p, output)
				}},
			{text: "kubectl delete -k", before: asksNobody},
		},
	}
}

// byHelm is deployment/README.md, too.
func byHelm() scenario {
	return scenario{
		name:  "deployment-helm",
		swaps: map[string]string{exampleAddress: joinAddress},
		moments: []moment{
			{text: "logs --tail=1 daemonset/tunnel-edge", before: asks("tunnel-coredns"), after: reachesPods},
			{text: "helm uninstall", before: asksNobody},
		},
	}
}

// installed is what pages say where tunnel is installed by deployment/README.md: backup and restore, a look at a node,
// upgrade and rollback, a certificate for the cloud. It leaves the version that it has found.
func installed() scenario {
	return scenario{
		name:  "installed",
		swaps: map[string]string{"v0.2.0": nextVersion},
		moments: []moment{
			{text: "> cloud-backup.yaml", after: func(ctx context.Context, t *testing.T, p *pages, _ string) {
				p.kubectl(ctx, t, "delete", "secret", "tunnel-cloud", "-n", namespace)
			}},
			{text: "kubectl replace", after: secretIsBack},
			{text: "/proxy/healthz", before: startsSystemPod, after: seesSystemPod},
			{text: "set image", after: cloudIsAt(nextVersion)},
			{text: "rollout undo", after: cloudIsAt(firstVersion)},
			{text: "certificate approve", after: func(ctx context.Context, t *testing.T, p *pages, _ string) {
				verify := "openssl verify -purpose sslclient -CAfile " + p.c.path("pki/ca.crt") + " tls.crt"
				if _, err := p.shell(ctx, "control", verify); err != nil {
					t.Error(err)
				}
			}},
		},
	}
}

// asks has kube-apiserver ask a name server of the installation, which each page says in words.
func asks(service string) func(ctx context.Context, t *testing.T, p *pages) {
	return func(ctx context.Context, t *testing.T, p *pages) { p.i.ask(ctx, t, service) }
}

// asksNobody gives kube-apiserver its own names of the nodes again.
func asksNobody(ctx context.Context, t *testing.T, p *pages) {
	if err := p.c.script(ctx, "dns.sh", "kit"); err != nil {
		t.Fatal(err)
	}
}

// reachesPods is what the pages promise, for a pod of the user's own.
func reachesPods(ctx context.Context, t *testing.T, p *pages, _ string) {
	recovers(ctx, t, p.c, "edge1")
}

// secretIsBack asserts that the Secret, which was deleted, has the CA that edges verify the cloud with.
func secretIsBack(ctx context.Context, t *testing.T, p *pages, _ string) {
	public := p.kubectl(ctx, t, "get", "configmap", "tunnel-ca", "-n", namespace, "-o", `jsonpath={.data.ca\.crt}`)
	secret := p.kubectl(ctx, t, "get", "secret", "tunnel-cloud", "-n", namespace, "-o",
		`go-template={{index .data "ca.crt" | base64decode}}`)
	if err := want(nil, secret, public); err != nil {
		t.Errorf("the CA of the restored Secret: %v", err)
	}
}

// startsSystemPod puts a pod of kube-system on edge1, as clusters of kubeadm have kube-proxy there.
func startsSystemPod(ctx context.Context, t *testing.T, p *pages) {
	p.kubectl(ctx, t, "run", "system", "-n", "kube-system", "--image=e2e.local/busybox:1",
		`--overrides={"apiVersion":"v1","spec":{"nodeName":"edge1"}}`, "--command", "--",
		"sh", "-c", "echo of the system; exec tail -f /dev/null")
	p.kubectl(ctx, t, "wait", "--for=condition=Ready", "--timeout=60s", "pod/system", "-n", "kube-system")
}

func seesSystemPod(ctx context.Context, t *testing.T, p *pages, output string) {
	if output != "okof the system\n" { // what the kubelet's healthz says has no end of line
		t.Errorf("node proxy and logs print %q", output)
	}
	p.kubectl(ctx, t, "delete", "pod", "system", "-n", "kube-system", "--now")
}

// cloudIsAt asserts which version the cloud runs; the block itself waits for the rollout.
func cloudIsAt(version string) func(ctx context.Context, t *testing.T, p *pages, _ string) {
	return func(ctx context.Context, t *testing.T, p *pages, _ string) {
		image := p.kubectl(ctx, t, "get", "deployment/tunnel-cloud", "-n", namespace, "-o",
			"jsonpath={.spec.template.spec.containers[0].image}")
		if err := want(nil, image, "tunnel:"+version); err != nil {
			t.Errorf("the cloud's image: %v", err)
		}
	}
}

// configures gives kubeadm what the page has for a machine of the control plane: the ClusterConfiguration that has a
// flag, and for names the patch. Of the reader's own are the version, an address and a name.
func configures(flag string, patched bool) func(ctx context.Context, t *testing.T, p *pages) {
	return func(ctx context.Context, t *testing.T, p *pages) {
		version := p.c.kubernetes(ctx, t)
		config := p.yaml(t, "kind: ClusterConfiguration", flag) + "kubernetesVersion: " + version + "\n---\n"
		if patched {
			config += p.yaml(t, "kind: InitConfiguration", "patches")
		} else {
			config += "apiVersion: kubeadm.k8s.io/v1beta4\nkind: InitConfiguration\n"
		}
		const own = "localAPIEndpoint: {advertiseAddress: 10.77.0.1}\nnodeRegistration: {name: control}\n"
		for file, text := range map[string]string{
			"kubeadm.yaml":              config + own,
			"etc/kubernetes/admin.conf": p.kubectl(ctx, t, "config", "view", "--raw", "--flatten"),
			"etc/kubernetes/patches/kube-apiserver0+strategic.yaml": p.yaml(t, "kind: Pod", "dnsConfig"),
		} {
			file = filepath.Join(p.kubeadm, file)
			err := os.MkdirAll(filepath.Dir(file), 0o755)
			if err := errors.Join(err, os.WriteFile(file, []byte(text), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// writes asserts what stands in the manifest that kubeadm has written.
func writes(lines ...string) func(ctx context.Context, t *testing.T, p *pages, _ string) {
	return func(_ context.Context, t *testing.T, p *pages, _ string) {
		b, err := os.ReadFile(filepath.Join(p.kubeadm, "etc/kubernetes/manifests/kube-apiserver.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range lines {
			if !strings.Contains(string(b), line+"\n") {
				t.Errorf("the manifest has no line that ends in %q:\n%s", line, b)
			}
		}
		if strings.Contains(string(b), "--kubelet-certificate-authority") {
			t.Error("kubeadm has set --kubelet-certificate-authority, and the page says it does not")
		}
	}
}

// stores asserts that the cluster has the flag for the next upgrade, and removes what kubeadm has made.
func stores(flag string) func(ctx context.Context, t *testing.T, p *pages, _ string) {
	return func(ctx context.Context, t *testing.T, p *pages, _ string) {
		stored := p.kubectl(ctx, t, "get", "configmap/kubeadm-config", "-n", "kube-system", "-o",
			"jsonpath={.data.ClusterConfiguration}")
		if !strings.Contains(stored, flag) {
			t.Errorf("the stored ClusterConfiguration has no %s:\n%s", flag, stored)
		}
		p.kubectl(ctx, t, "delete", "configmap/kubeadm-config", "role/kubeadm:nodes-kubeadm-config",
			"rolebinding/kubeadm:nodes-kubeadm-config", "-n", "kube-system")
		p.kubectl(ctx, t, "delete", "clusterrolebinding/kubeadm:cluster-admins")
	}
}

// pages is where the blocks are typed. Its fields are set once, but for root.
type pages struct {
	c       *cluster
	i       *installation
	blocks  []docs.Block
	image   string // the file that the pages have from a release
	root    string // the folder in which everything is typed: a clone of the repository, one for each scenario
	bin     string // programs that the blocks call, besides those of the cluster
	path    string // PATH of the machine of the control plane
	kubeadm string // the root folder of that machine, for kubeadm alone
}

func newPages(ctx context.Context, t *testing.T) *pages {
	t.Helper()
	images := makeImages(ctx, t, thisTree)
	blocks, err := docs.All("../..")
	if err != nil {
		t.Fatal(err)
	}
	c := upCluster(ctx, t, "KUBEPROXY=1", "DIRECT="+controlNode, "NODES=edge1 "+controlNode)
	c.nodes = []string{"edge1"}
	for _, image := range images[1:] { // the pages import the first one
		if err := c.script(ctx, "load.sh", image); err != nil {
			t.Fatal(err)
		}
	}
	p := &pages{c: c, i: &installation{c: c}, blocks: blocks, image: images[0], bin: t.TempDir(), kubeadm: t.TempDir()}
	helm := filepath.Dir(c.helm(ctx, t))
	p.path = strings.Join([]string{p.bin, filepath.Join(c.home, "bin"), helm, os.Getenv("PATH")}, ":")
	p.script(t, "sudo", `exec "$@"`)
	// kubeadm writes to /etc/kubernetes only. It reads kubeadm.yaml in its root folder: chroot(2) changes to it.
	p.script(t, "kubeadm", "exec "+filepath.Join(c.home, "bin", "kubeadm")+" --rootfs="+p.kubeadm+` "$@"`)
	p.kubectl(ctx, t, "label", "node", controlNode, "node-role.kubernetes.io/control-plane=")
	if err := c.apply(ctx, "pods.yaml", "NODE", "edge1"); err != nil {
		t.Fatal(err)
	}
	p.kubectl(ctx, t, "wait", "--for=condition=Ready", "--timeout=60s", "pod", "--all")
	return p
}

// script adds a program to the machines.
func (p *pages) script(t *testing.T, name, command string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(p.bin, name), []byte("#!/bin/sh\n"+command+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

// clone makes the folder in which a scenario is typed: pages change files of the repository.
func (p *pages) clone(t *testing.T) {
	t.Helper()
	p.root = t.TempDir()
	err := os.CopyFS(filepath.Join(p.root, "deployment"), os.DirFS(deploy))
	err = errors.Join(err, os.Symlink(p.image, filepath.Join(p.root, "tunnel_"+firstVersion+"_image.tar")))
	if err != nil {
		t.Fatal(err)
	}
}

// run types all blocks of a scenario.
func (p *pages) run(ctx context.Context, t *testing.T, s scenario) {
	t.Helper()
	steps := docs.Steps(p.blocks, docs.Cluster, s.name)
	if len(steps) == 0 {
		t.Fatalf("no page has a block of the scenario %s", s.name)
	}
	unseen := make(map[string]bool)
	for text := range s.swaps {
		unseen[text] = true
	}
	for _, m := range s.moments {
		unseen[m.text] = true
	}
	for _, b := range steps {
		maps.DeleteFunc(unseen, func(text string, _ bool) bool { return strings.Contains(b.Text, text) })
		p.step(ctx, t, s, b)
	}
	for text := range unseen {
		t.Errorf("no block of the scenario %s says %q any more: change the test", s.name, text)
	}
}

// step types one block, with the moments before and after it.
func (p *pages) step(ctx context.Context, t *testing.T, s scenario, b docs.Block) {
	t.Helper()
	now := slices.DeleteFunc(slices.Clone(s.moments), func(m moment) bool { return !strings.Contains(b.Text, m.text) })
	for _, m := range now {
		if m.before != nil {
			m.before(ctx, t, p)
		}
	}
	var pairs []string
	for old, text := range s.swaps {
		pairs = append(pairs, old, text)
	}
	began := time.Now()
	out, err := p.shell(ctx, b.Machine, strings.NewReplacer(pairs...).Replace(b.Text))
	if _, failed := exitCode(err); b.Fails && failed {
		out, err = err.Error(), nil
	} else if b.Fails {
		t.Fatalf("%s: want an exit code other than 0, got %v and\n%s", b, err, out)
	}
	if err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	t.Logf("%s, %v:\n%s", b, time.Since(began).Round(time.Millisecond), out)
	for _, m := range now {
		if m.after != nil {
			m.after(ctx, t, p, out)
		}
	}
}

// shell types commands as a shell does: on the machine of the control plane ("control"), or on every other ("node").
func (p *pages) shell(ctx context.Context, machine, text string) (string, error) {
	ctx, cancel := within(ctx, 3*time.Minute)
	defer cancel()
	if machine == "control" {
		cmd := p.c.command(ctx, "/bin/bash", "-euo", "pipefail", "-c", text)
		cmd.Dir = p.root
		cmd.Env = append(append(cmd.Env, "PATH="+p.path), p.c.helmEnv()...)
		return run(cmd, nil)
	}
	// ctr takes overlayfs unless it is told otherwise; up.sh has chosen what the machine can do.
	snapshotter := "$(. " + p.c.path("settings") + "; echo $SNAPSHOTTER)"
	text = "export CONTAINERD_SNAPSHOTTER=" + snapshotter + "\ncd " + p.root + "\n" + text
	var all strings.Builder
	for _, n := range []string{"edge1", controlNode} {
		cmd := p.c.inside(ctx, n, "/bin/bash", "-euo", "pipefail", "-c", text)
		cmd.Env = append(cmd.Env, "PATH="+p.bin+":"+os.Getenv("PATH"))
		out, err := run(cmd, nil)
		if err != nil {
			return "", err
		}
		all.WriteString(out)
	}
	return all.String(), nil
}

// kubectl is a command of the test's own, which must succeed.
func (p *pages) kubectl(ctx context.Context, t *testing.T, args ...string) string {
	t.Helper()
	out, err := p.c.kubectl(ctx, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// yaml returns the YAML block of docs/kubeadm.md that has both texts.
func (p *pages) yaml(t *testing.T, texts ...string) string {
	t.Helper()
	found := slices.DeleteFunc(slices.Clone(p.blocks), func(b docs.Block) bool {
		return b.Page != "docs/kubeadm.md" || b.Lang != "yaml" ||
			slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(b.Text, text) })
	})
	if len(found) != 1 {
		t.Fatalf("docs/kubeadm.md has %d YAML blocks with %q, want one", len(found), texts)
	}
	return found[0].Text
}
