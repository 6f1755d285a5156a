package podnet

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
)

// host is another network namespace: the outside, or a pod.
type host struct {
	t  *testing.T
	ns netns.NsHandle
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{t: t}
	h.inNew(func() (err error) {
		h.ns, err = netns.Get()
		return err
	})
	t.Cleanup(func() { _ = h.ns.Close() })
	return h
}

// inNew runs f in a new namespace, which lives as long as a handle to it.
func (h *host) inNew(f func() error) {
	h.t.Helper()
	h.onThread(func() error {
		if err := testkit.UnshareNetwork(); err != nil {
			return err
		}
		return f()
	})
}

// in runs f in the namespace.
func (h *host) in(f func() error) {
	h.t.Helper()
	h.onThread(func() error {
		if err := netns.Set(h.ns); err != nil {
			return err
		}
		return f()
	})
}

// onThread runs f on a thread that ends after it.
func (h *host) onThread(f func() error) {
	h.t.Helper()
	if err := testkit.OnThread(f); err != nil {
		h.t.Fatal(err)
	}
}

// connect makes a pair of links: name at the node, on a bridge if one is named, and eth0 here. The addresses
// are the node's and this host's of IPv4, then of IPv6.
func (h *host) connect(name, bridge, node4, here4, node6, here6 string) {
	h.t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Flags = name, net.FlagUp
	if bridge != "" {
		link, err := netlink.LinkByName(bridge)
		if err != nil {
			h.t.Fatal(err)
		}
		attrs.MasterIndex = link.Attrs().Index
	}
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerNamespace = "eth0", netlink.NsFd(h.ns)
	if err := netlink.LinkAdd(veth); err != nil {
		h.t.Fatal(err)
	}
	if err := address(name, node4, node6); err != nil {
		h.t.Fatal(err)
	}
	h.in(func() error { return address("eth0", here4, here6) })
}

func address(link string, addrs ...string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return err
	}
	for _, text := range addrs {
		if text == "" {
			continue
		}
		addr, err := netlink.ParseAddr(text)
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(l, addr); err != nil {
			return err
		}
	}
	return nil
}

func (h *host) defaultRoutes(gateways ...string) {
	h.t.Helper()
	h.in(func() error {
		for _, gateway := range gateways {
			if err := netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway)}); err != nil {
				return err
			}
		}
		return nil
	})
}

// seenAs returns the address under which a server on one host (nil: the node) sees a client on another.
func seenAs(t *testing.T, on, from *host, server string) (client string) {
	t.Helper()
	var listener net.Listener
	listen := func() (err error) {
		listener, err = net.Listen("tcp", net.JoinHostPort(server, "0"))
		return err
	}
	if on != nil {
		on.in(listen)
	} else if err := listen(); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	seen := make(chan string, 1) // capacity 1: the goroutine ends even if the dial fails
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			seen <- fmt.Sprint("nobody: ", err)
			return
		}
		defer conn.Close()
		seen <- conn.RemoteAddr().(*net.TCPAddr).IP.String()
	}()
	from.in(func() error {
		conn, err := net.DialTimeout("tcp", listener.Addr().String(), 5*time.Second)
		if err == nil {
			conn.Close()
		}
		return err
	})
	return <-seen
}
