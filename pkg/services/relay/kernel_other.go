//go:build !linux

package relay

import (
	"errors"
	"log/slog"
	"syscall"
	"time"
)

func newKernel(bool) (kernel, error) {
	return nil, errors.New("mode.edge.services: this system is not Linux; remove the table")
}

// RemoveRules does nothing here: there are no rules.
func RemoveRules(*slog.Logger) bool { return false }

// RemoveDNSRules does nothing here: there are no rules.
func RemoveDNSRules(*slog.Logger) {}

// Unredirected does nothing here: there are no rules.
func Unredirected(_, _ string, _ syscall.RawConn) error { return nil }

func boundSilence(_, _ string, _ syscall.RawConn) error { return nil }

func unboundSilence(syscall.Conn) {}

func resendsOf(syscall.Conn) (ago time.Duration, resends bool) { return 0, false }

func newDNSKernel() kernel { return nil } // newKernel has failed before
