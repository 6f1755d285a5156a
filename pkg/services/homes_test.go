package services

import "testing"

func TestHomes(t *testing.T) {
	h := NewHomes()
	h.Set("edge1", &Node{PodCidrs: []string{"10.88.1.0/24", "fd00:88:1::/64"}, InternalIps: []string{"192.168.1.2"}})
	h.Set("edge2", &Node{PodCidrs: []string{"10.88.2.0/24", "no network"}, InternalIps: []string{"192.168.1.2", "none"}})
	want := func(node, address, want string) {
		t.Helper()
		if got := h.Of(&Endpoint{Node: node, Address: address}); got != want {
			t.Errorf("%s on %q: %q, want %q", address, node, got, want)
		}
	}
	want("", "10.88.1.5", "edge1")
	want("", "::ffff:10.88.1.5", "edge1")
	want("", "fd00:88:1::5", "edge1")
	want("", "10.88.2.5", "edge2")
	want("edge3", "10.88.2.5", "edge3") // the slice says so
	want("", "10.88.3.5", "")
	want("", "192.168.1.2", "") // both have it
	want("", "no address", "")
	h.Set("edge2", &Node{PodCidrs: []string{"10.88.1.0/25"}})
	want("", "10.88.2.5", "")
	want("", "192.168.1.2", "edge1")
	want("", "10.88.1.5", "") // in networks of both
	h.Set("edge2", nil)
	want("", "10.88.1.5", "edge1")
	h.Set("edge1", nil)
	if want("", "10.88.1.5", ""); len(h.of)+len(h.at)+len(h.lengths) > 0 {
		t.Errorf("without Nodes: %+v", h)
	}
}
