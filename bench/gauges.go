package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
)

// A gauge measures one thing of a way. It may have several figures, each a row.
type gauge struct {
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

const micro, milli = 1e6, 1e3

// Parts of a report. Each link is one, too.
const (
	speedPart   = "speed"
	costPart    = "cost"
	stalledPart = "stalled"
	stormPart   = "storm"
)

// Names of figures that promises, and pages, speak of.
const (
	newConnsName     = "new conns"
	roundTripName    = "round trip, p50"
	edgeIdleName     = "memory of the edge, idle"
	binaryName       = "the binary, stripped"
	oneWriterName    = "wire bytes for a byte of small writes, 1 conn"
	manyWritersName  = "wire bytes for a byte of small writes, 16 conns, as many in all as of one"
	downloadName     = "download"
	uploadName       = "upload"
	besideMedianName = "round trip beside a download, p50"
	besideName       = "round trip beside a download, p99"
)

// withConns is the name of a figure of so many conns at once.
func withConns(name string, conns int) string {
	if conns == 1 {
		return name + ", 1 conn"
	}
	return fmt.Sprintf("%s, %d conns", name, conns)
}

// speed is how much and how fast.
func (b *bench) speed() (all []gauge) {
	d := b.time
	for _, kind := range []struct {
		name  string
		order byte
	}{{downloadName, orderFlood}, {uploadName, orderSink}, {"both ways", orderBoth}} {
		for _, conns := range []int{1, 8, 64} {
			name := withConns(kind.name, conns)
			all = append(all, gauge{figures: []figure{
				{name, "MiB/s", 1. / mib, false}, {name + ": CPU of both ends", "s/GiB", 1, true},
			}, run: func(l *line) ([]float64, error) { return throughput(l, conns, kind.order, d) }})
		}
	}
	return append(all,
		gauge{figures: []figure{
			{roundTripName, "µs", micro, true}, {"round trip, p99", "µs", micro, true},
			{"round trip, p99.9", "µs", micro, true},
		}, run: func(l *line) ([]float64, error) { return roundTrips(l, d) }},
		gauge{figures: []figure{
			{besideMedianName, "ms", milli, true}, {besideName, "ms", milli, true},
			{"round trip beside a download, p99.9", "ms", milli, true},
		}, run: func(l *line) ([]float64, error) { return roundTripsBeside(l, 2*d) }},
		gauge{figures: []figure{{newConnsName, "/s", 1, false}, {newConnsName + ": CPU of both ends", "µs", micro, true}},
			run: func(l *line) ([]float64, error) { return newConns(l, d) }},
		gauge{figures: []figure{{"first byte of a new conn, p50", "µs", micro, true},
			{"first byte of a new conn, p99", "µs", micro, true}},
			run: func(l *line) ([]float64, error) { return firstByte(l, d) }},
	)
}

// cost is what a conn takes besides, and what HTTPS does.
func (b *bench) cost() []gauge {
	const idleConns = 200
	d := b.time
	return []gauge{
		{fresh: true, figures: []figure{
			{"memory of the cloud, idle", "MiB", 1. / mib, true}, {edgeIdleName, "MiB", 1. / mib, true},
			{"memory of the cloud for an idle conn", "KiB", 1. / 1024, true},
			{"memory of the edge for an idle conn", "KiB", 1. / 1024, true},
		}, run: func(l *line) ([]float64, error) { return weigh(l, idleConns) }},
		{figures: []figure{{oneWriterName, "", 1, true}},
			run: func(l *line) ([]float64, error) { return smallWrites(l, 1, smallRate, d) }},
		{figures: []figure{{"wire bytes for a byte of small writes, 16 conns", "", 1, true}},
			run: func(l *line) ([]float64, error) { return smallWrites(l, 16, smallRate, d) }},
		{figures: []figure{{manyWritersName, "", 1, true}},
			run: func(l *line) ([]float64, error) { return smallWrites(l, 16, smallRate/16, d) }},
		{figures: []figure{{"HTTPS requests", "/s", 1, false}}, run: func(l *line) ([]float64, error) {
			door := l.passthrough
			if door == nil {
				door = &httpsDoor{dial: l.dial}
			}
			return b.requests(*door, d)
		}},
		{ours: true, figures: []figure{{"HTTPS requests, terminated by the cloud", "/s", 1, false}},
			run: func(l *line) ([]float64, error) { return b.requests(*l.terminated, d) }},
		{ours: true, figures: []figure{
			{"HTTPS requests, terminated by the cloud, with the edge's certificate", "/s", 1, false},
		},
			run: func(*line) ([]float64, error) {
				other, err := b.open(way{id: ours, name: "tunnel", start: startEdgeTLS}, place{})
				if err != nil {
					return nil, err
				}
				defer other.stop()
				return b.requests(*other.terminated, d)
			}},
	}
}

// contender is a way that takes part.
type contender struct {
	way
	at   func() (place, error) // where it runs
	line *line                 // nil: it has to be started
	// failed is how often each gauge has failed; after two times it is left out.
	failed map[int]int
}

// comparison is what is measured of everybody, in one kind of place.
type comparison struct {
	part   string // of the report
	ways   []way
	gauges []gauge
	rounds int
	at     func() (place, error)
}

// compare measures everybody, in turn.
func (b *bench) compare(c comparison) error {
	if len(c.gauges) == 0 {
		return nil
	}
	var all []*contender
	defer func() {
		for _, one := range all {
			one.stop()
		}
	}()
	for _, w := range c.ways {
		one := &contender{way: w, at: c.at, failed: make(map[int]int)}
		all = append(all, one)
		err := one.ready(b)
		if err != nil && w.id == ours {
			return err
		}
		b.report.addWay(w, b, err)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			all = all[:len(all)-1]
			for _, g := range c.gauges {
				b.report.add(c.part, g.figures, w.id, nil, err)
			}
		}
	}
	for range c.rounds {
		for i, g := range c.gauges {
			for _, one := range all {
				if g.ours && one.id != ours {
					continue
				}
				values, err := one.measure(b, i, g)
				b.report.add(c.part, g.figures, one.id, values, err)
				if err != nil && one.id == ours {
					return fmt.Errorf("%s, %s: %w", c.part, g.figures[0].name, err)
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

// ready starts the way if it does not run, in a place of its own.
func (c *contender) ready(b *bench) (err error) {
	if c.line != nil {
		return nil
	}
	at, err := c.at()
	if err == nil {
		c.line, err = b.open(c.way, at)
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
