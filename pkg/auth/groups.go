package auth

import (
	"net"
	"net/netip"
	"sync"
)

// Group returns what counts as one source when strangers are counted: an IPv4
// address, in either of its forms, or an IPv6 /64, which is what one machine gets.
// Everything that is not an IP address is one group.
func Group(a netip.Addr) netip.Prefix {
	a = a.Unmap()
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	p, err := a.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}

// GroupOf returns the group of the host in a, the remote address of a connection.
func GroupOf(a net.Addr) netip.Prefix {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	return Group(t.AddrPort().Addr())
}

// Groups counts what each group holds, connections for example, so that one source
// leaves room for the others.
type Groups struct {
	most int // per group; set once

	mu   sync.Mutex // guards the following
	held map[netip.Prefix]int
}

// NewGroups returns a counter that gives each group most at a time.
func NewGroups(most int) *Groups {
	return &Groups{most: most, held: make(map[netip.Prefix]int)}
}

// Admit counts one more for the group g, unless that is one too many. It counts until
// release is called; more calls do nothing.
func (s *Groups) Admit(g netip.Prefix) (release func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[g] >= s.most {
		return nil, false
	}
	s.held[g]++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.held[g]--; s.held[g] == 0 {
			delete(s.held, g)
		}
	}), true
}
