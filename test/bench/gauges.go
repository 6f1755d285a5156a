package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
)

// A gauge measures one thing of a way. It may have several figures, each a row.
type gauge struct {
	part    string
	figures []figure
	run     func(l *line) ([]float64, error)
	fresh   bool // on processes that have done nothing yet
	ours    bool // only we have that
}

// figure is a row of the tables.
type figure struct {
	name, unit string
	scale      float64 // from what is measured to the unit
	small      bool    // less is better
}

func (b *bench) gauges() []gauge {
	const idleConns = 200
	d := b.time
	var all []gauge
	for _, kind := range []struct {
		name  string
		order byte
	}{{"download", orderFlood}, {"upload", orderSink}, {"both ways", orderBoth}} {
		for _, conns := range []int{1, 8, 64} {
			name := fmt.Sprintf("%s, %d conns", kind.name, conns)
			if conns == 1 {
				name = kind.name + ", 1 conn"
			}
			all = append(all, gauge{part: "speed", figures: []figure{
				{name, "MiB/s", 1. / mib, false}, {name + ": CPU of both ends", "s/GiB", 1, true},
			}, run: func(l *line) ([]float64, error) { return throughput(l, conns, kind.order, d) }})
		}
	}
	const micro, milli = 1e6, 1e3
	all = append(all,
		gauge{part: "speed", figures: []figure{
			{"round trip, p50", "µs", micro, true}, {"round trip, p99", "µs", micro, true}, {"round trip, p99.9", "µs", micro, true},
		}, run: func(l *line) ([]float64, error) { return roundTrips(l, d) }},
		gauge{part: "speed", figures: []figure{
			{"round trip beside a download, p50", "ms", milli, true}, {"round trip beside a download, p99", "ms", milli, true}, {"round trip beside a download, p99.9", "ms", milli, true},
		}, run: func(l *line) ([]float64, error) { return roundTripsBeside(l, 2*d) }},
		gauge{part: "speed", figures: []figure{{"new conns", "/s", 1, false}},
			run: func(l *line) ([]float64, error) { return newConns(l, d) }},
		gauge{part: "speed", figures: []figure{{"first byte of a new conn, p50", "µs", micro, true}, {"first byte of a new conn, p99", "µs", micro, true}},
			run: func(l *line) ([]float64, error) { return firstByte(l, d) }},
		gauge{part: "cost", fresh: true, figures: []figure{
			{"memory of the cloud, idle", "MiB", 1. / mib, true}, {"memory of the edge, idle", "MiB", 1. / mib, true},
			{"memory of the cloud for an idle conn", "KiB", 1. / 1024, true}, {"memory of the edge for an idle conn", "KiB", 1. / 1024, true},
		}, run: func(l *line) ([]float64, error) { return weigh(l, idleConns) }},
		gauge{part: "cost", figures: []figure{{"wire bytes for a byte of small writes, 1 conn", "", 1, true}},
			run: func(l *line) ([]float64, error) { return smallWrites(l, 1, d) }},
		gauge{part: "cost", figures: []figure{{"wire bytes for a byte of small writes, 16 conns", "", 1, true}},
			run: func(l *line) ([]float64, error) { return smallWrites(l, 16, d) }},
		gauge{part: "cost", figures: []figure{{"HTTPS requests", "/s", 1, false}}, run: func(l *line) ([]float64, error) {
			door := l.passthrough
			if door == nil {
				door = &httpsDoor{dial: l.dial}
			}
			return b.requests(*door, d)
		}},
		gauge{part: "cost", ours: true, figures: []figure{{"HTTPS requests, terminated by the cloud", "/s", 1, false}},
			run: func(l *line) ([]float64, error) { return b.requests(*l.terminated, d) }},
	)
	return all
}

// contender is a way that takes part.
type contender struct {
	way
	line *line // nil: it has to be started
	// failed is how often each gauge has failed; after two times it is left out.
	failed map[int]int
}

// compare measures a part of everybody; "" is every part.
func (b *bench) compare(part string, chosen []way) error {
	var all []*contender
	defer func() {
		for _, c := range all {
			c.stop()
		}
	}()
	for _, w := range chosen {
		c := &contender{way: w, failed: make(map[int]int)}
		err := c.ready(b)
		if err != nil && w.id == ours {
			return err
		}
		b.report.addWay(w, b, err)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			continue
		}
		all = append(all, c)
	}
	gauges := b.gauges()
	for range b.rounds {
		for i, g := range gauges {
			if part != "" && part != g.part {
				continue
			}
			for _, c := range all {
				if g.ours && c.id != ours {
					continue
				}
				values, err := c.measure(b, i, g)
				b.report.add(g.figures, c.id, values, err)
				if err != nil && c.id == ours {
					return fmt.Errorf("%s: %w", g.figures[0].name, err)
				}
			}
		}
	}
	return nil
}

func (c *contender) stop() {
	if c.line != nil {
		c.line.stop()
		c.line = nil
	}
}

// ready starts the way if it does not run.
func (c *contender) ready(b *bench) (err error) {
	if c.line == nil {
		c.line, err = b.open(c.way)
	}
	return err
}

// measure runs a gauge. A way that fails is started anew for the next one.
func (c *contender) measure(b *bench, i int, g gauge) (values []float64, err error) {
	if c.failed[i] == 2 {
		return nil, errors.New("it has failed twice, and was left out")
	}
	if g.fresh {
		c.stop()
	}
	if err = c.ready(b); err == nil {
		values, err = g.run(c.line)
	}
	if err != nil {
		c.failed[i]++
		fmt.Fprintf(os.Stderr, "%s, %s: %v\n", c.name, g.figures[0].name, err)
		if c.id == ours && c.line != nil {
			err = fmt.Errorf("%w\n%s", err, c.line.logs())
		}
		c.stop()
		return nil, err
	}
	if serr := c.line.settle(); serr != nil {
		fmt.Fprintf(os.Stderr, "%s, after %s: %v\n", c.name, g.figures[0].name, serr)
		c.stop()
	}
	for i, f := range g.figures {
		values[i] *= f.scale
	}
	return slices.Clone(values), nil
}
