package konnectivity

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"strings"
	"sync"

	"tunnel/pkg/tunnel"
)

// agentLink is one stream of an agent, as the transport of a session. Ids of dials and of
// conns mean nothing outside of it.
type agentLink struct {
	*mux
	agents *Agents
	pub    *tunnel.Session
	queue  tunnel.Queue // of dials

	dialMu sync.Mutex            // guards the following
	dials  map[int64]chan answer // that wait for one; capacity 1, so that nobody waits to send
}

// answer is what has become of a dial.
type answer struct {
	conn *Conn
	err  error
}

var _ tunnel.Link = (*agentLink)(nil)

// Send implements tunnel.Link: a stock agent knows no messages of ours.
func (l *agentLink) Send(*tunnel.Message) error { return nil }

// Serve implements tunnel.Link: an agent may not open.
func (l *agentLink) Serve(*tunnel.Message, tunnel.DialFunc) error { return errors.ErrUnsupported }

// Close implements tunnel.Link.
func (l *agentLink) Close(reason error) { l.end(reason) }

// Done implements tunnel.Link.
func (l *agentLink) Done() <-chan struct{} { return l.ended }

// Dial implements tunnel.Link.
func (l *agentLink) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, DialTimeout)
	defer cancel()
	conn, err := l.enter(ctx, r)
	if err != nil {
		if r.NoWait && tunnel.CodeOf(err) == tunnel.Overloaded {
			return nil, err // not the last word
		}
		l.counters.Refuse(tunnel.CodeOf(err))
		return nil, err
	}
	l.counters.Conns.Add(1)
	return conn, nil
}

// enter dials when it is the turn of r.
func (l *agentLink) enter(ctx context.Context, r tunnel.Request) (conn *Conn, err error) {
	if r.Network != "tcp" {
		return nil, tunnel.Refusef(tunnel.Denied, "node %s has joined as a konnectivity agent, which dials tcp only", r.Node)
	}
	if refusal := l.queue.Enter(ctx, l.ended, r); refusal != nil {
		return nil, refusal
	}
	l.pub.Conns.Add(1)
	defer func() { // also when dial panics
		l.queue.Dialled(r.Addr, conn != nil || err != nil && (&tunnel.Refusal{Code: tunnel.CodeOf(err)}).Answered())
		if conn == nil { // else the mux does it
			l.connOver()
		}
	}()
	return l.dial(ctx, r)
}

func (l *agentLink) dial(ctx context.Context, r tunnel.Request) (*Conn, error) {
	id, answered := l.newDial()
	l.send(&Packet{Type: PacketDialReq, Protocol: r.Network, Address: r.Addr, Random: id})
	var a answer
	select {
	case a = <-answered:
	case <-ctx.Done():
		a.err = tunnel.Refusef(tunnel.Gone, "the caller has gone")
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			a.err = tunnel.Refusef(tunnel.Timeout, "the agent of node %s did not answer in time", r.Node)
		}
		if l.takeDial(id) == nil {
			a = <-answered // it came meanwhile
			break
		}
		l.send(&Packet{Type: PacketDialCls, Random: id}) // a stock agent goes on; see answer
	case <-l.ended:
		a.err = tunnel.Refusef(tunnel.Gone, "the session of node %s has ended", r.Node)
		if l.takeDial(id) == nil {
			a = <-answered
		}
	}
	return a.conn, a.err
}

func (l *agentLink) connOver() {
	l.pub.Conns.Add(-1)
	l.queue.Over()
}

// newDial returns the id of a new dial.
func (l *agentLink) newDial() (int64, chan answer) {
	l.dialMu.Lock()
	defer l.dialMu.Unlock()
	for {
		id := rand.Int64() //nolint:gosec // as the stock server does; nobody else sees it
		if id != 0 && l.dials[id] == nil {
			l.dials[id] = make(chan answer, 1)
			return id, l.dials[id]
		}
	}
}

// takeDial returns who waits for a dial, once; nil: nobody does.
func (l *agentLink) takeDial(id int64) chan answer {
	l.dialMu.Lock()
	defer l.dialMu.Unlock()
	c := l.dials[id]
	delete(l.dials, id)
	return c
}

// receiveLoop takes what the agent sends, until the stream ends.
func (l *agentLink) receiveLoop() {
	for {
		var p Packet
		if err := l.stream.RecvMsg(&p); err != nil {
			l.end(errors.New("the agent has gone"))
			return
		}
		if err := l.receive(&p); err != nil {
			l.end(err)
			return
		}
	}
}

func (l *agentLink) receive(p *Packet) error {
	switch p.Type {
	case PacketData:
		id := p.ConnID
		if !l.deliver(p) && id != 0 {
			l.send(&Packet{Type: PacketCloseReq, ConnID: id})
		}
		return nil
	case PacketDialRsp:
		return l.answered(p)
	case PacketDialCls:
		if c := l.takeDial(p.Random); c != nil {
			c <- answer{err: tunnel.Refusef(tunnel.Gone, "the agent has given up")}
		}
	case PacketCloseRsp:
		l.peerClosed(p.ConnID, p.Err)
	case PacketDrain:
		l.agents.drains(l)
	}
	p.Free()
	return nil
}

// answered takes a dial response. Its conn is filed here, before any of its data can come.
func (l *agentLink) answered(p *Packet) error {
	waiting := l.takeDial(p.Random)
	switch {
	case p.Err != "" || p.ConnID == 0:
		if waiting != nil {
			waiting <- answer{err: refusalOf(p.Err)}
		}
		return nil
	case waiting == nil: // the dial was given up
		c, err := l.add(p.ConnID, func() {})
		if err == nil {
			c.Reset() //nolint:errcheck // it has none
		}
		return err
	}
	c, err := l.add(p.ConnID, l.connOver)
	waiting <- answer{conn: c, err: err}
	return err
}

// mostReason is how much of an agent's text counts, in bytes.
const mostReason = 512

// refusalOf returns what an agent means by the text of a failed dial. An edge of ours says
// its code first. Of an error of Go's, what went wrong stands last: what is before it may hold the
// name of a target, which can be anything.
func refusalOf(text string) *tunnel.Refusal {
	text = strings.ToValidUTF8(text[:min(len(text), mostReason)], "")
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
