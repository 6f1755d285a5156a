package stream

import (
	"context"
	"sync"
	"time"

	"tunnel/pkg/tunnel"
)

// quota is what a node may do in a second, and callers may ask of it. It is the node's
// and not its session's: an edge that has lost its session by a flood, and is back at
// once, goes on where it was.
type quota struct {
	queue                     tunnel.Queue // of opens
	messages, streams, frames *bucket

	sessions int // that count against it; guarded by quotas.mu
}

// quotas are those of the nodes that have a session, or had one a moment ago.
type quotas struct {
	limits   Limits           // set once
	counters *tunnel.Counters // set once

	mu sync.Mutex // guards the following
	of map[tunnel.NodeName]*quota
}

// take returns the quota of a node for one more session.
func (q *quotas) take(n tunnel.NodeName) *quota {
	q.mu.Lock()
	defer q.mu.Unlock()
	own := q.of[n]
	if own == nil {
		own = &quota{
			queue: tunnel.Queue{
				Name: "node " + string(n), Conns: q.limits.Conns, Dials: q.limits.Dials,
				Take: newBucket(q.limits.Opens).wait, Counters: q.counters,
			},
			messages: newBucket(ownMessages), streams: newBucket(ownStreams), frames: newBucket(ownFrames),
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

// release undoes take. The quota is forgotten when it would be full again.
func (q *quotas) release(n tunnel.NodeName) {
	q.mu.Lock()
	defer q.mu.Unlock()
	own := q.of[n]
	if own.sessions--; own.sessions > 0 {
		return
	}
	time.AfterFunc(burst, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if own.sessions == 0 && q.of[n] == own {
			delete(q.of, n)
		}
	})
}

// enter waits for room for an open, and allows the edge to answer it.
func (q *quota) enter(ctx context.Context, ended <-chan struct{}, r tunnel.Request) *tunnel.Refusal {
	if refusal := q.queue.Enter(ctx, ended, r); refusal != nil {
		return refusal
	}
	q.messages.allow(openMessages)
	q.streams.allow(openStreams)
	q.frames.allow(openFrames)
	return nil
}
