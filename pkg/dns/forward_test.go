package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// upstream runs a DNS server. It sends the messages that replies returns for a query, in order.
func upstream(t testing.TB, replies func(q *dns.Msg, network string) [][]byte) netip.AddrPort {
	t.Helper()
	udp, tcp, err := openBoth(context.Background(), nil, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() {
		udp.Close()
		tcp.Close()
		wg.Wait()
	})
	unpack := func(packet []byte) *dns.Msg {
		m := new(dns.Msg)
		if err := m.Unpack(packet); err != nil {
			t.Errorf("the upstream gets %x: %v", packet, err)
		}
		return m
	}
	wg.Go(func() {
		buf := make([]byte, 65535)
		for {
			n, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			for _, p := range replies(unpack(buf[:n]), "udp") {
				udp.WriteTo(p, from)
			}
		}
	})
	wg.Go(func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				packet, err := readTCP(c, make([]byte, 65535))
				if err != nil {
					return
				}
				for _, p := range replies(unpack(packet), "tcp") {
					writeTCP(c, p)
				}
				c.Read(make([]byte, 1)) // waits until the client closes the connection
			})
		}
	})
	return udp.LocalAddr().(*net.UDPAddr).AddrPort()
}

// reply returns a reply to q with these records, written as in a zone file.
func reply(t testing.TB, q *dns.Msg, records ...string) *dns.Msg {
	m := new(dns.Msg).SetReply(q)
	m.RecursionAvailable = true
	for _, s := range records {
		rr, err := dns.NewRR(s)
		if err != nil {
			t.Errorf("%q: %v", s, err)
			continue
		}
		m.Answer = append(m.Answer, rr)
	}
	return m
}

func pack(t testing.TB, m *dns.Msg) []byte {
	b, err := m.Pack()
	if err != nil {
		t.Errorf("%v: %v", m, err)
	}
	return b
}

// unusedAddr returns an address at which no server listens.
func unusedAddr(t testing.TB) netip.AddrPort {
	return netip.MustParseAddrPort(testkit.FreeAddress(t))
}

// Queries of some clients are forwarded and of others not, over both transports. Queries for nodes
// are answered for all clients.
func TestAllowFrom(t *testing.T) {
	queries := make(chan string, 100)
	up := upstream(t, func(q *dns.Msg, _ string) [][]byte {
		queries <- q.Question[0].Name
		return [][]byte{pack(t, reply(t, q, "a. 77 IN A 192.0.2.1"))}
	})
	log, logs := testkit.NewLog()
	r := respond(t, ResponderConfig{
		Log: log, Truth: newHeld("edge1 10.0.0.5"), Upstream: []netip.AddrPort{up},
		AllowFrom: auth.Sources{netip.MustParsePrefix("127.0.0.2/32")},
	})
	for _, tc := range []struct{ from, name, want string }{
		{"127.0.0.2", "a.", "NOERROR ra rd | a. 77 IN A 192.0.2.1"},
		{"127.0.0.3", "a.", "REFUSED ra rd"},
		{"127.0.0.3", "edge1.", "NOERROR aa ra rd | edge1. 2 IN A 10.0.0.5"},
	} {
		ip := net.ParseIP(tc.from)
		for network, from := range map[string]net.Addr{"udp": &net.UDPAddr{IP: ip}, "tcp": &net.TCPAddr{IP: ip}} {
			c := dns.Client{Net: network, Timeout: 5 * time.Second, Dialer: &net.Dialer{LocalAddr: from}}
			m, _, err := c.Exchange(question(tc.name, dns.TypeA), r.Addr().String())
			if err != nil || show(m) != tc.want {
				t.Errorf("%s asks for %s over %s: %v, %v; want %s", tc.from, tc.name, network, show(m), err, tc.want)
			}
		}
	}
	s := logs.String()
	if strings.Count(s, "level=WARN") != 1 || !strings.Contains(s, "127.0.0.3") || !strings.Contains(s, "allowfrom") {
		t.Errorf("the log is %q, want one warning with the client and the key", s)
	}
	if n := len(queries); n != 2 {
		t.Errorf("the upstream got %d queries, want 2", n)
	}
}

// By default, queries from private networks are forwarded.
func TestAllowFromByDefault(t *testing.T) {
	r := NewResponder(ResponderConfig{})
	for from, want := range map[string]bool{
		"127.0.0.1": true, "::1": true, "10.1.2.3": true, "::ffff:10.1.2.3": true, "172.31.0.1": true,
		"192.168.1.1": true, "100.64.0.1": true, "169.254.1.1": true, "fd00::1": true, "fe80::1%eth0": true,
		"8.8.8.8": false, "172.32.0.1": false, "100.128.0.1": false, "2001:db8::1": false, "::ffff:8.8.8.8": false,
	} {
		if got := r.cfg.AllowFrom.Permits(netip.MustParseAddr(from)); got != want {
			t.Errorf("queries of %s are forwarded: %t, want %t", from, got, want)
		}
	}
}

// Queries for names that are not a node's go upstream, with the client's EDNS and transport, and the
// upstream's answer comes back.
func TestForward(t *testing.T) {
	type upstreamQuery struct {
		name, network, edns string
		rd, cd, ad          bool
		id                  uint16
	}
	var mu sync.Mutex // guards the following
	var all []upstreamQuery
	up := upstream(t, func(q *dns.Msg, network string) [][]byte {
		h := upstreamQuery{q.Question[0].Name, network, "", q.RecursionDesired, q.CheckingDisabled, q.AuthenticatedData, q.Id}
		m := reply(t, q, q.Question[0].Name+" 77 IN A 192.0.2.1")
		m.Question[0].Name = strings.ToLower(m.Question[0].Name) // some servers do this
		if opt := q.IsEdns0(); opt != nil {
			h.edns = strings.Join(strings.Fields(opt.String()), " ")
		}
		m.SetEdns0(4096, true) // even if the client uses no EDNS
		m.IsEdns0().Option = []dns.EDNS0{
			&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708090a0b0c0d0e0f10"},
			&dns.EDNS0_EDE{InfoCode: dns.ExtendedErrorCodeStaleAnswer, ExtraText: "old"},
		}
		mu.Lock()
		defer mu.Unlock()
		all = append(all, h)
		return [][]byte{pack(t, m)}
	})
	r := respond(t, ResponderConfig{
		Truth:    newHeld("edge1 10.0.0.5", "stranger 10.0.0.9"),
		Names:    listed{known: true, names: map[tunnel.NodeName]bool{"edge1": true}},
		Upstream: []netip.AddrPort{up},
	})

	const opt = " | OPT 1232 do=true version=0"
	same := 0 // queries with the client's own id
	for _, tc := range []struct {
		what, name string
		qtype      uint16
		do         func(*dns.Msg)
		want       string
		forwarded  *upstreamQuery // what the upstream gets; nil: nothing
	}{
		{"a node", "edge1.", dns.TypeA, nil, "NOERROR aa ra rd | edge1. 2 IN A 10.0.0.5", nil},
		{"a node's other types", "edge1.", dns.TypeAAAA, nil, "NOERROR aa ra rd" + theSOA, nil},
		{"a transfer", "example.com.", dns.TypeAXFR, nil, "REFUSED ra rd", nil},
		{"another name", "Example.com.", dns.TypeA, nil,
			"NOERROR ra rd | Example.com. 77 IN A 192.0.2.1", &upstreamQuery{name: "Example.com.", rd: true}},
		{"a node that may not be published", "stranger.", dns.TypeA, nil,
			"NOERROR ra rd | stranger. 77 IN A 192.0.2.1", &upstreamQuery{name: "stranger.", rd: true}},
		{"an address", "5.0.0.10.in-addr.arpa.", dns.TypePTR, nil,
			"NOERROR ra rd | 5.0.0.10.in-addr.arpa. 77 IN A 192.0.2.1",
			&upstreamQuery{name: "5.0.0.10.in-addr.arpa.", rd: true}},
		{"flags", "a.", dns.TypeA,
			func(m *dns.Msg) { m.RecursionDesired, m.CheckingDisabled, m.AuthenticatedData = false, true, true },
			"NOERROR ra cd | a. 77 IN A 192.0.2.1", &upstreamQuery{name: "a.", cd: true, ad: true}},
		{"EDNS", "a.", dns.TypeA, func(m *dns.Msg) {
			m.SetEdns0(4096, true)
			m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"}}
		}, "NOERROR ra rd | a. 77 IN A 192.0.2.1" + opt, &upstreamQuery{
			name: "a.", rd: true, edns: ";; OPT PSEUDOSECTION: ; EDNS: version 0; flags: do; udp: 1232",
		}},
	} {
		for _, network := range []string{"udp", "tcp"} {
			q := question(tc.name, tc.qtype)
			if tc.do != nil {
				tc.do(q)
			}
			mu.Lock()
			all = nil
			mu.Unlock()
			m := ask(t, r.Addr(), network, q)
			if got := show(m); got != tc.want {
				t.Errorf("%s over %s:\n got %s\nwant %s", tc.what, network, got, tc.want)
			}
			if opt := m.IsEdns0(); opt != nil && (len(opt.Option) != 1 || opt.Option[0].Option() != dns.EDNS0EDE) {
				t.Errorf("%s over %s: the options %v come back", tc.what, network, opt.Option)
			}
			if m.Question[0] != q.Question[0] {
				t.Errorf("%s over %s: the question comes back as %v", tc.what, network, m.Question)
			}
			var want []upstreamQuery
			if tc.forwarded != nil {
				h := *tc.forwarded
				h.network = network
				want = []upstreamQuery{h}
			}
			mu.Lock()
			for i := range all {
				if all[i].id == q.Id {
					same++
				}
				all[i].id = 0
			}
			if !slices.Equal(all, want) {
				t.Errorf("%s over %s: the upstream gets\n %+v\nwant\n %+v", tc.what, network, all, want)
			}
			mu.Unlock()
		}
	}
	if same > 1 { // one, by chance in one of some thousand runs
		t.Errorf("%d of the queries to the upstream have the id of the client's", same)
	}
}

// Over UDP, packets that are not the answer are ignored, and the right answer is taken. Over TCP a
// wrong answer ends the exchange, and the next upstream is tried.
func TestForwardIgnoresWrongAnswers(t *testing.T) {
	good := "x. 1 IN A 192.0.2.1"
	const want = "NOERROR ra rd | x. 1 IN A 192.0.2.1"
	for _, tc := range []struct {
		what    string
		replies func(q *dns.Msg) [][]byte // before the right answer
	}{
		{"nothing", func(*dns.Msg) [][]byte { return nil }},
		{"an empty packet, and a short one", func(*dns.Msg) [][]byte { return [][]byte{{}, {1, 2, 3}} }},
		{"noise", func(*dns.Msg) [][]byte { return [][]byte{slices.Repeat([]byte{0xff}, 100)} }},
		{"another id", func(q *dns.Msg) [][]byte {
			m := reply(t, q, "x. 1 IN A 192.0.2.66")
			m.Id++
			return [][]byte{pack(t, m)}
		}},
		{"another name", func(q *dns.Msg) [][]byte {
			m := reply(t, q, "x. 1 IN A 192.0.2.66")
			m.Question[0].Name = "y."
			return [][]byte{pack(t, m)}
		}},
		{"another type", func(q *dns.Msg) [][]byte {
			m := reply(t, q, "x. 1 IN A 192.0.2.66")
			m.Question[0].Qtype = dns.TypeAAAA
			return [][]byte{pack(t, m)}
		}},
		{"another class", func(q *dns.Msg) [][]byte {
			m := reply(t, q, "x. 1 IN A 192.0.2.66")
			m.Question[0].Qclass = dns.ClassCHAOS
			return [][]byte{pack(t, m)}
		}},
		{"another opcode", func(q *dns.Msg) [][]byte {
			m := reply(t, q)
			m.Opcode = dns.OpcodeNotify
			return [][]byte{pack(t, m)}
		}},
		{"no question", func(q *dns.Msg) [][]byte {
			m := reply(t, q, "x. 1 IN A 192.0.2.66")
			m.Question = nil
			return [][]byte{pack(t, m)}
		}},
		{"the question itself", func(q *dns.Msg) [][]byte { return [][]byte{pack(t, q)} }},
		{"half an answer", func(q *dns.Msg) [][]byte {
			p := pack(t, reply(t, q, "x. 1 IN A 192.0.2.66"))
			return [][]byte{p[:len(p)-2]}
		}},
	} {
		var lied atomic.Bool
		liar := upstream(t, func(q *dns.Msg, _ string) [][]byte {
			defer lied.Store(true)
			return append(tc.replies(q), pack(t, reply(t, q, good)))
		})
		honest := upstream(t, func(q *dns.Msg, network string) [][]byte {
			if network == "udp" && lied.Load() { // else the first has been off the processor for long
				t.Errorf("%s: the next upstream is tried although the first has answered", tc.what)
			}
			return [][]byte{pack(t, reply(t, q, good))}
		})
		r := respond(t, ResponderConfig{Truth: newHeld(), Upstream: []netip.AddrPort{liar, honest}})
		for _, network := range []string{"udp", "tcp"} {
			if got := show(ask(t, r.Addr(), network, question("x.", dns.TypeA))); got != want {
				t.Errorf("%s first over %s: %s, want %s", tc.what, network, got, want)
			}
		}
		if !lied.Load() {
			t.Errorf("%s: the first upstream is not asked", tc.what)
		}
	}
}

func TestForwardTriesNextUpstream(t *testing.T) {
	good := upstream(t, func(q *dns.Msg, _ string) [][]byte {
		return [][]byte{pack(t, reply(t, q, "x. 1 IN A 192.0.2.1"))}
	})
	refuses := upstream(t, func(q *dns.Msg, _ string) [][]byte {
		m := reply(t, q)
		m.Rcode = dns.RcodeServerFailure
		return [][]byte{pack(t, m)}
	})
	log, journal := testkit.NewLog()
	for _, tc := range []struct {
		what     string
		upstream []netip.AddrPort
		want     string
		as       outcome
	}{
		{"only the second is there", []netip.AddrPort{unusedAddr(t), good},
			"NOERROR ra rd | x. 1 IN A 192.0.2.1", outcomeForwarded},
		{"none is there", []netip.AddrPort{unusedAddr(t), unusedAddr(t)}, "SERVFAIL ra rd", outcomeFailed},
		// SERVFAIL is an answer, so no other upstream is tried.
		{"the first answers SERVFAIL", []netip.AddrPort{refuses, good}, "SERVFAIL ra rd", outcomeForwarded},
	} {
		r := respond(t, ResponderConfig{Truth: newHeld(), Upstream: tc.upstream, Log: log})
		for i, network := range []string{"udp", "tcp"} {
			if got := show(ask(t, r.Addr(), network, question("x.", dns.TypeA))); got != tc.want {
				t.Errorf("%s, over %s: %s, want %s", tc.what, network, got, tc.want)
			}
			if n := r.stats.answers[tc.as].Load(); n != uint64(i+1) {
				t.Errorf("%s, over %s: %d are counted as %s", tc.what, network, n, tc.as)
			}
		}
	}
	if n := strings.Count(journal.String(), "no DNS upstream answers"); n != 1 {
		t.Errorf("logged %d times that no upstream answers, want once a minute:\n%s", n, journal)
	}
}

// A forwarded answer is not longer than the client accepts, and it has the TC flag if it is cut.
func TestForwardTruncation(t *testing.T) {
	up := upstream(t, func(q *dns.Msg, network string) [][]byte {
		m := reply(t, q)
		for i := range 100 {
			m.Answer = append(m.Answer, &dns.A{
				Hdr: dns.RR_Header{Name: "x.", Rrtype: dns.TypeA, Class: 1}, A: net.IPv4(192, 0, 2, byte(i)),
			})
		}
		m.Compress = true
		p := pack(t, m)
		switch {
		case network == "tcp":
		case q.Question[0].Name == "cut.": // in the middle of a record
			p[2] |= 2
			p = p[:500]
		case q.Question[0].Name == "tc.":
			m.Truncate(512)
			p = pack(t, m)
		}
		return [][]byte{p}
	})
	r := respond(t, ResponderConfig{Truth: newHeld(), Upstream: []netip.AddrPort{up}})
	for _, name := range []string{"long.", "tc.", "cut."} {
		c := dns.Client{Net: "udp", Timeout: 5 * time.Second} // it accepts 512 bytes
		m, _, err := c.Exchange(question(name, dns.TypeA), r.Addr().String())
		if err != nil || !m.Truncated {
			t.Errorf("%s over UDP: %v, %v, want it truncated", name, m, err)
		}
		if m := ask(t, r.Addr(), "tcp", question(name, dns.TypeA)); m.Truncated || len(m.Answer) != 100 {
			t.Errorf("%s over TCP: truncated %t, %d answers", name, m.Truncated, len(m.Answer))
		}
	}
}

// datagrams makes a pipe look like a UDP socket to dns.Conn.
type datagrams struct{ net.Conn }

func (datagrams) ReadFrom([]byte) (int, net.Addr, error)    { panic("not connected") }
func (datagrams) WriteTo([]byte, net.Addr) (n int, e error) { panic("not connected") }

// silentUpstreams returns a responder with n upstreams that take queries and never answer, except
// those whose numbers are in answers. It must be used in a bubble of synctest.
func silentUpstreams(t *testing.T, n int, answers ...int) *Responder {
	var list []netip.AddrPort
	for i := range n {
		list = append(list, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 53))
	}
	r := NewResponder(ResponderConfig{Truth: newHeld(), Upstream: list, Log: quiet})
	r.forward.dial = func(_ context.Context, network, addr string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		i := slices.IndexFunc(list, func(a netip.AddrPort) bool { return a.String() == addr })
		wrap := func(c net.Conn) net.Conn {
			if network == "udp" {
				return datagrams{c}
			}
			return c
		}
		go func() {
			defer theirs.Close()
			conn := dns.Conn{Conn: wrap(theirs)}
			q, err := conn.ReadMsg()
			if err != nil {
				return
			}
			if slices.Contains(answers, i) {
				conn.WriteMsg(reply(t, q, "x. 1 IN A 192.0.2.1"))
			}
			conn.ReadMsg() // waits until the client closes the connection
		}()
		return wrap(ours), nil
	}
	return r
}

// pendingQuery returns the query for "x." that the responder would forward.
func pendingQuery(t testing.TB, r *Responder, via transport) *query {
	_, q := r.answer(pack(t, question("x.", dns.TypeA)), via)
	if q == nil {
		t.Fatal("answered without the upstream")
	}
	return q
}

func TestForwardTimeouts(t *testing.T) {
	for _, tc := range []struct {
		upstreams int
		answers   []int
		after     time.Duration
		rcode     int
	}{
		{2, []int{0}, 0, dns.RcodeSuccess},
		{2, []int{1}, 2 * time.Second, dns.RcodeSuccess},
		{3, []int{2}, 4 * time.Second, dns.RcodeSuccess},
		{1, nil, 2 * time.Second, dns.RcodeServerFailure},
		{5, []int{3, 4}, 5 * time.Second, dns.RcodeServerFailure},
	} {
		for _, via := range []transport{overUDP, overTCP} {
			synctest.Test(t, func(t *testing.T) {
				r := silentUpstreams(t, tc.upstreams, tc.answers...)
				start := time.Now()
				var m dns.Msg
				if err := m.Unpack(r.resolve(t.Context(), pendingQuery(t, r, via))); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(start); took != tc.after || m.Rcode != tc.rcode {
					t.Errorf("%d upstreams, %v answer: %s after %v, want %v", tc.upstreams, tc.answers, show(&m), took, tc.after)
				}
			})
		}
	}
}

// When the context of Run ends, an exchange with an upstream ends at once.
func TestForwardIsAborted(t *testing.T) {
	for _, via := range []transport{overUDP, overTCP} {
		synctest.Test(t, func(t *testing.T) {
			r := silentUpstreams(t, 2)
			ctx, cancel := context.WithCancel(t.Context())
			start := time.Now()
			time.AfterFunc(time.Second, cancel)
			r.resolve(ctx, pendingQuery(t, r, via))
			if took := time.Since(start); took != time.Second {
				t.Errorf("over %s the exchange ends %v after it began, want 1 s", via, took)
			}
		})
	}
}

// At most DefaultLookups queries wait for an upstream, and one more fails at once. Queries for nodes are answered as
// always.
func TestForwardIsBounded(t *testing.T) {
	silent := upstream(t, func(*dns.Msg, string) [][]byte { return nil })
	r := respond(t, ResponderConfig{Truth: newHeld("edge1 10.0.0.5"), Upstream: []netip.AddrPort{silent}})
	waiting := func() int {
		r.forward.mu.Lock()
		defer r.forward.mu.Unlock()
		return r.forward.used
	}
	var releases []func()
	for i := range DefaultLookups { // of many clients
		release, ok := r.admit(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}))
		if !ok {
			t.Fatal("too few are admitted")
		}
		releases = append(releases, release)
	}
	for i, network := range []string{"udp", "tcp"} {
		if got := show(ask(t, r.Addr(), network, question("x.", dns.TypeA))); got != "SERVFAIL ra rd" {
			t.Errorf("one more over %s: %s", network, got)
		}
		if n := r.stats.overloaded.Load(); n != uint64(i+1) {
			t.Errorf("%d counted as overloaded", n)
		}
		if n := r.cfg.Counters.LimitedBy(tunnel.LimitLookups); n != uint64(i+1) {
			t.Errorf("the limit is counted %d times, want %d", n, i+1)
		}
		if m := ask(t, r.Addr(), network, question("edge1.", dns.TypeA)); len(m.Answer) != 1 {
			t.Errorf("a node over %s: %s", network, show(m))
		}
	}
	for _, release := range releases {
		release()
		release() // the second call has no effect
	}
	if n := waiting(); n != 0 {
		t.Errorf("%d wait after all were released", n)
	}
}

// Few long answers are in memory at a time, since each may take a hundred times its bytes there.
func TestLongAnswersTakeTurns(t *testing.T) {
	var asked atomic.Bool
	up := upstream(t, func(q *dns.Msg, _ string) [][]byte {
		defer asked.Store(true)
		m := new(dns.Msg).SetReply(q)
		for range 40 {
			m.Answer = append(m.Answer, &dns.TXT{
				Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET},
				Txt: []string{strings.Repeat("x", 200)},
			})
		}
		return [][]byte{pack(t, m)}
	})
	r := respond(t, ResponderConfig{Truth: newHeld("edge1 10.0.0.5"), Upstream: []netip.AddrPort{up}})
	turns := r.forward.expanding
	for range cap(turns) {
		turns <- struct{}{}
	}
	answered := make(chan int, 1) // one answer
	go func() {
		client := dns.Client{Net: "tcp", Timeout: time.Minute}
		m, _, err := client.Exchange(question("long.", dns.TypeTXT), r.Addr().String())
		if err != nil {
			answered <- -1
			return
		}
		answered <- len(m.Answer)
	}()
	testkit.Eventually(t, "the upstream is asked", asked.Load)
	select {
	case <-answered:
		t.Error("a long answer is read out of turn")
	case <-time.After(50 * time.Millisecond):
	}
	<-turns
	if n := <-answered; n != 40 {
		t.Errorf("%d records, want 40", n)
	}
	testkit.Eventually(t, "the next one has its turn", func() bool { return len(turns) == cap(turns)-1 })
}

// One client, whose queries no server answers, leaves room for others. All addresses of a /64 are one client.
func TestForwardShares(t *testing.T) {
	many := newForwarder(&ResponderConfig{Lookups: 64})
	for i := range 64 {
		if _, ok := many.admit(netip.AddrFrom16([16]byte{0xfd, 15: byte(i)})); ok != (i < 56) {
			t.Errorf("lookup %d of one /64: %v", i, ok)
		}
	}
	f := newForwarder(&ResponderConfig{Lookups: 64})
	fill := func(client string) (n int) {
		for {
			if _, ok := f.admit(netip.MustParseAddr(client)); !ok {
				return n
			}
			n++
		}
	}
	if n := fill("10.0.0.1"); n != 56 {
		t.Errorf("one client alone has %d of 64 lookups", n)
	}
	if n := fill("10.0.0.2"); n != 7 {
		t.Errorf("another one has %d", n)
	}
	if n := fill("10.0.0.3"); n != 1 {
		t.Errorf("a third one has %d", n)
	}
	if n := fill("10.0.0.4"); n != 0 {
		t.Errorf("%d more than all", n)
	}
}

// A loop of two responders that forward to each other ends by itself, and the client gets SERVFAIL.
func TestForwardLoop(t *testing.T) {
	at := unusedAddr(t)
	first := respond(t, ResponderConfig{Truth: newHeld(), Upstream: []netip.AddrPort{at, at}})
	second := respond(t, ResponderConfig{
		Listen: at.String(), Truth: newHeld(), Upstream: []netip.AddrPort{first.Addr().(*net.UDPAddr).AddrPort()},
	})
	if got := show(ask(t, first.Addr(), "udp", question("x.", dns.TypeA))); got != "SERVFAIL ra rd" {
		t.Errorf("the client gets %s", got)
	}
	testkit.Eventually(t, "no query waits", func() bool {
		for _, f := range []*forwarder{first.forward, second.forward} {
			f.mu.Lock()
			used := f.used
			f.mu.Unlock()
			if used > 0 {
				return false
			}
		}
		return true
	})
}

// A responder refuses to start with itself as an upstream.
func TestUpstreamIsSelf(t *testing.T) {
	at := unusedAddr(t)
	for _, tc := range []struct {
		listen   string
		upstream netip.AddrPort
		self     bool
	}{
		{at.String(), at, true},
		{at.String(), netip.AddrPortFrom(netip.MustParseAddr("::ffff:127.0.0.1"), at.Port()), true},
		{at.String(), netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), at.Port()), false},
		{at.String(), netip.AddrPortFrom(at.Addr(), at.Port()+1), false},
		{netip.AddrPortFrom(netip.IPv4Unspecified(), at.Port()).String(), at, true},
		{netip.AddrPortFrom(netip.IPv4Unspecified(), at.Port()).String(), netip.MustParseAddrPort("192.0.2.1:53"), false},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		r := NewResponder(ResponderConfig{
			Listen: tc.listen, Truth: newHeld(), Log: quiet,
			Upstream: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.9:53"), tc.upstream},
		})
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		testkit.Eventually(t, "the responder is ready, or has returned",
			func() bool { return r.Ready() == nil || len(done) == 1 })
		cancel()
		err := <-done
		refused := err != nil && strings.Contains(err.Error(), "this responder itself")
		if refused != tc.self || !tc.self && err != nil {
			t.Errorf("listening on %s, upstream %s: %v", tc.listen, tc.upstream, err)
		}
	}
}

func TestExchangeSaysWhatFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := silentUpstreams(t, 1)
		_, err := r.forward.resolve(t.Context(), pendingQuery(t, r, overUDP))
		if err == nil || err.Error() != "asking 10.0.0.0:53 over udp: no answer within 2s" {
			t.Errorf("the error is %v", err)
		}
		r.forward.dial = func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no way") }
		_, err = r.forward.resolve(t.Context(), pendingQuery(t, r, overUDP))
		if err == nil || err.Error() != "asking 10.0.0.0:53 over udp: no way" {
			t.Errorf("the error is %v", err)
		}
	})
}

// FuzzForward checks that whatever an upstream sends, the client gets nothing, or an answer to its own
// question that it can read.
func FuzzForward(f *testing.F) {
	q := question("x.example.", dns.TypeA)
	for _, m := range []*dns.Msg{
		reply(f, q, "x.example. 1 IN A 192.0.2.1"),
		reply(f, q, "x.example. 1 IN CNAME y.example.", "y.example. 1 IN TXT a b c",
			"y.example. 1 IN SVCB 1 . alpn=h2 port=443"),
		reply(f, q, "x.example. 1 IN MX 5 y.example.",
			"x.example. 1 IN RRSIG A 8 2 1 20300101000000 20200101000000 1 example. AAAA").SetEdns0(4096, true),
		reply(f, q, slices.Repeat([]string{"x.example. 1 IN A 192.0.2.1"}, 100)...),
	} {
		for _, compress := range []bool{false, true} {
			m.Compress = compress
			f.Add(pack(f, m), true, uint16(0))
			f.Add(pack(f, m), false, uint16(1400))
		}
	}
	var counters tunnel.Counters
	r := NewResponder(ResponderConfig{
		Truth: newHeld(), Upstream: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:53")},
		Log: quiet, Counters: &counters,
	})
	f.Fuzz(func(t *testing.T, packet []byte, stream bool, size uint16) {
		query := question("X.example.", dns.TypeA)
		if size > 0 {
			query.SetEdns0(size, false)
		}
		via := overUDP
		if stream {
			via = overTCP
		}
		_, q := r.answer(pack(t, query), via)
		sent := q.forUpstream()
		if len(packet) >= 2 { // with a wrong id the packet would be ignored
			binary.BigEndian.PutUint16(packet, sent.Id)
		}
		m := parseReply(packet, sent)
		if m == nil {
			return
		}
		reply := q.pack(q.asReply(m))
		if reply == nil {
			t.Fatal("no reply")
		}
		checkReply(t, pack(t, query), reply, via)
	})
}
