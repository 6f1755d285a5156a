package relay

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
)

// A connection that waits for kube-proxy's choice, which no route reaches, gets an endpoint as soon as the relay serves
// the Service.
func TestPendingConnectionsAreRedirected(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	p := newNode(t)
	link, err := netlink.LinkByName("vethpod")
	if err != nil {
		t.Fatal(err)
	}
	// The host that kube-proxy's rules choose is silent, and no neighbour says that it is missing.
	err = netlink.NeighAdd(&netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT,
		IP: net.IPv4(10, 88, 1, 99), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 99}})
	if err != nil {
		t.Fatal(err)
	}
	conns := make(chan net.Conn, 1) // capacity 1: one dial
	go func() {
		var conn net.Conn
		err := testkit.OnThread(func() (err error) {
			if err = netns.Set(p.ns); err == nil {
				conn, err = (&net.Dialer{Timeout: time.Minute}).Dial("tcp", web4.String())
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
		conns <- conn
	}()
	pending := func() (n int) {
		all, err := conntrackEntries(familyOf(web4.Addr()), address{web4, protocolTCP})
		if err != nil {
			t.Skipf("the kernel has no conntrack: %v", err)
		}
		for _, entry := range all {
			f := flowOf(entry)
			if protocol, ok := mayForget(f); ok && protocol == protocolTCP && f.to == web4 {
				n++
			}
		}
		return n
	}
	testkit.Eventually(t, "the kernel knows the connection", func() bool { return pending() == 1 })
	c := newCloud()
	c.reach = echo(t)
	r, _ := newTestRelay(t, &linux{}, c)
	testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, false, shop(t))
	<-c.nexts
	conn := <-conns
	if conn == nil {
		t.Fatal("the connection fails")
	}
	wantEcho(t, conn)
}

// A Service is deleted after its edge was killed, and the file of the edge has never had it. Flows of that Service end
// nevertheless: the table of the killed process says what they may be.
func TestFlowsOfKilledProcess(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	s := newSite(t, true)
	s.apply(s.service(siteService(nil), ready("10.88.2.2", "edge1"), ready("fd00:88:2::2", "edge1")))
	clusterIP, nodePort := netip.MustParseAddrPort("10.96.0.10:53"), netip.MustParseAddrPort(nodeIP+":30053")
	for _, to := range []netip.AddrPort{clusterIP, nodePort} {
		if _, err := s.caller.socketIn(to).Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "the kernel knows the flow", func() bool { return tracked(t, to) == 1 })
	}
	next := &linux{full: true}
	if err := next.program(someListeners(2), nil); err != nil {
		t.Fatal(err)
	}
	if err := next.forget(nil, nil); err != nil {
		t.Fatal(err)
	}
	for _, to := range []netip.AddrPort{clusterIP, nodePort} {
		if n := tracked(t, to); n != 0 {
			t.Errorf("%d flows to %s are left", n, to)
		}
	}
}

// It is the same beside kube-proxy with flows to the relay of a killed process.
func TestRelayedFlowsOfKilledProcess(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	p := newNode(t)
	killed := &linux{}
	if _, err := killed.open(); err != nil {
		t.Fatal(err)
	}
	if err := killed.program(someListeners(1), rules{{log4, protocolUDP}: {port: 7}}); err != nil {
		t.Skipf("the kernel has no nftables: %v", err)
	}
	if _, err := p.socketIn(log4).Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the kernel knows the flow", func() bool { return tracked(t, log4) == 1 })
	next := &linux{}
	if err := next.program(someListeners(2), nil); err != nil {
		t.Fatal(err)
	}
	if err := next.forget(nil, nil); err != nil {
		t.Fatal(err)
	}
	if n := tracked(t, log4); n != 0 {
		t.Errorf("%d flows are left", n)
	}
}

// The kernel filters the entries by address, port and protocol, and returns only those that may be outdated.
func TestConntrackEntries(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	p := newNode(t)
	other := netip.AddrPortFrom(log4.Addr(), log4.Port()+1)
	k := &linux{}
	if _, err := k.open(); err != nil {
		t.Fatal(err)
	}
	all := rules{{log4, protocolUDP}: {port: 7}, {other, protocolUDP}: {port: 7}}
	if err := k.program(someListeners(1), all); err != nil {
		t.Skipf("the kernel has no nftables: %v", err)
	}
	for _, to := range []netip.AddrPort{log4, log4, other} {
		if _, err := p.socketIn(to).Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
	}
	testkit.Eventually(t, "the kernel knows the flows", func() bool { return tracked(t, log4)+tracked(t, other) == 3 })
	any4 := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.Addr{}, port) }
	for _, c := range []struct {
		to   address
		want []netip.AddrPort
	}{
		{address{log4, protocolUDP}, []netip.AddrPort{log4, log4}},
		{address{any4(other.Port()), protocolUDP}, []netip.AddrPort{other}},
		{address{protocol: protocolUDP}, []netip.AddrPort{log4, log4, other}},
		{address{log4, protocolTCP}, nil},
		{address{web4, protocolUDP}, nil},
	} {
		entries, err := conntrackEntries(familyOf(log4.Addr()), c.to)
		if err != nil {
			t.Fatal(err)
		}
		var got []netip.AddrPort
		for _, entry := range entries {
			got = append(got, flowOf(entry).to)
		}
		slices.SortFunc(got, netip.AddrPort.Compare)
		if !slices.Equal(got, c.want) {
			t.Errorf("flows to %v by %s: %v", c.to.AddrPort, c.to.protocol, got)
		}
	}
}

// No entry of an established connection is removed.
func TestOutdated(t *testing.T) {
	own := netip.AddrPortFrom(addr4, 7)
	o := outdated{after: rules{{web4, protocolTCP}: {port: 7}, {web4, protocolUDP}: {port: 7}}, own: addr4}
	for _, c := range []struct {
		name     string
		protocol uint8
		state    byte
		to, from netip.AddrPort // where the caller sends to, and where answers come from
		want     bool
	}{
		{"pending", unix.IPPROTO_TCP, 1, web4, log4, true},
		{"answered", unix.IPPROTO_TCP, 2, web4, log4, false},
		{"established", unix.IPPROTO_TCP, 3, web4, log4, false},
		{"closed", unix.IPPROTO_TCP, 7, web4, log4, false},
		{"without a state", unix.IPPROTO_TCP, 0, web4, log4, false},
		{"to the relay", unix.IPPROTO_TCP, 1, web4, own, false},
		{"to another address", unix.IPPROTO_TCP, 1, log4, web4, false},
		{"datagrams", unix.IPPROTO_UDP, 0, web4, log4, true},
		{"datagrams to the relay", unix.IPPROTO_UDP, 0, web4, own, false},
		{"another protocol", unix.IPPROTO_SCTP, 0, web4, log4, false},
	} {
		if got := o.matches(flow{c.protocol, c.state, c.to, c.from}); got != c.want {
			t.Errorf("%s: removed: %t", c.name, got)
		}
	}
}

// When kube-proxy gets a Service back, only flows to the relay end: it may use endpoints that the edge has used. In
// place of kube-proxy, nobody serves the Service any more.
func TestOutdatedBesideKubeProxy(t *testing.T) {
	end := netip.MustParseAddrPort("10.88.1.5:8080")
	for _, c := range []struct {
		name   string
		beside bool
		was    rule
		from   netip.AddrPort
		want   bool
	}{
		{"an endpoint", true, rule{kind: toEnds, ends: []netip.AddrPort{end}}, end, false},
		{"an endpoint, in its place", false, rule{kind: toEnds, ends: []netip.AddrPort{end}}, end, true},
		{"the relay", true, rule{port: 7}, netip.AddrPortFrom(addr4, 7), true},
		{"elsewhere", true, rule{port: 7}, end, false},
	} {
		o := outdated{before: rules{{web4, protocolUDP}: c.was}, own: addr4, beside: c.beside}
		if got := o.matches(flow{protocol: unix.IPPROTO_UDP, to: web4, leads: c.from}); got != c.want {
			t.Errorf("%s: removed: %t", c.name, got)
		}
	}
}

// A change looks at conntrack only if flows may lead elsewhere now.
func TestOutdates(t *testing.T) {
	at := address{web4, protocolUDP}
	a, b := netip.MustParseAddrPort("10.88.1.5:1"), netip.MustParseAddrPort("10.88.1.6:1")
	ends := func(all ...netip.AddrPort) rule { return rule{kind: toEnds, ends: all} }
	for name, c := range map[string]struct {
		before, after *rule
		want          bool
	}{
		"new":               {nil, &rule{kind: toEnds}, true},
		"gone":              {&rule{kind: toEnds}, nil, true},
		"an endpoint comes": {new(ends(a)), new(ends(a, b)), false},
		"an endpoint goes":  {new(ends(a, b)), new(ends(a)), true},
		"another endpoint":  {new(ends(a)), new(ends(b)), true},
		"for callers here": {new(ends(a)),
			&rule{kind: toSplit, inside: toEnds, ends: []netip.AddrPort{b}, local: []netip.AddrPort{a}}, false},
		"an endpoint drains": {new(ends(a, b)),
			&rule{kind: toEnds, ends: []netip.AddrPort{a}, serving: []netip.AddrPort{b}}, false},
		"an endpoint has drained": {&rule{kind: toEnds, ends: []netip.AddrPort{a}, serving: []netip.AddrPort{b}},
			new(ends(a)), true},
		"an endpoint of the relay still serves": {&rule{port: 7, relayServes: true},
			&rule{kind: toEnds, ends: []netip.AddrPort{a}, port: 7, relayServes: true}, false},
		"another relay": {&rule{port: 7, relayServes: true},
			&rule{kind: toEnds, ends: []netip.AddrPort{a}, port: 8, relayServes: true}, true},
		"none of the relay serves": {&rule{kind: toEnds, ends: []netip.AddrPort{a}, port: 7, relayServes: true},
			new(ends(a)), true},
		"from the relay": {&rule{port: 7}, new(ends(a)), true},
		"to the relay":   {new(ends(a)), &rule{port: 7}, true},
		"refused before": {&rule{kind: toReject}, new(ends(a)), true},
	} {
		before, after := make(rules), make(rules)
		if c.before != nil {
			before[at] = *c.before
		}
		if c.after != nil {
			after[at] = *c.after
		}
		if was, now := outdates(before, after); (len(was)+len(now) > 0) != c.want {
			t.Errorf("%s: %v, %v", name, was, now)
		}
	}
	about := rules{{netip.AddrPortFrom(web4.Addr(), 0), aboutClusterIP}: {kind: isClusterIP}}
	if was, now := outdates(about, nil); len(was)+len(now) > 0 {
		t.Errorf("a ClusterIP: %v, %v", was, now)
	}
}

// Nobody else sets the mark of the edge, or reads it.
func TestMark(t *testing.T) {
	for whose, bits := range map[string]uint32{
		"portmap": 0x2000, "kube-proxy": 0xc000, "Calico": 0xffff0000, "Cilium": 0x0f00, "Tailscale": 0xff0000,
		"AWS VPC CNI": 0x80, "Istio": 0x539, "WireGuard": 0xca6c,
	} {
		if mark&bits != 0 {
			t.Errorf("mark %#x has a bit of %s: %#x", mark, whose, bits)
		}
	}
}
