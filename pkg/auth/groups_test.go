package auth

import (
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
}
