package faults

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
	"tunnel.example/tunnel/test/rig/rigtest"
)

// The promises, with what they are counted from.
const (
	// backWithin is from a restart to the first success of every kind of traffic.
	backWithin = 12 * time.Second
	// quietWithin is from the end of traffic to the baseline of goroutines and
	// descriptors.
	quietWithin = 30 * time.Second
	// noticeWithin is from a peer that is silent to the clients' errors.
	noticeWithin = 17 * time.Second
	// atOnce is for what happens without waiting for anything, on a machine that is
	// busy with other things.
	atOnce = 10 * time.Second
	// patience is for what must happen, where the test judges no time. It bounds the test on a machine that has
	// processor time for other things first.
	patience = time.Minute
	// poll is how often a condition is looked at.
	poll = 50 * time.Millisecond
)

// program is the program under test.
var program string

func TestMain(m *testing.M) {
	flag.Parse()
	// A process that ignores SIGHUP, such as one that nohup(1) has started, hands that on to the daemons here.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	rigtest.Parallel(16)
	os.Exit(rigtest.Main(m, &program))
}

// soak reports whether the long variant was asked for.
func soak() bool { return os.Getenv("TUNNEL_SOAK") == "1" }

// pair is a pair with its targets.
type pair struct {
	*rig.Pair
	t       *testing.T
	targets *targets

	cloud, edge *rig.Process // nil: not started
}

// newPair makes a pair and starts nothing but the targets. At the end of the test it
// checks that no process has ended by itself, panicked or told the token. changes may
// change the pair's configuration.
func newPair(t *testing.T, changes ...func(*rig.Config)) *pair {
	t.Helper()
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	p := &pair{t: t, targets: newTargets(t, ca)}
	cfg := rig.Config{
		Binary: program, Dir: t.TempDir(), CA: ca, Debug: true,
		TCP: p.targets.doors(), HTTPS: p.targets.https,
	}
	for _, change := range changes {
		change(&cfg)
	}
	p.Pair, err = rig.NewPair(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.end)
	return p
}

func (p *pair) end() {
	if where := p.Leaks(p.cloud, p.edge); len(where) > 0 {
		p.t.Errorf("the token shows in: %s", strings.Join(where, ", "))
	}
	for name, side := range map[string]struct {
		process *rig.Process
		log     *rig.Log
	}{"cloud": {p.cloud, &p.CloudLog}, "edge": {p.edge, &p.EdgeLog}} {
		if side.process != nil {
			if !side.process.Alive() {
				p.t.Errorf("the %s has ended by itself, with exit code %d", name, side.process.ExitCode())
			}
			side.process.Signal(syscall.SIGKILL) // an error if it has ended
			select {
			case <-side.process.Done():
			case <-time.After(endsWithin): // a test of a restart has failed and does not know the new process
				p.t.Errorf("another process still writes to the log of the %s", name)
			}
		}
		if strings.Contains(side.log.String(), "panic") {
			p.t.Errorf("the %s has panicked", name)
		}
		if p.t.Failed() {
			p.t.Logf("log of the %s, its end:\n%s", name, tail(side.log.String()))
		}
	}
}

// tail returns the last lines of a log, without those about single conns.
func tail(log string) string {
	var lines []string
	for line := range strings.SplitSeq(log, "\n") {
		if !strings.Contains(line, "level=DEBUG") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-40):], "\n")
}

func (p *pair) startCloud() {
	p.t.Helper()
	var err error
	if p.cloud, err = p.StartCloud(); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pair) startEdge() {
	p.t.Helper()
	var err error
	if p.edge, err = p.StartEdge(); err != nil {
		p.t.Fatal(err)
	}
}

// start starts both and waits until they are ready.
func (p *pair) start() {
	p.t.Helper()
	p.startCloud()
	p.startEdge()
	p.waitReady(patience)
}

// waitReady waits until the edge has a session and the cloud its listeners.
func (p *pair) waitReady(limit time.Duration) {
	p.t.Helper()
	testkit.Within(p.t, limit, "cloud and edge are ready", func() error {
		return errors.Join(rig.Ready(p.CloudHealth()), rig.Ready(p.EdgeHealth()))
	})
}

// metric returns one metric of a process, by the address of its health port.
func metric(health, name string) (float64, error) {
	values, err := rig.Metrics(health)
	if err != nil {
		return 0, err
	}
	v, ok := values[name]
	if !ok {
		return 0, fmt.Errorf("there is no metric %s", name)
	}
	return v, nil
}

// sessions checks how many sessions the cloud has.
func (p *pair) sessions(want float64) error {
	n, err := metric(p.CloudHealth(), "tunnel_sessions")
	if err == nil && n != want {
		err = fmt.Errorf("the cloud has %v sessions, want %v", n, want)
	}
	return err
}

// weight is what a process holds that it must give back.
type weight struct{ goroutines, descriptors, openFDs float64 }

func (w weight) exceeds(base weight) bool {
	return w.goroutines > base.goroutines || w.descriptors > base.descriptors || w.openFDs > base.openFDs
}

// most returns the greater of each.
func (w weight) most(other weight) weight {
	return weight{
		max(w.goroutines, other.goroutines),
		max(w.descriptors, other.descriptors),
		max(w.openFDs, other.openFDs),
	}
}

// weigh asks a process, and the kernel, what it holds, without the data connections that wait for
// another conn: each is a descriptor, and so many goroutines.
func weigh(process *rig.Process, health string, goroutines float64) (weight, error) {
	values, err := rig.Metrics(health)
	if err != nil {
		return weight{}, err
	}
	fds, err := process.Descriptors()
	data := values["tunnel_data_connections"]
	w := weight{goroutines: values["go_goroutines"] - goroutines*data, openFDs: values["process_open_fds"] - data,
		descriptors: float64(fds) - data}
	if err == nil && (w.goroutines <= 0 || w.openFDs <= 0) {
		err = errors.New("the Go and process collectors are not registered")
	}
	return w, err
}

// baseline is what both hold when nothing goes on.
type baseline struct{ cloud, edge weight }

// settle is how long the rest of some traffic may take to go, and sample how long to
// look at what stays.
const (
	settle = 3 * time.Second
	sample = time.Second
)

// baseline returns what both hold when nothing goes on: it runs the traffic once, so
// that what is made once is made, and takes the most that each holds some time after.
// (The question itself costs a connection and a few goroutines, not always the same.)
func (p *pair) baseline() (b baseline) {
	p.t.Helper()
	p.startTraffic().stop()
	time.Sleep(settle)
	for until := time.Now().Add(sample); time.Now().Before(until); time.Sleep(poll) {
		testkit.Within(p.t, patience, "cloud and edge say what they hold", func() error {
			cloud, err1 := weigh(p.cloud, p.CloudHealth(), 0)
			edge, err2 := weigh(p.edge, p.EdgeHealth(), 1)
			if err := errors.Join(err1, err2); err != nil {
				return err
			}
			b.cloud, b.edge = b.cloud.most(cloud), b.edge.most(edge)
			return nil
		})
	}
	return b
}

// back waits until neither holds more than b, and returns how long that took.
func (p *pair) back(b baseline) time.Duration {
	p.t.Helper()
	return testkit.Within(p.t, quietWithin, "goroutines and descriptors are back at their baseline", func() error {
		cloud, err1 := weigh(p.cloud, p.CloudHealth(), 0)
		edge, err2 := weigh(p.edge, p.EdgeHealth(), 1)
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if cloud.exceeds(b.cloud) || edge.exceeds(b.edge) {
			return fmt.Errorf("cloud %+v, edge %+v; baseline %+v", cloud, edge, b)
		}
		return nil
	})
}
