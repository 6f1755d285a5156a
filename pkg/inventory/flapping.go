package inventory

import "time"

// A node is flapping if flapSessions sessions with this replica began within flapTime. In a rolling update, a node
// opens at most two sessions with each replica.
const (
	flapSessions = 4
	flapTime     = 10 * time.Minute
)

// noteBegan notes that a session has begun. The caller holds the inventory's mu.
func (r *Record) noteBegan(now time.Time) {
	copy(r.began[1:], r.began[:])
	r.began[0] = now.Unix()
}

// flaps reports whether the node is flapping.
func (r *Record) flaps(now time.Time) bool {
	oldest := r.began[flapSessions-1]
	return oldest > 0 && now.Unix()-oldest < int64(flapTime/time.Second)
}
