// Udp measures what the tunnel does to datagrams, beside the same datagrams without it:
//
//	go run ./bench/udp [-size 1200] [-flows 1,100] [-rates 25000,50000] [-time 3s] [-json FILE]
//
// A generator sends datagrams to a target, which sends each of them back. They go by three ways:
// direct; through a plain relay in Go, one process with a socket for each caller; and through the
// tunnel, with the cloud and the edge as processes. Everything runs on this machine, so the generator
// and the target share its processors with the ways.
//
// It prints the round trip of single datagrams; then, for each rate, how many of a second's datagrams
// came back, and how many were lost. The counters of cloud and edge say where. Exit code 1 says that the
// tunnel missed a bound: half of the largest rate with a loss, less than the largest rate, or more than
// 0.1 ms added to the round trip at p50.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"tunnel.example/tunnel/internal/freeport"
	"tunnel.example/tunnel/test/rig"
)

const (
	// added is the bound of what the tunnel may add to the round trip at p50.
	added = 100 * time.Microsecond
	// nearly is which part of the largest rate must come back.
	nearly = 0.99
)

func main() {
	b := bench{}
	flag.IntVar(&b.size, "size", 1200, "bytes of a datagram")
	flag.IntVar(&b.pings, "pings", 20_000, "single datagrams whose round trip is measured")
	flag.DurationVar(&b.time, "time", 3*time.Second, "how long each rate is sent")
	flag.StringVar(&b.to, "json", "", "write the figures to this file, too")
	flows := flag.String("flows", "1,100", "how many callers send at once, in each row")
	rates := flag.String("rates", "25000,50000", "datagrams a second, in each row; the bounds are about the last one")
	be := flag.String("be", "", "be the target or the relay (for the program itself)")
	flag.Parse()
	var err error
	switch *be {
	case "target":
		err = serveTarget(flag.Arg(0))
	case "relay":
		err = serveRelay(flag.Arg(0), flag.Arg(1))
	default:
		b.flows, err = numbers(*flows)
		if err == nil {
			b.rates, err = numbers(*rates)
		}
		if err == nil {
			err = b.run()
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "udp:", err)
		os.Exit(1)
	}
}

// numbers parses numbers that are separated by commas.
func numbers(s string) (all []int, err error) {
	for part := range strings.SplitSeq(s, ",") {
		n, err := strconv.Atoi(part)
		if err != nil || n <= 0 {
			return nil, fmt.Errorf("%q is not a number", part)
		}
		all = append(all, n)
	}
	return all, nil
}

// bench is one run. Set once.
type bench struct {
	size, pings  int
	flows, rates []int
	time         time.Duration
	to           string
}

// way is a way to the target.
type way struct {
	name      string
	addr      string
	processes map[string]*rig.Process // whose processor time counts
	pair      *rig.Pair               // nil: there is no tunnel
}

// row is what was measured by one way.
type row struct {
	Way      string
	P50, P99 time.Duration // of the round trip of single datagrams
	Loads    []load
}

func (b *bench) run() error {
	dir, remove, err := rig.TempDir("tunnel-udp-")
	if err != nil {
		return err
	}
	defer remove()
	ways, err := b.start(dir)
	if err != nil {
		return err
	}
	var rows []row
	for _, w := range ways {
		r, err := b.measure(w)
		if err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
		rows = append(rows, r)
	}
	if b.to != "" {
		text, err := json.Marshal(rows)
		if err != nil {
			return err
		}
		if err := os.WriteFile(b.to, text, 0o600); err != nil {
			return err
		}
	}
	return b.judge(rows)
}

// start starts the processes of all ways.
func (b *bench) start(dir string) ([]*way, error) {
	ports := make([]int, 3)
	for i := range ports {
		var err error
		if ports[i], err = freeport.New(); err != nil {
			return nil, err
		}
	}
	target, relay := address(ports[0]), address(ports[1])
	own, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if _, err = rig.Start(new(rig.Log), own, "-be", "target", target); err != nil {
		return nil, err
	}
	relayProcess, err := rig.Start(new(rig.Log), own, "-be", "relay", relay, target)
	if err != nil {
		return nil, err
	}
	binary, err := rig.Build(dir)
	if err != nil {
		return nil, err
	}
	door := address(ports[2])
	pair, err := rig.NewPair(rig.Config{
		Binary: binary, Dir: dir,
		Cloud: fmt.Sprintf("\n[mode.cloud.udp]\n%q = %q\n[mode.cloud.admin]\nsocket = \"cloud.sock\"\n",
			door, rig.Node+"/"+target),
		Edge: "\n[mode.edge.admin]\nsocket = \"edge.sock\"\n", // for profiles: curl --unix-socket
	})
	if err != nil {
		return nil, err
	}
	cloud, err := pair.StartCloud()
	if err != nil {
		return nil, err
	}
	edge, err := pair.StartEdge()
	if err != nil {
		return nil, err
	}
	ways := []*way{
		{name: "direct", addr: target},
		{name: "relay", addr: relay, processes: map[string]*rig.Process{"relay": relayProcess}},
		{name: "tunnel", addr: door, processes: map[string]*rig.Process{"cloud": cloud, "edge": edge}, pair: pair},
	}
	for _, w := range ways {
		if err := w.works(); err != nil {
			return nil, fmt.Errorf("%s does not work: %w\n%s%s", w.name, err, pair.CloudLog.String(), pair.EdgeLog.String())
		}
	}
	return ways, nil
}

func address(port int) string { return "127.0.0.1:" + strconv.Itoa(port) }

// measure measures one way, and prints what it has found.
func (b *bench) measure(w *way) (row, error) {
	r := row{Way: w.name}
	var err error
	if r.P50, r.P99, err = w.roundTrips(b.pings); err != nil {
		return r, err
	}
	fmt.Printf("%-7s  round trip p50 %v, p99 %v\n", w.name, r.P50, r.P99)
	for _, flows := range b.flows {
		for _, rate := range b.rates {
			l, err := w.load(flows, rate, b.size, b.time)
			if err != nil {
				return r, err
			}
			fmt.Println("        ", l)
			r.Loads = append(r.Loads, l)
		}
	}
	return r, nil
}

// judge compares the tunnel with the bounds.
func (b *bench) judge(rows []row) error {
	var errs []error
	direct, tunnel := rows[0], rows[len(rows)-1]
	if more := tunnel.P50 - direct.P50; more > added {
		errs = append(errs, fmt.Errorf("the tunnel adds %v to the round trip at p50; %v are allowed", more, added))
	}
	largest := b.rates[len(b.rates)-1]
	for _, l := range tunnel.Loads {
		switch {
		case l.Rate <= largest/2 && l.Lost() > 0:
			errs = append(errs, fmt.Errorf("%d of %d datagrams were lost at %d a second with %d flows",
				l.Lost(), l.Sent, l.Rate, l.Flows))
		case l.Rate == largest && float64(l.Back) < nearly*float64(l.Rate)*l.Took.Seconds():
			errs = append(errs, fmt.Errorf("%.0f datagrams came back each second with %d flows; %d are promised",
				float64(l.Back)/l.Took.Seconds(), l.Flows, l.Rate))
		}
	}
	return errors.Join(errs...)
}
