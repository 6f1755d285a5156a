package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// drained is the answer to POST /v1/drain.
type drained struct {
	Mode  string `json:"mode"`            // "cloud" or "edge"
	Conns int64  `json:"conns"`           // how many conns are still open
	Nodes int    `json:"nodes,omitempty"` // how many nodes have no session with another replica of a cloud
}

// errDrained is the reason for which /readyz fails after tunnel drain.
var errDrained = errors.New("drained by tunnel drain")

// drain takes the process out of service: /readyz fails, the edges of a cloud move to other replicas, and no new conn
// opens. Open conns go on. If stops is set, the caller stops the process afterwards.
func (r *restarter) drain(ctx context.Context, stops bool) (*drained, error) {
	if !r.reloader.lock() {
		return nil, errBusy
	}
	defer r.reloader.mu.Unlock()
	switch {
	case r.reloader.successor != 0:
		return nil, errLeft
	// The units of tunnel have Restart=always: systemd starts the process again after any exit code.
	case stops && (r.isService() || r.daemon.before == nil && unitAdvice(os.Getenv, os.Getpid(), os.Getppid(), "") != ""):
		return nil, conflictf("systemd may start it again: run systemctl stop on its unit, such as tunnel-%s, which drains "+
			"it the same way", r.daemon.mode)
	case r.edges != nil && !stops && !r.daemon.drained.Load() && r.edges.Alone():
		return nil, conflictf("there is no other replica that could take the edges: " +
			"end it by tunnel drain --stop (a systemd service: by systemctl stop), or replace it by tunnel restart")
	}
	if !r.daemon.drained.Swap(true) {
		r.daemon.log.Info("draining, as tunnel drain asks")
		if r.client != nil {
			r.client.Drain()
		}
		if r.daemon.site != nil {
			r.daemon.site.Drain()
		}
		if r.edges != nil && !stops { // if the process stops, stopping closes the sockets
			r.edges.Leave(ctx)
			r.daemon.sockets.Close(listen.Callers)
			r.daemon.sockets.Close(listen.Edges) // the one port, and the agents' port
			r.daemon.log.Info("drained: no new conn is accepted")
		}
	}
	done := &drained{Mode: r.daemon.mode, Conns: r.daemon.conns()}
	if r.edges != nil && !stops {
		done.Nodes = r.edges.Unmoved()
	}
	return done, nil
}

// drainCheck is the line of /readyz after a drain.
func (d *daemon) drainCheck() admin.Check {
	return admin.Check{
		Name: "drain", Ready: func() error { return errDrained }, Off: func() bool { return !d.drained.Load() },
	}
}

// drainTimeout is how long tunnel drain waits for the answer. A cloud answers when its edges have moved, which may take
// a part of the grace period.
const drainTimeout = busyTime + tunnel.GracePeriod + 10*time.Second

func newDrainCommand() *cobra.Command {
	var ask askFlags
	var output outputFlag
	var stops bool
	cmd := &cobra.Command{
		Use:   "drain",
		Short: "Take a running cloud or edge out of service",
		Long: `drain takes the running cloud or edge out of service. Its /readyz fails. The edges of a cloud move to
the other replicas, and then its ports close. An edge gets no new connections. Open connections go on, and
the process does not end. To bring it back into service, restart it.

With --stop the process ends afterwards, as after SIGTERM: open connections have 25 s. Under systemd, --stop
is refused, since systemd would start the process again: systemctl stop drains it the same way.

  tunnel drain
  tunnel drain --stop

Exit codes: 0 drained; 1 no answer, a reload or a restart is under way, or the process refuses (see above); 3
the configuration names no admin socket.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.check(); err != nil {
				return err
			}
			path := "/v1/drain"
			if stops {
				path += "?stop"
			}
			return askEach(&ask, func(s daemonSocket, name string) error {
				ctx, cancel := limited(cmd.Context(), drainTimeout)
				defer cancel()
				done := new(drained)
				if err := api.NewClient(s.path).Call(ctx, http.MethodPost, path, nil, done); err != nil {
					return failed(err)
				}
				if encoded, err := output.encode(cmd.OutOrStdout(), done); encoded {
					return err
				}
				more := ""
				if done.Nodes > 0 {
					more = fmt.Sprintf("; %d nodes have no other replica yet, and are reached through this one", done.Nodes)
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: drained; %d conns go on%s\n", name, done.Conns, more)
				return err
			})
		},
	}
	ask.register(cmd, cloudFile, edgeFile)
	output.register(cmd, "text", "json", "yaml")
	cmd.Flags().BoolVar(&stops, "stop", false, "end the process afterwards")
	return cmd
}
