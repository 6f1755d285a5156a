package conn

import (
	"sync/atomic"
	"time"
)

// What is written in small pieces, one after the other and with no answer between them, as a
// log is that somebody follows, costs a packet each and twice its bytes. So it is read with
// short pauses, in which it gathers in the socket.
const (
	gatherTime = 2 * time.Millisecond
	// gatherBelow is what a small piece is, in bytes: two of them still fit into a packet.
	gatherBelow = 700
	// gatherAfter is how many must have come so. Who asks and waits for an answer gets there
	// never.
	gatherAfter = 8
	// gatherVain is how many pauses in a row may have gathered nothing: some sources give
	// piece by piece whatever waits behind.
	gatherVain = 4
)

// pace says when to pause.
type pace struct {
	small int       // pieces, one after the other
	bytes int       // of the first gatherAfter of them
	last  time.Time // when one was read
	vain  int       // pauses in a row in which nothing has gathered
}

// gathers takes that n bytes were read. heard says whether any have come the other way since
// it was last called, and is reset.
func (p *pace) gathers(n int, heard *atomic.Bool) bool {
	if n == 0 || n >= gatherBelow || p.vain == gatherVain || heard.Swap(false) {
		if p.small > gatherAfter && p.vain < gatherVain {
			p.vain = 0 // it has gathered more than a little, or is answered
		}
		p.small, p.bytes = 0, 0
		return false
	}
	now := time.Now()
	if now.Sub(p.last) > 2*gatherTime {
		p.small, p.bytes = 0, 0
	}
	p.small, p.last = p.small+1, now
	if p.small <= gatherAfter {
		p.bytes += n
		return false
	}
	if p.small > gatherAfter+1 { // there was a pause
		p.vain++
		if n*gatherAfter > p.bytes { // more than those on average
			p.vain = 0
		}
	}
	return p.vain < gatherVain
}
