//go:build !linux

package stream

import (
	"errors"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Only Linux reports the state of a connection. On other systems every link counts as near, and only
// silence shows that a peer is gone: no answer to pings and heartbeats.

type pathInfo struct {
	trip, leastTrip time.Duration
	rate            uint64
	unsent          int
	segments        segments
}

func pathOf(uintptr) (pathInfo, bool) { return pathInfo{}, false }

func isMultipath(uintptr) bool { return false }

func pathsOf(uintptr) []tunnel.Path { return nil }

func congestionOf(uintptr) (string, error) { return "", errors.ErrUnsupported }

func setCongestion(uintptr, string) error { return errors.ErrUnsupported }

func tryCongestion(string) error { return errors.ErrUnsupported }

func boundUnsent(uintptr, int) {}

func hasRoom(uintptr) bool { return true }

func userTimeout(uintptr, time.Duration) error { return nil }

func boundBackoff(uintptr, time.Duration) {}

type acks struct {
	ended, underWay, missing, closed bool
	last                             time.Duration
}

func acksOf(uintptr) (acks, bool) { return acks{}, false }

type sending struct {
	arrived            int64
	busy               time.Duration
	unsent, retries    int
	trip, shortestTrip time.Duration
	segments           segments
}

func sendingOf(uintptr) (sending, bool) { return sending{}, false }

func boundRate(uintptr, int64) {}
