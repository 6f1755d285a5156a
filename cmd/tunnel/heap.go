package main

import (
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// spareHeap is how many bytes of garbage a small heap may hold beyond what Go's default allows.
const spareHeap = 32 << 20

// roomyHeap lets a small heap hold more garbage before Go collects it. By default Go collects
// when the heap has doubled. A cloud with a handful of nodes would then collect a dozen times
// a second under a flood of small requests. Each collection takes half of two processors for
// milliseconds, and delays other callers.
//
// Above 4*spareHeap bytes of live memory the default is roomy enough, and stays from then on.
// If GOGC is set in the environment, it alone decides.
func roomyHeap() {
	if os.Getenv("GOGC") != "" {
		return
	}
	debug.SetGCPercent(gcPercent(0, 0))
	size := []metrics.Sample{
		{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/stack:bytes"}, {Name: "/gc/scan/globals:bytes"},
	}
	afterEachGC(func() (done bool) {
		metrics.Read(size)
		live := size[0].Value.Uint64()
		debug.SetGCPercent(gcPercent(live, size[1].Value.Uint64()+size[2].Value.Uint64()))
		return live > 4*spareHeap
	})
	runtime.GC() // so that the first conns use the memory of what the start has left
}

// gcPercent returns the GOGC at which the heap may hold spareHeap bytes more garbage than at GOGC=100; 100 for a large
// heap. The runtime starts a collection at live + (live + roots) * GOGC/100 bytes of heap; roots are
// stacks and globals (https://go.dev/doc/gc-guide).
func gcPercent(live, roots uint64) int {
	const least = 4 << 20 // bytes: the runtime starts no collection below least * GOGC/100
	if live > 4*spareHeap {
		return 100
	}
	return 100 + int(math.Round(100*spareHeap/float64(max(live+roots, least))))
}

// afterEachGC calls f after every garbage collection until f returns true.
func afterEachGC(f func() (done bool)) {
	type marker struct{ _ *byte } // a pointer keeps it out of the tiny allocator, which frees late
	runtime.AddCleanup(new(marker), func(f func() bool) {
		if !f() {
			afterEachGC(f)
		}
	}, f)
}
