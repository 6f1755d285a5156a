// Package audit writes the audit: a line of JSON for each event, who did what to which node.
//
//	log := audit.New(audit.Config{Path: "/var/log/tunnel/audit.json", Log: slog})
//	err := log.Open()
//	door.Sink.Audit = log.Record // a tunnel.Trail
//	defer log.Close()
//
// Record never waits for the disk: one goroutine, the writer, takes the events from a queue and writes them in
// order. If the disk or the pipe is too slow for long, the queue becomes full, and further events are lost. An event
// is also lost if the writer cannot write it. The log says so, and tunnel_audit_lost_total counts lost events. A
// process that is killed loses the events in the queue.
//
// The writer writes each line by one system call, so several processes may append to one file. file.go opens the file,
// and opens it again after a rotation. The package does not rotate, compress or sign files. The caller of Record must
// put no secret into an event.
package audit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Stdout is the path that means standard output.
const Stdout = "stdout"

// Config configures a Log.
type Config struct {
	Path   string       // path of the file; Stdout: standard output
	Stdout io.Writer    // nil: os.Stdout
	Log    *slog.Logger // for events that are lost
	// Existing is true for commands that root runs: Open then creates no file, and opens only a regular file that is not
	// a symbolic link. The cloud's user, who is not root, owns the folder and could put anything there.
	Existing bool
}

// Log is the audit of one process. Its methods are safe for concurrent use.
type Log struct {
	// Set once.
	cfg   Config
	ended chan struct{} // closed by the writer when it ends
	// lines is the queue. Record sends under mu; Close closes it under mu. Its capacity limits the memory for events
	// that wait for a stuck disk. A usual event has half a kilobyte.
	lines chan []byte

	lost    atomic.Uint64
	failing tunnel.Repeats

	mu      sync.Mutex // guards the following
	started bool       // the writer runs, or has ended
	closed  bool

	// Owned by the writer. Before the writer runs, Open uses it under mu.
	out output
}

const (
	// queueLen is how many events may wait for the writer.
	queueLen = 4096
	// drainTime is how long Close waits for the writer. A pod has 30 s to stop, and conns may use most of it.
	drainTime = 5 * time.Second
	// maxText is the longest text in an event, in bytes: callers choose paths and names.
	maxText = 1 << 10
)

var (
	errClosed = errors.New("the audit is closed")
	errFull   = fmt.Errorf("%d events wait already: the audit file is too slow, or stuck", queueLen)
)

// New returns a Log. It opens nothing and starts nothing: Open does, or else the first Record.
func New(cfg Config) *Log {
	if cfg.Stdout == nil {
		cfg.Stdout = os.Stdout
	}
	l := &Log{cfg: cfg, ended: make(chan struct{}), lines: make(chan []byte, queueLen)}
	l.out = output{cfg: cfg, failing: &l.failing}
	return l
}

// Open opens the file, and starts the writer. The folder must exist.
func (l *Log) Open() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.started || l.closed {
		return nil
	}
	if err := l.out.open(); err != nil {
		return err
	}
	l.startLocked()
	return nil
}

// startLocked starts the writer, if it has not been started. The caller holds mu.
func (l *Log) startLocked() {
	if !l.started {
		l.started = true
		go l.writeAll()
	}
}

// Close accepts no more events, waits at most five seconds until the queue is written, and closes the file. Its error
// says how many events are lost.
func (l *Log) Close() error {
	l.mu.Lock()
	if !l.closed {
		l.closed = true
		close(l.lines)
		if !l.started {
			close(l.ended)
		}
	}
	l.mu.Unlock()
	timeout := time.NewTimer(drainTime)
	defer timeout.Stop()
	select {
	case <-l.ended:
		return nil
	case <-timeout.C:
	}
	left := len(l.lines) + 1 // the events in the queue, and the one that the writer is writing
	l.lost.Add(uint64(left)) //nolint:gosec // a count
	return fmt.Errorf("%d events of the audit are lost: they could not be written within %v", left, drainTime)
}

// Record queues an event. It never blocks. It is a tunnel.Trail.
func (l *Log) Record(e tunnel.Event) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	e.Time = e.Time.UTC().Truncate(time.Millisecond)
	e.Seconds = math.Round(e.Seconds*1e6) / 1e6 // microseconds are enough
	for _, text := range []*string{&e.Caller, &e.Remote, &e.Target, &e.Method, &e.Path, &e.By, &e.Err} {
		*text = bounded(*text)
	}
	line, err := json.Marshal(e)
	if err == nil {
		err = l.queue(append(line, '\n'))
	}
	if err != nil {
		l.lose(err)
	}
}

// queue puts a line into the queue for the writer.
func (l *Log) queue(line []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return errClosed
	}
	l.startLocked()
	select {
	case l.lines <- line:
		return nil
	default:
		return errFull
	}
}

// lose counts a lost event, and logs it at a limited rate.
func (l *Log) lose(err error) {
	l.lost.Add(1)
	if skipped, ok := l.failing.Allow(err.Error()); ok {
		l.cfg.Log.Error("an event of the audit is lost", "err", err, "skipped", skipped)
	}
}

// writeAll is the writer. It ends when Close has closed the queue, and the queue is empty.
func (l *Log) writeAll() {
	defer close(l.ended)
	for line := range l.lines {
		if err := l.out.write(line); err != nil {
			l.lose(err)
		}
	}
	if err := l.out.close(); err != nil {
		l.cfg.Log.Error("closing the audit file", "err", err)
	}
}

// bounded returns text, cut off behind maxText bytes.
func bounded(text string) string {
	if len(text) <= maxText {
		return text
	}
	return strings.ToValidUTF8(text[:maxText], "") + "…"
}

// Collector returns the metric of lost events.
func (l *Log) Collector() prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "tunnel_audit_lost_total", Help: "Events of the audit that could not be written.",
	}, func() float64 { return float64(l.lost.Load()) })
}
