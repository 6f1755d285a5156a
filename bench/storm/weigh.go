package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"regexp"
	"strconv"
	"time"

	"tunnel.example/tunnel/test/rig"
)

// weight is what all processes have used up to a moment, the replicas together and the
// edges together.
type weight struct {
	cloud, edges       rig.Memory
	cloudCPU, edgesCPU time.Duration
	nodes, peers       int64 // bytes on the wire, both ways: of edges, and between replicas
}

func (s *storm) weigh() (w weight, err error) {
	var errs []error
	for _, side := range []struct {
		processes []*rig.Process
		memory    *rig.Memory
		cpu       *time.Duration
	}{{s.clouds, &w.cloud, &w.cloudCPU}, {s.herds, &w.edges, &w.edgesCPU}} {
		for _, p := range side.processes {
			m, err1 := p.Memory()
			cpu, err2 := p.CPU()
			errs = append(errs, err1, err2)
			side.memory.Now += m.Now
			side.memory.Peak += m.Peak
			*side.cpu += cpu
		}
	}
	for _, r := range s.fleet.Replicas {
		nodes, peers, err := wire(r.GRPC())
		errs = append(errs, err)
		w.nodes += nodes
		w.peers += peers
	}
	return w, errors.Join(errs...)
}

// sayJoins says what a join of every edge has cost, between two moments.
func (s *storm) sayJoins(before, after weight) {
	n, ms := float64(s.edges), 1000.
	s.found.JoinCPU = (after.cloudCPU - before.cloudCPU).Seconds() / n
	s.found.JoinWire = float64(after.nodes) / n // of connections that did not exist before
	fmt.Printf("a join: %.2f ms of processor time in the cloud, %.2f ms in the edges, %.0f bytes on the wire",
		s.found.JoinCPU*ms, (after.edgesCPU-before.edgesCPU).Seconds()*ms/n, s.found.JoinWire)
	if s.replicas > 1 {
		fmt.Printf(", %.0f bytes to each other replica", float64(after.peers-before.peers)/n/float64(s.replicas-1))
	}
	fmt.Println()
}

// sayCalm measures and says what nodes cost while nothing happens, and returns what all
// weighs then; bare is what it weighed without them.
func (s *storm) sayCalm(bare weight) (weight, error) {
	before, err := s.weigh()
	if err != nil {
		return before, err
	}
	began := time.Now()
	time.Sleep(s.calm)
	after, err := s.weigh()
	if err != nil {
		return before, err
	}
	n := float64(s.edges)
	seconds := time.Since(began).Seconds() * n // of nodes
	s.found.PerNode = float64(after.cloud.Now-bare.cloud.Now) / n
	s.found.IdleCPU = (after.cloudCPU - before.cloudCPU).Seconds() / seconds
	s.found.IdleWire = float64(after.nodes-before.nodes) / seconds
	fmt.Printf("an idle node: %.1f KiB of memory in the cloud (%d MiB in all), %.1f KiB in the edges' processes, %.1f "+
		"bytes/s on the wire\n",
		s.found.PerNode/1024, after.cloud.Now>>20, float64(after.edges.Now)/1024/n, s.found.IdleWire)
	const ms, thousand = 1000, 1000
	fmt.Printf("1,000 idle nodes: %.1f ms of processor time a second in the cloud, %.1f in the edges\n",
		s.found.IdleCPU*ms*thousand, (after.edgesCPU-before.edgesCPU).Seconds()/seconds*ms*thousand)
	return after, nil
}

// headers is what IPv4, TCP and its timestamps take of each packet.
const headers = 20 + 20 + 12

var counter = regexp.MustCompile(`\b(bytes_sent|bytes_received|segs_out|segs_in):(\d+)`)

// wire returns the bytes that have passed, both ways, on the connections to a replica
// that are open now: payload of TCP, and the headers of its packets. Those of other
// replicas come from 127.0.0.1, those of edges from elsewhere.
func wire(replica string) (nodes, peers int64, err error) {
	_, port, err := net.SplitHostPort(replica)
	if err != nil {
		return 0, 0, err
	}
	out, err := exec.Command("ss", "-tinHO", "state", "established", "sport", "=", ":"+port).Output()
	if err != nil {
		return 0, 0, fmt.Errorf("asking ss(8), of iproute2: %w", err)
	}
	for line := range bytes.Lines(out) {
		fields := bytes.Fields(line) // two queues, the local address, the remote one
		if len(fields) < 4 {
			return 0, 0, fmt.Errorf("ss(8) says %q", line)
		}
		into := &nodes
		if bytes.Contains(fields[3], []byte("127.0.0.1]")) || bytes.HasPrefix(fields[3], []byte("127.0.0.1:")) {
			into = &peers
		}
		for _, m := range counter.FindAllSubmatch(line, -1) {
			n, err := strconv.ParseInt(string(m[2]), 10, 64)
			if err != nil {
				return 0, 0, err
			}
			if m[1][0] == 's' {
				n *= headers
			}
			*into += n
		}
	}
	return nodes, peers, nil
}
