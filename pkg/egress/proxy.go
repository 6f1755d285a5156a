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

	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// This file serves Konnectivity's ProxyService. The client opens a stream for each connection, on which it
// asks for a dial, sends data and closes. Many streams may share one gRPC connection.

const (
	// maxData is the most data that we accept in one packet, in bytes. The client sends the bytes of one
	// Write as one packet, however many they are.
	maxData = 64 << 20
	// maxPacket is the longest packet that we accept, in bytes.
	maxPacket = maxData + konnectivity.MaxHead
	// proxyWindow is the flow-control window of a stream, in bytes.
	proxyWindow = 1 << 20
	// proxyStreams bounds the streams of a gRPC connection, and thus the conns of a caller that shares
	// one. kube-apiserver opens a connection for each conn.
	proxyStreams = 1024
	// proxyHandshake bounds a caller's handshakes, of TLS and HTTP/2.
	proxyHandshake = 10 * time.Second
	// onlyConn is the id of the one conn of a stream.
	onlyConn = 1
)

// serveGRPC serves ProxyService on ln until ctx is done.
func (f *FrontDoor) serveGRPC(ctx context.Context, ln net.Listener, callers *tls.Config) error {
	conns, endConns := tunnel.Grace(ctx, f.grace)
	defer endConns()
	p := &proxies{door: f, conns: conns, callers: callers}
	opts := []grpc.ServerOption{
		grpc.ForceServerCodecV2(konnectivity.NewCodec()),
		grpc.MaxRecvMsgSize(maxPacket),
		grpc.MaxConcurrentStreams(proxyStreams),
		grpc.MaxHeaderListSize(konnectivity.MaxHeaders),
		grpc.ConnectionTimeout(proxyHandshake),
		grpc.StaticStreamWindowSize(proxyWindow),
		grpc.StaticConnWindowSize(16 * proxyWindow),
		grpc.WaitForHandlers(true),
		grpc.StreamInterceptor(konnectivity.GuardStreams(f.log, f.cfg.Counters)),
		// Konnectivity's client pings once an hour; other clients may ping more often.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	}
	if callers != nil {
		known := strangerCreds{credentials.NewTLS(callers), f.balancers}
		opts = append(opts, grpc.Creds(unansweredCreds{known, f.cfg.Counters}))
	} else {
		ln = unansweredListener{ln, f.cfg.Counters}
	}
	server := grpc.NewServer(opts...)
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "ProxyService", // without a protobuf package
		HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{
			{StreamName: "Proxy", Handler: p.handle, ServerStreams: true, ClientStreams: true},
		},
	}, p)
	stopped := make(chan struct{}) // closed when GracefulStop has returned; nothing is sent
	stopEarly := context.AfterFunc(conns, server.Stop)
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		server.GracefulStop()
	})
	err := server.Serve(ln)
	if stop() { // Serve has failed before ctx was done
		endConns()
		server.Stop()
	} else {
		<-stopped
		err = nil
	}
	stopEarly()
	p.working.Wait()
	return err
}

// proxies handles the streams of a gRPC server.
type proxies struct {
	door    *FrontDoor
	conns   context.Context // context of the conns; it ends a grace period after the context of the front door
	callers *tls.Config     // see listener.tls
	working sync.WaitGroup  // goroutines that may block in gRPC until the stream's handler has returned
}

// handle handles one stream. It returns when the conn is over, or in order to end the stream: gRPC
// then unblocks goroutines that wait for the client.
func (p *proxies) handle(_ any, stream grpc.ServerStream) error {
	if err := p.admits(stream.Context()); err != nil {
		return err
	}
	s := &proxyStream{
		stream: stream, working: &p.working, guard: p.door.guard,
		afterDial: make(chan received, 1), over: make(chan struct{}), gap: newAnswerGap(),
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	// receiveDial sends one value to first: the first packet, or why there is none. The capacity is 1, so that
	// the send never blocks. Nothing closes first.
	first := make(chan received, 1)
	p.working.Go(func() { s.receiveDial(first, cancel) })
	req, err := s.request(first)
	if err != nil || req == nil {
		return err
	}
	target, o, err := p.door.dial(ctx, doorGRPC, req.Address, callerName(stream.Context()))
	if err != nil {
		return s.send(&konnectivity.Packet{Type: konnectivity.PacketDialRsp, Random: req.Random, Err: tellable(err)})
	}
	answer := &konnectivity.Packet{Type: konnectivity.PacketDialRsp, Random: req.Random, ConnID: onlyConn}
	if err := s.send(answer); err != nil {
		tunnel.Reset(target)
		o.visit.Ended(0, 0, err, o.event)
		return err
	}
	s.gap.answered = time.Now()
	return p.serve(s, o, target)
}

// admits returns an error if the caller may no longer call: the operator may have removed its name since the handshake.
func (p *proxies) admits(ctx context.Context) error {
	if p.callers == nil || p.callers.VerifyConnection == nil {
		return nil
	}
	from, _ := peer.FromContext(ctx)
	if from == nil {
		return status.Error(codes.Internal, "a stream without a connection")
	}
	t, ok := from.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return status.Error(codes.Internal, "a stream without TLS")
	}
	if err := p.callers.VerifyConnection(t.State); err != nil {
		return status.Error(codes.PermissionDenied, err.Error())
	}
	return nil
}

// serve splices the answered stream s with the conn to target. It returns when both have ended, or when
// the stream must end.
func (p *proxies) serve(s *proxyStream, o *opening, target net.Conn) error {
	done := make(chan struct{}) // closed when the splice has returned; nothing is sent
	p.working.Go(func() {
		defer close(done)
		err := s.guard("the conn ends", func() error {
			p.door.splice(p.conns, o, s, target)
			return nil
		})
		if err != nil {
			s.Reset()
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

// tellable returns the text of an error for the caller. It begins with the words of Konnectivity's server, if that
// server has words for the error.
func tellable(err error) string {
	if r, ok := errors.AsType[*tunnel.Refusal](err); ok && r.Code == tunnel.NoSuchNode {
		return r.Text
	}
	return err.Error()
}

// callerName names the caller, for the policy and the log of the edge.
func callerName(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	if t, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(t.State.PeerCertificates) > 0 {
		return t.State.PeerCertificates[0].Subject.CommonName
	}
	return p.Addr.Network() // "unix": peers of a unix socket have no address
}

// proxyStream makes a net.Conn of a gRPC stream: the caller's end of a conn.
//
//   - A close request of the client ends the client's bytes. It also means that the client reads no more.
//   - The end of the target's bytes becomes a close response.
//
// The splice reads and writes. After CloseRead, a goroutine of the stream continues to receive, to
// notice the client's close request. At most one goroutine at a time receives. The fields below readMu
// record whether one does.
type proxyStream struct {
	// Set once.
	stream  grpc.ServerStream
	working *sync.WaitGroup                          // see proxies
	guard   func(what string, do func() error) error // see FrontDoor.guard
	// afterDial gets at most one value, from receiveDial: the packet after the dial request.
	// The capacity is 1, so that the send never blocks. Nothing closes afterDial.
	afterDial chan received

	gap        answerGap     // delays writes after the answer
	over       chan struct{} // closed by end, to make the handler return; nothing is sent
	ending     sync.Once     // closes over
	aborted    atomic.Bool   // over is closed because of a reset
	readClosed atomic.Bool   // the client reads no more

	// sendMu and readMu are never held together.
	sendMu sync.Mutex // guards SendMsg, and the following
	closed bool       // the close response has been sent

	readMu  sync.Mutex // guards the following
	reading bool       // a goroutine has the right to receive
	discard bool       // received data are discarded
	onStop  func()     // see OnStop

	// Owned by the goroutine that receives.
	packet konnectivity.Packet // the current packet; Read returns the rest of its data next
	ended  error               // why there is no more to read
	begun  bool                // the packet in afterDial has been taken
}

// closeWait is how long a client may take to end its stream after either side has closed. Konnectivity's own client
// ends its stream at once.
const closeWait = 5 * time.Second

// received is a packet, or why there is none.
type received struct {
	packet konnectivity.Packet
	err    error
}

// receiveDial receives the first packet, and sends it to first. After a dial request it also receives the
// next packet, and puts it into afterDial. If that packet says that the client gives up the dial, receiveDial
// calls cancel.
func (s *proxyStream) receiveDial(first chan<- received, cancel context.CancelFunc) {
	var r received
	r.err = s.guard("the stream ends", func() (err error) { r.packet, err = s.receive(); return err })
	first <- r
	if r.err != nil || r.packet.Type != konnectivity.PacketDialReq {
		return
	}
	r = received{}
	r.err = s.guard("the stream ends", func() (err error) { r.packet, err = s.receive(); return err })
	if r.err != nil || r.packet.Type == konnectivity.PacketDialCls || r.packet.Type == konnectivity.PacketCloseReq {
		cancel()
	}
	s.afterDial <- r
}

// request waits for the first packet, which must be a dial request. If it is another packet, request answers the
// client and returns nil, and the stream ends.
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
			return nil, s.send(&konnectivity.Packet{
				Type: konnectivity.PacketDialRsp, Random: p.Random,
				Err: fmt.Sprintf("protocol %q cannot be dialled; only tcp can", p.Protocol),
			})
		}
		return p, nil
	case konnectivity.PacketData, konnectivity.PacketCloseReq:
		return nil, s.send(&konnectivity.Packet{
			Type: konnectivity.PacketCloseRsp, ConnID: p.ConnID, Err: "backend not initialized",
		})
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

// next receives packets until s.packet has data, or returns why no more data can come.
func (s *proxyStream) next() error {
	for s.ended == nil && len(s.packet.Data) == 0 {
		s.packet.Free()
		var err error
		if s.begun {
			s.packet, err = s.receive()
		} else {
			r := <-s.afterDial
			s.packet, err, s.begun = r.packet, r.err, true
		}
		s.gap.callerSent()
		switch {
		case err != nil && s.isClosed():
			s.ended = io.EOF // both sides have closed
		case err != nil:
			s.ended = tunnel.ErrReset
		case s.packet.Type == konnectivity.PacketCloseReq || s.packet.Type == konnectivity.PacketDialCls:
			s.ended = io.EOF
			s.readClosed.Store(true)
			s.endSoon() // the client may never read the bytes in flight, and so never end the stream
			s.stop()
		case s.packet.Type != konnectivity.PacketData || s.packet.ConnID != onlyConn || s.discarding():
			s.packet.Data = nil
		}
	}
	return s.ended
}

// Read implements net.Conn.
func (s *proxyStream) Read(b []byte) (int, error) {
	if !s.mayRead() {
		return 0, io.EOF // CloseRead was called between two reads
	}
	defer s.hasRead()
	if err := s.next(); err != nil {
		return 0, err
	}
	n := copy(b, s.packet.Data)
	s.packet.Data = s.packet.Data[n:]
	return n, nil
}

// mayRead gives its caller the right to receive, until the caller calls hasRead. It returns false after CloseRead.
func (s *proxyStream) mayRead() bool {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	if s.discard {
		return false
	}
	s.reading = true
	return true
}

// hasRead gives the right to receive back.
func (s *proxyStream) hasRead() {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	s.reading = false
	if s.discard { // CloseRead was called meanwhile
		s.discardLocked()
	}
}

func (s *proxyStream) discarding() bool {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	return s.discard
}

// CloseRead makes the stream discard data that still come, since no packet tells the client to stop. The stream
// continues to receive, so that it sees the client's close request.
func (s *proxyStream) CloseRead() error {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	s.discard = true
	if !s.reading {
		s.discardLocked()
	}
	return nil
}

// discardLocked starts a goroutine that receives and discards packets until the stream ends. The caller holds readMu,
// and no other goroutine receives.
func (s *proxyStream) discardLocked() {
	s.reading = true
	s.working.Go(func() {
		s.packet.Data = nil
		err := s.guard("the conn ends", s.next)
		if err != nil && !errors.Is(err, io.EOF) {
			s.stop() // a reset: the splice no longer reads, so only this call tells it
		}
	})
}

// OnStop sets f, to be called when the client reads no more.
func (s *proxyStream) OnStop(f func()) {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	s.onStop = f
}

// OnReset makes f be called if the client leaves before either side has closed. The splice itself would notice that
// only when it reads, and it does not read while the target takes no bytes.
func (s *proxyStream) OnReset(f func()) {
	context.AfterFunc(s.stream.Context(), func() {
		if !s.isClosed() && !s.readClosed.Load() {
			f()
		}
	})
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
	s.gap.wait()
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	for len(b) > 0 {
		if s.closed || s.readClosed.Load() {
			return n, &net.OpError{Op: "write", Net: konnectivity.Addr{}.Network(), Err: syscall.EPIPE}
		}
		part := b[:min(len(b), konnectivity.DataSize)]
		p := &konnectivity.Packet{Type: konnectivity.PacketData, ConnID: onlyConn, Data: part}
		if err := s.stream.SendMsg(p); err != nil {
			return n, &net.OpError{Op: "write", Net: konnectivity.Addr{}.Network(), Err: tunnel.ErrReset}
		}
		n += len(part)
		b = b[len(part):]
	}
	return n, nil
}

// WriteSlice sends the bytes of data as one packet, without a copy. It frees data. Conns of package conn call
// WriteSlice with bytes that they have received.
func (s *proxyStream) WriteSlice(data mem.BufferSlice) error {
	s.gap.wait()
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	p := &konnectivity.Packet{Type: konnectivity.PacketData, ConnID: onlyConn, Slice: data}
	defer p.Free()
	if s.closed || s.readClosed.Load() {
		return &net.OpError{Op: "write", Net: konnectivity.Addr{}.Network(), Err: syscall.EPIPE}
	}
	if err := s.stream.SendMsg(p); err != nil {
		return &net.OpError{Op: "write", Net: konnectivity.Addr{}.Network(), Err: tunnel.ErrReset}
	}
	return nil
}

// CloseWrite tells the client that the target's bytes have ended. The protocol has no half-close, so the conn ends.
func (s *proxyStream) CloseWrite() error {
	s.gap.wait()
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	s.endSoon()
	return s.stream.SendMsg(&konnectivity.Packet{Type: konnectivity.PacketCloseRsp, ConnID: onlyConn})
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

// endSoon ends the stream after closeWait, unless the client ends the stream before.
func (s *proxyStream) endSoon() {
	late := time.AfterFunc(closeWait, s.end)
	context.AfterFunc(s.stream.Context(), func() { late.Stop() })
}

func (s *proxyStream) end() { s.ending.Do(func() { close(s.over) }) }

// LocalAddr implements net.Conn.
func (s *proxyStream) LocalAddr() net.Addr { return konnectivity.Addr{} }

// RemoteAddr implements net.Conn.
func (s *proxyStream) RemoteAddr() net.Addr { return konnectivity.Addr{} }

// A stream has no deadlines: SetDeadline and the like return errors.ErrUnsupported.

func (s *proxyStream) SetDeadline(time.Time) error      { return errors.ErrUnsupported }
func (s *proxyStream) SetReadDeadline(time.Time) error  { return errors.ErrUnsupported }
func (s *proxyStream) SetWriteDeadline(time.Time) error { return errors.ErrUnsupported }
