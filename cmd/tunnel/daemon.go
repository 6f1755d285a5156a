package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/audit"
	"tunnel.example/tunnel/pkg/multipath"
	"tunnel.example/tunnel/pkg/spans"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

// daemon is a cloud or an edge. newCloud or newEdge sets its fields; run then only reads them.
type daemon struct {
	mode      string
	log       *slog.Logger
	routes    []string        // message types, for the start-up line
	modules   []tunnel.Module // in the order in which they start
	checks    []admin.Check   // the checks of /readyz
	listeners []string        // for the start-up line
	health    *admin.Server   // nil without a logport
	public    *admin.Server   // health on the one port; nil without one
	socket    string          // path for admin.Debug; "": none
	operators *admin.Server   // health and metrics, served on socket, too
	audit     *audit.Log      // nil: off
	spans     *spans.Exporter // nil: off
	level     *slog.LevelVar
	api       *api.Server              // answers an operator's commands on socket
	live      func() []*tunnel.Session // sessions; nil: not known
	site      sharedSite               // nil: other edges do not connect here
	handlers  map[string]http.Handler  // further paths of socket, by their pattern
	place                              // the old and the new process around this one, see restart.go
	drained   atomic.Bool              // tunnel drain has drained this process
	outlived  atomic.Bool              // the old process has ended, see place
	// expect waits until the edges have moved from the old process to this one; nil: there is nothing to wait for.
	expect func(ctx context.Context, nodes []tunnel.NodeName)
	// joinAgain ends the pause of an edge that has no session, or else its next pause. The old process may have opened a
	// session before it stopped doing so, and the cloud has ended the one of this process then. nil: a cloud.
	joinAgain func()
	// endRestart ends a restart that is under way, when this process stops; nil: nothing to do.
	endRestart func()
	// handedOver is closed when the next process serves the callers of Services; nil: this process serves none.
	handedOver <-chan struct{}
	// leave runs before the modules stop, while they still serve; nil: nothing to do.
	leave func(ctx context.Context)
	about []any    // more keys and values for the start-up line
	hints []string // what an operator could improve; logged at the start
	// congestion sets the congestion control of the connections between edges and clouds.
	congestion *stream.Congestion
	// multipath dials the cloud in an edge with Multipath TCP; nil: a net.Dialer dials.
	multipath *multipath.Endpoints
}

// controlCongestion sets congestion to the setting in a table of the configuration.
func (d *daemon) controlCongestion(table, setting string, counters *tunnel.Counters) (err error) {
	if d.congestion, err = stream.NewCongestion(setting, counters, d.log); err != nil {
		return fmt.Errorf("%s: congestion: %w", table, err)
	}
	if hint := d.congestion.Hint(); hint != "" {
		d.hints = append(d.hints, hint)
	}
	return nil
}

// showCongestion adds the line of congestion to /readyz.
func (d *daemon) showCongestion() {
	d.checks = append(d.checks, admin.Check{Name: "congestion", Status: d.congestion.Status})
}

// add appends a module. The module has a line in /readyz if ready is not nil, or if it has a
// method Note or Status (admin.Check). While its method Idle returns true, it has no line.
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
	if idler, ok := m.(interface{ Idle() bool }); ok {
		check.Off = idler.Idle
	}
	if ready != nil || notes || states {
		d.checks = append(d.checks, check)
	}
	for _, l := range listeners {
		d.listeners = append(d.listeners, m.Name()+" "+l)
	}
}

// addWriter is add for a module that writes files, or something else that two processes must not write at once. The
// module runs only while this process serves.
func (d *daemon) addWriter(m tunnel.Module) {
	d.add(m, nil)
	d.modules[len(d.modules)-1] = later{m, d.sockets}
}

// shown says what health and metrics show, and where the daemon serves them.
type shown struct {
	port       int    // TCP port on all interfaces; 0: none
	socket     string // unix socket for operators; "": none
	conns      int    // most connections at once on port; 0: the default
	counters   *tunnel.Counters
	sessions   func() []*tunnel.Session
	collectors []prometheus.Collector
}

// serveHealth adds health and metrics. Call it last, since it shows the checks of all modules.
func (d *daemon) serveHealth(s shown) {
	d.live = s.sessions
	d.checks = append(d.checks, d.drainCheck())
	if s.port == 0 && s.socket == "" {
		return
	}
	registry := admin.NewRegistry(software(), s.counters, s.sessions)
	registry.MustRegister(append(s.collectors, admin.NewDegradedCollector(d.checks))...)
	listen := fmt.Sprintf(":%d", s.port)
	server := admin.New(listen, d.checks, registry, d.log)
	server.Conns, server.Counters, server.Sockets = s.conns, s.counters, d.sockets
	if d.public != nil {
		d.public.Conns, d.public.Counters = s.conns, s.counters
	}
	if s.port != 0 {
		d.health = server
		d.listeners = append(d.listeners, server.Name()+" "+listen)
	}
	if s.socket != "" {
		d.socket, d.operators = s.socket, server
		d.listeners = append(d.listeners, "debug "+s.socket)
	}
}

// servePublicHealth makes the daemon answer health checks from outside, on ln and with the certificate in conf.
func (d *daemon) servePublicHealth(ln net.Listener, conf *tls.Config) {
	d.public = admin.NewPublic(ln, conf, func() []admin.Check { return d.checks }, d.log)
}

// observe serves health, metrics and the operators' socket until ctx is done.
func (d *daemon) observe(ctx context.Context) error {
	var observers []tunnel.Module
	if d.health != nil {
		observers = append(observers, d.health)
	}
	if d.public != nil {
		observers = append(observers, d.public)
	}
	if d.socket != "" {
		debug := admin.NewDebug(d.socket, d.operators, d.level, d.log)
		debug.API, debug.Handlers, debug.Sockets = d.api.Handler(), d.handlers, d.sockets
		observers = append(observers, debug)
	}
	return tunnel.Run(ctx, observers...)
}

// run runs the modules until ctx is done and they have drained. Health and metrics stay a
// little longer, so that an operator sees the draining.
func (d *daemon) run(ctx context.Context) error {
	if d.audit != nil {
		if err := d.audit.Open(); err != nil {
			return &exitError{exitRuntime, err}
		}
		defer d.closeAudit()
	}
	if d.spans != nil {
		d.spans.Start()
		defer d.closeSpans()
	}
	d.log.With(d.about...).Info("starting", "mode", d.mode, "version", software(),
		"listeners", d.listeners, "routes", d.routes)
	for _, hint := range d.hints {
		d.log.Info(hint)
	}
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
	var tellers sync.WaitGroup
	defer tellers.Wait()
	readyCtx, stopReady := context.WithCancel(ctx)
	defer stopReady()
	tellers.Go(func() {
		if err := d.becomeReady(readyCtx); err != nil {
			cancel(err)
		}
	})
	running, stopModules := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stopModules(nil)
	leaving := context.AfterFunc(ctx, func() {
		asked := time.Now()
		if d.endRestart != nil {
			d.endRestart()
		}
		// Any other cause is a failure, which leaves no time to drain.
		stops := context.Cause(ctx) == context.Canceled //nolint:errorlint // the sentinel itself
		if d.leave != nil && !d.hasLeft() && stops {
			d.leave(running)
		}
		stopModules(tunnel.Stopping{Since: asked})
	})
	defer leaving()
	stopped, told := make(chan struct{}), make(chan struct{}) // both are only closed
	go func() {
		defer close(told)
		select {
		case <-running.Done():
			d.tellDraining(tunnel.GraceLeft(running, tunnel.GracePeriod), stopped)
		case <-stopped:
		}
	}()
	err := tunnel.Run(running, d.modules...)
	close(stopped)
	<-told
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

// closeAudit closes the audit. An error says how many events are lost, or what the kernel could not write.
func (d *daemon) closeAudit() {
	if err := d.audit.Close(); err != nil {
		d.log.Error("closing the audit file", "err", err)
	}
}

// newTracer sets d.spans, and returns a tracer that hands its spans to d.spans. If endpoint is "", traces are off, and
// newTracer returns nil.
func (d *daemon) newTracer(endpoint, instance string, perMillion int) *tunnel.Tracer {
	if endpoint == "" {
		return nil
	}
	d.spans = spans.New(spans.Config{
		Endpoint: endpoint, Service: "tunnel-" + d.mode, Version: software(), Instance: instance, Log: d.log,
	})
	return &tunnel.Tracer{PerMillion: perMillion, Take: d.spans.Take}
}

// closeSpans closes d.spans, and logs the error of Close, which says how many spans are lost.
func (d *daemon) closeSpans() {
	if err := d.spans.Close(); err != nil {
		d.log.Warn("sending the last spans", "err", err)
	}
}

// Between two looks at the checks, untilReady waits for at least readyMin and at most readyMax.
const readyMin, readyMax = 10 * time.Millisecond, time.Second

// becomeReady waits until every check of /readyz passes: all ports are open, and an edge has a session. If there is an
// old process, becomeReady then takes over from it.
func (d *daemon) becomeReady(ctx context.Context) error {
	start := time.Now()
	if err := d.takeOver(ctx); err != nil {
		return err
	}
	if d.untilReady(ctx) == nil {
		d.log.Info("ready", "mode", d.mode, "dur", time.Since(start).Round(time.Millisecond))
		if err := notify("READY=1"); err != nil {
			d.log.Warn("systemd does not know that this process is ready", "err", err)
		}
	}
	return nil
}

// untilReady waits until every check of /readyz passes. When ctx is done, it returns why a check fails.
func (d *daemon) untilReady(ctx context.Context) error {
	for wait := readyMin; ; wait = min(2*wait, readyMax) {
		err := d.notReady()
		if err == nil {
			return nil
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return err
		}
	}
}

// notReady returns why /readyz fails; nil: /readyz passes.
func (d *daemon) notReady() error {
	for _, c := range d.checks {
		if c.Ready == nil || c.Off != nil && c.Off() {
			continue
		}
		if err := c.Ready(); err != nil {
			return fmt.Errorf("%s: %w", c.Name, err)
		}
	}
	return nil
}

// tellInterval is how often the log tells how many conns are left.
const tellInterval = 5 * time.Second

// tellDraining logs how many conns are left and how long they may take, at first left, until all modules have stopped.
func (d *daemon) tellDraining(left time.Duration, stopped <-chan struct{}) {
	ticker := time.NewTicker(tellInterval)
	defer ticker.Stop()
	for ; left > 0; left -= tellInterval {
		if n := d.conns(); n > 0 {
			d.log.Info(fmt.Sprintf("draining: %d conns, up to %d s", n, int(left.Seconds())))
		}
		select {
		case <-ticker.C:
		case <-stopped:
			return
		}
	}
}

// sharedSite is a *relay.Near: it serves conns that have no session.
type sharedSite interface {
	Conns() int64
	Drain() // refuses further conns
}

// conns returns how many conns are open or being dialled.
func (d *daemon) conns() (n int64) {
	if d.live != nil {
		for _, s := range d.live() {
			n += s.Conns.Load()
		}
	}
	if d.site != nil {
		n += d.site.Conns()
	}
	return n
}

func warn(log *slog.Logger, warnings []string) {
	for _, w := range warnings {
		log.Warn(w)
	}
}
