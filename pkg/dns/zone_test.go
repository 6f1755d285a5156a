package dns

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// record returns a record, written as in a zone file.
func record(t testing.TB, text string) dns.RR {
	t.Helper()
	rr, err := dns.NewRR(text)
	if err != nil {
		t.Error(err)
	}
	return rr
}

// A zone answers its names. An alias that leads out of it is completed by an upstream.
func TestZone(t *testing.T) {
	var mu sync.Mutex // guards the following
	var asked []string
	var servers []netip.AddrPort
	up := upstream(t, func(q *dns.Msg, _ string) [][]byte {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, q.Question[0].Name)
		if strings.HasPrefix(q.Question[0].Name, "gone.") {
			m := new(dns.Msg).SetRcode(q, dns.RcodeNameError)
			m.RecursionAvailable = true
			return [][]byte{pack(t, m)}
		}
		return [][]byte{pack(t, reply(t, q, q.Question[0].Name+" 9 IN A 192.0.2.1"))}
	})
	r := respond(t, ResponderConfig{
		Upstreams: func() []netip.AddrPort {
			mu.Lock()
			defer mu.Unlock()
			return servers
		},
		Zone: func(q dns.Question) *dns.Msg {
			m := new(dns.Msg)
			switch first, in := strings.CutSuffix(strings.ToLower(q.Name), ".zone."); {
			case !in:
				return nil
			case first == "a":
				m.Answer = []dns.RR{record(t, q.Name+" 5 IN A 10.0.0.1")}
			case first == "many":
				for range 200 {
					m.Answer = append(m.Answer, record(t, q.Name+" 5 IN A 10.0.0.1"))
				}
			case first == "alias" || first == "gone":
				m.Answer = []dns.RR{record(t, q.Name+" 5 IN CNAME "+first+".example.com.")}
			case first == "within": // its target has no address of this type
				m.Answer = []dns.RR{record(t, q.Name+" 5 IN CNAME a.zone.")}
				m.Ns = []dns.RR{record(t, "zone. 5 IN SOA ns.zone. root.zone. 1 2 3 4 5")}
			default:
				m.Rcode = dns.RcodeNameError
			}
			return m
		},
	})
	answer := func(network, name string, qtype uint16) *dns.Msg {
		t.Helper()
		return ask(t, r.Addr(), network, new(dns.Msg).SetQuestion(name, qtype))
	}
	want := func(name string, qtype uint16, rcode int, records ...string) {
		t.Helper()
		for _, network := range []string{"udp", "tcp"} {
			m := answer(network, name, qtype)
			var got []string
			for _, rr := range m.Answer {
				got = append(got, strings.Join(strings.Fields(rr.String()), " "))
			}
			if m.Rcode != rcode || !slices.Equal(got, records) || !m.RecursionAvailable {
				t.Errorf("%s by %s: %s\nwant %v", name, network, m, records)
			}
		}
	}
	want("alias.zone.", dns.TypeA, dns.RcodeServerFailure) // there is no server yet
	mu.Lock()
	servers = []netip.AddrPort{up}
	mu.Unlock()
	want("A.zone.", dns.TypeA, dns.RcodeSuccess, "A.zone. 5 IN A 10.0.0.1")
	want("b.zone.", dns.TypeA, dns.RcodeNameError)
	want("alias.zone.", dns.TypeCNAME, dns.RcodeSuccess, "alias.zone. 5 IN CNAME alias.example.com.")
	want("within.zone.", dns.TypeAAAA, dns.RcodeSuccess, "within.zone. 5 IN CNAME a.zone.")
	mu.Lock()
	if len(asked) != 0 {
		t.Errorf("the upstream is asked for %q", asked)
	}
	mu.Unlock()
	want("Alias.zone.", dns.TypeA, dns.RcodeSuccess,
		"Alias.zone. 5 IN CNAME alias.example.com.", "alias.example.com. 9 IN A 192.0.2.1")
	want("gone.zone.", dns.TypeA, dns.RcodeNameError, "gone.zone. 5 IN CNAME gone.example.com.")
	want("www.example.com.", dns.TypeA, dns.RcodeSuccess, "www.example.com. 9 IN A 192.0.2.1")
	if m := answer("udp", "many.zone.", dns.TypeA); !m.Truncated || len(m.Answer) >= 200 {
		t.Errorf("by UDP, %d records, truncated: %v", len(m.Answer), m.Truncated)
	}
	if m := answer("tcp", "many.zone.", dns.TypeA); m.Truncated || len(m.Answer) != 200 {
		t.Errorf("by TCP, %d records, truncated: %v", len(m.Answer), m.Truncated)
	}
	if n := r.stats.answers[outcomeService].Load(); n != 8 {
		t.Errorf("%d answers of the zone are counted", n)
	}
}

// The servers are those that the file names now. A file that is away for a moment changes nothing.
func TestResolvConf(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		c := NewResolvConf(path, func(a netip.Addr) bool { return a == netip.MustParseAddr("10.96.0.10") })
		want := func(what string, servers ...string) {
			t.Helper()
			var got []string
			for _, at := range c.Servers() {
				got = append(got, at.String())
			}
			if !slices.Equal(got, servers) {
				t.Errorf("%s: %q, want %q", what, got, servers)
			}
		}
		want("no file")
		time.Sleep(resolvConfEvery)
		write("; a comment\nsearch corp.example\nnameserver 10.96.0.10\nnameserver 192.0.2.1\nnameserver fe80::1%eth0\n" +
			"nameserver 192.0.2.4\noptions ndots:5\nnameserver\nnonsense\n")
		want("the file comes", "192.0.2.1:53", "[fe80::1%eth0]:53")
		write("nameserver ::ffff:192.0.2.2\nnameserver nonsense\n")
		want("at once", "192.0.2.1:53", "[fe80::1%eth0]:53")
		time.Sleep(resolvConfEvery)
		want("it changes", "192.0.2.2:53")
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		time.Sleep(resolvConfEvery)
		want("it is away", "192.0.2.2:53")
	})
}
