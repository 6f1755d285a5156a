package tunnel

import "sync/atomic"

// Counters counts events since the process started, and holds two gauges. The zero
// value is ready to use. Any goroutine may change any field. pkg/admin shows them as
// metrics.
type Counters struct {
	Sessions          atomic.Uint64 // sessions established
	Replaced          atomic.Uint64 // sessions that a newer session of the same node ended
	JoinsRefused      atomic.Uint64 // control streams refused before they became sessions
	ConnsOpened       atomic.Uint64 // conns opened
	ConnsOverData     atomic.Uint64 // conns opened over a data connection; ConnsOpened counts them, too
	DataOpened        atomic.Uint64 // data connections opened
	DataLive          atomic.Int64  // gauge: data connections that are open now
	Switched          atomic.Uint64 // connections between edge and cloud that were switched to another congestion control
	Waiting           atomic.Int64  // gauge: open requests that wait now, because a limit is reached
	Resets            atomic.Uint64 // conns that ended by a reset
	BytesSent         atomic.Uint64 // payload bytes sent to the other side
	BytesReceived     atomic.Uint64 // payload bytes received from the other side
	UnknownMessages   atomic.Uint64 // messages without a handler
	ContestedPods     atomic.Uint64 // searches for a pod that two nodes claim
	HeadersUnexpected atomic.Uint64 // connections that began with a PROXY header that was not due
	HeadersMissing    atomic.Uint64 // connections of balancers that began with no PROXY header, or a wrong one
	Panics            atomic.Uint64 // panics that ended one session, connection or request

	Doors [numDoors]DoorCounters // callers of the front doors, by Door

	refusals [len(codeNames)]atomic.Uint64 // by Code
	limited  [numLimits]atomic.Uint64      // by Limit
}

// Refuse counts a refusal. It counts an unknown code as Internal.
func (c *Counters) Refuse(code Code) {
	if int(code) >= len(c.refusals) || codeNames[code] == "" {
		code = Internal
	}
	c.refusals[code].Add(1)
}

// Refusals returns how many conns were refused with code.
func (c *Counters) Refusals(code Code) uint64 {
	if int(code) >= len(c.refusals) {
		return 0
	}
	return c.refusals[code].Load()
}
