package https

import (
	"fmt"
	"net/netip"
	"sync"

	"tunnel/pkg/auth"
	"tunnel/pkg/tunnel"
)

// strangers counts the connections of callers that we do not know yet.
type strangers struct {
	most, mostPerSource int // set once

	mu     sync.Mutex
	all    int
	source map[netip.Prefix]int // only sources that have some
}

// admit counts one more connection from a, unless that is one too many. The
// connection is counted until release is called; more calls do nothing. Else reached says
// which limit it was.
func (s *strangers) admit(a netip.Addr) (release func(), reached tunnel.Limit, ok bool) {
	key := auth.Group(a)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.all >= s.most:
		return nil, tunnel.LimitStrangers, false
	case s.source[key] >= s.mostPerSource:
		return nil, tunnel.LimitStrangersPerAddress, false
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
	}), 0, true
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
	denyClass
	denyProbe
	denyPods
	denyContested
	denyPassed
	denyKinds // how many there are
)

// warn writes a warning of kind k at most once a minute, and at level debug always.
func (f *FrontDoor) warn(k denial, msg string, args ...any) {
	args = append([]any{"module", Name}, args...)
	skipped, ok := f.denials[k].Allow()
	switch {
	case !ok:
		f.log.Debug(msg, args...)
	case skipped > 0:
		f.log.Warn(fmt.Sprintf("%s (and %d more since the last such line)", msg, skipped), args...)
	default:
		f.log.Warn(msg, args...)
	}
}
