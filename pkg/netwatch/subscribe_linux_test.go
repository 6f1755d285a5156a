package netwatch

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"tunnel.example/tunnel/internal/testkit"
)

// The kernel tells of an address and of a route. A new address also has routes, so each subscription has a change that
// it alone tells: another lifetime of an address, and a route.
func TestKernelTells(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	log, _ := testkit.NewLog()
	called := make(chan struct{}, 10)
	running := testkit.Run(t, New(func() { called <- struct{}{} }, log).Run)
	defer running.Stop()
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	address := func(do func(netlink.Link, *netlink.Addr) error) {
		t.Helper()
		addr, err := netlink.ParseAddr("10.1.2.3/24")
		if err == nil {
			err = do(loopback, addr)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	want := func(what string) {
		t.Helper()
		select {
		case <-called:
		case <-ctx.Done():
			t.Fatalf("not told of %s", what)
		}
	}
	testkit.Eventually(t, "the subscription is there", func() bool {
		address(netlink.AddrReplace)
		address(netlink.AddrDel)
		return len(called) > 0
	})
	quiet := func() {
		t.Helper()
		for {
			select {
			case <-called:
			case <-time.After(pause + settle + time.Second): // a change that waits is told by then
				return
			case <-ctx.Done():
				t.Fatal("the changes do not end")
			}
		}
	}
	address(netlink.AddrReplace)
	want("a new address")
	quiet()
	address(func(l netlink.Link, a *netlink.Addr) error {
		a.ValidLft, a.PreferedLft = 5000, 5000
		return netlink.AddrReplace(l, a)
	})
	want("another lifetime of an address")
	quiet()
	_, network, err := net.ParseCIDR("10.9.0.0/16")
	if err != nil {
		t.Fatal(err)
	}
	route := &netlink.Route{LinkIndex: loopback.Attrs().Index, Dst: network, Scope: netlink.SCOPE_LINK}
	if err := netlink.RouteAdd(route); err != nil {
		t.Fatal(err)
	}
	want("a new route")
}
