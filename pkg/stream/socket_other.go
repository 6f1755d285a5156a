//go:build !linux

package stream

import "time"

// Only Linux reports the state of a connection. On other systems every link counts as near, and only
// silence shows that a peer is gone: no answer to pings and heartbeats.

type pathInfo struct {
	trip, leastTrip time.Duration
	rate            uint64
	unsent          int
}

func pathOf(uintptr) (pathInfo, bool) { return pathInfo{}, false }

func boundUnsent(uintptr, int) {}

func hasRoom(uintptr) bool { return true }

func userTimeout(uintptr, time.Duration) error { return nil }

func boundBackoff(uintptr, time.Duration) {}

type acks struct {
	ended, underWay, missing bool
	last                     time.Duration
}

func acksOf(uintptr) (acks, bool) { return acks{}, false }

type sending struct {
	arrived            int64
	busy               time.Duration
	unsent, retries    int
	trip, shortestTrip time.Duration
}

func sendingOf(uintptr) (sending, bool) { return sending{}, false }

func boundRate(uintptr, int64) {}
