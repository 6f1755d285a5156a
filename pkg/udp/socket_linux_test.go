package udp

import (
	"encoding/binary"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
)

// A kernel that does not know an option of UDP says so. The kernels that run the tests know UDP_SEGMENT.
func TestKnowsOption(t *testing.T) {
	const never = 9999 // no option of udp(7)
	if knowsOption(never) {
		t.Error("the kernel knows an option that nobody has made")
	}
	if knowsOption(unix.UDP_SEGMENT) != canSegment() || !canSegment() {
		t.Error("the kernel does not know UDP_SEGMENT: it is older than Linux 4.18, or the question is wrong")
	}
}

// report sends the ICMP message of a machine on the path about a datagram from one address to another.
func report(t *testing.T, typ ipv4.ICMPType, code int, from, to netip.AddrPort) {
	t.Helper()
	raw, err := net.Dial("ip4:icmp", to.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	const mtu, headers = 1400, 20 + 8 // of IP and UDP
	body := make([]byte, 4, 4+headers)
	binary.BigEndian.PutUint16(body[2:], mtu) // only code 4 of DestinationUnreachable has it
	ip := make([]byte, headers)
	ip[0], ip[8], ip[9] = 4<<4|5, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(ip[2:], headers)
	copy(ip[12:], from.Addr().AsSlice())
	copy(ip[16:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(ip[20:], from.Port())
	binary.BigEndian.PutUint16(ip[22:], to.Port())
	binary.BigEndian.PutUint16(ip[24:], 8)
	m := icmp.Message{Type: typ, Code: code, Body: &icmp.RawBody{Data: append(body, ip...)}}
	b, err := m.Marshal(nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := raw.Write(b); err != nil {
		t.Fatal(err)
	}
}

// No ICMP message ends a flow: each is counted, and the flow goes on in both directions.
func TestReportsOfThePath(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	l, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.SetDeadline(time.Now().Add(patience))
	at := l.LocalAddr().(*net.UDPAddr).AddrPort()
	c := dialEdge(t, policy(t), at.String())
	read := func(want string) (from netip.AddrPort) {
		t.Helper()
		b := make([]byte, 100)
		n, from, err := l.ReadFromUDPAddrPort(b)
		if err != nil || string(b[:n]) != want {
			t.Fatalf("the target got %q, %v; want %q", b[:n], err, want)
		}
		return from
	}
	c.open(1, "", "first")
	from := read("first")
	counts := make(map[Reason]uint64)
	for _, tc := range []struct {
		name string
		typ  ipv4.ICMPType
		code int
		want Reason
	}{
		{"port unreachable: ECONNREFUSED", ipv4.ICMPTypeDestinationUnreachable, 3, DropRefused},
		{"protocol unreachable: ENOPROTOOPT", ipv4.ICMPTypeDestinationUnreachable, 2, DropRefused},
		{"fragmentation needed: EMSGSIZE", ipv4.ICMPTypeDestinationUnreachable, 4, DropTooLong},
		{"host unknown: EHOSTDOWN", ipv4.ICMPTypeDestinationUnreachable, 7, DropRefused},
		{"host isolated: ENONET", ipv4.ICMPTypeDestinationUnreachable, 8, DropRefused},
		{"parameter problem: EPROTO", ipv4.ICMPTypeParameterProblem, 0, DropRefused},
	} {
		report(t, tc.typ, tc.code, from, at)
		counts[tc.want]++
		dropped(t, c.edge.counters, tc.want, counts[tc.want])
		l.WriteToUDPAddrPort([]byte(tc.name), from)
		c.want(1, tc.name)
		c.send(kindDatagram, 1, []byte("next"))
		if again := read("next"); again != from {
			t.Errorf("%s: the flow has another port", tc.name)
		}
	}

	// The same while the flow's goroutine is busy: the next datagram gets the error, and leaves nevertheless.
	conn := c.edgeConn()
	conn.mu.Lock()
	f := conn.flows[1]
	conn.mu.Unlock()
	f.answered.Store(false)
	conn.out.mu.Lock()
	release := sync.OnceFunc(conn.out.mu.Unlock)
	defer release()
	l.WriteToUDPAddrPort([]byte("keeps the goroutine busy"), from)
	testkit.Eventually(t, "the goroutine has the datagram", f.answered.Load)
	report(t, ipv4.ICMPTypeDestinationUnreachable, 4, from, at)
	c.send(kindDatagram, 1, []byte("after the report"))
	read("after the report")
	release()
	dropped(t, c.edge.counters, DropTooLong, counts[DropTooLong]+1)
}

// An error that the kernel returns again and again ends a flow, and takes no processor for ever.
func TestErrorThatStays(t *testing.T) {
	fd, err := unix.Open(t.TempDir(), unix.O_RDONLY|unix.O_CLOEXEC, 0) // read(2) of a directory fails
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	failures := 0
	e := endSocket{raw: rawFD(fd)}
	err = e.receive(new(buffers), func([]byte) bool { return true }, func(error) bool { failures++; return true })
	if failures != maxFailures || err != nil {
		t.Errorf("it ends after %d failures, %v", failures, err)
	}
}

// rawFD is a descriptor as a syscall.RawConn that is always ready.
type rawFD uintptr

func (r rawFD) Control(f func(uintptr)) error    { f(uintptr(r)); return nil }
func (r rawFD) Write(f func(uintptr) bool) error { return r.Read(f) }

func (r rawFD) Read(f func(uintptr) bool) error {
	for !f(uintptr(r)) {
		continue
	}
	return nil
}

// A caller with a link-local address gets answers: its zone tells the network interface.
func TestLinkLocalCaller(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	at, err := netlink.ParseAddr("fe80::1/64")
	if err != nil {
		t.Fatal(err)
	}
	at.Flags = unix.IFA_F_NODAD
	if err := netlink.AddrAdd(lo, at); err != nil {
		t.Skipf("this machine has no IPv6: %v", err)
	}
	testkit.Eventually(t, "the kernel takes packets to the address", func() bool { // it adds the route in its own time
		routes, err := netlink.RouteGetWithOptions(at.IP, &netlink.RouteGetOptions{Oif: "lo"})
		return err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL
	})
	local := netip.MustParsePrefix("fe80::/10")
	r := run(t, Listener{Listen: "[::]:0", Target: target(t, echo), Allow: auth.Sources{local}})
	c := callerOf(t, netip.AddrPortFrom(netip.MustParseAddr("fe80::1%lo"), r.addr().Port()))
	for range 2 {
		if got := ask(t, c, "x"); got != "x" {
			t.Errorf("got %q", got)
		}
	}
}

// A caller that sends to a broadcast address gets its answers from an address of this machine.
func TestBroadcastCaller(t *testing.T) {
	loopback := auth.Sources{netip.MustParsePrefix("127.0.0.0/8")}
	for _, listen := range []string{"0.0.0.0:0", "[::]:0"} {
		t.Run(listen, func(t *testing.T) {
			r := run(t, Listener{Listen: listen, Target: target(t, echo), Allow: loopback})
			c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(patience))
			all := netip.AddrPortFrom(netip.MustParseAddr("127.255.255.255"), r.addr().Port())
			if _, err := c.WriteToUDPAddrPort([]byte("x"), all); err != nil {
				t.Fatal(err)
			}
			if _, from, err := c.ReadFromUDPAddrPort(make([]byte, 10)); err != nil || from.Port() != all.Port() {
				t.Errorf("%v answers, %v", from, err)
			}
		})
	}
}
