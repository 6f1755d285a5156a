package listen

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
)

// lab is a Strangers that counts evictions.
type lab struct {
	t *testing.T
	*Strangers
	evicted map[string]int // evictions by address
}

// fromConn is a connection that has a remote address and nothing else.
type fromConn struct {
	net.Conn
	addr net.Addr
}

func (c fromConn) RemoteAddr() net.Addr { return c.addr }

func connFrom(a netip.Addr) net.Conn {
	return fromConn{addr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 1))}
}

func newLab(t *testing.T, total, perSource int) *lab {
	return &lab{t, NewStrangers(total, perSource), make(map[string]int)}
}

func (l *lab) admit(a string) (*Stranger, Full) {
	return l.Admit(connFrom(netip.MustParseAddr(a)), func() { l.evicted[a]++ })
}

// admitted admits n connections from each address.
func (l *lab) admitted(n int, from ...string) (all []*Stranger) {
	l.t.Helper()
	for range n {
		for _, a := range from {
			st, full := l.admit(a)
			if st == nil {
				l.t.Fatalf("%s has no place: %+v", a, full)
			}
			all = append(all, st)
		}
	}
	return all
}

func (l *lab) wantFull(a string, want Full) {
	l.t.Helper()
	if st, full := l.admit(a); st != nil || full != want {
		l.t.Errorf("%s: admitted %t, %+v; want %+v", a, st != nil, full, want)
	}
}

func (l *lab) wantEvicted(want map[string]int) {
	l.t.Helper()
	if fmt.Sprint(l.evicted) != fmt.Sprint(want) {
		l.t.Errorf("evicted: %v, want %v", l.evicted, want)
	}
}

// addresses returns n IPv4 addresses.
func addresses(n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprintf("10.0.%d.%d", i>>8, i&0xff))
	}
	return all
}

func TestPlacesOfASource(t *testing.T) {
	l := newLab(t, 100, 2)
	all := l.admitted(2, "10.0.0.1")
	l.wantFull("10.0.0.1", Full{Source: true})
	l.wantFull("::ffff:10.0.0.1", Full{Source: true})
	other := l.admitted(1, "10.0.0.2")
	all[0].Release()
	all[0].Release() // a second Release does nothing
	all = append(all, l.admitted(1, "10.0.0.1")...)
	l.wantFull("10.0.0.1", Full{Source: true})
	for _, st := range append(all, other...) {
		st.Release()
	}
	if l.Len() != 0 || len(l.taken) != 0 || l.unknown != 0 {
		t.Errorf("%d places are taken, %d ranges are remembered, %d are not known", l.Len(), len(l.taken), l.unknown)
	}
}

// A customer has a /56 or a /48 of IPv6, and so thousands of /64 ranges.
func TestPlacesOfWidePrefixes(t *testing.T) {
	l := newLab(t, 1000, 4)
	admit := func(format string) (n int) {
		for i := range 0x40 {
			for range 5 {
				if st, _ := l.admit(fmt.Sprintf(format, i)); st != nil {
					n++
				}
			}
		}
		return n
	}
	for _, tc := range []struct {
		name, format string
		want         int
	}{
		{"a /64", "2001:db8:1:100::%x", 4},
		{"a /56, which holds that /64", "2001:db8:1:1%02x::1", 4},
		{"a /48, which holds that /56", "2001:db8:1:%02x00::1", 8},
		{"another /48", "2001:db8:2:%02x00::1", 16},
		{"a /32", "2001:db8:1%02x:1::1", 0x40 * 4},
	} {
		if n := admit(tc.format); n != tc.want {
			t.Errorf("%s has %d more places, want %d", tc.name, n, tc.want)
		}
	}
}

// A few sources take all places. A newcomer from another source gets a place at once, whether the
// connections of those few are silent or not.
func TestFewSourcesLeaveRoom(t *testing.T) {
	for name, spoken := range map[string]bool{"silent": false, "in the middle of something": true} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, 1024, 128)
			attackers := addresses(16)
			for _, st := range l.admitted(64, attackers...) {
				if spoken {
					st.Spoke()
				}
			}
			l.wantFull(attackers[3], Full{}) // its source already holds its share
			for i := range 256 {
				l.admitted(1, fmt.Sprintf("192.0.2.%d", i))
			}
			lost := 0
			for a, n := range l.evicted {
				if lost += n; n < 15 || n > 17 {
					t.Errorf("%s has lost %d places, want about as many as each other", a, n)
				}
			}
			if lost != 256 {
				t.Errorf("%d have lost their places, want 256", lost)
			}
		})
	}
}

// A silent connection of the largest source is evicted before one that has sent something.
func TestSilentConnsAreEvictedFirst(t *testing.T) {
	l := newLab(t, 4, 4)
	all := l.admitted(4, "10.0.0.1")
	lost := -1
	for i, st := range all {
		st.evict = func() { lost = i }
		if i != 2 {
			st.Spoke()
		}
	}
	l.admitted(1, "10.0.0.2")
	if lost != 2 {
		t.Errorf("number %d has lost its place, want the silent one, 2", lost)
	}
	l.admitted(1, "10.0.0.3")
	if lost != 0 {
		t.Errorf("number %d has lost its place, want the oldest, 0", lost)
	}
}

// After a second of silence any newcomer may evict a connection, the oldest first.
func TestSilentConnIsEvicted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, 4, 2)
		all := l.admitted(1, addresses(4)...)
		l.wantFull("192.0.2.1", Full{})
		time.Sleep(evictAfter / 2)
		all[0].Spoke()
		all[1].Spoke()
		all[1].Silent() // it has received a response
		time.Sleep(evictAfter / 2)
		l.admitted(1, "192.0.2.1", "192.0.2.2")
		l.wantEvicted(map[string]int{"10.0.0.2": 1, "10.0.0.3": 1})
		l.wantFull("192.0.2.3", Full{})
		time.Sleep(evictAfter / 2)
		l.admitted(1, "192.0.2.3")
		l.wantEvicted(map[string]int{"10.0.0.1": 1, "10.0.0.2": 1, "10.0.0.3": 1})

		// A newcomer may also evict a silent connection of its own source when that source is full.
		l = newLab(t, 100, 2)
		l.admitted(2, "10.0.0.1")
		l.admitted(1, "10.0.0.2")
		l.wantFull("10.0.0.1", Full{Source: true})
		time.Sleep(evictAfter)
		l.admitted(1, "10.0.0.1")
		l.wantEvicted(map[string]int{"10.0.0.1": 1})
	})
}

// A known source gets a place when many other sources have taken all places, and keeps it.
func TestPlacesOfKnownSources(t *testing.T) {
	l := newLab(t, 100, 10)
	l.admitted(1, "192.0.2.1")[0].Met()
	l.Know(netip.MustParseAddr("2001:db8::1"))
	l.admitted(1, addresses(100)...)
	l.wantFull("192.0.2.2", Full{})
	l.admitted(10, "192.0.2.1")
	l.admitted(10, "2001:db8::2")
	l.wantFull("192.0.2.3", Full{})
	l.wantEvicted(nil)
	l.Know(netip.MustParseAddr("192.0.2.4"))
	l.admitted(5, "192.0.2.4") // now 125 places are taken: all, and the quarter for known sources
	l.wantEvicted(nil)
	l.admitted(1, "192.0.2.4")
	if l.evicted["192.0.2.1"] != 1 || len(l.evicted) != 1 {
		t.Errorf("evicted: %v, want one of the source that holds most", l.evicted)
	}
}

// The known sources are bounded. A source that comes again and again is not forgotten.
func TestKnownSourcesAreBounded(t *testing.T) {
	s := NewStrangers(1, 1)
	regular := netip.MustParseAddr("192.0.2.1")
	for i := range 5 * maxKnown {
		s.Know(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}))
		if i%(maxKnown/2) == 0 {
			s.Know(regular)
		}
	}
	if n := len(s.recent) + len(s.older); n > 2*maxKnown {
		t.Errorf("%d sources are known, want %d at most", n, 2*maxKnown)
	}
	if st, _ := s.Admit(connFrom(regular), nil); st == nil || !st.known {
		t.Error("a source that comes again and again is forgotten")
	}
}

func TestAddrOf(t *testing.T) {
	// A socket for both families reports IPv4 callers as IPv4-mapped IPv6 addresses.
	if a := AddrOf(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 1).To16(), Port: 5}); a != netip.MustParseAddr("10.0.0.1") {
		t.Errorf("an IPv4 address is %s", a)
	}
	if a := AddrOf(&net.TCPAddr{IP: net.ParseIP("fe80::1"), Zone: "eth0"}); a != netip.MustParseAddr("fe80::1") {
		t.Errorf("an address with a zone is %s", a)
	}
	l := newLab(t, 10, 1)
	for i, want := range []bool{true, false} { // peers without an IP address are one source
		if st, _ := l.Admit(fromConn{addr: &net.UnixAddr{Name: fmt.Sprint(i)}}, nil); (st != nil) != want {
			t.Errorf("unix socket %d is admitted: %t", i, st != nil)
		}
	}
}

// Admitting stays fast when the largest source has to be found.
func BenchmarkAdmitWhenFull(b *testing.B) {
	s := NewStrangers(1024, 128)
	for i := range 1024 {
		s.Admit(connFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i % 16)})), func() {})
	}
	for i := range b.N {
		s.Admit(connFrom(netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)})), func() {})
	}
}
