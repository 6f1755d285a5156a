package listen

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// FirstByte is how long a new connection may stay silent. A caller sends its first byte
	// when TCP's handshake is done; a lost packet costs one second, a satellite 0.6 s.
	FirstByte = 2 * time.Second
	// evictAfter is how long a connection stays silent before a newcomer may take its place.
	evictAfter = time.Second
	// remembered bounds the sources that are known, in each of two generations.
	remembered = 8192
)

// Full says why a newcomer got no place.
type Full struct {
	// Source says that the newcomer's own source holds as many places as it may. Otherwise all
	// places are taken.
	Source bool
}

// Strangers counts the connections of peers that have not proven who they are, and decides
// who gets a place. A source is an IPv4 address or an IPv6 /64. One source has perSource
// places, an IPv6 /56 twice as many, a /48 four times as many.
//
// When all places are taken, a newcomer takes one from a connection that has been silent
// for a second, or else from the source that holds most. Sources of which one has proven
// itself before are known: for them there is a quarter more places, and a newcomer that is
// not known takes none from them.
type Strangers struct {
	most, perSource int // set once

	mu            sync.Mutex // guards the following
	all           list.List  // of *Stranger, by since
	unknown       int        // how many of them are not known
	held          map[netip.Prefix]*count
	recent, older map[netip.Prefix]struct{} // known sources
}

// count is how many places the addresses below a prefix hold.
type count struct{ n int }

// NewStrangers returns a counter with most places, perSource of them for one source.
func NewStrangers(most, perSource int) *Strangers {
	return &Strangers{
		most: most, perSource: perSource,
		held: make(map[netip.Prefix]*count), recent: make(map[netip.Prefix]struct{}),
	}
}

// Stranger is one connection that has a place.
type Stranger struct {
	of     *Strangers
	scopes []scope
	conn   net.Conn
	known  bool   // set once
	evict  func() // closes the connection

	// Guarded by of.mu.
	place  *list.Element // nil: it has none any more
	silent bool
	since  time.Time // it was admitted, or was last silent or not
}

// scope is a range of addresses that is bounded together.
type scope struct {
	prefix netip.Prefix
	most   int
	held   *count
}

// scopes returns what a counts against, from narrow to wide. Everything that is not an IP
// address is one source.
func (s *Strangers) scopes(a netip.Addr) []scope {
	a = a.Unmap().WithZone("")
	if !a.Is6() {
		p, _ := a.Prefix(a.BitLen()) // the zero address has the zero prefix
		return []scope{{prefix: p, most: s.perSource}}
	}
	scopes := make([]scope, 0, 3)
	for i, bits := range []int{64, 56, 48} {
		p, _ := a.Prefix(bits)
		scopes = append(scopes, scope{prefix: p, most: s.perSource << i})
	}
	return scopes
}

// AddrOf returns the IP address of a, the remote address of a connection; the zero address
// if it has none.
func AddrOf(a net.Addr) netip.Addr {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
}

// Admit gives the connection c a place, silent as it is, or says why there is none. The
// connection keeps it until Release or Met. If a newcomer takes it before, evict is called,
// by the goroutine that admits the newcomer.
func (s *Strangers) Admit(c net.Conn, evict func()) (*Stranger, Full) {
	st := &Stranger{of: s, scopes: s.scopes(AddrOf(c.RemoteAddr())), conn: c, evict: evict, silent: true, since: time.Now()}
	loser, full, ok := s.admit(st)
	if loser != nil {
		loser.evict()
	}
	if !ok {
		return nil, full
	}
	return st, Full{}
}

// admit gives st a place. It returns the connection that has lost its own to st, if any;
// there is one at most, since it frees a place in every wider range, too.
func (s *Strangers) admit(st *Stranger) (loser *Stranger, full Full, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st.known = s.knownLocked(st.scopes[0].prefix)
	for i := range st.scopes {
		sc := &st.scopes[i]
		if sc.held = s.held[sc.prefix]; sc.held == nil {
			sc.held = new(count)
		}
		if sc.held.n >= sc.most {
			if loser = s.loserLocked(func() *Stranger { return s.silentLocked(st, sc.held) }); loser == nil {
				return nil, Full{Source: true}, false
			}
			s.removeLocked(loser)
		}
	}
	if s.fullLocked(st) {
		if loser = s.loserLocked(func() *Stranger { return s.silentLocked(st, nil) }); loser == nil {
			loser = s.loserLocked(func() *Stranger { return s.largestLocked(st) })
		}
		if loser == nil {
			return nil, Full{}, false
		}
		s.removeLocked(loser)
	}
	for i := range st.scopes {
		sc := &st.scopes[i]
		s.held[sc.prefix] = sc.held // again, if the loser was the last one of it
		sc.held.n++
	}
	if !st.known {
		s.unknown++
	}
	st.place = s.all.PushBack(st)
	return loser, Full{}, true
}

// wide is the widest range that st counts against. Between ranges places are shared evenly.
func (st *Stranger) wide() *count { return st.scopes[len(st.scopes)-1].held }

// fullLocked reports whether there is no place for st. The caller holds mu.
func (s *Strangers) fullLocked(st *Stranger) bool {
	if st.known {
		return s.all.Len() >= s.most+s.most/4
	}
	return s.unknown >= s.most
}

// loserLocked returns the connection that find chooses. A silent one whose bytes wait to be read
// is silent no more, and find chooses again: at most once for each connection. The caller holds mu.
func (s *Strangers) loserLocked(find func() *Stranger) *Stranger {
	for {
		loser := find()
		if loser == nil || !loser.silent || !Unread(loser.conn) {
			return loser
		}
		s.setSilentLocked(loser, false)
	}
}

// silentLocked returns the connection that has been silent longest and may lose its place
// to st, if there is one; of those that count against within, nil for all. The caller
// holds mu.
func (s *Strangers) silentLocked(st *Stranger, within *count) *Stranger {
	for e := s.all.Front(); e != nil; e = e.Next() {
		other := e.Value.(*Stranger)
		if st.since.Sub(other.since) < evictAfter {
			return nil // the rest is younger
		}
		if other.silent && other.mayLose(st) && (within == nil || other.counts(within)) {
			return other
		}
	}
	return nil
}

// largestLocked returns the connection of the source that holds most which may lose its
// place to st: the oldest one that is silent, or else the oldest. st's own source must
// hold less even with the place. The caller holds mu.
func (s *Strangers) largestLocked(st *Stranger) (loser *Stranger) {
	most := st.wide().n + 1
	for e := s.all.Front(); e != nil; e = e.Next() {
		other := e.Value.(*Stranger)
		n := other.wide().n
		if other.mayLose(st) && (n > most || loser != nil && n == most && other.silent && !loser.silent) {
			loser, most = other, n
		}
	}
	return loser
}

func (st *Stranger) mayLose(newcomer *Stranger) bool { return newcomer.known || !st.known }

func (st *Stranger) counts(against *count) bool {
	for _, sc := range st.scopes {
		if sc.held == against {
			return true
		}
	}
	return false
}

// removeLocked takes st's place. The caller holds mu.
func (s *Strangers) removeLocked(st *Stranger) {
	s.all.Remove(st.place)
	st.place = nil
	if !st.known {
		s.unknown--
	}
	for _, sc := range st.scopes {
		if sc.held.n--; sc.held.n == 0 {
			delete(s.held, sc.prefix)
		}
	}
}

// Spoke says that the peer has sent something: it is not silent any more.
func (st *Stranger) Spoke() { st.setSilent(false) }

// Silent says that the peer has had its answer, and keeps the connection for another
// request.
func (st *Stranger) Silent() { st.setSilent(true) }

func (st *Stranger) setSilent(silent bool) {
	st.of.mu.Lock()
	defer st.of.mu.Unlock()
	st.of.setSilentLocked(st, silent)
}

// setSilentLocked notes that st is silent, or is not. The caller holds mu.
func (s *Strangers) setSilentLocked(st *Stranger, silent bool) {
	if st.place != nil && st.silent != silent {
		st.silent, st.since = silent, time.Now()
		s.all.MoveToBack(st.place)
	}
}

// Met gives the place back because the peer has proven who it is. Its source is known from
// now on.
func (st *Stranger) Met() {
	st.of.remember(st.scopes[0].prefix)
	st.Release()
}

// Release gives the place back. More calls do nothing.
func (st *Stranger) Release() {
	s := st.of
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.place != nil {
		s.removeLocked(st)
	}
}

// Know makes the source of a known.
func (s *Strangers) Know(a netip.Addr) { s.remember(s.scopes(a)[0].prefix) }

func (s *Strangers) remember(source netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.recent[source]; ok {
		return
	}
	if len(s.recent) >= remembered {
		s.older, s.recent = s.recent, make(map[netip.Prefix]struct{})
	}
	s.recent[source] = struct{}{}
}

func (s *Strangers) knownLocked(source netip.Prefix) bool {
	_, recently := s.recent[source]
	_, before := s.older[source]
	return recently || before
}

// Len returns how many places are taken.
func (s *Strangers) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all.Len()
}
