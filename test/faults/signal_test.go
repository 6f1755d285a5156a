package faults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// either runs f once for each side of a pair.
func either(t *testing.T, f func(t *testing.T, p *pair, side string, process func() *rig.Process)) {
	t.Helper()
	for _, side := range []string{"cloud", "edge"} {
		t.Run(side, func(t *testing.T) {
			t.Parallel()
			p := newPair(t)
			p.start()
			f(t, p, side, func() *rig.Process {
				if side == "cloud" {
					return p.cloud
				}
				return p.edge
			})
		})
	}
}

// forget says that a process has ended as it should.
func (p *pair) forget(side string) {
	if side == "cloud" {
		p.cloud = nil
	} else {
		p.edge = nil
	}
}

// exits waits until the process has ended and checks its exit code.
func exits(t *testing.T, process *rig.Process, limit time.Duration, code int) {
	t.Helper()
	select {
	case <-process.Done():
		if process.ExitCode() != code {
			t.Errorf("exit code %d, want %d", process.ExitCode(), code)
		}
	case <-time.After(limit):
		t.Fatalf("has not ended within %s", limit)
	}
}

// terminate sends SIGTERM and waits until the process says that it takes nothing more.
func (p *pair) terminate(side string, process *rig.Process) {
	p.t.Helper()
	if err := process.Signal(syscall.SIGTERM); err != nil {
		p.t.Fatal(err)
	}
	testkit.Within(p.t, atOnce, "a new conn is refused while the "+side+" drains", func() error {
		if err := tryEcho(context.Background(), p.Door("echo")); err == nil {
			return errors.New("a new conn was served")
		}
		return nil
	})
}

// TestTerminateDrains stops each side with SIGTERM during a transfer: it is finished,
// and then the process ends.
func TestTerminateDrains(t *testing.T) {
	t.Parallel()
	either(t, func(t *testing.T, p *pair, side string, process func() *rig.Process) {
		c, closeIt, err := dial(t.Context(), p.Door("bulk"))
		if err != nil {
			t.Fatal(err)
		}
		defer closeIt()
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		// Eight seconds both ways, so slow that a busy machine ends it in the grace period.
		x := transfer{Up: 8 << 20, Down: 8 << 20, BytesPerSecond: 1 << 20}
		var arrived atomic.Int64
		ended := make(chan error, 1)
		go func() { ended <- x.run(c, func(n int64) { arrived.Store(n) }) }()
		testkit.Within(t, patience, "the transfer is running", func() error {
			if n := arrived.Load(); n == 0 {
				return errors.New("no byte has arrived")
			}
			return nil
		})

		if n := arrived.Load(); n == x.Down {
			t.Error("the transfer was over before the process was asked to stop")
		}
		p.terminate(side, process())
		if err := <-ended; err != nil {
			t.Errorf("the transfer that was running: %v", err)
		}
		closeIt()
		// The cloud gives an edge a second to hang up.
		exits(t, process(), atOnce+time.Second, 0)
		p.forget(side)
	})
}

// apart is how far apart two signals are that are not taken for one.
const apart = 500 * time.Millisecond

// TestSecondTerminateStops stops each side while a conn is open that would not end.
func TestSecondTerminateStops(t *testing.T) {
	t.Parallel()
	either(t, func(t *testing.T, p *pair, side string, process func() *rig.Process) {
		held := make(chan error, 1)
		up := make(chan struct{})
		go func() { held <- tryHold(t.Context(), p.Door("hold"), false, func() { close(up) }) }()
		select {
		case <-up:
		case err := <-held:
			t.Fatal(err)
		}
		p.terminate(side, process())
		select {
		case err := <-held:
			t.Fatalf("the open conn did not survive the first signal: %v", err)
		default:
		}
		time.Sleep(apart)
		if !process().Alive() {
			t.Fatal("the process did not wait for the open conn")
		}
		// A process that is off the processor for long takes two signals for one, as if they had come at once.
		for n := 0; process().Alive() && n < 10; n++ {
			process().Signal(syscall.SIGTERM)
			time.Sleep(apart)
		}
		exits(t, process(), atOnce, 1)
		p.forget(side)
		select {
		case err := <-held:
			if errors.Is(err, io.EOF) {
				t.Error("the open conn has ended cleanly, as if nothing were missing")
			}
		case <-time.After(atOnce):
			t.Error("the open conn has not ended")
		}
	})
}

// TestSilentEdge stops the edge without a word for longer than the keepalive: what a
// dead NAT entry or a pulled cable looks like.
func TestSilentEdge(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.start()
	base := p.baseline()
	traffic := p.startTraffic()

	fault := time.Now()
	if err := p.edge.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	dead := time.Now()
	noticed := testkit.Within(t, noticeWithin, "the cloud gives the session up", func() error { return p.sessions(0) })
	time.Sleep(time.Until(fault.Add(20 * time.Second)))
	mended := time.Now()
	if err := p.edge.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	took := traffic.wait(mended, backWithin)
	slowest := traffic.judge(fault, dead, mended, noticeWithin)
	traffic.stop()
	quiet := p.back(base)
	t.Logf("noticed after %s, last error after %s, all back after %s, quiet after %s",
		noticed.Round(time.Millisecond), slowest.Round(time.Millisecond), took.Round(time.Millisecond),
		quiet.Round(time.Millisecond))
}

// TestEdgeBeforeCloud starts the edge first, as a node does that boots while the
// control plane is away.
func TestEdgeBeforeCloud(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.startEdge()
	testkit.Within(t, patience, "the edge says that it is alive and why it is not ready", func() error {
		err := rig.Ready(p.EdgeHealth())
		if err == nil || !strings.Contains(err.Error(), "is the cloud running") {
			return fmt.Errorf("readyz says: %w", err)
		}
		return nil
	})
	// Long enough for its pauses to have grown.
	time.Sleep(3 * time.Second)
	if !p.edge.Alive() {
		t.Fatal("the edge does not wait for the cloud")
	}
	p.startCloud()
	p.waitReady(patience)
	if err := tryEcho(t.Context(), p.Door("echo")); err != nil {
		t.Error(err)
	}
}

// TestPortTaken starts the cloud where something listens already.
func TestPortTaken(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	ln, err := net.Listen("tcp", p.Door("echo"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	p.startCloud()
	exits(t, p.cloud, atOnce, 1)
	p.forget("cloud")
	if log := p.CloudLog.String(); !strings.Contains(log, "ss -ltnp") || !strings.Contains(log, p.Door("echo")) {
		t.Errorf("the cloud does not say which port is taken and what to do:\n%s", log)
	}
}
