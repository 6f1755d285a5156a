package relay

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	"github.com/vishvananda/netlink"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
)

// A pod asks the cluster's DNS by its ClusterIP of both families, by UDP and TCP. The edge answers, beside kube-proxy,
// also if it has started without the cloud; it asks the servers of resolv.conf for other names.
func TestDNSRedirect(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	p := newNode(t)
	upstreamAt(t, "127.0.0.1:53")
	resolvConf := filepath.Join(t.TempDir(), "resolv.conf")
	// Kubelet may have told this process to ask the cluster's DNS: that would be a loop.
	text := "search example.com\nnameserver " + dns4.Addr().String() + "\nnameserver 127.0.0.1\n"
	if err := os.WriteFile(resolvConf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	link, err := netlink.LinkByName("vethpod")
	if err == nil {
		to := &net.IPNet{IP: net.IPv4(10, 96, 0, 0), Mask: net.CIDRMask(12, 32)}
		err = netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: to})
	}
	if err != nil {
		t.Fatal(err)
	}
	// This client has asked before the edge starts, so that the kernel has a way for its port.
	steady := p.socketIn(dns4)
	fmt.Fprint(steady, "early")
	testkit.Eventually(t, "the kernel knows the way", func() bool { return tracked(t, dns4) == 1 })
	c := newCloud()
	c.reach = echo(t)
	plain, _ := newTestRelay(t, &linux{}, c)
	r := withDNS(plain, &linux{dns: true}, resolvConf)
	running := testkit.Run(t, r.Run)
	<-c.nexts
	changes := shop(t)
	// The DNS itself is on another node: it would be relayed.
	changes.Set = append(changes.Set, kubeDNS(t, dns4.Addr().String(), dns6.Addr().String()),
		item(t, services.EndpointPath("kube-system", "kube-dns", "a", "10.88.2.53"), &services.Endpoint{
			Address: "10.88.2.53", Node: "edge2", Ready: true, Serving: true,
			Ports: []*services.Port{{Name: "dns", Protocol: "UDP", Port: 53}, {Name: "dns-tcp", Protocol: "TCP", Port: 53}}}))
	c.batches <- batch(t, false, changes)
	<-c.nexts
	wantServing(t, r, 4)
	testkit.Eventually(t, "names are answered", r.answersNames)

	fromPod := func() {
		t.Helper()
		p.in(func() error {
			for _, server := range []netip.AddrPort{dns4, dns6} {
				for _, network := range []string{"udp", "tcp"} {
					at := server.String()
					wantAnswer(t, network, at, "web.shop.svc.cluster.local.", mdns.TypeA, "NOERROR "+web4.Addr().String())
					wantAnswer(t, network, at, "web.shop.svc.cluster.local.", mdns.TypeAAAA, "NOERROR "+web6.Addr().String())
					wantAnswer(t, network, at, "example.com.shop.svc.cluster.local.", mdns.TypeA, "NXDOMAIN")
					wantAnswer(t, network, at, "example.com.", mdns.TypeA, "NOERROR 192.0.2.1")
				}
			}
			return nil
		})
	}
	fromPod()
	wantSteady := func() {
		t.Helper()
		q := new(mdns.Msg).SetQuestion("web.shop.svc.cluster.local.", mdns.TypeA)
		testkit.Within(t, 20*time.Second, "an answer to the port that has asked before", func() error {
			_, _, err := (&mdns.Client{Timeout: time.Second}).ExchangeWithConn(q, &mdns.Conn{Conn: steady})
			return err
		})
	}
	wantSteady()
	if got := c.targets(); len(got) != 0 {
		t.Errorf("queries are relayed to %v", got)
	}
	if got := tables(t); !slices.Equal(got, []string{"foreign", "kube-proxy", tableName, tableNameDNS}) {
		t.Errorf("the tables are %v", got)
	}
	running.Stop()
	if n := tracked(t, dns4); n != 0 {
		t.Errorf("%d clients still have their way in the kernel", n)
	}
	if got := tables(t); !slices.Equal(got, []string{"foreign", "kube-proxy"}) {
		t.Errorf("after the end, the tables are %v", got)
	}

	// Without the cloud, after a kill: the redirects of the process before lead nowhere.
	before := &linux{dns: true}
	if _, err := before.open(); err != nil {
		t.Fatal(err)
	}
	leave := func() {
		t.Helper()
		dead := []netip.AddrPort{netip.AddrPortFrom(addr4, 1)}
		if err := before.program(dead, rules{{dns4, protocolUDP}: {port: 1}, {dns4, protocolTCP}: {port: 1}}); err != nil {
			t.Fatal(err)
		}
	}
	leave()
	// An edge that answers no names any more removes them.
	RemoveDNSRules(slog.New(slog.DiscardHandler))
	if got := tables(t); slices.Contains(got, tableNameDNS) {
		t.Errorf("without names, the tables are %v", got)
	}
	leave()
	offline := withDNS(again(r, &linux{}, newCloud()), &linux{dns: true}, resolvConf)
	testkit.Run(t, offline.Run)
	testkit.Eventually(t, "names are answered again", offline.answersNames)
	fromPod()
	wantSteady()
}

// answersNames reports whether queries are redirected.
func (r *Relay) answersNames() bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.named
}
