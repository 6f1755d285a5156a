package main

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"
)

// A daemon that hangs keeps no command waiting. A command that waits for longer than the test may take has no deadline.
func TestSilentSocket(t *testing.T) {
	_, path := listenSocket(t) // the kernel accepts connections, and nobody answers
	t.Cleanup(func() { limited = context.WithTimeout })
	for line, want := range map[string]time.Duration{
		"restart":                               64 * time.Second,
		"drain":                                 35 * time.Second,
		"drain --stop":                          35 * time.Second,
		"reload":                                reloadTimeout,
		"forward ls":                            reloadTimeout,
		"forward rm 127.0.0.1:1":                reloadTimeout,
		"forward add 127.0.0.1:1 edge1/[::1]:1": reloadTimeout,
		"ls":                                    askTimeout,
		"forget edge1":                          askTimeout,
		"status":                                askTimeout,
		"status --all":                          askTimeout,
		"top":                                   askTimeout,
		"services ls":                           askTimeout,
		"services explain shop/web":             askTimeout,
		"cert status":                           askTimeout,
		"cert renew --all":                      askTimeout,
		"cert renew":                            renewTimeout,
		"ping edge1":                            pingTimeout,
		"ping edge1 127.0.0.1:22":               pingTimeout,
		"trace edge1 127.0.0.1:22":              traceTimeout,
	} {
		var waited time.Duration
		limited = func(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
			waited = d
			return context.WithTimeout(ctx, 20*time.Millisecond)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // as Ctrl-C
		var out, errs bytes.Buffer
		code := run(ctx, append(strings.Fields(line), "--socket", path), &out, &errs)
		stopped := ctx.Err() != nil
		cancel()
		text := "tunnel: the process does not answer on " + path + " in time"
		if stopped || waited != want || code != exitRuntime || !strings.HasPrefix(errs.String(), text) || out.Len() > 0 {
			t.Errorf("%s waits for %s, want %s; stopped: %t; exit code %d:\n%s%s",
				line, waited, want, stopped, code, &out, &errs)
		}
	}
	// What a command waits for is shorter than its own time: otherwise the daemon could not say why it fails.
	if daemon := startTime + time.Second + 2*moveTime + systemdTime; restartTimeout <= daemon {
		t.Errorf("restart waits for %s, and the old process for %s", restartTimeout, daemon)
	}
}
