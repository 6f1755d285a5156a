package check

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/setup"
)

// daemon asks the cloud or the edge of this machine over its admin socket.
type daemon struct {
	mode   string // "cloud" or "edge"
	socket string // "": none is configured

	asked bool
	last  *api.Status // the last answer; nil: the daemon did not answer
	err   error
}

// status returns the last answer. It asks only if nobody has asked before. nil: the daemon did not answer.
func (d *daemon) status(ctx context.Context) *api.Status {
	if d.asked || d.socket == "" {
		return d.last
	}
	return d.ask(ctx)
}

// ask asks the daemon for its status, also if somebody has asked before. nil: the daemon did not answer.
func (d *daemon) ask(ctx context.Context) *api.Status {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	d.asked = true
	d.last, d.err = api.NewClient(d.socket).Status(ctx)
	if d.err != nil {
		d.last = nil
	}
	return d.last
}

// running checks whether the daemon runs.
func (d *daemon) running(ctx context.Context) Result {
	if d.socket == "" {
		return Skipped(`[mode.%s.admin] names no socket, by which a running %[1]s could be asked`, d.mode)
	}
	st := d.status(ctx)
	switch {
	case api.NotRunning(d.err):
		return Fail(fmt.Sprintf("start it: systemctl start tunnel-%s, or tunnel %[1]s -c FILE; its log says why it stops",
			d.mode), "%v", d.err)
	case errors.Is(d.err, fs.ErrPermission):
		return Fail("run this as root, such as with sudo, or as the user of the daemon", "%v", d.err)
	case isTimeout(d.err):
		return Fail("is the machine overloaded? Else the "+d.mode+" hangs: tunnel diag collects its state, for a report",
			"the %s has the socket %s, and does not answer within %s", d.mode, d.socket, stepTimeout)
	case st == nil:
		return Fail("the log of the "+d.mode+" says more", "%s: %v", d.socket, d.err)
	case st.Mode != d.mode:
		return Fail("correct socket in the configuration", "%s is the socket of a running %s", d.socket, st.Mode)
	}
	return OK("%s runs for %s", st.Software, setup.Spell(st.Time.Sub(st.Started).Truncate(time.Second)))
}

// unknown reports whether the daemon may run although it has not answered.
func (d *daemon) unknown(ctx context.Context) bool {
	return d.status(ctx) == nil && !api.NotRunning(d.err)
}

// modules checks the lines of /readyz. It leaves out the line of the sessions, which has a check of its own.
func (d *daemon) modules(ctx context.Context) Result {
	st := d.status(ctx)
	if st == nil {
		return Skipped("the %s does not answer", d.mode)
	}
	var failed, degraded []string
	for _, c := range st.Checks {
		switch {
		case d.mode == "edge" && c.Name == "stream":
		case c.State == admin.StateFailed:
			failed = append(failed, c.Name+": "+c.Text)
		case c.State == admin.StateDegraded:
			degraded = append(degraded, c.Name+": "+c.Text)
		}
	}
	const do = "each text says what to do; tunnel status -o wide shows all lines"
	switch {
	case failed != nil:
		return Fail(do, "%s", strings.Join(append(failed, degraded...), "; "))
	case degraded != nil:
		return Warn(do, "%s", strings.Join(degraded, "; "))
	}
	return OK("%d lines of /readyz, and none is degraded", len(st.Checks))
}
