package stream

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// newDataRig is a rig with an edge whose conns go by a data connection, of which so many are
// for conns that stay.
func newDataRig(t *testing.T, most int) (*rig, *edge) {
	t.Helper()
	r := newRig(t)
	r.spares = 2 * most // half of them are for conns that stay
	return r, r.join("edge1", direct)
}

// cloudEnd is the cloud's end of a node's session.
func (r *rig) cloudEnd(node tunnel.NodeName) *cloudSession {
	return r.dir.Lookup(node).Link.(*cloudSession)
}

// dataConns returns how many data connections a session has.
func (s *session) dataConns() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.data)
}

// byData reports whether c goes by one of the session's data connections.
func (s *session) byData(c net.Conn) bool { return s.dataOf(c) != nil }

// dataOf returns the data connection that carries c, or nil.
func (s *session) dataOf(c net.Conn) *dataConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	for d := range s.data {
		if own := d.carries.Load(); own != nil && own == c {
			return d
		}
	}
	return nil
}

// What goes over a data connection, as docs/protocol.md has it.
const (
	frameChunk = 0x00
	flagFin    = 1 << 0
	flagStop   = 1 << 1
	flagEnd    = 1 << 2
)

// header is the header of a frame.
func header(typ byte, n int) []byte {
	return binary.BigEndian.AppendUint32(nil, uint32(typ)<<24|uint32(n))
}

// A node that nobody dials has no data connection. The first conn has the edge open one,
// further ones use it, and there are as many as there may be.
func TestDataConnectionsFollowDemand(t *testing.T) {
	r := newRig(t)
	cfg := r.clientConfig("edge1")
	cfg.Connections = 4
	e := r.start(cfg, direct)
	r.eventually("node joins", func() bool { return r.dir.Holds("edge1") && e.client.Ready() == nil })
	cs := r.cloudEnd("edge1")
	if n := cs.dataConns(); n != 0 {
		t.Fatalf("an idle node has %d data connections", n)
	}
	target := testkit.Serve(t, testkit.Echo)
	var conns []net.Conn
	for i, want := range []bool{false, true, false, true, false, false, false} {
		r.eventually("the edge has opened what it was asked for", func() bool {
			cs.mu.Lock()
			defer cs.mu.Unlock()
			return cs.requested == 0
		})
		c, err := r.dial("edge1", target)
		if err != nil {
			t.Fatal(err)
		}
		if got := cs.byData(c); got != want {
			t.Errorf("that conn %d goes by a data connection is %v", i, got)
		}
		conns = append(conns, c)
	}
	for i, c := range conns {
		c.SetDeadline(time.Now().Add(patience))
		if _, err := c.Write([]byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1)
		if _, err := io.ReadFull(c, b); err != nil || b[0] != byte(i) {
			t.Errorf("conn %d: got %v, %v", i, b, err)
		}
		c.Close()
	}
	r.idle(e)
	if n := r.counters.DataOpened.Load(); n != 2 || cs.dataConns() != 2 {
		t.Errorf("%d data connections were opened, %d are there; want 2", n, cs.dataConns())
	}
}

// Conns that carry datagrams wait for data connections, even if they are the first conns of their session. They do
// not wait if the session can have none.
func TestDatagramsGoByADataConnection(t *testing.T) {
	for most, want := range map[int]bool{4: true, 0: false} {
		r, e := newDataRig(t, most)
		r.cloudEnd("edge1").spareWait = 2 * patience // a wait for nothing fails below
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		target := testkit.Serve(t, testkit.Echo)
		var dials sync.WaitGroup
		for range 3 { // at once, as when the node of three UDP ports comes back
			dials.Go(func() {
				c, err := r.dir.Dial(ctx, tunnel.Request{
					Node: "edge1", Category: "tcp", Network: tunnel.NetworkUDP, Addr: target, Caller: "test",
				})
				if err != nil {
					t.Errorf("with %d data connections: %v", most, err)
					return
				}
				defer c.Close()
				if got := r.cloudEnd("edge1").byData(c); got != want {
					t.Errorf("with %d data connections, that it goes by one is %v", most, got)
				}
			})
		}
		dials.Wait()
		r.idle(e)
	}
}

// An edge whose conn has ended does not stop before the cloud has all of it.
func TestEdgeStopsBehindItsLastConn(t *testing.T) {
	r, e := newDataRig(t, 1)
	c, far := r.pair("edge1")
	c.(interface{ CloseWrite() error }).CloseWrite()
	io.Copy(io.Discard, far)
	sent := bytes.Repeat([]byte("all of it "), 6000)
	far.Write(sent)
	far.Close()
	r.eventually("the conn has ended at the edge", func() bool { return e.client.inUse() == 0 })
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		e.Stop()
	}()
	select {
	case <-stopped:
		t.Error("the edge has stopped while the cloud had read nothing")
	case <-time.After(300 * time.Millisecond):
	}
	if got := testkit.ReadAll(t, c); !bytes.Equal(got, sent) {
		t.Errorf("%d bytes came, want %d", len(got), len(sent))
	}
	c.Close()
	<-stopped
}

// Conns that come and go may have more data connections than those that stay.
func TestDataConnectionsOfShortConns(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		cfg := r.clientConfig("edge1")
		cfg.Connections = 4 // two for conns that stay, and one more
		e := r.start(cfg, func(context.Context, tunnel.Request) (net.Conn, error) {
			near, far := net.Pipe()
			go func() {
				io.Copy(io.Discard, far)
				far.Close()
			}()
			return near, nil
		})
		r.eventually("node joins", func() bool { return r.dir.Holds("edge1") && e.client.Ready() == nil })
		var conns []net.Conn
		dial := func(what string, want bool) net.Conn {
			t.Helper()
			time.Sleep(100 * time.Millisecond) // others have ended, and what was asked for is there
			c, err := r.dial("edge1", "target:1")
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
			if got := r.cloudEnd("edge1").byData(c); got != want {
				t.Errorf("%s: that it goes by a data connection is %v", what, got)
			}
			return c
		}
		for _, want := range []bool{false, true, false, true, false} {
			dial("one that stays", want)
		}
		dial("short", false).Close()
		dial("short, no more is there", false).Close()
		dial("short", true).Close()
		short := dial("short", true)
		dial("one more", false)
		short.Close()
		time.Sleep(2 * time.Second)
		dial("another that stays", false)
		for _, c := range conns {
			c.Close()
		}
		r.idle(e)
	})
}

// One data connection carries conn after conn, however they end, unless that is by a reset.
func TestDataConnectionIsUsedAgain(t *testing.T) {
	ends := map[string]func(c net.Conn, far *net.TCPConn){
		"caller first": func(c net.Conn, far *net.TCPConn) {
			c.(interface{ CloseWrite() error }).CloseWrite()
			io.Copy(io.Discard, far)
			far.Close()
			io.Copy(io.Discard, c)
			c.Close()
		},
		"target first": func(c net.Conn, far *net.TCPConn) {
			far.Close()
			io.Copy(io.Discard, c)
			c.Close()
		},
		"caller at once": func(c net.Conn, far *net.TCPConn) {
			c.Close()
			io.Copy(io.Discard, far)
			far.Close()
		},
		"caller while the target sends": func(c net.Conn, far *net.TCPConn) {
			go io.Copy(struct{ io.Writer }{far}, rand.Reader)
			io.ReadFull(c, make([]byte, 1))
			c.Close()
			io.Copy(io.Discard, far)
		},
		"target while the caller sends": func(c net.Conn, far *net.TCPConn) {
			go io.Copy(struct{ io.Writer }{c}, rand.Reader)
			io.ReadFull(far, make([]byte, 1))
			far.CloseWrite()
			far.CloseRead()
			io.Copy(io.Discard, far) // with a full buffer its kernel would never reset the edge
			io.Copy(io.Discard, c)
			c.Close()
		},
		"target refuses": nil,
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			r, e := newDataRig(t, 1)
			r.haveSpare("edge1")
			before := r.counters.DataOpened.Load()
			for range 20 {
				if end == nil {
					if _, err := r.dial("edge1", "127.0.0.1:1"); tunnel.CodeOf(err) != tunnel.Refused {
						t.Fatalf("dialling a port where nobody listens: %v", err)
					}
					continue
				}
				c, far := r.pair("edge1")
				end(c, far)
				r.idle(e)
				far.Close()
			}
			if n := r.counters.DataOpened.Load() - before; n != 0 {
				t.Errorf("20 conns took %d more data connections", n)
			}
		})
	}
}

// A data connection that was cut while it waited harms no dial.
func TestDataConnectionCut(t *testing.T) {
	for name, silent := range map[string]bool{"by the edge": false, "so that nobody knows": true} {
		t.Run(name, func(t *testing.T) {
			r, e := newDataRig(t, 1) // a second one would carry the conn
			r.haveSpare("edge1")
			cs := r.cloudEnd("edge1")
			cs.mu.Lock()
			d := cs.spares[0]
			cs.mu.Unlock()
			if silent {
				d.raw.(*carrier).tcp.CloseWrite() // whatever is sent from now on fails
			} else {
				es := e.client.Session().Link.(*edgeSession)
				r.eventually("the edge has it, too", func() bool { return es.dataConns() == cs.dataConns() })
				es.mu.Lock()
				for d := range es.data {
					d.abort()
				}
				es.mu.Unlock()
			}
			l := testkit.NewTarget(t)
			r.spares = 0 // no more waiting for one
			c := r.mustDial("edge1", l.Address())
			far := l.Next(t)
			c.Write([]byte("x"))
			if _, err := io.ReadFull(far, make([]byte, 1)); err != nil {
				t.Error(err)
			}
			c.Close()
			far.Close()
			r.idle(e)
			r.eventually("it is forgotten", func() bool {
				cs.mu.Lock()
				defer cs.mu.Unlock()
				_, there := cs.data[d]
				return !there
			})
		})
	}
}

// An edge that gives up its idle data connections, since the link is narrow, does not cut off the
// end of a download: the kernel may hold megabytes when the target has sent its last byte.
func TestIdleDataConnectionsHaveSaidAll(t *testing.T) {
	r, e := newDataRig(t, 1)
	c, far := r.pair("edge1")
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, far)
	const all = 24 << 20
	go func() {
		far.Write(make([]byte, all))
		far.Close()
	}()
	es := e.client.Session().Link.(*edgeSession)
	carries := func() bool {
		es.mu.Lock()
		defer es.mu.Unlock()
		for d := range es.data {
			if c := d.carries.Load(); c != nil && !tunnel.IsClosed(c.Done()) {
				return true
			}
		}
		return false
	}
	got := 0
	for b := make([]byte, 4<<10); carries(); {
		c.SetReadDeadline(time.Now().Add(patience))
		n, err := c.Read(b)
		if got += n; errors.Is(err, io.EOF) { // the edge has sent all
			break
		}
		if err != nil {
			t.Fatalf("after %d bytes: %v", got, err)
		}
		if got > all-8<<20 {
			time.Sleep(200 * time.Microsecond) // slower than the edge sends
		}
	}
	es.dropUnused()
	c.SetReadDeadline(time.Now().Add(time.Minute))
	rest, err := io.Copy(io.Discard, c)
	if err != nil || got+int(rest) != all {
		t.Errorf("the caller has %d of %d bytes (%v), %d of them when the edge had sent all", got+int(rest), all, err, got)
	}
	c.Close()
	r.idle(e)
	r.eventually("no idle data connection is kept", func() bool {
		es.dropUnused()
		return es.dataConns() == 0
	})
}

// If the link turns out to be narrow, an edge gives up a data connection as soon as its conn has ended, and not only
// with the next heartbeat: the conns until then would suffer.
func TestNarrowLinkEndsDataConnections(t *testing.T) {
	for _, farEnds := range []bool{true, false} {
		r, e := newDataRig(t, 1)
		c, far := r.pair("edge1")
		es := e.client.Session().Link.(*edgeSession)
		es.pacer.narrowUntil.Store(new(time.Now().Add(time.Hour)))
		if farEnds { // so the edge has ended the conn before the cloud
			far.Close()
			testkit.ReadAll(t, c)
			c.Close()
		} else {
			c.Close()
			testkit.ReadAll(t, far)
			far.Close()
		}
		r.eventually("the data connection has ended", func() bool { return es.dataConns() == 0 })
		if len(r.log.lines("data connection ended", errNarrow.Error())) == 0 {
			t.Error("it has ended for another reason")
		}
		r.idle(e)
	}
}

// The end of a session is that of its data connections.
func TestDataConnectionsEndWithTheSession(t *testing.T) {
	r, e := newDataRig(t, 2)
	c, far := r.pair("edge1")
	r.haveSpare("edge1") // and one that waits
	es := e.client.Session().Link.(*edgeSession)
	r.dir.Lookup("edge1").Close(errors.New("cut by the test"))
	for name, c := range map[string]net.Conn{"cloud's": c, "target's": far} {
		c.SetReadDeadline(time.Now().Add(patience))
		_, err := c.Read(make([]byte, 1))
		wantErr(t, name+" read", err, syscall.ECONNRESET)
	}
	r.eventually("nothing is left at the edge", func() bool { return es.dataConns() == 0 })
}

// A conn that the edge resets is reset for a caller that reads nothing, too.
func TestResetOvertakesData(t *testing.T) {
	r, e := newDataRig(t, 2)
	c, far := r.pair("edge1")
	told := make(chan struct{})
	c.(*conn.Conn).OnReset(func() { close(told) })
	far.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
	if n, err := io.Copy(struct{ io.Writer }{far}, rand.Reader); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("writing to a reader that stalls: %d bytes, error %v; want a timeout", n, err)
	}
	es := e.client.Session().Link.(*edgeSession)
	es.mu.Lock()
	for _, topic := range es.topics {
		go topic.Abort()
	}
	es.mu.Unlock()
	select {
	case <-told:
	case <-time.After(patience):
		t.Error("the caller is not told")
	}
	r.idle(e)
}

// misleading is the configuration of an edge of the first replica. Its nth connection, of which the
// first is the session's own, leads to the second one where away says so.
func (all fleet) misleading(node string, away func(n int64) bool) (cfg ClientConfig, dials *atomic.Int64) {
	cfg, dials = all[0].clientConfig(node), new(atomic.Int64)
	cfg.Connections = 2
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if away(dials.Add(1)) {
			address = all[1].server.Addr().String()
		}
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	return cfg, dials
}

// A balancer between edge and cloud leads where it likes: the edge tries again until it meets
// the replica that has asked.
func TestDataConnectionElsewhere(t *testing.T) {
	all := newFleet(t, 2)
	r := all[0].rig
	cfg, dials := all.misleading("edge1", func(n int64) bool { return n == 2 || n == 3 })
	r.start(cfg, direct)
	r.eventually("node joins", func() bool { return r.dir.Holds("edge1") })
	r.pair("edge1")
	r.eventually("a data connection is there", func() bool { return r.cloudEnd("edge1").dataConns() == 1 })
	if n := dials.Load(); n != 4 {
		t.Errorf("it took %d connections, want 4", n)
	}
}

// Where it never does, conns go by the session's own connection, and the edge does not try
// for ever.
func TestDataConnectionNowhere(t *testing.T) {
	all := newFleet(t, 2)
	r := all[0].rig
	cfg, dials := all.misleading("edge1", func(n int64) bool { return n > 1 })
	e := r.start(cfg, direct)
	r.eventually("node joins", func() bool { return r.dir.Holds("edge1") && e.client.Ready() == nil })
	pair := func() {
		c, _ := r.pair("edge1")
		c.Close()
	}
	pair()
	es := e.client.Session().Link.(*edgeSession)
	tried := func(times int64) {
		r.eventually("the edge has tried", func() bool {
			es.mu.Lock()
			defer es.mu.Unlock()
			return es.opening == 0 && dials.Load() >= 1+times*attachTries
		})
	}
	tried(1)
	for range attachMisses - 1 {
		es.moreConnections(message(typeConnection, "a ticket of nobody's", nil))
	}
	tried(attachMisses)
	es.moreConnections(message(typeConnection, "a ticket of nobody's", nil))
	tried(attachMisses)
	for range 4 { // the cloud may ask again, in vain
		pair()
	}
	if n := dials.Load(); n != 1+attachMisses*attachTries {
		t.Errorf("the edge has made %d connections, want %d", n, 1+attachMisses*attachTries)
	}
	said := func() int { return len(r.log.lines("end=edge", "level=INFO", "no data connection")) }
	r.eventually("the edge says so", func() bool { return said() > 0 })
	if n := said(); n != 1 {
		t.Errorf("it says so %d times", n)
	}
}

// dataDial dials a data connection by hand.
func (r *rig) dataDial() *dataConn {
	r.t.Helper()
	raw, err := net.Dial("tcp", r.server.Addr().String())
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { raw.Close() })
	c := tls.Client(raw, &tls.Config{RootCAs: r.ca.Pool(), ServerName: "cloud", NextProtos: []string{DataProtocol}})
	c.SetDeadline(time.Now().Add(patience))
	return newDataConn(c, raw, new(conn.Blocks))
}

// strangerWithSpare has a stranger join as edge1, with a data connection that waits for a conn.
func (r *rig) strangerWithSpare(edge *stranger) (*strangerControl, *dataConn) {
	r.t.Helper()
	s := edge.joinWith("edge1", &pb.Hello{Version: Version, Connections: 1})
	open, first := r.sentOpen(s, "edge1")
	ticket := s.want("the cloud asks for a data connection", typeConnection).GetTopic()
	s.say(typeRefused, open.GetTopic(), &pb.Refused{Code: pb.Code_CODE_REFUSED})
	<-first
	d := r.dataDial()
	d.Send(conn.FrameAttach, []byte(ticket))
	if _, _, err := d.Receive(conn.MaxControlFrame); err != nil {
		r.t.Fatal(err)
	}
	cs := r.cloudEnd("edge1")
	r.eventually("it waits for a conn", func() bool {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		return len(cs.spares) == 1
	})
	return s, d
}

// dialLater dials, and tells how that ended.
func (r *rig) dialLater(node string) <-chan dialled {
	result := make(chan dialled, 1)
	go func() {
		c, err := r.dial(node, "target:1")
		result <- dialled{c, err}
	}()
	return result
}

// Who has no ticket is hung up on, and who has one uses it once.
func TestDataTicket(t *testing.T) {
	r := newRig(t)
	s := r.stranger().joinWith("edge1", &pb.Hello{Version: Version, Connections: 5})
	_, dialled := r.sentOpen(s, "edge1")
	ticket := s.want("the cloud asks for a data connection", typeConnection).GetTopic()
	refused := func(what string, typ byte, data []byte) {
		t.Helper()
		d := r.dataDial()
		if err := d.Send(typ, data); err != nil {
			return
		}
		if _, _, err := d.Receive(conn.MaxControlFrame); err == nil {
			t.Errorf("%s: is answered", what)
		}
	}
	refused("no ticket", conn.FrameAttach, nil)
	refused("another ticket", conn.FrameAttach, []byte("x"+ticket))
	refused("an open", conn.FrameOpen, []byte(ticket))
	refused("too much", conn.FrameAttach, make([]byte, conn.MaxControlFrame+1))
	d := r.dataDial()
	if err := d.Send(conn.FrameAttach, []byte(ticket)); err != nil {
		t.Fatal(err)
	}
	if typ, _, err := d.Receive(conn.MaxControlFrame); err != nil || typ != conn.FrameAttach {
		t.Fatalf("the right ticket is answered with %#x, %v", typ, err)
	}
	refused("the same ticket", conn.FrameAttach, []byte(ticket))
	if n := r.cloudEnd("edge1").dataConns(); n != 1 {
		t.Errorf("there are %d data connections", n)
	}
	r.dir.Lookup("edge1").Close(errors.New("over"))
	<-dialled
}

// An edge that breaks the protocol loses the data connection, and neither the session nor the
// caller's patience.
func TestEdgeBreaksTheDataProtocol(t *testing.T) {
	for name, says := range map[string][]byte{
		"a chunk":                    append(header(frameChunk, 3), "abc"...),
		"an open":                    header(conn.FrameOpen, 0),
		"an end":                     header(frameChunk|flagEnd, 0),
		"opened, and more":           append(header(conn.FrameOpened, 2), "xx"...),
		"refused, with no reason":    header(conn.FrameRefused, 0),
		"refused, in garbage":        append(header(conn.FrameRefused, 1), 0x08),
		"a frame that is too long":   header(conn.FrameRefused, conn.MaxControlFrame+1),
		"an unknown frame":           header(0xf0, 0),
		"half a frame":               header(conn.FrameOpened, 0)[:2],
		"a stop":                     header(frameChunk|flagStop, 0),
		"a stop with bytes":          append(header(frameChunk|flagStop, 1), 'x'),
		"opened, and then an attach": append(header(conn.FrameOpened, 0), header(conn.FrameAttach, 0)...),
		"opened, and an end":         append(header(conn.FrameOpened, 0), header(frameChunk|flagEnd, 0)...),
		"opened, and a long chunk":   append(header(conn.FrameOpened, 0), header(frameChunk, 1<<15)...),
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			s, d := r.strangerWithSpare(r.stranger())
			result, again := r.dialLater("edge1"), make(chan struct{})
			go func() {
				for {
					m, err := s.stream.Recv()
					if err == nil && m.GetType() != tunnel.TypeOpen {
						continue
					}
					close(again)
					return
				}
			}()
			if typ, _, err := d.Receive(conn.MaxControlFrame); err != nil || typ != conn.FrameOpen {
				t.Fatalf("got %#x, %v; want an open", typ, err)
			}
			d.Write(says)
			d.Conn.(*tls.Conn).CloseWrite()
			var got dialled
			select {
			case got = <-result:
			case <-again: // by the control stream
				r.dir.Lookup("edge1").Close(errors.New("enough"))
				got = <-result
			}
			if got.err == nil {
				_, err := got.conn.Read(make([]byte, 1))
				wantErr(t, "reading", err, syscall.ECONNRESET)
				got.conn.Close()
			}
			r.eventually("the data connection has ended", func() bool {
				l := r.dir.Lookup("edge1")
				return l == nil || l.Link.(*cloudSession).dataConns() == 0
			})
		})
	}
}

// An edge that ends a conn before the cloud has takes nobody with it.
func TestEdgeEndsEarly(t *testing.T) {
	for name, says := range map[string][]byte{
		"wholly":    header(frameChunk|flagFin|flagEnd, 0),
		"by halves": header(frameChunk|flagFin|flagEnd, 100), // and the bytes do not come
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			_, d := r.strangerWithSpare(r.stranger())
			result := r.dialLater("edge1")
			if typ, _, err := d.Receive(conn.MaxControlFrame); err != nil || typ != conn.FrameOpen {
				t.Fatalf("got %#x, %v; want an open", typ, err)
			}
			d.Send(conn.FrameOpened, nil)
			d.Write(says)
			got := <-result
			if got.err != nil {
				t.Fatal(got.err)
			}
			held := r.cloudEnd("edge1").dataOf(got.conn)
			reset, done := make(chan struct{}), make(chan struct{})
			got.conn.(*conn.Conn).OnReset(func() { close(reset) })
			go func() {
				defer close(done)
				got.conn.(*conn.Conn).WriteTo(io.Discard)
			}()
			if name == "wholly" {
				r.eventually("the conn is reset", func() bool { return tunnel.IsClosed(reset) })
			} else {
				r.eventually("it waits for the rest", held.EndGot)
			}
			got.conn.Close()
			r.eventually("nobody waits", func() bool { return tunnel.IsClosed(done) })
			r.dir.Lookup("edge1").Close(errors.New("over"))
		})
	}
}

// Dials that are refused before the edge hears of them do not put off the word that the conn before
// them has ended, for which a draining edge waits.
func TestRefusedDialsOweTheEnd(t *testing.T) {
	r, e := newDataRig(t, 1)
	cs := r.cloudEnd("edge1")
	for range 5 {
		c, far := r.pair("edge1")
		c.(interface{ CloseWrite() error }).CloseWrite()
		io.Copy(io.Discard, far)
		far.Close()
		io.Copy(io.Discard, c)
		c.Close()
		leave := func(is bool) {
			cs.mu.Lock()
			defer cs.mu.Unlock()
			cs.leaving = is
		}
		leave(true)
		r.eventually("the edge is told", func() bool {
			_, err := r.dir.Dial(t.Context(), tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "target:1"})
			if tunnel.CodeOf(err) != tunnel.Draining {
				t.Errorf("got %v, want draining", err)
			}
			return e.client.Session().Conns.Load() == 0
		})
		leave(false)
		r.idle(e)
	}
}

// An edge that answers an open twice, by both ways, gets nothing out of it.
func TestEdgeAnswersTwice(t *testing.T) {
	for name, answer := range map[string]func(d *dataConn){
		"refused": func(d *dataConn) { d.Send(conn.FrameRefused, encode(&pb.Refused{Code: pb.Code_CODE_REFUSED})) },
		"opened":  func(d *dataConn) { d.Send(conn.FrameOpened, nil) },
		"nothing": func(d *dataConn) { d.abort() },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			edge := r.stranger()
			s, d := r.strangerWithSpare(edge)
			cs := r.cloudEnd("edge1")
			result := r.dialLater("edge1")
			_, data, err := d.Receive(conn.MaxControlFrame)
			var m pb.StreamMsg
			if err != nil || proto.Unmarshal(data, &m) != nil {
				t.Fatalf("no open: %v", err)
			}
			stream := edge.connect(m.GetTopic())
			if _, err := stream.Recv(); status.Code(err) != codes.NotFound {
				t.Errorf("a Connect for it ends with %v, want NotFound", err)
			}
			s.say(typeRefused, m.GetTopic(), &pb.Refused{Code: pb.Code_CODE_DENIED})
			answer(d)
			if name == "nothing" {
				s.want("the cloud gives that one up", typeCancel)
				s.want("and asks once more", tunnel.TypeOpen)
			} else if got := <-result; tunnel.CodeOf(got.err) == tunnel.Denied || (got.err == nil) != (name == "opened") {
				t.Errorf("the dial ends with %v", got.err)
			}
			cs.Close(errors.New("over"))
			r.eventually("nothing is left", func() bool { return cs.pub.Conns.Load() == 0 })
		})
	}
}

// A target that has ended its direction and takes its time to read loses nothing, although the
// conn has ended at the cloud; and the next conn does not wait behind it.
func TestSlowTargetAfterTheEnd(t *testing.T) {
	r, e := newDataRig(t, 2)
	c, far := r.pair("edge1")
	want := blob(8 << 20)
	far.CloseWrite()
	if _, err := io.Copy(io.Discard, c); err != nil {
		t.Fatal(err)
	}
	written := make(chan error, 1)
	go func() {
		_, err := c.Write(want)
		c.Close()
		written <- err
	}()
	r.eventually("all is on its way, or as much as there is room for", func() bool {
		select {
		case err := <-written:
			written <- err
			return true
		default:
			return r.counters.BytesSent.Load() > 256<<10
		}
	})
	c2, far2 := r.pair("edge1")
	c2.Write([]byte("x"))
	far2.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(far2, make([]byte, 1)); err != nil {
		t.Errorf("the next conn: %v", err)
	}
	c2.Close()
	far2.Close()
	time.Sleep(answerTime + time.Second) // longer than any timeout of TCP here
	if got := testkit.ReadAll(t, far); !bytes.Equal(got, want) {
		t.Errorf("%d of %d bytes arrived", len(got), len(want))
	}
	if err := <-written; err != nil {
		t.Error(err)
	}
	far.Close()
	r.idle(e)
}

// Conns that a front door splices end in every order, and the next one on the same data
// connection has its own bytes and no others.
func TestDataConnectionKeepsConnsApart(t *testing.T) {
	r, e := newDataRig(t, 2)
	l := testkit.NewTarget(t)
	go func() { // each target says a number of its own, again and again, and looks at what it is told
		for i := byte(0); ; i++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				first := make([]byte, 2)
				if _, err := io.ReadFull(c, first); err != nil {
					return
				}
				own, how := first[0], first[1]
				go func() {
					b := make([]byte, 1<<10)
					for {
						n, err := c.Read(b)
						if err != nil {
							return
						}
						if i := bytes.IndexFunc(b[:n], func(r rune) bool { return r != rune(own) }); i >= 0 {
							t.Errorf("conn %d has a byte of %d", own, b[i])
						}
					}
				}()
				for range 1 + how%50 {
					if _, err := c.Write(bytes.Repeat([]byte{own}, 3000)); err != nil {
						return
					}
				}
				switch how % 3 {
				case 0:
					c.(*net.TCPConn).CloseWrite()
				case 1:
					c.(*net.TCPConn).SetLinger(0)
				}
			}()
		}
	}()
	var all sync.WaitGroup
	for worker := range 4 {
		all.Go(func() {
			for i := range 150 {
				near, door := net.Pipe()
				x, err := r.dial("edge1", l.Address())
				if err != nil {
					t.Error(err)
					return
				}
				spliced := make(chan struct{})
				go func() {
					tunnel.Splice(context.Background(), door, x)
					close(spliced)
				}()
				own := byte(1 + (worker*31+i)%120)
				near.SetDeadline(time.Now().Add(patience))
				near.Write([]byte{own, byte(i)})
				near.Write(bytes.Repeat([]byte{own}, 100*(i%9)))
				b := make([]byte, 512)
				for range i % 40 {
					n, err := near.Read(b)
					if bytes.IndexFunc(b[:n], func(r rune) bool { return r != rune(own) }) >= 0 {
						t.Errorf("conn %d is told what is another's", own)
					}
					if err != nil {
						break
					}
				}
				near.Close()
				<-spliced
			}
		})
	}
	all.Wait()
	r.idle(e)
}

// What waits for long is closed; the node is idle again.
func TestDataConnectionsExpire(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		r.spares = 4
		e := r.join("edge1", func(context.Context, tunnel.Request) (net.Conn, error) {
			near, far := net.Pipe()
			near.Close()
			return far, nil
		})
		r.haveSpare("edge1")
		cs, es := r.cloudEnd("edge1"), e.client.Session().Link.(*edgeSession)
		time.Sleep(dataIdle / 2)
		if cs.dataConns() == 0 || es.dataConns() == 0 {
			t.Fatal("it is gone already")
		}
		within(t, dataIdle, "it is gone at both ends", func() bool { return cs.dataConns() == 0 && es.dataConns() == 0 })
	})
}

// A stalled reader may stall for any time, and a waiting connection is lost soon.
func TestDataConnectionTimeouts(t *testing.T) {
	r, _ := newDataRig(t, 1)
	r.haveSpare("edge1")
	cs := r.cloudEnd("edge1")
	cs.mu.Lock()
	d := cs.spares[0]
	cs.mu.Unlock()
	timeout := func() (ms int) {
		raw, err := d.tcp.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		raw.Control(func(fd uintptr) { ms, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) })
		if err != nil {
			t.Fatal(err)
		}
		return ms
	}
	if got := timeout(); got != int(answerTime.Milliseconds()) {
		t.Errorf("while it waits the user timeout is %d ms", got)
	}
	c, far := r.pair("edge1")
	tick := func(what string, want time.Duration) {
		t.Helper()
		r.eventually(what, func() bool {
			cs.dropIdleAndLost()
			return timeout() == int(want.Milliseconds())
		})
	}
	if got := timeout(); got != int(dataTimeout.Milliseconds()) {
		t.Errorf("while it carries a conn the user timeout is %d ms", got)
	}
	written := make(chan error, 1)
	go func() {
		_, err := c.Write(blob(64 << 20))
		written <- err
	}()
	tick("the reader may stall", 0)
	if _, err := io.CopyN(io.Discard, far, 64<<20); err != nil {
		t.Fatal(err)
	}
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	tick("the reader reads again", dataTimeout)
	far.Close()
	io.Copy(io.Discard, c)
	c.Close()
	r.eventually("it waits again", func() bool { return timeout() == int(answerTime.Milliseconds()) })
}

// A data connection is lost when its kernel has sent something again and again for long, and
// nothing has come back. That it was idle before says nothing.
func TestDataConnectionIsLost(t *testing.T) {
	again := unix.TCPInfo{Unacked: 1, Retransmits: 3, Last_ack_recv: 60_000}
	probed := unix.TCPInfo{Probes: 2, Last_ack_recv: 60_000}
	answered := unix.TCPInfo{Unacked: 1, Retransmits: 3, Last_ack_recv: 1000}
	for name, c := range map[string]struct {
		looks []unix.TCPInfo // every heartbeatInterval
		is    bool           // after the last
	}{
		"idle, or its peer does not read":  {[]unix.TCPInfo{{}, {}, {Last_ack_recv: 60_000}}, false},
		"sent just now":                    {[]unix.TCPInfo{{}, {}, {Unacked: 1, Last_ack_recv: 60_000}}, false},
		"sent again for the first time":    {[]unix.TCPInfo{{}, {}, again}, false},
		"sent again for ten seconds":       {[]unix.TCPInfo{{}, again, again}, false},
		"sent again for twenty":            {[]unix.TCPInfo{again, again, again}, false},
		"sent again for thirty":            {[]unix.TCPInfo{again, again, again, again}, true},
		"acknowledged in between":          {[]unix.TCPInfo{again, {}, again}, false},
		"acknowledged, and lost once more": {[]unix.TCPInfo{again, again, answered}, false},
		"probed just now":                  {[]unix.TCPInfo{{}, {}, {Probes: 1, Last_ack_recv: 60_000}}, false},
		"probed for thirty seconds":        {[]unix.TCPInfo{probed, probed, probed, probed}, true},
		"ended by the kernel":              {[]unix.TCPInfo{{State: unix.BPF_TCP_CLOSE}}, true},
	} {
		d, now, is := &dataConn{}, time.Now(), false
		for _, info := range c.looks {
			is = d.isLost(acksIn([]*unix.TCPInfo{&info}), now, lostAfter+heartbeatInterval)
			now = now.Add(heartbeatInterval)
		}
		if is != c.is {
			t.Errorf("%s: is lost: %v", name, is)
		}
	}
}
