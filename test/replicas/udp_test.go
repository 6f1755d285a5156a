package replicas

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// backWithin is how long datagrams may be lost after a session has ended: until the edge has another
// one, and the port dials again.
const backWithin = readyWithin

// newUDPTarget sends every datagram back.
func newUDPTarget(t *testing.T) (addr string) {
	t.Helper()
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	t.Cleanup(func() {
		c.Close()
		<-ended
	})
	go func() {
		defer close(ended)
		for b := make([]byte, 1<<16); ; {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			c.WriteToUDPAddrPort(b[:n], from)
		}
	}()
	return c.LocalAddr().String()
}

// udpCaller is a caller of the UDP port of a replica.
type udpCaller struct {
	*net.UDPConn
	n int // questions asked
}

func (f *fleet) udpCaller(r *rig.Replica) *udpCaller {
	f.t.Helper()
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(r.GRPC())))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { c.Close() })
	return &udpCaller{UDPConn: c}
}

// ask sends a datagram that the target sends back, and waits for it. Answers to earlier questions may
// come first.
func (c *udpCaller) ask(limit time.Duration) error { return c.askSince(c.n+1, limit) }

// askSince is ask, but any answer to a question from first on will do.
func (c *udpCaller) askSince(first int, limit time.Duration) error {
	c.n++
	if _, err := fmt.Fprint(c, "question ", c.n); err != nil {
		return err
	}
	c.SetReadDeadline(time.Now().Add(limit))
	for b := make([]byte, 100); ; {
		n, err := c.Read(b)
		if err != nil {
			return err
		}
		var asked int
		if _, err := fmt.Sscanf(string(b[:n]), "question %d", &asked); err == nil && asked >= first {
			return nil
		}
	}
}

// answered waits until the target answers a question of this caller. It asks every 50 ms, and on a busy
// machine an answer takes longer.
func (c *udpCaller) answered(t *testing.T, limit time.Duration, what string) time.Duration {
	t.Helper()
	first := c.n + 1
	return testkit.Within(t, limit, what, func() error { return c.askSince(first, poll) })
}

// noUDPIsLost fails if a replica or an edge has dropped a datagram that has not waited too long for a processor.
func noUDPIsLost(t *testing.T, m interface {
	Metrics() (map[string]float64, error)
}) {
	t.Helper()
	all, err := m.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	for name, n := range all {
		if strings.HasPrefix(name, "tunnel_udp_dropped_total") && !strings.Contains(name, `"late"`) && n != 0 {
			t.Errorf("%s is %v", name, n)
		}
	}
}

// TestUDPEverywhere: the UDP port of every replica reaches the node, relayed or not.
func TestUDPEverywhere(t *testing.T) {
	beside(t)
	f := newFleet(t, size{replicas: local(3), edges: 1, udp: newUDPTarget(t)})
	before := f.relayed()
	for _, r := range f.Replicas {
		for range 3 {
			c := f.udpCaller(r)
			for range 100 {
				c.answered(t, atOnce, "the target answers through "+r.Name)
			}
		}
		noUDPIsLost(t, r)
	}
	noUDPIsLost(t, f.edges[0])
	if got := f.relayed() - before; got != 2*2 { // counted at both ends
		t.Errorf("%d conns are relayed, want one for each replica that does not hold the node", got/2)
	}
}

// TestUDPAfterAKill: the replica that holds the node is killed, and the edge as well. The callers of
// the other replicas get answers again, with the sockets that they have.
func TestUDPAfterAKill(t *testing.T) {
	beside(t)
	f := newFleet(t, size{replicas: local(2), edges: 1, udp: newUDPTarget(t)})
	holder := f.ports[0].holder()
	other := f.Replicas[1-holder]
	c := f.udpCaller(other)
	c.answered(t, atOnce, "the target answers")
	f.kill(&f.Replicas[holder].Member)
	took := c.answered(t, backWithin, "the target answers after the replica was killed")
	t.Logf("back after %v", took.Round(time.Millisecond))
	f.kill(f.edges[0])
	f.start(f.edges[0])
	took = c.answered(t, backWithin+noticeWithin, "the target answers after the edge was killed")
	t.Logf("back after %v", took.Round(time.Millisecond))
	f.start(&f.Replicas[holder].Member)
}

// TestUDPWhileAReplicaStops: the flows of a replica that is asked to stop go on while it drains, and it
// ends by itself. The flows of the other replica are not affected for longer than it takes to dial.
func TestUDPWhileAReplicaStops(t *testing.T) {
	beside(t)
	f := newFleet(t, size{replicas: local(2), edges: 1, udp: newUDPTarget(t)})
	holder := f.ports[0].holder()
	stops, stays := f.Replicas[holder], f.Replicas[1-holder]
	old, other := f.udpCaller(stops), f.udpCaller(stays)
	old.answered(t, atOnce, "the target answers")
	other.answered(t, atOnce, "the target answers")
	started := time.Now()
	f.terminate(stops)
	// Neither caller waits for the other: a flow that is idle for two seconds may end.
	var asking sync.WaitGroup
	asks := func(c *udpCaller, through string) {
		answers, last := 0, started
		for time.Since(started) < 8*time.Second { // longer than the three seconds of the hand over
			silent := time.Since(last)
			first := c.n + 1
			if err := testkit.Poll(atOnce, func() error { return c.askSince(first, time.Second) }); err != nil {
				if silent > 1500*time.Millisecond {
					t.Logf("this machine was late to ask: the flow has ended, as it may after two idle seconds")
					return
				}
				t.Errorf("%v after SIGTERM, %s, with %d answers: %v", time.Since(started), through, answers, err)
				return
			}
			answers, last = answers+1, time.Now()
			time.Sleep(20 * time.Millisecond)
		}
		t.Logf("%d answers %s", answers, through)
	}
	asking.Go(func() { asks(old, "through the replica that stops") })
	asking.Go(func() { asks(other, "through the other replica") })
	asking.Wait()
	took := f.exits(&stops.Member) // both flows are idle now, or the grace period ends the relayed one
	t.Logf("the replica has ended %v after the last answer", took.Round(time.Millisecond))
	other.answered(t, backWithin, "the target answers through the other replica")
	if err := old.ask(poll); err == nil {
		t.Error("a port that has closed answers")
	}
	f.start(&stops.Member)
}
