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
	switch {
	case p.audit == nil:
		return
	case len(p.events) >= maxEvents:
		p.missed++
		return
	}
	err := f.refusal
	if err == nil {
		err = f.mux.failure
	}
	text := tunnel.TextOf(err)
	if err == nil && f.lost {
		text = "the conn to the node has ended before the flow"
	}
	// The flow has the line of its mux: a change of the port's line leaves open flows alone.
	p.events = append(p.events, tunnel.Event{
		Time: time.Now(), Kind: tunnel.EventUDP, Result: tunnel.ResultOf(err), Node: f.mux.node,
		Caller: f.key.caller.String(), Remote: f.key.caller.String(), Door: f.mux.to.Listen, Target: f.mux.to.Target,
		Sent: f.sent, Received: f.received, Seconds: time.Since(f.since).Seconds(), Err: text,
	})
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
	if p.audit != nil && len(p.events) < maxEvents {
		p.events = append(p.events, tunnel.Event{
			Time: time.Now(), Kind: tunnel.EventUDP, Result: tunnel.Denied.String(), Node: p.Node,
			Caller: caller.String(), Remote: caller.String(), Door: p.Listen, Target: p.Target,
			Err: "the caller is not in [mode.cloud.udpallow]", Skipped: skipped,
		})
	}
}

// handOver gives the events to the audit.
func (p *port) handOver() {
	p.mu.Lock()
	events, missed, line := p.events, p.missed, p.Listener
	p.events, p.missed = nil, 0
	p.mu.Unlock()
	for _, e := range events {
		p.audit.Record(e)
	}
	if missed > 0 {
		p.audit.Record(tunnel.Event{
			Kind: tunnel.EventUDP, Result: tunnel.Overloaded.String(), Door: line.Listen, Target: line.Target,
			Err: fmt.Sprintf("%d more flows have ended, too many to list", missed),
		})
	}
}
