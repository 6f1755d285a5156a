package udp

import (
	"errors"
	"sync"
	"syscall"
)

const (
	// maxTrain and maxTrainBytes limit what one system call sends. Every kernel with UDP_SEGMENT accepts
	// 64 datagrams, but the receiver needs room for all of them at once.
	maxTrain      = 32
	maxTrainBytes = 60_000
)

// train collects datagrams of one size to one place, so that one system call sends them all. The last
// datagram may be shorter. The other side receives single datagrams. One goroutine owns a train.
type train[Place comparable] struct {
	// send sends p to a place, in datagrams of segment bytes; 0: p is one datagram. Set once.
	send func(to Place, p []byte, segment int) error
	// sent is called with the outcome of sending n datagrams, which have bytes bytes in all. Set once.
	sent func(to Place, n, bytes int, err error)

	limit   int    // datagrams longer than limit are sent one by one
	to      Place  // the place of the datagrams that wait
	n       int    // how many datagrams wait
	segment int    // the size of each datagram that waits, except the last
	buf     []byte // the bytes of the datagrams that wait
}

// newTrain returns a train. Unless segments is true, it sends datagrams one by one: see canSegment.
func newTrain[Place comparable](
	send func(Place, []byte, int) error, sent func(to Place, n, bytes int, err error), segments bool,
) *train[Place] {
	t := &train[Place]{send: send, sent: sent}
	if segments {
		t.limit = maxTrainBytes
	}
	return t
}

// add sends p, now or at a later call of add or flush. It copies p.
func (t *train[Place]) add(to Place, p []byte) {
	if t.n > 0 && (to != t.to || len(p) > t.segment || len(t.buf)+len(p) > maxTrainBytes) {
		t.flush()
	}
	if t.n == 0 {
		t.to, t.segment = to, len(p)
	}
	t.buf = append(t.buf, p...)
	t.n++
	if len(p) < t.segment || t.n == maxTrain || t.segment == 0 || t.segment > t.limit {
		t.flush()
	}
}

// flush sends the datagrams that wait.
func (t *train[Place]) flush() {
	var none Place
	n, to, p := t.n, t.to, t.buf
	t.n, t.to, t.buf = 0, none, t.buf[:0]
	limit := t.limit
	if n > 1 {
		err := t.send(to, p, t.segment)
		switch {
		case errors.Is(err, syscall.EIO): // the network interface computes no checksums
			limit = 0
		case errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.EMSGSIZE): // a datagram does not fit into one packet
			limit = t.segment - 1
		default:
			t.sent(to, n, len(p), err)
			return
		}
	}
	for ; n > 0; n-- {
		one := p[:min(t.segment, len(p))]
		p = p[len(one):]
		err := t.send(to, one, 0)
		t.sent(to, 1, len(one), err)
		if err == nil {
			t.limit = limit // the kernel sends the datagram alone, but refuses the train: send such ones one by one from now on
		}
	}
}

// buffers is a pool of buffers, each with room for any datagram.
type buffers struct{ pool sync.Pool }

type buffer [64 << 10]byte

func (b *buffers) get() *buffer {
	if p, ok := b.pool.Get().(*buffer); ok {
		return p
	}
	return new(buffer)
}

func (b *buffers) put(p *buffer) { b.pool.Put(p) }
