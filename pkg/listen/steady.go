package listen

import (
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"tunnel/pkg/tunnel"
)

// Transient reports whether an error of Accept says nothing about the listener: the next
// call may succeed.
func Transient(err error) bool { return short(err) || ofConnection(err) }

// short reports whether the process or the machine has run out of something.
func short(err error) bool {
	return isOne(err, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM)
}

// ofConnection reports whether err concerns the connection that Accept would have
// returned: accept(2), "Error handling", and a firewall's refusal (EPERM).
func ofConnection(err error) bool {
	return isOne(err, append(more(),
		syscall.ECONNABORTED, syscall.ECONNRESET, syscall.EINTR, syscall.ETIMEDOUT, syscall.EPERM, syscall.EPROTO,
		syscall.ENETDOWN, syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.EHOSTUNREACH, syscall.ENOPROTOOPT, syscall.EOPNOTSUPP)...)
}

func isOne(err error, of ...syscall.Errno) bool {
	e, ok := errors.AsType[syscall.Errno](err)
	return ok && slices.Contains(of, e)
}

const (
	// A pause after an error is firstPause, then twice the one before, up to longestPause.
	firstPause   = 5 * time.Millisecond
	longestPause = time.Second
	// mostAtOnce is how many errors of connections in a row are followed by no pause: a
	// sender of bad connections must not slow down the good ones. Beyond that the listener
	// itself may be the cause.
	mostAtOnce = 100
)

// Steady returns ln with an Accept that retries after a transient error. It warns once a
// minute. After Close it returns ln's own error.
func Steady(ln net.Listener, log *slog.Logger) net.Listener {
	return &steady{Listener: ln, log: log, closed: make(chan struct{})}
}

type steady struct {
	net.Listener
	log    *slog.Logger
	tired  tunnel.Limiter
	once   sync.Once
	closed chan struct{}
}

// Accept implements net.Listener.
func (s *steady) Accept() (net.Conn, error) {
	pause := firstPause
	for inARow := 1; ; inARow++ {
		c, err := s.Listener.Accept()
		if err == nil || !Transient(err) {
			return c, err
		}
		if skipped, ok := s.tired.Allow(); ok {
			s.log.Warn("cannot accept a connection, trying again", "frontend", s.Addr().String(), "err", err, "skipped", skipped)
		}
		if ofConnection(err) && inARow < mostAtOnce {
			continue
		}
		select {
		case <-time.After(pause):
		case <-s.closed: // then Accept says so
		}
		pause = min(2*pause, longestPause)
	}
}

// Close implements net.Listener.
func (s *steady) Close() error {
	err := s.Listener.Close()
	s.once.Do(func() { close(s.closed) })
	return err
}
