package cni

import (
	"net/netip"
	"os"
	"testing"
)

// Whatever a file holds, reading it ends, and the address is in use only by what the file says itself.
func FuzzReservation(f *testing.F) {
	f.Add([]byte(`{"address":"10.88.1.2","network":"pods","containerID":"c1","ifname":"eth0","bootID":"b"}`))
	f.Add([]byte(`{"address":"10.88.1.2","containerID":"c1","released":"2026-11-22T21:00:00Z"}`))
	f.Add([]byte(`{"address":"fd00::2","containerID":"c1"}`))
	f.Add([]byte(``))
	n := newNode(f, "10.88.1.0/24")
	if err := os.MkdirAll(n.conf.DataDir, 0o755); err != nil {
		f.Fatal(err)
	}
	addr := netip.MustParseAddr("10.88.1.2")
	f.Fuzz(func(t *testing.T, content []byte) {
		if err := os.WriteFile(n.file(addr.String()), content, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := openStore(n.conf.DataDir)
		if err != nil {
			t.Fatal(err)
		}
		defer s.close()
		r := s.known[addr]
		if (r == nil) != s.damaged[addr] || len(s.known)+len(s.damaged) != 1 || s.unread[addr] {
			t.Errorf("%q is read as %+v, damaged: %v", content, r, s.damaged)
		}
		if r != nil && (r.Address != addr || r.ContainerID == "") {
			t.Errorf("%q is read as %+v", content, r)
		}
	})
}

// An alias is read only if it is one that aliasOf writes.
func FuzzAlias(f *testing.F) {
	a := attachment{"pods", "c1", "eth0"}
	f.Add(aliasOf(a, []netip.Addr{netip.MustParseAddr("10.88.1.2"), netip.MustParseAddr("fd00::2")}))
	f.Add("tunnel-cni pods c1 eth0 ")
	f.Add("uplink to the factory floor")
	f.Fuzz(func(t *testing.T, text string) {
		a, addrs, ok := attachmentOf(text)
		if !ok {
			return
		}
		again, addrsAgain, ok := attachmentOf(aliasOf(a, addrs))
		if !ok || again != a || join(addrsAgain) != join(addrs) {
			t.Errorf("%q is read as %v %v, and that as %v %v", text, a, addrs, again, addrsAgain)
		}
	})
}
