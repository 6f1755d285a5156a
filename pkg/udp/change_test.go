package udp

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
)

// named returns a target that answers each datagram with its name.
func named(t *testing.T, name string) string {
	t.Helper()
	return target(t, func([]byte, netip.AddrPort) []byte { return []byte(name) })
}

// change changes the listeners of the running front door.
func (r *running) change(listeners ...Listener) error {
	r.t.Helper()
	p, err := r.door.Prepare(r.t.Context(), listeners)
	if err == nil {
		p.Commit()
	}
	return err
}

// New flows get the new line; flows that are open go on to their target. A port that is removed ends when
// its flows are idle, and can be added again at once.
func TestListenersChange(t *testing.T) {
	first, second := testkit.FreeAddress(t), testkit.FreeAddress(t)
	a, b := named(t, "a"), named(t, "b")
	r := run(t, Listener{Listen: first, Target: a})
	old := callerOf(t, netip.MustParseAddrPort(first))
	wantAnswer := func(c *net.UDPConn, want, why string) {
		t.Helper()
		if got := ask(t, c, "?"); got != want {
			t.Errorf("%s: the answer is of %q, want %q", why, got, want)
		}
	}
	wantAnswer(old, "a", "at first")
	if err := r.change(Listener{Listen: first, Target: b}, Listener{Listen: second, Target: b}); err != nil {
		t.Fatal(err)
	}
	wantAnswer(old, "a", "a flow that is open")
	wantAnswer(callerOf(t, netip.MustParseAddrPort(first)), "b", "a new flow")
	removed := callerOf(t, netip.MustParseAddrPort(second))
	wantAnswer(removed, "b", "a new port")

	if err := r.change(Listener{Listen: first, Target: b}); err != nil {
		t.Fatal(err)
	}
	wantAnswer(removed, "b", "a flow of the port that is removed")
	if err := r.change(Listener{Listen: first, Target: b}, Listener{Listen: second, Target: a}); err != nil {
		t.Fatal(err)
	}
	wantAnswer(callerOf(t, netip.MustParseAddrPort(second)), "a", "the port is there again")

	if err := r.change(); err != nil || !r.door.Idle() || r.door.Ready() != nil {
		t.Errorf("without a port: %v, idle %t, %v", err, r.door.Idle(), r.door.Ready())
	}
	testkit.Eventually(t, "the removed ports are closed", func() bool {
		c, err := net.ListenPacket("udp", first)
		if err != nil {
			return false
		}
		c.Close()
		return true
	})
}

// A change that fails changes nothing.
func TestFailedChange(t *testing.T) {
	taken, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	addr, free := testkit.FreeAddress(t), testkit.FreeAddress(t)
	r := run(t, Listener{Listen: addr, Target: named(t, "a")})
	b := named(t, "b")
	err = r.change(Listener{Listen: addr, Target: b}, Listener{Listen: free, Target: b},
		Listener{Listen: taken.LocalAddr().String(), Target: b})
	if err == nil || !strings.Contains(err.Error(), "ss -lunp") {
		t.Errorf("a change to a port that is taken: %v", err)
	}
	if got := ask(t, callerOf(t, netip.MustParseAddrPort(addr)), "?"); got != "a" {
		t.Errorf("after the change that failed, the answer is of %q", got)
	}
	c, err := net.ListenPacket("udp", free)
	if err != nil {
		t.Fatalf("the new port is open: %v", err)
	}
	c.Close()
}

// A limit that changes counts for new flows.
func TestLimitsChange(t *testing.T) {
	r := run(t, Listener{Target: target(t, echo)})
	ask(t, r.caller(), "x")
	r.door.SetLimits(Limits{Flows: 1, FlowsPerAddress: 1})
	c := r.caller()
	ask(t, c, "y")
	testkit.Eventually(t, "the second flow took the place of the first", func() bool {
		return r.door.cfg.Counters.Flows.Load() == 1 && r.door.cfg.Counters.Evicted.Load() == 1
	})
}
