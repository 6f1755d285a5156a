//go:build e2e

package e2e

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tunnel.example/tunnel/test/rig"
)

const (
	// recorded is how long TestRecord watches: the lines of the page need samples.
	recorded = 2 * time.Minute
	// pagePort is the port of the cloud's status page.
	pagePort = "9790"
)

// TestRecord keeps what the status page and the metrics of a cloud show while kubectl uses both nodes, and then while
// one node is missing. TUNNEL_E2E_RECORD names the folder. test/page makes the pictures: make e2e-pictures.
func TestRecord(t *testing.T) {
	dir := os.Getenv("TUNNEL_E2E_RECORD")
	if dir == "" {
		t.Skip("make e2e-pictures says where to record")
	}
	ctx := contextOf(t)
	program := binary(ctx, t)
	c := upCluster(ctx, t)
	preparePods(ctx, t, c)
	volume := c.mounted(ctx, t, "edge2")
	tn := newTunnel(ctx, t, c, program, volume)
	page := net.JoinHostPort("127.0.0.1", pagePort)
	tn.write(t, "cloud.toml", tn.read(t, "cloud.toml")+
		"\n[mode.cloud.admin]\ninventory = \"nodes.json\"\npage = \""+page+"\"\n")
	if err := c.script(ctx, "apiserver.sh", "kubelet-ca"); err != nil {
		t.Fatal(err)
	}
	if err := c.script(ctx, "dns.sh", "file", filepath.Join(volume, "hosts")); err != nil {
		t.Fatal(err)
	}
	tn.up(ctx, t, 30*time.Second)
	t.Cleanup(func() { tn.down(t) })

	watching, stop := context.WithCancel(ctx)
	ended := make(chan error, 1) // one send, which is waited for
	go func() { ended <- rig.Record(watching, dir, page, net.JoinHostPort(cloudIP, cloudLog)) }()
	for begun := time.Now(); time.Since(begun) < recorded*3/4; {
		for _, n := range c.nodes {
			for _, v := range verbs {
				if err := v.try(ctx, c, n); err != nil {
					t.Logf("%s of %s: %v", v.name, n, err)
				}
			}
		}
	}
	tn.edges["edge2"].kill(t)
	for begun := time.Now(); time.Since(begun) < recorded/4; {
		for _, v := range verbs {
			if err := v.try(ctx, c, "edge1"); err != nil {
				t.Logf("%s of edge1: %v", v.name, err)
			}
			t.Logf("logs of edge2, which are refused: %v", tryLogs(ctx, c, "edge2"))
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	tn.startEdge(ctx, t, "edge2")
}
