package stream

import (
	"net"
	"sync/atomic"
	"time"

	"tunnel/pkg/conn"
)

// A session may have data connections beside its own connection. Each carries one conn at a time
// (pkg/conn has their frames and phases). The edge opens one when the cloud asks for it; the cloud
// asks when it has none to spare for an open, which then goes by the session's own connection. So an
// idle node has none.
//
// data.go is what both ends do with them, data_cloud.go and data_edge.go the two ends.

// dataProtocol tells a data connection from one that speaks gRPC (ALPN, RFC 7301).
const dataProtocol = "tunnel-data/1"

const (
	// dataIdle is how long a data connection is kept for the next conn.
	dataIdle = 2 * time.Minute
	// answerTime is how long the other end's kernel may take to acknowledge an open.
	answerTime = 5 * time.Second
)

// dataConn is one end of a data connection of a session.
type dataConn struct {
	*conn.Data
	raw net.Conn     // below TLS
	tcp *net.TCPConn // below that; nil in tests with a network of their own

	carries atomic.Pointer[conn.Conn] // the conn that it carries now

	// Guarded by session.mu.
	since   time.Time   // when it was last used
	saying  *time.Timer // calls sayEnd
	unheard time.Time   // since when lost has seen that something is sent again; zero: nothing is
}

func newDataConn(c, raw net.Conn, b *conn.Blocks) *dataConn {
	d := &dataConn{Data: conn.NewData(c, raw, b), raw: raw, since: time.Now()}
	switch r := raw.(type) {
	case *carrier:
		d.tcp = r.tcp
	case *net.TCPConn:
		d.tcp = r
	}
	return d
}

// armUserTimeout has the kernel notice soon that the connection is lost, while nothing is under way
// but an open: the other end's kernel acknowledges that at once.
func (d *dataConn) armUserTimeout() { d.userTimeout(answerTime) }

// disarmUserTimeout undoes armUserTimeout for a conn: a reader that is stalled lets its peer wait
// for any time, and the kernel's timeout does not tell it from a link that is cut (tcp(7)).
func (d *dataConn) disarmUserTimeout() { d.userTimeout(0) }

func (d *dataConn) userTimeout(t time.Duration) {
	if d.tcp != nil {
		setUserTimeout(d.tcp, t) //nolint:errcheck // it fails when d is closed, which others notice
	}
}

// abort ends the connection and whatever waits for it, and the other end sees no clean end
// of its conn. What has not been sent is thrown away.
func (d *dataConn) abort() {
	if d.tcp != nil {
		d.tcp.SetLinger(0) //nolint:errcheck // it fails when d is closed
	}
	d.raw.Close()
}

// lost reports whether the kernel has ended the connection, or has sent something again and
// again for limit, and nothing has come back. A peer that does not read answers all the same.
// It is asked every heartbeatInterval; the caller holds session.mu.
func (d *dataConn) lost(limit time.Duration) (is bool) {
	if d.tcp == nil {
		return false
	}
	raw, err := d.tcp.SyscallConn()
	if err != nil {
		return false
	}
	raw.Control(func(fd uintptr) { //nolint:errcheck // it fails when d is closed
		acks, ok := acksOf(fd)
		is = ok && d.isLost(acks, time.Now(), limit)
	})
	return is
}

func (d *dataConn) isLost(a acks, now time.Time, limit time.Duration) bool {
	switch heard := now.Add(-a.last); {
	case !a.missing:
		d.unheard = time.Time{}
	case d.unheard.IsZero(), heard.After(d.unheard):
		d.unheard = now // that the last answer is long ago says nothing of a conn that was idle
	}
	return a.ended || a.missing && now.Sub(d.unheard) >= limit
}

// hold makes a data connection one of the session's. It fails when the session has ended.
func (s *session) hold(d *dataConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return false
	}
	if s.data == nil {
		s.data = make(map[*dataConn]struct{})
	}
	s.data[d] = struct{}{}
	if c, ok := d.raw.(*carrier); ok {
		s.pacer.add(c)
	}
	s.counters.DataLive.Add(1)
	return true
}

// drop undoes hold and ends the connection.
func (s *session) drop(d *dataConn) {
	s.mu.Lock()
	s.dropLocked(d)
	s.mu.Unlock()
	d.abort()
}

func (s *session) dropLocked(d *dataConn) {
	if _, held := s.data[d]; held {
		delete(s.data, d)
		if c, ok := d.raw.(*carrier); ok {
			s.pacer.remove(c)
		}
		s.counters.DataLive.Add(-1)
	}
}

// dropLost ends the data connections whose other end cannot be reached, and their conns. Over a narrow
// link most packets of a connection may be lost for a while.
func (s *session) dropLost() {
	limit := lostAfter
	if s.pacer.narrow() {
		limit = lostOverNarrow
	}
	s.mu.Lock()
	var lost []*dataConn
	for d := range s.data {
		if d.lost(limit) {
			lost = append(lost, d)
		}
	}
	s.mu.Unlock()
	for _, d := range lost {
		s.log.Info("a data connection is lost", "remote", d.raw.RemoteAddr().String())
		if c := d.carries.Load(); c != nil {
			c.Abort() // its owner may not be receiving
		}
		s.drop(d)
	}
}
