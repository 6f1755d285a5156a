package udp

import (
	"container/list"
	"net/netip"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// DefaultFlows is how many flows a port has at once.
	DefaultFlows = 16 << 10
	// DefaultFlowsPerAddress is how many flows of a port one source has at once. A resolver takes a new
	// port for each query, so its flows are many and short.
	DefaultFlowsPerAddress = 4 << 10
	// idleTime is how long a flow lives without a datagram in either direction.
	idleTime = 60 * time.Second
	// evictIdle is how long a confirmed flow must have been idle before a new flow of another source may
	// take its place.
	evictIdle = 10 * time.Second
)

// Limits bound what the callers of a port may cost. A zero field means the default.
type Limits struct {
	Flows           int // flows of a port at once
	FlowsPerAddress int // flows of a port at once, of one source; see source
}

func (l Limits) orDefault() Limits {
	if l.Flows == 0 {
		l.Flows = DefaultFlows
	}
	if l.FlowsPerAddress == 0 {
		l.FlowsPerAddress = DefaultFlowsPerAddress
	}
	return l
}

// flowKey tells the flows of a port apart.
type flowKey struct {
	caller netip.AddrPort
	local  netip.Addr // the address to which the caller has sent; zero: the address of the port
}

// flow is the state of one flow at the cloud: the datagrams between one caller and one target. port.mu guards it.
type flow struct {
	// Set once.
	key    flowKey
	reply  []byte // see control.reply
	mux    *mux   // the conn of this mux carries the flow
	id     flowID
	source *source
	since  time.Time

	sent, received int64     // payload bytes to the target, and from it
	refusal        error     // why the edge could not serve the flow; nil: it could
	lost           bool      // the conn of mux has ended before the flow
	last           time.Time // the time of the last datagram
	routed         time.Time // when the router was last asked
	answered       bool      // a datagram of the target has gone to the caller
	confirmed      bool      // the caller has sent a datagram after an answer
	ended          bool      // the table has removed the flow
	share          share     // guarded by queue.mu

	inClass, inSource *list.Element // in table.fresh and source.fresh, or in table.confirmed and source.confirmed
}

// source is one IPv4 address or one IPv6 /64 (of a Forwarder: one IPv6 address), with flows.
type source struct {
	fresh     list.List // of *flow, longest idle first
	confirmed list.List // of *flow, longest idle first
}

// list returns the list that holds f.
func (s *source) list(f *flow) *list.List {
	if f.confirmed {
		return &s.confirmed
	}
	return &s.fresh
}

func (s *source) len() int { return s.fresh.Len() + s.confirmed.Len() }

// table holds the flows of a port. port.mu guards it.
//
// Nobody proves the address of a caller: an attacker may send datagrams with any source address. A flow
// is fresh until its caller has sent a datagram after an answer. A new flow takes the place of the fresh
// flow that has been idle longest. So a flood that sends once from each false address displaces flows of
// other callers only while they wait for their first answer.
//
// A confirmed flow proves no address either: an attacker may send twice. A new flow of another source
// never displaces a confirmed flow in use, neither a caller's nor an attacker's. So such an attacker can
// fill the table and keep new callers out. If it uses the address of a caller, it can fill the places of
// this source, and then displace the caller's confirmed flow.
type table struct {
	// Set once.
	limits  Limits
	idle    time.Duration
	perAddr bool // each IPv6 address is a source, not each /64: the callers are pods, whose node has one /64

	flows     map[flowKey]*flow
	fresh     *list.List // of *flow, longest idle first
	confirmed *list.List // of *flow, longest idle first
	sources   map[netip.Prefix]*source
}

func newTable(l Limits) *table {
	return &table{
		limits: l.orDefault(), idle: idleTime,
		flows: make(map[flowKey]*flow), fresh: list.New(), confirmed: list.New(),
		sources: make(map[netip.Prefix]*source),
	}
}

// sourceOf returns the source of an address.
func (t *table) sourceOf(a netip.Addr) netip.Prefix {
	if t.perAddr {
		return auth.Single(a)
	}
	return auth.Group(a)
}

// room returns the flow that must end to make room for a new flow of caller; nil: there is room. If
// there is no room and no flow may be displaced, ok is false, and limit is the limit that is reached.
func (t *table) room(caller netip.Addr, now time.Time) (victim *flow, limit tunnel.Limit, ok bool) {
	if s := t.sources[t.sourceOf(caller)]; s != nil && s.len() >= t.limits.FlowsPerAddress {
		front := s.fresh.Front()
		if front == nil {
			front = s.confirmed.Front()
		}
		return front.Value.(*flow), tunnel.LimitFlowsPerAddress, true
	}
	if len(t.flows) < t.limits.Flows {
		return nil, 0, true
	}
	if front := t.fresh.Front(); front != nil {
		return front.Value.(*flow), tunnel.LimitFlows, true
	}
	victim = t.confirmed.Front().Value.(*flow)
	if now.Sub(victim.last) < evictIdle {
		return nil, tunnel.LimitFlows, false
	}
	return victim, tunnel.LimitFlows, true
}

// insert adds a flow that is not in the table.
func (t *table) insert(f *flow, now time.Time) {
	prefix := t.sourceOf(f.key.caller.Addr())
	s := t.sources[prefix]
	if s == nil {
		s = new(source)
		t.sources[prefix] = s
	}
	f.source, f.last = s, now
	f.inSource, f.inClass = s.fresh.PushBack(f), t.fresh.PushBack(f)
	t.flows[f.key] = f
}

// touch notes a datagram of a flow, from its caller or to its caller.
func (t *table) touch(f *flow, fromCaller bool, now time.Time) {
	f.last = now
	switch {
	case f.confirmed:
		t.confirmed.MoveToBack(f.inClass)
		f.source.confirmed.MoveToBack(f.inSource)
	case fromCaller && f.answered:
		t.fresh.Remove(f.inClass)
		f.source.fresh.Remove(f.inSource)
		f.confirmed = true
		f.inClass, f.inSource = t.confirmed.PushBack(f), f.source.confirmed.PushBack(f)
	default:
		f.answered = f.answered || !fromCaller
		t.fresh.MoveToBack(f.inClass)
		f.source.fresh.MoveToBack(f.inSource)
	}
}

// remove removes a flow of the table.
func (t *table) remove(f *flow) {
	f.ended = true
	delete(t.flows, f.key)
	f.source.list(f).Remove(f.inSource)
	if f.source.len() == 0 {
		delete(t.sources, t.sourceOf(f.key.caller.Addr()))
	}
	if f.confirmed {
		t.confirmed.Remove(f.inClass)
	} else {
		t.fresh.Remove(f.inClass)
	}
}

// idleFor returns a flow that has been idle for at least the time idle; nil: there is none.
func (t *table) idleFor(idle time.Duration, now time.Time) *flow {
	for _, l := range []*list.List{t.fresh, t.confirmed} {
		if front := l.Front(); front != nil {
			if f := front.Value.(*flow); now.Sub(f.last) >= idle {
				return f
			}
		}
	}
	return nil
}
