package egress

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"tunnel/pkg/konnectivity"
	"tunnel/pkg/tunnel"
)

// Konnectivity's ProxyService: a stream for each connection, on which the client asks for
// a dial, sends data and closes. Many streams may share one gRPC connection.

const (
	// mostData is the most data that is accepted in one packet: the client sends what one
	// Write was given as one packet, whatever its size.
	mostData = 64 << 20
	// mostPacket is the longest packet that is accepted.
	mostPacket = mostData + konnectivity.MaxHead
	// proxyWindow is what a stream may have in flight.
	proxyWindow = 1 << 20
	// proxyStreams bounds the streams of a gRPC connection: the conns of a caller that
	// shares one. kube-apiserver has a connection for each.
	proxyStreams = 1024
	// proxyHandshake is how long a caller may take to shake hands.
	proxyHandshake = 10 * time.Second
	// theConn is the id of the one connection that a stream has.
	theConn = 1
)

// serveGRPC serves ProxyService on ln until ctx is done.
func (f *FrontDoor) serveGRPC(ctx context.Context, ln net.Listener, callers *tls.Config) error {
	conns, endConns := tunnel.Grace(ctx, f.grace)
	defer endConns()
	p := &proxies{door: f, conns: conns}
	opts := []grpc.ServerOption{
		grpc.ForceServerCodecV2(konnectivity.NewCodec()),
		grpc.MaxRecvMsgSize(mostPacket),
		grpc.MaxConcurrentStreams(proxyStreams),
		grpc.MaxHeaderListSize(konnectivity.MaxHeaders),
		grpc.ConnectionTimeout(proxyHandshake),
		grpc.StaticStreamWindowSize(proxyWindow),
		grpc.StaticConnWindowSize(16 * proxyWindow),
		grpc.WaitForHandlers(true),
		grpc.StreamInterceptor(konnectivity.GuardStreams(f.log, f.cfg.Counters)),
		// Its own clients ask once an hour; those of others may ask more often.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	}
	if callers != nil {
		opts = append(opts, grpc.Creds(unansweredCreds{strangerCreds{credentials.NewTLS(callers)}, f.cfg.Counters}))
	} else {
		ln = unansweredListener{ln, f.cfg.Counters}
	}
	server := grpc.NewServer(opts...)
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "ProxyService", // in no package
		HandlerType: (*any)(nil),
		Streams:     []grpc.StreamDesc{{StreamName: "Proxy", Handler: p.handle, ServerStreams: true, ClientStreams: true}},
	}, p)
	stopped := make(chan struct{})
	hurry := context.AfterFunc(conns, server.Stop)
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		server.GracefulStop()
	})
	err := server.Serve(ln)
	if stop() { // it has failed by itself
		server.Stop()
	} else {
		<-stopped
		err = nil
	}
	hurry()
	p.working.Wait()
	return err
}

// proxies is a gRPC server's streams.
type proxies struct {
	door    *FrontDoor
	conns   context.Context // outlives the front door's by the grace period
	working sync.WaitGroup  // what gRPC frees only when a stream's handler has returned
}

// handle is one stream. It returns when the conn is over, or to make it so: gRPC then frees
// who waits for the client.
func (p *proxies) handle(_ any, stream grpc.ServerStream) error {
	s := &proxyStream{stream: stream, working: &p.working, guard: p.door.guard, first: make(chan received, 1), over: make(chan struct{}), apart: newApart()}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	asked := make(chan received, 1)
	p.working.Go(func() {
		var r received
		r.err = s.guard("the stream ends", func() (err error) { r.packet, err = s.receive(); return err })
		asked <- r
		if r.err != nil || r.packet.Type != konnectivity.PacketDialReq {
			return
		}
		// Until the target is there, all that may come is that it is not wanted any more.
		r = received{}
		r.err = s.guard("the stream ends", func() (err error) { r.packet, err = s.receive(); return err })
		if r.err != nil || r.packet.Type == konnectivity.PacketDialCls || r.packet.Type == konnectivity.PacketCloseReq {
			cancel()
		}
		s.first <- r
	})
	req, err := s.request(asked)
	if err != nil || req == nil {
		return err
	}
	target, err := p.door.dial(ctx, doorGRPC, req.Address, caller(stream.Context()))
	if err != nil {
		p.door.log.Debug("dial refused", "target", req.Address, "err", err)
		return s.send(&konnectivity.Packet{Type: konnectivity.PacketDialRsp, Random: req.Random, Err: tellable(err)})
	}
	s.apart.answered = time.Now()
	if err := s.send(&konnectivity.Packet{Type: konnectivity.PacketDialRsp, Random: req.Random, ConnID: theConn}); err != nil {
		tunnel.Reset(target)
		return err
	}
	done := make(chan struct{})
	p.working.Go(func() {
		defer close(done)
		if s.guard("the conn ends", func() error { p.door.splice(p.conns, doorGRPC, req.Address, s, target); return nil }) != nil {
			s.Reset() //nolint:errcheck // it has none
			tunnel.Reset(target)
		}
	})
	select {
	case <-done:
	case <-s.over:
	}
	if s.aborted.Load() {
		return status.Error(codes.Aborted, "reset")
	}
	return nil
}

// tellable is what a caller is told of an error: Konnectivity's own words first where it has
// some.
func tellable(err error) string {
	if r, ok := errors.AsType[*tunnel.Refusal](err); ok && r.Code == tunnel.NoSuchNode {
		return r.Text
	}
	return err.Error()
}

// caller says who has asked, for the edge's eyes.
func caller(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	if t, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(t.State.PeerCertificates) > 0 {
		return t.State.PeerCertificates[0].Subject.CommonName
	}
	return p.Addr.Network() // of a unix socket, whose peers have no address
}

// proxyStream is a stream as the conn that it stands for. A close request is the end of
// the client's bytes, and says that it reads no more; the end of the target's bytes is a
// close response.
type proxyStream struct {
	stream  grpc.ServerStream
	working *sync.WaitGroup
	guard   func(what string, do func() error) error
	first   chan received // the first packet after the request; capacity 1, so that nobody waits to send

	apart   apart
	over    chan struct{} // closed when the handler is to return
	ending  sync.Once     // closes it
	aborted atomic.Bool   // because of a reset
	deaf    atomic.Bool   // the client reads no more

	sendMu sync.Mutex // guards sending, and the following
	closed bool       // the close response has been sent

	readMu  sync.Mutex // guards the following
	reading bool       // somebody receives
	discard bool       // nobody wants the data
	onStop  func()

	// Owned by who receives.
	packet konnectivity.Packet // what is left of its data comes next
	ended  error
	begun  bool // first has been taken
}

// closeWait is how long a client may take to end a stream after either side has closed. The
// stock one does it at once.
const closeWait = 5 * time.Second

// received is a packet, or why there is none.
type received struct {
	packet konnectivity.Packet
	err    error
}

// request waits for the first packet, which is to be a dial request. Any other ends the
// stream. The request is nil when there is nothing to dial.
func (s *proxyStream) request(first <-chan received) (*konnectivity.Packet, error) {
	late := time.NewTimer(requestTimeout)
	defer late.Stop()
	var r received
	select {
	case r = <-first:
	case <-late.C:
		return nil, status.Errorf(codes.DeadlineExceeded, "no dial request within %v", requestTimeout)
	}
	if r.err != nil {
		if errors.Is(r.err, io.EOF) {
			r.err = nil
		}
		return nil, r.err
	}
	p := &r.packet
	p.Free()
	switch p.Type {
	case konnectivity.PacketDialReq:
		if p.Protocol != "tcp" {
			return nil, s.send(&konnectivity.Packet{Type: konnectivity.PacketDialRsp, Random: p.Random, Err: fmt.Sprintf("protocol %q cannot be dialled; only tcp can", p.Protocol)})
		}
		return p, nil
	case konnectivity.PacketData, konnectivity.PacketCloseReq:
		return nil, s.send(&konnectivity.Packet{Type: konnectivity.PacketCloseRsp, ConnID: p.ConnID, Err: "backend not initialized"})
	}
	return nil, nil
}

func (s *proxyStream) receive() (konnectivity.Packet, error) {
	var p konnectivity.Packet
	err := s.stream.RecvMsg(&p)
	return p, err
}

func (s *proxyStream) send(p *konnectivity.Packet) error {
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	return s.stream.SendMsg(p)
}

// next has s.packet hold data, or returns why there is no more.
func (s *proxyStream) next() error {
	for s.ended == nil && len(s.packet.Data) == 0 {
		s.packet.Free()
		var err error
		if s.begun {
			s.packet, err = s.receive()
		} else {
			r := <-s.first
			s.packet, err, s.begun = r.packet, r.err, true
		}
		s.apart.said()
		switch {
		case err != nil && s.isClosed():
			s.ended = io.EOF // both sides have said that it is over
		case err != nil:
			s.ended = tunnel.ErrReset
		case s.packet.Type == konnectivity.PacketCloseReq || s.packet.Type == konnectivity.PacketDialCls:
			s.ended = io.EOF
			s.deaf.Store(true)
			s.endSoon() // should it not read what is on the way, either
			s.stop()
		case s.packet.Type != konnectivity.PacketData || s.packet.ConnID != theConn || s.discarding():
			s.packet.Data = nil
		}
	}
	return s.ended
}

// Read implements net.Conn.
func (s *proxyStream) Read(b []byte) (int, error) {
	if !s.mayRead() {
		return 0, io.EOF // CloseRead has come between two reads
	}
	defer s.hasRead()
	if err := s.next(); err != nil {
		return 0, err
	}
	n := copy(b, s.packet.Data)
	s.packet.Data = s.packet.Data[n:]
	return n, nil
}

// mayRead makes the caller the one who receives, of whom there is never a second, until it
// has called hasRead.
func (s *proxyStream) mayRead() bool {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	if s.discard {
		return false
	}
	s.reading = true
	return true
}

func (s *proxyStream) hasRead() {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	s.reading = false
	if s.discard { // since then, and whoever called us reads no more
		s.discardLocked()
	}
}

func (s *proxyStream) discarding() bool {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	return s.discard
}

// CloseRead throws away what still comes: the client cannot be told that it is not wanted.
// Somebody goes on receiving, for its close request.
func (s *proxyStream) CloseRead() error {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	s.discard = true
	if !s.reading {
		s.discardLocked()
	}
	return nil
}

// discardLocked receives until the end. The caller holds readMu, and nobody else receives.
func (s *proxyStream) discardLocked() {
	s.reading = true
	s.working.Go(func() {
		s.packet.Data = nil
		err := s.guard("the conn ends", s.next)
		if err != nil && !errors.Is(err, io.EOF) {
			s.stop() // nobody else sees that
		}
	})
}

// OnStop has f called when the client reads no more.
func (s *proxyStream) OnStop(f func()) {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	s.onStop = f
}

func (s *proxyStream) stop() {
	s.readMu.Lock()
	f := s.onStop
	s.readMu.Unlock()
	if f != nil {
		f()
	}
}

// Write implements net.Conn.
func (s *proxyStream) Write(b []byte) (n int, err error) {
	s.apart.wait()
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	for len(b) > 0 {
		if s.closed || s.deaf.Load() {
			return n, &net.OpError{Op: "write", Net: konnectivity.Addr{}.Network(), Err: syscall.EPIPE}
		}
		part := b[:min(len(b), konnectivity.DataSize)]
		if err := s.stream.SendMsg(&konnectivity.Packet{Type: konnectivity.PacketData, ConnID: theConn, Data: part}); err != nil {
			return n, &net.OpError{Op: "write", Net: konnectivity.Addr{}.Network(), Err: tunnel.ErrReset}
		}
		n += len(part)
		b = b[len(part):]
	}
	return n, nil
}

// WriteSlice sends what a conn of the tunnel has received, uncopied and as one packet. It
// takes data over.
func (s *proxyStream) WriteSlice(data mem.BufferSlice) error {
	s.apart.wait()
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	p := &konnectivity.Packet{Type: konnectivity.PacketData, ConnID: theConn, Slice: data}
	defer p.Free()
	if s.closed || s.deaf.Load() {
		return &net.OpError{Op: "write", Net: konnectivity.Addr{}.Network(), Err: syscall.EPIPE}
	}
	if err := s.stream.SendMsg(p); err != nil {
		return &net.OpError{Op: "write", Net: konnectivity.Addr{}.Network(), Err: tunnel.ErrReset}
	}
	return nil
}

// CloseWrite says that the target has ended. The protocol knows nothing less.
func (s *proxyStream) CloseWrite() error {
	s.apart.wait()
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	s.endSoon()
	return s.stream.SendMsg(&konnectivity.Packet{Type: konnectivity.PacketCloseRsp, ConnID: theConn})
}

func (s *proxyStream) isClosed() bool {
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	return s.closed
}

// Close implements net.Conn.
func (s *proxyStream) Close() error { return s.CloseWrite() }

// Reset ends the stream with an error.
func (s *proxyStream) Reset() error {
	s.aborted.Store(true)
	s.end()
	return nil
}

// endSoon gives the client a while to end the stream.
func (s *proxyStream) endSoon() {
	late := time.AfterFunc(closeWait, s.end)
	context.AfterFunc(s.stream.Context(), func() { late.Stop() })
}

func (s *proxyStream) end() { s.ending.Do(func() { close(s.over) }) }

// LocalAddr implements net.Conn.
func (s *proxyStream) LocalAddr() net.Addr { return konnectivity.Addr{} }

// RemoteAddr implements net.Conn.
func (s *proxyStream) RemoteAddr() net.Addr { return konnectivity.Addr{} }

// The deadlines of net.Conn; the stream has none.

func (s *proxyStream) SetDeadline(time.Time) error      { return errors.ErrUnsupported }
func (s *proxyStream) SetReadDeadline(time.Time) error  { return errors.ErrUnsupported }
func (s *proxyStream) SetWriteDeadline(time.Time) error { return errors.ErrUnsupported }
