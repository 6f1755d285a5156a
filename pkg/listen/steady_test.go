package listen

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// script is a listener whose Accept returns the errors in errs, and after them connections.
type script struct {
	net.Listener
	errs   []error
	calls  int
	closed atomic.Bool
}

func (s *script) Accept() (net.Conn, error) {
	s.calls++
	if s.closed.Load() {
		return nil, net.ErrClosed
	}
	if len(s.errs) > 0 {
		err := s.errs[0]
		s.errs = s.errs[1:]
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", err)}
	}
	c, _ := net.Pipe()
	return c, nil
}

func (s *script) Close() error   { s.closed.Store(true); return nil }
func (s *script) Addr() net.Addr { return &net.TCPAddr{} }

func errs(n int, all ...error) (list []error) {
	for range n {
		list = append(list, all...)
	}
	return list
}

func TestSteady(t *testing.T) {
	for name, tc := range map[string]struct {
		errs []error
		want error         // returned by Accept instead of a connection
		took time.Duration // total length of the pauses
	}{
		"nothing is wrong": {nil, nil, 0},
		"accept(2)'s errors of a connection": {[]error{
			syscall.ENETDOWN, syscall.EPROTO, syscall.ENOPROTOOPT, syscall.EHOSTDOWN,
			syscall.EHOSTUNREACH, syscall.EOPNOTSUPP, syscall.ENETUNREACH, syscall.ECONNABORTED, syscall.EPERM,
		}, nil, 0},
		"many of them":   {errs(maxWithoutPause+1, syscall.EHOSTUNREACH), nil, 2*minPause + minPause},
		"a shortage":     {[]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM}, nil, 15 * minPause},
		"a long one":     {errs(10, syscall.EMFILE), nil, 255*minPause + 2*maxPause},
		"a bad listener": {[]error{syscall.EHOSTUNREACH, syscall.EINVAL}, syscall.EINVAL, 0},
		"not a socket":   {[]error{syscall.ENOTSOCK}, syscall.ENOTSOCK, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log testkit.Log
				start := time.Now()
				c, err := Steady(&script{errs: tc.errs}, slog.New(slog.NewTextHandler(&log, nil))).Accept()
				if !errors.Is(err, tc.want) || (c == nil) != (tc.want != nil) {
					t.Errorf("%v, %v, want %v", c, err, tc.want)
				}
				if took := time.Since(start); took != tc.took {
					t.Errorf("paused for %v, want %v", took, tc.took)
				}
				if n := strings.Count(log.String(), "trying again"); n != min(1, len(tc.errs)) && tc.want == nil {
					t.Errorf("%d warnings: %s", n, &log)
				}
			})
		})
	}
}

// Transient knows the errors that exist on this platform only.
func TestPlatformErrnos(t *testing.T) {
	for _, e := range platformErrnos() {
		if err := os.NewSyscallError("accept4", e); !Transient(err) {
			t.Error(err)
		}
	}
}

// Close interrupts a pause.
func TestSteadyClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{errs: errs(100, syscall.EMFILE)}
		ln := Steady(s, slog.New(slog.DiscardHandler))
		time.AfterFunc(3*time.Second, func() { ln.Close() })
		start := time.Now()
		if _, err := ln.Accept(); !errors.Is(err, net.ErrClosed) || time.Since(start) != 3*time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}
