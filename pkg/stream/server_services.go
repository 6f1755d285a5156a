package stream

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/tunnel"
)

// SessionService is a gRPC service for edges. The server serves it only on the connection of a session, so the calling
// node is proven. An edge calls the service by [Client.Calls].
//
// A message has at most conn.MaxMessage bytes in its wire form. A session may have maxCalls streams of all such
// services at once.
type SessionService struct {
	// Desc is the description of the service in the generated code. The methods of the service must be streams.
	Desc *grpc.ServiceDesc
	// Handler serves a stream of the service. The context of the stream is done when the session ends. The stream
	// then ends, too, and Handler must return.
	Handler func(from *tunnel.Session, stream grpc.ServerStream) error
}

// maxCalls is how many streams of SessionServices a session may have at once. An edge needs one stream of each service.
// Its next stream may begin before the cloud knows that the last stream has ended.
const maxCalls = 4

// onSessions describes a service to gRPC.
func (s *Server) onSessions(service SessionService) *grpc.ServiceDesc {
	desc := &grpc.ServiceDesc{
		ServiceName: service.Desc.ServiceName, HandlerType: (*any)(nil), Metadata: service.Desc.Metadata,
	}
	for _, method := range service.Desc.Streams {
		method.Handler = func(_ any, stream grpc.ServerStream) error { return s.serveCall(service, stream) }
		desc.Streams = append(desc.Streams, method)
	}
	return desc
}

// callStream is a stream whose context is done when its session ends.
type callStream struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (c callStream) Context() context.Context { return c.ctx }

// serveCall serves one stream of a service, until its handler returns or the session ends.
func (s *Server) serveCall(service SessionService, stream grpc.ServerStream) error {
	cs, err := s.sessionOf(stream.Context())
	if err != nil {
		return err
	}
	if !cs.isNode() {
		return status.Error(codes.Unimplemented, "this service is for nodes")
	}
	if err := cs.addCall(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	answer := make(chan error, 1) // capacity 1, so that the goroutine's send never waits
	go func() {
		defer cs.callOver()
		cs.guarded(func() { answer <- service.Handler(cs.pub, callStream{stream, ctx}) })()
	}()
	select {
	case err := <-answer:
		return err
	case <-cs.done: // serveCall must return now: the end of the stream unblocks a handler that sends or receives
		return errSessionOver
	}
}

// addCall counts one more stream of a SessionService.
func (s *cloudSession) addCall() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.err != nil:
		return errSessionOver
	case s.calls == maxCalls:
		return status.Errorf(codes.ResourceExhausted, "a session may have %d such calls at once", maxCalls)
	}
	s.calls++
	s.wg.Add(1)
	return nil
}

// callOver undoes addCall.
func (s *cloudSession) callOver() {
	s.mu.Lock()
	s.calls--
	s.mu.Unlock()
	s.wg.Done()
}
