package main

import (
	"errors"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/test/rig"
)

// Fairness: what a download takes from two others that share its link, and have cubic.

// Links that are shared. A buffer holds so many times what is in flight on the empty link.
const (
	fairDeep    = "beside two flows of cubic, buffer 1"
	fairShallow = "beside two flows of cubic, buffer 0.1"
)

// fairLinks are 100 ms there and back.
func fairLinks() []quality {
	const half, rate = 50 * time.Millisecond, 20_000_000 / 8
	return []quality{
		{fairDeep, false, rig.Quality{Delay: half, Rate: rate, Buffer: 2 * half}},
		{fairShallow, false, rig.Quality{Delay: half, Rate: rate, Buffer: 2 * half / 10}},
	}
}

// fairWays are ours, and a third flow of cubic for control.
func fairWays() []way {
	return []way{ways()[0], {"cubic", "a third flow of cubic", nil, startDirect}}
}

// fair is measured over a shared link.
func (b *bench) fair() []gauge {
	var (
		grow = 20 * b.time  // until the flows have found their share
		long = 120 * b.time // cubic's rate goes up and down for many seconds
	)
	return []gauge{{
		figures: []figure{
			{downloadName, "MiB/s", 1. / mib, false}, {"the two flows of cubic together", "MiB/s", 1. / mib, false},
		},
		run: func(l *line) ([]float64, error) { return shared(l, grow, long) },
	}}
}

// shared downloads on one conn beside two flows of cubic. It returns the bytes a second of the
// conn, and of the two flows together.
func shared(l *line, grow, d time.Duration) ([]float64, error) {
	plain := *l
	if err := startDirect(nil, &plain); err != nil {
		return nil, err
	}
	kind := byte(orderFlood)
	if l.cloud == nil { // it is plain itself
		kind = orderCubic
	}
	others, err := plain.start(2, order{Kind: orderCubic, Chunk: bulkChunk})
	if err != nil {
		return nil, err
	}
	own, err := l.start(1, order{Kind: kind, Chunk: bulkChunk})
	if err != nil {
		return nil, errors.Join(err, others.stop())
	}
	err = errors.Join(own.lasts(grow+d), others.lasts(grow+d))
	time.Sleep(grow)
	began, ownFrom, othersFrom := time.Now(), own.came.Load(), others.came.Load()
	time.Sleep(d)
	took, ownTo, othersTo := time.Since(began).Seconds(), own.came.Load(), others.came.Load()
	err = errors.Join(err, own.stop(), others.stop())
	return []float64{float64(ownTo-ownFrom) / took, float64(othersTo-othersFrom) / took}, err
}

// useCubic gives a connection cubic. Another process than one of root may be refused.
func useCubic(c net.Conn) error {
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic")
	})
	return errors.Join(err, cerr)
}
