package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
)

// An edge with the table serves beside its other modules, from the start to the end of the process: it adds its rules
// and leaves none behind.
func TestEdgeWithServices(t *testing.T) {
	if !testkit.InOwnNetwork(t) { // its rules must not be those of this machine
		return
	}
	o := newOperated(t, nil)
	o.edgeRuns.cmd.Process.Signal(os.Interrupt)
	o.edgeRuns.wait()
	state := filepath.Join(filepath.Dir(o.edge), "state", "services.db")
	f, err := os.OpenFile(o.edge, os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = fmt.Fprintf(f, "\n[mode.edge.services]\nstate = %q\n", state)
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	o.startEdge()
	o.eventually("the edge has its state", exitOK, "services", "ls", "-c", o.edge)
	if out := o.want(exitOK, "services", "ls", "-c", o.edge); !strings.Contains(out, "no Services") {
		t.Errorf("it says %s", out)
	}
	if _, err := os.Stat(state); err != nil {
		t.Error(err)
	}
}

// The network of pods tells the relay of Services to which networks it has routes, if there is a relay.
func TestRoutesAreToldToServices(t *testing.T) {
	w := &edgeWiring{daemon: &daemon{log: slog.New(slog.DiscardHandler)}, conf: new(conf.Edge), policy: new(auth.Policy)}
	if w.podNetwork().Routed != nil {
		t.Error("an edge without Services tells somebody of its routes")
	}
	w.conf.Services = conf.EdgeServices{On: true, State: filepath.Join(t.TempDir(), "services.db")}
	if err := w.addServices(); err != nil {
		t.Fatal(err)
	}
	if w.podNetwork().Routed == nil {
		t.Error("an edge with Services tells nobody of its routes")
	}
}
