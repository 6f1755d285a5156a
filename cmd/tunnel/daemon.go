package main

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel/pkg/admin"
	"tunnel/pkg/tunnel"
)

// daemon is a cloud or an edge, wired together and not yet running.
type daemon struct {
	mode      string
	log       *slog.Logger
	routes    []string
	modules   []tunnel.Module
	checks    []admin.Check
	listeners []string
	health    *admin.Server // nil without a logport
	socket    string        // of admin.Debug; "" is none
	operators *admin.Server // what the socket shows, too
	level     *slog.LevelVar
	// leave is what comes before the modules are stopped, while they go on; nil: nothing.
	leave func(ctx context.Context)
	about []any // more for the start-up line
}

// add appends a module. In /readyz it has a line if ready is not nil, or if it has a
// Note or a Status of its own (admin.Check).
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

// shown is what health and metrics are of, and where they are served.
type shown struct {
	port       int    // 0: none
	socket     string // for operators; "": none
	conns      int    // at once on the port
	counters   *tunnel.Counters
	sessions   func() []*tunnel.Session
	collectors []prometheus.Collector
}

// serveHealth adds health and metrics. It is called last: it shows the modules' checks.
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

// observe runs what shows how it goes, until ctx is done.
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

// run runs the modules until ctx is done and they have drained, and health a little
// longer, so that an operator sees the draining.
func (d *daemon) run(ctx context.Context) error {
	d.log.With(d.about...).Info("starting", "mode", d.mode, "version", software(), "listeners", d.listeners, "routes", d.routes)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	healthCtx, stopHealth := context.WithCancel(context.WithoutCancel(ctx))
	defer stopHealth()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := d.observe(healthCtx); err != nil {
			cancel(err)
		}
	}()
	running, stopModules := context.WithCancel(context.WithoutCancel(ctx))
	defer stopModules()
	leaving := context.AfterFunc(ctx, func() {
		if d.leave != nil && context.Cause(ctx) == context.Canceled { //nolint:errorlint // asked to stop; else something has failed
			d.leave(running)
		}
		stopModules()
	})
	defer leaving()
	err := tunnel.Run(running, d.modules...)
	stopHealth()
	<-ended
	if err == nil && context.Cause(ctx) != context.Canceled { //nolint:errorlint // the cause is the sentinel itself
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
