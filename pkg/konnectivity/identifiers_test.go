package konnectivity

import (
	"slices"
	"testing"
)

func TestParseIdentifiers(t *testing.T) {
	id, err := ParseIdentifiers("host=Edge1&host=edge1.lan&ipv4=10.0.0.5&ipv6=FD00::5" +
		"&cidr=10.88.1.7/24&cidr=fd00:1::/64&default-route=true")
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(id.Hosts)
	if want := []string{"10.0.0.5", "edge1", "edge1.lan", "fd00::5"}; !slices.Equal(id.Hosts, want) {
		t.Errorf("hosts %q, want %q", id.Hosts, want)
	}
	if len(id.Networks) != 2 || id.Networks[0].String() != "10.88.1.0/24" || !id.DefaultRoute {
		t.Errorf("%+v", id)
	}
	for _, bad := range []string{"uid=1", "host=", "ipv4=fd00::1", "ipv6=10.0.0.1", "ipv4=edge1", "cidr=10.0.0.1",
		"default-route=yes", "host=a;b", "%zz", "host=%ff", "host=%c3%28", "host=a%00", "host=a%0Ab", "host=a%20b",
		"ipv6=fe80::1%25eth0"} {
		if id, err := ParseIdentifiers(bad); err == nil {
			t.Errorf("%s: %+v", bad, id)
		}
	}
}
