//go:build e2e && pages

package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/test/docs"
)

// TestKubernetesPage types the commands of docs/kubernetes.md, in its order, where nothing is installed yet. The page
// says in words how to configure kube-apiserver; the test does that before the last block.
func TestKubernetesPage(t *testing.T) {
	ctx := contextOf(t)
	images := makeImages(ctx, t)
	c := upCluster(ctx, t, "KUBEPROXY=1", "DIRECT="+controlNode, "NODES=edge1 edge2 "+controlNode)
	for _, image := range images {
		if err := c.script(ctx, "load.sh", image); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.kubectl(ctx, "label", "node", controlNode, "node-role.kubernetes.io/control-plane="); err != nil {
		t.Fatal(err)
	}
	root := t.TempDir() // the page changes a file of the repository
	if err := os.CopyFS(filepath.Join(root, "deployment"), os.DirFS(deploy)); err != nil {
		t.Fatal(err)
	}
	blocks, err := docs.All("../..")
	if err != nil {
		t.Fatal(err)
	}
	steps := docs.Steps(blocks, docs.Cluster, "kubernetes")
	if len(steps) < 2 {
		t.Fatalf("the scenario kubernetes has %d blocks", len(steps))
	}
	i := &installation{c: c}
	for at, b := range steps {
		if at == len(steps)-1 {
			if err := c.script(ctx, "dns.sh", "forward", i.addresses(ctx, t, "cloud")[0]+":5353"); err != nil {
				t.Fatal(err)
			}
			eventually(ctx, t, 30*time.Second, "the name of edge1 to lead to the cloud", func(ctx context.Context) error {
				_, err := lookup(ctx, coreDNS, "edge1")
				return err
			})
		}
		// The example address of the control-plane machine (RFC 5737) becomes the one of ours.
		text := strings.ReplaceAll(b.Text, "203.0.113.10:30900", joinAddress)
		cmd := c.command(ctx, "/bin/bash", "-euo", "pipefail", "-c", text)
		cmd.Dir = root
		cmd.Env = append(cmd.Env, "PATH="+filepath.Join(c.home, "bin")+":"+os.Getenv("PATH"))
		out, err := run(cmd, nil)
		if err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		t.Logf("%s:\n%s", b, out)
	}
	if err := c.apply(ctx, "pods.yaml", "NODE", "edge1"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=60s", "pod", "--all"); err != nil {
		t.Fatal(err)
	}
	recovers(ctx, t, c, "edge1") // what the page promises, for a pod of the user's own
}
