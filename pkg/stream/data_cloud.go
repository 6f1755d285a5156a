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

	"tunnel/pkg/conn"
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

// askPause is how long an unanswered request for a data connection holds up the next one. An edge does
// not answer while its own limit is used up by data connections that are still ending there.
const askPause = time.Second

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
	due := s.asking <= len(s.data) || time.Since(s.lastAsk) >= askPause
	more := s.err == nil && !s.toldDrain.Load() && due && len(s.data)+s.asking < s.mostDataLocked()
	if more {
		s.asking++
		s.lastAsk = time.Now()
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
	typ, ticket, err := d.Receive(mostTicket)
	if err != nil {
		return err
	}
	if typ != conn.FrameAttach {
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
	d.armUserTimeout()
	if err := d.Send(conn.FrameAttach, nil); err != nil {
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
	if d.OwesEnd() {
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

// dropIdleAndLost ends data connections that have waited for long, or are lost.
func (s *cloudSession) dropIdleAndLost() {
	s.dropSpares(func(d *dataConn) bool { return time.Since(d.since) >= dataIdle || d.lost(lostAfter) })
	s.dropLost()
}

// dropSpares closes every data connection that waits for a conn and for which match returns true.
func (s *cloudSession) dropSpares(match func(*dataConn) bool) {
	s.mu.Lock()
	var matched []*dataConn
	s.spares = slices.DeleteFunc(s.spares, func(d *dataConn) bool {
		is := match(d)
		if is {
			matched = append(matched, d)
		}
		return is
	})
	s.mu.Unlock()
	for _, d := range matched {
		s.drop(d)
	}
}

// asking is an open request that waits for the answer on a data connection. Nothing that
// comes on the session's own connection settles it.
type asking struct{}

// Abort implements topic: the end of the session is that of the data connection.
func (asking) Abort() {}

// dialOver is dial by a data connection. lost says that it was not fit for use: the edge has
// not answered, and can be asked in another way.
func (s *cloudSession) dialOver(
	ctx context.Context, d *dataConn, r tunnel.Request, m *tunnel.Message,
) (c *conn.Conn, refusal *tunnel.Refusal, lost bool) {
	if refusal = s.add(m.Topic, asking{}); refusal != nil {
		s.spare(d)
		return nil, refusal, false
	}
	stop := context.AfterFunc(ctx, d.Interrupt)
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
			d.Refused()
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
	if err = d.Ask(encode(s.onWire(m))); err != nil {
		return nil, err
	}
	typ, data, err := d.Receive(conn.MaxControlFrame)
	switch {
	case err != nil:
		return nil, err
	case typ == conn.FrameOpened && len(data) == 0:
		return nil, nil
	case typ == conn.FrameRefused && len(data) > 0:
		return data, nil
	}
	return nil, fmt.Errorf("a frame of type %#x with %d bytes answers an open", typ, len(data))
}

// carry makes a conn over d of the open request that the edge has answered there. It returns nil if the
// session has ended meanwhile.
func (s *cloudSession) carry(name string, d *dataConn) *conn.Conn {
	d.disarmUserTimeout()
	lease := d.LendAtCloud()
	since := time.Now()
	var c *conn.Conn
	c = conn.OverLease(lease, conn.Config{
		Ordered: s.ordered, Blocks: s.blocks, Counters: s.counters, Log: s.log,
		Local: "cloud", Remote: conn.Addr(s.pub.Node),
		Ended: func(err error) {
			if err == nil {
				lease.End(c.PeerStopped())
				return
			}
			if c.MustCancel() {
				s.post(message(typeCancel, name, nil)) // for an edge that does not read
			}
			s.drop(d)
		},
		Gone: func() {
			release := func() {
				defer s.connOver(name, since)
				give := func() error { return s.release(d, lease) }
				if err := guard(s.log, s.counters, "the data connection ends", give); err != nil {
					s.drop(d)
				}
			}
			switch {
			case c.Err() != nil:
				s.connOver(name, since)
			case lease.ReturnsAtOnce():
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

// release has a data connection wait for the next conn, after the clean end of its conn. It waits
// for as long as the edge's target takes to read, and the conn counts until then. After an error the
// data connection is of no more use.
func (s *cloudSession) release(d *dataConn, lease *conn.Lease) error {
	d.carries.Store(nil)
	if err := lease.ReturnAtCloud(); err != nil {
		return err
	}
	d.armUserTimeout()
	s.spare(d)
	return nil
}

// sayEnd tells the edge that the conn has ended at the cloud, too. An edge that has ended its last conn
// does not stop before, since bytes or an open may be on the way.
func (s *cloudSession) sayEnd(d *dataConn) {
	s.mu.Lock()
	at := slices.Index(s.spares, d)
	due := at >= 0 && d.OwesEnd()
	if due {
		s.spares = slices.Delete(s.spares, at, at+1)
	}
	s.mu.Unlock()
	if !due {
		return
	}
	if d.SayEnd() != nil {
		s.drop(d)
		return
	}
	s.spare(d)
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
