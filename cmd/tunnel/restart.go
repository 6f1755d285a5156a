package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/inventory"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/takeover"
	"tunnel.example/tunnel/pkg/tunnel"
)

// place is what a process needs to take over from an old process, and to be taken over later. Set once.
type place struct {
	sockets *listen.Sockets       // nil: this process only checks a configuration, and opens nothing
	before  *takeover.Predecessor // the old process; nil: there is none
}

// newPlace returns the place of this process.
func newPlace() (place, error) {
	value := os.Getenv(takeover.Variable)
	os.Unsetenv(takeover.Variable) //nolint:errcheck // it fails only for an empty name
	before, err := takeover.Join(value)
	if err != nil {
		return place{}, err
	}
	return place{before.Sockets(), before}, nil
}

// failed tells the old process why this process does not take over.
func (p place) failed(err error) {
	if err == nil {
		err = errors.New("it was stopped")
	}
	exit, ok := errors.AsType[*exitError](err)
	p.before.Failed(&takeover.Failure{Text: err.Error(), Configuration: ok && exit.code == exitConfig})
}

// hasLeft reports whether another process has taken over.
func (p place) hasLeft() bool { return p.sockets != nil && tunnel.IsClosed(p.sockets.Left()) }

// handOverTime bounds how long this process continues for callers of Services, until the next process serves them.
const handOverTime = 11 * time.Second

// awaitHandOver waits until the next process serves the callers of Services.
func (d *daemon) awaitHandOver() {
	if d.handedOver == nil {
		return
	}
	select {
	case <-d.handedOver:
	case <-time.After(handOverTime):
	}
}

// later is a module that runs only while this process serves. It starts when the old process no longer serves, and ends
// when a new process serves.
type later struct {
	tunnel.Module
	sockets *listen.Sockets
}

// Run implements tunnel.Module.
func (l later) Run(ctx context.Context) error {
	select {
	case <-l.sockets.Serving():
	case <-ctx.Done():
		return nil
	}
	serving, stop := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-l.sockets.Left():
			stop()
		case <-serving.Done():
		}
	})
	err := l.Module.Run(serving)
	stop()
	watching.Wait()
	if err == nil && tunnel.IsClosed(l.sockets.Left()) {
		<-ctx.Done() // the other modules drain
	}
	return err
}

const (
	// startTime is how long a new process may take until it is ready to take over.
	startTime = 30 * time.Second
	// moveTime is how long the edges may take to move to the new process. Then the new process serves, and callers of
	// edges that have not moved wait for at most moveTime again.
	moveTime = 12 * time.Second
	// systemdTime is how long systemd may take to read a notification.
	systemdTime = 5 * time.Second
	// lastTime is how long the old process continues before it drains. Callers that the old process accepted last have
	// this time for their TLS handshake.
	lastTime = 1500 * time.Millisecond
	// restartTimeout is how long tunnel restart waits for the answer of the old process. The old process has several
	// waits, one after the other: busyTime, startTime and one second, 2*moveTime, and systemdTime. The 10 s are for the
	// second and systemdTime, and to spare.
	restartTimeout = busyTime + startTime + 2*moveTime + 10*time.Second
	// firstTime is how long after the first edge has come the new process waits for the other edges before it serves.
	// An edge without conns keeps its old session for stream.Overlap, which is longer than firstTime and lastTime
	// together: the old process needs the session for callers that it has accepted last.
	firstTime = 700 * time.Millisecond
)

// takeOver takes over from the process before, if there is one.
func (d *daemon) takeOver(ctx context.Context) error {
	if d.before == nil {
		return nil
	}
	start := time.Now()
	starting, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	if err := d.untilReady(starting); err != nil {
		return fmt.Errorf("not ready after %s: %w", startTime, err)
	}
	nodes, err := d.before.Ready(starting)
	if err != nil {
		return err
	}
	if d.joinAgain != nil {
		d.joinAgain()
	}
	if d.expect != nil {
		d.expect(ctx, nodes)
	}
	if err := ctx.Err(); err != nil { // this process ends, so the old process must continue
		return err
	}
	d.sockets.Serve()
	if d.multipath != nil { // only now: until here the old process might continue, and would need the endpoints
		d.multipath.Inherit(d.before.Endpoints())
	}
	d.before.Serving()
	time.AfterFunc(lastTime+handOverTime+tunnel.GracePeriod, func() { d.outlived.Store(true) })
	d.log.Info("taken over from the old process", "nodes", len(nodes), "dur", time.Since(start).Round(time.Millisecond))
	return nil
}

// succeeds reports whether the old process may still have sessions. An edge may join one replica before it takes over,
// and the other replicas later.
func (d *daemon) succeeds() bool { return d.before != nil && !d.outlived.Load() }

// moved waits until the edges of these nodes have come from the old process.
func (w *cloudWiring) moved(ctx context.Context, nodes []tunnel.NodeName) {
	if w.inventory != nil {
		w.inventory.Reload()
	}
	late := time.Now().Add(moveTime)
	w.directory.Expect(nodes, late.Add(moveTime))
	w.sockets.Resume(listen.Edges)
	var soon <-chan time.Time // nil: no edge has come yet
	for {
		changed := w.directory.Changed()
		missing := w.directory.Missing()
		if missing == 0 {
			return
		}
		if soon == nil && missing < len(nodes) {
			soon = time.After(firstTime)
		}
		select {
		case <-changed:
		case <-soon:
			return
		case <-time.After(time.Until(late)):
			return
		case <-ctx.Done():
			return
		}
	}
}

// restarter lets a new process take over from this one, and lets this process leave the rotation.
type restarter struct {
	// Set once.
	daemon    *daemon
	reloader  *reloader
	edges     *stream.Server       // the server of a cloud; nil in an edge
	peers     bool                 // the configuration of a cloud names other replicas
	client    *stream.Client       // the client of an edge; nil in a cloud
	inventory *inventory.Inventory // nil: there is none

	running sync.Mutex // held during a restart; guards the following
	stops   bool       // this process stops: no restart begins
}

// errStops is the error of a restart while the process stops.
var errStops = conflictf("this process is stopping, so no new process takes over")

// restarted is the answer to POST /v1/restart.
type restarted struct {
	Mode    string  `json:"mode"`  // "cloud" or "edge"
	PID     int     `json:"pid"`   // process id of the new process
	Old     int     `json:"old"`   // process id of the old process, which drains
	Conns   int64   `json:"conns"` // how many conns are still open in the old process
	Seconds float64 `json:"seconds"`
}

// handle adds the paths for restart and drain to the paths of the admin socket.
func (r *restarter) handle(all map[string]http.Handler) {
	ctx, cancel := context.WithCancel(context.Background()) // a restart continues even if the operator disconnects
	r.daemon.endRestart = func() {
		cancel()
		r.running.Lock()
		defer r.running.Unlock()
		r.stops = true
	}
	all["POST /v1/restart"] = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		done, err := r.restart(ctx)
		answer(w, done, err)
		if err == nil {
			time.AfterFunc(lastTime, func() {
				r.daemon.awaitHandOver()
				r.reloader.stop()
			})
		}
	})
	all["POST /v1/drain"] = http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		stops := q.URL.Query().Has("stop")
		done, err := r.drain(context.WithoutCancel(q.Context()), stops)
		answer(w, done, err)
		if err == nil && stops {
			r.reloader.stop()
		}
	})
}

// restart starts a new process, which takes over unless ctx ends before. If restart returns an error, this process
// serves as before. Otherwise the caller must stop this process.
func (r *restarter) restart(ctx context.Context) (*restarted, error) {
	if !r.reloader.lock() {
		return nil, errBusy
	}
	defer r.reloader.mu.Unlock()
	r.running.Lock()
	defer r.running.Unlock()
	switch {
	case r.stops:
		return nil, errStops
	case r.reloader.successor != 0:
		return nil, errLeft
	case r.daemon.drained.Load():
		return nil, conflictf("this process is drained: stop it and start it again, since tunnel restart cannot replace it")
	case r.peers:
		// The other replicas have sessions with this process. They would learn of the new process only after this one ends.
		return nil, conflictf("it is one of several replicas: stop it and start it again, and the others take over meanwhile")
	case os.Getpid() == 1, os.Getenv("KUBERNETES_SERVICE_HOST") != "":
		return nil, conflictf("the container ends when this process ends: in Kubernetes run kubectl rollout restart, " +
			"with two replicas")
	}
	if r.daemon.before == nil {
		if todo := unitAdvice(os.Getenv, os.Getpid(), os.Getppid(), r.daemon.mode); todo != "" {
			return nil, conflictf("systemd would not know the new process: %s, and run systemctl daemon-reload and "+
				"systemctl restart tunnel-%s once", todo, r.daemon.mode)
		}
	}
	program, err := programPath()
	if err != nil {
		return nil, conflictError{err}
	}
	systemd, err := dialSystemd() // before a new process starts, which systemd must hear of
	if err != nil {
		return nil, conflictError{err}
	}
	if systemd != nil {
		defer systemd.Close()
	}
	start := time.Now()
	log := r.daemon.log
	next, err := takeover.Start(takeover.Config{
		Program: program, Args: os.Args, Env: os.Environ(), Sockets: r.daemon.sockets, Instance: r.instance(),
		Endpoints: r.daemon.endpoints(),
		Sibling:   systemd != nil && r.isService(),
	})
	if err != nil {
		return nil, notStartedError{fmt.Errorf("starting %s: %w", program, err)}
	}
	log.Info("a new process starts, to take over from this one", "pid", next.PID(), "target", program)
	if err = r.hand(ctx, next); err != nil {
		next.Kill()
		if ctx.Err() != nil {
			log.Info("no new process takes over, since this one stops")
			return nil, errStops
		}
		log.Error("no new process has taken over; this process serves as before", "err", err)
		failure, ok := errors.AsType[*takeover.Failure](err)
		if ok && failure.Configuration {
			return nil, failure
		}
		if old := r.daemon.notReady(); old != nil {
			return nil, conflictf("%w; the old process continues, and is not ready either (%w): stop it and start it again",
				err, old)
		}
		return nil, notStartedError{fmt.Errorf("%w; the old process serves as before", err)}
	}
	next.Release()
	r.daemon.sockets.Leave()
	r.reloader.successor = next.PID()
	if systemd != nil {
		systemd.SetWriteDeadline(time.Now().Add(systemdTime))
		if _, err := fmt.Fprintf(systemd, "MAINPID=%d", next.PID()); err != nil {
			log.Error("systemd does not know the new process, and ends it with this one", "pid", next.PID(), "err", err)
		}
	}
	done := &restarted{
		Mode: r.daemon.mode, PID: next.PID(), Old: os.Getpid(), Conns: r.daemon.conns(), Seconds: time.Since(start).Seconds(),
	}
	log.Info("a new process has taken over; this one drains and ends", "pid", next.PID())
	return done, nil
}

// isService reports whether this process is the main process of a systemd service: systemd has started it, or it has
// taken over from such a process, which has told systemd so.
func (r *restarter) isService() bool {
	return isChildOfSystemd(os.Getenv, os.Getpid(), os.Getppid()) ||
		r.daemon.before != nil && os.Getenv(notifyVariable) != ""
}

// endpoints returns takeover.Config.Endpoints.
func (d *daemon) endpoints() func() []string {
	if d.multipath == nil {
		return nil
	}
	return d.multipath.Made
}

// instance returns takeover.Config.Instance.
func (r *restarter) instance() string {
	if r.client == nil {
		return ""
	}
	return r.client.Instance()
}

// hand hands over to the new process. In an edge, only the new process then opens sessions. If hand returns an error,
// this process continues: a cloud accepts edges, and an edge opens sessions.
func (r *restarter) hand(ctx context.Context, next *takeover.Successor) error {
	starting, cancel := context.WithTimeout(ctx, startTime+time.Second) // the new process gives up first, and says why
	defer cancel()
	if err := next.Ready(starting); err != nil {
		return err
	}
	if r.edges == nil {
		r.client.Pause()
		err := r.serve(ctx, next, nil)
		if err != nil {
			r.client.Resume()
		}
		return err
	}
	if r.inventory != nil {
		r.inventory.Leave()
	}
	r.daemon.sockets.Pause(listen.Edges)
	nodes := r.edges.Move()
	r.daemon.log.Info("the edges move to the new process", "nodes", len(nodes))
	err := r.serve(ctx, next, nodes)
	if err != nil {
		r.edges.Stay(nodes)
		r.daemon.sockets.Resume(listen.Edges)
		if r.inventory != nil {
			r.inventory.Return()
		}
	}
	return err
}

// serve waits until the new process serves.
func (r *restarter) serve(ctx context.Context, next *takeover.Successor, nodes []tunnel.NodeName) error {
	if err := next.Go(nodes); err != nil {
		return err
	}
	moving, cancel := context.WithTimeout(ctx, 2*moveTime)
	defer cancel()
	return next.Serving(moving)
}

// programPath returns the program of a new process: by the name that this process was started by, so that a new release
// of the program runs.
func programPath() (string, error) {
	if path, err := exec.LookPath(os.Args[0]); err == nil {
		return filepath.Abs(path)
	}
	return os.Executable()
}

func newRestartCommand() *cobra.Command {
	var ask askFlags
	var output outputFlag
	cmd := &cobra.Command{
		Use:   "restart",
		Short: "Let a new process take over from a running cloud or edge, without an outage",
		Long: `restart has the running cloud or edge start the program again, with the same arguments. The new process
reads the configuration, and takes over the listening sockets. Edges move to it. Open connections go on in
the old process, for up to 25 s. No caller is refused.

If the new process does not start, or has a bad configuration, the old one serves as before. restart then
says why.

  tunnel restart

Exit codes: 0 the new process serves; 1 refused, or no answer within 74 s; 3 the configuration has a problem; 4 the
new process has failed. After 3 and 4, the old one serves as before.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.check(); err != nil {
				return err
			}
			if _, err := ask.sockets(); errors.As(err, new(noSocketError)) {
				return &exitError{exitRuntime, err} // the packages' scripts then restart the service
			}
			return askEach(&ask, func(s daemonSocket, name string) error {
				ctx, cancel := limited(cmd.Context(), restartTimeout)
				defer cancel()
				done := new(restarted)
				if err := api.NewClient(s.path).Call(ctx, http.MethodPost, "/v1/restart", nil, done); err != nil {
					return failed(err)
				}
				if encoded, err := output.encode(cmd.OutOrStdout(), done); encoded {
					return err
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(),
					"%s: process %d has taken over from %d after %.1f s; %d conns drain\n",
					name, done.PID, done.Old, done.Seconds, done.Conns)
				return err
			})
		},
	}
	ask.register(cmd, cloudFile, edgeFile)
	output.register(cmd, "text", "json", "yaml")
	return cmd
}
