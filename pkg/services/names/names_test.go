package names

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

func item(t testing.TB, p services.Path, v proto.Message) *pb.Item {
	t.Helper()
	b, err := proto.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return &pb.Item{Path: p, Value: b}
}

func endpoint(address, hostname string, ready bool, ports ...*services.Port) *services.Endpoint {
	return &services.Endpoint{Address: address, Hostname: hostname, Ready: ready, Ports: ports}
}

// cluster returns items of all kinds.
func cluster(t testing.TB) *pb.Changes {
	t.Helper()
	db := []*services.Port{{Name: "sql", Protocol: "TCP", Port: 5432}, {Name: "", Protocol: "UDP", Port: 9}}
	return &pb.Changes{Set: []*pb.Item{
		item(t, "service/default/kubernetes", &services.Service{ClusterIps: []string{"10.3.0.1"},
			Ports: []*services.Port{{Name: "https", Protocol: "TCP", Port: 443}}}),
		item(t, "service/shop/web", &services.Service{ClusterIps: []string{"10.3.0.2", "fd00:3::2"},
			Ports: []*services.Port{{Name: "http", Protocol: "TCP", Port: 80}, {Name: "http3", Protocol: "UDP", Port: 80},
				{Protocol: "SCTP", Port: 1}}}),
		item(t, services.EndpointPath("shop", "web", "a", "10.88.1.9"), endpoint("10.88.1.9", "web-0", true)),
		item(t, "service/shop/db", &services.Service{Headless: true, Ports: db}),
		item(t, services.EndpointPath("shop", "db", "a", "10.88.1.1"), endpoint("10.88.1.1", "db-0", true, db...)),
		item(t, services.EndpointPath("shop", "db", "a", "10.88.1.2"), endpoint("10.88.1.2", "", true, db...)),
		item(t, services.EndpointPath("shop", "db", "a", "10.88.1.3"), endpoint("10.88.1.3", "db-2", false, db...)),
		item(t, services.EndpointPath("shop", "db", "b", "10.88.1.2"), endpoint("10.88.1.2", "", true, db...)),
		item(t, services.EndpointPath("shop", "db", "v6", "fd00:88::"), endpoint("fd00:88::", "", true, db...)),
		item(t, services.EndpointPath("shop", "db", "v6", "fd00:88::1"), endpoint("fd00:88::1", "db-0", true, db...)),
		item(t, "service/shop/early", &services.Service{Headless: true, PublishNotReady: true}),
		item(t, services.EndpointPath("shop", "early", "a", "10.88.1.4"), endpoint("10.88.1.4", "early-0", false)),
		item(t, "service/shop/none", &services.Service{Headless: true}),
		item(t, services.EndpointPath("shop", "none", "a", "10.88.1.5"), endpoint("10.88.1.5", "", false)),
		item(t, "service/shop/away", &services.Service{ExternalName: "www.Example.com"}),
		item(t, "service/shop/alias", &services.Service{ExternalName: "web.shop.svc.cluster.local."}),
		item(t, "service/shop/lost", &services.Service{ExternalName: "nobody.shop.svc.cluster.local"}),
		item(t, "service/shop/loop", &services.Service{ExternalName: "loop.shop.svc.cluster.local"}),
		item(t, "service/shop/number", &services.Service{ExternalName: "192.0.2.1"}),
		item(t, "service/shop/other", &services.Service{ClusterIps: []string{"10.3.0.3"}, OtherProxy: true}),
	}}
}

// zoneOf returns the zone of changes.
func zoneOf(t testing.TB, domain string, changes *pb.Changes) (*Zone, *services.State) {
	t.Helper()
	s, z := services.NewState(), NewZone(domain)
	d, err := s.Apply(changes)
	if err != nil {
		t.Fatal(err)
	}
	z.Update(s, &d)
	return z, s
}

// text returns a reply: its code, the records of its answer in order, and its SOA.
func text(m *dns.Msg) string {
	if m == nil {
		return "not ours"
	}
	var all []string
	for _, rr := range m.Answer {
		fields := strings.Fields(rr.String())
		all = append(all, strings.Join(append(fields[:1], fields[3:]...), " "))
	}
	slices.Sort(all)
	for _, rr := range m.Ns {
		all = append(all, "SOA "+rr.Header().Name)
	}
	return strings.Join(append([]string{dns.RcodeToString[m.Rcode]}, all...), "; ")
}

// The numbers are sections of the specification.
func TestSpecification(t *testing.T) {
	z, s := zoneOf(t, "cluster.local", cluster(t))
	const (
		noName = "NXDOMAIN; SOA cluster.local."
		noData = "NOERROR; SOA cluster.local."
	)
	for _, c := range []struct{ question, want string }{
		// 2.2
		{"dns-version.cluster.local. TXT", `NOERROR; dns-version.cluster.local. TXT "1.1.0"`},
		// 2.3.1
		{"kubernetes.default.svc.cluster.local. A", "NOERROR; kubernetes.default.svc.cluster.local. A 10.3.0.1"},
		{"kubernetes.default.svc.cluster.local. AAAA", noData},
		{"web.shop.svc.cluster.local. AAAA", "NOERROR; web.shop.svc.cluster.local. AAAA fd00:3::2"},
		{"other.shop.svc.cluster.local. A", "NOERROR; other.shop.svc.cluster.local. A 10.3.0.3"},
		// 2.1: comparisons ignore case; the answer has the name as in the question.
		{"WEB.Shop.svc.CLUSTER.local. A", "NOERROR; WEB.Shop.svc.CLUSTER.local. A 10.3.0.2"},
		// 2.3.2
		{"_https._tcp.kubernetes.default.svc.cluster.local. SRV", "NOERROR; " +
			"_https._tcp.kubernetes.default.svc.cluster.local. SRV 0 100 443 kubernetes.default.svc.cluster.local."},
		{"_HTTP3._UDP.web.shop.svc.cluster.local. SRV", "NOERROR; _HTTP3._UDP.web.shop.svc.cluster.local. " +
			"SRV 0 100 80 web.shop.svc.cluster.local."},
		{"_http._tcp.web.shop.svc.cluster.local. A", noData},
		{"_tcp.web.shop.svc.cluster.local. SRV", noData},
		{"_sctp.web.shop.svc.cluster.local. SRV", noName}, // its only port has no name
		{"_http._udp.web.shop.svc.cluster.local. SRV", noName},
		{"_._sctp.web.shop.svc.cluster.local. SRV", noName},
		{"http._tcp.web.shop.svc.cluster.local. SRV", noName},
		{"_http.tcp.web.shop.svc.cluster.local. SRV", noName},
		{"db.shop.svc.cluster.local. SRV", "NOERROR; " +
			"db.shop.svc.cluster.local. SRV 0 100 5432 10-88-1-2.db.shop.svc.cluster.local.; " +
			"db.shop.svc.cluster.local. SRV 0 100 5432 db-0.db.shop.svc.cluster.local.; " +
			"db.shop.svc.cluster.local. SRV 0 100 5432 fd00-88--0.db.shop.svc.cluster.local.; " +
			"db.shop.svc.cluster.local. SRV 0 100 9 10-88-1-2.db.shop.svc.cluster.local.; " +
			"db.shop.svc.cluster.local. SRV 0 100 9 db-0.db.shop.svc.cluster.local.; " +
			"db.shop.svc.cluster.local. SRV 0 100 9 fd00-88--0.db.shop.svc.cluster.local."},
		{"db-0.db.shop.svc.cluster.local. SRV", "NOERROR; " +
			"db-0.db.shop.svc.cluster.local. SRV 0 100 5432 db-0.db.shop.svc.cluster.local.; " +
			"db-0.db.shop.svc.cluster.local. SRV 0 100 9 db-0.db.shop.svc.cluster.local."},
		{"none.shop.svc.cluster.local. SRV", noName},
		{"kubernetes.default.svc.cluster.local. SRV", "NOERROR; " +
			"kubernetes.default.svc.cluster.local. SRV 0 100 443 kubernetes.default.svc.cluster.local."},
		// 2.3.3
		{"1.0.3.10.in-addr.arpa. PTR", "NOERROR; 1.0.3.10.in-addr.arpa. PTR kubernetes.default.svc.cluster.local."},
		{reverseOf("fd00:3::2") + " PTR", "NOERROR; " + reverseOf("fd00:3::2") + " PTR web.shop.svc.cluster.local."},
		{"1.0.3.10.in-addr.arpa. A", "NOERROR; SOA 1.0.3.10.in-addr.arpa."},
		{"9.9.3.10.in-addr.arpa. PTR", "not ours"},
		{"0.3.10.in-addr.arpa. PTR", "not ours"},
		{"in-addr.arpa. PTR", "not ours"},
		{"1.0.0.3.10.in-addr.arpa. PTR", "not ours"},
		// 2.4.1
		{"db.shop.svc.cluster.local. A", "NOERROR; db.shop.svc.cluster.local. A 10.88.1.1; " +
			"db.shop.svc.cluster.local. A 10.88.1.2"},
		{"db.shop.svc.cluster.local. AAAA", "NOERROR; db.shop.svc.cluster.local. AAAA fd00:88::; " +
			"db.shop.svc.cluster.local. AAAA fd00:88::1"},
		{"db-0.db.shop.svc.cluster.local. A", "NOERROR; db-0.db.shop.svc.cluster.local. A 10.88.1.1"},
		{"db-0.db.shop.svc.cluster.local. AAAA", "NOERROR; db-0.db.shop.svc.cluster.local. AAAA fd00:88::1"},
		{"10-88-1-2.db.shop.svc.cluster.local. A", "NOERROR; 10-88-1-2.db.shop.svc.cluster.local. A 10.88.1.2"},
		{"fd00-88--0.db.shop.svc.cluster.local. AAAA", "NOERROR; fd00-88--0.db.shop.svc.cluster.local. AAAA fd00:88::"},
		{"10-88-1-1.db.shop.svc.cluster.local. A", noName}, // it has a hostname
		{"db-2.db.shop.svc.cluster.local. A", noName},      // it is not ready
		{"early-0.early.shop.svc.cluster.local. A", "NOERROR; early-0.early.shop.svc.cluster.local. A 10.88.1.4"},
		{"none.shop.svc.cluster.local. A", noName},
		// 2.4.2
		{"_sql._tcp.db.shop.svc.cluster.local. SRV", "NOERROR; " +
			"_sql._tcp.db.shop.svc.cluster.local. SRV 0 100 5432 10-88-1-2.db.shop.svc.cluster.local.; " +
			"_sql._tcp.db.shop.svc.cluster.local. SRV 0 100 5432 db-0.db.shop.svc.cluster.local.; " +
			"_sql._tcp.db.shop.svc.cluster.local. SRV 0 100 5432 fd00-88--0.db.shop.svc.cluster.local."},
		{"_tcp.none.shop.svc.cluster.local. SRV", noName},
		// 2.4.3
		{"1.1.88.10.in-addr.arpa. PTR", "NOERROR; 1.1.88.10.in-addr.arpa. PTR db-0.db.shop.svc.cluster.local."},
		{"2.1.88.10.in-addr.arpa. PTR", "NOERROR; 2.1.88.10.in-addr.arpa. PTR 10-88-1-2.db.shop.svc.cluster.local."},
		{"3.1.88.10.in-addr.arpa. PTR", "not ours"}, // not ready
		{"9.1.88.10.in-addr.arpa. PTR", "NOERROR; 9.1.88.10.in-addr.arpa. PTR web-0.web.shop.svc.cluster.local."},
		// 2.5
		{"away.shop.svc.cluster.local. A", "NOERROR; away.shop.svc.cluster.local. CNAME www.Example.com."},
		{"away.shop.svc.cluster.local. CNAME", "NOERROR; away.shop.svc.cluster.local. CNAME www.Example.com."},
		{"alias.shop.svc.cluster.local. A", "NOERROR; alias.shop.svc.cluster.local. CNAME web.shop.svc.cluster.local.; " +
			"web.shop.svc.cluster.local. A 10.3.0.2"},
		{"lost.shop.svc.cluster.local. A", "NXDOMAIN; lost.shop.svc.cluster.local. CNAME nobody.shop.svc.cluster.local.; " +
			"SOA cluster.local."},
		{"loop.shop.svc.cluster.local. A", "SERVFAIL"},
		{"number.shop.svc.cluster.local. A", noName},
		{"x.away.shop.svc.cluster.local. A", noName},
		// 2.6
		{"10-88-1-5.shop.pod.cluster.local. A", "NOERROR; 10-88-1-5.shop.pod.cluster.local. A 10.88.1.5"},
		{"fd00--5.shop.pod.cluster.local. AAAA", "NOERROR; fd00--5.shop.pod.cluster.local. AAAA fd00::5"},
		{"10-88-1-5.shop.pod.cluster.local. AAAA", noData},
		{"shop.pod.cluster.local. A", noData},
		{"web.shop.pod.cluster.local. A", noName},
		// As CoreDNS does.
		{"web-0.web.shop.svc.cluster.local. A", "NOERROR; web-0.web.shop.svc.cluster.local. A 10.88.1.9"},
		// Names without records that have names below them, and names that search lists make.
		{"cluster.local. A", noData},
		{"cluster.local. SOA", "NOERROR; cluster.local. SOA . . 1 1 1 1 5"},
		{"svc.cluster.local. A", noData},
		{"shop.svc.cluster.local. A", noData},
		{"nowhere.svc.cluster.local. A", noName},
		{"nobody.shop.svc.cluster.local. A", noName},
		{"example.com.shop.svc.cluster.local. A", noName},
		{"a.b.example.com.shop.svc.cluster.local. A", noName},
		{"example.com.svc.cluster.local. A", noName},
		{"example.com.cluster.local. A", noName},
		{`web\.shop\.svc.cluster.local. A`, noName},
		{`x\.cluster.local. A`, "not ours"},
		{"example.com. A", "not ours"},
		{"notcluster.local. A", "not ours"},
		{"local. A", "not ours"},
		{". NS", "not ours"},
	} {
		name, typ, _ := strings.Cut(c.question, " ")
		got := text(z.Answer(s, dns.Question{Name: name, Qtype: dns.StringToType[typ], Qclass: dns.ClassINET}))
		if got != c.want {
			t.Errorf("%s:\n%s, want\n%s", c.question, got, c.want)
		}
	}
}

func reverseOf(address string) string {
	name, err := dns.ReverseAddr(address)
	if err != nil {
		panic(err)
	}
	return name
}

// Each record may be cached for some seconds, and SRV records come with the addresses of their targets.
func TestRecords(t *testing.T) {
	z, s := zoneOf(t, "K8s.example.", cluster(t))
	m := z.Answer(s, dns.Question{Name: "_sql._tcp.db.shop.svc.k8s.example.", Qtype: dns.TypeSRV, Qclass: dns.ClassINET})
	var addresses []string
	for _, rr := range m.Extra {
		addresses = append(addresses, strings.Join(strings.Fields(rr.String()), " "))
	}
	want := []string{
		"db-0.db.shop.svc.k8s.example. 5 IN A 10.88.1.1", "10-88-1-2.db.shop.svc.k8s.example. 5 IN A 10.88.1.2",
		"fd00-88--0.db.shop.svc.k8s.example. 5 IN AAAA fd00:88::", "db-0.db.shop.svc.k8s.example. 5 IN AAAA fd00:88::1",
	}
	for _, one := range want {
		if !slices.Contains(addresses, one) {
			t.Errorf("%q lack %s", addresses, one)
		}
	}
	for _, rr := range slices.Concat(m.Answer, m.Extra) {
		if rr.Header().Ttl != ttl {
			t.Errorf("the record %s", rr)
		}
	}
	m = z.Answer(s, dns.Question{Name: "nobody.k8s.example.", Qtype: dns.TypeA, Qclass: dns.ClassINET})
	if soa, ok := m.Ns[0].(*dns.SOA); !ok || soa.Minttl != ttl || soa.Hdr.Ttl != ttl {
		t.Errorf("the SOA is %v", m.Ns)
	}
}

// What the zone keeps beside the state follows each change, as if it were made anew.
func TestUpdate(t *testing.T) {
	z, s := zoneOf(t, "cluster.local", cluster(t))
	check := func(what string) {
		t.Helper()
		anew := NewZone("cluster.local")
		anew.Load(s)
		if got, want := fmt.Sprint(z.namespaces, z.pointers), fmt.Sprint(anew.namespaces, anew.pointers); got != want {
			t.Errorf("%s: the zone has\n%s\nwant\n%s", what, got, want)
		}
	}
	check("at first")
	for _, step := range []*pb.Changes{
		{Set: []*pb.Item{item(t, "service/shop/web", &services.Service{ClusterIps: []string{"10.3.0.9"}})}},
		{Deleted: []services.Path{services.EndpointPath("shop", "db", "a", "10.88.1.1")}},
		{Set: []*pb.Item{item(t, services.EndpointPath("shop", "db", "a", "10.88.1.3"),
			endpoint("10.88.1.3", "db-2", true))}},
		{Deleted: []services.Path{"service/shop/db"}}, // its endpoints stay for a moment
		{Deleted: []services.Path{"service/default/kubernetes"}},
		{Set: []*pb.Item{item(t, "node/edge1", &services.Node{}), {Path: "nonsense"}, {Path: "service/a/b/c"}}},
		{Whole: wholeBuckets()},
	} {
		d, err := s.Apply(step)
		if err != nil && !strings.Contains(err.Error(), "no path of an item") {
			t.Fatal(err)
		}
		z.Update(s, &d)
		check(fmt.Sprint(step))
	}
	if len(z.namespaces)+len(z.pointers)+len(z.known) != 0 {
		t.Errorf("without Services the zone has %v %v %v", z.namespaces, z.pointers, z.known)
	}
}

func wholeBuckets() (all []uint32) {
	for i := range uint32(services.Buckets) {
		all = append(all, i)
	}
	return all
}

// An answer has a bounded number of records, however many endpoints a Service has.
func TestManyEndpoints(t *testing.T) {
	changes := &pb.Changes{Set: []*pb.Item{item(t, "service/shop/large", &services.Service{Headless: true})}}
	addr := netip.MustParseAddr("10.0.0.1")
	for range maxRecords + 10 {
		port := &services.Port{Name: "x", Protocol: "TCP", Port: 1}
		changes.Set = append(changes.Set, item(t, services.EndpointPath("shop", "large", "a", addr.String()),
			endpoint(addr.String(), "", true, port)))
		addr = addr.Next()
	}
	z, s := zoneOf(t, "cluster.local", changes)
	for name, qtype := range map[string]uint16{"": dns.TypeA, "_x._tcp.": dns.TypeSRV} {
		m := z.Answer(s, dns.Question{Name: name + "large.shop.svc.cluster.local.", Qtype: qtype, Qclass: dns.ClassINET})
		if len(m.Answer) != maxRecords || len(m.Extra) > maxRecords {
			t.Errorf("%s: %d records, %d more", name, len(m.Answer), len(m.Extra))
		}
	}
}

// The same for the names of an address: any user can make many Services with one endpoint.
func TestManyNames(t *testing.T) {
	changes := new(pb.Changes)
	for i := range maxPointers + 10 {
		name := fmt.Sprint("web", i)
		changes.Set = append(changes.Set, item(t, services.ServicePath("shop", name), &services.Service{Headless: true}),
			item(t, services.EndpointPath("shop", name, "a", "10.0.3.9"), endpoint("10.0.3.9", "", true)))
	}
	z, s := zoneOf(t, "cluster.local", changes)
	m := z.Answer(s, dns.Question{Name: "9.3.0.10.in-addr.arpa.", Qtype: dns.TypePTR, Qclass: dns.ClassINET})
	if len(m.Answer) != maxPointers {
		t.Errorf("%d names", len(m.Answer))
	}
}

// FuzzAnswer asks for any name and type: the reply can be packed, has the name of the question, and is never nil for a
// name of the cluster, which would be forwarded.
func FuzzAnswer(f *testing.F) {
	for _, name := range []string{"web.shop.svc.cluster.local", "_sql._tcp.db.shop.svc.cluster.local", "a.cluster.local",
		"1.0.3.10.in-addr.arpa", "away.shop.svc.cluster.local", `\000\.\255.cluster.local`, "--1.x.pod.cluster.local"} {
		f.Add(name, uint16(dns.TypeA))
		f.Add(name, uint16(dns.TypeANY))
	}
	z, s := zoneOf(f, "cluster.local", cluster(f))
	f.Fuzz(func(t *testing.T, name string, qtype uint16) {
		query := new(dns.Msg)
		query.SetQuestion(dns.Fqdn(name), qtype)
		packet, err := query.Pack()
		if err != nil || query.Unpack(packet) != nil { // as it comes from the wire
			t.Skip()
		}
		m := z.Answer(s, query.Question[0])
		if m == nil {
			if dns.IsSubDomain("cluster.local.", dns.CanonicalName(query.Question[0].Name)) {
				t.Fatalf("%s is forwarded", query.Question[0].Name)
			}
			return
		}
		if len(m.Answer) > 0 && m.Answer[0].Header().Name != query.Question[0].Name {
			t.Errorf("the answer is for %s", m.Answer[0].Header().Name)
		}
		m.SetRcode(query, m.Rcode)
		if _, err := m.Pack(); err != nil {
			t.Errorf("%s: %v", m, err)
		}
	})
}
