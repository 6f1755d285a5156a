package relay

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// newNode makes this namespace a node: rules of kube-proxy for the same ClusterIPs, at its priority, that lead nowhere;
// and a table of somebody else. It returns its pod.
func newNode(t *testing.T) *pod {
	t.Helper()
	p := newPod(t, "vethpod", "10.88.1.1/24", "10.88.1.2/24", "fd00:88:1::1/64", "fd00:88:1::2/64")
	for _, file := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+file, []byte("1"), 0o600); err != nil {
			t.Skipf("no settings of its own: %v", err)
		}
	}
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "kube-proxy"})
	for _, hook := range []*nftables.ChainHook{nftables.ChainHookPrerouting, nftables.ChainHookOutput} {
		chain := c.AddChain(&nftables.Chain{Name: fmt.Sprint("nat", *hook), Table: table, Type: nftables.ChainTypeNAT,
			Hooknum: hook, Priority: nftables.ChainPriorityNATDest})
		for _, at := range both {
			f := familyOf(at.Addr())
			nowhere := netip.MustParseAddr(map[bool]string{true: "10.88.1.99", false: "fd00:88:1::99"}[at.Addr().Is4()])
			c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
				&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.protocol}},
				&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: f.offset, Len: f.size},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: at.Addr().AsSlice()},
				&expr.Immediate{Register: 1, Data: nowhere.AsSlice()},
				&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(9)},
				&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.protocol), RegAddrMin: 1, RegProtoMin: 2},
			}})
		}
	}
	c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "foreign"})
	if err := c.Flush(); err != nil {
		t.Skipf("the kernel has no nftables: %v", err)
	}
	return p
}

// While processes of the edge take over from each other, no connection of a pod goes to kube-proxy, or nowhere.
func TestTakeOverWithoutGap(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	p := newNode(t)
	c := newCloud()
	c.reach = echo(t)
	r, _ := newTestRelay(t, &linux{}, c)
	left := make(chan struct{})
	r.cfg.Left = left
	running := testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, true, shop(t))
	<-c.nexts
	// It takes a while to read so many, and the rules of these lead nowhere.
	for some := range slices.Chunk(manyServices(t).GetSet()[:8800], 400) {
		c.batches <- batch(t, true, &pb.Changes{Set: some})
		<-c.nexts
	}
	c.batches <- batch(t, false, new(pb.Changes))
	<-c.nexts
	wantServing(t, r, 2)

	stop := make(chan struct{})
	var callers errgroup.Group
	for range 2 {
		callers.Go(func() error {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return nil
				default:
				}
				err := testkit.OnThread(func() error {
					if err := netns.Set(p.ns); err != nil {
						return err
					}
					conn, err := dialNow(web4)
					if err != nil {
						return err
					}
					defer conn.Close()
					if n := resent(conn); n > 0 {
						return fmt.Errorf("%d packets led nowhere", n) // the SYN: its entry in conntrack is removed later
					}
					conn.SetDeadline(time.Now().Add(30 * time.Second))
					if _, err = conn.Write([]byte("x")); err == nil {
						_, err = conn.Read(make([]byte, 1))
					}
					return err
				})
				if err != nil {
					return fmt.Errorf("connection %d: %w", n, err)
				}
			}
		})
	}
	for range 5 {
		next := again(r, &linux{}, c)
		close(left)
		left = make(chan struct{})
		next.cfg.Left = left
		running.Cancel()
		taken := testkit.Run(t, next.Run)
		<-c.nexts
		c.batches <- batch(t, false, new(pb.Changes))
		<-c.nexts
		wantServing(t, next, 2)
		running.Stop()
		r, running = next, taken
	}
	close(stop)
	if err := callers.Wait(); err != nil {
		t.Error(err)
	}
}

// resent returns how many packets of a connection the kernel has sent again.
func resent(c net.Conn) (n uint32) {
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return 0
	}
	raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n = info.Total_retrans
		}
	})
	return n
}

// tables returns the names of the tables in the kernel.
func tables(t *testing.T) (names []string) {
	t.Helper()
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	all, err := c.ListTables()
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range all {
		names = append(names, table.Name)
	}
	slices.Sort(names)
	return names
}

// dialNow connects, and does not wait long for an answer that does not come.
func dialNow(at netip.AddrPort) (net.Conn, error) {
	return (&net.Dialer{Timeout: 5 * time.Second}).Dial("tcp", at.String())
}

// A pod and a process of the node reach a Service of another node by its ClusterIP of both families, beside kube-proxy.
// When the edge stops, its rules go and others' stay; it starts from its file.
func TestRedirect(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	p := newNode(t)
	c := newCloud()
	c.reach = echo(t)
	r, _ := newTestRelay(t, &linux{}, c)
	running := testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, false, shop(t))
	<-c.nexts
	wantServing(t, r, 2)

	fromPod := func() {
		t.Helper()
		for _, at := range both {
			var conn net.Conn
			p.in(func() (err error) {
				conn, err = dialNow(at)
				return err
			})
			wantEcho(t, conn)
		}
	}
	fromPod()

	// Beside kube-proxy, a process of the node needs a route to the address, since the kernel looks for a route first.
	// docs/services.md has the command for nodes without a default route.
	if _, err := dialNow(web4); !errors.Is(err, syscall.ENETUNREACH) {
		t.Errorf("without a route, a process of the node gets %v", err)
	}
	link, err := netlink.LinkByName("vethpod")
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"10.96.0.0/12", "fd00:96::/112"} {
		_, to, err := net.ParseCIDR(text)
		if err == nil {
			err = netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: to})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, at := range both {
		conn, err := dialNow(at)
		if err != nil {
			t.Fatalf("from the node to %s: %v", at, err)
		}
		wantEcho(t, conn)
	}

	// Those of the edge itself are left to kube-proxy: its way to the cloud must not depend on the tunnel.
	own := net.Dialer{Timeout: 5 * time.Second, Control: Unredirected}
	for _, at := range both {
		if conn, err := own.Dial("tcp", at.String()); err == nil {
			conn.Close()
			t.Errorf("the edge's own connection to %s is redirected", at)
		}
	}

	// What administrators and kube-proxy run shows the table.
	if nft, err := exec.LookPath("nft"); err == nil {
		for _, args := range [][]string{{"list", "ruleset"}, {"-j", "list", "ruleset"}} {
			out, err := exec.CommandContext(t.Context(), nft, args...).CombinedOutput()
			if err != nil || !strings.Contains(string(out), "10.96.0.10") || !strings.Contains(string(out), commentMarked) {
				t.Errorf("nft %v: %v\n%s", args, err, out)
			}
		}
	}

	// A connection to the relay itself leads nowhere.
	for _, at := range r.listening(t) {
		conn, err := dialNow(at)
		if errors.Is(err, syscall.ECONNRESET) {
			continue // the relay was faster
		}
		if err != nil {
			t.Fatal(err)
		}
		wantReset(t, conn)
	}

	// A conn that is open goes on while the edge stops; new ones are kube-proxy's.
	var conn net.Conn
	p.in(func() (err error) {
		conn, err = dialNow(web4)
		return err
	})
	if _, err = conn.Write([]byte("x")); err == nil {
		_, err = conn.Read(make([]byte, 1))
	}
	if err != nil {
		t.Fatal(err)
	}
	running.Cancel()
	testkit.Eventually(t, "nothing is redirected any more", func() bool {
		nft, err := nftables.New()
		if err != nil {
			t.Fatal(err)
		}
		elements, err := nft.GetSetElements(r.kernel.(*linux).set(setServices, familyOf(addr4)))
		return err == nil && len(elements) == 0
	})
	wantEcho(t, conn)
	running.Stop()
	if got := tables(t); !slices.Equal(got, []string{"foreign", "kube-proxy"}) {
		t.Errorf("after the end, the tables are %v", got)
	}

	// An edge without Services leaves the rules of one that runs.
	log, lines := testkit.NewLog()
	living := &linux{}
	ln, err := net.Listen("tcp", netip.AddrPortFrom(addr4, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	at := ln.Addr().(*net.TCPAddr).AddrPort()
	both := rules{{web4, protocolTCP}: {port: 1}, {log4, protocolUDP}: {port: 2}}
	if err := living.program([]netip.AddrPort{at}, both); err != nil {
		t.Fatal(err)
	}
	if !RemoveRules(log) {
		t.Error("the rules of an edge that runs do not stay")
	}
	if got := tables(t); !slices.Contains(got, tableName) {
		t.Errorf("the table of an edge that runs is gone: %v\n%s", got, lines)
	}
	// An element is missing: the others go at the end nevertheless.
	if err := living.change(rules{{log4, protocolUDP}: {port: 2}}, nil); err != nil {
		t.Fatal(err)
	}
	if err := living.clear(); err != nil || living.elements(t) != 0 {
		t.Errorf("%d elements are left, %v", living.elements(t), err)
	}
	ln.Close()
	if RemoveRules(log) {
		t.Error("the rules of an edge that has ended stay")
	}
	if got := tables(t); slices.Contains(got, tableName) {
		t.Errorf("the table of an edge that has ended is left: %v\n%s", got, lines)
	}
	if err := living.clear(); err != nil {
		t.Errorf("without a table: %v", err)
	}

	// Without the cloud, after a kill: the table of the process before is still there.
	before := &linux{}
	if _, err := before.open(); err != nil {
		t.Fatal(err)
	}
	dead := []netip.AddrPort{netip.AddrPortFrom(addr4, 1)}
	if err := before.program(dead, rules{{web4, protocolTCP}: {port: 1}}); err != nil {
		t.Fatal(err)
	}
	// An edge that has no Services any more removes it.
	log, lines = testkit.NewLog()
	for range 2 {
		RemoveRules(log)
	}
	if got := tables(t); slices.Contains(got, tableName) || len(lines.Lines("INFO", "are removed")) != 1 {
		t.Errorf("without Services, the tables are %v", got)
	}
	if err := before.program(dead, rules{{web4, protocolTCP}: {port: 1}}); err != nil {
		t.Fatal(err)
	}
	away := newCloud()
	away.reach = c.reach
	offline := again(r, &linux{}, away)
	second := testkit.Run(t, offline.Run)
	testkit.Eventually(t, "the kernel has the addresses again", func() bool { return offline.servesNow() == 2 })
	fromPod()

	// The process after this one has a table of its own: this one leaves it.
	after := &linux{}
	listeners := []netip.AddrPort{netip.AddrPortFrom(addr4, 2)}
	if err := after.program(listeners, rules{{web4, protocolTCP}: {port: 2}}); err != nil {
		t.Fatal(err)
	}
	second.Stop()
	if got := tables(t); !slices.Contains(got, tableName) {
		t.Errorf("the table of the next process is gone: %v", got)
	}
	if err := after.remove(); err != nil || slices.Contains(tables(t), tableName) {
		t.Errorf("tables: %v, %v", tables(t), err)
	}
}

// elements returns how many addresses of IPv4 the table has.
func (k *linux) elements(t *testing.T) int {
	t.Helper()
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	all, err := c.GetSetElements(k.set(setServices, familyOf(addr4)))
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// servesNow returns how many addresses the kernel redirects.
func (r *Relay) servesNow() int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.serves
}

// listening returns the listeners of the relay.
func (r *Relay) listening(t *testing.T) []netip.AddrPort {
	t.Helper()
	all := r.kernel.(*linux).listeners
	if len(all) != 2 {
		t.Fatalf("the relay listens at %v", all)
	}
	return all
}

// many returns addresses with the numbers from first up to end, half of them of IPv6.
func many(first, end int) rules {
	all := make(rules)
	for i := first; i < end; i += 2 {
		a4 := netip.AddrFrom4([4]byte{10, 96, byte(i >> 9), byte(i >> 1)})
		a6 := netip.AddrFrom16([16]byte{0xfd, 14: byte(i >> 9), 15: byte(i >> 1)})
		all[address{netip.AddrPortFrom(a4, 80), protocolTCP}] = rule{port: 1}
		all[address{netip.AddrPortFrom(a6, 443), protocolUDP}] = rule{port: 2}
	}
	return all
}

// A change is one transaction, and does not write the table again.
func TestManyAddresses(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	k := &linux{}
	addrs, err := k.open()
	if err != nil {
		t.Fatal(err)
	}
	if len(addrs) != 2 {
		t.Fatalf("addresses: %v", addrs)
	}
	if again, err := k.open(); err != nil || !slices.Equal(again, addrs) {
		t.Fatalf("the second time: %v, %v", again, err)
	}
	all := many(0, 10_000)
	start := time.Now()
	listeners := []netip.AddrPort{netip.AddrPortFrom(addr4, 1), netip.AddrPortFrom(addr6, 2)}
	if err := k.program(listeners, all); err != nil {
		t.Skipf("the kernel has no nftables: %v", err)
	}
	t.Logf("10,000 addresses took %s", time.Since(start))
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	has := func() (n int) {
		for _, own := range addrs {
			elements, err := c.GetSetElements(k.set(setServices, familyOf(own)))
			if err != nil {
				t.Fatal(err)
			}
			n += len(elements)
		}
		return n
	}
	handles := func() (of []uint64) {
		for _, chain := range k.hooks() {
			has, err := c.GetRules(k.table(), chain.Chain)
			if err != nil {
				t.Fatal(err)
			}
			for _, rule := range has {
				of = append(of, rule.Handle)
			}
		}
		return of
	}
	before := handles()
	if has() != len(all) || len(before) != 12 || !k.intact() {
		t.Fatalf("%d addresses, rules %v, intact: %v", has(), before, k.intact())
	}
	some := rules{all.sorted()[0]: {port: 1}}
	start = time.Now()
	if err := k.change(some, many(10_000, 10_002)); err != nil {
		t.Fatal(err)
	}
	t.Logf("one change took %s", time.Since(start))
	if has() != len(all)+1 || !slices.Equal(handles(), before) {
		t.Errorf("%d addresses, rules %v, before %v", has(), handles(), before)
	}
	// All or nothing.
	missing := rules{{netip.MustParseAddrPort("10.200.0.1:1"), protocolTCP}: {port: 1}}
	if err := k.change(missing, many(10_002, 10_004)); err == nil ||
		has() != len(all)+1 {
		t.Errorf("with one that is not there: %v, %d addresses", err, has())
	}
	left := many(0, 10_002)
	delete(left, all.sorted()[0])
	if err := k.change(left, nil); err != nil || has() != 0 {
		t.Errorf("%d addresses are left, %v", has(), err)
	}
	c.DelTable(k.table())
	if err := c.Flush(); err != nil || k.intact() || k.remove() != nil {
		t.Errorf("after somebody has removed the table: %v", err)
	}
}

// The kernel may give a process the port of one that was killed. Nothing of the table of that one stays.
func TestPortOfKilledProcess(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	killed := &linux{full: true}
	if err := killed.program(someListeners(1), many(0, 10)); err != nil {
		t.Skipf("the kernel has no nftables: %v", err)
	}
	next := &linux{full: true}
	if err := next.program(someListeners(1), many(100, 110)); err != nil {
		t.Fatal(err)
	}
	if n := next.elements(t); n != 5 || !next.intact() {
		t.Errorf("the table has %d addresses of IPv4, want 5; intact: %t", n, next.intact())
	}
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	if left, err := next.others(c); err != nil || len(left.chains)+len(left.sets) > 0 {
		t.Errorf("the table of the killed process has left %+v, %v", left, err)
	}
}

// A node without IPv6 serves IPv4.
func TestNoIPv6(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	for _, which := range []string{"all", "default"} {
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+which+"/disable_ipv6", []byte("1"), 0o600); err != nil {
			t.Skipf("no settings of its own: %v", err)
		}
	}
	c := newCloud()
	c.reach = echo(t)
	r, _ := newTestRelay(t, &linux{}, c)
	testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, false, shop(t))
	<-c.nexts
	wantServing(t, r, 2)
	// One that has IPv6 addresses alone changes nothing for IPv4.
	c.batches <- batch(t, false, &pb.Changes{Deleted: []services.Path{far6}})
	<-c.nexts
	wantServing(t, r, 1)
}

// An edge without rights says what it lacks.
func TestNoRights(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	err := testkit.OnThread(func() error {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capset(&header, &data[0]); err != nil {
			t.Skipf("the rights of a thread cannot be dropped: %v", err)
		}
		_, err := (&linux{}).open()
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
		t.Errorf("without rights: %v", err)
	}
}

// An edge without Services and without rights says that rules may be left, but only where an edge with Services was.
func TestRulesStayWithoutRights(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	warnings := func() []string {
		log, lines := testkit.NewLog()
		err := testkit.OnThread(func() error {
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var data [2]unix.CapUserData
			if err := unix.Capset(&header, &data[0]); err != nil {
				t.Skipf("the rights of a thread cannot be dropped: %v", err)
			}
			if RemoveRules(log) {
				t.Error("without rights, an owner is found")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return lines.Lines("WARN", "nft delete table inet tunnel-services")
	}
	if got := warnings(); len(got) > 0 {
		t.Errorf("where no edge with Services was: %q", got)
	}
	full := &linux{full: true}
	if _, err := full.open(); err != nil {
		t.Fatal(err)
	}
	if err := full.program(someListeners(1), nil); err != nil {
		t.Fatal(err)
	}
	if got := warnings(); len(got) != 1 {
		t.Errorf("with rules of an edge that has ended: %q", got)
	}
	if got := tables(t); !slices.Contains(got, tableName) {
		t.Errorf("the tables are %v", got)
	}
}

// wantServing waits until the kernel redirects so many addresses, and nothing is wrong.
func wantServing(t *testing.T, r *Relay, want int) {
	t.Helper()
	testkit.Within(t, 20*time.Second, "the kernel has the addresses", func() error {
		if n, note := r.servesNow(), r.Note(); n != want || note != "" {
			return fmt.Errorf("it has %d of %d: %s", n, want, note)
		}
		return nil
	})
}
