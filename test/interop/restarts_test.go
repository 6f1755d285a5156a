package interop

import (
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"
)

// What Konnectivity's own tests ask of restarts: dials fail at once while a side is away, work
// again when it is back, and who drains lets conns end.
func TestRestarts(t *testing.T) {
	o := start(t)
	addr, stop, err := serve(echo)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	dialers := o.dialers(t)
	dialers["connect"] = connector(o.connect)
	all := func(what string) {
		t.Helper()
		for name, dial := range dialers {
			if err := roundTrip(dial, addr); err != nil {
				t.Errorf("%s: %s: %v", what, name, err)
			}
		}
	}
	all("at first")

	open := make(map[string]net.Conn)
	for name, dial := range dialers {
		c, err := dial(t.Context(), addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if answer, err := say(c, "here"); err != nil || answer != "here" {
			t.Fatalf("%s: %q, %v", name, answer, err)
		}
		open[name] = c
	}
	o.edge.Kill()
	for name, c := range open {
		if _, err := say(c, "and now?"); err == nil || errors.Is(err, errSilent) {
			t.Errorf("%s: a conn whose edge has gone: %v", name, err)
		}
	}
	for name, dial := range dialers {
		began := time.Now()
		for {
			err := roundTrip(dial, addr)
			if err != nil && strings.Contains(err.Error(), "No agent available") {
				break
			}
			if time.Since(began) > patience {
				t.Fatalf("%s: the edge has gone: %v", name, err)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	o.startEdge(t)
	all("with a new edge")

	// A conn of an edge that is asked to stop goes on; the edge ends when it has.
	c, err := dialers["connect"](t.Context(), addr)
	if err != nil {
		t.Fatal(err)
	}
	if err := o.edge.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond)
	if _, err := io.WriteString(c, "still there?"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, len("still there?"))); err != nil {
		t.Errorf("a conn of an edge that stops: %v", err)
	}
	c.(*net.UnixConn).CloseWrite()
	if rest, err := io.ReadAll(c); err != nil || len(rest) > 0 {
		t.Errorf("its end: %q, %v", rest, err)
	}
	c.Close()
	select {
	case <-o.edge.Done():
	case <-time.After(patience):
		t.Error("the edge does not end")
	}
	o.startEdge(t)

	o.cloud.Kill()
	if err := roundTrip(dialers["connect"], addr); err == nil {
		t.Error("a dial through a cloud that is away")
	}
	o.startCloud(t)
	for began := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		if roundTrip(dialers["connect"], addr) == nil {
			break
		}
		if time.Since(began) > 2*patience {
			t.Fatal("the edge has not come back")
		}
	}
	all("with a new cloud")
}
