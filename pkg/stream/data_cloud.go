package stream

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	pb "tunnel/pkg/stream/tunnelv1"
	"tunnel/pkg/tunnel"
)

// MaxConnections is how many connections a session has at most, whatever the edge would open.
const MaxConnections = 64

// mostTicket bounds the first frame of a stranger, in bytes.
const mostTicket = 64

// endTime is how long an edge may wait for the cloud's word that a conn has ended, where no
// open says it.
const endTime = 50 * time.Millisecond

// askTime is how long the edge may take to answer the cloud's asking.
const askTime = joinTimeout

// asked are the tickets with which a server has asked for data connections. One is good for
// one connection: it proves which session that belongs to, since nobody has read it but the
// edge of that session.
type asked struct {
	mu sync.Mutex
	of map[string]*cloudSession
}

func (a *asked) add(ticket string, s *cloudSession) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.of == nil {
		a.of = make(map[string]*cloudSession)
	}
	a.of[ticket] = s
}

// take returns the session of a ticket, which then is good no longer; nil: it is not good.
func (a *asked) take(ticket string) *cloudSession {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.of[ticket]
	delete(a.of, ticket)
	return s
}

// askForMore asks the edge for a data connection, unless there are as many as there may be. It
// begins with one, and has no more on their way than there are: over a thin link a handshake takes
// as long as many opens, which would wait for it.
func (s *cloudSession) askForMore() {
	s.mu.Lock()
	more := s.err == nil && !s.toldDrain.Load() && s.asking <= len(s.data) && len(s.data)+s.asking < s.mostDataLocked()
	if more {
		s.asking++
	}
	s.mu.Unlock()
	if !more {
		return
	}
	ticket := rand.Text()
	s.asked.add(ticket, s)
	time.AfterFunc(askTime, func() {
		if s.asked.take(ticket) != nil {
			s.answered()
		}
	})
	s.post(message(typeConnection, ticket, nil))
}

// mostDataLocked is how many data connections may carry conns now: half of what the edge opens,
// and more where conns come and go, since each takes a while to end. Those that stay, as logs
// that are followed do, cost fewer bytes where they share packets.
// None are used over a narrow link.
func (s *cloudSession) mostDataLocked() int {
	if s.isNarrow() {
		return 0
	}
	return min(s.connections, (s.connections+1)/2+s.shortConns.count())
}

// recently counts what has happened in the last second, or two.
type recently struct {
	now, before int
	since       time.Time // of now
}

func (r *recently) add() {
	r.turn()
	r.now++
}

func (r *recently) count() int {
	r.turn()
	return r.now + r.before
}

func (r *recently) turn() {
	switch t := time.Now(); {
	case t.Sub(r.since) >= 2*time.Second:
		r.now, r.before, r.since = 0, 0, t
	case t.Sub(r.since) >= time.Second:
		r.now, r.before, r.since = 0, r.now, t
	}
}

// answered undoes the counting of askForMore.
func (s *cloudSession) answered() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asking--
}

// attach makes an accepted TLS connection a data connection of the session that its first
// frame proves. Nobody reads it until it has a conn to carry.
func (s *Server) attach(c *tls.Conn, j *joiningConn) error {
	err := s.tryAttach(c, j)
	if err != nil {
		// A balancer may have led it here instead of to the replica that has asked for it.
		s.log.Debug("data connection refused", "remote", j.RemoteAddr().String(), "err", err)
	}
	return err
}

func (s *Server) tryAttach(c *tls.Conn, j *joiningConn) error {
	d := newDataConn(c, j.Conn, s.blocks)
	typ, ticket, err := d.receive(mostTicket)
	if err != nil {
		return err
	}
	if typ != frameAttach {
		return fmt.Errorf("it begins with a frame of type %#x", typ)
	}
	cs := s.asked.take(string(ticket))
	if cs == nil {
		return errors.New("this replica has not asked for it")
	}
	defer cs.answered() // not before it is spare: an open in between would ask for another one
	if !cs.hold(d) {
		return errEnded
	}
	if carrier, ok := j.Conn.(*carrier); ok {
		carrier.alone()
	}
	d.rests()
	if err := d.send(frameAttach, nil); err != nil {
		cs.drop(d)
		return err
	}
	j.dispatched()
	cs.counters.DataOpened.Add(1)
	cs.log.Debug("data connection", "remote", j.RemoteAddr().String())
	cs.spare(d)
	return nil
}

// spare has a data connection wait for the next conn.
func (s *cloudSession) spare(d *dataConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d.since = time.Now()
	if s.err != nil {
		return
	}
	s.spares = append(s.spares, d)
	if d.owesEnd {
		d.saying = time.AfterFunc(endTime, s.guarded(func() { s.sayEnd(d) }))
	}
}

// takeSpare returns the data connection that was used last of those that wait, or nil: it is
// the one whose congestion window is largest.
func (s *cloudSession) takeSpare() *dataConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := len(s.spares) - 1
	if last < 0 || s.leaving || len(s.data)-len(s.spares) >= s.mostDataLocked() {
		return nil
	}
	d := s.spares[last]
	s.spares = slices.Delete(s.spares, last, last+1)
	if d.saying != nil {
		d.saying.Stop()
		d.saying = nil
	}
	return d
}

// tend ends data connections that have waited for long, or are lost.
func (s *cloudSession) tend() {
	s.dropSpares(func(d *dataConn) bool { return time.Since(d.since) >= dataIdle || d.lost() })
	s.dropLost()
}

// dropSpares ends those of which which says so.
func (s *cloudSession) dropSpares(which func(*dataConn) bool) {
	s.mu.Lock()
	var those []*dataConn
	s.spares = slices.DeleteFunc(s.spares, func(d *dataConn) bool {
		is := which(d)
		if is {
			those = append(those, d)
		}
		return is
	})
	s.mu.Unlock()
	for _, d := range those {
		s.drop(d)
	}
}

// asking is an open request that waits for the answer on a data connection. Nothing that
// comes on the session's own connection settles it.
type asking struct{}

// abort implements topic: the end of the session is that of the data connection.
func (asking) abort() {}

// dialOver is dial by a data connection. lost says that it was not fit for use: the edge has
// not answered, and can be asked in another way.
func (s *cloudSession) dialOver(ctx context.Context, d *dataConn, r tunnel.Request, m *tunnel.Message) (c *conn, refusal *tunnel.Refusal, lost bool) {
	if refusal = s.add(m.Topic, asking{}); refusal != nil {
		s.spare(d)
		return nil, refusal, false
	}
	d.owesEnd = false // the open says it
	stop := context.AfterFunc(ctx, d.interrupt)
	data, err := s.ask(d, m)
	waited := stop() // else d is no longer to be used: it has been interrupted, or is about to be
	switch {
	case waited && err == nil && data == nil:
		if c = s.carry(m.Topic, d); c != nil {
			return c, nil, false
		}
		refusal = s.gaveUp(ctx, r)
	case waited && err == nil:
		if refusal, err = refusalOf(data); err == nil {
			s.remove(m.Topic)
			s.spare(d)
			return nil, refusal, false
		}
		refusal = tunnel.Refusef(tunnel.Internal, "node %s has refused in words that make no sense", r.Node)
	case waited && s.reason() == nil:
		s.log.Debug("a data connection is of no use", "err", err)
		s.dropSpares(func(*dataConn) bool { return true }) // the same may have become of them
		lost = true
	default:
		refusal = s.gaveUp(ctx, r)
	}
	s.drop(d)
	s.remove(m.Topic)
	// It may overtake the open, and then the edge dials in vain until it finds d closed.
	s.post(message(typeCancel, m.Topic, nil))
	return nil, refusal, lost
}

// ask sends an open and waits for the answer: nil if there is a conn, else a refusal.
func (s *cloudSession) ask(d *dataConn, m *tunnel.Message) (refused []byte, err error) {
	if err = d.sendMessage(frameOpen, s.onWire(m)); err != nil {
		return nil, err
	}
	typ, data, err := d.receive(maxControlFrame)
	switch {
	case err != nil:
		return nil, err
	case typ == frameOpened && len(data) == 0:
		return nil, nil
	case typ == frameRefused && len(data) > 0:
		return data, nil
	}
	return nil, fmt.Errorf("a frame of type %#x with %d bytes answers an open", typ, len(data))
}

// carry makes an open request that d's edge has answered a conn on it, nil if the session
// has ended meanwhile.
func (s *cloudSession) carry(name string, d *dataConn) *conn {
	d.works()
	by := &ride{dataConn: d}
	since := time.Now()
	var c *conn
	c = newConn(connConfig{
		stream: by, ordered: s.ordered, blocks: s.blocks, counters: s.counters, log: s.log,
		local: "cloud", remote: addr(s.pub.Node),
		ended: func(err error) {
			if err != nil {
				if c.mustCancel() {
					s.post(message(typeCancel, name, nil)) // for an edge that does not read
				}
				s.drop(d)
				return
			}
			if by.endGot.Load() {
				by.stopReceiving()
			} else {
				by.interrupt() // there may be a receiver: an edge may stop after its fin
			}
			c.mu.Lock()
			stopped := c.stopGot
			c.mu.Unlock()
			if stopped { // there may be a sender, and an edge that does not throw away what it sends
				d.raw.SetWriteDeadline(time.Now().Add(stopTimeout)) //nolint:errcheck // it fails when d is closed
			}
		},
		gone: func() {
			release := func() {
				defer s.connOver(name, since)
				if err := guard(s.log, s.counters, "the data connection ends", func() error { return s.release(c, by) }); err != nil {
					s.drop(d)
				}
			}
			switch {
			case c.err != nil:
				s.connOver(name, since)
			case by.endGot.Load() && c.sendMu.TryLock(): // else the caller of this may have it
				c.sendMu.Unlock()
				release()
			default:
				s.wg.Go(release) // it has to wait for the edge
			}
		},
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil
	}
	s.topics[name] = c
	d.carries.Store(c)
	s.counters.ConnsOverData.Add(1)
	return c
}

// release is what comes after the clean end of a conn: its data connection waits for the
// next one, when all that was sent has been taken at the edge, and nothing more comes from
// there. That may take as long as a target likes, and so long the conn counts. With an error,
// the connection is of no more use.
func (s *cloudSession) release(c *conn, by *ride) error {
	d := by.dataConn
	d.carries.Store(nil)
	by.recvMu.Lock() // whoever was in WriteTo has been interrupted
	by.over.Store(true)
	by.recvMu.Unlock()
	by.resume()
	c.sendMu.Lock() // somebody in ReadFrom may be sending still
	ended := by.endGot.Load()
	var err error
	if !ended && !by.endSent.Load() {
		err = d.sendEnd()
		by.endSent.Store(true)
	}
	c.sendMu.Unlock()
	if err != nil {
		return err
	}
	d.raw.SetWriteDeadline(time.Time{}) //nolint:errcheck // it fails when d is closed
	if d.broken.Load() {
		return errors.New("it has lost its way")
	}
	if !ended {
		if err := d.skipToEnd(); err != nil {
			return err
		}
	}
	d.rests()
	d.owesEnd = !by.endSent.Load()
	s.spare(d)
	return nil
}

// sayEnd has the edge know that a conn which it has ended has ended here, too: until then it does
// not stop, since there might be something on the way.
func (s *cloudSession) sayEnd(d *dataConn) {
	s.mu.Lock()
	at := slices.Index(s.spares, d)
	due := at >= 0 && d.owesEnd
	if due {
		s.spares = slices.Delete(s.spares, at, at+1)
	}
	s.mu.Unlock()
	if !due {
		return
	}
	if d.sendEnd() != nil {
		s.drop(d)
		return
	}
	d.owesEnd = false
	s.spare(d)
}

// skipToEnd throws away what still comes of a conn that has ended.
func (d *dataConn) skipToEnd() error {
	for {
		typ, n, err := d.next()
		switch {
		case err != nil:
			return err
		case !isChunk(typ, n):
			return fmt.Errorf("a frame of type %#x with %d bytes behind a conn", typ, n)
		case typ&flagAbort != 0:
			return errors.New("its conn was aborted")
		}
		if err := d.skip(n); err != nil || typ&flagEnd != 0 {
			return err
		}
	}
}

// refusalOf reads what a Refused says.
func refusalOf(data []byte) (*tunnel.Refusal, error) {
	var r pb.Refused
	if err := proto.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("refused: %w", err)
	}
	code := tunnel.Internal
	if c := r.GetCode(); c > 0 && c <= pb.Code_CODE_INTERNAL {
		code = tunnel.Code(c)
	}
	return &tunnel.Refusal{Code: code, Text: text(r.GetText())}, nil
}
