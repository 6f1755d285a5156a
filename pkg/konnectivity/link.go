package konnectivity

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"unicode/utf8"

	"tunnel.example/tunnel/pkg/tunnel"
)

// agentLink is the server's end of an agent's stream, and the [tunnel.Link] and the
// [tunnel.Dialer] of its session. Ids of dials and of conns are valid on this stream only.
type agentLink struct {
	*mux
	agents  *Agents
	session *tunnel.Session // attached to the directory
	queue   tunnel.Queue    // admits dials, within the node's limits

	// dialMu and mux.mu are never held together.
	dialMu sync.Mutex // guards the following
	// dials are the unanswered dials by id. The channel of each gets at most one result; its capacity of
	// 1 means that sending never blocks.
	dials map[int64]chan dialResult
}

// dialResult is the outcome of a dial.
type dialResult struct {
	conn *Conn
	err  error
}

var (
	_ tunnel.Link   = (*agentLink)(nil)
	_ tunnel.Dialer = (*agentLink)(nil)
)

// Send implements tunnel.Link. It drops the message: a stock agent knows none of ours.
func (l *agentLink) Send(*tunnel.Message) error { return nil }

// Close implements tunnel.Link.
func (l *agentLink) Close(reason error) { l.end(reason) }

// Done implements tunnel.Link.
func (l *agentLink) Done() <-chan struct{} { return l.ended }

// Dial implements tunnel.Dialer.
func (l *agentLink) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	r.Chose()
	ctx, cancel := context.WithTimeout(ctx, DialTimeout)
	defer cancel()
	conn, err := l.admitAndDial(ctx, r)
	if err != nil {
		if r.NoWait && tunnel.CodeOf(err) == tunnel.Overloaded {
			return nil, err // the caller tries other nodes, so this refusal is not counted
		}
		l.counters.Refuse(tunnel.CodeOf(err))
		return nil, err
	}
	l.counters.ConnsOpened.Add(1)
	return conn, nil
}

// admitAndDial waits until the queue admits r, and dials.
func (l *agentLink) admitAndDial(ctx context.Context, r tunnel.Request) (conn *Conn, err error) {
	if r.Network != "tcp" {
		const text = "node %s has joined as a konnectivity agent, which dials tcp only"
		return nil, tunnel.Refusef(tunnel.Denied, text, r.Node)
	}
	if !utf8.ValidString(r.Addr) { // the packet could not be decoded, and a stock agent would end the stream
		return nil, tunnel.Refusef(tunnel.Unreachable, "%q is not an address", tunnel.Printable(r.Addr))
	}
	if refusal := l.queue.Enter(ctx, l.ended, r); refusal != nil {
		return nil, refusal
	}
	l.session.Conns.Add(1) // a dial counts as a conn
	defer func() {         // deferred, because dial may panic
		answered := conn != nil || err != nil && (&tunnel.Refusal{Code: tunnel.CodeOf(err)}).Answered()
		l.queue.Dialled(r.Addr, answered)
		if conn == nil { // otherwise the mux calls connOver, at the end of the conn
			l.connOver()
		}
	}()
	return l.dial(ctx, r)
}

// dial asks the agent to dial, and waits for its answer. If the caller leaves or the time is up, dial
// tells the agent to give up.
func (l *agentLink) dial(ctx context.Context, r tunnel.Request) (*Conn, error) {
	id, answered := l.newDial()
	l.send(&Packet{Type: PacketDialReq, Protocol: r.Network, Address: r.Addr, Random: id})
	var a dialResult
	select {
	case a = <-answered:
	case <-ctx.Done():
		a.err = tunnel.Refusef(tunnel.Gone, "the caller has gone")
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			a.err = tunnel.Refusef(tunnel.Timeout, "the agent of node %s did not answer in time", r.Node)
		}
		if l.claimDial(id) == nil {
			a = <-answered // the answer came in the same moment
			break
		}
		l.send(&Packet{Type: PacketDialCls, Random: id}) // a stock agent still dials; dialAnswered then closes the conn
	case <-l.ended:
		a.err = tunnel.Refusef(tunnel.Gone, "the session of node %s has ended", r.Node)
		if l.claimDial(id) == nil {
			a = <-answered
		}
	}
	return a.conn, a.err
}

// connOver counts the end of a conn, or of an admitted dial that failed.
func (l *agentLink) connOver() {
	l.session.Conns.Add(-1)
	l.queue.Over()
}

// newDial registers a dial, and returns its id and the channel of its result.
func (l *agentLink) newDial() (int64, chan dialResult) {
	l.dialMu.Lock()
	defer l.dialMu.Unlock()
	for {
		id := rand.Int64()
		if id != 0 && l.dials[id] == nil {
			l.dials[id] = make(chan dialResult, 1)
			return id, l.dials[id]
		}
	}
}

// claimDial unregisters a dial, and returns the channel for its result, or nil if the dial was claimed
// before. A dial thus gets one result, or is given up.
func (l *agentLink) claimDial(id int64) chan dialResult {
	l.dialMu.Lock()
	defer l.dialMu.Unlock()
	c := l.dials[id]
	delete(l.dials, id)
	return c
}

// receiveLoop handles packets until the stream ends.
func (l *agentLink) receiveLoop() {
	for {
		var p Packet
		if err := l.stream.RecvMsg(&p); err != nil {
			l.end(l.agents.whyLost(err))
			return
		}
		if err := l.receive(&p); err != nil {
			l.end(err)
			return
		}
	}
}

// receive handles one packet. It owns p: the caller does not free p. After an error the caller must end the stream.
func (l *agentLink) receive(p *Packet) error {
	switch p.Type {
	case PacketData:
		id := p.ConnID
		if !l.deliver(p) && id != 0 {
			l.send(&Packet{Type: PacketCloseReq, ConnID: id})
		}
		return nil
	case PacketDialRsp:
		return l.dialAnswered(p)
	case PacketDialCls:
		if c := l.claimDial(p.Random); c != nil {
			c <- dialResult{err: tunnel.Refusef(tunnel.Gone, "the agent gave up the dial")}
		}
	case PacketCloseRsp:
		l.peerClosed(p.ConnID, p.Err)
	case PacketDrain:
		l.agents.drains(l)
	}
	p.Free()
	return nil
}

// dialAnswered handles a dial response. It registers the conn before any of its data can be received.
func (l *agentLink) dialAnswered(p *Packet) error {
	waiting := l.claimDial(p.Random)
	switch {
	case p.Err != "" || p.ConnID == 0:
		if waiting != nil {
			waiting <- dialResult{err: refusalOf(p.Err)}
		}
		return nil
	case waiting == nil: // the dial was given up: close its conn
		c, err := l.add(p.ConnID, func() {})
		if err == nil {
			c.Reset()
			l.endIfFlooded()
		}
		return err
	}
	c, err := l.add(p.ConnID, l.connOver)
	waiting <- dialResult{conn: c, err: err}
	return err
}

// maxReason is how much of an agent's error text we use, in bytes.
const maxReason = 512

// refusalOf returns the refusal for an agent's error text. Our own edge begins the text with the code.
// A stock agent sends the text of a Go error, whose cause stands last. Text before the cause may hold
// the name of a target, and thus any words.
func refusalOf(text string) *tunnel.Refusal {
	text = tunnel.Printable(text[:min(len(text), maxReason)])
	first, rest, _ := strings.Cut(text, ": ")
	for _, code := range tunnel.Codes() {
		if first == code.String() {
			return &tunnel.Refusal{Code: code, Text: rest}
		}
	}
	code := tunnel.Internal
	switch text[strings.LastIndexByte(text, ':')+1:] {
	case " connection refused":
		code = tunnel.Refused
	case " i/o timeout", " connection timed out", " context deadline exceeded":
		code = tunnel.Timeout
	case " no route to host", " network is unreachable", " no such host":
		code = tunnel.Unreachable
	case " too many open files":
		code = tunnel.Overloaded
	}
	return &tunnel.Refusal{Code: code, Text: text}
}
