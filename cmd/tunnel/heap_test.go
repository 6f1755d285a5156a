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

// It is about the process that it runs in, so that is one of its own.
func TestRoomyHeap(t *testing.T) {
	if os.Getenv("TUNNEL_HEAP_TEST") != "" {
		printHeap()
		return
	}
	for _, c := range []struct {
		gogc              string
		roomy, roomyLater bool // before and while much lives
	}{{"", true, false}, {"100", false, false}} {
		t.Run("GOGC="+c.gogc, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.run=^TestRoomyHeap$")
			cmd.Env = append(os.Environ(), "TUNNEL_HEAP_TEST=1", "GOGC="+c.gogc)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			var much, before, later int
			if _, err := fmt.Sscanf(string(out[strings.Index(string(out), "heap "):]), "heap %d %d %d", &much, &before, &later); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if roomy := before > 2*cloudBallast; roomy != c.roomy {
				t.Errorf("the heap is collected at %d bytes", before)
			}
			if roomy := later > 2*(much+cloudBallast/2); roomy != c.roomyLater {
				t.Errorf("while %d bytes live, it is collected at %d", much, later)
			}
		})
	}
}

// printHeap prints when the heap is collected, and how much lives later, and when then.
func printHeap() {
	roomyHeap()
	collect()
	goal := heapGoal()
	much := make([]byte, 5*cloudBallast)
	collect()
	collect() // what is let go in the first is gone in the second
	fmt.Println("heap", len(much), goal, heapGoal())
	runtime.KeepAlive(much)
}

// collect collects and waits until what is called thereafter has been called.
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
