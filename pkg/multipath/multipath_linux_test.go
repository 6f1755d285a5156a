package multipath

import (
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
func endpoints(t *testing.T) (all []string) {
	t.Helper()
	known, err := ask(pmGetAddr, unix.NLM_F_DUMP, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range known {
		addr, _, err := decode(k)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, addr.String())
	}
	slices.Sort(all)
	return all
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
	uplink(t, "two", "10.2.0.2/24", 200) // within settle: Run sees the change and Left at once
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
