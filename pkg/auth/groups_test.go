package auth

import (
	"net"
	"net/netip"
	"testing"
)

func TestGroup(t *testing.T) {
	for _, tc := range []struct {
		a, b string
		same bool
	}{
		{"10.0.0.1", "10.0.0.1", true},
		{"10.0.0.1", "10.0.0.2", false},
		{"10.0.0.1", "::ffff:10.0.0.1", true},
		{"::ffff:10.0.0.1", "::ffff:10.0.0.2", false},
		{"fd00:0:0:1::1", "fd00:0:0:1:ffff::2", true},
		{"fd00:0:0:1::1", "fd00:0:0:2::1", false},
		{"fe80::1%eth0", "fe80::2%eth1", true},
		{"::1", "127.0.0.1", false},
	} {
		if got := Group(netip.MustParseAddr(tc.a)) == Group(netip.MustParseAddr(tc.b)); got != tc.same {
			t.Errorf("%s and %s are one group: %t, want %t", tc.a, tc.b, got, tc.same)
		}
	}
	// A socket for both families reports IPv4 callers in the long form.
	if g := GroupOf(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 1).To16(), Port: 5}); g != netip.MustParsePrefix("10.0.0.1/32") {
		t.Errorf("a TCP address is in group %s", g)
	}
	if GroupOf(&net.UnixAddr{Name: "a"}) != GroupOf(&net.UnixAddr{Name: "b"}) {
		t.Error("two addresses that are not IP are two groups")
	}
}

func TestGroups(t *testing.T) {
	s := NewGroups(2)
	one, other := Group(netip.MustParseAddr("10.0.0.1")), Group(netip.MustParseAddr("10.0.0.2"))
	release, ok := s.Admit(one)
	second, ok2 := s.Admit(one)
	if !ok || !ok2 {
		t.Fatal("the first two are not admitted")
	}
	if _, ok := s.Admit(one); ok {
		t.Error("a third is admitted")
	}
	if done, ok := s.Admit(other); !ok {
		t.Error("another group has no room")
	} else {
		done()
	}
	release()
	release() // counts once
	third, ok := s.Admit(one)
	if !ok {
		t.Fatal("no room after one was released")
	}
	if _, ok := s.Admit(one); ok {
		t.Error("one was released and two are admitted")
	}
	second()
	third()
	if len(s.held) != 0 {
		t.Errorf("empty groups are remembered: %v", s.held)
	}
}
