// Command bench measures what the tunnel costs, on this machine and in one run:
//
//	make bench
//
// Cloud, edge, target and client are processes of their own, on loopback. Beside the
// tunnel stand two relays with as many hops: plain TCP, which is the floor, and a TLS
// connection for each conn, which is what could be had without a tunnel's one
// connection. Figures of different machines, or of different runs, say little; the
// ratios are what counts.
//
// Two promises are checked, and the exit code is 1 when one is not kept: a conn beside
// 50 stalled readers of its node keeps at least 0.9 of its throughput, and cloud and
// edge grow by no more than five windows for each stalled reader and 32 MiB.
//
// Where things are: speed.go compares; stalled.go has the stalled readers; peers.go is
// the target and the relays, which are this program again.
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"time"

	"tunnel/test/rig"
)

func main() {
	part := flag.String("part", "", "a part of the measurement alone: speed or stalled")
	flag.Parse()
	var err error
	if role := flag.Arg(0); role != "" {
		err = playRole(role, flag.Args()[1:])
	} else {
		err = measure(*part)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func measure(part string) (err error) {
	dir, err := os.MkdirTemp("", "tunnel-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // it is in the temporary folder
	b := &bench{dir: dir}
	defer b.close()
	if b.program, err = rig.Build(dir); err != nil {
		return err
	}
	if part != "stalled" {
		if err := b.speed(); err != nil {
			return err
		}
	}
	if part != "speed" {
		return b.stalled()
	}
	return nil
}

// bench is what one run shares.
type bench struct {
	dir, program string
	processes    []*rig.Process
}

func (b *bench) close() {
	for _, p := range b.processes {
		p.Kill()
	}
}

// tunnel is a cloud and an edge that run, in front of a target of their own.
type tunnel struct {
	door        string
	cloudHealth string
	edgeHealth  string
	cloud, edge *rig.Process
	target      *rig.Process
}

// anyRate is more opens in a second than are possible: what is measured is how many are.
const anyRate = 1_000_000

func (b *bench) startTunnel() (*tunnel, error) {
	target, process, err := b.peer("target")
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(b.dir, "pair-")
	if err != nil {
		return nil, err
	}
	pair, err := rig.NewPair(rig.Config{Binary: b.program, Dir: dir, TCP: map[string]string{"target": target}, Opens: anyRate})
	if err != nil {
		return nil, err
	}
	t := &tunnel{target: process, door: pair.Door("target"), cloudHealth: pair.CloudHealth(), edgeHealth: pair.EdgeHealth()}
	if t.cloud, err = pair.StartCloud(); err != nil {
		return nil, err
	}
	b.processes = append(b.processes, t.cloud)
	if t.edge, err = pair.StartEdge(); err != nil {
		return nil, err
	}
	b.processes = append(b.processes, t.edge)
	for deadline := time.Now().Add(15 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		err := rig.Ready(pair.EdgeHealth())
		if err == nil {
			return t, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("the tunnel is not ready: %w\n%s%s", err, pair.CloudLog.String(), pair.EdgeLog.String())
		}
	}
}

func (t *tunnel) stop() {
	t.edge.Kill()
	t.cloud.Kill()
}

// median returns the middle of values, which must not be none.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

const mib = 1 << 20
