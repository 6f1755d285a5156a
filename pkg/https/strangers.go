package https

import (
	"fmt"
	"net"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// admit gives a place to a connection whose caller has not authenticated yet. If there is none, it
// resets the connection and logs why.
func (f *FrontDoor) admit(raw net.Conn) (*listen.Stranger, bool) {
	place, full := f.strangers.Admit(raw, func() {
		f.cfg.Counters.Limited(tunnel.LimitStrangers)
		tunnel.Reset(raw)
	})
	if place != nil {
		return place, true
	}
	reached := tunnel.LimitStrangers
	if full.Source {
		reached = tunnel.LimitStrangersPerAddress
	}
	f.cfg.Counters.Limited(reached)
	f.warn(denyStrangers, "https connection denied", "frontend", raw.LocalAddr().String(),
		"err", raw.RemoteAddr().String()+": too many connections have not finished their TLS handshake: "+
			"limit "+reached.String())
	tunnel.Reset(raw)
	return nil, false
}

// denial is a kind of warning that a caller can cause as often as it likes.
type denial int

const (
	denySource denial = iota
	denyStrangers
	denySNI
	denyHandshake
	denyClientName
	denyClass
	denyProbe
	denyPods
	denyContested
	denySilent
	denyConnsPerAddress
	denyKinds // number of kinds
)

// warn logs a warning of kind k at most once a minute, and at level debug otherwise.
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
