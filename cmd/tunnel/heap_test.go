package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/metrics"
	"strings"
	"testing"
)

// The test changes how its process collects garbage, so each case runs in a process of its own.
func TestRoomyHeap(t *testing.T) {
	if os.Getenv("TUNNEL_HEAP_TEST") != "" {
		printHeap()
		return
	}
	for _, c := range []struct {
		gogc              string
		roomy, roomyLater bool // with a small heap, and with a large one
	}{{"", true, false}, {"100", false, false}} {
		t.Run("GOGC="+c.gogc, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.run=^TestRoomyHeap$")
			cmd.Env = append(os.Environ(), "TUNNEL_HEAP_TEST=1", "GOGC="+c.gogc)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			var much, before, some, later int
			_, heap, _ := strings.Cut(string(out), "heap ")
			if _, err := fmt.Sscanf(heap, "%d %d %d %d", &much, &before, &some, &later); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			for _, goal := range []struct {
				held, goal int
				roomy      bool
			}{{0, before, c.roomy}, {spareHeap, some, c.roomy}, {much, later, c.roomyLater}} {
				if roomy := goal.goal > 2*goal.held+spareHeap; roomy != goal.roomy {
					t.Errorf("while %d bytes live, Go collects at %d", goal.held, goal.goal)
				}
			}
		})
	}
}

// printHeap prints the size of a large heap, and the heap sizes at which Go collects: at first,
// with spareHeap live bytes, and with the large heap, for which roomyHeap does nothing.
func printHeap() {
	roomyHeap()
	collect()
	before := heapGoal()
	some := make([]byte, spareHeap)
	collect()
	collect() // the first collection has called roomyHeap's hook, which has set the goal
	goal := heapGoal()
	runtime.KeepAlive(some)
	much := make([]byte, 5*spareHeap)
	collect()
	collect()
	fmt.Println("heap", len(much), before, goal, heapGoal())
	runtime.KeepAlive(much)
}

// collect collects garbage, and returns after the cleanups that were due before it.
func collect() {
	called := make(chan struct{})
	func() { runtime.AddCleanup(&struct{ _ *byte }{}, func(c chan struct{}) { close(c) }, called) }()
	runtime.GC()
	<-called
}

func heapGoal() uint64 {
	goal := []metrics.Sample{{Name: "/gc/heap/goal:bytes"}}
	metrics.Read(goal)
	return goal[0].Value.Uint64()
}
