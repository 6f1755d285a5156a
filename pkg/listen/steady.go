package listen

import (
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Transient reports whether an error of Accept says nothing about the listener itself: the next
// call may succeed.
func Transient(err error) bool { return isShortage(err) || isOfConn(err) }

// isShortage reports whether the process or the machine has run out of descriptors or memory.
func isShortage(err error) bool {
	return isOneOf(err, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM)
}

// isOfConn reports whether err concerns the connection that Accept would have returned. These are
// the errors of accept(2), section "Error handling", and a firewall's refusal (EPERM).
func isOfConn(err error) bool {
	return isOneOf(err, append(platformErrnos(),
		syscall.ECONNABORTED, syscall.ECONNRESET, syscall.EINTR, syscall.ETIMEDOUT, syscall.EPERM, syscall.EPROTO,
		syscall.ENETDOWN, syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.EHOSTUNREACH,
		syscall.ENOPROTOOPT, syscall.EOPNOTSUPP)...)
}

func isOneOf(err error, errnos ...syscall.Errno) bool {
	e, ok := errors.AsType[syscall.Errno](err)
	return ok && slices.Contains(errnos, e)
}

const (
	// The first pause after an error is minPause. Each further pause is twice as long, up to
	// maxPause.
	minPause = 5 * time.Millisecond
	maxPause = time.Second
	// maxWithoutPause is how many errors of isOfConn in a row cause no pause: a peer with bad
	// connections must not slow down the others. After more errors, the listener itself may be
	// the cause.
	maxWithoutPause = 100
)

// Steady returns ln with an Accept that retries after a transient error. It logs one warning a
// minute at most. After Close, Accept returns ln's own error.
func Steady(ln net.Listener, log *slog.Logger) net.Listener {
	return &steady{Listener: ln, log: log, closed: make(chan struct{})}
}

// steady is the listener that Steady returns.
type steady struct {
	net.Listener
	log      *slog.Logger
	warnings tunnel.Limiter // limits the warning to one a minute
	once     sync.Once      // closes closed once
	closed   chan struct{}  // closed by Close; ends a pause
}

// Accept implements net.Listener.
func (s *steady) Accept() (net.Conn, error) {
	pause := minPause
	for failures := 1; ; failures++ {
		c, err := s.Listener.Accept()
		if err == nil || !Transient(err) {
			return c, err
		}
		if skipped, ok := s.warnings.Allow(); ok {
			s.log.Warn("cannot accept a connection, trying again",
				"frontend", s.Addr().String(), "err", err, "skipped", skipped)
		}
		if isOfConn(err) && failures < maxWithoutPause {
			continue
		}
		select {
		case <-time.After(pause):
		case <-s.closed: // the next Accept returns the error of the closed listener
		}
		pause = min(2*pause, maxPause)
	}
}

// Close implements net.Listener.
func (s *steady) Close() error {
	err := s.Listener.Close()
	s.once.Do(func() { close(s.closed) })
	return err
}
