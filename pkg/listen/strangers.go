package listen

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// FirstByte is how long a new connection may stay silent. A peer normally sends its first byte as soon as TCP's
	// handshake is done. A packet that is lost twice delays the byte by three seconds, a satellite link by 0.6 s.
	// When all places are taken, a newcomer need not wait that long: see evictAfter.
	FirstByte = 4 * time.Second
	// evictAfter is how long a connection must have been silent before a newcomer may take its
	// place.
	evictAfter = time.Second
	// maxKnown is how many known sources each of the two generations holds (see Strangers.recent).
	maxKnown = 8192
)

// Full says why a newcomer got no place.
type Full struct {
	// Source is true if the newcomer's own source holds as many places as it may. It is false if
	// all places are taken.
	Source bool
}

// Strangers counts the connections of peers that have not authenticated yet, and decides which of
// them get a place. A source is an IPv4 address or an IPv6 /64. One source may hold maxPerSource
// places, an IPv6 /56 twice as many, an IPv6 /48 four times as many.
//
// When all places are taken, a newcomer evicts a connection that has been silent for a second. If no
// connection has, it evicts a connection of the source that holds the most places. A source becomes
// known when one of its peers authenticates. Known sources may use a quarter more places, and an
// unknown newcomer never evicts a connection of a known source.
type Strangers struct {
	maxTotal, maxPerSource int // places in all, places of one source; set once

	mu      sync.Mutex // guards the following
	all     list.List  // of *Stranger, ordered by Stranger.since, the oldest first
	unknown int        // how many of all came from unknown sources
	// Places that each range holds now; ranges that hold none have no entry.
	taken map[netip.Prefix]*count
	// Known sources, in two generations. When recent is full, it replaces older, and a new recent
	// begins.
	recent, older map[netip.Prefix]struct{}
}

// count is how many places a range of addresses holds. All connections from the range share one count.
type count struct{ n int }

// NewStrangers returns a counter with total places, perSource of them for one source.
func NewStrangers(total, perSource int) *Strangers {
	return &Strangers{
		maxTotal: total, maxPerSource: perSource,
		taken: make(map[netip.Prefix]*count), recent: make(map[netip.Prefix]struct{}),
	}
}

// Stranger is one connection that has a place.
type Stranger struct {
	// Set once.
	strangers *Strangers
	scopes    []scope
	conn      net.Conn
	known     bool   // its source was known when the connection came
	evict     func() // closes the connection

	// Guarded by strangers.mu.
	place *list.Element // element of strangers.all; nil after Release or eviction
	// The peer has sent nothing yet, or waits between two requests. See Spoke and Silent.
	silent bool
	since  time.Time // when silent last changed
}

// scope is a range of addresses with a common limit.
type scope struct {
	prefix netip.Prefix
	max    int    // how many places the range may hold
	taken  *count // how many places the range holds now; set by admit
}

// scopes returns the ranges that contain a, from narrow to wide. All peers without an IP address
// form one source.
func (s *Strangers) scopes(a netip.Addr) []scope {
	a = a.Unmap().WithZone("")
	if !a.Is6() {
		p, _ := a.Prefix(a.BitLen()) // the zero address gives the zero prefix
		return []scope{{prefix: p, max: s.maxPerSource}}
	}
	scopes := make([]scope, 0, 3)
	for i, bits := range []int{64, 56, 48} {
		p, _ := a.Prefix(bits)
		scopes = append(scopes, scope{prefix: p, max: s.maxPerSource << i})
	}
	return scopes
}

// AddrOf returns the IP address of a, the remote address of a connection. If a has none, it returns
// the zero address.
func AddrOf(a net.Addr) netip.Addr {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
}

// Admit gives the connection c a place, or says why there is none. The connection counts as silent
// until the caller calls Spoke. It keeps its place until the caller calls Release, or Met when the
// peer has authenticated. If a newcomer takes the place before that, the goroutine that admits the
// newcomer calls evict.
func (s *Strangers) Admit(c net.Conn, evict func()) (*Stranger, Full) {
	st := &Stranger{
		strangers: s, scopes: s.scopes(AddrOf(c.RemoteAddr())), conn: c, evict: evict,
		silent: true, since: time.Now(),
	}
	victim, full, ok := s.admit(st)
	if victim != nil {
		victim.evict()
	}
	if !ok {
		return nil, full
	}
	return st, Full{}
}

// admit gives st a place. It returns the connection that lost its place to st, if any. There is at
// most one victim: evicting it frees a place in every wider range, too.
func (s *Strangers) admit(st *Stranger) (victim *Stranger, full Full, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st.known = s.knownLocked(st.scopes[0].prefix)
	for i := range st.scopes {
		sc := &st.scopes[i]
		if sc.taken = s.taken[sc.prefix]; sc.taken == nil {
			sc.taken = new(count)
		}
		if sc.taken.n >= sc.max {
			if victim = s.victimLocked(func() *Stranger { return s.silentLocked(st, sc.taken) }); victim == nil {
				return nil, Full{Source: true}, false
			}
			s.removeLocked(victim)
		}
	}
	if s.fullLocked(st) {
		if victim = s.victimLocked(func() *Stranger { return s.silentLocked(st, nil) }); victim == nil {
			victim = s.victimLocked(func() *Stranger { return s.largestLocked(st) })
		}
		if victim == nil {
			return nil, Full{}, false
		}
		s.removeLocked(victim)
	}
	for i := range st.scopes {
		sc := &st.scopes[i]
		s.taken[sc.prefix] = sc.taken // set again: removing the victim may have deleted the count of this range
		sc.taken.n++
	}
	if !st.known {
		s.unknown++
	}
	st.place = s.all.PushBack(st)
	return victim, Full{}, true
}

// widest returns the count of the widest range that contains st. largestLocked compares ranges of this size.
func (st *Stranger) widest() *count { return st.scopes[len(st.scopes)-1].taken }

// fullLocked reports whether there is no free place for st. The caller holds mu.
func (s *Strangers) fullLocked(st *Stranger) bool {
	if st.known {
		return s.all.Len() >= s.maxTotal+s.maxTotal/4
	}
	return s.unknown >= s.maxTotal
}

// victimLocked returns the connection that find chooses. If that connection counts as silent but
// has bytes waiting in the kernel, victimLocked marks it as not silent, and find chooses again.
// victimLocked marks each connection at most once. The caller holds mu.
func (s *Strangers) victimLocked(find func() *Stranger) *Stranger {
	for {
		victim := find()
		if victim == nil || !victim.silent || !Unread(victim.conn) {
			return victim
		}
		s.setSilentLocked(victim, false)
	}
}

// silentLocked returns the connection that has been silent longest, if st may evict it and the
// silence has lasted for evictAfter. It considers only connections that count against within; nil
// means all. The caller holds mu.
func (s *Strangers) silentLocked(st *Stranger, within *count) *Stranger {
	for e := s.all.Front(); e != nil; e = e.Next() {
		other := e.Value.(*Stranger)
		if st.since.Sub(other.since) < evictAfter {
			return nil // all further connections have a later since
		}
		if other.silent && other.evictableBy(st) && (within == nil || other.countsAgainst(within)) {
			return other
		}
	}
	return nil
}

// largestLocked returns a connection that st may evict, of the source that holds the most places. It
// prefers the oldest silent connection of that source, and else takes the oldest connection. All IPv6
// sources of a /48 count as one. largestLocked returns nil if st's own source would then hold at least
// as many places as that source. The caller holds mu.
func (s *Strangers) largestLocked(st *Stranger) (victim *Stranger) {
	maxHeld := st.widest().n + 1
	for e := s.all.Front(); e != nil; e = e.Next() {
		other := e.Value.(*Stranger)
		n := other.widest().n
		if other.evictableBy(st) && (n > maxHeld || victim != nil && n == maxHeld && other.silent && !victim.silent) {
			victim, maxHeld = other, n
		}
	}
	return victim
}

// evictableBy reports whether newcomer may take st's place.
func (st *Stranger) evictableBy(newcomer *Stranger) bool { return newcomer.known || !st.known }

// countsAgainst reports whether c counts st.
func (st *Stranger) countsAgainst(c *count) bool {
	for _, sc := range st.scopes {
		if sc.taken == c {
			return true
		}
	}
	return false
}

// removeLocked takes st's place away. The caller holds mu.
func (s *Strangers) removeLocked(st *Stranger) {
	s.all.Remove(st.place)
	st.place = nil
	if !st.known {
		s.unknown--
	}
	for _, sc := range st.scopes {
		if sc.taken.n--; sc.taken.n == 0 {
			delete(s.taken, sc.prefix)
		}
	}
}

// Spoke says that the peer has sent something: it is no longer silent.
func (st *Stranger) Spoke() { st.setSilent(false) }

// Silent says that the peer has received its response and keeps the connection open for another
// request.
func (st *Stranger) Silent() { st.setSilent(true) }

func (st *Stranger) setSilent(silent bool) {
	st.strangers.mu.Lock()
	defer st.strangers.mu.Unlock()
	st.strangers.setSilentLocked(st, silent)
}

// setSilentLocked marks st as silent or as not silent. The caller holds mu.
func (s *Strangers) setSilentLocked(st *Stranger, silent bool) {
	if st.place != nil && st.silent != silent {
		st.silent, st.since = silent, time.Now()
		s.all.MoveToBack(st.place)
	}
}

// Met gives the place back because the peer has authenticated. The source of the connection is a
// known source from now on.
func (st *Stranger) Met() {
	st.strangers.remember(st.scopes[0].prefix)
	st.Release()
}

// Release gives the place back. Further calls do nothing.
func (st *Stranger) Release() {
	s := st.strangers
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.place != nil {
		s.removeLocked(st)
	}
}

// EvictAll closes all connections that have a place.
func (s *Strangers) EvictAll() {
	var all []*Stranger
	s.mu.Lock()
	for e := s.all.Front(); e != nil; e = e.Next() {
		all = append(all, e.Value.(*Stranger))
	}
	for _, st := range all {
		s.removeLocked(st)
	}
	s.mu.Unlock()
	for _, st := range all {
		st.evict()
	}
}

// Know notes that the source to which the address a belongs is known.
func (s *Strangers) Know(a netip.Addr) { s.remember(s.scopes(a)[0].prefix) }

// Knows reports whether the source to which the address a belongs is known.
func (s *Strangers) Knows(a netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.knownLocked(s.scopes(a)[0].prefix)
}

func (s *Strangers) remember(source netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.recent[source]; ok {
		return
	}
	if len(s.recent) >= maxKnown {
		s.older, s.recent = s.recent, make(map[netip.Prefix]struct{})
	}
	s.recent[source] = struct{}{}
}

// knownLocked reports whether source is known. The caller holds mu.
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
