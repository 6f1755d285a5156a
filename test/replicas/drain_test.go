package replicas

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/test/rig"
)

// TestRollingRestart stops each replica in turn with SIGTERM, and starts it again when
// it has ended, as an update of a Deployment does. Nobody notices: no request fails, no
// stream loses a byte, and long transfers end as they should, whichever way they go.
func TestRollingRestart(t *testing.T) {
	beside(t)
	n, rate, lasts := 2, 50, 15*time.Second                     // few requests: other tests want the processors as well
	stream := order{Bytes: 192 << 10, BytesPerSecond: 64 << 10} // 3 s
	long := order{Bytes: 8 << 20, BytesPerSecond: 2 << 20}      // 4 s: a busy machine gets it done in the grace period
	if soak() {
		n, rate, lasts = 3, 200, 60*time.Second
		stream = order{Bytes: 1 << 20, BytesPerSecond: 128 << 10} // 8 s
		long = order{Bytes: 1 << 30, BytesPerSecond: 64 << 20}    // 16 s
	}
	f := newFleet(t, size{replicas: local(n), edges: 20})

	next := func(i int) request {
		return request{node: i % len(f.nodes), replica: balanced, tls: (i+i/len(f.nodes))%4 == 3}
	}
	streams := f.startStreams(20, stream, next)
	load := f.startLoad(rate, next)
	for i, r := range f.Replicas {
		ended := f.startLong(i, long)
		since := time.Now()
		f.terminate(r)
		took := f.exits(&r.Member)
		for range cap(ended) {
			if err := <-ended; err != nil {
				t.Errorf("a transfer that ran when %s was stopped: %v", r.Name, err)
			}
		}
		f.start(&r.Member)
		f.joined(n - 1)
		t.Logf("%s has ended after %s and was back after %s", r.Name, took.Round(time.Millisecond),
			time.Since(since).Round(time.Millisecond))
		testkit.Within(t, time.Minute, "the balancer knows that the new one is ready", func() error {
			if n := len(f.balancer.order()); n < len(f.Replicas) {
				return fmt.Errorf("it knows %d", n)
			}
			return nil
		})
	}
	time.Sleep(lasts - time.Since(load.started))
	load.want(every)
	streams.want(20)
	f.sessions(len(f.nodes))
	f.reachable(atOnce)
	t.Logf("%d requests, %d streams of %d bytes in all", len(load.results), streams.whole, streams.bytes)
}

// TestDrainCommand takes a replica out of service by `tunnel drain`. No request fails, a stream goes on, and new
// callers of the drained replica are refused. It then stops as any other replica.
func TestDrainCommand(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "drain") // t.TempDir's path is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	f := newFleet(t, size{replicas: local(2), edges: 6, sockets: dir})
	r := f.Replicas[0]
	load := f.startLoad(50, func(i int) request { return request{node: i % len(f.nodes), replica: balanced} })
	echoed := make(chan error, 1) // one send
	var running atomic.Int64
	go func() {
		o := order{Bytes: 640 << 10, BytesPerSecond: 64 << 10} // 10 s
		echoed <- f.echo(request{node: 0, replica: 0}, o, running.Store)
	}()
	testkit.Within(t, atOnce, "a stream runs", func() error {
		if running.Load() == 0 {
			return errors.New("no byte has come")
		}
		return nil
	})
	drain := exec.CommandContext(t.Context(), program, "drain", "--socket", filepath.Join(dir, r.Name))
	output, err := drain.CombinedOutput()
	if err != nil || !strings.Contains(string(output), "drained") {
		t.Fatalf("tunnel drain: %v\n%s", err, output)
	}
	if rig.Ready(r.Health()) == nil {
		t.Error("/readyz of the drained replica is 200")
	}
	if c, err := net.Dial("tcp", r.Door(door(f.nodes[0], "echo"))); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a new caller of the drained replica: %v, %v; want connection refused", c, err)
	}
	if err := <-echoed; err != nil {
		t.Errorf("the stream: %v", err)
	}
	load.want(every)
	if !f.process(&r.Member).Alive() {
		t.Error("the drained replica has ended")
	}
	f.terminate(r)
	f.exits(&r.Member)
	f.sessions(len(f.nodes))
}

// startLong starts two transfers through the front doors of a replica, of a node that
// it holds and of one that another replica holds, and returns when they run.
func (f *fleet) startLong(replica int, o order) (ended chan error) {
	f.t.Helper()
	here, elsewhere := -1, -1
	for n, p := range f.ports {
		if p.holder() == replica {
			here = n
		} else {
			elsewhere = n
		}
	}
	if here < 0 || elsewhere < 0 {
		here, elsewhere = 0, len(f.nodes)-1 // a replica that has just come holds nothing
	}
	ended = make(chan error, 2) // two sends
	var running atomic.Int64
	for _, n := range []int{here, elsewhere} {
		go func() {
			first := true
			ended <- f.pour(request{node: n, replica: replica}, o, func(int64) {
				if first {
					running.Add(1)
				}
				first = false
			})
		}()
	}
	testkit.Within(f.t, hangs, "the transfers run", func() error {
		if n := running.Load(); n < 2 {
			return fmt.Errorf("%d of 2 do", n)
		}
		return nil
	})
	return ended
}

// pour has bytes sent at a pace, and checks each.
func (f *fleet) pour(r request, o order, arrived func(n int64)) error {
	c, err := f.stream(r, "pour")
	if err != nil {
		return err
	}
	defer c.Close()
	if err := binary.Write(c, binary.BigEndian, o); err != nil {
		return err
	}
	return wholly(c, o.Bytes, arrived)
}

// terminate is SIGTERM. It returns when the replica says that it is not ready.
func (f *fleet) terminate(r *rig.Replica) {
	f.t.Helper()
	if err := f.process(&r.Member).Signal(syscall.SIGTERM); err != nil {
		f.t.Fatal(err)
	}
	testkit.Within(f.t, atOnce, r.Name+" says that it is not ready any more", func() error {
		if rig.Ready(r.Health()) == nil {
			return errors.New("/readyz is 200")
		}
		return nil
	})
}

// exitWithin is from SIGTERM to the end of a process.
const exitWithin = 30 * time.Second

// exits waits until a replica that was told to has ended, and returns how long that took.
func (f *fleet) exits(m *rig.Member) time.Duration {
	f.t.Helper()
	p, since := f.process(m), time.Now()
	select {
	case <-p.Done():
		if p.ExitCode() != 0 {
			f.t.Errorf("%s has ended with exit code %d, want 0", m.Name, p.ExitCode())
		}
	case <-time.After(exitWithin):
		f.t.Fatalf("%s has not ended within %s", m.Name, exitWithin)
	}
	f.forget(m)
	return time.Since(since)
}

// TestIdleConnsLetAReplicaStop: connections that callers keep for later requests, as kube-apiserver does,
// end before the grace period is over, so that its end cuts no request short.
func TestIdleConnsLetAReplicaStop(t *testing.T) {
	beside(t)
	f := newFleet(t, size{replicas: local(2), edges: 1})
	holder := f.ports[0].holder()
	stops, stays := f.Replicas[holder], f.Replicas[1-holder]
	node := f.nodes[0]
	passed, err := tls.Dial("tcp", stops.HTTPSDoor(), &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: f.pool(), ServerName: node,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer passed.Close()
	f.echoes(stops, node)
	f.echoes(stays, node) // relayed
	f.terminate(stops)
	if took := f.exits(&stops.Member); took >= tunnel.GracePeriod-time.Second {
		t.Errorf("the replica ended %v after SIGTERM: it has waited for connections that nobody used", took)
	}
	f.start(&stops.Member)
}

// TestIdleConnsLetAnEdgeStop: when an edge stops, idle connections to its node end before the grace period is over,
// whichever replica has the caller.
func TestIdleConnsLetAnEdgeStop(t *testing.T) {
	beside(t)
	f := newFleet(t, size{replicas: local(2), edges: 1})
	for _, r := range f.Replicas {
		f.echoes(r, f.nodes[0])
	}
	if err := f.process(f.edges[0]).Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if took := f.exits(f.edges[0]); took >= tunnel.GracePeriod-time.Second {
		t.Errorf("the edge ended %v after SIGTERM: it has waited for connections that nobody used", took)
	}
	f.start(f.edges[0])
}

// echoes opens a connection to a node through a replica, sends a byte, and gets it back. The connection stays open.
func (f *fleet) echoes(r *rig.Replica, node string) {
	f.t.Helper()
	c, err := net.Dial("tcp", r.Door(door(node, "echo")))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { c.Close() })
	if _, err := io.WriteString(c, "x"); err != nil {
		f.t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		f.t.Fatal(err)
	}
}
