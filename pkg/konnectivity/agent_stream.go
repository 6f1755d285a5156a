package konnectivity

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// agentStream is the agent's end of a stream with one server. It answers as the stock agent does.
//
// The methods in order of use are join, serve, and drain when the edge stops. receiveLoop handles the
// server's packets, and starts a goroutine for each dial, which serves the conn until its end.
type agentStream struct {
	// Set once.
	*mux
	endpoint *endpoint
	client   grpc.ClientStream  // the same stream as mux.stream, for CloseSend
	cc       *grpc.ClientConn   // the connection, which serves this stream alone; closed by serve
	cancel   context.CancelFunc // ends the stream
	server   string             // the server's id
	count    int                // how many servers there are, as this server says

	running sync.WaitGroup // all goroutines of the stream
	nextID  int64          // the id of the next conn; owned by receiveLoop

	// dialMu and mux.mu are never held together.
	dialMu   sync.Mutex                   // guards the following
	dials    map[int64]context.CancelFunc // dials under way, by the id that the server gave
	busy     int                          // conns, dials under way included
	idle     chan struct{}                // signals drain that busy is 0; capacity 1, so that signals merge
	lastDial time.Time                    // when the last dial request came
	stopping bool                         // new dials are refused
}

// join opens a stream with the server to which the address leads now. If that server is joined already,
// the error is errDuplicate.
func (e *endpoint) join(ctx context.Context) (_ *agentStream, err error) {
	a := e.agent
	md := metadata.Pairs("agentid", string(a.cfg.Node), "agentidentifiers", a.identifiers)
	if a.cfg.Token != nil {
		var token auth.Secret
		if token, err = auth.TokenOf(a.cfg.Token); err != nil {
			return nil, err
		}
		md.Set("authorization", "Bearer "+token.Reveal())
	}
	cc, err := e.newClient()
	if err != nil {
		return nil, err
	}
	// The stream outlives ctx by the grace period. Until join returns, ctx still cancels it.
	streamCtx, cancel := context.WithCancel(metadata.NewOutgoingContext(context.WithoutCancel(ctx), md))
	defer func() {
		if err != nil {
			cancel()
			cc.Close()
		}
	}()
	late := time.AfterFunc(joinTime, cancel)
	defer late.Stop()
	defer context.AfterFunc(ctx, cancel)()
	desc := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	stream, err := cc.NewStream(streamCtx, desc, "/AgentService/Connect")
	if err != nil {
		return nil, err
	}
	id, count, err := readServer(stream)
	if err != nil {
		return nil, err
	}
	if err = e.add(id, count); err != nil {
		return nil, err
	}
	return &agentStream{
		mux: newMux(stream, true, a.cfg.Counters, a.log), endpoint: e,
		client: stream, cc: cc, cancel: cancel, server: id, count: count,
		dials: make(map[int64]context.CancelFunc), idle: make(chan struct{}, 1),
	}, nil
}

// newClient returns a gRPC client for one stream. Every stream has its own connection: a load
// balancer may lead the next connection to another server.
func (e *endpoint) newClient() (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+strings.TrimPrefix(e.url, "tls://"),
		grpc.WithTransportCredentials(credentials.NewTLS(e.agent.cfg.TLS())),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(NewCodec()), grpc.MaxCallRecvMsgSize(maxServerPacket)),
		grpc.WithDisableRetry(),
		grpc.WithMaxHeaderListSize(MaxHeaders),
		// A stock server closes the connection of an agent that pings more often than every 30 s. gRPC
		// sets TCP_USER_TIMEOUT to Timeout, so the stream survives a link that is cut for 10 s.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 40 * time.Second, Timeout: 15 * time.Second}),
	)
}

// readServer waits for the header of a new stream. It returns the server's id, and how many servers
// there are by the server's count.
func readServer(stream grpc.ClientStream) (id string, count int, err error) {
	header, err := stream.Header()
	if err != nil {
		return "", 0, err
	}
	ids, counts := header.Get("serverid"), header.Get("servercount")
	if len(ids) == 0 && len(counts) == 0 { // the server has ended the stream: the status says why
		if err = stream.RecvMsg(new(Packet)); err != nil {
			return "", 0, err
		}
	}
	if len(ids) != 1 || len(counts) != 1 {
		return "", 0, errors.New(
			"the server did not send one serverid and one servercount: is it a proxy-server's agent port?")
	}
	count, err = strconv.Atoi(counts[0])
	if err != nil {
		return "", 0, fmt.Errorf("the server sent the servercount %q, which is not a number", counts[0])
	}
	return ids[0], count, nil
}

// serve serves the stream until the stream ends, and returns why. When ctx is done, serve drains the
// stream, until endpoint.conns is done at the latest.
func (s *agentStream) serve(ctx context.Context) error {
	s.running.Go(s.guarded(s.sendLoop))
	s.running.Go(s.guarded(s.receiveLoop))
	select {
	case <-s.ended:
	case <-ctx.Done():
		s.drain()
	}
	s.end(errors.New("stopping"))
	s.cancel()
	s.cc.Close()
	s.dialMu.Lock()
	for _, cancel := range s.dials {
		cancel()
	}
	s.dialMu.Unlock()
	return s.err
}

// flushTimeout is how long the server may take to read our last packets.
const flushTimeout = 3 * time.Second

// quietPeriod is how long a draining stream waits after the last dial request before it ends. A
// server sends dials until it has read our DRAIN. If the stream ended while a dial is on its way, the
// server would forget the dial, and its caller would wait for 30 s.
const quietPeriod = time.Second

// drain tells the server to send new dials to other agents. It serves the dials that still come, and
// returns when no conn is left.
func (s *agentStream) drain() {
	s.send(&Packet{Type: PacketDrain})
	s.dialMu.Lock()
	s.lastDial = time.Now() // the quiet period begins now
	s.dialMu.Unlock()
	// First phase: conns and dials continue until the stream is idle and quiet, or the grace period
	// is over.
	for stopping := false; !stopping; {
		busy, quiet := s.activity()
		left := s.endpoint.agent.quiet - quiet
		if !busy && left <= 0 {
			break
		}
		var late <-chan time.Time // nil while the stream is busy
		if !busy {
			late = time.After(left)
		}
		select {
		case <-s.idle:
		case <-late:
		case <-s.endpoint.conns.Done(): // the grace period is over: conns are reset, dials cancelled
			stopping = true
		case <-s.ended:
			return
		}
	}
	s.dialMu.Lock()
	s.stopping = true
	s.dialMu.Unlock()
	// Second phase: new dials are refused, and the answers to earlier dials are sent.
	if !s.awaitIdle(time.After(flushTimeout)) {
		return
	}
	// Last phase: the agent closes its side of the stream after its last packets. Then the server
	// closes the other side.
	s.finish(s.client.CloseSend)
	select {
	case <-s.ended:
	case <-time.After(flushTimeout):
	}
}

// awaitIdle waits until there are no conns and every dial under way is answered, or until late. It returns false if the
// stream ends before.
func (s *agentStream) awaitIdle(late <-chan time.Time) bool {
	for {
		if busy, _ := s.activity(); !busy {
			return true
		}
		select {
		case <-s.idle:
		case <-late:
			return true
		case <-s.ended:
			return false
		}
	}
}

// activity reports whether there are conns, and the time since the last dial request.
func (s *agentStream) activity() (busy bool, quiet time.Duration) {
	s.dialMu.Lock()
	defer s.dialMu.Unlock()
	return s.busy > 0, time.Since(s.lastDial)
}

// receiveLoop handles packets until the stream ends.
func (s *agentStream) receiveLoop() {
	for {
		var p Packet
		if err := s.stream.RecvMsg(&p); err != nil {
			if errors.Is(err, io.EOF) {
				err = errors.New("the server has ended the stream")
			}
			s.end(err)
			return
		}
		s.receive(&p)
	}
}

// receive handles one packet. It owns p: the caller does not free p.
func (s *agentStream) receive(p *Packet) {
	switch p.Type {
	case PacketDialReq:
		s.nextID++
		s.dial(*p, s.nextID)
	case PacketDialCls:
		s.dialMu.Lock()
		if cancel := s.dials[p.Random]; cancel != nil {
			cancel()
		}
		s.dialMu.Unlock()
	case PacketData:
		id := p.ConnID
		if !s.deliver(p) && id != 0 {
			s.send(&Packet{Type: PacketCloseRsp, ConnID: id, Err: "unrecognized connectID"})
		}
		return
	case PacketCloseReq:
		if !s.peerClosed(p.ConnID, "") {
			s.send(&Packet{Type: PacketCloseRsp, ConnID: p.ConnID, Err: "Unknown connectID"})
		}
	}
	p.Free()
}

// dial starts a goroutine that dials for the request p and serves the conn. id is the id of the conn.
func (s *agentStream) dial(p Packet, id int64) {
	ctx, cancel := context.WithCancel(s.endpoint.conns)
	if refusal := s.addDial(p.Random, cancel); refusal != nil {
		cancel()
		s.refuseDial(p, refusal)
		return
	}
	s.running.Go(func() {
		defer s.connOver()
		defer cancel()
		s.dialAndServe(ctx, p, id)
	})
}

// addDial registers a dial under random, the id that the server gave, with the function that cancels the dial.
// It fails if the stream is stopping, or the id is in use.
func (s *agentStream) addDial(random int64, cancel context.CancelFunc) error {
	a := s.endpoint.agent
	s.dialMu.Lock()
	defer s.dialMu.Unlock()
	s.lastDial = time.Now()
	if s.stopping {
		a.cfg.Counters.Refuse(tunnel.Draining)
		return tunnel.Refusef(tunnel.Draining, "node %s is stopping", a.cfg.Node)
	}
	if s.dials[random] != nil {
		return errors.New("a dial with this id is in progress already")
	}
	s.dials[random] = cancel
	s.busy++
	return nil
}

// refuseDial answers the dial request p with an error.
func (s *agentStream) refuseDial(p Packet, err error) {
	s.send(&Packet{Type: PacketDialRsp, Random: p.Random, Err: err.Error()})
}

// dialAndServe dials for the registered request p, answers it, and serves the conn until its end.
func (s *agentStream) dialAndServe(ctx context.Context, p Packet, id int64) {
	a := s.endpoint.agent
	target, err := a.dial(ctx, tunnel.Request{
		Node: a.cfg.Node, Category: category, Network: p.Protocol, Addr: p.Address,
		Caller: "proxy-server " + s.server,
	})
	s.dialMu.Lock()
	delete(s.dials, p.Random)
	s.dialMu.Unlock()
	if err != nil {
		a.cfg.Counters.Refuse(tunnel.CodeOf(err))
		a.log.Debug("dial refused", "target", p.Address, "err", err)
		s.refuseDial(p, err)
		return
	}
	defer a.cfg.Budget.Over()
	if ctx.Err() != nil { // the caller has left meanwhile
		tunnel.Reset(target)
		s.refuseDial(p, errors.New("the dial was given up"))
		return
	}
	conn, err := s.add(id, func() {})
	if err != nil {
		tunnel.Reset(target)
		return
	}
	a.cfg.Counters.ConnsOpened.Add(1)
	s.send(&Packet{Type: PacketDialRsp, Random: p.Random, ConnID: id})
	var in, out int64
	err = a.guard("the conn ends", func() (err error) { in, out, err = tunnel.Splice(ctx, conn, target); return err })
	a.log.Debug("conn ended", "target", p.Address, "bytes", in+out, "err", err)
}

// dial waits until the budget admits r, and dials. After success the caller must call Budget.Over.
func (a *Agent) dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, DialTimeout)
	defer cancel()
	if refusal := a.cfg.Budget.Admit(ctx, r); refusal != nil {
		return nil, refusal
	}
	var target net.Conn
	err := a.guard("the dial ends", func() (err error) { target, err = a.cfg.Dial(ctx, r); return err })
	a.cfg.Budget.Dialled(r, err)
	if err != nil {
		a.cfg.Budget.Over()
	}
	return target, err
}

// connOver counts the end of a conn, or of a dial that failed.
func (s *agentStream) connOver() {
	s.dialMu.Lock()
	defer s.dialMu.Unlock()
	if s.busy--; s.busy == 0 {
		notify(s.idle)
	}
}
