package https

import (
	"fmt"
	"net/netip"
	"sync"
	"time"
)

const (
	// maxStrangers bounds connections that have not finished their handshake. Each
	// costs a descriptor, a goroutine and up to maxHello bytes.
	maxStrangers = 1024
	// maxStrangersPerSource leaves room for others beside one address. It is not
	// smaller because behind a balancer everybody comes from its address.
	maxStrangersPerSource = 256
)

// strangers counts the connections of callers that we do not know yet. The zero
// value is ready.
type strangers struct {
	mu     sync.Mutex
	all    int
	source map[netip.Prefix]int // only sources that have some
}

// admit counts one more connection from a, unless that is one too many. The
// connection is counted until release is called; more calls do nothing.
func (s *strangers) admit(a netip.Addr) (release func(), ok bool) {
	key := groupOf(a)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all >= maxStrangers || s.source[key] >= maxStrangersPerSource {
		return nil, false
	}
	if s.source == nil {
		s.source = make(map[netip.Prefix]int)
	}
	s.all++
	s.source[key]++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.all--
		if s.source[key]--; s.source[key] == 0 {
			delete(s.source, key)
		}
	}), true
}

// groupOf returns what counts as one source: an IPv4 address, or an IPv6 /64, which
// is what one machine gets.
func groupOf(a netip.Addr) netip.Prefix {
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	p, err := a.Prefix(bits)
	if err != nil {
		return netip.Prefix{} // not an IP address: all of those are one source
	}
	return p
}

// denial is a kind of warning that a stranger can cause as often as he likes.
type denial int

const (
	denyAccept denial = iota
	denySource
	denyStrangers
	denySNI
	denyHandshake
	denyClientName
	denyProbe
	denyPassed
	denyKinds // how many there are
)

// warnEvery is the least time between two warnings of one kind.
const warnEvery = time.Minute

// denials remembers when each kind of warning was last written. The zero value is
// ready.
type denials struct {
	mu   sync.Mutex
	kind [denyKinds]struct {
		last       time.Time
		suppressed int
	}
}

// due reports whether a warning may be written now, and how many were left out
// since the last one.
func (d *denials) due(k denial, now time.Time) (suppressed int, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := &d.kind[k]
	if !e.last.IsZero() && now.Sub(e.last) < warnEvery {
		e.suppressed++
		return 0, false
	}
	suppressed = e.suppressed
	e.last, e.suppressed = now, 0
	return suppressed, true
}

// warn writes a warning of kind k at most once a minute, and at level debug always.
func (f *FrontDoor) warn(k denial, msg string, args ...any) {
	args = append([]any{"module", Name}, args...)
	suppressed, ok := f.denials.due(k, time.Now())
	switch {
	case !ok:
		f.log.Debug(msg, args...)
	case suppressed > 0:
		f.log.Warn(fmt.Sprintf("%s (and %d more since the last such line)", msg, suppressed), args...)
	default:
		f.log.Warn(msg, args...)
	}
}
