package konnectivity

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tunnel/pkg/auth"
	"tunnel/pkg/tunnel"
)

// AgentConfig is what an [Agent] needs.
type AgentConfig struct {
	Servers     []string                    // tls://host:port of proxy-servers, or of balancers before some
	TLS         func() *tls.Config          // who they are, and our certificate; the name is added
	Token       func() (auth.Secret, error) // nil: the certificate proves who we are
	Node        tunnel.NodeName             // our agent id
	Identifiers string                      // what we reach, beside our name; see ParseIdentifiers
	Dial        tunnel.DialFunc             // of the targets
	Budget      Budget
	Counters    *tunnel.Counters
	Log         *slog.Logger
}

// Budget bounds what an edge does for others, whoever they are.
type Budget interface {
	// Admit waits for room for a dial, and counts it with the conn that comes of it.
	Admit(ctx context.Context, r tunnel.Request) *tunnel.Refusal
	// Dialled says that the dial has ended, Over that the conn has, or that there is none.
	Dialled(r tunnel.Request, err error)
	Over()
}

// Agent is the edge's module that joins stock proxy-servers of Konnectivity, as its agent
// does: it holds a stream with every server that it finds behind each address.
type Agent struct {
	// Set once.
	cfg         AgentConfig
	identifiers string
	log         *slog.Logger
	grace       time.Duration
	quiet       time.Duration

	mu   sync.Mutex     // guards the following
	held map[string]int // streams, by address
}

var _ tunnel.Module = (*Agent)(nil)

// NewAgent returns the module.
func NewAgent(cfg AgentConfig) (*Agent, error) {
	query, err := url.ParseQuery(cfg.Identifiers)
	if err == nil {
		_, err = ParseIdentifiers(cfg.Identifiers)
	}
	if err != nil {
		return nil, err
	}
	query.Add("host", string(cfg.Node))
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	return &Agent{
		cfg: cfg, identifiers: query.Encode(), log: cfg.Log.With("module", agentName), grace: tunnel.GracePeriod, quiet: quietTime,
		held: make(map[string]int),
	}, nil
}

const agentName = "konnectivity"

// Name implements tunnel.Module.
func (a *Agent) Name() string { return agentName }

// Routes implements tunnel.Module.
func (a *Agent) Routes() map[string]tunnel.Handler { return nil }

// Ready returns nil while there is a server behind every address.
func (a *Agent) Ready() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.cfg.Servers {
		if a.held[s] == 0 {
			return fmt.Errorf("no proxy-server has been joined at %s", s)
		}
	}
	return nil
}

// Run implements tunnel.Module. When ctx is done the servers are told, and conns have the
// grace period to end.
func (a *Agent) Run(ctx context.Context) error {
	conns, endConns := tunnel.Grace(ctx, a.grace)
	defer endConns()
	var g errgroup.Group
	for _, s := range a.cfg.Servers {
		g.Go(func() error {
			w := &way{agent: a, url: s, conns: conns, servers: make(map[string]bool), want: 1, lost: make(chan struct{}, 1)}
			w.run(ctx)
			return nil
		})
	}
	return g.Wait()
}

// guard calls do, which handles what a server has said. A panic in it ends what names, and
// nothing else.
func (a *Agent) guard(what string, do func() error) error {
	return tunnel.Guard(a.log, a.cfg.Counters, what, do)
}

// count adds n to the streams that are held through an address.
func (a *Agent) count(url string, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held[url] += n
}

// way is one address and the servers that have been found behind it.
type way struct {
	// Set once.
	agent *Agent
	url   string
	conns context.Context // outlives run's by the grace period
	lost  chan struct{}   // capacity 1: a server has been lost

	mu      sync.Mutex      // guards the following
	servers map[string]bool // held, by id
	want    int             // how many there are, as the last one said
}

// Waits between two attempts: a random part of a bound that doubles. A server that has
// refused us will do so again until somebody changes something.
const (
	retryMin        = 500 * time.Millisecond
	retryMax        = 10 * time.Second
	retryRefusedMin = 10 * time.Second
	retryRefusedMax = 5 * time.Minute
	// joinTime is how long a server may take to say who it is.
	joinTime = 10 * time.Second
	// mostServers is how many there may be behind an address, and mostServerID how long the
	// id of one, in bytes.
	mostServers  = 64
	mostServerID = 253
	// mostServerPacket is more than a stock server takes from its clients (4 MiB).
	mostServerPacket = 8 << 20
)

// errHeld is a server that has a stream of ours already. A balancer leads where it likes.
var errHeld = errors.New("this server is held already")

// run looks for servers until ctx is done, and waits for those that it has found.
func (w *way) run(ctx context.Context) {
	log := w.agent.log.With("server", w.url)
	var live sync.WaitGroup
	defer live.Wait()
	var bound time.Duration
	for ctx.Err() == nil {
		if w.full() {
			select {
			case <-w.lost:
			case <-ctx.Done():
				return
			}
		}
		var s *agentStream
		err := w.agent.guard("the attempt to join ends", func() (err error) { s, err = w.join(ctx); return err })
		low, high := retryMin, retryMax
		switch c := status.Code(err); {
		case err == nil:
			bound = 0
			w.agent.count(w.url, 1)
			log.Info("proxy-server joined", "id", s.server, "servers", s.count)
			live.Go(func() {
				why := w.agent.guard("the stream ends", func() error { return s.serve(ctx) })
				s.end(why) // it has ended, unless there was a panic
				w.agent.count(w.url, -1)
				w.drop(s.server)
				log.Info("proxy-server left", "id", s.server, "err", why)
				s.working.Wait() // what it has closed may still be on its way to targets
			})
		case ctx.Err() != nil:
			return
		case errors.Is(err, errHeld):
			log.Debug("joining a proxy-server", "err", err)
		default:
			if c == codes.Unauthenticated || c == codes.PermissionDenied {
				low, high = retryRefusedMin, retryRefusedMax
			}
			log.Warn("joining a proxy-server", "err", err)
		}
		bound = min(max(2*bound, low), high)
		select {
		case <-time.After(rand.N(bound)): //nolint:gosec // jitter is no secret
		case <-ctx.Done():
		}
	}
}

func (w *way) full() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.servers) >= w.want
}

// hold notes a server, which says how many there are.
func (w *way) hold(server string, count int) error {
	if len(server) > mostServerID {
		return fmt.Errorf("the id of the server has %d bytes; %d are allowed", len(server), mostServerID)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.want = min(max(1, count), mostServers)
	switch {
	case w.servers[server]:
		return errHeld
	case len(w.servers) >= mostServers:
		return fmt.Errorf("%d servers are held", mostServers)
	}
	w.servers[server] = true
	return nil
}

func (w *way) drop(server string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.servers, server)
	ping(w.lost)
}

// agentStream is a stream with one server.
type agentStream struct {
	*mux
	way    *way
	client grpc.ClientStream
	cc     *grpc.ClientConn
	cancel context.CancelFunc // of the stream
	server string             // its id
	count  int                // how many servers there are

	working sync.WaitGroup
	nextID  int64 // owned by the receiver

	dialMu   sync.Mutex // guards the following
	dials    map[int64]context.CancelFunc
	busy     int           // conns, those being dialled included
	nowIdle  chan struct{} // capacity 1: busy has become 0
	lastDial time.Time     // when the last dial came
	stopping bool          // dials are refused
}

// join opens a stream with whatever server the address leads to now.
func (w *way) join(ctx context.Context) (_ *agentStream, err error) {
	a := w.agent
	addr := strings.TrimPrefix(w.url, "tls://")
	md := metadata.Pairs("agentid", string(a.cfg.Node), "agentidentifiers", a.identifiers)
	if a.cfg.Token != nil {
		var token auth.Secret
		if token, err = a.cfg.Token(); err != nil {
			return nil, err
		}
		md.Set("authorization", "Bearer "+token.Reveal())
	}
	// Every stream has a connection of its own: the next one may lead to another server.
	cc, err := grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(credentials.NewTLS(a.cfg.TLS())),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(NewCodec()), grpc.MaxCallRecvMsgSize(mostServerPacket)),
		grpc.WithDisableRetry(),
		grpc.WithMaxHeaderListSize(MaxHeaders),
		// A stock server hangs up on an agent that pings more often than every 30 s. gRPC makes Timeout
		// TCP's, too (TCP_USER_TIMEOUT): a link may be cut for 10 s.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 40 * time.Second, Timeout: 15 * time.Second}),
	)
	if err != nil {
		return nil, err
	}
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
	stream, err := cc.NewStream(streamCtx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/AgentService/Connect")
	if err != nil {
		return nil, err
	}
	header, err := stream.Header()
	if err != nil {
		return nil, err
	}
	ids, counts := header.Get("serverid"), header.Get("servercount")
	if len(ids) == 0 && len(counts) == 0 { // it has ended: the status says why
		if err = stream.RecvMsg(new(Packet)); err != nil {
			return nil, err
		}
	}
	if len(ids) != 1 || len(counts) != 1 {
		return nil, errors.New("the server does not say which it is: is it a proxy-server's agent port?")
	}
	count, err := strconv.Atoi(counts[0])
	if err != nil {
		return nil, fmt.Errorf("the server says that there are %q servers", counts[0])
	}
	if err = w.hold(ids[0], count); err != nil {
		return nil, err
	}
	return &agentStream{
		mux: newMux(stream, true, a.cfg.Counters, a.log), way: w, client: stream, cc: cc, cancel: cancel, server: ids[0], count: count,
		dials: make(map[int64]context.CancelFunc), nowIdle: make(chan struct{}, 1),
	}, nil
}

// serve serves until the stream ends. When ctx is done the server is told, and the stream
// ends when no conn is left, at the latest with way.conns.
func (s *agentStream) serve(ctx context.Context) error {
	s.working.Go(s.guarded(s.sendLoop))
	s.working.Go(s.guarded(s.receiveLoop))
	select {
	case <-s.ended:
	case <-ctx.Done():
		s.leave()
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

// farewell is how long a server may take to take our last packets.
const farewell = time.Second

// quietTime is how long no dial may have come before a stream that drains ends. A server
// sends dials until it has read our DRAIN, and forgets those that cross with our end: their
// callers would wait for 30 s.
const quietTime = time.Second

// leave has the server take other agents for new dials, answers the dials that still come,
// and waits for the conns.
func (s *agentStream) leave() {
	s.send(&Packet{Type: PacketDrain})
	s.dialMu.Lock()
	s.lastDial = time.Now() // as if one had come
	s.dialMu.Unlock()
	for stopping := false; !stopping; {
		busy, quiet := s.activity()
		left := s.way.agent.quiet - quiet
		if !busy && left <= 0 {
			break
		}
		var late <-chan time.Time
		if !busy {
			late = time.After(left)
		}
		select {
		case <-s.nowIdle:
		case <-late:
		case <-s.way.conns.Done(): // conns are being reset, and dials cancelled
			stopping = true
		case <-s.ended:
			return
		}
	}
	s.dialMu.Lock()
	s.stopping = true
	s.dialMu.Unlock()
	late := time.After(farewell)
	for busy, _ := s.activity(); busy; busy, _ = s.activity() {
		select { // each answer comes before our end
		case <-s.nowIdle:
			continue
		case <-late:
		case <-s.ended:
			return
		}
		break
	}
	// Our end comes behind our last packets, and the server's behind it.
	s.finish(s.client.CloseSend)
	select {
	case <-s.ended:
	case <-time.After(farewell):
	}
}

// activity reports whether there are conns, and how long no dial has come.
func (s *agentStream) activity() (busy bool, quiet time.Duration) {
	s.dialMu.Lock()
	defer s.dialMu.Unlock()
	return s.busy > 0, time.Since(s.lastDial)
}

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

// receive answers as the stock agent does.
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

// dial opens a conn in a goroutine of its own. id is its id if that succeeds.
func (s *agentStream) dial(p Packet, id int64) {
	a := s.way.agent
	refuse := func(text string) {
		s.send(&Packet{Type: PacketDialRsp, Random: p.Random, Err: text})
	}
	ctx, cancel := context.WithCancel(s.way.conns)
	s.dialMu.Lock()
	s.lastDial = time.Now()
	if s.stopping {
		s.dialMu.Unlock()
		cancel()
		a.cfg.Counters.Refuse(tunnel.Draining)
		refuse(tunnel.Refusef(tunnel.Draining, "node %s is stopping", a.cfg.Node).Error())
		return
	}
	if s.dials[p.Random] != nil {
		s.dialMu.Unlock()
		cancel()
		refuse("this dial is under way already")
		return
	}
	s.dials[p.Random] = cancel
	s.busy++
	s.dialMu.Unlock()
	s.working.Go(func() {
		defer s.notBusy()
		defer cancel()
		target, err := a.dial(ctx, tunnel.Request{Node: a.cfg.Node, Category: category, Network: p.Protocol, Addr: p.Address, Caller: "proxy-server " + s.server})
		s.dialMu.Lock()
		delete(s.dials, p.Random)
		s.dialMu.Unlock()
		if err != nil {
			a.cfg.Counters.Refuse(tunnel.CodeOf(err))
			a.log.Debug("dial refused", "target", p.Address, "err", err)
			refuse(err.Error())
			return
		}
		defer a.cfg.Budget.Over()
		if ctx.Err() != nil { // it came too late
			tunnel.Reset(target)
			refuse("the dial was given up")
			return
		}
		conn, err := s.add(id, func() {})
		if err != nil {
			tunnel.Reset(target)
			return
		}
		a.cfg.Counters.Conns.Add(1)
		s.send(&Packet{Type: PacketDialRsp, Random: p.Random, ConnID: id})
		var in, out int64
		err = a.guard("the conn ends", func() (err error) { in, out, err = tunnel.Splice(ctx, conn, target); return err })
		a.log.Debug("conn ended", "target", p.Address, "bytes", in+out, "err", err)
	})
}

// dial waits for its turn and dials. With a target, the caller owes Budget.Over.
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

func (s *agentStream) notBusy() {
	s.dialMu.Lock()
	defer s.dialMu.Unlock()
	if s.busy--; s.busy == 0 {
		ping(s.nowIdle)
	}
}
