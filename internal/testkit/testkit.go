// Package testkit has what the tests of several packages share: waiting for a condition, reading a
// log, and serving as a target.
//
//	log, text := testkit.NewLog()
//	go door.Run(ctx, log)
//	testkit.Eventually(t, "the log says why", func() bool { return strings.Contains(text.String(), "refused") })
//
// Only tests import it (test/arch). Of this module it knows logline, which checks each line, and freeport, which
// chooses ports. test/rig starts processes.
package testkit

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/logline"
)

const (
	// patience is how long Eventually waits. Conditions on loopback hold within milliseconds; the
	// rest is for a busy machine and the race detector.
	patience = time.Minute
	// poll is for conditions that read the memory of the test's own process.
	poll = time.Millisecond
	// pollSlowly is for conditions that ask other processes or the network. Polling must not slow
	// down the processes under test.
	pollSlowly = 20 * time.Millisecond
)

// Eventually waits until ok returns true. After a minute it fails the test with what. It works on the
// fake clock of testing/synctest as well.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for started := time.Now(); !ok(); time.Sleep(poll) {
		if time.Since(started) > patience {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

// Within waits until check returns nil, and returns how long that took. When check still fails
// after limit, Within fails the test with what and check's last error. It calls check at least once.
func Within(t testing.TB, limit time.Duration, what string, check func() error) time.Duration {
	t.Helper()
	started := time.Now()
	if err := Poll(limit, check); err != nil {
		t.Fatalf("not within %s: %s: %v", limit, what, err)
	}
	return time.Since(started)
}

// Poll waits until check returns nil. When check still fails after limit, Poll returns check's last error. It calls
// check at least once.
func Poll(limit time.Duration, check func() error) error {
	for started := time.Now(); ; time.Sleep(pollSlowly) {
		if err := check(); err == nil || time.Since(started) > limit {
			return err
		}
	}
}

// Log collects everything written to it, for a test to read. The zero value is empty and ready for
// use. Its methods are safe for concurrent use. A line of a log that breaks the rules of package logline ends
// the test program: the code under test could recover from a panic.
type Log struct {
	mu   sync.Mutex // guards the following
	text bytes.Buffer
}

// NewLog returns a logger for records of every level, and the Log that collects them.
func NewLog() (*slog.Logger, *Log) {
	l := new(Log)
	return slog.New(Handler(l)), l
}

// Handler returns a handler that writes records of every level to l in the format text, and checks them in the
// format json.
func Handler(l *Log) slog.Handler {
	opts := &slog.HandlerOptions{Level: slog.LevelDebug}
	return slog.NewMultiHandler(slog.NewTextHandler(l, opts), slog.NewJSONHandler(checker{}, opts))
}

// checker checks the lines that are written to it.
type checker struct{}

// Write implements io.Writer.
func (checker) Write(p []byte) (int, error) {
	check(p)
	return len(p), nil
}

// check ends the test program if one of the lines breaks the rules. A handler writes whole lines.
func check(lines []byte) {
	for line := range bytes.Lines(lines) {
		if err := logline.Check(string(line)); err != nil {
			fmt.Fprintf(os.Stderr, "FAIL: a line of the log: %v:\n%s%s\n", err, line, debug.Stack())
			os.Exit(1)
		}
	}
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	check(p)
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns everything written so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Lines returns the lines that contain every one of words.
func (l *Log) Lines(words ...string) (found []string) {
	for line := range strings.Lines(l.String()) {
		missing := func(w string) bool { return !strings.Contains(line, w) }
		if !slices.ContainsFunc(words, missing) {
			found = append(found, line)
		}
	}
	return found
}
