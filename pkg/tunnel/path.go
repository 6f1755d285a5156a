package tunnel

import "net/netip"

// Path is a way through the network that a session's own connection uses. A connection with Multipath TCP
// may have several.
type Path struct{ Local, Remote netip.AddrPort }

// CountPaths returns how many of the sessions have Multipath TCP, and how many paths these sessions have in all.
func CountPaths(all []*Session) (sessions, paths int) {
	for _, s := range all {
		if s.Paths == nil {
			continue
		}
		if of := s.Paths(); of != nil {
			sessions, paths = sessions+1, paths+len(of)
		}
	}
	return sessions, paths
}

// String returns both addresses.
func (p Path) String() string { return p.Local.String() + " to " + p.Remote.String() }
