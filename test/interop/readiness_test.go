package interop

import (
	"context"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/test/rig"
)

// A cloud is ready when it can be used: when edges can join, and callers dial. Without a node
// their dials fail at once, with Konnectivity's words. (Konnectivity's server is not ready until
// it has an agent. Where readiness leads agents to it, it never has one.) An edge is ready when
// it has a session. Who drains is not ready, and goes on with what it has.
func TestReadiness(t *testing.T) {
	o := prepare(t, "", "")
	edge, err := o.pair.StartEdge()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(edge.Kill)
	until(t, "the edge answers", o.pair.EdgeLog.String, func() bool { return answers(o.pair.EdgeHealth()) })
	if rig.Ready(o.pair.EdgeHealth()) == nil {
		t.Error("an edge without a cloud is ready")
	}
	edge.Kill()

	o.startCloud(t)
	cloudIs := func(ready bool, when string) {
		t.Helper()
		until(t, when, o.pair.CloudLog.String,
			func() bool { return answers(o.pair.CloudHealth()) && (rig.Ready(o.pair.CloudHealth()) == nil) == ready })
	}
	back := serving(t, echo)
	noNode := func() {
		t.Helper()
		for way, dial := range ways(t, o.grpc, o.connect) {
			if err := works(dial, back); err == nil || !strings.Contains(err.Error(), "No agent available") {
				t.Errorf("%s: a dial without a node: %v", way, err)
			}
		}
	}
	cloudIs(true, "a cloud without a node is ready")
	noNode()
	o.startEdge(t) // and waits until it is ready
	for way, dial := range ways(t, o.grpc, o.connect) {
		if err := works(dial, back); err != nil {
			t.Errorf("%s: %v", way, err)
		}
	}
	o.edge.Kill()
	until(t, "the node has gone", o.pair.CloudLog.String, func() bool {
		m, err := rig.Metrics(o.pair.CloudHealth())
		return err == nil && m["tunnel_sessions"] == 0
	})
	cloudIs(true, "a cloud that has lost its node is ready")
	noNode()

	o.startEdge(t)
	c, err := connector(o.connect)(context.Background(), back)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := o.cloud.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	cloudIs(false, "a cloud that drains is not ready")
	until(t, "its front doors close", o.pair.CloudLog.String,
		func() bool { return works(connector(o.connect), back) != nil })
	if answer, err := say(c, "still there?"); err != nil || answer != "still there?" {
		t.Errorf("a conn of a cloud that drains: %q, %v", answer, err)
	}
	c.(interface{ CloseWrite() error }).CloseWrite()
	if rest, err := io.ReadAll(c); err != nil || len(rest) > 0 {
		t.Errorf("its end: %q, %v", rest, err)
	}
	select {
	case <-o.cloud.Done():
		if code := o.cloud.ExitCode(); code != 0 {
			t.Errorf("it ends with exit code %d", code)
		}
	case <-time.After(patience):
		t.Error("a cloud whose last conn has ended does not end")
	}
	until(t, "an edge that has lost its cloud is not ready", o.pair.EdgeLog.String, func() bool {
		return answers(o.pair.EdgeHealth()) && rig.Ready(o.pair.EdgeHealth()) != nil
	})
}

// answers reports whether somebody is there to say how it is.
func answers(health string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+health+"/healthz", nil)
	if err != nil {
		return false
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	res.Body.Close()
	return res.StatusCode == http.StatusOK
}
