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

	"github.com/google/uuid"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// MaxConnections is how many connections a session may have, even if the edge would open more.
const MaxConnections = 64

// maxTicket bounds the first frame of an unknown client, in bytes.
const maxTicket = 64

// endTime is how long an edge may wait until the cloud tells it that a conn has ended. The cloud
// sends no such message if an open comes first on the data connection, since the open says the same.
const endTime = 50 * time.Millisecond

const (
	// requestPause is how long requestMore sends no request for a data connection after a refusal. It is also the
	// shortest time between two requests while more requests are pending than data connections exist. Edges of older
	// releases do not refuse a request, so such a request stays pending.
	requestPause = time.Second
	// requestPauseFull replaces requestPause after a refusal by an edge that has as many data connections as it may
	// have. Some of these data connections end soon: within a round trip, or when their targets have taken every byte.
	requestPauseFull = 100 * time.Millisecond
)

// requestTimeout is how long the edge may take to answer a request for a data connection.
const requestTimeout = joinTimeout

// dataTickets holds the tickets with which a server has asked for data connections. A ticket is valid
// for one connection. It proves to which session the connection belongs, since only the edge of
// that session has read the ticket.
type dataTickets struct {
	// mu guards of, the sessions by ticket.
	mu sync.Mutex
	of map[string]*cloudSession
}

func (t *dataTickets) add(ticket string, s *cloudSession) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of == nil {
		t.of = make(map[string]*cloudSession)
	}
	t.of[ticket] = s
}

// take returns the session of a ticket and invalidates the ticket. It returns nil if the ticket
// is not valid.
func (t *dataTickets) take(ticket string) *cloudSession {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.of[ticket]
	delete(t.of, ticket)
	return s
}

// takeOf invalidates a ticket of session s. It returns false if s has no such ticket.
func (t *dataTickets) takeOf(s *cloudSession, ticket string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of[ticket] != s {
		return false
	}
	delete(t.of, ticket)
	return true
}

// requestMore asks the edge for one data connection, unless the session has as many as it may have.
// While more requests are pending than data connections exist, requestMore sends none until an answer
// comes or requestPause is over. Over a thin link a handshake takes as long as many opens, and the opens
// would wait for the handshakes. After a refusal requestMore sends none for a while, since the next
// request would probably be refused as well.
func (s *cloudSession) requestMore() {
	s.mu.Lock()
	now := time.Now()
	due := (s.requested <= len(s.data) || now.Sub(s.lastRequest) >= requestPause) && !now.Before(s.noRequestUntil)
	more := s.err == nil && !s.toldDrain.Load() && !s.leaving && due && len(s.data)+s.requested < s.maxDataLocked()
	if more {
		s.requested++
		s.lastRequest = now
	}
	s.mu.Unlock()
	if !more {
		return
	}
	ticket := rand.Text()
	s.tickets.add(ticket, s)
	time.AfterFunc(requestTimeout, func() {
		if s.tickets.take(ticket) != nil {
			s.answered()
		}
	})
	s.post(message(typeConnection, ticket, nil))
}

// maxDataLocked returns how many data connections may carry conns now. The number is half of what the
// edge opens at most (s.connections). It is one more for each recent short conn, because the end of a conn
// occupies its data connection for a while. It never exceeds s.connections. The other half stays free for
// short conns: long conns, such as followed logs, cost fewer bytes if they share packets on the session's
// own connection. Over a narrow link the number is zero. The caller holds mu.
func (s *cloudSession) maxDataLocked() int {
	if s.isNarrow() {
		return 0
	}
	return min(s.connections, (s.connections+1)/2+s.shortConns.count())
}

// recently counts the events of the last one to two seconds.
type recently struct {
	// The field now counts the events of the current second. The field before counts the events of
	// the previous second.
	now, before int
	since       time.Time // when now began to count
}

func (r *recently) add() {
	r.turn()
	r.now++
}

func (r *recently) count() int {
	r.turn()
	return r.now + r.before
}

// turn starts a new second when the current one is over.
func (r *recently) turn() {
	switch t := time.Now(); {
	case t.Sub(r.since) >= 2*time.Second:
		r.now, r.before, r.since = 0, 0, t
	case t.Sub(r.since) >= time.Second:
		r.now, r.before, r.since = 0, r.now, t
	}
}

// answered ends a request of requestMore: the request is no longer pending.
func (s *cloudSession) answered() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requested--
}

// refusedData ends a request of requestMore that the edge has refused.
func (s *cloudSession) refusedData(refusal *tunnel.Refusal) {
	pause := requestPause
	if refusal.Code == tunnel.Overloaded {
		pause = requestPauseFull
	}
	s.log.Debug("the edge opens no data connection", "err", refusal)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requested--
	s.noRequestUntil = time.Now().Add(pause)
}

// attachData makes an accepted TLS connection a data connection. The ticket in its first frame
// selects the session. Nobody reads the connection until it has a conn.
func (s *Server) attachData(c *tls.Conn, j *joiningConn) error {
	err := s.tryAttachData(c, j)
	if err != nil {
		// A load balancer may have led the connection here instead of to the replica that asked
		// for it.
		s.log.Debug("data connection refused", "remote", j.RemoteAddr().String(), "err", err)
	}
	return err
}

// tryAttachData is attachData without the log.
func (s *Server) tryAttachData(c *tls.Conn, j *joiningConn) error {
	d := newDataConn(c, j.Conn, s.blocks)
	typ, ticket, err := d.Receive(maxTicket)
	if err != nil {
		return err
	}
	if typ != conn.FrameAttach {
		return fmt.Errorf("its first frame is of type %#x", typ)
	}
	cs := s.tickets.take(string(ticket))
	if cs == nil {
		return errors.New("this replica did not request it")
	}
	defer cs.answered() // deferred until spare has run: earlier, an open would ask for another data connection
	if !cs.hold(d) {
		return errEnded
	}
	if carrier, ok := j.Conn.(*carrier); ok {
		carrier.alone()
	}
	d.waitShort()
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

// spare makes a data connection wait for the next conn.
func (s *cloudSession) spare(d *dataConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d.since, d.byPods = time.Now(), false
	if s.err != nil {
		return
	}
	s.spares = append(s.spares, d)
	s.spared.Notify()
	if d.OwesEnd() {
		d.saying = time.AfterFunc(endTime, s.guarded(func() { s.sayEnd(d) }))
	}
}

// takeSpare removes an idle data connection from spares, and returns it. It takes the most recently used one, whose
// congestion window is the largest. It returns nil if no data connection is idle, if the edge is about to stop, or
// if maxDataLocked data connections are in use. byPods is that of the conn's claim: such conns get at most half of
// them, so that pods leave some to other callers.
func (s *cloudSession) takeSpare(byPods bool) *dataConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	last, most := len(s.spares)-1, s.maxDataLocked()
	if last < 0 || s.leaving || len(s.data)-len(s.spares) >= most || byPods && s.byPodsLocked() >= (most+1)/2 {
		return nil
	}
	d := s.spares[last]
	d.byPods = byPods
	s.spares = slices.Delete(s.spares, last, last+1)
	if d.saying != nil {
		d.saying.Stop()
		d.saying = nil
	}
	return d
}

// byPodsLocked returns how many data connections carry conns that pods have asked for, by a Service. The caller holds
// mu.
func (s *cloudSession) byPodsLocked() (n int) {
	for d := range s.data {
		if d.byPods {
			n++
		}
	}
	return n
}

// spareWait is how long a conn that carries datagrams waits for a data connection.
const spareWait = time.Second

// spareFor returns an idle data connection for a request, or nil. A conn that carries datagrams lasts
// long, and each lost packet of other conns would delay its datagrams. So it waits for a data connection
// if the session may have one more; other conns do not wait.
func (s *cloudSession) spareFor(ctx context.Context, r tunnel.Request) *dataConn {
	var late <-chan time.Time
	for {
		s.mu.Lock()
		spared := s.spared.Next()
		free := !s.leaving && len(s.data)-len(s.spares) < s.maxDataLocked()
		s.mu.Unlock()
		if d := s.takeSpare(claimOf(r).byPods); d != nil || !free || r.Network != tunnel.NetworkUDP {
			return d
		}
		if late == nil {
			timer := time.NewTimer(s.spareWait)
			defer timer.Stop()
			late = timer.C
		}
		s.requestMore() // in each round, since another conn may have taken the data connection
		select {
		case <-spared:
		case <-late:
			return nil
		case <-ctx.Done():
			return nil
		case <-s.done:
			return nil
		}
	}
}

// dropIdleAndLost closes the data connections that have been idle for dataIdle, or are lost.
func (s *cloudSession) dropIdleAndLost() {
	limit := s.own.lost()
	s.dropSpares(func(d *dataConn) bool { return time.Since(d.since) >= dataIdle || d.lost(limit) })
	s.dropLost()
}

// dropSpares closes every idle data connection for which match returns true.
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

// handOver gives the edge the conn for which it has asked by a Reach, over a data connection. ctx and topic are those
// of the call. handOver returns nil if the conn has to be the stream of the call: the edge wants no other, or no data
// connection can be used now.
func (s *cloudSession) handOver(ctx context.Context, topic string) *conn.Conn {
	if len(metadata.ValueFromIncomingContext(ctx, dataKey)) == 0 {
		return nil
	}
	d := s.takeSpare(true)
	if d == nil {
		s.requestMore()
		return nil
	}
	given := ctx
	// Over a link with a long queue, the answer waits as long as the last heartbeat did.
	ctx, cancel := context.WithTimeout(ctx, s.handOverTime+2*time.Duration(s.pub.RTT.Load()))
	defer cancel()
	s.quota.allowAnswer()
	m := &tunnel.Message{Category: category, Type: tunnel.TypeOpen, Topic: uuid.NewString(), Addr: topic}
	r := tunnel.Request{Node: s.pub.Node, Category: categoryServices, Addr: topic}
	c, refusal, _ := s.dialOver(ctx, d, r, m, false)
	if refusal != nil {
		s.log.Debug("a conn is not handed over by a data connection", "topic", topic, "err", refusal)
	}
	if ctx.Err() != nil && given.Err() == nil { // a box in between may have forgotten the other idle ones, too
		s.dropSpares(func(*dataConn) bool { return true })
	}
	return c
}

// handOverTime is how long the edge may take to answer a hand-over, beside twice the link's round trip. It has nothing
// to dial. The call has just come by the session's own connection, so a later answer shows that the data connection is
// dead.
const handOverTime = 3 * time.Second

// openPending is the topic of an open request that waits for its answer on a data connection. No
// message on the session's own connection settles the request.
type openPending struct{}

// Abort implements topic. It does nothing, since the data connection ends with the session.
func (openPending) Abort() {}

// dialOver is dial over a data connection. asked is [conn.Config.Asked]. lost says that the data connection was
// unusable: the edge has not answered, and the cloud may send the open on the control stream.
func (s *cloudSession) dialOver(
	ctx context.Context, d *dataConn, r tunnel.Request, m *tunnel.Message, asked bool,
) (c *conn.Conn, refusal *tunnel.Refusal, lost bool) {
	register := s.add
	if !asked {
		register = s.registerSecond
	}
	if refusal = register(m.Topic, openPending{}); refusal != nil {
		s.spare(d)
		return nil, refusal, false
	}
	stop := context.AfterFunc(ctx, d.Interrupt)
	data, err := s.sendOpen(d, m)
	waited := stop() // false: d was interrupted, or is about to be, so no other conn can use d
	switch {
	case waited && err == nil && data == nil:
		if c = s.carry(m.Topic, claimOf(r), d, asked); c != nil {
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
		refusal = tunnel.Refusef(tunnel.Internal, "node %s has sent a malformed refusal", r.Node)
	case waited && s.reason() == nil:
		s.log.Debug("a data connection cannot be used", "err", err)
		s.dropSpares(func(*dataConn) bool { return true }) // the other idle data connections may have failed, too
		lost = true
	default:
		refusal = s.gaveUp(ctx, r)
	}
	s.drop(d)
	s.remove(m.Topic)
	// The cancel may overtake the open. The edge then dials in vain until it finds d closed.
	s.post(message(typeCancel, m.Topic, nil))
	return nil, refusal, lost
}

// sendOpen sends an open on a data connection and waits for the answer. It returns nil if the edge has
// opened a conn, else the refusal.
func (s *cloudSession) sendOpen(d *dataConn, m *tunnel.Message) (refused []byte, err error) {
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

// carry makes a conn over d for an open request that the edge has answered on d. It returns nil if the session has
// ended meanwhile.
func (s *cloudSession) carry(name string, counts claim, d *dataConn, asked bool) *conn.Conn {
	d.waitLong()
	lease := d.LendAtCloud()
	since := time.Now()
	var c *conn.Conn
	c = conn.OverLease(lease, conn.Config{
		Asked: asked, Ordered: s.ordered, Blocks: s.blocks, Counters: s.counters, Traffic: &s.pub.Traffic, Log: s.log,
		Local: "cloud", Remote: conn.Addr(s.pub.Node), Ends: s.endsOf(asked),
		TellEnds: func(left time.Duration) { s.tellEnds(name, left) },
		Ended: func(err error) {
			if err == nil {
				lease.End(c.PeerStopped())
				return
			}
			if c.MustCancel() {
				s.post(message(typeCancel, name, nil)) // for an edge that does not read the conn
			}
			s.drop(d)
		},
		Gone: func() {
			release := func() {
				defer s.connOver(name, counts, since)
				give := func() error { return s.release(d, lease) }
				if err := tunnel.Guard(s.log, s.counters, "the data connection ends", give); err != nil {
					s.drop(d)
				}
			}
			switch {
			case c.Err() != nil:
				s.connOver(name, counts, since)
			case lease.ReturnsAtOnce():
				release()
			default:
				s.wg.Go(release) // release has to wait for the edge
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

// release makes a data connection wait for the next conn, after its conn has ended cleanly.
// release waits until the edge's target has read everything, and the conn counts until then.
// After an error the data connection cannot be used again.
func (s *cloudSession) release(d *dataConn, lease *conn.Lease) error {
	if err := lease.ReturnAtCloud(); err != nil { // d still carries the conn: the target may stall
		return err
	}
	d.carries.Store(nil)
	s.mu.Lock() // a call of lost has set its timeout before, or sees that d carries nothing
	d.waitShort()
	s.mu.Unlock()
	s.spare(d)
	return nil
}

// sayEnd tells the edge that the conn has ended at the cloud, too. An edge that has ended its
// last conn waits for this message before it stops, since bytes or an open may be in flight.
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

// refusalOf decodes a Refused message.
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
