package stream

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"tunnel/pkg/auth"
)

// A replica that is found under two addresses, as behind a Service of two address
// families, is joined once: its session is not replaced again and again.
func TestReplicaWithTwoAddresses(t *testing.T) {
	ca, err := auth.NewCA("replicas", 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	var listeners []net.Listener
	var addresses []string
	for range 2 {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		listeners, addresses = append(listeners, ln), append(addresses, ln.Addr().String())
	}
	_, port, err := net.SplitHostPort(addresses[0])
	if err != nil {
		t.Fatal(err)
	}
	var all fleet
	for i, ln := range listeners {
		all = append(all, newReplica(t, ca, ln, append(addresses, net.JoinHostPort("localhost", port)), netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})))
	}
	all.meet(t)
	all[1].join("edge1", direct)
	all[0].front = all[0].peers
	all[0].eventually("edge1 is known", func() bool { return all[0].peers.Holds("edge1") })
	lines := func(a *replicaRig, what string) int { return len(a.log.lines(what)) }
	const refused, joined = "has a session of this process already", "another replica has joined"
	within(t, 3*patience, "the second address is refused", func() bool { return lines(all[0], refused) > 0 })
	c, far := all[0].pair("edge1")
	was, before := lines(all[0], joined), lines(all[0], refused)
	within(t, 3*patience, "it is refused again", func() bool { return lines(all[0], refused) > before })
	if n := lines(all[0], joined) - was; n != 0 {
		t.Errorf("it has joined %d times more", n)
	}
	go func() {
		io.WriteString(far, "late")
		far.Close()
	}()
	if got := readAll(t, c); string(got) != "late" {
		t.Errorf("got %q", got)
	}
}

// What a replica that stops relays from others ends in peace, though it holds no node
// itself.
func TestStopLetsWhatItRelaysEnd(t *testing.T) {
	all := newFleet(t, 2)
	all[1].join("edge1", direct)
	r := all[0]
	r.front = r.peers
	r.eventually("edge1 is known", func() bool { return r.peers.Holds("edge1") })
	c, far := r.pair("edge1")
	r.leave() // the module with nothing to wait for is the first to end
	r.stop()
	select {
	case err := <-r.stopped:
		r.stopped <- err
		t.Fatal("it has stopped with a conn open")
	case <-time.After(2 * time.Second): // longer than a server that has nothing to wait for
	}
	go func() {
		io.WriteString(far, "late")
		far.Close()
	}()
	if got := readAll(t, c); string(got) != "late" {
		t.Errorf("got %q", got)
	}
	c.Close()
	select {
	case err := <-r.stopped:
		r.stopped <- err
	case <-time.After(patience):
		t.Error("it does not stop")
	}
}
