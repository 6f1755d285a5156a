package main

import (
	"os"
	"runtime"
	"runtime/metrics"
)

// roomyHeap lets a small heap grow by twice cloudBallast before garbage is collected. Go
// alone would collect each time that it has doubled: with a handful of nodes a dozen times
// a second under a flood of small requests, and each time for milliseconds on half of two
// processors, which others wait for.
//
// To that end there is a piece of memory that counts as live. Nobody ever touches it, so it
// takes up addresses and nothing else. When the heap is so large that there is room anyway,
// it goes: garbage would be memory that has no use. GOGC in the environment stands against
// all that: then it alone counts.
func roomyHeap() {
	if os.Getenv("GOGC") != "" {
		return
	}
	ballast := make([]byte, cloudBallast)
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	untilDone(func() (done bool) {
		metrics.Read(live)
		done = live[0].Value.Uint64() > 4*cloudBallast
		if !done {
			runtime.KeepAlive(ballast)
		}
		return done
	})
}

const cloudBallast = 32 << 20

// untilDone calls f after every garbage collection until it returns true.
func untilDone(f func() (done bool)) {
	type marker struct{ _ *byte } // not of those that Go packs together and frees late
	runtime.AddCleanup(new(marker), func(f func() bool) {
		if !f() {
			untilDone(f)
		}
	}, f)
}
