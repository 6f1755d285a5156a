package relay

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
)

// pod is another network namespace, with a link eth0 to the node.
type pod struct {
	t  *testing.T
	ns netns.NsHandle
}

// newPod makes a pod with these addresses and default routes by the node's. The node's end of the link is name.
func newPod(t *testing.T, name, node4, pod4, node6, pod6 string) *pod {
	t.Helper()
	p := &pod{t: t}
	err := testkit.OnThread(func() (err error) {
		if err = testkit.UnshareNetwork(); err == nil {
			p.ns, err = netns.Get()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.ns.Close() })
	veth := netlink.NewVeth(netlink.LinkAttrs{Name: name, Flags: net.FlagUp})
	veth.PeerName, veth.PeerNamespace = "eth0", netlink.NsFd(p.ns)
	if err = netlink.LinkAdd(veth); err == nil {
		err = setAddresses(name, node4, node6)
	}
	if err != nil {
		t.Fatal(err)
	}
	p.in(func() error {
		if err := setAddresses("eth0", pod4, pod6); err != nil {
			return err
		}
		for _, gateway := range []string{node4, node6} {
			ip, _, err := net.ParseCIDR(gateway)
			if err == nil {
				err = netlink.RouteAdd(&netlink.Route{Gw: ip})
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	return p
}

// in runs f in the pod.
func (p *pod) in(f func() error) {
	p.t.Helper()
	err := testkit.OnThread(func() error {
		if err := netns.Set(p.ns); err != nil {
			return err
		}
		return f()
	})
	if err != nil {
		p.t.Fatal(err)
	}
}

func setAddresses(link string, addrs ...string) error {
	l, err := netlink.LinkByName(link)
	if err == nil {
		err = netlink.LinkSetUp(l)
	}
	for _, text := range addrs {
		if err != nil {
			return err
		}
		var addr *netlink.Addr
		if addr, err = netlink.ParseAddr(text); err == nil {
			addr.Flags = unix.IFA_F_NODAD
			err = netlink.AddrAdd(l, addr)
		}
	}
	return err
}
