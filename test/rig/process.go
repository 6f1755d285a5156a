package rig

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"

	"tunnel.example/tunnel/internal/logline"
)

// Log is the output of a process, and of those that take its place. A line of a log that breaks the rules of
// package logline ends this program by a panic: no test that starts the process may overlook it.
type Log struct {
	mu      sync.Mutex // guards the following
	text    bytes.Buffer
	checked int // bytes of text whose lines have been checked
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, err := l.text.Write(p)
	// The last line may go on with the next Write.
	fresh := l.text.Bytes()[l.checked:]
	whole := fresh[:bytes.LastIndexByte(fresh, '\n')+1]
	l.checked += len(whole)
	for line := range bytes.Lines(whole) {
		if fault := logline.Check(string(line)); fault != nil {
			panic(fmt.Sprintf("a line of the log of a process: %v:\n%s", fault, line))
		}
	}
	return n, err
}

// String returns everything up to now.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Process is a child process.
type Process struct {
	// Set once.
	pid  int
	log  *Log
	done chan struct{} // closed when the process has ended; then state is set

	process *os.Process
	state   *os.ProcessState
}

// Start starts a program. What it prints goes to log.
func Start(log *Log, path string, args ...string) (*Process, error) {
	return StartIn(nil, log, path, args...)
}

// StartIn is Start in another network; nil is our own.
func StartIn(network *Network, log *Log, path string, args ...string) (*Process, error) {
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL,
		Setpgid:   true, // Ctrl-C is for us
	}
	p := &Process{log: log, done: make(chan struct{})}
	started := make(chan error, 1) // one send, which is waited for
	go func() {
		// Pdeathsig is about the thread that has started the child. Without an unlock
		// this one ends with the goroutine, after the child.
		runtime.LockOSThread()
		err := network.enter()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			started <- err
			return
		}
		p.process, p.pid = cmd.Process, cmd.Process.Pid
		started <- nil
		cmd.Wait() //nolint:errcheck // ProcessState keeps the outcome
		p.state = cmd.ProcessState
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %s: %w", path, err)
	}
	return p, nil
}

// PID returns the process id.
func (p *Process) PID() int { return p.pid }

// Log returns what the process has printed, and what those before it had.
func (p *Process) Log() *Log { return p.log }

// Done is closed when the process has ended and all of its output is in the log.
func (p *Process) Done() <-chan struct{} { return p.done }

// Alive reports whether the process has not ended.
func (p *Process) Alive() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Signal sends a signal. A process that has ended takes none: that is an error.
func (p *Process) Signal(s syscall.Signal) error { return p.process.Signal(s) }

// Kill ends the process as a crash does and waits until it has ended.
func (p *Process) Kill() {
	p.process.Kill() //nolint:errcheck // it fails only if the process has ended
	<-p.done
}

// ExitCode returns the exit code, -1 when a signal ended it. Call it after Done.
func (p *Process) ExitCode() int { return p.state.ExitCode() }
