// Storm has thousands of edges lose their cloud at the same moment, and says how they
// come back and what they cost:
//
//	go run ./bench/storm [-edges 5000] [-replicas 1] [-sources 1] [-rate 0] [-calm 20s] [-json FILE]
//
// Each replica of the cloud is a process. The edges are clients in further processes (one
// for every 10,000), over TLS, each with a token of its own, and they join as every edge
// does; each attempt goes to a replica by chance, as behind a balancer. It prints what a
// join costs, and, while nothing happens, what a node costs: memory, processor time,
// bytes on the wire. Then all replicas are killed with -9 and started again, and it prints
// when half of the edges, 99 % and all were back. Exit code 1 says that a bound was missed
// (all back within a minute for every 5,000; the peak of memory at most 1.5 times what it
// was before, at rest).
//
// The edges share this machine's processors with the cloud, and have more to do for a join:
// with more than some 10,000 at once they are late for their own 10 s. -rate has them begin
// that many joins in a second, all together.
//
// A replica needs a file descriptor for each of its edges, and may have as many as the hard
// limit of this shell says (ulimit -Hn): else there have to be more replicas.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"syscall"
	"time"

	"tunnel.example/tunnel/test/rig"
)

const (
	backWithin  = time.Minute            // for every backOf edges
	backOf      = 5000                   //
	peakAtMost  = 1.5                    // times the memory at rest
	settle      = 20 * time.Second       // until memory is at rest: collections, the kernel's buffers
	sample      = 100 * time.Millisecond // between two looks at how many have a session
	restartLate = 5 * time.Second        // how long the cloud is away, so that all edges have noticed
)

func main() {
	var s storm
	flag.IntVar(&s.edges, "edges", 5000, "how many")
	flag.IntVar(&s.replicas, "replicas", 1, "how many clouds, which know each other")
	flag.IntVar(&s.sources, "sources", 1, "how many addresses the edges come from: 1 is one NAT for all")
	flag.IntVar(&s.rate, "rate", 0, "how many joins a second the edges begin, all together; 0: as many as they like")
	flag.DurationVar(&s.calm, "calm", 20*time.Second,
		"how long nothing happens while the cost of idle nodes is measured; heartbeats come every 10 s")
	flag.StringVar(&s.to, "json", "", "write the figures to this file, too")
	herd := flag.String("herd", "", "be the edges of this file (for the program itself)")
	flag.Parse()
	run := s.run
	if *herd != "" {
		run = func() error { return graze(*herd) }
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "storm:", err)
		os.Exit(1)
	}
}

// figures are what -json writes: bytes and seconds.
type figures struct {
	PerNode         float64 // memory of the cloud at rest, without what it takes for itself
	Peak            float64 // memory of the cloud after its restart
	Half, Most, All float64 // since the restart; most are 99 %
	JoinCPU         float64 // of the cloud, for each node that came back
	JoinWire        float64 // both ways, for each
	IdleCPU         float64 // of the cloud, in a second, for each idle node
	IdleWire        float64 // both ways, in a second, for each
}

func (f figures) write(path string) error {
	text, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

type storm struct {
	edges, replicas, sources, rate int
	calm                           time.Duration
	to                             string

	found figures

	fleet  *rig.Fleet
	clouds []*rig.Process
	herds  []*rig.Process
}

func (s *storm) run() (err error) {
	if err = s.enoughFiles(); err != nil {
		return err
	}
	dir, remove, err := rig.TempDir("tunnel-storm-")
	if err != nil {
		return err
	}
	defer remove()
	binary, err := rig.Build(dir)
	if err != nil {
		return err
	}
	ca, err := rig.NewCA()
	if err != nil {
		return err
	}
	names := make([]string, s.edges)
	for i := range names {
		names[i] = fmt.Sprintf("edge-%06d", i)
	}
	if s.fleet, err = rig.NewFleet(rig.FleetConfig{Binary: binary, Dir: dir, CA: ca, Hosts: make([]rig.Host, s.replicas),
		Nodes: names}); err != nil {
		return err
	}
	defer s.stop()
	if err = s.startClouds(); err != nil {
		return err
	}
	bare, err := s.weigh()
	if err != nil {
		return err
	}
	if err = s.startHerds(dir, names); err != nil {
		return err
	}

	began := time.Now()
	if all := s.back(s.edges, began); s.ready() < s.edges {
		return fmt.Errorf("joining for the first time: %d of %d have a session after %s", s.ready(), s.edges, all)
	}
	fmt.Printf("%d edges have joined %d replicas in %.1f s\n", s.edges, s.replicas, time.Since(began).Seconds())
	joined, err := s.weigh()
	if err != nil {
		return err
	}
	s.sayJoins(bare, joined)
	time.Sleep(settle)
	rest, err := s.sayCalm(bare)
	if err != nil {
		return err
	}

	s.kill(s.clouds)
	time.Sleep(restartLate)
	if err = s.startClouds(); err != nil {
		return err
	}
	began = time.Now()
	half, most, all := s.back(s.edges/2, began), s.back(s.edges*99/100, began), s.back(s.edges, began)
	fmt.Printf("after a restart of the cloud: half back in %.1f s, 99 %% in %.1f s, all in %.1f s\n", half.Seconds(),
		most.Seconds(), all.Seconds())
	after, err := s.weigh()
	if err != nil {
		return err
	}
	// The new processes begin where bare ones do.
	s.sayJoins(weight{cloudCPU: bare.cloudCPU, edgesCPU: rest.edgesCPU}, after)
	ratio := float64(after.cloud.Peak) / float64(rest.cloud.Now)
	fmt.Printf("memory of the cloud: %d MiB at its peak, %.2f times that at rest\n", after.cloud.Peak>>20, ratio)
	s.found.Peak = float64(after.cloud.Peak)
	s.found.Half, s.found.Most, s.found.All = half.Seconds(), most.Seconds(), all.Seconds()
	var missed []error
	if all >= s.patience() {
		missed = append(missed, fmt.Errorf("%d of %d are back after %s", s.ready(), s.edges, all))
	}
	if ratio > peakAtMost {
		missed = append(missed, fmt.Errorf("the peak is more than %.1f times the memory at rest", peakAtMost))
	}
	if s.to != "" {
		missed = append(missed, s.found.write(s.to))
	}
	return errors.Join(missed...)
}

// enoughFiles says how many replicas it takes to have a descriptor for each edge.
func (s *storm) enoughFiles() error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	// Chance gives one replica some more than another; and while one starts later, all of its share.
	const spare = 1.1
	if most := float64(limit.Max) / spare; float64(s.edges)/float64(s.replicas) > most {
		return fmt.Errorf("%d edges want %d replicas: each may open %d files (ulimit -Hn)", s.edges,
			int(float64(s.edges)/most)+1, limit.Max)
	}
	return nil
}

func (s *storm) stop() {
	s.kill(s.herds)
	s.kill(s.clouds)
}

func (s *storm) kill(processes []*rig.Process) {
	for _, p := range processes {
		p.Kill()
	}
}

// startClouds starts all replicas, and returns when edges can join.
func (s *storm) startClouds() error {
	s.clouds = nil
	for _, r := range s.fleet.Replicas {
		p, err := r.Start()
		if err != nil {
			return err
		}
		s.clouds = append(s.clouds, p)
	}
	for i, r := range s.fleet.Replicas {
		for end := time.Now().Add(backWithin); ; time.Sleep(20 * time.Millisecond) {
			err := rig.Ready(r.Health())
			if err == nil {
				break
			}
			if time.Now().After(end) || !s.clouds[i].Alive() {
				return fmt.Errorf("the cloud is not ready: %w\n%s", err, s.clouds[i].Log())
			}
		}
	}
	return nil
}

// patience is how long it may take until all edges are there.
func (s *storm) patience() time.Duration {
	return backWithin * time.Duration((s.edges+backOf-1)/backOf)
}

// back waits until n have a session, for our patience at most, and returns how long that
// took since began.
func (s *storm) back(n int, began time.Time) time.Duration {
	for s.ready() < n && time.Since(began) < s.patience() {
		time.Sleep(sample)
	}
	return time.Since(began)
}
