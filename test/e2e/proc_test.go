//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// An exitError says that a command ended by itself with a code other than 0: what a user of a dead node should see. A
// command that had to be killed because time was up yields another error.
type exitError struct {
	command string
	code    int
	stderr  string
}

func (e *exitError) Error() string {
	return fmt.Sprintf("%s: exit code %d: %s", e.command, e.code, strings.TrimSpace(e.stderr))
}

// exitCode returns the code that a command ended with by itself; ok is false for every other error.
func exitCode(err error) (code int, ok bool) {
	var e *exitError
	if errors.As(err, &e) {
		return e.code, true
	}
	return 0, false
}

// A buffer collects output and tells who waits for it.
type buffer struct {
	mu      sync.Mutex // guards the following
	data    bytes.Buffer
	changed chan struct{} // closed by the next write
}

func newBuffer() *buffer { return &buffer{changed: make(chan struct{})} }

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.changed)
	b.changed = make(chan struct{})
	return b.data.Write(p)
}

func (b *buffer) String() string {
	s, _ := b.get()
	return s
}

func (b *buffer) get() (string, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.data.String(), b.changed
}

// command makes a command that leads a process group of its own: a Ctrl-C at the terminal does not
// reach it, and killing it when ctx is done takes everything with it that it started.
func command(ctx context.Context, path string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second // what escaped from the group and holds a pipe open does not hold us
	return cmd
}

// A process is a command that was started. It ends by itself, by kill, or with the context of its command.
type process struct {
	name   string
	cmd    *exec.Cmd
	out    *buffer // stdout, and all of a terminal
	stderr *buffer
	cut    atomic.Bool   // its context was done before it ended
	done   chan struct{} // closed when it has ended; err is set before
	err    error
}

// start starts cmd. Its output goes to the process's buffers unless cmd has its own.
func start(cmd *exec.Cmd) (*process, error) { return startWith(cmd, func(io.Writer) {}) }

// startWith is start, with a function that brings more output and returns when there is no more. It
// is waited for: all that a process has printed is there when it is done.
func startWith(cmd *exec.Cmd, more func(out io.Writer)) (*process, error) {
	p := &process{
		name:   strings.Join(append([]string{filepath.Base(cmd.Path)}, cmd.Args[1:]...), " "),
		cmd:    cmd,
		out:    newBuffer(),
		stderr: newBuffer(),
		done:   make(chan struct{}),
	}
	if cmd.Stdout == nil {
		cmd.Stdout = p.out
	}
	if cmd.Stderr == nil {
		cmd.Stderr = p.stderr
	}
	cancel := cmd.Cancel
	cmd.Cancel = func() error { p.cut.Store(true); return cancel() }
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", p.name, err)
	}
	var copying sync.WaitGroup
	copying.Go(func() { more(p.out) })
	go func() {
		defer close(p.done)
		err := cmd.Wait()
		copying.Wait()
		p.err = p.result(err)
	}()
	return p, nil
}

// result turns what Wait said into nil, an *exitError or another error.
func (p *process) result(err error) error {
	var exit *exec.ExitError
	switch {
	case p.cut.Load():
		return fmt.Errorf("%s: still running when time was up; stderr: %q", p.name, p.stderr.String())
	case err == nil:
		return nil
	case errors.As(err, &exit) && exit.Exited():
		return &exitError{p.name, exit.ExitCode(), p.stderr.String() + tail(p.out.String(), 5)}
	default:
		return fmt.Errorf("%s: %w; stderr: %q", p.name, err, p.stderr.String())
	}
}

// kill is kill -9 for the process and what it started. It waits until they are gone.
func (p *process) kill() {
	syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// until waits until match is true of what the process has printed. It fails when the process ends before, or ctx.
func (p *process) until(ctx context.Context, match func(out string) bool) error {
	for {
		out, changed := p.out.get()
		if match(out) {
			return nil
		}
		select {
		case <-changed:
		case <-p.done:
			if match(p.out.String()) {
				return nil
			}
			if p.err != nil {
				return p.err
			}
			return fmt.Errorf("%s: ended with code 0, having printed only %q", p.name, tail(p.out.String(), 5))
		case <-ctx.Done():
			return fmt.Errorf("%s: time was up, having printed only %q; stderr: %q", p.name, tail(out, 5), p.stderr.String())
		}
	}
}

// endsWithin fails the test unless the process ends by itself in time; it returns the process's error.
func (p *process) endsWithin(t *testing.T, d time.Duration) error {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(d):
		t.Errorf("%s: still running after %v", p.name, d)
		p.kill()
	}
	return p.err
}

// run starts cmd with stdin and returns its stdout.
func run(cmd *exec.Cmd, stdin io.Reader) (string, error) {
	cmd.Stdin = stdin
	p, err := start(cmd)
	if err != nil {
		return "", err
	}
	<-p.done
	return p.out.String(), p.err
}

// eventually calls f until it returns nil. After the time it fails the test with f's last error. It
// returns how long it took.
func eventually(ctx context.Context, t *testing.T, within time.Duration, what string,
	f func(ctx context.Context) error) time.Duration {
	t.Helper()
	began := time.Now()
	ctx, cancel := context.WithDeadline(ctx, began.Add(within))
	defer cancel()
	for {
		err := f(ctx)
		if err == nil {
			return time.Since(began)
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: not within %v: %v", what, within, err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// tail returns the last n lines of s.
func tail(s string, n int) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// mark returns this process's environment and the variable by which down.sh finds what belongs to the cluster.
func mark(run string, more ...string) []string {
	return append(append(os.Environ(), "TUNNEL_E2E="+run), more...)
}
