package kube

import (
	"net/netip"
	"testing"
)

func TestPodOwners(t *testing.T) {
	o := newPodOwners()
	set := func(node string, changes bool, texts ...string) {
		t.Helper()
		var networks []netip.Prefix
		for _, text := range texts {
			networks = append(networks, netip.MustParsePrefix(text))
		}
		if o.set(node, networks) != changes {
			t.Errorf("%s has %v: want a change: %t", node, texts, changes)
		}
	}
	want := func(address, want string) {
		t.Helper()
		if got := o.owner(address); got != want {
			t.Errorf("%s: %q, want %q", address, got, want)
		}
	}
	set("edge1", true, "10.88.1.0/24", "fd00:88:1::/64")
	set("edge2", true, "10.88.2.0/24")
	set("edge2", false, "10.88.2.0/24")
	set("thief", false, "0.0.0.0/0", "10.0.0.0/8", "fd00::/32") // too wide for one Node
	want("10.88.1.5", "edge1")
	want("::ffff:10.88.1.5", "edge1")
	want("fd00:88:1::5", "edge1")
	want("10.88.2.5", "edge2")
	want("10.88.3.5", "")
	want("no address", "")
	set("thief", true, "10.88.0.0/16")
	want("10.88.2.5", "") // two have it
	want("10.88.3.5", "thief")
	set("thief", true)
	set("edge2", true)
	want("10.88.2.5", "")
	set("edge1", true)
	if want("10.88.1.5", ""); len(o.of)+len(o.at)+len(o.lengths) > 0 {
		t.Errorf("without Nodes: %+v", o)
	}
}
