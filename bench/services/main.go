// Services measures what it costs to tell nodes about the Services of a cluster, and what a node needs to serve all of
// them. KPNG, which has the same task, is measured beside tunnel:
//
//	go run ./bench/services [-kpng PROGRAM] [-nodes 500] [-kpng-nodes 50] [-json FILE]
//
// It runs `tunnel cloud` and `tunnel edge` as processes, with their default configuration but mode = "full". KPNG's
// server and its nft backend run in the same way. Both read the same API server, which is part of this program. Each
// system has a network of its own. So the program needs root, and nft(8).
//
// The rows:
//
//   - One endpoint of 1,000 Services with 10 endpoints each changes, and 500 nodes learn it: processor time of the
//     server's process, with gRPC and TLS (BenchmarkChange of pkg/services/hub has our own part). KPNG's server works
//     for each node by itself, so fewer nodes are measured, and the row says what as many nodes would take.
//   - A node connects: bytes of all messages. It has nothing; then it has everything; then it lacks 10 changes.
//   - A node has 5,000 Services with 10 endpoints each: how long its process takes from the start until all are served,
//     its memory, and how long a change takes from the API server to the kernel. tunnel's edge starts without a cloud,
//     from its file. KPNG keeps no file, so its server runs.
//
// Exit code 1 says that tunnel missed a bound, or that something failed.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"tunnel.example/tunnel/test/rig"
)

func main() {
	var b bench
	flag.StringVar(&b.kpng, "kpng", "", "KPNG's program, see kpng.sh; empty: tunnel alone")
	flag.IntVar(&b.nodes, "nodes", 500, "how many nodes tunnel's cloud tells")
	flag.IntVar(&b.kpngNodes, "kpng-nodes", 50, "how many nodes KPNG's server tells")
	flag.IntVar(&b.changes, "changes", 20, "how many changes each row has")
	flag.StringVar(&b.to, "json", "", "write the figures to this file, too")
	flag.Parse()
	if err := b.run(); err != nil {
		fmt.Fprintln(os.Stderr, "services:", err)
		os.Exit(1)
	}
}

// bench is one run.
type bench struct {
	// Set once.
	kpng             string
	nodes, kpngNodes int
	changes          int
	to               string
	dir, binary      string // for all files; tunnel

	rows   []*row
	failed []error // of KPNG
}

// row is one line of the result.
type row struct {
	What   string
	Unit   string
	Bound  float64 `json:",omitempty"` // at most this; 0: none
	Tunnel float64
	KPNG   float64 `json:",omitempty"`
}

// set stores a figure of a system. Rows come in the order of their first figure.
func (b *bench) set(of system, what, unit string, bound, value float64) {
	i := slices.IndexFunc(b.rows, func(r *row) bool { return r.What == what })
	if i < 0 {
		i = len(b.rows)
		b.rows = append(b.rows, &row{What: what, Unit: unit, Bound: bound})
	}
	if _, ours := of.(*tunnelSystem); ours {
		b.rows[i].Tunnel = value
	} else {
		b.rows[i].KPNG = value
	}
}

func (b *bench) run() error {
	if os.Geteuid() != 0 {
		return errors.New("networks of its own need root")
	}
	dir, remove, err := rig.TempDir("tunnel-bench-services-")
	if err != nil {
		return err
	}
	defer remove()
	b.dir = dir
	if b.binary, err = rig.Build(dir); err != nil {
		return err
	}
	for _, part := range []struct {
		services int
		measure  func(system, *cluster, int) error
	}{{1000, b.measureServer}, {5000, b.measureNode}} {
		if err := b.measure(part.services, part.measure); err != nil {
			return err
		}
	}
	return b.say()
}

// measure measures one part with each system.
func (b *bench) measure(services int, part func(system, *cluster, int) error) error {
	one := func(nodes int, newSystem func(*site) (system, error)) error {
		c := newCluster(services, b.nodes)
		s, err := newSite(c, b.dir)
		if err != nil {
			return err
		}
		defer s.close()
		sys, err := newSystem(s)
		if err != nil {
			return err
		}
		return part(sys, c, nodes)
	}
	err := one(b.nodes, func(s *site) (system, error) { return newTunnel(s, b.binary, b.nodes+1) })
	if err != nil {
		return fmt.Errorf("tunnel: %w", err)
	}
	if b.kpng == "" {
		return nil
	}
	if err = one(b.kpngNodes, func(s *site) (system, error) { return &kpng{s, b.kpng}, nil }); err != nil {
		b.failed = append(b.failed, fmt.Errorf("KPNG: %w", err)) // the rows of tunnel are shown all the same
	}
	return nil
}

// all calls f for each node at once, and waits.
func all(nodes []node, f func(node) error) error {
	errs := make([]error, len(nodes))
	var running sync.WaitGroup
	for i, n := range nodes {
		running.Go(func() { errs[i] = f(n) })
	}
	running.Wait()
	return errors.Join(errs...)
}

// pull asks for changes. It drops the size.
func pull(n node) error {
	_, err := n.pull()
	return err
}

// measureServer measures a server, and what it sends to a node.
func (b *bench) measureServer(s system, c *cluster, count int) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	server, err := s.startServer()
	if err != nil {
		return err
	}
	defer server.Kill()
	one, err := s.join(ctx, nodeName(count), true)
	if err != nil {
		return err
	}
	full, err := one.pull()
	if err != nil {
		return err
	}
	if err = within(time.Minute, server, c.watched); err != nil {
		return err
	}
	for _, away := range []struct {
		changes int
		what    string
		bound   float64
	}{
		{0, "a node connects again, nothing has changed", 4 << 10},
		{10, "a node connects again, 10 endpoints have changed", 0.05 * float64(full)},
	} {
		for i := range away.changes {
			c.setReady(i, 3, false)
		}
		time.Sleep(time.Second) // the server learns of the changes
		if err = one.again(); err != nil {
			return err
		}
		var size int
		if size, err = one.pull(); err != nil {
			return err
		}
		b.set(s, away.what, "bytes", away.bound, float64(size))
	}
	b.set(s, "a node that has nothing connects", "bytes", 0, float64(full))

	nodes := make([]node, count)
	for i := range nodes {
		if nodes[i], err = s.join(ctx, nodeName(i), false); err != nil {
			return err
		}
	}
	if err = all(nodes, pull); err != nil {
		return err
	}
	before, err := server.CPU()
	if err != nil {
		return err
	}
	for i := range b.changes {
		c.setReady(c.services/2, 5, i%2 == 1)
		if err = all(nodes, pull); err != nil {
			return err
		}
	}
	after, err := server.CPU()
	if err != nil {
		return err
	}
	each := float64((after - before).Microseconds()) / 1000 / float64(b.changes) / float64(count) * float64(b.nodes)
	b.set(s, fmt.Sprintf("one endpoint changes, %d nodes learn it: processor of the server", b.nodes), "ms", 25, each)
	return nil
}

// measureNode measures the process that programs the kernel of a node.
func (b *bench) measureNode(s system, c *cluster, _ int) error {
	served := func() error {
		for _, service := range []int{0, c.services / 3, c.services - 1, c.services} {
			if _, err := s.call(service); err != nil {
				return err
			}
		}
		return nil
	}
	server, err := s.startServer()
	if err != nil {
		return err
	}
	defer server.Kill()
	node, err := s.startNode()
	if err != nil {
		return err
	}
	defer func() { node.Kill() }()
	const patience = 3 * time.Minute
	if err = within(patience, node, served); err != nil {
		return err
	}
	if err = within(patience, server, c.watched); err != nil {
		return err
	}
	var took []time.Duration
	for i := range b.changes {
		want := endpointIP(c.services, 1+i%2).String()
		time.Sleep(100 * time.Millisecond)
		start := time.Now()
		c.setProbe(1 + i%2)
		err = within(patience, node, func() error {
			switch got, failed := s.call(c.services); {
			case failed != nil:
				return failed
			case got != want:
				return fmt.Errorf("the probe is at %s, and not yet at %s", got, want)
			}
			return nil
		})
		if err != nil {
			return err
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

	time.Sleep(settle)
	memory, err := node.Memory()
	if err != nil {
		return err
	}
	node.Kill()
	if s.keepsState() {
		server.Kill()
	}
	if err = s.clearKernel(); err != nil {
		return err
	}
	start := time.Now()
	next, err := s.startNode()
	if err != nil {
		return err
	}
	node = next
	if err = within(patience, node, served); err != nil {
		return err
	}
	b.set(s, "a node's process starts: until all Services are served", "ms", 5000, ms(time.Since(start)))
	b.set(s, "memory of a node's process", "MiB", 64, float64(memory.Now)/(1<<20))
	b.set(s, "one endpoint changes: until the kernel has it (p50)", "ms", 50, ms(took[len(took)/2]))
	b.set(s, "the same, the slowest", "ms", 0, ms(took[len(took)-1]))
	return nil
}

// settle is the time in which an edge writes its file, and gives memory back.
const settle = 8 * time.Second

// say prints the rows. The error says which bounds tunnel missed.
func (b *bench) say() error {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\tbound\ttunnel\tKPNG")
	missed := b.failed
	for _, r := range b.rows {
		bound, theirs := "", ""
		if r.Bound != 0 {
			bound = fmt.Sprintf("%.4g", r.Bound)
		}
		if b.kpng != "" {
			theirs = fmt.Sprintf("%.4g", r.KPNG)
		}
		fmt.Fprintf(w, "%s (%s)\t%s\t%.4g\t%s\n", r.What, r.Unit, bound, r.Tunnel, theirs)
		if r.Bound != 0 && r.Tunnel > r.Bound {
			missed = append(missed, fmt.Errorf("%s: %.4g %s, the bound is %.4g", r.What, r.Tunnel, r.Unit, r.Bound))
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if b.to != "" {
		text, err := json.Marshal(b.rows)
		if err != nil {
			return err
		}
		missed = append(missed, os.WriteFile(b.to, text, 0o600))
	}
	return errors.Join(missed...)
}
