package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/logline"
	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/tunnel"
)

type quiet struct{}

func (quiet) Name() string              { return "quiet" }
func (quiet) Run(context.Context) error { return nil }

type noting struct{ quiet }

func (noting) Note() string { return "the disk is nearly full" }

type telling struct{ quiet }

func (telling) Status() string { return "lag 3s" }

// TestAddFindsWhatIsSaid: add finds the methods with which a module speaks in /readyz.
func TestAddFindsWhatIsSaid(t *testing.T) {
	var d daemon
	d.add(quiet{}, nil)
	if len(d.checks) != 0 {
		t.Errorf("a module that says nothing is in /readyz: %+v", d.checks)
	}
	d.add(quiet{}, func() error { return nil })
	d.add(noting{}, nil)
	d.add(telling{}, nil)
	if len(d.modules) != 4 || len(d.checks) != 3 {
		t.Fatalf("%d modules and %d checks, want 4 and 3", len(d.modules), len(d.checks))
	}
	if c := d.checks[0]; c.Ready == nil || c.Note != nil || c.Status != nil {
		t.Errorf("%+v has not what it was given", c)
	}
	if c := d.checks[1]; c.Note == nil || c.Note() != "the disk is nearly full" {
		t.Errorf("%+v does not note", c)
	}
	if c := d.checks[2]; c.Status == nil || c.Status() != "lag 3s" {
		t.Errorf("%+v does not tell", c)
	}
}

// TestJSONLog: in JSON a duration is a number of seconds whose key says so, and an address is a text.
func TestJSONLog(t *testing.T) {
	t.Parallel()
	flags := &logFlags{level: "info", format: "json"}
	var b bytes.Buffer
	flags.logger(&b).Info("x", "dur", 1500*time.Millisecond, "retry_in", time.Minute,
		"caller", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 22}, "limit", tunnel.LimitConns,
		"err", tunnel.Refusef(tunnel.Denied, "no"), "node", tunnel.NodeName("edge1"), "list", []string{"a"})
	if err := logline.Check(b.String()); err != nil {
		t.Errorf("%v: %s", err, b.String())
	}
	got := make(map[string]any)
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]any{
		"dur_seconds": 1.5, "retry_in_seconds": 60.0, "caller": "127.0.0.1:22", "limit": "conns",
		"err": "denied: no", "node": "edge1",
	} {
		if got[key] != want {
			t.Errorf("%s is %v, want %v", key, got[key], want)
		}
	}
}

// TestReadyLine: a daemon says that it is ready once, when every check of /readyz passes.
func TestReadyLine(t *testing.T) {
	t.Parallel()
	log, text := testkit.NewLog()
	var open atomic.Bool
	d := &daemon{mode: "cloud", log: log, level: new(slog.LevelVar), modules: []tunnel.Module{waiting{}}}
	ready := func() error {
		if !open.Load() {
			return errors.New("not open")
		}
		return nil
	}
	d.checks = []admin.Check{
		{Name: "noted", Note: func() string { return "degraded" }},
		{Name: "port", Ready: ready},
	}
	running := testkit.Run(t, d.run)
	testkit.Eventually(t, "it starts", func() bool { return len(text.Lines("msg=starting")) == 1 })
	time.Sleep(5 * readyMin)
	if strings.Contains(text.String(), "msg=ready") {
		t.Error("it is ready before the port is open")
	}
	open.Store(true)
	testkit.Eventually(t, "it is ready", func() bool { return len(text.Lines("msg=ready", "mode=cloud", "dur=")) == 1 })
	running.Stop()
	if n := len(text.Lines("msg=ready")); n != 1 {
		t.Errorf("it said %d times that it is ready", n)
	}
}

// waiting is a module that does nothing until it has to stop.
type waiting struct{}

func (waiting) Name() string { return "waiting" }

func (waiting) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// slow is a module that drains for some time.
type slow struct{ time.Duration }

func (slow) Name() string { return "slow" }

func (s slow) Run(ctx context.Context) error {
	<-ctx.Done()
	time.Sleep(s.Duration)
	return nil
}

// graced is a module whose conns go on for the grace period.
type graced struct{}

func (graced) Name() string { return "graced" }

func (graced) Run(ctx context.Context) error {
	conns, end := tunnel.Grace(ctx, tunnel.GracePeriod)
	defer end()
	<-conns.Done()
	return nil
}

// TestLeavingIsPartOfTheGracePeriod: what a process does between the request to stop and the end of its modules'
// contexts does not make the stop longer.
func TestLeavingIsPartOfTheGracePeriod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Log
		session := new(tunnel.Session)
		session.Conns.Store(1)
		d := &daemon{
			mode: "cloud", log: slog.New(slog.NewTextHandler(&log, nil)),
			live:  func() []*tunnel.Session { return []*tunnel.Session{session} },
			leave: func(context.Context) { time.Sleep(12 * time.Second) },
		}
		d.add(graced{}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- d.run(ctx) }()
		time.Sleep(time.Minute)
		start := time.Now()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took != tunnel.GracePeriod {
			t.Errorf("the stop took %s, want %s", took, tunnel.GracePeriod)
		}
		if len(log.Lines("draining: 1 conns, up to 13 s")) != 1 {
			t.Errorf("the log is\n%s", &log)
		}
	})
}

// TestDrainingIsTold: the log says how many conns are left, and how long they may take.
func TestDrainingIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Log
		session := new(tunnel.Session)
		session.Conns.Store(12)
		d := &daemon{
			mode: "cloud", log: slog.New(slog.NewTextHandler(&log, nil)),
			live: func() []*tunnel.Session { return []*tunnel.Session{session} },
		}
		d.add(slow{12 * time.Second}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- d.run(ctx) }()
		time.Sleep(time.Minute)
		cancel()
		time.Sleep(7 * time.Second)
		session.Conns.Store(0)
		if err := <-done; err != nil {
			t.Error(err)
		}
		var told []string
		for line := range strings.Lines(log.String()) {
			if _, text, ok := strings.Cut(line, `msg="draining: `); ok {
				told = append(told, strings.TrimSpace(text))
			}
		}
		if want := []string{`12 conns, up to 25 s"`, `12 conns, up to 20 s"`}; !slices.Equal(told, want) {
			t.Errorf("the log tells %q, want %q", told, want)
		}
	})
}
