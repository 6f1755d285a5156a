package tunnel

import "sync/atomic"

// Counters counts what happened since the process started. Its zero value is ready,
// and every field may be added to from any goroutine. pkg/admin shows them.
type Counters struct {
	Sessions        atomic.Uint64 // sessions established
	Replaced        atomic.Uint64 // sessions that a newer one of the same node ended
	JoinsRefused    atomic.Uint64 // control streams refused before they became sessions
	Conns           atomic.Uint64 // conns opened
	DataConns       atomic.Uint64 // of them, those that went by a data connection
	Connections     atomic.Uint64 // data connections opened
	DataConnections atomic.Int64  // data connections that there are
	Waiting         atomic.Int64  // opens that wait for a limit
	Resets          atomic.Uint64 // conns that ended by a reset
	BytesSent       atomic.Uint64 // payload bytes handed to the other side
	BytesReceived   atomic.Uint64 // payload bytes that came from the other side
	UnknownMessages atomic.Uint64 // messages without a handler
	ContestedPods   atomic.Uint64 // searches for a pod that two nodes claim
	Panics          atomic.Uint64 // panics that ended one session, connection or request

	refusals [len(codeNames)]atomic.Uint64
	limited  [limits]atomic.Uint64
}

// Refuse counts a refusal.
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
