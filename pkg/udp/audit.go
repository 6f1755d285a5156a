package udp

import (
	"fmt"
	"net/netip"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// maxEvents bounds the events that wait for sweep. A flood from false addresses ends more flows.
const maxEvents = 4096

// noteLocked notes the event of a flow that has ended. The caller holds mu.
func (p *port) noteLocked(f *flow) {
	audited := p.sink.Audit != nil
	if audited && len(p.events) >= maxEvents {
		p.missed++
		audited = false
	}
	err := f.refusal
	if err == nil {
		err = f.mux.failure
	}
	phase := tunnel.PhaseEnd
	if err != nil {
		phase = tunnel.PhaseRefused
	}
	span := p.sink.Tracer.Begin(nil)
	if !audited && !p.sink.Shows(phase) && span == nil {
		return
	}
	e := f.event()
	e.Result, e.Err = tunnel.ResultOf(err), tunnel.TextOf(err)
	if err == nil && f.lost {
		e.Err = "the conn to the node has ended before the flow"
	}
	e.Sent, e.Received, e.Seconds = f.sent, f.received, time.Since(f.since).Seconds()
	p.sink.Show(phase, e)
	if span != nil {
		span.Start = f.since
		span.End(e)
	}
	if audited {
		p.events = append(p.events, e)
	}
}

// event describes a flow. It has the line of its mux: a change of the port's line leaves open flows alone.
func (f *flow) event() tunnel.Event {
	caller := f.key.caller.String()
	return tunnel.Event{
		Time: time.Now(), Kind: tunnel.EventUDP, Node: f.mux.node, Caller: caller, Remote: caller,
		Door: f.mux.to.Listen, Target: f.mux.to.Target,
	}
}

// showLocked shows a new flow to the tap, once there is a conn for it. The caller holds mu.
func (p *port) showLocked(f *flow) {
	if f.mux.isOpen && p.sink.Watched() {
		e := f.event()
		e.Result = tunnel.ResultOK
		p.sink.Show(tunnel.PhaseOpen, e)
	}
}

// denyLocked counts a datagram of a caller that Allow does not permit, and logs and notes it once a minute. The
// caller holds mu.
func (p *port) denyLocked(caller netip.AddrPort) {
	p.core.Doors[tunnel.DoorUDP].Failed(tunnel.Denied)
	skipped, ok := p.warnDenied.Allow()
	if !ok {
		return
	}
	p.log.Warn("caller denied by [mode.cloud.udpallow]", "target", p.Target, "caller", caller, "allow", p.Allow,
		"skipped", skipped)
	e := tunnel.Event{
		Time: time.Now(), Kind: tunnel.EventUDP, Result: tunnel.Denied.String(), Node: p.Node,
		Caller: caller.String(), Remote: caller.String(), Door: p.Listen, Target: p.Target,
		Err: "the caller is not in [mode.cloud.udpallow]", Skipped: skipped,
	}
	p.sink.Show(tunnel.PhaseRefused, e)
	if p.sink.Audit != nil && len(p.events) < maxEvents {
		p.events = append(p.events, e)
	}
}

// handOver gives the events to the audit. A panic of the audit costs one event.
func (p *port) handOver() {
	p.mu.Lock()
	events, missed, line := p.events, p.missed, p.Listener
	p.events, p.missed = nil, 0
	p.mu.Unlock()
	record := func(e tunnel.Event) {
		p.guard("the audit misses an event", func() { p.sink.Audit.Record(e) })
	}
	for _, e := range events {
		record(e)
	}
	if missed > 0 {
		record(tunnel.Event{
			Kind: tunnel.EventUDP, Result: tunnel.Overloaded.String(), Door: line.Listen, Target: line.Target,
			Err: fmt.Sprintf("%d more flows have ended, too many to list", missed),
		})
	}
}
