package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tap"
	"tunnel.example/tunnel/pkg/tunnel"
)

// What docs/nodes.md and docs/watch.md show and no other test runs: a list of two nodes, and the refused conns of a
// tap.
func TestAsShown(t *testing.T) {
	o := newOperated(t, nil)
	code, out, errs := says(t, "ls", "-c", o.cloud, "edge1", "edge2")
	if code != exitAway || !strings.Contains(out, "edge1  connected ") || strings.Contains(out, "edge2") ||
		!strings.Contains(errs, "no replica knows the node edge2") {
		t.Errorf("ls edge1 edge2: exit code %d\n%s%s", code, out, errs)
	}

	// One port leads to a target that answers, and one to a target that the edge does not permit.
	answers, denied := testkit.FreeAddress(t), testkit.FreeAddress(t)
	o.want(exitOK, "forward", "add", "-c", o.cloud, answers, "edge1/"+testkit.Serve(t, testkit.Echo))
	o.want(exitOK, "forward", "add", "-c", o.cloud, denied, "edge1/192.0.2.1:22")
	text := o.tapped("-c", o.cloud, "-o", "json")
	testkit.Within(t, 20*time.Second, "the tap shows an end and a refusal", func() error {
		for _, address := range []string{answers, denied} {
			c, err := net.Dial("tcp", address)
			if err != nil {
				return err
			}
			err = c.(*net.TCPConn).CloseWrite()
			io.Copy(io.Discard, c) // a refused conn is reset
			if err = errors.Join(err, c.Close()); err != nil {
				return err
			}
		}
		phases := make(map[tunnel.Phase]int)
		for line := range strings.Lines(text.String()) {
			var l tap.Line
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				return fmt.Errorf("%q: %w", line, err) // only a part of the line is there yet
			}
			phases[l.Phase]++
			if refused := l.Door == denied; refused != (l.Phase == tunnel.PhaseRefused) || refused && l.Result != "denied" {
				t.Errorf("a line of the port %s, of which %s is denied: %s", l.Door, denied, line)
			}
		}
		if phases[tunnel.PhaseEnd] == 0 || phases[tunnel.PhaseRefused] == 0 {
			return fmt.Errorf("%v", phases)
		}
		return nil
	})
}

// An operator checks one pod of the cloud and stops it by kubectl.
func TestKubectlPluginPod(t *testing.T) {
	o := newOperated(t, nil)
	u := newKubectlUser(t)
	u.pods(fakePod{name: "tunnel-cloud-a", config: o.cloud}, fakePod{name: "tunnel-cloud-b", config: "none"})
	// The exit code tells of this machine, too.
	if _, out, errs := u.run(kubectlPlugin, "--pod", "tunnel-cloud-a", "check"); !strings.Contains(out, "certificates\n") {
		t.Errorf("check prints\n%s%s", out, errs)
	}
	u.wants(exitOK, "--pod", "tunnel-cloud-a", "drain", "--stop")
	if code, text := o.cloudRuns.wait(); code != exitOK {
		t.Errorf("the cloud ends with the exit code %d: %s", code, text)
	}
}
