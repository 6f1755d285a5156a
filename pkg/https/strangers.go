package https

import (
	"net"

	"tunnel.example/tunnel/pkg/balancer"
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
	denySource denial = iota + 1
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
	denyFailure                      // the first of the kinds of failureOf
	denyKinds   = denyFailure + 1<<4 // number of kinds
)

// failureOf returns the kind of the warning about a request or a connection that failed with this code.
func failureOf(code tunnel.Code) denial { return denyFailure + denial(code)%(denyKinds-denyFailure) }

// failureBurst is how many warnings a minute are logged for failures with one code. With one a minute, the failures
// of one node would hide those of all other nodes.
const failureBurst = 10

// warn logs a message as a warning. Beyond the limit of kind k, it logs at level debug: the limit is one warning a
// minute, or failureBurst. warned reports whether it was a warning. skipped is how many messages of this kind were not
// warnings since the last warning.
func (f *FrontDoor) warn(k denial, msg string, args ...any) (skipped int, warned bool) {
	args = append([]any{"module", Name}, args...)
	skipped, warned = f.denials[k].Allow()
	if !warned {
		f.log.Debug(msg, args...)
		return 0, false
	}
	f.log.Warn(msg, append(args, "skipped", skipped)...)
	return skipped, true
}

// deny refuses a connection from outside allowfrom.
func (f *FrontDoor) deny(raw net.Conn, target string) {
	defer tunnel.Reset(raw)
	if balancer.IsCheck(raw) { // a balancer's check only wants to connect
		return
	}
	f.cfg.Counters.Doors[tunnel.DoorHTTPS].Failed(tunnel.Denied)
	door, remote := raw.LocalAddr().String(), raw.RemoteAddr().String()
	why := remote + " is not in allowfrom of [mode.cloud.https]"
	if skipped, warned := f.warn(denySource, "https connection denied", "frontend", door, "err", why); warned {
		f.cfg.Sink.Deny(tunnel.Event{
			Kind: tunnel.EventHTTPS, Result: tunnel.Denied.String(), Caller: remote, Remote: remote, Door: door,
			Target: target, Err: why, Skipped: skipped,
		})
	}
}
