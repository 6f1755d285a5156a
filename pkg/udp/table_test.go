package udp

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// flows is a table in a test, with the time of the test.
type flows struct {
	*table
	t   *testing.T
	now time.Time
}

func newFlows(t *testing.T, all, perAddress int) *flows {
	return &flows{newTable(Limits{Flows: all, FlowsPerAddress: perAddress}), t, time.Unix(1, 0)}
}

// open opens a flow of a caller, and returns the caller whose flow made room; "": there was room.
func (f *flows) open(caller string) (victim string, limit tunnel.Limit, ok bool) {
	f.t.Helper()
	f.now = f.now.Add(time.Millisecond)
	key := flowKey{caller: netip.MustParseAddrPort(caller)}
	v, limit, ok := f.room(key.caller.Addr(), f.now)
	if v != nil {
		victim = v.key.caller.String()
		f.remove(v)
	}
	if ok {
		f.insert(&flow{key: key}, f.now)
	}
	return victim, limit, ok
}

func (f *flows) datagram(caller string, fromCaller bool) {
	f.t.Helper()
	f.now = f.now.Add(time.Millisecond)
	f.touch(f.flows[flowKey{caller: netip.MustParseAddrPort(caller)}], fromCaller, f.now)
}

// confirm makes a flow one whose caller has sent after an answer.
func (f *flows) confirm(caller string) {
	f.t.Helper()
	f.datagram(caller, false)
	f.datagram(caller, true)
}

func (f *flows) want(caller, victim string) {
	f.t.Helper()
	if v, _, ok := f.open(caller); v != victim || !ok {
		f.t.Errorf("the flow of %s displaces %q, %v; want %q", caller, v, ok, victim)
	}
}

// A full table gives the place of the fresh flow that has been idle longest, and never that of a
// confirmed flow that is in use.
func TestFullTable(t *testing.T) {
	f := newFlows(t, 4, 100)
	f.want("10.0.0.1:1", "")
	f.want("10.0.0.2:1", "")
	f.want("10.0.0.3:1", "")
	f.want("10.0.0.4:1", "")
	f.confirm("10.0.0.1:1")
	f.datagram("10.0.0.2:1", true)
	f.want("10.0.0.5:1", "10.0.0.3:1") // 1 is confirmed, 2 has sent again
	f.datagram("10.0.0.4:1", false)    // an answer alone does not prove the address
	f.want("10.0.0.6:1", "10.0.0.2:1")
	f.want("10.0.0.7:1", "10.0.0.5:1")
	f.want("10.0.0.8:1", "10.0.0.4:1")
	for _, caller := range []string{"10.0.0.6:1", "10.0.0.7:1", "10.0.0.8:1"} {
		f.confirm(caller)
	}
	if v, limit, ok := f.open("10.0.0.9:1"); ok || limit != tunnel.LimitFlows {
		t.Errorf("%q makes room, %v: every flow is in use", v, limit)
	}
	f.now = f.now.Add(evictIdle)
	f.datagram("10.0.0.1:1", true)
	f.want("10.0.0.9:1", "10.0.0.6:1") // idle for ten seconds
	if len(f.flows) != 4 || f.fresh.Len()+f.confirmed.Len() != 4 || len(f.sources) != 4 {
		t.Errorf("%d flows, %d and %d in lists, %d sources", len(f.flows), f.fresh.Len(), f.confirmed.Len(), len(f.sources))
	}
}

// A source that has reached its limit displaces its own fresh flow that has been idle longest, and a
// confirmed one only if it has no fresh one.
func TestFlowsPerAddress(t *testing.T) {
	f := newFlows(t, 100, 3)
	f.want("10.0.0.9:1", "")
	for port := range 3 {
		f.want(fmt.Sprintf("10.0.0.1:%d", port+1), "")
	}
	f.confirm("10.0.0.1:1")
	f.want("10.0.0.1:4", "10.0.0.1:2")
	f.want("10.0.0.1:5", "10.0.0.1:3")
	f.datagram("10.0.0.1:4", true)
	f.want("10.0.0.1:6", "10.0.0.1:5") // 1 is idle longest, but confirmed
	if v, limit, ok := f.open("10.0.0.1:7"); v != "10.0.0.1:4" || limit != tunnel.LimitFlowsPerAddress || !ok {
		t.Errorf("%q, %v, %v", v, limit, ok)
	}
	f.confirm("10.0.0.1:6")
	f.confirm("10.0.0.1:7")
	f.datagram("10.0.0.1:1", false)
	f.want("10.0.0.1:8", "10.0.0.1:6") // all are confirmed: 6 is idle longest
	f.want("10.0.0.1:9", "10.0.0.1:8")
	for _, own := range []string{"10.0.0.1:1", "10.0.0.1:7", "10.0.0.1:9"} {
		f.remove(f.flows[flowKey{caller: netip.MustParseAddrPort(own)}])
	}
	if len(f.sources) != 1 {
		t.Errorf("%d sources are left, want that of 10.0.0.9", len(f.sources))
	}
	// All addresses of an IPv6 /64 are one source; an IPv4 address in its IPv6 form is the address.
	g := newFlows(t, 100, 2)
	g.want("[2001:db8::1]:1", "")
	g.want("[2001:db8::2]:1", "")
	g.want("[2001:db8::3]:1", "[2001:db8::1]:1")
	g.want("[2001:db8:0:1::3]:1", "")
	g.want("10.0.0.1:1", "")
	g.want("[::ffff:10.0.0.1]:1", "")
	g.want("10.0.0.1:2", "10.0.0.1:1")
	// The pods of a node have one /64, and each is a source.
	pods := newFlows(t, 100, 2)
	pods.perAddr = true
	for i := range 3 {
		pods.want(fmt.Sprintf("[2001:db8::%d]:1", i+1), "")
	}
	pods.want("[2001:db8::1]:2", "")
	pods.want("[2001:db8::1]:3", "[2001:db8::1]:1")
}

// A flood from many addresses does not displace callers that talk with their target.
func TestFloodFromFalseAddresses(t *testing.T) {
	f := newFlows(t, 1000, 100)
	const good = "192.0.2.1:7"
	f.want(good, "")
	f.confirm(good)
	for i := range 100_000 {
		caller := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 5)
		if victim, _, _ := f.open(caller.String()); victim == good {
			t.Fatalf("the good caller is displaced by number %d", i)
		}
	}
	if len(f.flows) != 1000 || len(f.sources) != 1000 {
		t.Errorf("%d flows of %d sources", len(f.flows), len(f.sources))
	}
}

// An attacker that sends twice from each address, with an answer between, has confirmed flows, too. It
// keeps new callers out, but does not displace a flow in use of another source. Only with the caller's
// own address it does, once it has confirmed all flows of that address.
func TestFloodThatSendsTwice(t *testing.T) {
	f := newFlows(t, 1000, 100)
	const good = "192.0.2.1:7"
	f.want(good, "")
	f.confirm(good)
	twice := func(caller netip.AddrPort) (victim string, ok bool) {
		t.Helper()
		victim, _, ok = f.open(caller.String())
		if ok {
			f.confirm(caller.String())
		}
		return victim, ok
	}
	refused := 0
	for i := range 100_000 {
		victim, ok := twice(callerNumber(i))
		if victim == good {
			t.Fatalf("the good caller is displaced by number %d", i)
		}
		if !ok {
			refused++
		}
		if i%1000 == 0 {
			f.datagram(good, true) // in use: a datagram at least every evictIdle
		}
	}
	if refused == 0 {
		t.Error("the table was never full")
	}

	g := newFlows(t, 1000, 100)
	g.want(good, "")
	g.confirm(good)
	for port := range 10_000 { // once each, from the caller's address
		if victim, _, _ := g.open(fmt.Sprintf("192.0.2.1:%d", 10_000+port)); victim == good {
			t.Fatalf("the good caller is displaced by port %d", port)
		}
	}
	f, displaced := g, false
	for port := range uint16(200) {
		victim, _ := twice(netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), 30_000+port))
		displaced = displaced || victim == good
	}
	if !displaced {
		t.Error("the good caller keeps its place: docs/udp.md says that it does not")
	}
}

func TestIdleFlows(t *testing.T) {
	f := newFlows(t, 100, 100)
	f.want("10.0.0.1:1", "")
	f.want("10.0.0.2:1", "")
	f.confirm("10.0.0.1:1")
	f.now = f.now.Add(idleTime)
	f.want("10.0.0.3:1", "")
	for _, want := range []string{"10.0.0.2:1", "10.0.0.1:1"} {
		got := f.idleFor(idleTime, f.now)
		if got == nil || got.key.caller.String() != want {
			t.Fatalf("got %+v, want %s", got, want)
		}
		f.remove(got)
	}
	if got := f.idleFor(idleTime, f.now); got != nil {
		t.Errorf("%v is not idle", got.key)
	}
}
