package main

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/tunnel"
)

// daemon is a cloud or an edge. newCloud or newEdge sets its fields; run then only reads them.
type daemon struct {
	mode      string
	log       *slog.Logger
	routes    []string        // message types, for the start-up line
	modules   []tunnel.Module // in the order in which they start
	checks    []admin.Check   // of /readyz
	listeners []string        // for the start-up line
	health    *admin.Server   // nil without a logport
	socket    string          // path for admin.Debug; "": none
	operators *admin.Server   // health and metrics, served on socket, too
	level     *slog.LevelVar
	// leave runs before the modules stop, while they still serve; nil: nothing to do.
	leave func(ctx context.Context)
	about []any // more keys and values for the start-up line
}

// add appends a module. The module has a line in /readyz if ready is not nil, or if it has a
// method Note or Status (admin.Check).
func (d *daemon) add(m tunnel.Module, ready func() error, listeners ...string) {
	d.modules = append(d.modules, m)
	check := admin.Check{Name: m.Name(), Ready: ready}
	noter, notes := m.(interface{ Note() string })
	if notes {
		check.Note = noter.Note
	}
	stater, states := m.(interface{ Status() string })
	if states {
		check.Status = stater.Status
	}
	if ready != nil || notes || states {
		d.checks = append(d.checks, check)
	}
	for _, l := range listeners {
		d.listeners = append(d.listeners, m.Name()+" "+l)
	}
}

// shown says what health and metrics show, and where the daemon serves them.
type shown struct {
	port       int    // of all interfaces; 0: none
	socket     string // unix socket for operators; "": none
	conns      int    // most connections at once on port; 0: the default
	counters   *tunnel.Counters
	sessions   func() []*tunnel.Session
	collectors []prometheus.Collector
}

// serveHealth adds health and metrics. Call it last, since it shows the checks of all modules.
func (d *daemon) serveHealth(s shown) {
	if s.port == 0 && s.socket == "" {
		return
	}
	registry := admin.NewRegistry(software(), s.counters, s.sessions)
	registry.MustRegister(append(s.collectors, admin.NewDegradedCollector(d.checks))...)
	listen := fmt.Sprintf(":%d", s.port)
	server := admin.New(listen, d.checks, registry, d.log)
	server.Conns, server.Counters = s.conns, s.counters
	if s.port != 0 {
		d.health = server
		d.listeners = append(d.listeners, server.Name()+" "+listen)
	}
	if s.socket != "" {
		d.socket, d.operators = s.socket, server
		d.listeners = append(d.listeners, "debug "+s.socket)
	}
}

// observe serves health, metrics and the operators' socket until ctx is done.
func (d *daemon) observe(ctx context.Context) error {
	var observers []tunnel.Module
	if d.health != nil {
		observers = append(observers, d.health)
	}
	if d.socket != "" {
		observers = append(observers, admin.NewDebug(d.socket, d.operators, d.level, d.log))
	}
	return tunnel.Run(ctx, observers...)
}

// run runs the modules until ctx is done and they have drained. Health and metrics stay a
// little longer, so that an operator sees the draining.
func (d *daemon) run(ctx context.Context) error {
	d.log.With(d.about...).Info("starting", "mode", d.mode, "version", software(),
		"listeners", d.listeners, "routes", d.routes)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	healthCtx, stopHealth := context.WithCancel(context.WithoutCancel(ctx))
	defer stopHealth()
	ended := make(chan struct{}) // closed when observe has returned; nothing is sent
	go func() {
		defer close(ended)
		if err := d.observe(healthCtx); err != nil {
			cancel(err)
		}
	}()
	running, stopModules := context.WithCancel(context.WithoutCancel(ctx))
	defer stopModules()
	leaving := context.AfterFunc(ctx, func() {
		// Any other cause is a failure, which leaves no time to drain.
		if d.leave != nil && context.Cause(ctx) == context.Canceled { //nolint:errorlint // the sentinel itself
			d.leave(running)
		}
		stopModules()
	})
	defer leaving()
	err := tunnel.Run(running, d.modules...)
	stopHealth()
	<-ended
	if err == nil && context.Cause(ctx) != context.Canceled { //nolint:errorlint // the sentinel itself
		err = context.Cause(ctx)
	}
	if err != nil {
		return &exitError{exitRuntime, err}
	}
	d.log.Info("stopped", "mode", d.mode)
	return nil
}

func warn(log *slog.Logger, warnings []string) {
	for _, w := range warnings {
		log.Warn(w)
	}
}
