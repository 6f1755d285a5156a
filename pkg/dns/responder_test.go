package dns

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"pgregory.net/rapid"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// heldNodes is a Truth that a test sets.
type heldNodes struct {
	mu    sync.RWMutex // guards the following
	nodes map[tunnel.NodeName][]netip.Addr
}

// newHeld returns a Truth. Each line is a node and its addresses.
func newHeld(lines ...string) *heldNodes {
	h := &heldNodes{nodes: make(map[tunnel.NodeName][]netip.Addr)}
	for _, l := range lines {
		f := strings.Fields(l)
		for _, a := range f[1:] {
			n := tunnel.NodeName(f[0])
			h.nodes[n] = append(h.nodes[n], netip.MustParseAddr(a))
		}
	}
	return h
}

func (h *heldNodes) Lookup(n tunnel.NodeName) []netip.Addr {
	if n == "panic" {
		panic("wanted by the test")
	}
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.nodes[n]
}

func (h *heldNodes) drop(n tunnel.NodeName) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.nodes, n)
}

func (h *heldNodes) Records() []Record        { return nil }
func (h *heldNodes) Hears(netip.Addr) bool    { return true }
func (h *heldNodes) Changed() <-chan struct{} { return nil }

// listed is a Names that a test sets.
type listed struct {
	names map[tunnel.NodeName]bool // true: may be published
	known bool
}

func (l listed) May(n tunnel.NodeName) (may, known bool) { return l.names[n] && l.known, l.known }
func (l listed) Changed() <-chan struct{}                { return nil }

var quiet = slog.New(slog.DiscardHandler)

// respond runs a responder on 127.0.0.1 until the test ends.
func respond(t testing.TB, cfg ResponderConfig) *Responder {
	t.Helper()
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	if cfg.Log == nil {
		cfg.Log = quiet
	}
	r := NewResponder(cfg)
	if r.Ready() == nil || r.Addr() != nil {
		t.Error("ready before Run")
	}
	running := testkit.Run(t, r.Run)
	t.Cleanup(func() {
		running.Stop()
		if r.Ready() == nil || r.Addr() != nil {
			t.Error("ready after Run")
		}
	})
	testkit.Eventually(t, "the responder is ready", func() bool { return r.Ready() == nil })
	return r
}

// ask sends q to the responder as a resolver does.
func ask(t testing.TB, addr net.Addr, network string, q *dns.Msg) *dns.Msg {
	t.Helper()
	c := dns.Client{Net: network, Timeout: 10 * time.Second}
	m, _, err := c.Exchange(q, addr.String())
	if err != nil {
		t.Fatalf("asking %v over %s: %v", q.Question, network, err)
	}
	return m
}

func question(name string, qtype uint16) *dns.Msg {
	return new(dns.Msg).SetQuestion(name, qtype)
}

// show returns what a test compares: code, flags, records.
func show(m *dns.Msg) string {
	var b strings.Builder
	if m.Rcode == dns.RcodeBadVers {
		b.WriteString("BADVERS") // RcodeToString has the other name of code 16, which TSIG uses
	} else {
		b.WriteString(dns.RcodeToString[m.Rcode])
	}
	for _, f := range []struct {
		on   bool
		name string
	}{
		{m.Authoritative, "aa"}, {m.RecursionAvailable, "ra"}, {m.Truncated, "tc"},
		{m.RecursionDesired, "rd"}, {m.CheckingDisabled, "cd"},
	} {
		if f.on {
			b.WriteString(" " + f.name)
		}
	}
	for _, s := range [][]dns.RR{m.Answer, m.Ns, m.Extra} {
		for _, rr := range s {
			if opt, ok := rr.(*dns.OPT); ok {
				fmt.Fprintf(&b, " | OPT %d do=%t version=%d", opt.UDPSize(), opt.Do(), opt.Version())
				continue
			}
			b.WriteString(" | " + strings.ReplaceAll(rr.String(), "\t", " "))
		}
	}
	return b.String()
}

const theSOA = ` | . 1 IN SOA . . 1 1 1 1 1`

func TestAnswers(t *testing.T) {
	truth := newHeld("edge1 10.0.0.5", "edge.with.dots 10.0.0.6", "six fd00::6", "both 10.0.0.7 fd00::7",
		"mapped ::ffff:10.0.0.8", "stranger 10.0.0.9", "1.0.0.10.in-addr.arpa 10.0.0.10")
	names := listed{known: true, names: map[tunnel.NodeName]bool{
		"edge1": true, "edge.with.dots": true, "six": true, "both": true,
		"mapped": true, "gone": true, "1.0.0.10.in-addr.arpa": true,
	}}
	r := respond(t, ResponderConfig{Truth: truth, Names: names})
	for _, tc := range []struct {
		name  string
		qtype uint16
		want  string
		as    outcome
	}{
		{"edge1.", dns.TypeA, "NOERROR aa rd | edge1. 2 IN A 10.0.0.5", outcomeNode},
		{"eDGe1.", dns.TypeA, "NOERROR aa rd | eDGe1. 2 IN A 10.0.0.5", outcomeNode},
		{"edge1.", dns.TypeAAAA, "NOERROR aa rd" + theSOA, outcomeNoData},
		{"edge1.", dns.TypeTXT, "NOERROR aa rd" + theSOA, outcomeNoData},
		{"edge1.", dns.TypePTR, "NOERROR aa rd" + theSOA, outcomeNoData},
		{"edge1.", dns.TypeSOA, "NOERROR aa rd" + theSOA, outcomeNoData},
		{"edge1.", dns.TypeHTTPS, "NOERROR aa rd" + theSOA, outcomeNoData},
		{"edge1.", 64000, "NOERROR aa rd" + theSOA, outcomeNoData},
		{"edge1.", dns.TypeANY, "NOERROR aa rd | edge1. 2 IN A 10.0.0.5", outcomeNode},
		{"edge.with.dots.", dns.TypeA, "NOERROR aa rd | edge.with.dots. 2 IN A 10.0.0.6", outcomeNode},
		{"with.dots.", dns.TypeA, "NXDOMAIN aa rd" + theSOA, outcomeNXDomain},
		{`edge\.with.dots.`, dns.TypeA, "NXDOMAIN aa rd" + theSOA, outcomeNXDomain},
		{`edge1\000.`, dns.TypeA, "NXDOMAIN aa rd" + theSOA, outcomeNXDomain},
		{"sub.edge1.", dns.TypeA, "NXDOMAIN aa rd" + theSOA, outcomeNXDomain},
		{"edge1.svc.cluster.local.", dns.TypeA, "NXDOMAIN aa rd" + theSOA, outcomeNXDomain},
		{"six.", dns.TypeAAAA, "NOERROR aa rd | six. 2 IN AAAA fd00::6", outcomeNode},
		{"six.", dns.TypeA, "NOERROR aa rd" + theSOA, outcomeNoData},
		{"both.", dns.TypeA, "NOERROR aa rd | both. 2 IN A 10.0.0.7", outcomeNode},
		{"both.", dns.TypeAAAA, "NOERROR aa rd | both. 2 IN AAAA fd00::7", outcomeNode},
		{"both.", dns.TypeANY, "NOERROR aa rd | both. 2 IN A 10.0.0.7 | both. 2 IN AAAA fd00::7", outcomeNode},
		{"mapped.", dns.TypeA, "NOERROR aa rd | mapped. 2 IN A 10.0.0.8", outcomeNode},
		{"mapped.", dns.TypeAAAA, "NOERROR aa rd" + theSOA, outcomeNoData},
		{"stranger.", dns.TypeA, "NXDOMAIN aa rd" + theSOA, outcomeNXDomain}, // connected, but not a node of the cluster
		{"gone.", dns.TypeA, "NXDOMAIN aa rd" + theSOA, outcomeNXDomain},     // a node of the cluster, but not connected
		{"example.com.", dns.TypeA, "NXDOMAIN aa rd" + theSOA, outcomeNXDomain},
		{".", dns.TypeNS, "NOERROR aa rd" + theSOA, outcomeNoData},
		{"5.0.0.10.in-addr.arpa.", dns.TypePTR, "REFUSED rd", outcomeRefused},
		{"5.0.0.10.IN-addr.ARPA.", dns.TypePTR, "REFUSED rd", outcomeRefused},
		{"8.b.d.0.1.0.0.2.ip6.arpa.", dns.TypePTR, "REFUSED rd", outcomeRefused},
		{"1.0.0.10.in-addr.arpa.", dns.TypePTR, "NOERROR aa rd" + theSOA, outcomeNoData}, // this is a node's name
		{"edge1.", dns.TypeAXFR, "REFUSED rd", outcomeRefused},
		{"edge1.", dns.TypeIXFR, "REFUSED rd", outcomeRefused},
		{"edge1.", dns.TypeOPT, "REFUSED rd", outcomeRefused},
		{"edge1.", dns.TypeMAILB, "REFUSED rd", outcomeRefused},
	} {
		for _, network := range []string{"udp", "tcp"} {
			before := r.stats.answers[tc.as].Load()
			q := question(tc.name, tc.qtype)
			m := ask(t, r.Addr(), network, q)
			if got := show(m); got != tc.want {
				t.Errorf("%s %s over %s:\n got %s\nwant %s", tc.name, dns.TypeToString[tc.qtype], network, got, tc.want)
			}
			if len(m.Question) != 1 || m.Question[0] != q.Question[0] {
				t.Errorf("%s over %s: the question comes back as %v", tc.name, network, m.Question)
			}
			if r.stats.answers[tc.as].Load() != before+1 {
				t.Errorf("%s %s is not counted as %s", tc.name, dns.TypeToString[tc.qtype], tc.as)
			}
		}
	}
}

// The responder handles flags, EDNS, classes, opcodes and unusual sections of queries.
func TestQueries(t *testing.T) {
	r := respond(t, ResponderConfig{Truth: newHeld("edge1 10.0.0.5")})
	const a, opt = " | edge1. 2 IN A 10.0.0.5", " | OPT 1232 do=false version=0"
	edns := func(f func(*dns.OPT)) func(*dns.Msg) {
		return func(m *dns.Msg) {
			m.SetEdns0(4096, false)
			f(m.IsEdns0())
		}
	}
	for _, tc := range []struct {
		what string
		do   func(*dns.Msg)
		want string
	}{
		{"no recursion desired", func(m *dns.Msg) { m.RecursionDesired = false }, "NOERROR aa" + a},
		{"checking disabled", func(m *dns.Msg) { m.CheckingDisabled = true }, "NOERROR aa rd cd" + a},
		{"flags set that only replies have", func(m *dns.Msg) {
			m.Authoritative, m.RecursionAvailable, m.Zero, m.Rcode = true, true, true, 5
		}, "NOERROR aa rd" + a},
		{"EDNS", edns(func(*dns.OPT) {}), "NOERROR aa rd" + a + opt},
		{"EDNS, DNSSEC", edns(func(o *dns.OPT) { o.SetDo() }), "NOERROR aa rd" + a + " | OPT 1232 do=true version=0"},
		{"EDNS, options unknown", edns(func(o *dns.OPT) {
			o.Option = []dns.EDNS0{&dns.EDNS0_LOCAL{Code: 65001, Data: []byte("x")}}
		}), "NOERROR aa rd" + a + opt},
		{"EDNS version 1", edns(func(o *dns.OPT) { o.SetVersion(1) }), "BADVERS rd" + opt},
		{"EDNS twice", func(m *dns.Msg) { m.SetEdns0(512, false).SetEdns0(4096, false) }, "FORMERR rd" + opt},
		{"EDNS of a name", edns(func(o *dns.OPT) { o.Hdr.Name = "edge1." }), "FORMERR rd"},
		{"class CH", func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }, "REFUSED rd"},
		{"class ANY", func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassANY }, "REFUSED rd"},
		{"no question", func(m *dns.Msg) { m.Question = nil }, "FORMERR rd"},
		{"two questions", func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }, "FORMERR rd"},
		{"an answer", func(m *dns.Msg) {
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: "x.", Rrtype: dns.TypeA}}}
		}, "FORMERR rd"},
		{"opcode NOTIFY", func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify }, "NOTIMP rd"},
		{"opcode UPDATE", func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }, "NOTIMP rd"},
		{"opcode STATUS", func(m *dns.Msg) { m.Opcode = dns.OpcodeStatus }, "NOTIMP rd"},
		{"IXFR", func(m *dns.Msg) {
			m.Question[0].Qtype = dns.TypeIXFR
			m.Ns = []dns.RR{&dns.SOA{Hdr: dns.RR_Header{Name: "edge1.", Rrtype: dns.TypeSOA, Class: 1}, Ns: ".", Mbox: "."}}
		}, "REFUSED rd"},
	} {
		for _, network := range []string{"udp", "tcp"} {
			q := question("edge1.", dns.TypeA)
			tc.do(q)
			c := dns.Client{Net: network, Timeout: 10 * time.Second}
			m, _, err := c.Exchange(q, r.Addr().String())
			if err != nil {
				t.Errorf("%s over %s: %v", tc.what, network, err)
				continue
			}
			if got := show(m); got != tc.want || m.Opcode != q.Opcode || m.Zero {
				t.Errorf("%s over %s:\n got %s opcode %d zero %t\nwant %s", tc.what, network, got, m.Opcode, m.Zero, tc.want)
			}
		}
	}
}

// A packet that is not a query gets no reply. On UDP, the first reply is to the query after it; a TCP
// connection is closed.
func TestNoReplyToNonQueries(t *testing.T) {
	r := respond(t, ResponderConfig{Truth: newHeld("edge1 10.0.0.5"), Counters: new(tunnel.Counters)})
	reply := question("edge1.", dns.TypeA)
	reply.Response = true
	packed, err := reply.Pack()
	if err != nil {
		t.Fatal(err)
	}
	panics, err := question("panic.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	good := question("edge1.", dns.TypeA)
	goodPacked, err := good.Pack()
	if err != nil {
		t.Fatal(err)
	}
	long := append(slices.Clone(goodPacked), make([]byte, maxQuery)...)
	long[0]++ // another id
	for what, packet := range map[string][]byte{
		"a reply":                 packed,
		"nothing":                 {},
		"half a header":           packed[:11],
		"too long":                long,
		"one that causes a panic": panics,
	} {
		udp, err := net.Dial("udp", r.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		tcp, err := net.Dial("tcp", r.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []net.Conn{udp, tcp} {
			c.SetDeadline(time.Now().Add(time.Minute))
			conn := dns.Conn{Conn: c}
			if _, err := conn.Write(packet); err != nil {
				t.Fatal(err)
			}
		}
		conn := dns.Conn{Conn: udp}
		if err := conn.WriteMsg(good); err != nil {
			t.Fatal(err)
		}
		if m, err := conn.ReadMsg(); err != nil || m.Id != good.Id || len(m.Answer) != 1 {
			t.Errorf("after %s over UDP, the next query is answered %v, %v", what, m, err)
		}
		if n, err := tcp.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s over TCP: %d bytes, %v; want a closed connection", what, n, err)
		}
		udp.Close()
		tcp.Close()
	}
	// Another goroutine may answer the next query before the panic is counted.
	testkit.Eventually(t, "two panics are counted", func() bool { return r.cfg.Counters.Panics.Load() == 2 })
}

// Before the names are known from Kubernetes, queries for connected nodes get SERVFAIL. Other
// queries are answered as always.
func TestNamesNotKnownYet(t *testing.T) {
	r := respond(t, ResponderConfig{Truth: newHeld("edge1 10.0.0.5"), Names: listed{}})
	for name, want := range map[string]string{"edge1.": "SERVFAIL rd", "edge2.": "NXDOMAIN aa rd" + theSOA} {
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeTXT} {
			if got := show(ask(t, r.Addr(), "udp", question(name, qtype))); got != want {
				t.Errorf("%s %d: %s, want %s", name, qtype, got, want)
			}
		}
	}
	if n := r.stats.answers[outcomeUnknown].Load(); n != 3 {
		t.Errorf("%d are counted as unknown, want 3", n)
	}
}

func TestNodeLeaves(t *testing.T) {
	truth := newHeld("edge1 10.0.0.5")
	r := respond(t, ResponderConfig{Truth: truth})
	if m := ask(t, r.Addr(), "udp", question("edge1.", dns.TypeA)); len(m.Answer) != 1 {
		t.Fatalf("connected: %s", show(m))
	}
	truth.drop("edge1")
	if m := ask(t, r.Addr(), "udp", question("edge1.", dns.TypeA)); m.Rcode != dns.RcodeNameError {
		t.Errorf("the first query after the node has left: %s", show(m))
	}
}

// Over UDP an answer is not longer than the client accepts. Over TCP it is complete.
func TestTruncation(t *testing.T) {
	truth := newHeld()
	for i := range 200 {
		truth.nodes["many"] = append(truth.nodes["many"], netip.AddrFrom4([4]byte{10, 0, 1, byte(i)}))
	}
	r := respond(t, ResponderConfig{Truth: truth})
	for _, tc := range []struct {
		network         string
		ednsSize, limit int // ednsSize 0: no EDNS
		whole           bool
	}{
		{"udp", 0, 512, false}, {"udp", 1, 512, false}, {"udp", 512, 512, false}, {"udp", 900, 900, false},
		{"udp", 1232, 1232, false}, {"udp", 65535, 1232, false}, {"tcp", 0, 65535, true}, {"tcp", 512, 65535, true},
	} {
		q := question("many.", dns.TypeA)
		if tc.ednsSize > 0 {
			q.SetEdns0(uint16(tc.ednsSize), false)
		}
		packet, err := q.Pack()
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial(tc.network, r.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(time.Minute))
		conn := dns.Conn{Conn: c, UDPSize: 65535}
		if _, err = conn.Write(packet); err != nil {
			t.Fatal(err)
		}
		packet, err = conn.ReadMsgHeader(nil)
		c.Close()
		if err != nil {
			t.Fatal(err)
		}
		var m dns.Msg
		if err := m.Unpack(packet); err != nil {
			t.Fatal(err)
		}
		if len(packet) > tc.limit || m.Truncated == tc.whole || tc.whole != (len(m.Answer) == 200) || len(m.Answer) == 0 ||
			(m.IsEdns0() != nil) != (tc.ednsSize > 0) {
			t.Errorf("%+v: %d bytes, truncated %t, %d answers, EDNS %v",
				tc, len(packet), m.Truncated, len(m.Answer), m.IsEdns0())
		}
	}
}

// A socket for all addresses answers from the address to which the query was sent.
func TestAnswersFromQueriedAddress(t *testing.T) {
	for _, all := range []string{"0.0.0.0", ""} {
		port := strconv.Itoa(testkit.FreePort(t))
		listen := net.JoinHostPort(all, port)
		r := respond(t, ResponderConfig{Listen: listen, Truth: newHeld("edge1 10.0.0.5")})
		for _, host := range []string{"127.0.0.1", "127.0.0.2", "::1"} {
			if host == "::1" && all == "0.0.0.0" {
				// 0.0.0.0 means all IPv4 addresses only.
				if c, err := net.Dial("tcp", net.JoinHostPort(host, port)); err == nil {
					c.Close()
					t.Errorf("listening on %s, %s is open too", listen, host)
				}
				continue
			}
			if host == "::1" && !strings.HasPrefix(r.Addr().String(), "[::]") {
				continue // this machine has no IPv6
			}
			addr, err := net.ResolveUDPAddr("udp", net.JoinHostPort(host, port))
			if err != nil {
				t.Fatal(err)
			}
			// The client's socket is connected, so it gets answers only from the address that it has
			// queried.
			for _, network := range []string{"udp", "tcp"} {
				if m := ask(t, addr, network, question("edge1.", dns.TypeA)); len(m.Answer) != 1 {
					t.Errorf("%s asked at %s over %s: %s", listen, host, network, show(m))
				}
			}
		}
	}
}

// Idle connections of one source leave room for other sources, and do not affect UDP.
func TestConnsPerSource(t *testing.T) {
	r := respond(t, ResponderConfig{Truth: newHeld("edge1 10.0.0.5")})
	var parked []net.Conn
	defer func() {
		for _, c := range parked {
			c.Close()
		}
	}()
	for range 200 {
		c, err := net.Dial("tcp", r.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		parked = append(parked, c)
	}
	testkit.Eventually(t, "the connections beyond the limit have been closed", func() bool {
		return r.stats.overloaded.Load() == 200-(DefaultConns/8)
	})
	other := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}, Timeout: time.Minute}
	c := dns.Client{Net: "tcp", Dialer: &other, Timeout: time.Minute}
	if m, _, err := c.Exchange(question("edge1.", dns.TypeA), r.Addr().String()); err != nil || len(m.Answer) != 1 {
		t.Errorf("another source over TCP: %v, %v", m, err)
	}
	if m := ask(t, r.Addr(), "udp", question("edge1.", dns.TypeA)); len(m.Answer) != 1 {
		t.Errorf("the source itself over UDP: %s", show(m))
	}
	// After they are closed, their places are free.
	for _, c := range parked {
		c.Close()
	}
	testkit.Eventually(t, "the source is admitted again", func() bool {
		c := dns.Client{Net: "tcp", Timeout: 5 * time.Second}
		_, _, err := c.Exchange(question("edge1.", dns.TypeA), r.Addr().String())
		return err == nil
	})
}

// A connection takes one query after the other, at most maxConnQueries.
func TestQueriesPerConn(t *testing.T) {
	r := respond(t, ResponderConfig{Truth: newHeld("edge1 10.0.0.5")})
	c, err := net.Dial("tcp", r.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	conn := dns.Conn{Conn: c}
	q := question("edge1.", dns.TypeA)
	for i := range maxConnQueries {
		if err := conn.WriteMsg(q); err != nil {
			t.Fatalf("query %d: %v", i, err)
		}
		if m, err := conn.ReadMsg(); err != nil || m.Id != q.Id {
			t.Fatalf("query %d: %v, %v", i, m, err)
		}
	}
	if _, err := conn.ReadMsg(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last query: %v, want the end", err)
	}
}

// If listening fails, the error says what to do, and no socket stays open.
func TestListenFails(t *testing.T) {
	ln, err := net.Listen("tcp", testkit.FreeAddress(t))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for listen, want := range map[string]string{
		ln.Addr().String(): "choose another port",
		"192.0.2.1:5353":   "this machine has no such address",
		"nonsense":         "write an address and a port",
	} {
		err := NewResponder(ResponderConfig{Listen: listen, Truth: newHeld(), Log: quiet}).Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), listen) {
			t.Errorf("listening on %s: %v, want %q in it", listen, err, want)
		}
	}
	pc, err := net.ListenPacket("udp", ln.Addr().String())
	if err != nil {
		t.Errorf("the UDP port stayed open when TCP failed: %v", err)
	} else {
		pc.Close()
	}
}

func TestResponderMetrics(t *testing.T) {
	r := respond(t, ResponderConfig{Truth: newHeld("edge1 10.0.0.5")})
	ask(t, r.Addr(), "udp", question("edge1.", dns.TypeA))
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(r.Collector())
	w := httptest.NewRecorder()
	promhttp.HandlerFor(reg, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	var got []string
	for line := range strings.Lines(w.Body.String()) {
		if !strings.HasPrefix(line, "#") {
			got = append(got, strings.TrimSpace(line))
		}
	}
	want := []string{
		`tunnel_dns_overloaded_total 0`,
		`tunnel_dns_queries_total{answer="failed"} 0`,
		`tunnel_dns_queries_total{answer="forwarded"} 0`,
		`tunnel_dns_queries_total{answer="nodata"} 0`,
		`tunnel_dns_queries_total{answer="node"} 1`,
		`tunnel_dns_queries_total{answer="nxdomain"} 0`,
		`tunnel_dns_queries_total{answer="refused"} 0`,
		`tunnel_dns_queries_total{answer="service"} 0`,
		`tunnel_dns_queries_total{answer="unknown"} 0`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("metrics are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// For any Truth and Names, a name gets addresses only while a replica holds the node and the name may
// be published. The addresses are those of Truth.
func TestOnlyWhatMayAppears(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom([]tunnel.NodeName{
			"edge1", "edge2", "kubernetes.default.svc", "a.b", "b", "line\nbreak", "", "x.",
		})
		addr := rapid.SampledFrom([]netip.Addr{
			netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5"), netip.MustParseAddr("::ffff:10.0.0.6"), {},
		})
		truth := &heldNodes{nodes: rapid.MapOf(name, rapid.SliceOfN(addr, 0, 3)).Draw(t, "held")}
		names := listed{names: rapid.MapOf(name, rapid.Bool()).Draw(t, "nodes"), known: rapid.Bool().Draw(t, "known")}
		cfg := ResponderConfig{Truth: truth, Log: quiet}
		if rapid.Bool().Draw(t, "kubernetes") {
			cfg.Names = names
		}
		r := NewResponder(cfg)

		qname := name.Draw(t, "asked")
		spelled := []byte(qname)
		for i, c := range spelled {
			if 'a' <= c && c <= 'z' && rapid.Bool().Draw(t, "upper") {
				spelled[i] -= 'a' - 'A'
			}
		}
		qtype := rapid.SampledFrom([]uint16{dns.TypeA, dns.TypeAAAA, dns.TypeANY, dns.TypeTXT}).Draw(t, "type")
		packet, err := question(dns.Fqdn(string(spelled)), qtype).Pack()
		if err != nil {
			t.Skip("not a name")
		}
		reply, pending := r.answer(packet, overUDP)
		var m dns.Msg
		if err := m.Unpack(reply); err != nil || pending != nil {
			t.Fatalf("reply %x, open %v: %v", reply, pending, err)
		}
		qname = tunnel.NodeName(strings.TrimSuffix(string(qname), "."))
		may := cfg.Names == nil || names.known && names.names[qname]
		for _, rr := range m.Answer {
			var a netip.Addr
			switch rr := rr.(type) {
			case *dns.A:
				a, _ = netip.AddrFromSlice(rr.A.To4())
			case *dns.AAAA:
				a, _ = netip.AddrFromSlice(rr.AAAA)
			}
			ofTruth := false
			for _, h := range truth.nodes[qname] {
				ofTruth = ofTruth || h.IsValid() && h.Unmap() == a
			}
			if !may || !ofTruth {
				t.Fatalf("%q is answered with %v; may be published: %t, held: %v", qname, rr, may, truth.nodes[qname])
			}
		}
		// A node that may be published gets an answer.
		v4 := false
		for _, h := range truth.nodes[qname] {
			v4 = v4 || h.Unmap().Is4()
		}
		if qname != "line\nbreak" && may && v4 && qtype == dns.TypeA && len(m.Answer) == 0 {
			t.Fatalf("%q is held and may be published: %s", qname, show(&m))
		}
	})
}

// FuzzResponder checks that for any packet, the reply is to that packet, and not longer than allowed.
func FuzzResponder(f *testing.F) {
	for _, m := range []*dns.Msg{
		question("edge1.", dns.TypeA), question("eDge1.", dns.TypeANY).SetEdns0(1400, true),
		question("many.", dns.TypeA), question("many.", dns.TypeA).SetEdns0(600, false), question("late.", dns.TypeA),
		question("x.example.com.", dns.TypeMX), question("1.0.0.10.in-addr.arpa.", dns.TypePTR), question(".", dns.TypeNS),
		new(dns.Msg).SetAxfr("edge1."), new(dns.Msg).SetNotify("edge1."), new(dns.Msg).SetUpdate("edge1."),
	} {
		packet, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		for _, p := range [][]byte{packet, packet[:headerSize], packet[:len(packet)-1]} { // complete, and cut off
			f.Add(p, true)
			f.Add(p, false)
		}
	}
	truth := newHeld("edge1 10.0.0.5 fd00::5", "a.b 10.0.0.6")
	for i := range 200 {
		truth.nodes["many"] = append(truth.nodes["many"], netip.AddrFrom4([4]byte{10, 0, 1, byte(i)}))
	}
	var counters tunnel.Counters
	alone := NewResponder(ResponderConfig{Truth: truth, Log: quiet, Counters: &counters})
	before := NewResponder(ResponderConfig{Truth: truth, Names: listed{}, Log: quiet, Counters: &counters})
	f.Fuzz(func(t *testing.T, packet []byte, stream bool) {
		via := overUDP
		if stream {
			via = overTCP
		}
		for _, r := range []*Responder{alone, before} {
			reply, pending := r.answer(packet, via)
			if pending != nil {
				t.Fatal("pending without an upstream")
			}
			if counters.Panics.Load() > 0 {
				t.Fatal("a panic")
			}
			if reply == nil {
				if len(packet) >= 12 && packet[2]&0x80 == 0 {
					t.Fatal("a query is not answered")
				}
				continue
			}
			checkReply(t, packet, reply, via)
		}
	})
}

// checkReply fails the test unless reply is a reply to packet that the client accepts.
func checkReply(t *testing.T, packet, reply []byte, via transport) {
	t.Helper()
	var q, m dns.Msg
	if err := m.Unpack(reply); err != nil {
		t.Fatalf("the reply cannot be read: %v\n%x", err, reply)
	}
	qerr := q.Unpack(packet)
	limit := 65535
	if via == overUDP {
		limit = 512
		if opt := q.IsEdns0(); opt != nil {
			limit = min(max(int(opt.UDPSize()), 512), 1232)
		}
	}
	if len(reply) > limit {
		t.Fatalf("%d bytes; %d are allowed", len(reply), limit)
	}
	if m.Id != binary.BigEndian.Uint16(packet) || !m.Response || m.Opcode != q.Opcode {
		t.Fatalf("the reply is to something else: %v", m.MsgHdr)
	}
	if len(m.Question) > 0 && (len(q.Question) != 1 || m.Question[0] != q.Question[0]) {
		t.Fatalf("the question %v comes back as %v", q.Question, m.Question)
	}
	if len(m.Question) == 0 && m.Rcode != dns.RcodeFormatError && m.Rcode != dns.RcodeNotImplemented {
		t.Fatalf("no question, and yet %s", show(&m))
	}
	if qerr == nil && q.IsEdns0() == nil && m.IsEdns0() != nil {
		t.Fatal("EDNS although the query has none")
	}
}

// A record of 4 KiB in which two bytes stand for a name of 1,000 characters costs little.
func TestParseQueryIsCheap(t *testing.T) {
	name := []byte{}
	for _, n := range []int{63, 63, 63, 61} {
		name = append(append(name, byte(n)), bytes.Repeat([]byte{0xff}, n)...)
	}
	packet := append([]byte{0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1}, append(name, 0, 0, 1, 0, 1)...)
	record := append([]byte{0, 0, 0, 0}, bytes.Repeat([]byte{0xc0, 0x0c}, 1800)...)
	packet = append(packet, 0xc0, 0x0c, 0, 55, 0, 1, 0, 0, 0, 0, byte(len(record)>>8), byte(len(record)))
	packet = append(packet, record...)
	if q, code := parseQuery(packet, overUDP); code != dns.RcodeSuccess || q.question.Qtype != dns.TypeA {
		t.Fatalf("%+v, %d", q, code)
	}
	if n := testing.AllocsPerRun(10, func() { parseQuery(packet, overUDP) }); n > 50 {
		t.Errorf("%.0f allocations", n)
	}
	for cut := headerSize; cut < len(packet); cut += 7 {
		if _, code := parseQuery(packet[:cut], overUDP); code != dns.RcodeFormatError {
			t.Errorf("cut after %d bytes: %d", cut, code)
		}
	}
}
