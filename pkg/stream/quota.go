package stream

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"tunnel.example/tunnel/pkg/tunnel"
)

// quota is what a node may send in a second, and what callers may ask of the node. It belongs to
// the node, not to the session: an edge that loses its session by a flood and joins again at once
// continues with the same quota. A nil quota has no limits. A session with another replica has a nil
// quota, because the replica that holds the node counts the opens.
type quota struct {
	all  *quotas         // set once
	node tunnel.NodeName // set once

	queue                     tunnel.Queue  // limits the opens of the node
	services                  tunnel.Queue  // of these opens, limits those that any pod can cause
	messages, streams, frames *bucket       // limit what the edge sends in a second; see ownMessages
	joins                     *rate.Limiter // limits the joins of the node while it has a session; see ownJoins
	unanswered                atomic.Int64  // calls of Reach that the cloud has not answered; see maxUnanswered

	sessions int       // live sessions of the node; guarded by quotas.mu
	left     time.Time // when the last session ended; guarded by quotas.mu
}

// quotas holds the quota of each node that has a session, or had one within the last two seconds
// (burst).
type quotas struct {
	limits   Limits           // set once
	counters *tunnel.Counters // set once

	mu sync.Mutex                 // guards the following
	of map[tunnel.NodeName]*quota // by node name
}

// take returns the quota of a node for one more session.
func (q *quotas) take(n tunnel.NodeName) *quota {
	q.mu.Lock()
	defer q.mu.Unlock()
	own := q.of[n]
	if own == nil {
		own = &quota{
			all: q, node: n,
			queue: tunnel.Queue{
				Name: "node " + string(n), Conns: q.limits.Conns, Dials: q.limits.Dials,
				Take: newBucket(q.limits.Opens).wait, Counters: q.counters,
			},
			joins:    rate.NewLimiter(ownJoins, burstJoins),
			messages: newBucket(ownMessages), streams: newBucket(ownStreams), frames: newBucket(ownFrames),
		}
		own.services = tunnel.Queue{
			Name: own.queue.Name + ", for Services,", Conns: (q.limits.Conns + 1) / 2, Counters: q.counters,
		}
		own.messages.most = openMessages * float64(q.limits.Conns)
		own.streams.most = openStreams * float64(q.limits.Conns)
		own.frames.most = openFrames * float64(q.limits.Conns)
		if q.of == nil {
			q.of = make(map[tunnel.NodeName]*quota)
		}
		q.of[n] = own
	}
	own.sessions++
	return own
}

// mayJoin counts a join of a node. It returns false if the node has joined too often. A node without sessions may join.
func (q *quotas) mayJoin(n tunnel.NodeName) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	own := q.of[n]
	return own == nil || own.joins.Allow()
}

// release undoes take. After the last session, the quota is forgotten once its buckets would be
// full again.
func (q *quota) release() {
	if q == nil {
		return
	}
	q.all.mu.Lock()
	defer q.all.mu.Unlock()
	if q.sessions--; q.sessions > 0 {
		return
	}
	q.left = time.Now()
	time.AfterFunc(burst, q.forget)
}

// forget removes q from the list of all quotas, if the node has had no session for the time burst. Two things must be
// over first: the calls of the node's last session, and the limit on its joins. Until then, forget tries again and
// again, after the time burst.
func (q *quota) forget() {
	q.all.mu.Lock()
	defer q.all.mu.Unlock()
	switch {
	case q.sessions > 0 || q.all.of[q.node] != q || time.Since(q.left) < burst:
	case q.unanswered.Load() > 0 || q.joins.Tokens() < burstJoins:
		time.AfterFunc(burst, q.forget)
	default:
		delete(q.all.of, q.node)
	}
}

// categoryServices is the category of opens for endpoints of Services, and of the conns that edges ask for (Reach). Any
// pod can cause such conns, and those with tunnel.Request.ByPods, and may leave them idle. So they get at most half of
// a node's conns, and other callers find room.
const categoryServices = "services"

// enter waits for room for an open, or for a Reach of the edge.
func (q *quota) enter(ctx context.Context, ended <-chan struct{}, r tunnel.Request) *tunnel.Refusal {
	if q == nil {
		return nil
	}
	if !claimOf(r).byPods {
		return q.queue.Enter(ctx, ended, r)
	}
	if refusal := q.services.Enter(ctx, ended, r); refusal != nil {
		return refusal
	}
	q.services.Dialled(r.Addr, true) // this queue has no limit of dials, so no answer is needed
	refusal := q.queue.Enter(ctx, ended, r)
	if refusal != nil {
		q.services.Over()
	}
	return refusal
}

// allowAnswer grants the edge the messages, streams and frames to answer an open that enter let in.
func (q *quota) allowAnswer() {
	if q != nil {
		q.messages.allow(openMessages)
		q.streams.allow(openStreams)
		q.frames.allow(openFrames)
	}
}

// allowReach allows the edge one more stream for a Reach that enter let in, and the frames of its conn. So the limit
// of streams counts only calls that the quota did not let in.
func (q *quota) allowReach() {
	q.streams.allow(1)
	q.frames.allow(openFrames)
}

// dialled ends the dial of an open that enter let in. answered: the target or the edge has answered.
func (q *quota) dialled(addr string, answered bool) {
	if q != nil {
		q.queue.Dialled(addr, answered)
	}
}

// over ends the conn of an open that enter let in, or the open itself if it failed. byPods is that of the open's claim.
func (q *quota) over(byPods bool) {
	if q == nil {
		return
	}
	q.queue.Over()
	if byPods {
		q.services.Over()
	}
}

// mayOpen counts a stream that the edge opens. It returns false if the edge has opened too many.
func (q *quota) mayOpen() bool { return q == nil || q.streams.take() }

// mayFrame counts an HTTP/2 frame without data. It returns false if the edge has sent too many.
func (q *quota) mayFrame() bool { return q == nil || q.frames.take() }
