package relay

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Beside kube-proxy, connections to a Service with endpoints on this node and elsewhere go to the endpoints on this
// node, without the relay.
func TestMixed(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	p := newNode(t)
	s := &site{t: t, servers: newPod(t, "vethb", "10.88.2.1/24", "10.88.2.2/24", "fd00:88:2::1/64", "fd00:88:2::2/64")}
	s.servers.in(func() error {
		return setAddresses("eth0", "10.88.2.3/24", "10.88.2.4/24", "10.88.2.5/24",
			"fd00:88:2::3/64", "fd00:88:2::4/64", "fd00:88:2::5/64")
	})
	s.serve()
	c := newCloud()
	c.reach = echo(t)
	r, _ := newTestRelay(t, &linux{}, c)
	running := testkit.Run(t, r.Run)
	<-c.nexts
	changes := shop(t) // with endpoints of edge2
	near := []string{"10.88.2.2", "10.88.2.3", "fd00:88:2::2"}
	for _, addr := range near {
		changes.Set = append(changes.Set, item(t, services.EndpointPath("shop", "web", "near", addr), ready(addr, "edge1")))
	}
	c.batches <- batch(t, false, changes)
	<-c.nexts
	wantServing(t, r, 2) // all endpoints for UDP are here, so kube-proxy serves UDP
	s.want(p, web4.String(), 40, "10.88.1.2", near[:2]...)
	s.want(p, web6.String(), 5, "fd00:88:1::2", near[2])
	if got := c.targets(); len(got) != 0 {
		t.Errorf("the relay was asked for %v", got)
	}
	// A connection outlives the edge: the kernel has it alone.
	var conn net.Conn
	p.in(func() (err error) {
		conn, err = dialNow(web4)
		return err
	})
	defer conn.Close()
	lines := bufio.NewReader(conn)
	if _, err := lines.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	// Without endpoints here, new connections go through the tunnel.
	var gone []services.Path
	for _, addr := range near {
		gone = append(gone, services.EndpointPath("shop", "web", "near", addr))
	}
	c.batches <- batch(t, false, &pb.Changes{Deleted: gone})
	<-c.nexts
	testkit.Eventually(t, "the relay serves", func() bool {
		var far net.Conn
		if err := p.try(func() (err error) {
			far, err = dialNow(web4)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		defer far.Close()
		fmt.Fprintln(far, "hello")
		far.SetReadDeadline(time.Now().Add(10 * time.Second))
		line, err := bufio.NewReader(far).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return line == "hello\n"
	})
	running.Stop()
	fmt.Fprintln(conn, "x")
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if line, err := lines.ReadString('\n'); line != "x\n" {
		t.Errorf("after the edge, the connection to an endpoint here: %q, %v", line, err)
	}
	if got := tables(t); !slices.Equal(got, []string{"foreign", "kube-proxy"}) {
		t.Errorf("after the end, the tables are %v", got)
	}
}

// fullRelay returns a relay in place of kube-proxy.
func fullRelay(t *testing.T, c *cloud) *Relay {
	t.Helper()
	log, _ := testkit.NewLog()
	return newRelay(Config{
		Node: "edge1", File: filepath.Join(t.TempDir(), "services.db"), Full: true, Watch: c.watch, Reach: c.Reach,
		Counters: new(tunnel.Counters), Log: log,
	}, &linux{full: true})
}

// In place of kube-proxy, the edge relays Services whose endpoints are all elsewhere: at ClusterIPs, at node ports, and
// for UDP. After its end, endpoints on this node still answer, and connections to other endpoints are refused.
func TestFullFar(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	far := newFarNode(t)
	c, toEcho := newCloud(), echo(t)
	c.reach = func(target string) (net.Conn, error) {
		if strings.Contains(target, "UDP") {
			return far.reach(target)
		}
		return toEcho(target)
	}
	r := fullRelay(t, c)
	running := testkit.Run(t, r.Run)
	<-c.nexts
	elsewhere := datagramEndpoint("10.88.9.5", "edge2", 5353)
	elsewhere.Ports = append(elsewhere.Ports, &services.Port{Name: "http", Protocol: "TCP", Port: 8080})
	changes := s.service(siteService(func(s *services.Service) {
		s.ClusterIps, s.ExternalIps = s.ClusterIps[:1], []string{"203.0.113.5"}
	}), elsewhere)
	near := services.ServicePath("shop", "near")
	changes.Set = append(changes.Set,
		item(t, services.NodePath("edge1"), &services.Node{Edge: true, PodCidrs: []string{"10.88.0.0/16"}}),
		item(t, services.NodePath("edge2"), &services.Node{Edge: true}),
		item(t, near, &services.Service{ClusterIps: []string{"10.96.0.20"},
			Ports: []*services.Port{{Name: "http", Protocol: "TCP", Port: 80}}}),
		item(t, services.EndpointPath("shop", "near", "n", "10.88.2.2"), ready("10.88.2.2", "edge1")))
	c.batches <- batch(t, false, changes)
	<-c.nexts
	wantServing(t, r, 7)
	for _, one := range []struct {
		from *pod
		to   string
	}{
		{s.caller, "10.96.0.10:80"}, {s.caller, nodeIP + ":30080"}, {s.outside, nodeIP + ":30080"},
		{s.outside, "203.0.113.5:80"},
	} {
		var conn net.Conn
		if err := one.from.try(func() (err error) {
			conn, err = dialNow(netip.MustParseAddrPort(one.to))
			return err
		}); err != nil {
			t.Fatalf("%s: %v", one.to, err)
		}
		wantEcho(t, conn)
	}
	for _, one := range []struct {
		from *pod
		to   string
	}{{s.caller, "10.96.0.10:53"}, {s.outside, nodeIP + ":30053"}} {
		socket := one.from.socketIn(netip.MustParseAddrPort(one.to))
		if got := answered(t, socket, "hello"); got != "10.88.9.5 hello" {
			t.Errorf("%s: %q", one.to, got)
		}
	}
	s.want(s.caller, "10.96.0.20:80", 5, "10.88.1.2", "10.88.2.2")
	// The edge's own connections get endpoints here as well, but never the relay.
	own := net.Dialer{Timeout: 5 * time.Second, Control: Unredirected}
	if conn, err := own.Dial("tcp", "10.96.0.20:80"); err != nil {
		t.Errorf("the edge itself: %v", err)
	} else {
		conn.Close()
	}
	if conn, err := own.Dial("tcp", "10.96.0.10:80"); err == nil {
		conn.Close()
		t.Error("the edge connects to its own relay")
	}
	running.Stop()
	s.want(s.caller, "10.96.0.20:80", 5, "10.88.1.2", "10.88.2.2")
	s.wantRefused(s.caller, "10.96.0.10:80")
}

// The edge does not start beside kube-proxy's rules. It says so, and starts when they are gone.
func TestFullBesideKubeProxy(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	nat := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: "nat"}
	c.AddTable(nat)
	for _, name := range []string{"KUBE-KUBELET-CANARY", "KUBE-FIREWALL"} {
		c.AddChain(&nftables.Chain{Table: nat, Name: name})
	}
	if err := c.Flush(); err != nil {
		t.Skipf("the kernel has no nftables: %v", err)
	}
	if what, err := proxyRules(); what != "" || err != nil {
		t.Errorf("beside kubelet: %q, %v", what, err)
	}
	cloud := newCloud()
	r := fullRelay(t, cloud)
	r.every = 10 * time.Millisecond
	proxy := &nftables.Table{Family: nftables.TableFamilyINet, Name: "kube-proxy"}
	c.AddTable(proxy)
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	// An edge that runs no more has left its rules. They go, since they come before those of kube-proxy.
	if err := (&linux{full: true}).program(someListeners(1), nil); err != nil {
		t.Fatal(err)
	}
	testkit.Run(t, r.Run)
	<-cloud.nexts
	cloud.batches <- batch(t, false, shop(t))
	<-cloud.nexts
	testkit.Eventually(t, "the edge says what is wrong", func() bool {
		return strings.Contains(r.Note(), `the nftables table kube-proxy`)
	})
	if got := tables(t); slices.Contains(got, tableName) {
		t.Errorf("tables: %v", got)
	}
	c.DelTable(proxy)
	c.AddChain(&nftables.Chain{Table: nat, Name: "KUBE-SERVICES"})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the edge says what is wrong", func() bool {
		return strings.Contains(r.Note(), "the chain KUBE-SERVICES of iptables")
	})
	link := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "kube-ipvs0"}}
	if err := netlink.LinkAdd(link); err != nil {
		t.Logf("no link for ipvs: %v", err)
	}
	c.DelTable(nat)
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	if link.Attrs().Index > 0 {
		testkit.Eventually(t, "the edge says what is wrong", func() bool {
			return strings.Contains(r.Note(), "the link kube-ipvs0")
		})
		if err := netlink.LinkDel(link); err != nil {
			t.Fatal(err)
		}
	}
	testkit.Eventually(t, "the edge serves", func() bool {
		return r.Note() == "" && slices.Contains(tables(t), tableName)
	})
}

// If the file with the tables' names is missing, there are no rules. Any other error to read it is an error.
func TestLegacyTablesCannotBeRead(t *testing.T) {
	l := legacy4()
	l.tables = filepath.Join(t.TempDir(), "missing")
	if has, err := l.hasChain("KUBE-SERVICES"); has || err != nil {
		t.Errorf("without the file: %t, %v", has, err)
	}
	l.tables = t.TempDir()
	if _, err := l.hasChain("KUBE-SERVICES"); err == nil {
		t.Error("a file that cannot be read counts as no rules")
	}
}

// The edge reads the tables of iptables-legacy without making the kernel create a table.
func TestLegacyTables(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	for _, l := range []legacy{legacy4(), legacy6()} {
		before, err := os.ReadFile(l.tables)
		if err != nil {
			t.Skipf("the kernel has no iptables-legacy: %v", err)
		}
		if has, err := l.hasChain("KUBE-SERVICES"); has || err != nil {
			t.Errorf("a chain: %t, %v", has, err)
		}
		if now, err := os.ReadFile(l.tables); err != nil || string(now) != string(before) {
			t.Errorf("the tables are %q now, %v", now, err)
		}
	}
}
