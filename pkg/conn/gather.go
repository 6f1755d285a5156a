package conn

import (
	"sync/atomic"
	"time"
)

// Some sources, such as a followed log, write small pieces in a row without an answer between them. Each
// piece costs a packet, and twice its bytes. ReadFrom reads such a source with short pauses, in which
// several pieces gather in the socket.
const (
	// gatherTime is how long a pause is.
	gatherTime = 2 * time.Millisecond
	// gatherBelow is the number of bytes below which a piece is small. Two such pieces fit into a packet.
	gatherBelow = 700
	// gatherAfter is how many small reads in a row start the pauses. Request/response traffic never
	// reaches it: any reply resets the count.
	gatherAfter = 8
	// gatherVain is how many pauses in a row may gather nothing before ReadFrom stops pausing. Some sources
	// return only one piece from each read, even if more pieces wait.
	gatherVain = 4
)

// pace decides when ReadFrom pauses. ReadFrom owns it.
type pace struct {
	small int       // small reads in a row
	bytes int       // bytes of the first gatherAfter of these reads
	last  time.Time // when the last small read was
	vain  int       // pauses in a row that gathered nothing
}

// gathers notes a read of n bytes and reports whether to pause before the next one. heard says
// whether bytes have come in the other direction since the last call; gathers resets it.
func (p *pace) gathers(n int, heard *atomic.Bool) bool {
	if n == 0 || n >= gatherBelow || p.vain == gatherVain || heard.Swap(false) {
		if p.small > gatherAfter && p.vain < gatherVain {
			p.vain = 0 // after a pause came a large read, or the other side has answered
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
	if p.small > gatherAfter+1 { // a pause came before this read
		p.vain++
		if n*gatherAfter > p.bytes { // larger than the mean of the first gatherAfter reads: the pause has gathered
			p.vain = 0
		}
	}
	return p.vain < gatherVain
}
