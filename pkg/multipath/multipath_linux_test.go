package multipath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// uplink makes a network device with an address and a default route.
func uplink(t *testing.T, name, address string, metric int) netlink.Link {
	t.Helper()
	// A device of a pair runs when both are up.
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-peer"}
	if err := netlink.LinkAdd(pair); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{name, name + "-peer"} {
		l, err := netlink.LinkByName(n)
		if err == nil {
			err = netlink.LinkSetUp(l)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	addr, err := netlink.ParseAddr(address)
	if err == nil {
		err = netlink.AddrAdd(l, addr)
	}
	if err == nil && metric > 0 {
		everything := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
		err = netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: everything, Priority: metric})
	}
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// endpoints returns the addresses that the kernel has been told, in order.
func endpoints(t *testing.T) (addrs []string) {
	t.Helper()
	all, err := list()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range all {
		addrs = append(addrs, l.addr.String())
	}
	slices.Sort(addrs)
	return addrs
}

func wantEndpoints(t *testing.T, what string, want ...string) {
	t.Helper()
	testkit.Eventually(t, what, func() bool { return slices.Equal(endpoints(t), want) })
}

// Each address of an uplink is an endpoint while it is there. Endpoints of others stay. Endpoints that a killed edge
// has left behind go with their address. When the edge stops, its endpoints stay until its sessions have ended.
func TestEndpoints(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/mptcp/enabled"); err != nil {
		t.Skip("this kernel has no Multipath TCP")
	}
	if !testkit.InOwnNetwork(t) {
		return
	}
	uplink(t, "bridge", "10.9.0.1/24", 0) // without a default route
	first := uplink(t, "one", "10.1.0.2/24", 100)
	byHand := endpoint{netip.MustParseAddr("10.7.0.2"), first.Attrs().Index}
	leftBehind := endpoint{netip.MustParseAddr("10.1.0.2"), first.Attrs().Index}
	if err := errors.Join(add(byHand), add(leftBehind)); err != nil {
		t.Fatal(err)
	}
	var live atomic.Bool
	e := New(func() []*tunnel.Session {
		if live.Load() {
			return []*tunnel.Session{{}}
		}
		return nil
	}, slog.New(slog.DiscardHandler))
	running := testkit.Run(t, e.Run)
	wantEndpoints(t, "one uplink", "10.1.0.2", "10.7.0.2")
	uplink(t, "two", "10.2.0.2/24", 200)
	wantEndpoints(t, "another uplink", "10.1.0.2", "10.2.0.2", "10.7.0.2")
	old, err := netlink.ParseAddr("10.1.0.2/24")
	if err == nil {
		err = netlink.AddrDel(first, old)
	}
	if err != nil {
		t.Fatal(err)
	}
	wantEndpoints(t, "an address is gone", "10.2.0.2", "10.7.0.2")
	if got := e.Status(); got != "no session" {
		t.Errorf("the status is %q", got)
	}
	live.Store(true)
	running.Cancel()
	time.Sleep(4 * settle)
	wantEndpoints(t, "the edge stops, and its session lives", "10.2.0.2", "10.7.0.2")
	live.Store(false)
	running.Stop()
	wantEndpoints(t, "the module has ended", "10.7.0.2")
}

// id returns the number of an endpoint, or 0 if the kernel does not have it.
func id(t *testing.T, e endpoint) uint8 {
	t.Helper()
	all, err := list()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range all {
		if l.endpoint == e {
			return l.id
		}
	}
	return 0
}

// An endpoint that another program has removed comes back, whether this process had made or found it. This process then
// removes it when it stops. An operator's endpoint for all devices is there, and stays.
func TestRemovedEndpointsComeBack(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/mptcp/enabled"); err != nil {
		t.Skip("this kernel has no Multipath TCP")
	}
	if !testkit.InOwnNetwork(t) {
		return
	}
	found := endpoint{netip.MustParseAddr("10.1.0.2"), uplink(t, "one", "10.1.0.2/24", 100).Attrs().Index}
	made := endpoint{netip.MustParseAddr("10.2.0.2"), uplink(t, "two", "10.2.0.2/24", 200).Attrs().Index}
	uplink(t, "three", "10.3.0.2/24", 300)
	byHand := endpoint{addr: netip.MustParseAddr("10.3.0.2")}
	if err := errors.Join(add(found), add(byHand)); err != nil {
		t.Fatal(err)
	}
	log, text := testkit.NewLog()
	running := testkit.Run(t, New(func() []*tunnel.Session { return nil }, log).Run)
	wantEndpoints(t, "three uplinks", "10.1.0.2", "10.2.0.2", "10.3.0.2")
	if err := errors.Join(remove(found), remove(made)); err != nil {
		t.Fatal(err)
	}
	uplink(t, "four", "10.4.0.2/24", 400) // Run looks at once, and not only after resync
	wantEndpoints(t, "the endpoints are back", "10.1.0.2", "10.2.0.2", "10.3.0.2", "10.4.0.2")
	if lines := text.Lines("the endpoint of an address of this machine is gone"); len(lines) != 2 {
		t.Errorf("the log says %q, and two endpoints were removed", lines)
	}
	running.Stop()
	wantEndpoints(t, "the module has ended", "10.3.0.2")
}

// The kernel has one endpoint for an address that two uplinks have. The endpoint and its paths stay when the other
// uplink loses the address. When the endpoint's own uplink loses the address, the other uplink gets the endpoint.
func TestSameAddressAtTwoUplinks(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/mptcp/enabled"); err != nil {
		t.Skip("this kernel has no Multipath TCP")
	}
	if !testkit.InOwnNetwork(t) {
		return
	}
	addr := netip.MustParseAddr("10.9.0.2")
	one, two := uplink(t, "one", "10.1.0.2/24", 100), uplink(t, "two", "10.2.0.2/24", 200)
	atOne, atTwo := endpoint{addr, one.Attrs().Index}, endpoint{addr, two.Attrs().Index}
	change := func(do func(netlink.Link, *netlink.Addr) error, l netlink.Link) {
		t.Helper()
		a, err := netlink.ParseAddr(addr.String() + "/24")
		if err == nil {
			err = do(l, a)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	change(netlink.AddrAdd, one)
	change(netlink.AddrAdd, two)
	testkit.Run(t, New(func() []*tunnel.Session { return nil }, slog.New(slog.DiscardHandler)).Run)
	wantEndpoints(t, "two uplinks", "10.1.0.2", "10.2.0.2", "10.9.0.2")
	before := id(t, atOne)
	near, far := conn(t, addr)

	change(netlink.AddrDel, two)
	uplink(t, "three", "10.3.0.2/24", 300) // its endpoint shows that Run has looked
	wantEndpoints(t, "a third uplink", "10.1.0.2", "10.2.0.2", "10.3.0.2", "10.9.0.2")
	if now := id(t, atOne); now != before || now == 0 {
		t.Errorf("the endpoint had the number %d, and has the number %d", before, now)
	}
	near.Write([]byte("x"))
	far.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := far.Read(make([]byte, 1)); err != nil {
		t.Errorf("the path of the connection: %v", err)
	}

	change(netlink.AddrAdd, two)
	uplink(t, "four", "10.4.0.2/24", 400)
	wantEndpoints(t, "a fourth uplink", "10.1.0.2", "10.2.0.2", "10.3.0.2", "10.4.0.2", "10.9.0.2")
	change(netlink.AddrDel, one)
	testkit.Eventually(t, "the endpoint of the other uplink", func() bool { return id(t, atTwo) != 0 })
}

// conn returns both ends of a connection with Multipath TCP, whose first path is from an address of this machine.
func conn(t *testing.T, from netip.Addr) (near, far net.Conn) {
	t.Helper()
	var lc net.ListenConfig
	lc.SetMultipathTCP(true)
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dialer := &net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	dialer.SetMultipathTCP(true)
	if near, err = dialer.DialContext(t.Context(), "tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close() })
	if far, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { far.Close() })
	if !isMultipath(near) {
		t.Fatal("the connection is of plain TCP")
	}
	return near, far
}

// A network manager deletes a default route, and adds it again at once: the endpoint stays, and its paths with it.
func TestRouteComesBack(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/mptcp/enabled"); err != nil {
		t.Skip("this kernel has no Multipath TCP")
	}
	if !testkit.InOwnNetwork(t) {
		return
	}
	one := endpoint{netip.MustParseAddr("10.1.0.2"), uplink(t, "one", "10.1.0.2/24", 100).Attrs().Index}
	everything := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	route := &netlink.Route{LinkIndex: one.link, Dst: everything, Priority: 100}
	uplink(t, "two", "10.2.0.2/24", 200) // after its endpoint has a number, the kernel uses no lower number again
	testkit.Run(t, New(func() []*tunnel.Session { return nil }, slog.New(slog.DiscardHandler)).Run)
	var before uint8
	testkit.Eventually(t, "this process has the processor for a moment", func() bool {
		wantEndpoints(t, "two uplinks", "10.1.0.2", "10.2.0.2")
		time.Sleep(4 * settle) // the next change is the first one in a while
		before = id(t, one)
		deleted := time.Now()
		err := netlink.RouteDel(route)
		time.Sleep(settle / 10)
		if err = errors.Join(err, netlink.RouteAdd(route)); err != nil {
			t.Fatal(err)
		}
		return time.Since(deleted) < settle/2
	})
	uplink(t, "three", "10.3.0.2/24", 300) // its endpoint shows that Run has looked
	wantEndpoints(t, "a third uplink", "10.1.0.2", "10.2.0.2", "10.3.0.2")
	if now := id(t, one); now != before || now == 0 {
		t.Errorf("the endpoint had the number %d, and has the number %d", before, now)
	}
}

// An update waits until the kernel reports no more changes. Changes without end delay it, and do not prevent it.
func TestUpdateWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := New(nil, slog.New(slog.DiscardHandler))
		changed := make(chan struct{}, 1)
		var updates testkit.Trail[time.Duration]
		began := time.Now()
		running := testkit.Run(t, func(ctx context.Context) error {
			e.follow(ctx, changed, func() { updates.Record(time.Since(began)) })
			return nil
		})
		const every = settle - 10*time.Millisecond
		for range 3 {
			changed <- struct{}{}
			time.Sleep(every)
		}
		time.Sleep(time.Second)
		if got, want := updates.All(), []time.Duration{2*every + settle}; !slices.Equal(got, want) {
			t.Errorf("updates at %v, want %v", got, want)
		}
		const long = 20 * settleMost
		for began := time.Now(); time.Since(began) < long; time.Sleep(every) {
			changed <- struct{}{}
		}
		if n := len(updates.All()) - 1; n < 15 || n > 20 {
			t.Errorf("%d updates in %s", n, long)
		}
		running.Stop()
	})
}

// A process that has handed over makes no update, even if a change came before or at that moment.
func TestNoUpdateAfterTheHandOver(t *testing.T) {
	for _, before := range []time.Duration{0, settle / 2} {
		synctest.Test(t, func(t *testing.T) {
			e, left, changed := New(nil, slog.New(slog.DiscardHandler)), make(chan struct{}), make(chan struct{}, 1)
			e.Left = left
			changed <- struct{}{}
			time.AfterFunc(before, func() { close(left) })
			e.follow(t.Context(), changed, func() { t.Errorf("an update, with a change %s before the hand-over", before) })
		})
	}
}

// A process that takes over removes the endpoints of the process before it when it stops, and no others.
func TestEndpointsAreHandedOver(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/mptcp/enabled"); err != nil {
		t.Skip("this kernel has no Multipath TCP")
	}
	if !testkit.InOwnNetwork(t) {
		return
	}
	first := uplink(t, "one", "10.1.0.2/24", 100)
	byHand := endpoint{netip.MustParseAddr("10.3.0.2"), first.Attrs().Index}
	if err := add(byHand); err != nil {
		t.Fatal(err)
	}
	begin := func() (*Endpoints, chan struct{}, *testkit.Running) {
		e, left := New(func() []*tunnel.Session { return nil }, slog.New(slog.DiscardHandler)), make(chan struct{})
		e.Left = left
		running := testkit.Run(t, e.Run)
		<-e.told
		return e, left, running
	}
	old, left, oldRuns := begin()
	uplink(t, "two", "10.2.0.2/24", 200)
	wantEndpoints(t, "two uplinks of the old process", "10.1.0.2", "10.2.0.2", "10.3.0.2")
	uplink(t, "three", "10.3.0.2/24", 300)
	for range 2 { // a restart, and another one
		next, nextLeft, nextRuns := begin()
		next.Inherit(old.Made())
		close(left)
		oldRuns.Stop()
		wantEndpoints(t, "the old process has ended", "10.1.0.2", "10.2.0.2", "10.3.0.2")
		old, left, oldRuns = next, nextLeft, nextRuns
	}
	oldRuns.Stop()
	wantEndpoints(t, "the last process has ended", "10.3.0.2")
}

// A process that another one has replaced makes no endpoint: the other one would leave it behind.
func TestEndpointsAfterTheHandOver(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/mptcp/enabled"); err != nil {
		t.Skip("this kernel has no Multipath TCP")
	}
	if !testkit.InOwnNetwork(t) {
		return
	}
	uplink(t, "one", "10.1.0.2/24", 100)
	e, left := New(func() []*tunnel.Session { return nil }, slog.New(slog.DiscardHandler)), make(chan struct{})
	e.Left = left
	close(left)
	running := testkit.Run(t, e.Run)
	<-e.told
	uplink(t, "two", "10.2.0.2/24", 200)
	time.Sleep(4 * settle)
	running.Stop()
	wantEndpoints(t, "an uplink that comes later", "10.1.0.2")
}

// The status names the paths of the session, and says why there are none.
func TestStatus(t *testing.T) {
	path := func(n int) tunnel.Path {
		return tunnel.Path{
			Local:  netip.MustParseAddrPort(fmt.Sprintf("10.%d.0.2:40000", n)),
			Remote: netip.MustParseAddrPort("192.0.2.1:9000"),
		}
	}
	for want, paths := range map[string][]tunnel.Path{
		"plain TCP, since this kernel, the cloud or a box in between has no Multipath TCP": nil,
		"no path now": {},
		"1 path: 10.1.0.2:40000 to 192.0.2.1:9000":                                    {path(1)},
		"2 paths: 10.1.0.2:40000 to 192.0.2.1:9000, 10.2.0.2:40000 to 192.0.2.1:9000": {path(1), path(2)},
	} {
		e := New(func() []*tunnel.Session {
			return []*tunnel.Session{{Paths: func() []tunnel.Path { return paths }}}
		}, slog.New(slog.DiscardHandler))
		if got := e.Status(); got != want {
			t.Errorf("the status is %q, want %q", got, want)
		}
		e.failed("why not")
		if got := e.Status(); !strings.HasSuffix(got, "; why not") {
			t.Errorf("the status is %q, which says nothing of the failure", got)
		}
	}
}

// A connection whose first SYNs were lost has Multipath TCP, although the kernel has given it up for that connection.
func TestLostSYNs(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	const fallback = "/proc/sys/net/mptcp/syn_retrans_before_tcp_fallback"
	if err := os.WriteFile(fallback, []byte("1"), 0o644); err != nil {
		t.Skipf("this kernel has no such setting: %v", err)
	}
	// A socket whose queue is full drops SYNs. A queue of n has n+1 places.
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
	if err == nil {
		err = errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0))
	}
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "listener")
	l, err := net.FileListener(file)
	file.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	first, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	paths := New(func() []*tunnel.Session { return nil }, slog.New(slog.DiscardHandler))
	close(paths.told)
	accepting := time.AfterFunc(lostSYN/2, func() { // after the first SYN, before the second one
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
		}
	})
	defer accepting.Stop()
	conn, err := paths.DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if !isMultipath(conn) {
		t.Error("the connection is of plain TCP")
	}
}
