//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	bulkPort    = "5353"                   // of the pod of edge2, and of the Service bulk of testdata/services.yaml
	bulkService = "10.96.20.7:" + bulkPort // leads to the pod of edge2
	bulkDoor    = cloudIP + ":7100"        // the TCP front door that leads there

	rounds = 5 // of a measurement
)

// A download is what a server of the test sends to each caller.
type download struct {
	size int64
	sum  []byte // SHA-256
}

func newDownload(t *testing.T, size int64) download {
	t.Helper()
	d := download{size: size}
	sum := sha256.New()
	if _, err := io.Copy(sum, d.content()); err != nil {
		t.Fatal(err)
	}
	d.sum = sum.Sum(nil)
	return d
}

func (d download) content() io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{}), d.size) }

// serve listens in a network namespace until the test ends.
func (d download) serve(t *testing.T, netns, addr string) {
	t.Helper()
	server, err := openInside(netns, func() (net.Listener, error) { return net.Listen("tcp4", addr) })
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	t.Cleanup(func() { server.Close(); serving.Wait() })
	serving.Go(func() {
		for {
			conn, err := server.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer conn.Close()
				io.Copy(conn, d.content())
			})
		}
	})
}

// get downloads from addr to a network namespace, and returns how long it took.
func (d download) get(ctx context.Context, t *testing.T, netns, addr string) time.Duration {
	t.Helper()
	began := time.Now()
	conn, err := dialInside(ctx, netns, "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(time.Minute))
	sum := sha256.New()
	if n, err := io.Copy(sum, conn); err != nil || !bytes.Equal(sum.Sum(nil), d.sum) {
		t.Fatalf("from %s: %d bytes, or others, %v", addr, n, err)
	}
	return time.Since(began)
}

// fastest downloads from each address in turns, and returns the shortest time of each: this machine has other work.
func (d download) fastest(ctx context.Context, t *testing.T, netns string, addrs ...string) []time.Duration {
	t.Helper()
	best := slices.Repeat([]time.Duration{time.Hour}, len(addrs))
	for range rounds {
		for i, addr := range addrs {
			best[i] = min(best[i], d.get(ctx, t, netns, addr))
		}
	}
	return best
}

// podNetwork returns the network namespace of the pod of a node.
func (s *farServices) podNetwork(ctx context.Context, t *testing.T, node string) string {
	t.Helper()
	uid, err := s.c.kubectl(ctx, "get", "pod", "web-"+node, "-o", "jsonpath={.metadata.uid}")
	if err != nil {
		t.Fatal(err)
	}
	first := regexp.MustCompile(`(?m)^NSpid:.*\t1$`) // the first process of a container: it stays
	files, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		process := filepath.Dir(file)
		groups, _ := os.ReadFile(file) // the process may have ended
		status, _ := os.ReadFile(filepath.Join(process, "status"))
		if bytes.Contains(groups, []byte("/pod"+uid+"/")) && first.Match(status) {
			return filepath.Join(process, "ns/net")
		}
	}
	t.Fatalf("no container belongs to the pod of %s", node)
	return ""
}

// bulk has the pod of edge1 get 100 MiB from that of edge2 by a Service and by a TCP front door of the cloud, in turns.
// The log has the ratio of the two, and the processor time that each process needed: without links that are slower than
// this machine, the processors limit both.
func (s *farServices) bulk(ctx context.Context, t *testing.T) {
	d := newDownload(t, 100<<20)
	d.serve(t, s.podNetwork(ctx, t, "edge2"), ":"+bulkPort)
	caller := s.podNetwork(ctx, t, "edge1")
	ways := []string{bulkService, bulkDoor}
	took := make([]time.Duration, len(ways))
	used := []map[string]time.Duration{{}, {}} // processor time, by process
	for range rounds {
		for i, addr := range ways {
			before := s.processorTimes(t)
			took[i] += d.get(ctx, t, caller, addr)
			for name, now := range s.processorTimes(t) {
				used[i][name] += now - before[name]
			}
		}
	}
	t.Logf("500 MiB by the Service took %v, by the TCP front door %v: %.2f of its throughput",
		took[0].Round(time.Millisecond), took[1].Round(time.Millisecond), took[1].Seconds()/took[0].Seconds())
	for i, addr := range ways {
		var each []string
		for _, name := range slices.Sorted(maps.Keys(used[i])) {
			each = append(each, fmt.Sprintf("%s %.2f", name, used[i][name].Seconds()*(1<<30)/float64(rounds*d.size)))
		}
		t.Logf("seconds of processor time per GiB from %s: %s", addr, strings.Join(each, ", "))
	}
}

// processorTimes returns the processor time that cloud, edges and this test have used so far.
func (s *farServices) processorTimes(t *testing.T) map[string]time.Duration {
	t.Helper()
	pids := map[string]int{"cloud": s.tn.cloud.cmd.Process.Pid, "test": os.Getpid()}
	for node, edge := range s.tn.edges {
		pid, err := edge.inside()
		if err != nil {
			t.Fatal(err)
		}
		pids[node] = pid
	}
	used := make(map[string]time.Duration)
	for name, pid := range pids {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := bytes.Cut(stat, []byte(") "))
		fields := strings.Fields(string(rest)) // from the third on; see proc(5)
		for _, field := range fields[11:13] {  // utime and stime, in hundredths of a second
			ticks, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			used[name] += time.Duration(ticks) * 10 * time.Millisecond
		}
	}
	return used
}

// shape has a link send at most rate bits per second until the test ends.
func shape(ctx context.Context, t *testing.T, netns, link string, rate int) {
	t.Helper()
	tc := func(ctx context.Context, args ...string) error {
		if netns != "" {
			args = append([]string{"-n", netns}, args...)
		}
		_, err := run(command(ctx, "tc", args...), nil)
		return err
	}
	if err := tc(ctx, "qdisc", "add", "dev", link, "root", "tbf", "rate", fmt.Sprintf("%dbit", rate), "burst", "128kb",
		"limit", "1mb"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tc(context.WithoutCancel(ctx), "qdisc", "del", "dev", link, "root"); err != nil {
			t.Error(err)
		}
	})
}

// slowUplinks slows down the uplinks of both nodes, so that they, and not the processors of this machine, limit
// connections. Through the relay, a pod of edge1 then gets at least 0.8 of the throughput of the TCP front door.
func (s *farServices) slowUplinks(ctx context.Context, t *testing.T) {
	const rate = 200e6
	for _, node := range []string{"1", "2"} {
		shape(ctx, t, "te2e-r"+node, "eth0", rate) // from the node
		shape(ctx, t, "", "te2ev"+node, rate)      // to the node
	}
	d := newDownload(t, 16<<20)
	d.serve(t, s.podNetwork(ctx, t, "edge2"), ":"+bulkPort)
	best := d.fastest(ctx, t, s.podNetwork(ctx, t, "edge1"), bulkService, bulkDoor)
	service, door := best[0], best[1]
	ratio := door.Seconds() / service.Seconds()
	t.Logf("16 MiB over uplinks of %.0f Mbit/s: %v by the Service, %v by the TCP front door: %.2f of its throughput",
		rate/1e6, service.Round(time.Millisecond), door.Round(time.Millisecond), ratio)
	if least := time.Duration(0.9 * float64(8*d.size) / rate * float64(time.Second)); min(service, door) < least {
		t.Fatalf("the uplinks are not slow: the least time is %v", least)
	}
	if ratio < 0.8 {
		t.Error("the relay is too slow")
	}
}

// sameSite gives both nodes a LAN of 100 Mbit/s beside their uplinks, and their edges certificates. Connections to the
// Service of edge2 then take the LAN, without the cloud too: 4 MiB take at most 1.5 times as long as directly. Through
// the cloud, they go on when the LAN is cut.
func (s *farServices) sameSite(ctx context.Context, t *testing.T) {
	const rate, direct = 100e6, "10.79.0.2:" + bulkPort // direct is edge2 in the LAN
	site := s.site(ctx, t)
	for _, node := range s.c.nodes {
		shape(ctx, t, "te2e-"+node, "site", rate)
	}
	s.nearEdges(ctx, t)

	d := newDownload(t, 4<<20)
	d.serve(t, s.podNetwork(ctx, t, "edge2"), ":"+bulkPort)
	d.serve(t, "/run/netns/te2e-edge2", direct)
	caller := s.podNetwork(ctx, t, "edge1")
	before := s.ways(ctx, t)
	best := d.fastest(ctx, t, caller, bulkService, direct)
	t.Logf("4 MiB over a LAN of %.0f Mbit/s: %v by the Service, %v directly: %.2f", rate/1e6,
		best[0].Round(time.Millisecond), best[1].Round(time.Millisecond), best[0].Seconds()/best[1].Seconds())
	if best[1] < 250*time.Millisecond {
		t.Fatal("the LAN is not shaped")
	}
	if 2*best[0] > 3*best[1] {
		t.Error("the shortcut is too slow")
	}
	// On a busy machine, a handshake may take so long that a connection goes by the cloud. The best one took the LAN.
	if s.ways(ctx, t)["near"] == before["near"] {
		t.Error("no connection of the measurement took the LAN")
	}

	s.tn.cloud.kill(t)
	s.takes(ctx, t, "without the cloud", "near", "cloud")
	s.tn.startCloud(ctx, t)
	for _, node := range s.c.nodes { // the Services answer already
		eventually(ctx, t, time.Minute, "edge "+node+" to be ready", func(ctx context.Context) error {
			return s.tn.edgeReady(ctx, node)
		})
	}

	site("set", "site", "down")
	s.takes(ctx, t, "without the LAN", "cloud", "near")
}

// takes waits until a connection to the Service of edge2 takes one way, and not the other. It may be later: an edge
// does not try the LAN for a while after a slow handshake.
func (s *farServices) takes(ctx context.Context, t *testing.T, what, way, other string) {
	t.Helper()
	eventually(ctx, t, time.Minute, what+", a connection to take the way "+way, func(ctx context.Context) error {
		before := s.ways(ctx, t)
		if _, err := s.fromPod(ctx, "edge1", "edge2"); err != nil {
			return err
		}
		now := s.ways(ctx, t)
		if now[way] != before[way]+1 || now[other] != before[other] {
			return fmt.Errorf("the edge has counted %v, and %v before", now, before)
		}
		return nil
	})
}

// site connects both nodes by a LAN of their own, over which each reaches the address of the other one. It returns a
// function that runs ip link on edge1.
func (s *farServices) site(ctx context.Context, t *testing.T) func(args ...string) {
	t.Helper()
	ip := func(args ...string) {
		t.Helper()
		if _, err := run(command(ctx, "ip", args...), nil); err != nil {
			t.Fatal(err)
		}
	}
	ip("-n", "te2e-edge1", "link", "add", "site", "type", "veth", "peer", "name", "site", "netns", "te2e-edge2")
	lan := map[string]string{"edge1": "10.79.0.1", "edge2": "10.79.0.2"}
	for node, addr := range lan {
		ip("-n", "te2e-"+node, "address", "add", addr+"/24", "dev", "site")
		ip("-n", "te2e-"+node, "link", "set", "site", "up")
	}
	ip("-n", "te2e-edge1", "route", "add", s.internalIP(ctx, t, "edge2"), "via", lan["edge2"])
	ip("-n", "te2e-edge2", "route", "add", s.internalIP(ctx, t, "edge1"), "via", lan["edge1"])
	if _, err := s.c.kubectl(ctx, "label", "nodes", "edge1", "edge2", "topology.kubernetes.io/zone=site"); err != nil {
		t.Fatal(err)
	}
	return func(args ...string) { t.Helper(); ip(append([]string{"-n", "te2e-edge1", "link"}, args...)...) }
}

// nearEdges starts cloud and edges again, with certificates in place of tokens. The edges use the LAN.
func (s *farServices) nearEdges(ctx context.Context, t *testing.T) {
	t.Helper()
	s.tn.down(t)
	ca := s.c.path("pki/ca.crt")
	s.tn.write(t, "cloud.toml", s.tn.read(t, "cloud.toml")+"\n[mode.cloud.join]\nca = \""+ca+"\"\n")
	token := regexp.MustCompile(`(?m)^token = .*$`)
	for _, node := range s.c.nodes {
		s.c.leaf(ctx, t, "-name", "node-"+node, "-cn", "tunnel:node:"+node, "-org", "tunnel:nodes", "-client")
		file := s.c.path("pki/node-" + node)
		text := token.ReplaceAllString(s.tn.read(t, node+".toml"),
			fmt.Sprintf("nodecert = %q\nnodekey = %q", file+".crt", file+".key"))
		s.tn.write(t, node+".toml", strings.Replace(text, "[mode.edge.services]\n",
			fmt.Sprintf("[mode.edge.services]\nnear = \"0.0.0.0:9443\"\nnearca = %q\n", ca), 1))
	}
	s.tn.startCloud(ctx, t)
	for _, node := range s.c.nodes {
		s.tn.startEdge(ctx, t, node)
	}
	s.all(ctx, t, time.Minute)
	before := s.ways(ctx, t)
	eventually(ctx, t, time.Minute, "a connection over the LAN", func(ctx context.Context) error {
		out, err := s.fromPod(ctx, "edge1", "edge2")
		if err := want(err, out, "web-edge2"); err != nil {
			return err
		}
		if s.ways(ctx, t)["near"] == before["near"] {
			return errors.New("it took the cloud")
		}
		return nil
	})
}

// ways returns how many connections the edge of edge1 has opened to endpoints on other nodes, by way: near or cloud.
func (s *farServices) ways(ctx context.Context, t *testing.T) map[string]int {
	t.Helper()
	status, body, err := s.c.getInside(ctx, "edge1", "http://127.0.0.1:"+edgeLog+"/metrics")
	if err := is200(status, body, err); err != nil {
		t.Fatal(err)
	}
	counts := make(map[string]int)
	for _, m := range regexp.MustCompile(`(?m)^tunnel_services_way_conns_total{way="(near|cloud)"} (\d+)$`).
		FindAllStringSubmatch(body, -1) {
		counts[m[1]], _ = strconv.Atoi(m[2])
	}
	if len(counts) != 2 {
		t.Fatalf("the edge does not count the ways of connections:\n%s", body)
	}
	return counts
}
