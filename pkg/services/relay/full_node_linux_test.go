package relay

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// removeDefaultRoutes removes the default routes of the calling thread's network.
func removeDefaultRoutes() error {
	for _, to := range []string{"0.0.0.0/0", "::/0"} {
		_, all, err := net.ParseCIDR(to)
		if err == nil {
			err = netlink.RouteDel(&netlink.Route{Dst: all})
		}
		if err != nil {
			return fmt.Errorf("%s: %w", to, err)
		}
	}
	return nil
}

// Endpoints that have no route back to the address that the kernel chooses for a connection of the node, by its default
// route, get the connection from an address that they reach.
func TestFullFromNode(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	s.servers.in(removeDefaultRoutes)
	s.apply(s.service(siteService(nil), ready("10.88.2.2", "edge1"), ready("fd00:88:2::2", "edge1")))
	s.want(nil, "10.96.0.10:80", 3, "10.88.2.1", "10.88.2.2")
	s.want(nil, "[fd00:96::10]:80", 3, "fd00:88:2::1", "fd00:88:2::2")
	wantDatagrams(t, "10.96.0.10:53", "10.88.2.1")
	wantDatagrams(t, "[fd00:96::10]:53", "fd00:88:2::1")
	own := net.Dialer{Timeout: 5 * time.Second, Control: Unredirected}
	c, err := own.Dial("tcp", "10.96.0.10:80")
	if err != nil {
		t.Fatalf("the edge itself: %v", err)
	}
	defer c.Close()
	if line, err := bufio.NewReader(c).ReadString('\n'); line != "10.88.2.2 10.88.2.1\n" {
		t.Errorf("the edge itself: %q, %v", line, err)
	}
}

// Without a default route, processes of the node reach ClusterIPs, and nothing else that they did not reach before.
// With one, the node's routes are as if there were no Services.
func TestFullWithoutDefaultRoute(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	uplink, err := netlink.LinkByName("uplink")
	if err != nil {
		t.Fatal(err)
	}
	s.apply(s.service(siteService(nil), ready("10.88.2.2", "edge1"), ready("fd00:88:2::2", "edge1")))
	clusterIPs := []string{"10.96.0.10", "fd00:96::10"}
	for _, to := range clusterIPs {
		if got, err := netlink.RouteGet(net.ParseIP(to)); err != nil || got[0].LinkIndex != uplink.Attrs().Index {
			t.Errorf("with a default route, the one to %s is %v, %v", to, got, err)
		}
	}
	if err := removeDefaultRoutes(); err != nil {
		t.Fatal(err)
	}
	s.want(nil, "10.96.0.10:80", 3, "10.88.2.1", "10.88.2.2")
	s.want(nil, "[fd00:96::10]:80", 3, "fd00:88:2::1", "fd00:88:2::2")
	wantDatagrams(t, "10.96.0.10:53", "10.88.2.1")
	wantDatagrams(t, "[fd00:96::10]:53", "fd00:88:2::1")
	for _, to := range clusterIPs {
		s.wantRefused(nil, net.JoinHostPort(to, "81"))
	}
	for _, to := range []string{"10.96.0.11:80", "[fd00:96::11]:80", "203.0.113.1:80"} {
		if _, _, err := connect(nil, to, 5*time.Second); !errors.Is(err, syscall.ENETUNREACH) {
			t.Errorf("%s, which is no ClusterIP: %v", to, err)
		}
	}

	// Another program removes a route.
	if err := netlink.RouteDel(routeTo(web4.Addr())); err != nil {
		t.Fatal(err)
	}
	if s.kernel.intact() {
		t.Error("without one of its routes, the table counts as intact")
	}
	own := s.plan.all()
	if err := errors.Join(s.kernel.program(someListeners(1), own), s.kernel.route(nil, own)); err != nil {
		t.Fatal(err)
	}
	// Another program removes the rule for IPv6.
	if err := netlink.RuleDel(tableRule()); err != nil {
		t.Fatal(err)
	}
	if s.kernel.intact() {
		t.Error("without the rule for IPv6, the table counts as intact")
	}
	// A route that fails is tried again, without a change of Services.
	delete(s.kernel.routes.has, web4.Addr())
	if err := errors.Join(netlink.RouteDel(routeTo(web4.Addr())), s.kernel.route(nil, nil)); err != nil {
		t.Fatal(err)
	}
	wantRoutes(t, clusterIPs...)
	// The next process knows another Service, and not the first one.
	other := address{netip.MustParseAddrPort("10.96.0.30:0"), aboutClusterIP}
	next := &linux{full: true}
	all := rules{other: {kind: isClusterIP}}
	if err := errors.Join(next.program(someListeners(3), all), next.route(nil, all)); err != nil {
		t.Fatal(err)
	}
	wantRoutes(t, "10.96.0.30")
	if !next.intact() {
		t.Error("the next process: not intact")
	}
	// An edge beside kube-proxy needs no routes.
	beside := &linux{}
	rest := planner{node: "edge1"}.plan(s.state).all()
	if err := errors.Join(beside.program(someListeners(4), rest), beside.route(nil, rest)); err != nil {
		t.Fatal(err)
	}
	wantRoutes(t)

	// An edge without Services removes them, and the rule for IPv6.
	s.kernel = next
	if err := errors.Join(next.program(someListeners(5), s.plan.all()), next.route(nil, s.plan.all())); err != nil {
		t.Fatal(err)
	}
	wantRoutes(t, clusterIPs...)
	log, _ := testkit.NewLog()
	RemoveRules(log)
	wantRoutes(t)
	rules, err := netlink.RuleList(netlink.FAMILY_V6)
	if err != nil || slices.ContainsFunc(rules, func(r netlink.Rule) bool { return r.Table == tableRule().Table }) {
		t.Errorf("the rules of IPv6 are %v, %v", rules, err)
	}
}

// The routes go with the Services.
func TestFullRoutesOfServices(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	wantRoutes(t)
	s.apply(s.service(siteService(nil), ready("10.88.2.2", "edge1")))
	wantRoutes(t, "10.96.0.10", "fd00:96::10")
	s.apply(s.service(siteService(func(s *services.Service) { s.ClusterIps = []string{"10.96.0.12"} })))
	wantRoutes(t, "10.96.0.12")
	s.apply(&pb.Changes{Deleted: []string{web}})
	wantRoutes(t)
}

// wantDatagrams checks that datagrams of the node get to an endpoint, and that it sees a caller.
func wantDatagrams(t *testing.T, to, caller string) {
	t.Helper()
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	answered(t, c, " "+caller) // an endpoint answers with its own address, and the caller's
}

// wantRoutes checks to which ClusterIPs the kernel has a route of ours.
func wantRoutes(t *testing.T, want ...string) {
	t.Helper()
	own, err := ownRoutes()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for addr := range own {
		got = append(got, addr.String())
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("the kernel has routes to %v, want %v", got, want)
	}
}
