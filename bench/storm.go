package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
)

// Names of the storm's figures.
const (
	nodeName      = "memory of the cloud for an idle node"
	stormBackName = "all edges are back after"
)

// storm has thousands of edges lose their cloud: bench/storm, a program of its own.
func (b *bench) storm(edges int) error {
	program, found := b.file("storm"), b.file("storm.json")
	build := exec.Command("go", "build", "-o", program, "./bench/storm")
	build.Dir = b.top
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("building the storm: %w: %s", err, out)
	}
	run := exec.Command(program, "-edges", strconv.Itoa(edges), "-json", found)
	run.Dir, run.Stdout, run.Stderr = b.top, os.Stdout, os.Stderr
	fmt.Println()
	ended := run.Run()
	text, err := os.ReadFile(found)
	if err != nil {
		return fmt.Errorf("the storm has found nothing: %w", errors.Join(ended, err))
	}
	var s struct{ PerNode, Peak, Half, Most, All, JoinCPU, JoinWire, IdleWire float64 }
	if err := json.Unmarshal(text, &s); err != nil {
		return err
	}
	if ended != nil {
		ended = fmt.Errorf("%w: the storm: %w", errNotKept, ended)
	}
	b.report.addWay(ways()[0], b, nil)
	b.report.add(stormPart, []figure{
		{nodeName, "KiB", 1, true}, {"memory of the cloud at its peak", "MiB", 1, true},
		{"half of the edges are back after", "s", 1, true}, {"99 % are back after", "s", 1, true},
		{stormBackName, "s", 1, true},
		{"CPU of the cloud for an edge that comes back", "ms", 1, true},
		{"wire bytes for an edge that comes back", "KiB", 1, true},
		{"wire bytes of an idle node", "B/s", 1, true},
	}, ours, []float64{
		s.PerNode / 1024, s.Peak / mib, s.Half, s.Most, s.All, s.JoinCPU * milli, s.JoinWire / 1024, s.IdleWire,
	}, nil)
	b.report.Edges = edges
	return ended
}
