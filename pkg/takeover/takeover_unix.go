//go:build unix

package takeover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Successor stands in the old process for the new process. Only one goroutine may call its methods.
type Successor struct {
	// Set once.
	cmd   *exec.Cmd
	conn  net.Conn
	in    *json.Decoder
	out   *json.Encoder
	ended chan struct{} // closed when the new process has ended
	// endpoints is Config.Endpoints.
	endpoints func() []string

	failed error // how the new process has ended; set before ended is closed
}

// Start starts the new process, and passes it copies of the sockets.
func Start(cfg Config) (*Successor, error) {
	ours, theirs, err := pair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	sockets, err := cfg.Sockets.Copies()
	if err != nil {
		ours.Close()
		return nil, fmt.Errorf("copying the sockets: %w", err)
	}
	defer listen.CloseCopies(sockets)
	s := &Successor{
		conn: ours, in: json.NewDecoder(ours), out: json.NewEncoder(ours), ended: make(chan struct{}),
		endpoints: cfg.Endpoints,
	}
	s.cmd = &exec.Cmd{
		Path: cfg.Program, Args: cfg.Args, Env: append(cfg.Env, Variable+"="+Value),
		Stdout: os.Stdout, Stderr: os.Stderr, ExtraFiles: []*os.File{theirs},
	}
	o := &offer{Instance: cfg.Instance}
	for _, one := range sockets {
		o.Sockets = append(o.Sockets, one.Name)
		s.cmd.ExtraFiles = append(s.cmd.ExtraFiles, one.File)
	}
	if cfg.Sibling {
		s.cmd.SysProcAttr = sibling()
	}
	if err = s.cmd.Start(); err != nil {
		ours.Close()
		return nil, err
	}
	go func() {
		defer close(s.ended)
		s.failed = s.wait()
	}()
	if err = s.out.Encode(message{Offer: o}); err != nil {
		err = s.why(err)
		s.Kill()
		return nil, err
	}
	return s, nil
}

// wait waits until the new process has ended, and says how it has ended.
func (s *Successor) wait() error {
	if s.cmd.SysProcAttr == nil {
		s.cmd.Wait() //nolint:errcheck // ProcessState says how the process has ended
		return fmt.Errorf("the new process has ended: %s", s.cmd.ProcessState)
	}
	// The kernel tells only the parent how a process has ended, and this process is not the parent of a sibling. It polls
	// a pidfd, which is readable when the sibling has ended (pidfd_open(2)). Linux before 5.4 has no pidfds: then wait
	// returns at once.
	s.cmd.Process.WithHandle(func(pidfd uintptr) { //nolint:errcheck // it fails only without pidfds
		fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}} //nolint:gosec // a file descriptor
		for {
			if _, err := unix.Poll(fds, -1); !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
	return errors.New("the new process has ended; see its log")
}

// pair returns the two ends of a socketpair. theirs is for the child.
func pair() (ours net.Conn, theirs *os.File, err error) {
	syscall.ForkLock.RLock()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err == nil {
		unix.CloseOnExec(fds[0])
		unix.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	first := os.NewFile(uintptr(fds[0]), "takeover") //nolint:gosec // not negative
	theirs = os.NewFile(uintptr(fds[1]), "takeover") //nolint:gosec // not negative
	ours, err = net.FileConn(first)
	first.Close() // ours is a copy of first
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

// PID returns the id of the new process.
func (s *Successor) PID() int { return s.cmd.Process.Pid }

// Ready waits until the new process has opened all that it needs.
func (s *Successor) Ready(ctx context.Context) error {
	return s.want(ctx, func(m *message) bool { return m.Ready })
}

// Go tells the new process to accept edges. nodes are the nodes whose edges are about to connect.
func (s *Successor) Go(nodes []tunnel.NodeName) error {
	if err := s.conn.SetWriteDeadline(time.Now().Add(answerTime)); err != nil {
		return s.why(err)
	}
	m := message{Go: true, Nodes: nodes}
	if s.endpoints != nil {
		m.Endpoints = s.endpoints()
	}
	if err := s.out.Encode(m); err != nil {
		return s.why(err)
	}
	return nil
}

// answerTime is how long the other process may take to read a line. It is waiting for the line, so it reads at once.
const answerTime = 5 * time.Second

// Serving waits until the new process accepts callers. From then on the new process owns the sockets.
func (s *Successor) Serving(ctx context.Context) error {
	return s.want(ctx, func(m *message) bool { return m.Serving })
}

// want waits for the next message, as the function want does.
func (s *Successor) want(ctx context.Context, expected func(*message) bool) error {
	stop := context.AfterFunc(ctx, func() { s.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err := want(s.in, expected)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("the new process took too long: %w", context.Cause(ctx))
	}
	return s.why(err)
}

// why returns a better error for err, if err comes from the end of the new process: how the process has ended.
func (s *Successor) why(err error) error {
	if err == nil || !errors.Is(err, errEnded) && !errors.Is(err, syscall.EPIPE) {
		return err
	}
	select {
	case <-s.ended:
		return s.failed
	case <-time.After(answerTime): // the new process has closed its end of the pair, and runs
		return err
	}
}

// Release closes the connection to the new process. The new process continues.
func (s *Successor) Release() { s.conn.Close() }

// Kill ends the new process.
func (s *Successor) Kill() {
	s.cmd.Process.Kill() //nolint:errcheck // it fails only if the process has ended already
	<-s.ended
	s.conn.Close() // last: if a new process that still runs saw the close, it would think that this one ended, and serve
}

// Predecessor stands in the new process for the old process. nil: there is no old process.
type Predecessor struct {
	// Set once.
	sockets  *listen.Sockets
	instance string
	conn     net.Conn
	in       *json.Decoder
	out      *json.Encoder

	endpoints []string // set by Ready

	over sync.Once // sends the last message and closes conn
}

// Join connects to the old process, from which this process takes over. value is the value of [Variable]. If value is
// "", there is no old process, and Join returns nil.
func Join(value string) (*Predecessor, error) {
	if value == "" {
		return nil, nil
	}
	if value != Value {
		return nil, ErrVersion
	}
	file := os.NewFile(pairFile, "takeover")
	conn, err := net.FileConn(file)
	file.Close()
	if err != nil {
		return nil, fmt.Errorf("%s is set, but no running process started this one: unset it: %w", Variable, err)
	}
	p := &Predecessor{conn: conn, in: json.NewDecoder(conn), out: json.NewEncoder(conn)}
	m, err := want(p.in, func(m *message) bool { return m.Offer != nil })
	if err != nil {
		conn.Close()
		return nil, err
	}
	sockets := m.Offer.sockets()
	for _, one := range sockets {
		unix.CloseOnExec(int(one.File.Fd()))
	}
	p.sockets, p.instance = listen.Inherit(sockets), m.Offer.Instance
	return p, nil
}

// Ready tells the old process that this one is ready, and waits until the old process calls Go. It returns the nodes of
// Go. If the old process has ended, Ready returns no nodes and no error: this process serves then.
func (p *Predecessor) Ready(ctx context.Context) (nodes []tunnel.NodeName, err error) {
	stop := context.AfterFunc(ctx, func() { p.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if err = p.out.Encode(message{Ready: true}); err != nil {
		return nil, nil
	}
	m, err := want(p.in, func(m *message) bool { return m.Go })
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, errEnded):
		return nil, nil
	case err != nil:
		return nil, err
	}
	p.endpoints = m.Endpoints
	return m.Nodes, nil
}

// Serving tells the old process that this one serves. The old process then drains.
func (p *Predecessor) Serving() { p.last(message{Serving: true}) }

// Failed tells the old process why this one ends. After Serving, Failed does nothing.
func (p *Predecessor) Failed(why *Failure) {
	if p != nil {
		p.last(message{Failed: why})
	}
}

func (p *Predecessor) last(m message) {
	p.over.Do(func() {
		p.conn.SetWriteDeadline(time.Now().Add(answerTime))
		p.out.Encode(m) //nolint:errcheck // it fails only if the old process has ended
		p.conn.Close()
	})
}
