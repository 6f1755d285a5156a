package tunnel

import (
	"sync/atomic"
	"time"
)

// Door identifies a front door in counts and metrics.
type Door uint8

// The front doors.
const (
	DoorHTTPS Door = iota
	DoorTCP
	DoorUDP
	DoorEgress
	DoorServices // conns for which edges ask
	numDoors     // the number of front doors
)

//nolint:gochecknoglobals // a constant table
var doorNames = [numDoors]string{
	DoorHTTPS: "https", DoorTCP: "tcp", DoorUDP: "udp", DoorEgress: "egress", DoorServices: "services",
}

// Doors lists every front door.
func Doors() []Door { return []Door{DoorHTTPS, DoorTCP, DoorUDP, DoorEgress, DoorServices} }

// String returns the name of the front door: the value of a metric's label.
func (d Door) String() string { return doorNames[d] }

// ResultInvalid is the result of a request that is wrong by itself, whatever the node: no [Code] fits it.
const ResultInvalid = "bad-request"

const numBounds = 8

// doorBounds are the upper bounds of the histogram buckets of DoorCounters: from the time of a dial to a node nearby to
// the timeout of a dial.
func doorBounds() [numBounds]time.Duration {
	return [...]time.Duration{
		2 * time.Millisecond, 5 * time.Millisecond, 25 * time.Millisecond, 100 * time.Millisecond,
		500 * time.Millisecond, 2500 * time.Millisecond, 10 * time.Second, 20 * time.Second,
	}
}

// DoorCounters counts what became of the callers of one front door. The zero value is ready to use. Any
// goroutine may call any method.
type DoorCounters struct {
	served  [numBounds + 1]atomic.Uint64  // served callers by bucket, not cumulative; the last bucket has no bound
	took    atomic.Int64                  // sum of the durations in nanoseconds
	results [len(codeNames)]atomic.Uint64 // refused callers, by Code; 0: ResultInvalid
}

// Served counts a caller that got its conn, or the first byte of its answer, after d.
func (c *DoorCounters) Served(d time.Duration) {
	at := 0
	for _, bound := range doorBounds() {
		if d <= bound {
			break
		}
		at++
	}
	c.served[at].Add(1)
	c.took.Add(int64(d))
}

// Failed counts a caller that was refused. Code 0 is [ResultInvalid]; an unknown code counts as Internal.
func (c *DoorCounters) Failed(code Code) {
	if int(code) >= len(c.results) || code != 0 && codeNames[code] == "" {
		code = Internal
	}
	c.results[code].Add(1)
}

// Ended counts a dial that took d and ended with err.
func (c *DoorCounters) Ended(d time.Duration, err error) {
	if err != nil {
		c.Failed(CodeOf(err))
		return
	}
	c.Served(d)
}

// Results returns how many callers were refused with a code; code 0: with [ResultInvalid].
func (c *DoorCounters) Results(code Code) uint64 { return c.results[code].Load() }

// Durations returns the histogram of served callers as Prometheus has it: the number in all, the sum in
// seconds, and the cumulative number for each upper bound in seconds.
func (c *DoorCounters) Durations() (count uint64, sum float64, buckets map[float64]uint64) {
	bounds := doorBounds()
	buckets = make(map[float64]uint64, len(bounds))
	for i := range c.served {
		count += c.served[i].Load()
		if i < len(bounds) {
			buckets[bounds[i].Seconds()] = count
		}
	}
	return count, time.Duration(c.took.Load()).Seconds(), buckets
}
