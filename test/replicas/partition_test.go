package replicas

import (
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// blip is an interruption that nobody has to notice: what TCP sends again arrives.
const blip = time.Second

// TestPartition drops the packets between two replicas, and between edges and a
// replica, without a word: for a moment, in which nothing may be lost, and in the long
// variant until everybody has noticed.
func TestPartition(t *testing.T) {
	beside(t)
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skipf("networks are made with ip(8), of iproute2: %v", err)
	}
	if !testkit.InOwnNetwork(t, programKey+"="+program) {
		return
	}
	l := newLab(t)
	hosts, at := []rig.Host{l.host(), l.host()}, l.host()
	f := newFleet(t, size{replicas: hosts, edges: 8, at: at})
	if len(f.held(0)) == 0 || len(f.held(1)) == 0 {
		t.Fatal("a replica holds no node")
	}
	f.blip(l, hosts[0], hosts[1])
	f.blip(l, at, hosts[0])
	if soak() {
		f.apart(l, hosts[0], hosts[1])
		f.cutOff(l, at, hosts[0])
	}
}

// both asks each node through both replicas.
func (f *fleet) both(i int) request {
	return request{node: i % len(f.nodes), replica: i / len(f.nodes) % len(f.Replicas)}
}

// blip cuts for a moment, in the middle of requests and streams.
func (f *fleet) blip(l *lab, a, b rig.Host) {
	f.t.Helper()
	established := f.established()
	streams := f.startStreams(16, order{Bytes: 256 << 10, BytesPerSecond: 128 << 10}, f.both)
	load := f.startLoad(40, f.both)
	mend := l.cut(a, b)
	time.Sleep(blip)
	mend()
	time.Sleep(2 * time.Second)
	load.want(every)
	streams.want(16)
	if n := f.established() - established; n != 0 {
		f.t.Errorf("%v sessions were made anew after %s", n, blip)
	}
	var slowest time.Duration
	for _, r := range load.results {
		slowest = max(slowest, r.took)
	}
	f.t.Logf("%s - %s cut for %s: the slowest of %d requests took %s", a.IP, b.IP, blip, len(load.results),
		slowest.Round(time.Millisecond))
}

// established returns how many sessions the replicas have had.
func (f *fleet) established() (sum float64) {
	f.t.Helper()
	for _, r := range f.Replicas {
		n, err := metric(r, "tunnel_sessions_established_total")
		if err != nil {
			f.t.Fatal(err)
		}
		sum += n
	}
	return sum
}

// apart cuts two replicas off from each other. Each serves what it holds meanwhile. A
// node that changes sides in that time is found afterwards.
func (f *fleet) apart(l *lab, a, b rig.Host) {
	t := f.t
	t.Helper()
	holder := make([]int, len(f.nodes))
	for n, p := range f.ports {
		holder[n] = p.holder()
	}
	crossing := make(chan error, 1) // one send
	running := make(chan struct{})
	go func() {
		first := true
		n := f.held(0)[0]
		crossing <- f.echo(request{node: n, replica: 1}, order{Bytes: 16 << 20, BytesPerSecond: 256 << 10}, func(int64) {
			if first {
				close(running)
			}
			first = false
		})
	}()
	<-running
	local := f.startLoad(40, func(i int) request {
		n := 1 + i%(len(f.nodes)-1) // not the one that moves
		return request{node: n, replica: holder[n]}
	})

	cut := time.Now()
	mend := l.cut(a, b)
	testkit.Within(t, noticeWithin, "both replicas notice", func() error {
		for _, r := range f.Replicas {
			if n, err := metric(r, "tunnel_replicas"); err != nil || n != 0 {
				return fmt.Errorf("%s: %v replicas (%w)", r.Name, n, err)
			}
		}
		return nil
	})
	noticed := time.Since(cut)
	select {
	case err := <-crossing:
		if !errors.Is(err, syscall.ECONNRESET) { // by the write or by the read: Linux tells only one of them
			t.Errorf("a stream that crossed the cut ended with %v, want a reset", err)
		}
	case <-time.After(atOnce):
		t.Error("a stream that crossed the cut goes on")
	}
	for n := range f.nodes {
		asked := time.Now()
		if err := f.do(t.Context(), request{node: n, replica: 1 - holder[n]}); err == nil {
			t.Errorf("node %d was reached through the cut", n)
		}
		if took := time.Since(asked); took > atOnce {
			t.Errorf("it took %s to say that node %d cannot be reached", took, n)
		}
	}
	to := 1 - holder[0]
	f.balancer.lead(to)
	f.kill(f.edges[0])
	f.start(f.edges[0])
	testkit.Within(t, readyWithin, "a node has changed sides", func() error {
		return f.do(t.Context(), request{node: 0, replica: to})
	})
	f.balancer.lead(balanced)

	mended := time.Now()
	mend()
	f.joined(1)
	f.reachable(atOnce)
	healed := time.Since(mended)
	local.want(every)
	f.steady()
	t.Logf("replicas apart: noticed after %s, healed after %s", noticed.Round(time.Millisecond),
		healed.Round(time.Millisecond))
}

// cutOff cuts edges off from a replica, whose front doors work on: their nodes are
// reached through it by way of the other one.
func (f *fleet) cutOff(l *lab, edges, replica rig.Host) {
	t := f.t
	t.Helper()
	mine := f.held(0)
	if len(mine) == 0 {
		t.Fatal("the replica holds no node")
	}
	theirs := f.held(1)
	others := f.startLoad(40, func(i int) request {
		return request{node: theirs[i%len(theirs)], replica: i / len(theirs) % 2}
	})
	cut := time.Now()
	mend := l.cut(edges, replica)
	testkit.Within(t, noticeWithin, "the replica notices", func() error {
		n, err := metric(f.Replicas[0], "tunnel_sessions")
		if err == nil && n != 0 {
			err = fmt.Errorf("it has %v sessions", n)
		}
		return err
	})
	noticed := time.Since(cut)
	f.reachable(readyWithin)
	back := time.Since(cut)
	others.want(every)
	mend()
	f.steady()
	t.Logf("%d edges cut off from their replica: noticed after %s, all reached by way of the other one after %s",
		len(mine), noticed.Round(time.Millisecond), back.Round(time.Millisecond))
}

// steady looks for a while whether all is as if nothing had been: each node has one
// session, and no request fails.
func (f *fleet) steady() {
	f.t.Helper()
	f.sessions(len(f.nodes))
	load := f.startLoad(40, f.both)
	time.Sleep(4 * time.Second)
	load.want(every)
	f.sessions(len(f.nodes))
}
