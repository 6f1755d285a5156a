package relay

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// nodeCertificate returns a certificate of a node that ends after a time.
func nodeCertificate(t testing.TB, ca testca.CA, node tunnel.NodeName, life time.Duration) *tls.Certificate {
	t.Helper()
	issuer, err := tls.X509KeyPair(ca.CertPEM(), ca.KeyPEM())
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: auth.NodeSubject(node), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(life),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
	}, issuer.Leaf, key.Public(), issuer.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// dialling is a policy that dials as the test says.
type dialling struct {
	noting
	dial func(addr string) (net.Conn, error)
	udp  func() (server string) // where datagrams to all endpoints go; nil: nowhere
}

func (d dialling) DialUDP(ctx context.Context, addr string, at func(netip.AddrPort) time.Time) (*net.UDPConn, error) {
	return anyTarget{}.DialUDP(ctx, d.udp(), at)
}

func (d dialling) DialRequest(_ context.Context, r tunnel.Request) (net.Conn, error) {
	return d.dial(r.Addr)
}

// nearSite is a LAN with edge1, whose callers the test is, and edge2, which has an endpoint.
type nearSite struct {
	// Set once.
	t            *testing.T
	ca           testca.CA
	cloud        *cloud
	one, two     *Near
	callers      func(to netip.AddrPort) net.Conn // connects to a Service on edge1
	applyOnTwo   func(changes *pb.Changes)
	cert1, cert2 atomic.Pointer[tls.Certificate]
	running      *testkit.Running // of edge2

	mu           sync.Mutex // guards the following
	lan          string     // where connections to edge2 lead in truth
	dials        []string   // addresses that edge1 has dialled
	dialled      []string   // endpoints that edge2 has dialled
	dialEndpoint func(addr string) (net.Conn, error)
	datagrams    string // where datagrams to endpoints of edge2 lead
}

var lanAddr = netip.MustParseAddr("192.168.77.2")

func newNearSite(t *testing.T) *nearSite {
	t.Helper()
	s := makeNearSite(t)
	s.run()
	return s
}

// run lets edge2 listen.
func (s *nearSite) run() {
	s.t.Helper()
	s.running = testkit.Run(s.t, s.two.Run)
	<-s.two.listened
	s.lan = s.two.addr.String()
}

// cloudReaches makes the cloud reach all endpoints.
func (s *nearSite) cloudReaches() {
	s.cloud.mu.Lock()
	defer s.cloud.mu.Unlock()
	s.cloud.reach = echo(s.t)
}

// makeNearSite returns a site whose edge2 does not listen yet.
func makeNearSite(t *testing.T) *nearSite {
	t.Helper()
	s := &nearSite{t: t, ca: testca.New(t, "nodes"), dialEndpoint: echo(t)}
	s.cert1.Store(nodeCertificate(t, s.ca, "edge1", time.Hour))
	s.cert2.Store(nodeCertificate(t, s.ca, "edge2", time.Hour))
	changes := shop(t)
	changes.Set = append(changes.Set,
		item(t, services.NodePath("edge1"), &services.Node{Edge: true, InternalIps: []string{"192.168.77.1"}}),
		item(t, services.NodePath("edge2"), &services.Node{Edge: true, InternalIps: []string{lanAddr.String()}}))
	verify := func(chain []*x509.Certificate) (tunnel.NodeName, error) {
		return auth.VerifyNode(chain, s.ca.Pool())
	}

	r1, c, callers := started(t, changes)
	s.cloud, s.callers = c, callers
	c.reach = func(string) (net.Conn, error) { return nil, tunnel.Refusef(tunnel.NoSuchNode, "the cloud is away") }
	s.one = NewNear(NewEdge(r1, noting{}), NearConfig{
		Listen: netip.MustParseAddrPort("0.0.0.0:9443"), Certificate: s.cert1.Load, Verify: verify,
	})
	s.one.networks = func() []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix("192.168.77.0/24")} }
	s.one.timeout = time.Minute // this machine may be busy
	s.one.denied.keep = time.Hour
	dial := s.one.dial
	s.one.dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		s.mu.Lock()
		s.dials = append(s.dials, addr)
		to := s.lan
		s.mu.Unlock()
		return dial(ctx, network, to)
	}

	r2, _ := newTestRelay(t, new(fake), newCloud())
	r2.cfg.Node, r2.planner.node = "edge2", "edge2"
	s.applyOnTwo = func(changes *pb.Changes) {
		if _, _, err := r2.applySeries([]*pb.Changes{changes}); err != nil {
			t.Error(err)
		}
	}
	s.applyOnTwo(changes)
	s.two = NewNear(NewEdge(r2, dialling{dial: func(addr string) (net.Conn, error) {
		s.mu.Lock()
		s.dialled = append(s.dialled, addr)
		dial := s.dialEndpoint
		s.mu.Unlock()
		return dial(addr)
	}, udp: func() string {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.datagrams
	}}), NearConfig{Listen: netip.MustParseAddrPort("127.0.0.1:0"), Certificate: s.cert2.Load, Verify: verify})
	s.two.grace = 100 * time.Millisecond
	s.two.handshakeTime, s.two.requestTime = time.Minute, time.Minute // as above
	return s
}

// leadTo makes another server of the one at the address of edge2.
func (s *nearSite) leadTo(addr string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lan = addr
}

func (s *nearSite) endpoints(dial func(addr string) (net.Conn, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dialEndpoint = dial
}

// ways returns how many conns went over the LAN, and how many through the cloud.
func (s *nearSite) ways() (near, cloud uint64) {
	ways := &s.one.relay.counts.ways
	return ways[viaNear].Load(), ways[viaCloud].Load()
}

func (s *nearSite) want(what string, near, cloud uint64) {
	s.t.Helper()
	if n, c := s.ways(); n != near || c != cloud {
		s.t.Errorf("%s: %d conns over the LAN and %d through the cloud, want %d and %d", what, n, c, near, cloud)
	}
}

// Conns to an endpoint on a node of the same site take the LAN, and the cloud is not asked, even if it is away.
func TestNear(t *testing.T) {
	s := newNearSite(t)
	wantEcho(t, s.callers(web4))
	s.want("one conn", 1, 0)
	if got := s.cloud.targets(); len(got) != 0 {
		t.Errorf("the cloud was asked for %v", got)
	}
	if !slices.Equal(s.dials, []string{"192.168.77.2:9443"}) || !slices.Equal(s.dialled, []string{"10.88.2.5:8080"}) {
		t.Errorf("edge1 dialled %v, edge2 dialled %v", s.dials, s.dialled)
	}

	sent := testkit.Random(4 << 20)
	c := s.callers(web4)
	defer c.Close()
	go func() {
		c.Write(sent)
		c.(*net.TCPConn).CloseWrite()
	}()
	if got := testkit.ReadAll(t, c); !slices.Equal(got, sent) {
		t.Errorf("of %d bytes %d came back, or others", len(sent), len(got))
	}
	if n := s.two.counts.opened.Load(); n != 2 {
		t.Errorf("edge2 counts %d conns", n)
	}
	testkit.Eventually(t, "edge2 has no conn", func() bool { return s.two.callers.live() == 0 })
}

// Datagrams take the LAN, too, and come back. One conn has all flows to an endpoint.
func TestNearDatagrams(t *testing.T) {
	s := newNearSite(t)
	s.datagrams = echoDatagrams(t)
	changes := &pb.Changes{Set: []*pb.Item{item(t, far4, datagramEndpoint("10.88.2.5", "edge2", 5353))}}
	s.applyOnTwo(changes)
	r := s.one.relay
	if _, _, err := r.applySeries([]*pb.Changes{changes}); err != nil {
		t.Fatal(err)
	}
	d := newDoor(t.Context(), r, failing(t))
	if err := d.open(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		askTimes(t, r.kernel.(*fake), d, 10)
	}
	s.want("three flows", 1, 0)
	if n := s.two.callers.live(); n != 1 {
		t.Errorf("edge2 has %d conns, want 1", n)
	}
	d.close()
	d.drain()
	testkit.Eventually(t, "edge2 has no conn", func() bool { return s.two.callers.live() == 0 })
}

// The end of one direction, and a reset, pass the shortcut as they pass the cloud.
func TestNearEnds(t *testing.T) {
	s := newNearSite(t)
	target := testkit.NewTarget(t)
	s.endpoints(func(string) (net.Conn, error) { return net.Dial("tcp", target.Address()) })
	open := func() (caller net.Conn, endpoint *net.TCPConn) {
		caller = s.callers(web4)
		t.Cleanup(func() { caller.Close() })
		return caller, target.Next(t)
	}

	caller, end := open()
	fmt.Fprintln(caller, "question")
	if err := caller.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got := testkit.ReadAll(t, end); string(got) != "question\n" {
		t.Errorf("the endpoint got %q", got)
	}
	fmt.Fprintln(end, "answer after the end of the question")
	end.Close()
	if got := testkit.ReadAll(t, caller); string(got) != "answer after the end of the question\n" {
		t.Errorf("the caller got %q", got)
	}

	for name, resets := range map[string]func(caller, end net.Conn) (other net.Conn){
		"the endpoint": func(caller, end net.Conn) net.Conn { tunnel.Reset(end); return caller },
		"the caller":   func(caller, end net.Conn) net.Conn { tunnel.Reset(caller); return end },
	} {
		caller, end := open()
		fmt.Fprintln(caller, "x")
		if line, err := bufio.NewReader(end).ReadString('\n'); line != "x\n" {
			t.Fatal(line, err)
		}
		other := resets(caller, end)
		other.SetReadDeadline(time.Now().Add(10 * time.Second))
		if n, err := other.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("after a reset by %s the other end reads %d bytes, %v", name, n, err)
		}
	}
	s.want("three conns", 3, 0)
}

// If edge2 is killed, or the LAN loses the end of a TLS stream, callers see a reset and no clean end.
func TestNearCutOff(t *testing.T) {
	s := newNearSite(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cut := make(chan struct{}) // closed to cut
	s.leadTo(testkit.ServeOn(t, ln, func(_ context.Context, c net.Conn) {
		to, err := net.Dial("tcp", s.two.addr.String())
		if err != nil {
			t.Error(err)
			return
		}
		defer to.Close()
		go io.Copy(to, c)
		go io.Copy(c, to)
		<-cut
		c.(*net.TCPConn).CloseWrite() // a FIN without close_notify
	}))
	c := s.callers(web4)
	defer c.Close()
	fmt.Fprintln(c, "x")
	if line, err := bufio.NewReader(c).ReadString('\n'); line != "x\n" {
		t.Fatal(line, err)
	}
	close(cut)
	wantReset(t, c)
}

// The answer of an endpoint counts as it does through the cloud: a caller gets it, and the cloud is not asked. If the
// other edge does not decide, the cloud is asked.
func TestNearRefusals(t *testing.T) {
	s := newNearSite(t)
	s.endpoints(func(string) (net.Conn, error) { return nil, tunnel.Refusef(tunnel.Refused, "no") })
	wantReset(t, s.callers(web4))
	if n := s.one.relay.counts.refused[tunnel.Refused].Load(); n != 1 || len(s.cloud.targets()) != 0 {
		t.Errorf("%d are counted as refused, the cloud was asked for %v", n, s.cloud.targets())
	}
	s.endpoints(echo(t))
	wantEcho(t, s.callers(web4)) // the edge is still near
	s.want("after a refusal", 1, 0)

	s.cloud.mu.Lock()
	s.cloud.reach = echo(t)
	s.cloud.mu.Unlock()
	s.applyOnTwo(&pb.Changes{Deleted: []string{far4}}) // edge2 does not know the endpoint
	wantEcho(t, s.callers(web4))
	wantEcho(t, s.callers(web4)) // for the same target edge2 is not asked again at once
	s.want("edge2 does not know the endpoint", 1, 2)
	if n := s.two.counts.refused[tunnel.Denied].Load(); n != 1 {
		t.Errorf("edge2 has denied %d", n)
	}
	if s.one.counts.failed.Load() != 0 {
		t.Error("a denied target counts as a failure of the edge")
	}
}

// Whoever is at the address of edge2 without its certificate gets no conn, and the cloud is asked. The attempt does not
// last long, and is not repeated at once.
func TestNearImpostors(t *testing.T) {
	for name, impostor := range map[string]func(s *nearSite){
		"another CA": func(s *nearSite) {
			s.cert2.Store(nodeCertificate(s.t, testca.New(s.t, "nodes"), "edge2", time.Hour))
		},
		"expired":      func(s *nearSite) { s.cert2.Store(nodeCertificate(s.t, s.ca, "edge2", -time.Minute)) },
		"another node": func(s *nearSite) { s.cert2.Store(nodeCertificate(s.t, s.ca, "edge3", time.Hour)) },
		"a server of the nodes' CA": func(s *nearSite) {
			pair := s.ca.Pair(s.t, auth.Leaf{CommonName: "edge2", Server: true, Client: true})
			s.cert2.Store(&pair)
		},
		"edge1 of another CA": func(s *nearSite) {
			s.cert1.Store(nodeCertificate(s.t, testca.New(s.t, "nodes"), "edge1", time.Hour))
		},
		"edge1 expired":   func(s *nearSite) { s.cert1.Store(nodeCertificate(s.t, s.ca, "edge1", -time.Minute)) },
		"another program": func(s *nearSite) { s.leadTo(testkit.Serve(s.t, testkit.Echo)) },
		"a program of few words": func(s *nearSite) {
			s.leadTo(testkit.Serve(s.t, func(c *net.TCPConn) { c.Read(make([]byte, 1<<16)) }))
		},
		"a program that is silent": func(s *nearSite) { s.leadTo(testkit.NewTarget(s.t).Address()) },
		"nobody":                   func(s *nearSite) { s.running.Stop() },
	} {
		t.Run(name, func(t *testing.T) {
			s := newNearSite(t)
			s.cloud.mu.Lock()
			s.cloud.reach = echo(t)
			s.cloud.mu.Unlock()
			impostor(s)
			s.one.timeout = nearTimeout
			start := time.Now()
			wantEcho(t, s.callers(web4))
			if took := time.Since(start); took > nearTimeout+5*time.Second { // five seconds for a busy machine
				t.Errorf("the caller waited for %s", took)
			}
			wantEcho(t, s.callers(web4))
			s.want("both conns", 0, 2)
			if n := s.one.counts.failed.Load(); n != 1 || len(s.dials) != 1 {
				t.Errorf("%d attempts have failed, edge1 dialled %v", n, s.dials)
			}
			if len(s.dialled) != 0 {
				t.Errorf("edge2 dialled %v", s.dialled)
			}
		})
	}
}

// A node that edge2 does not know, or whose Node is gone, gets no conn; and the conns that it has end.
func TestNearUnknownNode(t *testing.T) {
	s := newNearSite(t)
	c := s.callers(web4)
	defer c.Close()
	fmt.Fprintln(c, "x")
	if line, err := bufio.NewReader(c).ReadString('\n'); line != "x\n" {
		t.Fatal(line, err)
	}
	// After a restart of the cloud, the cloud may not know for a while that the edge serves Services.
	s.applyOnTwo(&pb.Changes{Set: []*pb.Item{item(t, services.NodePath("edge1"), &services.Node{})}})
	fmt.Fprintln(c, "y")
	if line, err := bufio.NewReader(c).ReadString('\n'); line != "y\n" {
		t.Fatal(line, err)
	}
	s.applyOnTwo(&pb.Changes{Deleted: []string{services.NodePath("edge1")}})
	wantReset(t, c)
	s.cloud.mu.Lock()
	s.cloud.reach = echo(t)
	s.cloud.mu.Unlock()
	wantEcho(t, s.callers(web4))
	s.want("two conns", 1, 1)
}

// connect connects to edge2 as a node with a certificate, and sends a text.
func (s *nearSite) connect(cert *tls.Certificate, text string) *tls.Conn {
	s.t.Helper()
	c, err := tls.Dial("tcp", s.two.addr.String(), &tls.Config{
		Certificates: []tls.Certificate{*cert}, NextProtos: []string{nearProtocol},
		InsecureSkipVerify: true, //nolint:gosec // the test is the attacker
	})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(30 * time.Second))
	io.WriteString(c, text) // it fails if edge2 has closed the connection: the test reads that
	return c
}

// A node reaches what the cloud lets it reach, and nothing else, whatever it asks for.
func TestNearHostileNode(t *testing.T) {
	s := newNearSite(t)
	port := []*services.Port{{Name: "http", Protocol: "TCP", Port: 8080}, {Name: "dns", Protocol: "UDP", Port: 53}}
	at := func(addr, node string) *services.Endpoint {
		e := endpoint(addr, node)
		e.Ports = port
		return e
	}
	path := func(service, addr string) string { return services.EndpointPath("shop", service, "x", addr) }
	s.applyOnTwo(&pb.Changes{Set: []*pb.Item{
		item(t, services.ServicePath("shop", "headless"), &services.Service{Headless: true, Ports: port}),
		item(t, path("headless", "10.88.2.5"), at("10.88.2.5", "edge2")), // an address of web, too
		item(t, services.ServicePath("shop", "proxied"), &services.Service{
			ClusterIps: []string{"10.96.0.77"}, Ports: port, OtherProxy: true}),
		item(t, path("proxied", "10.88.2.5"), at("10.88.2.5", "edge2")),
		item(t, services.ServicePath("shop", "local"), &services.Service{
			ClusterIps: []string{"10.96.0.78"}, InternalLocal: true, Ports: port}),
		item(t, path("local", "10.88.2.5"), at("10.88.2.5", "edge2")), // for callers on its node alone
		item(t, path("web", "10.88.3.9"), at("10.88.3.9", "edge3")),
		item(t, path("web", "10.96.0.10"), at("10.96.0.10", "edge2")), // a ClusterIP
		item(t, path("web", "127.0.0.1"), at("127.0.0.1", "edge2")),
		item(t, path("gone", "10.88.2.7"), at("10.88.2.7", "edge2")), // of no Service
	}})
	cert := s.cert1.Load()
	for _, target := range []string{
		far4 + " TCP 8081", far4 + " TCP 0", far4 + " UDP 53", far4 + " tcp 8080", far4, "", " ", "10.88.2.5:8080",
		"service/shop/web TCP 8080", far4 + " TCP 8080 x", far4 + "\x00 TCP 8080",
		path("headless", "10.88.2.5") + " TCP 8080", path("proxied", "10.88.2.5") + " TCP 8080",
		path("local", "10.88.2.5") + " TCP 8080",
		path("web", "10.88.3.9") + " TCP 8080", path("web", "10.96.0.10") + " TCP 8080",
		path("web", "127.0.0.1") + " TCP 8080", path("gone", "10.88.2.7") + " TCP 8080",
	} {
		got, err := io.ReadAll(s.connect(cert, target+"\n"))
		if !strings.HasPrefix(string(got), "denied ") || strings.Count(string(got), "\n") != 1 || err != nil {
			t.Errorf("%q: %q, %v", target, got, err)
		}
	}
	stranger := nodeCertificate(t, s.ca, "edge9", time.Hour)
	if got, err := io.ReadAll(s.connect(stranger, far4+" TCP 8080\n")); !strings.HasPrefix(string(got), "denied ") {
		t.Errorf("a node that is not known: %q, %v", got, err)
	}
	if len(s.dialled) != 0 {
		t.Errorf("edge2 dialled %v", s.dialled)
	}
	got := make([]byte, len(nearOpened)+1)
	if _, err := io.ReadFull(s.connect(cert, far4+" TCP 8080\n"), got); err != nil || string(got) != nearOpened+"\n" {
		t.Errorf("an endpoint of the node: %q, %v", got, err)
	}
}

// A node that sends no request is disconnected.
func TestNearNoRequest(t *testing.T) {
	s := makeNearSite(t)
	s.two.requestTime = nearRequestTime
	s.run()
	for what, text := range map[string]string{
		"a line without end": strings.Repeat("x", maxNear), "half a line": far4, "nothing": "",
	} {
		if got, err := io.ReadAll(s.connect(s.cert1.Load(), text)); len(got) > 0 || err == nil {
			t.Errorf("%s: %q, %v", what, got, err)
		}
	}
	testkit.Eventually(t, "edge2 has no conn", func() bool { return s.two.callers.live() == 0 })
}

// A node that edge2 does not know counts as a stranger, although it has a certificate: its silent connections are
// bounded.
func TestNearUnknownNodesAreStrangers(t *testing.T) {
	s := newNearSite(t)
	unknown := nodeCertificate(t, s.ca, "edge9", time.Hour)
	for range maxNearPerSource {
		s.connect(unknown, "")
	}
	c, err := tls.Dial("tcp", s.two.addr.String(), &tls.Config{
		Certificates: []tls.Certificate{*unknown}, NextProtos: []string{nearProtocol},
		InsecureSkipVerify: true, //nolint:gosec // the test is the attacker
	})
	if err == nil {
		c.Close()
		t.Errorf("a source has more than %d silent connections", maxNearPerSource)
	}
}

// One node cannot take all conns, and all nodes together cannot take more than there are.
func TestNearLimits(t *testing.T) {
	var all nearCallers
	known := func(tunnel.NodeName) bool { return true }
	var leaves []func()
	enter := func(node tunnel.NodeName) error {
		_, leave, err := all.enter(t.Context(), node, known)
		leaves = append(leaves, leave)
		return err
	}
	for i := range maxNearServed {
		if err := enter(tunnel.NodeName(fmt.Sprint("edge", i/maxNearPerNode))); err != nil {
			t.Fatalf("conn %d: %v", i, err)
		}
		if i == maxNearPerNode-1 {
			if err := enter("edge0"); tunnel.CodeOf(err) != tunnel.Overloaded {
				t.Fatalf("one more conn of a node: %v", err)
			}
		}
	}
	if err := enter("other"); tunnel.CodeOf(err) != tunnel.Overloaded || all.live() != maxNearServed {
		t.Errorf("one more conn: %v", err)
	}
	for _, leave := range leaves {
		leave()
	}
	if all.live() != 0 || len(all.of) != 0 {
		t.Errorf("%d conns and %d nodes are left", all.live(), len(all.of))
	}
}

// An edge that has too many conns of this one still is of this site: the cloud is asked for further conns until
// that edge has room.
func TestNearFull(t *testing.T) {
	s := newNearSite(t)
	s.cloudReaches()
	var leaves []func()
	for range maxNearPerNode {
		_, leave, err := s.two.callers.enter(t.Context(), "edge1", s.two.knows)
		if err != nil {
			t.Fatal(err)
		}
		leaves = append(leaves, leave)
	}
	wantEcho(t, s.callers(web4))
	wantEcho(t, s.callers(web4))
	s.want("edge2 is full", 0, 2)
	if n := s.two.counts.refused[tunnel.Overloaded].Load(); n != 2 || s.one.counts.failed.Load() != 0 {
		t.Errorf("edge2 has refused %d, edge1 counts %d failures", n, s.one.counts.failed.Load())
	}
	for _, leave := range leaves {
		leave()
	}
	wantEcho(t, s.callers(web4))
	s.want("edge2 has room", 1, 2)
}

// After a drain, open conns go on, and the cloud is asked for further ones.
func TestNearDrains(t *testing.T) {
	s := newNearSite(t)
	s.cloudReaches()
	c := s.callers(web4)
	fmt.Fprintln(c, "x")
	if line, err := bufio.NewReader(c).ReadString('\n'); line != "x\n" {
		t.Fatal(line, err)
	}
	s.two.Drain()
	wantEcho(t, s.callers(web4))
	s.want("edge2 is drained", 1, 1)
	if n := s.two.counts.refused[tunnel.Draining].Load(); n != 1 || s.one.counts.failed.Load() != 0 {
		t.Errorf("edge2 has refused %d, edge1 counts %d failures", n, s.one.counts.failed.Load())
	}
	if n := s.two.Conns(); n != 1 {
		t.Errorf("edge2 has %d conns", n)
	}
	wantEcho(t, c)
	testkit.Eventually(t, "edge2 has no conn", func() bool { return s.two.Conns() == 0 })
}

// The edge that calls knows when all requests have an answer that was handed on. The other edge never says so.
func TestNearAnswered(t *testing.T) {
	s := newNearSite(t)
	target := testkit.NewTarget(t)
	s.endpoints(func(string) (net.Conn, error) { return net.Dial("tcp", target.Address()) })
	addrs := []netip.AddrPort{netip.AddrPortFrom(lanAddr, 9443)}
	made, refusal, err := s.one.open(t.Context(), "edge2", addrs, far4+" TCP 8080")
	if err != nil || refusal != nil {
		t.Fatal(refusal, err)
	}
	c := made.(*nearConn)
	defer c.Reset()
	want := func(when string, moved int64, answered bool) {
		t.Helper()
		if n, ok := c.Answered(); n != moved || ok != answered {
			t.Errorf("%s: %d bytes, answered: %t; want %d, %t", when, n, ok, moved, answered)
		}
	}
	want("at first", 0, false)
	end := target.Next(t)
	write := func(to net.Conn, text string) {
		t.Helper()
		if _, err := io.WriteString(to, text); err != nil {
			t.Fatal(err)
		}
	}
	read := func() {
		t.Helper()
		if _, err := c.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	write(c, "ab")
	want("a request", 2, false)
	write(end, "xy")
	read()
	want("before a byte is handed on", 3, false)
	read()
	want("before the second byte is handed on", 4, false)
	reading := make(chan struct{}) // closed when the last Read has returned
	go func() {
		defer close(reading)
		c.Read(make([]byte, 1))
	}()
	testkit.Eventually(t, "all is handed on", func() bool { _, ok := c.Answered(); return ok })
	want("after that", 4, true)
	other := &nearConn{received: true, passed: true}
	if _, ok := other.Answered(); ok {
		t.Error("the edge that has the endpoint says that all requests have an answer")
	}
	write(c, "c")
	want("a further request", 5, false)
	write(end, "z")
	<-reading
	want("with the answer in Read", 6, false)
}

// At its end, the edge lets conns go on for a while.
func TestNearStops(t *testing.T) {
	s := newNearSite(t)
	c := s.callers(web4)
	defer c.Close()
	fmt.Fprintln(c, "x")
	if line, err := bufio.NewReader(c).ReadString('\n'); line != "x\n" {
		t.Fatal(line, err)
	}
	s.running.Stop()
	wantReset(t, c)
	cfg := s.two.cfg
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	cfg.Listen = taken.Addr().(*net.TCPAddr).AddrPort()
	err = NewNear(s.two.edge, cfg).Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "near in [mode.edge.services]") {
		t.Errorf("a port that is taken: %v", err)
	}
}

// Only nodes that seem to be of this site are tried, at the addresses of their Nodes.
func TestNearAddresses(t *testing.T) {
	r, _ := newTestRelay(t, new(fake), newCloud())
	n := NewNear(NewEdge(r, noting{}), NearConfig{Listen: netip.MustParseAddrPort("[::]:9443")})
	n.networks = func() []netip.Prefix {
		return []netip.Prefix{netip.MustParsePrefix("192.168.77.0/24"), netip.MustParsePrefix("fd00:77::/64")}
	}
	wrong := []string{"127.0.0.1", "169.254.1.1", "224.0.0.1", "0.0.0.0", "x", ""}
	many := []string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"}
	set := new(pb.Changes)
	for name, node := range map[string]*services.Node{
		"edge1":    {Edge: true, Zone: "hall", InternalIps: []string{"192.168.77.1"}},
		"lan":      {Edge: true, InternalIps: []string{"192.168.77.2", "fd00:77::2", "10.0.0.2", "192.168.78.2"}},
		"mapped":   {Edge: true, InternalIps: []string{"::ffff:192.168.77.3"}},
		"zone":     {Edge: true, Zone: "hall", InternalIps: []string{"10.0.0.2"}},
		"far":      {Edge: true, Zone: "yard", InternalIps: []string{"10.0.0.2"}},
		"noedge":   {InternalIps: []string{"192.168.77.4"}},
		"same":     {Edge: true, InternalIps: []string{"192.168.77.1"}},
		"bad":      {Edge: true, Zone: "hall", InternalIps: wrong},
		"many":     {Edge: true, Zone: "hall", InternalIps: many},
		"withzone": {Edge: true, Zone: "hall", InternalIps: []string{"fe80::1%eth0"}},
	} {
		set.Set = append(set.Set, item(t, services.NodePath(name), node))
	}
	if _, _, err := r.applySeries([]*pb.Changes{set}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"edge1": "[]", "lan": "[192.168.77.2:9443 [fd00:77::2]:9443]", "mapped": "[192.168.77.3:9443]",
		"zone": "[10.0.0.2:9443]", "far": "[]", "noedge": "[]", "same": "[]", "bad": "[]", "unknown": "[]", "withzone": "[]",
		"many": "[10.0.0.1:9443 10.0.0.2:9443 10.0.0.3:9443 10.0.0.4:9443]",
	} {
		if got := fmt.Sprint(n.addrsOf(name)); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// After a failure an edge is left alone, for longer each time; then one caller tries. Other networks or addresses end
// that.
func TestNearPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, lines := newTestRelay(t, new(fake), newCloud())
		n := NewNear(NewEdge(r, noting{}), NearConfig{Listen: netip.MustParseAddrPort("[::]:9443")})
		network := "192.168.77.0/24"
		n.networks = func() []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix(network)} }
		place := func(addr string) {
			node := item(t, services.NodePath("edge2"), &services.Node{Edge: true, InternalIps: []string{addr}})
			if _, _, err := r.applySeries([]*pb.Changes{{Set: []*pb.Item{node}}}); err != nil {
				t.Error(err)
			}
		}
		place("192.168.77.2")
		failed := errors.New("no")
		try := func(err error) bool {
			p, failures := n.enter("edge2")
			if p == nil {
				return false
			}
			n.leave("edge2", p, failures, err, false)
			return true
		}
		// Three callers come at once. Together they are one failure.
		p, failures := n.enter("edge2")
		n.enter("edge2")
		n.enter("edge2")
		for range 3 {
			n.leave("edge2", p, failures, failed, false)
		}
		if p.dialing != 0 {
			t.Errorf("%d attempts are under way", p.dialing)
		}
		for pause := minNearPause; pause < 2*maxNearPause; pause *= 2 {
			pause := min(pause, maxNearPause)
			time.Sleep(pause - time.Second)
			if try(nil) {
				t.Fatalf("tried before the end of a pause of %s", pause)
			}
			time.Sleep(time.Second)
			p, failures := n.enter("edge2")
			if p == nil {
				t.Fatalf("not tried after a pause of %s", pause)
			}
			if try(nil) {
				t.Errorf("two callers try after a pause of %s", pause)
			}
			n.leave("edge2", p, failures, failed, false)
		}
		if got := lines.Lines("did not answer over the local network"); len(got) != 1 {
			t.Errorf("the log has %q", got)
		}
		time.Sleep(maxNearPause)
		if !try(nil) || !try(failed) || try(nil) {
			t.Error("a success does not end the pauses, or a failure begins none")
		}
		place("192.168.77.3")
		if !try(failed) || try(nil) {
			t.Error("an edge with another address is not tried")
		}
		network = "192.168.0.0/16"
		time.Sleep(lookPause)
		if !try(nil) {
			t.Error("after a change of networks, the edge is not tried")
		}
		// A caller that gives up says nothing about the edge.
		p, failures = n.enter("edge2")
		n.leave("edge2", p, failures, context.Canceled, true)
		if !try(nil) {
			t.Error("a caller that gave up begins a pause")
		}
		for range maxNearDials {
			if p, _ := n.enter("edge2"); p == nil {
				t.Fatal("too few attempts at once")
			}
		}
		if try(nil) {
			t.Error("too many attempts at once")
		}
	})
}

// The answers are read as they are written, and no byte behind them is lost.
func FuzzNear(f *testing.F) {
	f.Add("opened\nbytes of the conn")
	f.Add("refused connection refused\n")
	f.Add("endpoint/shop/web/web-a/10.88.2.5 TCP 8080\nx")
	f.Add("denied \x1b[2J\xff\n")
	f.Add(strings.Repeat("x", maxNear+1))
	f.Fuzz(func(t *testing.T, text string) {
		r := strings.NewReader(text)
		line, err := readLine(r)
		if before, after, found := strings.Cut(text, "\n"); err == nil {
			if rest, _ := io.ReadAll(r); !found || line != before || string(rest) != after {
				t.Errorf("%q: line %q, rest %q", text, line, rest)
			}
		} else if found && len(before) < maxNear {
			t.Errorf("%q: %v", text, err)
		}
		if target, err := services.ParseTarget(line); err == nil && target.String() != line {
			t.Errorf("%q is parsed as %q", line, target)
		}
		if refusal, err := readAnswer(strings.NewReader(text)); err == nil && refusal != nil {
			if refusal.Text != tunnel.Printable(refusal.Text) || len(refusal.Text) > maxNear*3 {
				t.Errorf("%q: the text is %q", text, refusal.Text)
			}
		}
		for _, code := range tunnel.Codes() {
			got, err := readAnswer(strings.NewReader(answerLine(tunnel.Refusef(code, "%s", text))))
			if err != nil || got == nil || got.Code != code {
				t.Errorf("%s %q is read as %v, %v", code, text, got, err)
			}
		}
	})
}
