package auth

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
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
	"tunnel.example/tunnel/pkg/tunnel"
)

// fakeNet is a machine with the addresses 10.1.1.1 and fd00::1. It resolves a few names and records
// each lookup and dial without making it.
type fakeNet struct {
	names  map[string][]string
	answer map[string]error // result of a dial, by address; absent: the dial succeeds
	dialed []string
	looked []string
}

func (n *fakeNet) policy(t *testing.T, entries ...string) *Policy {
	t.Helper()
	p, err := ParsePolicy(entries)
	if err != nil {
		t.Fatal(err)
	}
	p.ownAddrs = func() ([]net.Addr, error) {
		_, v4, _ := net.ParseCIDR("10.1.1.0/24")
		_, v6, _ := net.ParseCIDR("fd00::/64")
		return []net.Addr{
			&net.IPNet{IP: net.ParseIP("10.1.1.1"), Mask: v4.Mask},
			&net.IPNet{IP: net.ParseIP("fd00::1"), Mask: v6.Mask},
		}, nil
	}
	p.lookup = func(_ context.Context, host string) ([]netip.Addr, error) {
		n.looked = append(n.looked, host)
		var ips []netip.Addr
		for _, s := range n.names[host] {
			ips = append(ips, netip.MustParseAddr(s))
		}
		if ips == nil {
			return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
		}
		return ips, nil
	}
	p.dial = func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
		n.dialed = append(n.dialed, to.String())
		err := n.answer[to.Addr().String()]
		if errors.Is(err, context.DeadlineExceeded) {
			<-ctx.Done()
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: ctx.Err()}
		}
		if err != nil {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
		}
		c, other := net.Pipe()
		other.Close()
		return c, nil
	}
	return p
}

// The sockets of a policy with a control pass it before they connect; those of the first policy do not.
func TestPolicyWithControl(t *testing.T) {
	var seen []string
	first, err := ParsePolicy([]string{"self:*"})
	if err != nil {
		t.Fatal(err)
	}
	p := first.WithControl(func(network, _ string, _ syscall.RawConn) error {
		seen = append(seen, network)
		return nil
	})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, one := range []*Policy{first, p} {
		c, err := one.Dial(t.Context(), "tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		u, err := one.DialUDP(t.Context(), "127.0.0.1:9", func(netip.AddrPort) time.Time { return time.Time{} })
		if err != nil {
			t.Fatal(err)
		}
		defer u.Close()
	}
	if got := strings.Join(seen, " "); got != "tcp4 udp4" {
		t.Errorf("the control saw %q", got)
	}
}

func TestPolicyPermits(t *testing.T) {
	for _, tc := range []struct {
		entries string
		yes, no string
	}{
		{
			entries: "",
			yes: "127.0.0.1:1 127.9.9.9:22 [::1]:10250 10.1.1.1:10250 [fd00::1]:22 " +
				"[::ffff:127.0.0.1]:22 [::ffff:10.1.1.1]:22",
			no: "10.1.1.2:22 8.8.8.8:53 [fd00::2]:22 169.254.169.254:80 0.0.0.0:22 [::]:22 " +
				"[::ffff:0.0.0.0]:22 [::ffff:8.8.8.8]:53",
		},
		{ // entries about other machines add to the default
			entries: "10.0.0.0/8:443",
			yes:     "127.0.0.1:22 10.1.1.1:22 10.200.0.1:443 [::1]:22",
			no:      "10.200.0.1:80 11.0.0.1:443",
		},
		{ // an entry about the machine's own network is about other machines
			entries: "10.1.1.0/24:443",
			yes:     "127.0.0.1:22 10.1.1.1:22 10.1.1.9:443",
			no:      "10.1.1.9:22",
		},
		{ // an entry about the machine replaces the default
			entries: "127.0.0.1:10250",
			yes:     "127.0.0.1:10250 [::ffff:127.0.0.1]:10250",
			no:      "127.0.0.1:22 127.0.0.2:10250 [::1]:10250 10.1.1.1:10250 8.8.8.8:10250",
		},
		{
			entries: "127.0.0.1:10250 10.0.0.0/8:443 [fd00::/8]:*",
			yes:     "127.0.0.1:10250 10.1.1.1:443 10.9.9.9:443 [fd00::1]:1 [fdff::1]:65535",
			no:      "127.0.0.1:443 10.1.1.1:10250 [::1]:443 [fe80::1]:443",
		},
		{
			entries: "self:10250",
			yes:     "127.0.0.1:10250 10.1.1.1:10250 [fd00::1]:10250 [::1]:10250",
			no:      "127.0.0.1:22 10.1.1.1:22 10.1.1.2:10250",
		},
		{entries: "[::1]:*", yes: "[::1]:1", no: "127.0.0.1:1 10.1.1.1:1"},
		{entries: "127.0.0.0/8:80", yes: "127.5.5.5:80", no: "127.0.0.1:22 [::1]:80"},
		{entries: "0.0.0.0/0:*", yes: "8.8.8.8:53 127.0.0.1:22", no: "0.0.0.0:22 [2001:db8::1]:53"},
		{entries: "[::/0]:*", yes: "[2001:db8::1]:53", no: "[::]:22 8.8.8.8:53"},
		{entries: "[::ffff:10.0.0.0/104]:80", yes: "10.5.5.5:80 127.0.0.1:1", no: "10.5.5.5:81"},
	} {
		p := new(fakeNet).policy(t, strings.Fields(tc.entries)...)
		for _, to := range strings.Fields(tc.yes) {
			if !p.Permits(netip.MustParseAddrPort(to)) {
				t.Errorf("allow = [%s] (%s): %s is denied", tc.entries, p, to)
			}
		}
		for _, to := range strings.Fields(tc.no) {
			if p.Permits(netip.MustParseAddrPort(to)) {
				t.Errorf("allow = [%s] (%s): %s is permitted", tc.entries, p, to)
			}
		}
	}
}

func TestParsePolicyErrors(t *testing.T) {
	for entry, want := range map[string]string{
		"":                     "no port",
		"127.0.0.1":            "127.0.0.1:*",
		"127.0.0.1:":           "1 to 65535",
		"127.0.0.1:0":          "1 to 65535",
		"127.0.0.1:65536":      "1 to 65535",
		"127.0.0.1:-1":         "1 to 65535",
		"127.0.0.1:http":       "1 to 65535",
		"kubelet.local:10250":  "not an IP address",
		":22":                  "not an IP address",
		"fd00::/8:443":         "brackets",
		"::1:443":              "brackets",
		"[fd00::/8]":           "1 to 65535",
		"10.0.0.0/33:443":      "not an IP address",
		"10.0.0.1/8:443":       "10.0.0.0/8 for the network",
		"*:443":                "0.0.0.0/0:443",
		"[fe80::1%eth0]:443":   "zone",
		"127.0.0.1:22,[::1]:1": "brackets",
	} {
		if _, err := ParsePolicy([]string{entry}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v does not say %q", entry, err, want)
		}
	}
}

func TestPolicyDial(t *testing.T) {
	names := map[string][]string{
		"both":   {"::1", "127.0.0.1"},
		"mixed":  {"8.8.8.8", "127.0.0.1"},
		"away":   {"8.8.8.8"},
		"mapped": {"::ffff:127.0.0.1"},
		"two":    {"10.1.1.1", "127.0.0.1"},
	}
	slow := context.DeadlineExceeded
	for _, tc := range []struct {
		name   string
		addr   string
		answer map[string]error
		dialed string
		code   tunnel.Code // 0: connected
		text   string
	}{
		{name: "address", addr: "127.0.0.1:22", dialed: "127.0.0.1:22"},
		{name: "bracketed", addr: "[::1]:22", dialed: "[::1]:22"},
		{name: "name", addr: "both:22", dialed: "[::1]:22"},
		{
			name: "next address after a refusal", addr: "both:22",
			answer: map[string]error{"::1": syscall.ECONNREFUSED}, dialed: "[::1]:22 127.0.0.1:22",
		},
		{
			name: "next address after a timeout", addr: "two:22",
			answer: map[string]error{"10.1.1.1": slow}, dialed: "10.1.1.1:22 127.0.0.1:22",
		},
		{name: "denied addresses of a name are left out", addr: "mixed:22", dialed: "127.0.0.1:22"},
		{name: "what was checked is what is dialled", addr: "mapped:22", dialed: "127.0.0.1:22"},
		{name: "denied", addr: "8.8.8.8:53", code: tunnel.Denied, text: `add "8.8.8.8:53" to allow under [mode.edge]`},
		{name: "denied name", addr: "away:53", code: tunnel.Denied, text: "may not dial away:53; its log says"},
		{name: "denied IPv6", addr: "[2001:db8::1]:53", code: tunnel.Denied, text: `add "[2001:db8::1]:53"`},
		{name: "unspecified", addr: "0.0.0.0:22", code: tunnel.Denied, text: "127.0.0.1"},
		{
			name: "refused", addr: "both:22",
			answer: map[string]error{"::1": syscall.EADDRNOTAVAIL, "127.0.0.1": syscall.ECONNREFUSED},
			dialed: "[::1]:22 127.0.0.1:22", code: tunnel.Refused, text: "both:22",
		},
		{
			name: "unreachable", addr: "10.1.1.1:22", answer: map[string]error{"10.1.1.1": syscall.EHOSTUNREACH},
			dialed: "10.1.1.1:22", code: tunnel.Unreachable, text: "no route to host",
		},
		{
			name: "timeout", addr: "10.1.1.1:22", answer: map[string]error{"10.1.1.1": slow},
			dialed: "10.1.1.1:22", code: tunnel.Timeout, text: "10.1.1.1:22",
		},
		{
			name: "kernel's timeout", addr: "10.1.1.1:22", answer: map[string]error{"10.1.1.1": syscall.ETIMEDOUT},
			dialed: "10.1.1.1:22", code: tunnel.Timeout,
		},
		{
			name: "no descriptors", addr: "127.0.0.1:22", answer: map[string]error{"127.0.0.1": syscall.EMFILE},
			dialed: "127.0.0.1:22", code: tunnel.Overloaded,
		},
		{
			name: "something else", addr: "127.0.0.1:22", answer: map[string]error{"127.0.0.1": errors.New("odd")},
			dialed: "127.0.0.1:22", code: tunnel.Internal,
		},
		{name: "unknown name", addr: "nowhere:22", code: tunnel.Unreachable, text: "no such host"},
		{name: "no port", addr: "127.0.0.1", code: tunnel.Unreachable, text: "not host:port"},
		{name: "named port", addr: "127.0.0.1:ssh", code: tunnel.Unreachable, text: "1 to 65535"},
		{name: "no host", addr: ":22", code: tunnel.Unreachable, text: "not host:port"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &fakeNet{names: names, answer: tc.answer}
				start := time.Now()
				c, err := n.policy(t).Dial(t.Context(), "tcp", tc.addr)
				if c != nil {
					c.Close()
				}
				if got := strings.Join(n.dialed, " "); got != tc.dialed {
					t.Errorf("dialled %q, want %q", got, tc.dialed)
				}
				if took := time.Since(start); took > dialTimeout {
					t.Errorf("took %v", took)
				}
				again := &fakeNet{names: names, answer: tc.answer}
				tried, failure := again.policy(t).Try(t.Context(), tc.addr)
				if got := strings.Join(again.dialed, " "); got != tc.dialed || (failure == nil) != (err == nil) ||
					err != nil && tunnel.CodeOf(failure) != tunnel.CodeOf(err) || (tried.Permitted > 0) != (tc.dialed != "") {
					t.Errorf("Try dialled %q, and says %+v, %v; Dial says %v", got, tried, failure, err)
				}
				if tc.code == 0 {
					if err != nil {
						t.Errorf("not connected: %v", err)
					}
					return
				}
				r, ok := errors.AsType[*tunnel.Refusal](err)
				if !ok || r.Code != tc.code || !strings.Contains(r.Text, tc.text) {
					t.Errorf("refused with %v, want %v and %q", err, tc.code, tc.text)
				}
			})
		})
	}
}

// DNS rebinding: a name may resolve differently the second time, so it is resolved once.
func TestPolicyResolvesOnce(t *testing.T) {
	n := &fakeNet{names: map[string][]string{"both": {"127.0.0.1"}}}
	c, err := n.policy(t).Dial(t.Context(), "tcp", "both:22")
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if !slices.Equal(n.looked, []string{"both"}) || !slices.Equal(n.dialed, []string{"127.0.0.1:22"}) {
		t.Errorf("looked up %v, dialled %v", n.looked, n.dialed)
	}
}

func TestPolicyDialIsBoundedByItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &fakeNet{answer: map[string]error{"127.0.0.1": context.DeadlineExceeded}}
		p := n.policy(t)

		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		start := time.Now()
		_, err := p.Dial(ctx, "tcp", "127.0.0.1:1")
		if tunnel.CodeOf(err) != tunnel.Timeout || time.Since(start) != 3*time.Second {
			t.Errorf("with a deadline of 3 s: %v after %v", err, time.Since(start))
		}

		ctx, cancel = context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		start = time.Now()
		_, err = p.Dial(ctx, "tcp", "127.0.0.1:1")
		if tunnel.CodeOf(err) != tunnel.Gone || time.Since(start) != time.Second {
			t.Errorf("cancelled after 1 s: %v after %v", err, time.Since(start))
		}

		start = time.Now()
		_, err = p.Dial(t.Context(), "tcp", "127.0.0.1:1")
		if tunnel.CodeOf(err) != tunnel.Timeout || time.Since(start) != dialTimeout {
			t.Errorf("with no deadline: %v after %v", err, time.Since(start))
		}
	})
}

func TestPolicyDialsForReal(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p, err := ParsePolicy(nil)
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	for _, addr := range []string{ln.Addr().String(), "localhost:" + port} {
		c, err := p.DialRequest(t.Context(), tunnel.Request{Network: "tcp", Addr: addr})
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	ln.Close()
	if _, err := p.Dial(t.Context(), "tcp", ln.Addr().String()); tunnel.CodeOf(err) != tunnel.Refused {
		t.Errorf("nobody listens: %v", err)
	}
	if _, err := p.Dial(t.Context(), "udp", ln.Addr().String()); tunnel.CodeOf(err) != tunnel.Denied {
		t.Errorf("udp: %v", err)
	}
}

// If the caller gives up a dial just after the connection was made, the connection ends with a reset.
// After a clean end the target would see an empty connection.
func TestPolicyDialGivenUp(t *testing.T) {
	p, err := ParsePolicy(nil)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	const dials = 1000
	var connected, clean atomic.Int64
	var taking sync.WaitGroup
	taking.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			connected.Add(1)
			if _, err := c.Read(make([]byte, 1)); errors.Is(err, io.EOF) {
				clean.Add(1)
			}
			c.Close()
		}
	})
	for range dials {
		ctx, cancel := context.WithCancel(t.Context())
		go cancel()
		if c, err := p.Dial(ctx, "tcp", ln.Addr().String()); err == nil {
			c.(*net.TCPConn).SetLinger(0) // the dial won the race; end this connection with a reset as well
			c.Close()
		}
		cancel()
	}
	ln.Close()
	taking.Wait()
	if n := clean.Load(); n > 0 {
		t.Errorf("of %d dials %d reached the target, and %d ended there cleanly", dials, connected.Load(), n)
	}
}

func TestSources(t *testing.T) {
	s, err := ParseSources([]string{"10.0.0.0/8", "192.168.1.7", "fd00::/8", "::ffff:172.16.0.0/108"})
	if err != nil {
		t.Fatal(err)
	}
	s = append(s, netip.MustParsePrefix("::ffff:1.2.3.0/120"))
	for addr, want := range map[string]bool{
		"10.2.3.4": true, "::ffff:10.2.3.4": true, "192.168.1.7": true, "192.168.1.8": false,
		"fd12::1": true, "fd12::1%eth0": true, "fe80::1": false, "172.16.5.5": true, "172.32.0.1": false,
		"::ffff:11.0.0.1": false, "1.2.3.4": true, "127.0.0.1": false, "::1": false,
	} {
		if got := s.Permits(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s permitted by %s: %v", addr, s, got)
		}
	}
	if (Sources{}).Permits(netip.MustParseAddr("127.0.0.1")) || s.Permits(netip.Addr{}) {
		t.Error("the empty list permits somebody, or the empty address is permitted")
	}
	for _, bad := range []string{
		"", "localhost", "10.0.0.0/8/8", "10.0.0.1/8", "10.0.0.1:80", "fe80::1%eth0", " 10.0.0.1",
	} {
		if _, err := ParseSources([]string{bad}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", bad)) {
			t.Errorf("%q: error %v", bad, err)
		}
	}
}

func FuzzPolicy(f *testing.F) {
	for _, e := range []string{
		"127.0.0.1:10250", "10.0.0.0/8:443", "[fd00::/8]:*", "[::1]:*", "self:22", "[::ffff:1.2.3.4]:1",
	} {
		f.Add(e)
	}
	f.Fuzz(func(t *testing.T, entry string) {
		r, err := parseRule(entry)
		if err != nil {
			return
		}
		again, err := parseRule(r.String())
		if err != nil || again != r {
			t.Fatalf("%q is printed as %q, which is %+v, %v", entry, r, again, err)
		}
	})
}

// DialUDP takes the first permitted address that has never refused, or else the one whose refusal is the
// longest ago.
func TestDialUDPAvoidsRefusals(t *testing.T) {
	n := &fakeNet{names: map[string][]string{"two.example": {"10.2.0.1", "127.0.0.1", "127.0.0.2"}}}
	p := n.policy(t, "127.0.0.0/8:53")
	now := time.Now()
	refused := make(map[netip.AddrPort]time.Time)
	for _, tc := range []struct {
		refuses string // before the dial
		want    string
	}{
		{"", "127.0.0.1:53"},
		{"127.0.0.1:53", "127.0.0.2:53"},
		{"127.0.0.2:53", "127.0.0.1:53"},
		{"127.0.0.1:53", "127.0.0.2:53"},
	} {
		if tc.refuses != "" {
			now = now.Add(time.Second)
			refused[netip.MustParseAddrPort(tc.refuses)] = now
		}
		c, err := p.DialUDP(t.Context(), "two.example:53", func(a netip.AddrPort) time.Time { return refused[a] })
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		if got := c.RemoteAddr().String(); got != tc.want {
			t.Errorf("after a refusal of %q: dials %s, want %s", tc.refuses, got, tc.want)
		}
	}
}

// A refusal does not tell the cloud what the edge's own DNS answers. The edge's log has the whole
// answer.
func TestPolicyKeepsItsDNS(t *testing.T) {
	n := &fakeNet{names: map[string][]string{"away.corp": {"10.9.8.7"}}}
	p := n.policy(t, "0.0.0.0/0:80")
	const resolver = "10.9.0.53:53"
	found := p.lookup
	for _, tc := range []struct {
		name string
		err  *net.DNSError // error of the lookup; nil: the name is found
		code tunnel.Code
		logs []string
	}{
		{"away.corp:22", nil, tunnel.Denied, []string{"10.9.8.7:22", `add \"10.9.8.7:22\" to allow under [mode.edge]`}},
		{
			"nowhere.corp:22",
			&net.DNSError{Err: "no such host", Name: "nowhere.corp", Server: resolver, IsNotFound: true},
			tunnel.Unreachable, []string{resolver, "no such host"},
		},
		{
			"away.corp:22",
			&net.DNSError{
				Err: "read udp 10.9.8.6:4711->" + resolver + ": i/o timeout", Name: "away.corp",
				Server: resolver, IsTimeout: true,
			},
			tunnel.Timeout, []string{resolver, "i/o timeout"},
		},
	} {
		p.lookup = found
		if tc.err != nil {
			p.lookup = func(context.Context, string) ([]netip.Addr, error) { return nil, tc.err }
		}
		_, err := p.Dial(t.Context(), "tcp", tc.name)
		r, ok := errors.AsType[*tunnel.Refusal](err)
		if !ok || r.Code != tc.code || strings.Contains(r.Error(), "10.9.") || !strings.Contains(r.Text, tc.name) {
			t.Errorf("%s: the cloud is told %v", tc.name, err)
		}
		var log testkit.Log
		slog.New(slog.NewTextHandler(&log, nil)).Warn("denied", "err", err)
		for _, want := range tc.logs {
			if !strings.Contains(log.String(), want) {
				t.Errorf("%s: the log lacks %q: %s", tc.name, want, &log)
			}
		}
	}
}

// A wide entry does not permit the metadata services of clouds; a narrow one does.
func TestPolicyGuardsMetadata(t *testing.T) {
	for _, tc := range []struct {
		entries   string
		addr      string
		permitted bool
	}{
		{"0.0.0.0/0:* [::/0]:*", "169.254.169.254:80", false},
		{"0.0.0.0/0:* [::/0]:*", "[::ffff:169.254.169.254]:80", false},
		{"0.0.0.0/0:* [::/0]:*", "169.254.170.2:80", false},
		{"0.0.0.0/0:* [::/0]:*", "[fd00:ec2::254]:80", false},
		{"0.0.0.0/0:* [::/0]:*", "[fd20:ce::254]:80", false},
		{"0.0.0.0/0:* [::/0]:*", "100.100.100.200:80", false},
		{"0.0.0.0/0:* [::/0]:*", "168.63.129.16:80", false},
		{"168.0.0.0/8:* 100.64.0.0/10:* [fd00::/8]:*", "168.63.129.16:80", false},
		{"168.0.0.0/8:* 100.64.0.0/10:* [fd00::/8]:*", "100.100.100.200:80", false},
		{"168.0.0.0/8:* 100.64.0.0/10:* [fd00::/8]:*", "[fd00:ec2::254]:80", false},
		{"168.0.0.0/8:* 100.64.0.0/10:* [fd00::/8]:*", "[fd00:ec3::254]:80", true},
		{"0.0.0.0/0:* [::/0]:* [fd00::/8]:*", "[fd00:42::42]:80", false},
		{"[fd00:42::42]:80", "[fd00:42::42]:80", true},
		{"0.0.0.0/0:* [::/0]:*", "169.253.169.254:80", true},
		{"0.0.0.0/0:* 169.254.169.254:80", "169.254.169.254:80", true},
		{"0.0.0.0/0:* 169.254.169.254:80", "169.254.169.254:81", false},
		{"169.254.0.0/16:*", "169.254.169.254:80", true},
		{"169.254.0.0/15:*", "169.254.169.254:80", false},
		{"[fd00:ec2::254]:80", "[fd00:ec2::254]:80", true},
		{"0.0.0.0/0:* [::/0]:*", "[fe80::a9fe:a9fe%eth0]:80", false},
		{"0.0.0.0/0:* [::/0]:*", "[fd00:c1::a9fe:a9fe]:80", false},
		{"[fe80::/10]:*", "[fe80::a9fe:a9fe%eth0]:80", false},
		{"[fe80::/10]:*", "[fe80::a9fe:a9ff%eth0]:80", true},
		{"[fe80::a9fe:a9fe]:80", "[fe80::a9fe:a9fe%eth0]:80", true},
		// IPv6 addresses that embed an IPv4 address: a translator or a tunnel endpoint delivers to it.
		{"0.0.0.0/0:* [::/0]:*", "[64:ff9b::a9fe:a9fe]:80", false},
		{"0.0.0.0/0:* [64:ff9b::/96]:*", "[64:ff9b::a83f:8110]:80", false},
		{"0.0.0.0/0:* [64:ff9b::/96]:*", "[64:ff9b::a00:5]:80", true},
		{"[64:ff9b::a9fe:0/112]:80", "[64:ff9b::a9fe:a9fe]:80", true},
		{"0.0.0.0/0:* [::/0]:*", "[2002:a9fe:a9fe::1]:80", false},
		{"0.0.0.0/0:* [::/0]:*", "[2002:a00:5::1]:80", true},
		{"[2002:a9fe:a9fe::/48]:80", "[2002:a9fe:a9fe::1]:80", true},
		{"169.254.169.254:80", "[64:ff9b::a9fe:a9fe]:80", false},
	} {
		p := new(fakeNet).policy(t, strings.Fields(tc.entries)...)
		if got := p.Permits(netip.MustParseAddrPort(tc.addr)); got != tc.permitted {
			t.Errorf("%s permits %s: %t, want %t", tc.entries, tc.addr, got, tc.permitted)
		}
	}
	for _, addr := range []string{"169.254.169.254:80", "[64:ff9b::a9fe:a9fe]:80"} {
		p := new(fakeNet).policy(t).Also(func(netip.Addr) bool { return true })
		if p.Permits(netip.MustParseAddrPort(addr)) {
			t.Errorf("what a node's pods may be reached at includes a metadata service, %s", addr)
		}
	}
}

// TestPolicyAdopts: a policy that adopts another one permits what that one permits, and so does each policy that
// Also has returned.
func TestPolicyAdopts(t *testing.T) {
	first, err := ParsePolicy([]string{"127.0.0.1:22"})
	if err != nil {
		t.Fatal(err)
	}
	pod := netip.MustParseAddr("10.88.0.1")
	more := first.Also(func(a netip.Addr) bool { return a == pod })
	want := func(why string, all map[string]bool) {
		t.Helper()
		for addr, permitted := range all {
			to := netip.MustParseAddrPort(addr)
			if first.Permits(to) != permitted || more.Permits(to) != permitted {
				t.Errorf("%s: %s is permitted: %t, %t", why, addr, first.Permits(to), more.Permits(to))
			}
		}
		if to := netip.AddrPortFrom(pod, 80); first.Permits(to) || !more.Permits(to) {
			t.Errorf("%s: the pod is permitted: %t, %t", why, first.Permits(to), more.Permits(to))
		}
	}
	want("before", map[string]bool{"127.0.0.1:22": true, "10.0.0.1:443": false})
	next, err := ParsePolicy([]string{"self:10250", "10.0.0.0/8:443"})
	if err != nil {
		t.Fatal(err)
	}
	first.Adopt(next)
	want("after", map[string]bool{"127.0.0.1:22": false, "10.0.0.1:443": true, "127.0.0.1:10250": true})
	if s := more.String(); s != "self:10250,10.0.0.0/8:443" {
		t.Errorf("the rules in force are %s", s)
	}
}
