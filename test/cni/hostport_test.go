package cni

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
)

// Ports of the host, by the stock plugin portmap behind ours. They are reached from outside, from another pod of the
// node, and from the pod itself, for IPv4 and IPv6; DEL ends them.
func TestHostPort(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	needsRules(t)
	outside, path, db := newNamespace(t), newNamespace(t), newNamespace(t)
	connectOutside(t, outside)
	c := newClient(t, network(t, "1.1.0", "pods", ours(t, families[2]...), map[string]any{
		"type": "portmap", "capabilities": map[string]bool{"portMappings": true}}))
	web := container("web", path)
	web.CapabilityArgs = map[string]any{"portMappings": []map[string]any{
		{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}}
	if err := c.add(web); err != nil {
		t.Fatalf("ADD: %v", err)
	}
	if err := c.CheckNetworkList(t.Context(), c.list, web); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	if err := c.add(container("db", db)); err != nil {
		t.Fatalf("ADD: %v", err)
	}
	greet(t, path, "10.88.1.2:80")
	greet(t, path, "[fd00:88:1::2]:80")
	servers := []string{"192.0.2.1:8080", "[2001:db8::1]:8080"}
	froms := map[string]string{"outside": outside, "another pod": db, "the pod itself": path}
	reach := func(why string) {
		t.Helper()
		for _, server := range servers {
			for name, from := range froms {
				if got, err := ask(from, server); err != nil || got != greeting {
					t.Errorf("%s, from %s, %s says %q, %v", why, name, server, got, err)
				}
			}
		}
	}
	reach("with the settings of the kernel")
	for _, value := range []string{"0", "1"} {
		if err := bridgeCallsRules(value); err != nil {
			t.Logf("no br_netfilter here: %v", err)
			break
		}
		reach("with bridge-nf-call-iptables " + value)
	}
	if err := c.del(web); err != nil {
		t.Errorf("DEL: %v", err)
	}
	for _, server := range servers {
		if got, err := ask(outside, server); err == nil {
			t.Errorf("after DEL, %s says %q", server, got)
		}
	}
}

// needsRules skips a test where portmap cannot write its rules.
func needsRules(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("iptables"); err == nil {
		return
	}
	nft := exec.Command("nft", "-c", "-f", "-")
	nft.Stdin = bytes.NewBufferString("add table inet a\n" +
		"add chain inet a b { type nat hook prerouting priority dstnat; }\n")
	if out, err := nft.CombinedOutput(); err != nil {
		t.Skipf("portmap executes iptables or nft(8), and the kernel has neither or they are not installed: %v: %s", err, out)
	}
}

// bridgeCallsRules says whether packets from port to port of a bridge pass the rules for IP (br_netfilter).
func bridgeCallsRules(value string) error {
	for _, name := range []string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"} {
		if err := os.WriteFile(filepath.Join("/proc/sys/net/bridge", name), []byte(value), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// connectOutside connects the node with a network outside, which has a route to the node alone.
func connectOutside(t *testing.T, outside string) {
	t.Helper()
	ns, err := os.Open(outside)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "uplink0"
	link := netlink.NewVeth(attrs)
	link.PeerName, link.PeerNamespace = "eth0", netlink.NsFd(ns.Fd())
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	if err := address("uplink0", "192.0.2.1/24", "2001:db8::1/64"); err != nil {
		t.Fatal(err)
	}
	if err := inside(outside, func() error { return address("eth0", "192.0.2.2/24", "2001:db8::2/64") }); err != nil {
		t.Fatal(err)
	}
}

func address(name string, addrs ...string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, text := range addrs {
		addr, err := netlink.ParseAddr(text)
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(link, addr); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(link)
}

// inside runs f in the namespace at a path.
func inside(path string, f func() error) error {
	return testkit.OnThread(func() error {
		ns, err := os.Open(path)
		if err != nil {
			return err
		}
		defer ns.Close()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// greeting is what the server in a pod says to everybody.
const greeting = "hello"

func greet(t *testing.T, path, listen string) {
	t.Helper()
	serve(t, path, listen, func(net.Conn) string { return greeting })
}

// serve answers every caller at an address in the namespace at a path, until the end of the test.
func serve(t *testing.T, path, listen string, answer func(net.Conn) string) {
	t.Helper()
	var server net.Listener
	err := inside(path, func() (err error) {
		server, err = net.Listen("tcp", listen)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	go func() {
		for {
			conn, err := server.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(conn, answer(conn))
			conn.Close()
		}
	}()
}

func ask(path, server string) (answer string, err error) {
	err = inside(path, func() error {
		conn, err := net.DialTimeout("tcp", server, 3*time.Second)
		if err != nil {
			return err
		}
		defer conn.Close()
		data, err := io.ReadAll(conn)
		answer = string(data)
		return err
	})
	return answer, err
}
