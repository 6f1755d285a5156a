package main

import (
	"errors"
	"fmt"
	"os"
	"text/tabwriter"
	"time"

	"tunnel.example/tunnel/test/rig"
)

const (
	stalledConns = 50
	// window is pkg/stream's streamWindow.
	window = 1 << 20
	// maxGrowth is what cloud and edge may grow by, each.
	maxGrowth = 5*window*stalledConns + 32<<20
	// minRatio is what a live conn keeps of its throughput.
	minRatio = 0.9
)

// keptName is the name of a figure, before that of the stalling.
const keptName = "part of its throughput that a conn keeps, chunks of "

func ends() []string { return []string{"cloud", "edge"} }

func growthName(end string, s stalling) string {
	return fmt.Sprintf("growth of the %s, chunks of %s", end, s.name)
}

// errNotKept says that something was measured, and is not as promised.
var errNotKept = errors.New("a promise is not kept")

// stalling is a way to fill the windows of conns that nobody reads.
type stalling struct {
	name   string
	order  order
	rounds int // alone and beside them, in turn
}

// stallings are all of them, or those that do not take long, and fewer rounds.
func stallings(long bool) []stalling {
	rounds := 4
	if long {
		rounds = 8
	}
	all := []stalling{
		{"32 KiB", order{Kind: orderFlood, Chunk: 32 << 10}, rounds},
		{"1 KiB", order{Kind: orderFlood, Chunk: 1 << 10}, rounds},
		{"16 B", order{Kind: orderFlood, Chunk: 16}, rounds - 2}, // they take long to fill a window
		// As fast as they are taken, small writes leave together. One at a time they
		// stay what they are, and cost the most.
		{"1 KiB, paced", order{Kind: orderFlood, Chunk: 1 << 10, Pace: 250}, 1},
	}
	if long {
		all = append(all, stalling{"16 B, paced", order{Kind: orderFlood, Chunk: 16, Pace: 2500}, 1})
	}
	return all
}

// outcome is a row of the table.
type outcome struct {
	stalling
	alone, beside []float64 // bytes a second
	cloud, edge   int64     // growth in bytes
	took          time.Duration
}

// stalled measures what stalled readers cost, and fails when that is too much.
func (b *bench) stalled() error {
	var outcomes []outcome
	for _, s := range stallings(b.long) {
		o, err := b.stall(s)
		if err == nil && o.slow() {
			// Others use this machine too: twice the rounds before it is believed.
			var again outcome
			again, err = b.stall(s)
			o = o.merge(again)
		}
		if err != nil {
			return fmt.Errorf("%d stalled readers, chunks of %s: %w", stalledConns, s.name, err)
		}
		outcomes = append(outcomes, o)
	}
	b.tell(outcomes)
	return judge(outcomes)
}

// slow reports whether the live conn has kept too little. One round says nothing.
func (o outcome) slow() bool { return len(o.alone) > 1 && o.ratio() < minRatio }

func (o outcome) ratio() float64 { return median(o.beside) / median(o.alone) }

func (o outcome) merge(other outcome) outcome {
	o.alone = append(o.alone, other.alone...)
	o.beside = append(o.beside, other.beside...)
	o.cloud, o.edge = max(o.cloud, other.cloud), max(o.edge, other.edge)
	o.took = max(o.took, other.took)
	return o
}

func (b *bench) stall(s stalling) (outcome, error) {
	o := outcome{stalling: s}
	t, err := b.startTunnel()
	if err != nil {
		return o, err
	}
	defer t.stop()
	// What a live conn needs is not what the stalled ones cost.
	if _, err = live(t); err != nil {
		return o, err
	}
	cloud, edge, err := t.peaks()
	if err != nil {
		return o, err
	}
	if err = errors.Join(t.cloud.ResetPeak(), t.edge.ResetPeak()); err != nil {
		return o, err
	}
	for range s.rounds {
		var alone, beside float64
		if alone, err = live(t); err != nil {
			return o, err
		}
		started := time.Now()
		var closeAll func()
		if closeAll, err = stall(t.pair.Door("target"), stalledConns, s.order); err != nil {
			return o, err
		}
		err = t.waitFull()
		o.took = max(o.took, time.Since(started))
		if err != nil {
			closeAll()
			return o, err
		}
		beside, err = live(t)
		closeAll()
		if err != nil {
			return o, err
		}
		o.alone, o.beside = append(o.alone, alone), append(o.beside, beside)
		if err = t.waitEmpty(); err != nil {
			return o, err
		}
	}
	after, afterEdge, err := t.peaks()
	o.cloud, o.edge = after.Peak-cloud.Now, afterEdge.Peak-edge.Now
	return o, err
}

// live returns the throughput of a conn, in bytes a second.
func live(t *tunnel) (float64, error) {
	v, err := throughput(t.line, 1, orderFlood, 700*time.Millisecond)
	if err != nil {
		return 0, err
	}
	return v[0], nil
}

func (t *tunnel) peaks() (cloud, edge rig.Memory, err error) {
	cloud, err1 := t.cloud.Memory()
	edge, err2 := t.edge.Memory()
	return cloud, edge, errors.Join(err1, err2)
}

// waitFull waits until the windows of the stalled readers are full: the edge sends nothing more. Then it has
// the target rest.
//
// There is no deadline: a slow machine fills the windows for as long as it needs. Without the rest, the target
// would write for minutes: the kernel before the edge merges chunks of 16 B in its full buffer, and takes some
// more. That costs processor time which is not the tunnel's.
func (t *tunnel) waitFull() error {
	err := whenStill(func() (int64, error) {
		m, err := rig.Metrics(t.pair.EdgeHealth())
		return int64(m["tunnel_sent_bytes_total"]), err
	})
	if err == nil {
		err = t.rest()
	}
	if err != nil {
		return err
	}
	return whenStill(func() (int64, error) {
		told, err := t.taken()
		return told.Written, err
	})
}

// whenStill looks at a count of bytes until it stays the same.
func whenStill(count func() (int64, error)) error {
	for f := new(flow); ; time.Sleep(100 * time.Millisecond) {
		n, err := count()
		if err != nil {
			return err
		}
		if still, err := f.look(n); still || err != nil {
			return err
		}
	}
}

// maxFlow is how many bytes can flow until windows are full: far more than windows and kernels' buffers hold
// for stalledConns conns.
const maxFlow = 1 << 30

// flow follows a count of bytes.
type flow struct {
	first, last int64
	looks       int
	still       int // looks in a row at which nothing had flowed
}

// look takes the count. It reports whether nothing has flowed for ten looks.
func (f *flow) look(n int64) (still bool, err error) {
	const enough = 10 // looks
	if f.looks++; f.looks == 1 {
		f.first = n
	}
	if f.still++; f.looks == 1 || n != f.last {
		f.still = 0
	}
	if f.last = n; n-f.first > maxFlow {
		return false, fmt.Errorf("the windows do not fill up: %d MiB have gone into them", (n-f.first)/mib)
	}
	return f.still == enough, nil
}

// waitEmpty waits until the cloud has no conn any more.
func (t *tunnel) waitEmpty() error {
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		m, err := rig.Metrics(t.pair.CloudHealth())
		if err != nil {
			return err
		}
		if n, ok := m["tunnel_conns"]; ok && n == 0 {
			return nil
		}
	}
	return errors.New("the conns of clients that have gone do not end")
}

// tell puts the outcomes into the report.
func (b *bench) tell(outcomes []outcome) {
	b.report.addWay(ways()[0], b, nil)
	for _, o := range outcomes {
		kept := b.report.row(stalledPart, figure{name: keptName + o.name}).of(ours)
		for i := range o.alone {
			kept.sample(o.beside[i] / o.alone[i])
		}
		kept.Median = round(o.ratio()) // what is judged
		for i, growth := range []int64{o.cloud, o.edge} {
			f := figure{growthName(ends()[i], o.stalling), "MiB", 1, true}
			b.report.row(stalledPart, f).of(ours).sample(float64(growth) / mib)
		}
	}
}

func judge(outcomes []outcome) error {
	fmt.Printf("\n%d stalled readers of one node: a live conn alone and beside them (medians), and growth at most\n",
		stalledConns)
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "chunks\talone\tbeside\tratio\tcloud +\tedge +\trounds\tto stall\t")
	var errs []error
	for _, o := range outcomes {
		fmt.Fprintf(table, "%s\t%.0f MiB/s\t%.0f MiB/s\t%.2f\t%.0f MiB\t%.0f MiB\t%d\t%.1f s\t\n",
			o.name, median(o.alone)/mib, median(o.beside)/mib, o.ratio(), float64(o.cloud)/mib, float64(o.edge)/mib,
			len(o.alone), o.took.Seconds())
		if o.slow() {
			errs = append(errs, fmt.Errorf("%w: chunks of %s: a live conn keeps %.2f of its throughput, want %.2f", errNotKept,
				o.name, o.ratio(), minRatio))
		}
		for name, growth := range map[string]int64{"cloud": o.cloud, "edge": o.edge} {
			if growth > maxGrowth {
				errs = append(errs, fmt.Errorf("%w: chunks of %s: the %s grows by %d MiB, want %d", errNotKept, o.name, name,
					growth/mib, maxGrowth/mib))
			}
		}
	}
	table.Flush() //nolint:errcheck // standard output: nobody is left to tell
	fmt.Printf("bounds: ratio at least %.2f, growth at most %d MiB\n", minRatio, maxGrowth/mib)
	return errors.Join(errs...)
}
