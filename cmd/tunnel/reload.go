package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/tunnel"
)

// reloader changes the configuration of a cloud or an edge while it runs. It is the module "reload", which
// reloads at SIGHUP.
//
// A reload reads the file and checks it as `tunnel config check` does. Then each module that changes prepares its
// change: it opens ports, for instance, which can fail. Only after all have succeeded, all changes take effect. So a
// file with a problem changes nothing.
type reloader struct {
	// Set once.
	mode  string // "cloud" or "edge"
	read  func() (*candidate, error)
	live  func(changes []conf.Change) liveKeys
	log   *slog.Logger
	trail tunnel.Trail       // of the audit; nil: off
	stop  context.CancelFunc // stops the daemon
	// terminal says that the process had a terminal at its start.
	terminal bool
	drained  *atomic.Bool     // tunnel drain has drained this process
	hangups  <-chan os.Signal // see takeHangups

	mu        sync.Mutex // guards the following; held during a reload
	running   conf.Settings
	successor int // id of the process that has taken over; 0: none
}

// errLeft is the error of a request for a process that has been replaced meanwhile.
var errLeft = conflictf("another process has just taken over: run the command again")

// liveKeys says which keys can change while the process runs.
type liveKeys struct {
	is    func(key string) bool
	waits []string // warnings about keys that could, but wait for a restart
}

// candidate is a configuration that has been checked, and that may take effect.
type candidate struct {
	settings conf.Settings
	warnings []string
	// prepare prepares all changes that can take effect while the process runs: those of the keys that are live.
	prepare func(ctx context.Context, live func(key string) bool) (tunnel.PreparedAll, error)
}

// reloaded says what a reload has done.
type reloaded struct {
	Mode    string        `json:"mode"` // "cloud" or "edge"
	Applied []conf.Change `json:"applied"`
	// Restart are keys whose values in the file differ from those that the process has started with.
	Restart  []conf.Change `json:"restart"`
	Warnings []string      `json:"warnings,omitempty"`
}

// newReloader returns the reloader of a daemon that runs with these settings.
func newReloader(d *daemon, running conf.Settings, hangups <-chan os.Signal, stop context.CancelFunc) *reloader {
	return &reloader{
		mode: d.mode, log: d.log, running: running, hangups: hangups, stop: stop, terminal: hasTerminal(),
		drained: &d.drained,
	}
}

// takeHangups returns a channel for SIGHUP. From now on the signal no longer stops the process. A daemon calls it
// first, since an operator may reload a daemon that has just been started.
func takeHangups() <-chan os.Signal {
	// Capacity 1: the reload that begins next reads what was written before any number of signals.
	hangups := make(chan os.Signal, 1)
	if !signal.Ignored(syscall.SIGHUP) { // nohup(1) has a process ignore SIGHUP
		signal.Ignore(syscall.SIGHUP) // main stops the process at SIGHUP; Ignore ends that
		signal.Notify(hangups, syscall.SIGHUP)
	}
	return hangups
}

// Name implements tunnel.Module.
func (*reloader) Name() string { return "reload" }

// Run implements tunnel.Module: it reloads at each SIGHUP. If the terminal has been closed, it stops the daemon.
func (r *reloader) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.hangups:
		}
		if r.terminal && !hasTerminal() {
			r.log.Info("stopping: the terminal was closed")
			r.stop()
			continue
		}
		if _, err := r.reload(ctx); errors.Is(err, errLeft) {
			r.passOn()
		}
	}
}

// passOn sends SIGHUP to the process that has taken over: it may have read the file before the file was changed.
func (r *reloader) passOn() {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := os.FindProcess(r.successor)
	if err == nil {
		err = p.Signal(syscall.SIGHUP)
	}
	if err != nil {
		r.log.Warn("SIGHUP came to a process that another one has replaced: send it to the new process",
			"pid", r.successor, "err", err)
		return
	}
	r.log.Info("SIGHUP is passed on to the new process", "pid", r.successor)
}

// hasTerminal reports whether the process has a controlling terminal, which exists.
func hasTerminal() bool {
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	tty.Close()
	return true
}

// errBusy is the error of a restart or a drain that has waited for busyTime.
var errBusy = conflictf("a reload, a restart or a drain is under way: try again")

// busyTime is how long a restart or a drain waits for the end of a reload, a restart or a drain.
const busyTime = 10 * time.Second

// lock locks mu. It returns false if mu stays locked for busyTime.
func (r *reloader) lock() bool {
	for late := time.Now().Add(busyTime); !r.mu.TryLock(); time.Sleep(busyTime / 200) {
		if time.Now().After(late) {
			return false
		}
	}
	return true
}

// reload reads the file again, and logs the result.
func (r *reloader) reload(ctx context.Context) (*reloaded, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.successor != 0 {
		return nil, errLeft
	}
	next, err := r.read()
	var done *reloaded
	if err == nil {
		done, err = r.applyLocked(ctx, "configuration read again", next, nil)
	}
	if err != nil {
		for line := range strings.SplitSeq(err.Error(), "\n") {
			r.log.Error("the configuration was not read again, and nothing has changed", "err", line)
		}
		return nil, err
	}
	return done, nil
}

// applyLocked lets a candidate take effect. Then it logs what has happened, and what has changed. commit runs when
// nothing else can fail; its error prevents the change; nil: nothing to do. The caller holds mu.
func (r *reloader) applyLocked(
	ctx context.Context, what string, next *candidate, commit func() error,
) (*reloaded, error) {
	// Lists that are not nil, for JSON.
	done := &reloaded{Mode: r.mode, Applied: []conf.Change{}, Restart: []conf.Change{}, Warnings: next.warnings}
	now := make(conf.Settings) // what runs afterwards
	changes := r.running.Changes(next.settings)
	live := r.live(changes)
	for _, c := range changes {
		if live.is(c.Key) {
			done.Applied = append(done.Applied, c)
		} else {
			done.Restart = append(done.Restart, c)
		}
	}
	for key, s := range next.settings {
		if live.is(key) {
			now[key] = s
		}
	}
	for key, s := range r.running {
		if !live.is(key) {
			now[key] = s
		}
	}
	done.Warnings = append(done.Warnings, live.waits...)
	if r.mode == "cloud" && r.drained.Load() {
		done.Warnings = append(done.Warnings, drainedWarning)
	}
	prepared, err := next.prepare(ctx, live.is)
	if err == nil && commit != nil {
		if err = commit(); err != nil {
			prepared.Abort()
		}
	}
	if err != nil {
		return nil, err
	}
	prepared.Commit()
	r.running = now
	warn(r.log, done.Warnings)
	r.log.Info(what, "applied", texts(done.Applied), "restart", texts(done.Restart))
	if len(done.Applied) > 0 {
		r.trail.Record(tunnel.Event{
			Kind: tunnel.EventReload, Result: tunnel.ResultOK, Changes: strings.Join(texts(done.Applied), "; "),
		})
	}
	return done, nil
}

// drainedWarning is for a change of a drained cloud.
const drainedWarning = "drained: TCP ports and sockets of callers stay closed, also new ones, until it is started again"

func texts(changes []conf.Change) []string {
	all := make([]string, len(changes))
	for i, c := range changes {
		all[i] = c.String()
	}
	return all
}

// prepareAll prepares changes in order. If one fails, it aborts the others.
func prepareAll(prepare ...func() (tunnel.Prepared, error)) (tunnel.PreparedAll, error) {
	var all tunnel.PreparedAll
	for _, f := range prepare {
		p, err := f()
		if err != nil {
			all.Abort()
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

// atOnce is a change that cannot fail and has nothing to prepare.
func atOnce(commit func()) func() (tunnel.Prepared, error) {
	return func() (tunnel.Prepared, error) { return tunnel.Prepared{Commit: commit, Abort: func() {}}, nil }
}

// handlers are the paths of the admin socket.
func (r *reloader) handlers() map[string]http.Handler {
	return map[string]http.Handler{
		"POST /v1/reload": http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			// The reload continues even if the client disconnects.
			done, err := r.reload(context.WithoutCancel(q.Context()))
			answer(w, done, err)
		}),
	}
}

// answer answers with v, or with err if there is one: the request then has changed nothing.
func answer(w http.ResponseWriter, v any, err error) {
	_, conflict := errors.AsType[conflictError](err)
	switch {
	case errors.As(err, new(notStartedError)):
		api.Refuse(w, http.StatusConflict, api.CodeNotStarted, err)
	case conflict:
		api.Refuse(w, http.StatusConflict, "", err)
	case err != nil:
		api.Refuse(w, http.StatusUnprocessableEntity, api.CodeConfiguration, err)
	default:
		api.Answer(w, v)
	}
}

// conflictError says that a request does not fit the present state of the process. The configuration has no problem.
type conflictError struct{ error }

func conflictf(format string, args ...any) error { return conflictError{fmt.Errorf(format, args...)} }

// notStartedError says that a new process could not take over.
type notStartedError struct{ error }

// warnings is a log handler that keeps the texts of warnings, and no other line.
type warnings struct{ texts []string }

// Enabled implements slog.Handler.
func (*warnings) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }

// Handle implements slog.Handler.
func (w *warnings) Handle(_ context.Context, r slog.Record) error {
	text := r.Message
	r.Attrs(func(a slog.Attr) bool {
		text += " " + a.String()
		return true
	})
	w.texts = append(w.texts, text)
	return nil
}

// WithAttrs implements slog.Handler. What a module adds to each line is no part of a warning.
func (w *warnings) WithAttrs([]slog.Attr) slog.Handler { return w }

// WithGroup implements slog.Handler.
func (w *warnings) WithGroup(string) slog.Handler { return w }

// reloadTimeout is how long a command waits for a change of the configuration. The change waits for a restart that is
// under way, and then opens ports and reads files.
const reloadTimeout = restartTimeout + 10*time.Second

func newReloadCommand() *cobra.Command {
	var ask askFlags
	var output outputFlag
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "Let a running cloud or edge read its configuration again",
		Long: `reload has the running cloud or edge read its configuration file again. It prints each key that has
changed, with the old and the new value, and which keys need a restart. Open connections go on. A
file with a problem changes nothing, and reload prints what "tunnel config check" prints.

A signal SIGHUP does the same; its result is in the log.

  tunnel reload
  systemctl reload tunnel-cloud

A running cloud takes over tcp and udp ports with the tables beside them. Of https it takes over allowfrom,
clientnames and callers; of egress strategies, defaultnodes and clientnames. Of its limits it takes over
connsperaddress, flows and flowsperaddress; of [mode.cloud.join], servers; of [mode.cloud.admin], forwards.
A running edge takes over allow, and the limit flows.
The keys of https and of egress wait for a restart if another key of their table differs as well.

Exit codes: 0 the daemon runs with the file; 1 no answer, or a reload or restart is under way; 3 the file has a
problem.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.check(); err != nil {
				return err
			}
			return askEach(&ask, func(s daemonSocket, name string) error {
				ctx, cancel := limited(cmd.Context(), reloadTimeout)
				defer cancel()
				done := new(reloaded)
				err := api.NewClient(s.path).Call(ctx, http.MethodPost, "/v1/reload", nil, done)
				if err != nil {
					return failed(err)
				}
				return printReloaded(cmd, name, done, &output)
			})
		},
	}
	ask.register(cmd, cloudFile, edgeFile)
	output.register(cmd, "text", "json", "yaml")
	return cmd
}

// printReloaded prints what the daemon called name has done, in the form of the flag.
func printReloaded(cmd *cobra.Command, name string, done *reloaded, output *outputFlag) error {
	if encoded, err := output.encode(cmd.OutOrStdout(), done); encoded {
		return err
	}
	for _, w := range done.Warnings {
		fmt.Fprintln(cmd.ErrOrStderr(), "warning: "+tunnel.Printable(w))
	}
	var b strings.Builder
	list := func(title string, changes []conf.Change) {
		if len(changes) > 0 {
			fmt.Fprintf(&b, "%s: %s\n", name, title)
		}
		for _, c := range changes {
			fmt.Fprintf(&b, "  %s\n", tunnel.Printable(c.String()))
		}
	}
	list("applied", done.Applied)
	list("these keys need a restart", done.Restart)
	if b.Len() == 0 {
		fmt.Fprintf(&b, "%s: nothing has changed\n", name)
	}
	_, err := fmt.Fprint(cmd.OutOrStdout(), b.String())
	return err
}
