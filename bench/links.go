package main

import (
	"errors"
	"sync"
	"time"
)

// settled is how long a conn moves bytes over a link with loss before it is measured, at least.
// `congestion = "auto"` counts resent segments for 2 s or more, and wants at least three, before it switches a
// connection to bbr. bbr then takes several round trips to find the rate of the link.
const settled = 15 * time.Second

// settles returns how long TCP may take there to find its pace: grow, or settled over a link with loss.
func (p place) settles(grow time.Duration) time.Duration {
	if p.lossy {
		return max(grow, settled)
	}
	return grow
}

// far is what is measured over a link: bulk, and what is small beside it. There is a
// connection of its own for everything where a way has that.
func (b *bench) far() []gauge {
	var (
		grow  = 8 * b.time  // until TCP has found its pace; see settled
		bulk  = 12 * b.time // what is lost comes in bursts
		small = 4 * b.time
		long  = 20 * b.time // a p99 wants some hundred samples
	)
	return []gauge{
		{figures: []figure{{downloadName, "MiB/s", 1. / mib, false}},
			run: func(l *line) ([]float64, error) { return farBulk(l, orderFlood, grow, bulk) }},
		{figures: []figure{{uploadName, "MiB/s", 1. / mib, false}},
			run: func(l *line) ([]float64, error) { return farBulk(l, orderSink, grow, bulk) }},
		{figures: []figure{{roundTripName, "ms", milli, true}, {"round trip, p99", "ms", milli, true}},
			run: func(l *line) ([]float64, error) { return farRoundTrips(l, small) }},
		{figures: []figure{{besideMedianName, "ms", milli, true}, {besideName, "ms", milli, true}},
			run: func(l *line) ([]float64, error) { return farRoundTripsBeside(l, grow, long) }},
		{figures: []figure{{"first byte of a new conn, p50", "ms", milli, true}},
			run: func(l *line) ([]float64, error) {
				times, err := firstByte(l, small)
				if err != nil {
					return nil, err
				}
				return times[:1], nil
			}},
	}
}

// lasts gives the conns of a stream a later end than patience.
func (s *stream) lasts(d time.Duration) (err error) {
	for _, c := range s.conns {
		err = errors.Join(err, c.SetDeadline(time.Now().Add(d+patience)))
	}
	return err
}

// farBulk moves bytes on one conn and returns bytes a second.
func farBulk(l *line, kind byte, grow, d time.Duration) ([]float64, error) {
	grow = l.at.settles(grow)
	s, err := l.start(1, order{Kind: kind, Chunk: bulkChunk})
	if err != nil {
		return nil, err
	}
	err1 := s.lasts(grow + d + patience)
	time.Sleep(grow)
	from, err2 := s.moved()
	started := time.Now()
	to, err3 := s.watch(d, from)
	took := time.Since(started)
	return []float64{float64(to-from) / took.Seconds()}, errors.Join(err1, err2, err3, s.stop())
}

// farRoundTrips has eight conns send 64 bytes there and back, each again and again, and
// returns p50 and p99, in seconds.
func farRoundTrips(l *line, d time.Duration) ([]float64, error) {
	const conns = 8
	var (
		mu   sync.Mutex // guards the following
		all  []float64
		errs error
	)
	var asking sync.WaitGroup
	for range conns {
		asking.Go(func() {
			times, err := l.roundTrips(d)
			mu.Lock()
			defer mu.Unlock()
			all, errs = append(all, times...), errors.Join(errs, err)
		})
	}
	asking.Wait()
	if errs != nil {
		return nil, errs
	}
	return percentiles(all, 500, 990), nil
}

// farRoundTripsBeside is farRoundTrips while another conn downloads.
func farRoundTripsBeside(l *line, grow, d time.Duration) ([]float64, error) {
	grow = l.at.settles(grow)
	s, err := l.start(1, order{Kind: orderFlood, Chunk: bulkChunk})
	if err != nil {
		return nil, err
	}
	err1 := s.lasts(grow + d + patience)
	time.Sleep(grow)
	times, err2 := farRoundTrips(l, d)
	return times, errors.Join(err1, err2, s.stop())
}
