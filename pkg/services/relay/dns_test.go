package relay

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	mdns "github.com/miekg/dns"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/dns"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// The cluster's DNS of the tests.
var (
	dns4 = netip.MustParseAddrPort("10.96.0.53:53")
	dns6 = netip.MustParseAddrPort("[fd00:96::53]:53")
)

// kubeDNS returns the item of the cluster's DNS at some addresses.
func kubeDNS(t testing.TB, ips ...string) *pb.Item {
	t.Helper()
	return item(t, services.ServicePath("kube-system", "kube-dns"), &services.Service{ClusterIps: ips, ClusterDns: true,
		Ports: []*services.Port{{Name: "dns", Protocol: "UDP", Port: 53}, {Name: "dns-tcp", Protocol: "TCP", Port: 53}}})
}

// withDNS makes a relay answer names, as cmd does. The resolv.conf is at a path.
func withDNS(r *Relay, k kernel, resolvConf string) *Relay {
	cfg := r.cfg
	cfg.Domain = "cluster.local"
	var made *Relay
	servers := dns.NewResolvConf(resolvConf, func(a netip.Addr) bool { return made.ServesDNS(a) })
	cfg.DNS = dns.NewResponder(dns.ResponderConfig{
		Zone: func(q mdns.Question) *mdns.Msg { return made.Resolve(q) }, Upstreams: servers.Servers,
		AllowFrom: auth.Sources{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
		Log:       slog.New(slog.DiscardHandler),
	})
	made = newRelay(cfg, r.kernel)
	made.dnsKernel = k
	return made
}

// ask asks a server, and returns the code and the first record of its answer.
func ask(network, server, name string, qtype uint16) (string, error) {
	q := new(mdns.Msg).SetQuestion(name, qtype)
	m, _, err := (&mdns.Client{Net: network, Timeout: 5 * time.Second}).Exchange(q, server)
	if err != nil {
		return "", err
	}
	text := mdns.RcodeToString[m.Rcode]
	for _, rr := range m.Answer[:min(1, len(m.Answer))] {
		text += " " + strings.Join(strings.Fields(rr.String())[4:], " ")
	}
	return text, nil
}

func wantAnswer(t testing.TB, network, server, name string, qtype uint16, want string) {
	t.Helper()
	if got, err := ask(network, server, name, qtype); err != nil || got != want {
		t.Errorf("%s by %s at %s: %q, %v; want %q", name, network, server, got, err, want)
	}
}

// The redirect of queries follows the Service of the cluster's DNS, and is mended if another program removes it.
func TestDNSFollowsTheService(t *testing.T) {
	c, f := newCloud(), &fake{}
	plain, lines := newTestRelay(t, &fake{}, c)
	r := withDNS(plain, f, "/nonexistent/resolv.conf")
	r.every = time.Millisecond
	running := testkit.Run(t, r.Run)
	<-c.nexts
	send := func(changes *pb.Changes) {
		t.Helper()
		c.batches <- batch(t, false, changes)
		<-c.nexts
	}
	if n := r.Note(); strings.Contains(n, "kube-dns") {
		t.Errorf("before the cloud has told of anything: %s", n)
	}
	send(shop(t))
	testkit.Eventually(t, "the note says that there is no DNS",
		func() bool { return strings.Contains(r.Note(), "k8s-app=kube-dns") })
	send(&pb.Changes{Set: []*pb.Item{kubeDNS(t, dns4.Addr().String(), "127.0.0.1")}})
	wantRedirected(t, f, dns4)
	testkit.Eventually(t, "nothing is wrong", func() bool { return r.Note() == "" })

	f.mu.Lock()
	f.table = nil
	f.mu.Unlock()
	wantRedirected(t, f, dns4)
	send(&pb.Changes{Set: []*pb.Item{kubeDNS(t, dns6.Addr().String(), dns4.Addr().String())}})
	wantRedirected(t, f, dns4, dns6)
	if !r.ServesDNS(dns6.Addr()) || r.ServesDNS(web4.Addr()) {
		t.Error("ServesDNS does not know which addresses are redirected")
	}
	send(&pb.Changes{Deleted: []services.Path{services.ServicePath("kube-system", "kube-dns")}})
	wantRedirected(t, f)
	testkit.Eventually(t, "the note says that there is no DNS any more",
		func() bool { return strings.Contains(r.Note(), "k8s-app=kube-dns") })
	running.Stop()
	if f.intact() {
		t.Error("after the end there is a table")
	}
	if len(lines.Lines("another program has removed the redirect of DNS")) == 0 {
		t.Error("the log does not say that the redirect was removed")
	}
}

// What keeps the kernel from redirecting is in the note.
func TestDNSWithoutRights(t *testing.T) {
	c, f := newCloud(), &fake{broken: errors.New("no rights")}
	plain, _ := newTestRelay(t, &fake{}, c)
	r := withDNS(plain, f, "/nonexistent/resolv.conf")
	testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, false, &pb.Changes{Set: []*pb.Item{kubeDNS(t, dns4.Addr().String())}})
	testkit.Eventually(t, "the note says what is missing", func() bool { return strings.Contains(r.Note(), "no rights") })
}

// Services without ClusterIP and those of another proxy have names, and nothing of them is redirected or dialled.
func TestOnlyNames(t *testing.T) {
	c, f := newCloud(), &fake{}
	plain, _ := newTestRelay(t, f, c)
	r := withDNS(plain, &fake{}, "/nonexistent/resolv.conf")
	testkit.Run(t, r.Run)
	<-c.nexts
	changes := shop(t)
	port := &services.Port{Name: "http", Protocol: "TCP", Port: 8080}
	for name, s := range map[string]*services.Service{
		"headless": {Headless: true, Ports: []*services.Port{port}},
		"other":    {ClusterIps: []string{"10.96.0.77"}, OtherProxy: true, Ports: []*services.Port{port}},
	} {
		changes.Set = append(changes.Set, item(t, services.ServicePath("shop", name), s))
		for _, node := range []string{"edge1", "edge2"} {
			address := map[string]string{"edge1": "10.88.1.70", "edge2": "10.88.2.70"}[node]
			changes.Set = append(changes.Set, item(t, services.EndpointPath("shop", name, "a", address),
				&services.Endpoint{Address: address, Node: node, Ready: true, Ports: []*services.Port{port}}))
		}
	}
	c.batches <- batch(t, false, changes)
	<-c.nexts
	wantRedirected(t, f, both...)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if r.waitForOwn(ctx, address{netip.MustParseAddrPort("10.88.1.70:8080"), protocolTCP}) {
		t.Error("the edge dials an endpoint that is known for its name alone")
	}
	for _, name := range []string{"headless", "other"} {
		q := mdns.Question{Name: name + ".shop.svc.cluster.local.", Qtype: mdns.TypeA, Qclass: mdns.ClassINET}
		if m := r.Resolve(q); m == nil || len(m.Answer) == 0 {
			t.Errorf("%s: %v", q.Name, m)
		}
	}
	if list := r.list("shop/other"); list == nil || len(list.Ports) != 0 {
		t.Errorf("the Service of another proxy is listed: %+v", list)
	}
}

// upstreamAt answers each question with 192.0.2.1 by UDP and TCP until the test ends.
func upstreamAt(t testing.TB, addr string) {
	t.Helper()
	udp, err := net.ListenPacket("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	h := mdns.HandlerFunc(func(w mdns.ResponseWriter, q *mdns.Msg) {
		m := new(mdns.Msg).SetReply(q)
		m.Answer = []mdns.RR{&mdns.A{Hdr: mdns.RR_Header{Name: q.Question[0].Name, Rrtype: mdns.TypeA,
			Class: mdns.ClassINET, Ttl: 9}, A: net.IPv4(192, 0, 2, 1)}}
		_ = w.WriteMsg(m) // the client asks again
	})
	for _, s := range []*mdns.Server{{PacketConn: udp, Handler: h}, {Listener: tcp, Handler: h}} {
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		done := make(chan error, 1) // one error is sent
		go func() { done <- s.ActivateAndServe() }()
		<-started
		t.Cleanup(func() {
			if err := s.Shutdown(); err != nil {
				t.Error(err)
			}
			<-done
		})
	}
}
