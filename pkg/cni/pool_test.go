package cni

import (
	"net/netip"
	"testing"
	"time"
)

func TestUsable(t *testing.T) {
	for _, c := range []struct {
		subnet      string
		first, last string // of pods
	}{
		{"10.88.1.0/24", "10.88.1.2", "10.88.1.254"},
		{"10.88.1.0/30", "10.88.1.2", "10.88.1.2"},
		{"10.88.1.128/25", "10.88.1.130", "10.88.1.254"},
		{"10.0.0.0/8", "10.0.0.2", "10.255.255.254"},
		{"fd00:88:1::/64", "fd00:88:1::2", "fd00:88:1::ffff:ffff:ffff:ffff"},
		{"fd00:88:1::/126", "fd00:88:1::2", "fd00:88:1::3"},
	} {
		subnet, first, last := netip.MustParsePrefix(c.subnet), netip.MustParseAddr(c.first), netip.MustParseAddr(c.last)
		for addr, want := range map[netip.Addr]bool{
			first: true, last: true, first.Prev(): false, last.Next(): false,
			netip.MustParseAddr("192.0.2.1"): false, netip.MustParseAddr("2001:db8::1"): false,
		} {
			if got := usable(subnet, addr); got != want {
				t.Errorf("%s: usable(%s) is %v", subnet, addr, got)
			}
		}
	}
}

// at is a time of release, in seconds.
func at(seconds int64) time.Time { return time.Unix(seconds, 0).UTC() }

func TestChoose(t *testing.T) {
	web, db, job := Pod{"shop", "web-0", "1"}, Pod{"shop", "db-0", "1"}, Pod{"shop", "job-x", "1"}
	inUse := func(pod Pod) Reservation { return Reservation{ContainerID: "c", Pod: pod} }
	had := func(pod Pod, released int64) Reservation {
		return Reservation{ContainerID: "c", Pod: pod, Released: at(released)}
	}
	const a2, a3, a4, a5, a6 = "10.88.1.2", "10.88.1.3", "10.88.1.4", "10.88.1.5", "10.88.1.6"
	for name, c := range map[string]struct {
		known   map[string]Reservation
		blocked []string
		pod     Pod
		want    string // "" for a full pool
	}{
		"an empty pool gives its first address": {nil, nil, web, a2},
		"an address in use is passed over":      {map[string]Reservation{a2: inUse(db)}, nil, web, a3},
		"a pod gets its address again":          {map[string]Reservation{a4: had(web, 5)}, nil, web, a4},
		"with another UID, too": {map[string]Reservation{a4: had(web, 5)}, nil,
			Pod{"shop", "web-0", "2"}, a4},
		"of several addresses, it gets the last": {map[string]Reservation{a4: had(web, 5), a3: had(web, 6)}, nil,
			web, a3},
		"its address in use by its old container": {map[string]Reservation{a2: inUse(web)}, nil, web, a3},
		"another namespace is another pod": {map[string]Reservation{a4: had(Pod{"x", "web-0", ""}, 5)}, nil,
			web, a2},
		"others' addresses are left for them":         {map[string]Reservation{a2: had(db, 5)}, nil, web, a3},
		"containers without a pod remember nothing":   {map[string]Reservation{a4: had(Pod{}, 5)}, nil, Pod{}, a2},
		"a blocked address is passed over":            {nil, []string{a2, a3}, web, a4},
		"a blocked address is not given to its pod":   {map[string]Reservation{a4: had(web, 5)}, []string{a4}, web, a2},
		"the gateway's file is passed over":           {map[string]Reservation{"10.88.1.1": had(web, 5)}, nil, web, a2},
		"the address of another subnet is no address": {map[string]Reservation{"10.88.2.2": had(web, 5)}, nil, web, a2},
		"without an unknown one, the oldest is taken": {map[string]Reservation{
			a2: inUse(db), a3: had(db, 9), a4: had(job, 7), a5: had(db, 8), a6: inUse(db)}, nil, web, a4},
		"of equal times, the lowest is taken": {map[string]Reservation{
			a2: inUse(db), a3: inUse(db), a4: had(job, 7), a5: had(db, 7), a6: inUse(db)}, nil, web, a4},
		"a full pool gives none": {map[string]Reservation{
			a2: inUse(db), a3: inUse(db), a4: inUse(db), a5: inUse(db), a6: inUse(db)}, nil, web, ""},
		"a pool with only blocked addresses gives none": {map[string]Reservation{
			a2: inUse(db), a3: inUse(db), a4: inUse(db), a5: had(web, 1)}, []string{a5, a6}, web, ""},
	} {
		t.Run(name, func(t *testing.T) {
			known := make(map[netip.Addr]*Reservation)
			for addr, r := range c.known {
				r.Address = netip.MustParseAddr(addr)
				known[r.Address] = &r
			}
			blocked := func(addr netip.Addr) bool {
				for _, b := range c.blocked {
					if addr.String() == b {
						return true
					}
				}
				return false
			}
			got, ok := choose(netip.MustParsePrefix("10.88.1.0/29"), c.pod, known, blocked)
			if ok != (c.want != "") || ok && got.String() != c.want {
				t.Errorf("the address is %v, %v, want %q", got, ok, c.want)
			}
		})
	}
}
