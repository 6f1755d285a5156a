package main

import (
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/pkg/takeover"
	"tunnel.example/tunnel/pkg/tunnel"
)

// fakeSite counts conns of other edges that the test has made up.
type fakeSite struct {
	conns   int64
	drained int
}

func (s *fakeSite) Conns() int64 { return s.conns }
func (s *fakeSite) Drain()       { s.drained++ }

// A drain of an edge also reaches the conns of other edges of its site, which have no session.
func TestDrainOfSite(t *testing.T) {
	site, session := &fakeSite{conns: 3}, new(tunnel.Session)
	session.Conns.Store(12)
	r := &restarter{
		daemon: &daemon{
			mode: "edge", log: slog.New(slog.DiscardHandler), site: site,
			live: func() []*tunnel.Session { return []*tunnel.Session{session} },
		},
		reloader: new(reloader),
	}
	for range 2 {
		got, err := r.drain(t.Context(), false)
		if err != nil || *got != (drained{Mode: "edge", Conns: 15}) || site.drained != 1 {
			t.Errorf("drain says %+v, %v; the site was drained %d times", got, err, site.drained)
		}
	}
}

// A drain waits for a reload to end, but not for ever.
func TestDrainDuringAReload(t *testing.T) {
	for reload, want := range map[time.Duration]error{busyTime / 2: errLeft, 2 * busyTime: errBusy} {
		synctest.Test(t, func(t *testing.T) {
			r := &restarter{reloader: &reloader{successor: 1}}
			r.reloader.mu.Lock()
			time.AfterFunc(reload, r.reloader.mu.Unlock)
			if _, err := r.drain(t.Context(), false); !errors.Is(err, want) {
				t.Errorf("beside a reload of %s: %v, want %v", reload, err, want)
			}
			time.Sleep(2 * busyTime) // until the reload has ended
		})
	}
}

// A service that ended by tunnel drain --stop would come back, so it refuses, and continues. Without systemd it ends.
func TestDrainOfAService(t *testing.T) {
	own := strconv.Itoa(os.Getpid())
	for name, tc := range map[string]struct {
		started, notify string // SYSTEMD_EXEC_PID and NOTIFY_SOCKET
		before          *takeover.Predecessor
		stops           bool
	}{
		"a service":                        {own, "/n", nil, false},
		"a service without NotifyAccess":   {own, "", nil, false},
		"a service that has taken over":    {"1", "/n", new(takeover.Predecessor), false},
		"a script of a service":            {"1", "/n", nil, false},
		"a shell of a service":             {"1", "", nil, true},
		"it has taken over, in a terminal": {"1", "", new(takeover.Predecessor), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("SYSTEMD_EXEC_PID", tc.started)
			t.Setenv(notifyVariable, tc.notify)
			stopped := false
			r := &restarter{
				daemon: &daemon{
					mode: "edge", log: slog.New(slog.DiscardHandler), place: place{before: tc.before},
					live: func() []*tunnel.Session { return nil },
				},
				reloader: &reloader{stop: func() { stopped = true }},
			}
			paths := make(map[string]http.Handler)
			r.handle(paths)
			w, q := httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/drain?stop", nil)
			paths["POST /v1/drain"].ServeHTTP(w, q)
			refused := w.Code == http.StatusConflict &&
				strings.Contains(w.Body.String(), "systemctl stop on its unit, such as tunnel-edge")
			if stopped != tc.stops || refused == tc.stops || r.daemon.drained.Load() != tc.stops {
				t.Errorf("it has stopped: %t, want %t; status %d: %s", stopped, tc.stops, w.Code, w.Body)
			}
		})
	}
}
