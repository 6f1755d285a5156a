package stream

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/balancer"
	"tunnel.example/tunnel/pkg/conn"
	"tunnel.example/tunnel/pkg/listen"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// ServerConfig configures a [Server].
type ServerConfig struct {
	Listen    string           // address to listen on, such as ":9000"; "": edges connect only to OnePort
	ProxyFrom auth.Sources     // balancers that send a PROXY header to Listen; see package balancer
	OnePort   *listen.Handover // edges that connect to the one port; see package oneport; nil: there is none
	// WebSocket is an address to listen on for an HTTP ingress, such as "127.0.0.1:8080"; "": none. The ingress
	// passes WebSockets for WebSocketPath on to it. Edges speak TLS inside.
	WebSocket string
	TLS       *tls.Config        // the server's certificate
	Auth      auth.Authenticator // decides who may join as which node
	// Certificates: the TLS handshake asks edges for the certificates of their nodes. TLS verifies
	// none of them; Auth does.
	Certificates bool
	// Tell returns the CAs and addresses of the cloud that every edge gets with a certificate; nil: none.
	Tell func() auth.TellEdges
	// Trusts gets the ids (auth.CAID) of the CAs by which a node verifies the cloud, as the node says. The server calls
	// Trusts after it has renewed the node's certificate. It checks only the length of the ids. nil: it drops the ids.
	Trusts     func(node tunnel.NodeName, cas []string)
	Issuer     Issuer           // issues certificates to nodes; nil (not a typed nil): the server issues none
	Counters   *tunnel.Counters // nil: the server makes counters that nothing shows
	Log        *slog.Logger
	Limits     Limits         // zero fields are defaults
	Grace      time.Duration  // how long conns may continue when the server stops; 0: tunnel.GracePeriod
	Software   string         // name and version of this program, sent to edges
	Replicas   Replicas       // the other replicas; nil (not a typed nil): this replica is alone
	Congestion *Congestion    // congestion control of the connections of edges and replicas; nil: the system's choice
	Audit      tunnel.Trail   // gets an event for each join, end of a session and certificate of a node; nil: off
	Tracer     *tunnel.Tracer // makes spans of opens; nil: off
	// Sockets opens the listeners; nil: no other process can take them over.
	Sockets *listen.Sockets
	// Reach connects to a target that the edge of a session asks for, or returns a [tunnel.Refusal]. If it returns
	// another error, the edge does not get its text. The caller owns the conn. ctx bounds the dialling only. nil: every
	// such request is refused.
	Reach ReachFunc
	// ReachSink is told of the conns for which edges ask.
	ReachSink tunnel.Sink
	// Services are served on the connections of sessions.
	Services []SessionService

	// Only tests set these. 0: the constant of the same name.
	farTrip, handOverTime time.Duration
}

// Server is the end of a session that accepts joins: joins of nodes, and joins of other replicas. It
// is the cloud's module "stream".
type Server struct {
	pb.UnimplementedStreamServer

	// Set once.
	cfg    ServerConfig
	dir    *tunnel.Directory // the live sessions of nodes
	router *tunnel.Router    // the handlers of messages from edges
	// replicaRouter has the handlers of messages from other replicas.
	replicaRouter *tunnel.Router
	blocks        *conn.Blocks
	balancers     *balancer.Balancers
	strangers     *listen.Strangers // the connections of all listeners that have not joined
	log           *slog.Logger
	listen        func(network, address string) (net.Listener, error) // net.Listen, except in tests

	// Strangers can cause these warnings. Each kind has its own limiter, so that one kind does not
	// suppress another.
	joinWarnings, groupWarnings, splitWarnings tunnel.Limiter
	denials                                    tunnel.Limiter // limits warnings about dials that edges have denied
	// auditedJoins and auditedIssues limit audit events that strangers can cause. auditedFaults limits events of refusals
	// that are a fault of the cloud. The limits of the log are others, and allow far more.
	auditedJoins, auditedIssues, auditedFaults tunnel.Limiter

	quotas  quotas      // the quotas of the nodes
	tickets dataTickets // the tickets of requested data connections

	addr atomic.Pointer[net.Addr] // set while the server listens
	// splices is the context of the conns that edges have asked for. Run sets it before it serves.
	splices  context.Context
	draining atomic.Bool    // the server stops: edges may ask for no more conns
	leaving  chan struct{}  // closed when Leave begins
	left     chan struct{}  // closed when Leave has ended
	stopping atomic.Bool    // true: no edge may join any more
	moving   atomic.Bool    // another process takes over: see Move
	sessions sync.WaitGroup // live sessions; handlers add to it, and gRPC waits for the handlers

	telling sync.Mutex // held while edges get the list of replicas, so that the last list sent is the newest

	mu     sync.Mutex                 // guards the following
	live   map[*cloudSession]struct{} // sessions of nodes and of other replicas: join adds, detach deletes
	leftAt time.Time                  // when Leave was last called; zero: never
}

// NewServer makes a server that puts its sessions into dir. The server passes messages to the
// routes of mods and to its own routes.
func NewServer(cfg ServerConfig, dir *tunnel.Directory, mods ...tunnel.Module) (*Server, error) {
	cfg.Limits = cfg.Limits.orDefault()
	if cfg.Grace == 0 {
		cfg.Grace = tunnel.GracePeriod
	}
	cfg.farTrip, cfg.handOverTime = cmp.Or(cfg.farTrip, farTrip), cmp.Or(cfg.handOverTime, handOverTime)
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	s := &Server{
		cfg: cfg, quotas: quotas{limits: cfg.Limits, counters: cfg.Counters}, dir: dir, blocks: new(conn.Blocks),
		log: cfg.Log.With("module", category), listen: net.Listen, leaving: make(chan struct{}), left: make(chan struct{}),
		strangers: listen.NewStrangers(cfg.Limits.Joining, cfg.Limits.JoiningPerAddress),
		live:      make(map[*cloudSession]struct{}),
	}
	s.balancers = balancer.New(balancer.Config{
		From: cfg.ProxyFrom, Key: "proxyfrom", Table: "[mode.cloud.stream.server]", Counters: cfg.Counters, Log: s.log,
	})
	s.joinWarnings.Every, s.joinWarnings.Burst = time.Second, 10
	for _, l := range []*tunnel.Limiter{&s.auditedJoins, &s.auditedIssues, &s.auditedFaults} {
		l.Burst = auditedRefusals
	}
	router, err := tunnel.NewRouter(append([]tunnel.Module{s}, mods...)...)
	if err != nil {
		return nil, err
	}
	s.router = router
	if s.replicaRouter, err = tunnel.NewRouter(replicaRoutes{s}); err != nil {
		return nil, err
	}
	return s, nil
}

// Name implements tunnel.Module.
func (s *Server) Name() string { return category }

// Routes implements tunnel.Routed. It returns the messages that edges may send. Edges may not send
// an open.
func (s *Server) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		typeHeartbeat:  handler((*cloudSession).heartbeat),
		typeRefused:    handler((*cloudSession).refused),
		typeDrain:      handler((*cloudSession).edgeLeaves),
		typeCancel:     handler((*cloudSession).cancelConn),
		typeCredential: handler((*cloudSession).newCredential),
	}
}

// Router returns the routes of this end. The start-up line lists them.
func (s *Server) Router() *tunnel.Router { return s.router }

// Addr returns the address that the server listens on. It returns nil unless the server listens.
func (s *Server) Addr() net.Addr {
	if a := s.addr.Load(); a != nil {
		return *a
	}
	return nil
}

// Ready returns nil while edges can join. Otherwise the error says why they cannot.
func (s *Server) Ready() error {
	switch {
	case s.stopping.Load():
		return errors.New("stopping")
	case s.addr.Load() == nil:
		return errors.New("not listening yet")
	}
	return nil
}

// Run implements tunnel.Module. It listens until Leave is called or ctx is done. When ctx is done,
// Run refuses new joins, tells the connected edges, and gives conns the grace period to end.
func (s *Server) Run(ctx context.Context) error {
	listeners, err := s.open()
	if err != nil {
		return err
	}
	web, err := s.listenWeb()
	if err != nil {
		for _, ln := range listeners {
			ln.Close()
		}
		return err
	}
	var endSplices context.CancelFunc
	s.splices, endSplices = tunnel.GraceFunc(ctx, s.grace)
	defer endSplices()
	addr := listeners[0].Addr()
	s.addr.Store(&addr)
	defer s.addr.Store(nil)

	servers := linkServers{
		near: s.newGRPC(false, keepaliveTotal), far: s.newGRPC(true, keepaliveTotal),
		multipath: s.newGRPC(true, multipathTotal), // several uplinks of an edge are rarely near
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		<-ctx.Done()
		s.stopping.Store(true)
		s.draining.Store(true)
		s.drain()
		s.stop(servers.all()...)
	}()
	err = s.serve(ctx, listeners, web, servers)
	if tunnel.IsClosed(s.leaving) {
		<-ctx.Done()
	}
	if ctx.Err() == nil {
		return fmt.Errorf("serving edges on %s: %w", addr, err)
	}
	<-stopped
	s.sessions.Wait()
	return nil
}

// open opens the listeners of edges.
func (s *Server) open() (listeners []net.Listener, err error) {
	if s.cfg.Listen != "" {
		ln, err := s.openListener(s.cfg.Listen)
		if err != nil {
			return nil, fmt.Errorf("listening for edges: %w "+
				"(is another process on that port? see grpcport in [mode.cloud.stream.server])", err)
		}
		listeners = append(listeners, s.balancers.Listener(listen.Steady(ln, s.log)))
	}
	if s.cfg.OnePort != nil {
		listeners = append(listeners, s.cfg.OnePort)
	}
	if len(listeners) == 0 {
		return nil, errors.New("there is no port for edges: see grpcport in [mode.cloud.stream.server]")
	}
	return listeners, nil
}

// openListener opens a listener of edges.
func (s *Server) openListener(address string) (net.Listener, error) {
	return s.cfg.Sockets.Open(listen.Edges, listen.Name{Network: "tcp", Address: address},
		func() (net.Listener, error) { return s.listen("tcp", address) })
}

// linkServers are the gRPC servers for edges. There is one for each kind of link, since gRPC sets window sizes and
// timeouts per server.
type linkServers struct{ near, far, multipath *grpc.Server }

// all returns the servers, for stop.
func (l linkServers) all() []*grpc.Server { return []*grpc.Server{l.near, l.far, l.multipath} }

// newGRPC returns a gRPC server for near or far links. It closes a connection on which no byte comes for total.
func (s *Server) newGRPC(link far, total time.Duration) *grpc.Server {
	conns := s.cfg.Limits.Conns
	if s.cfg.Replicas != nil {
		conns = s.cfg.Limits.relayed()
	}
	conf := s.cfg.TLS.Clone()
	conf.NextProtos = []string{DataProtocol} // gRPC adds its own
	if s.requestsCertificates() {
		conf.ClientAuth, conf.VerifyPeerCertificate = tls.RequestClientCert, listen.CheckShown // the join verifies it
	}
	conf.GetConfigForClient = listen.CheckHello
	opts := append(serverOptions(conns, s.cfg.Limits, link, total),
		grpc.Creds(serverCreds{credentials.NewTLS(conf), s.attachData, s.count, s.balancers}),
		grpc.StreamInterceptor(s.intercept),
		grpc.UnknownServiceHandler(unknownMethod),
	)
	server := grpc.NewServer(opts...)
	pb.RegisterStreamServer(server, s)
	server.RegisterService(certificatesService(), s)
	for _, service := range s.cfg.Services {
		server.RegisterService(s.onSessions(service), s)
	}
	return server
}

// serve serves edges until the gRPC servers stop, Leave is called, or a listener fails. It then closes
// the listeners; after a failure it stops the servers.
func (s *Server) serve(
	ctx context.Context, listeners []net.Listener, web *webListener, servers linkServers,
) (err error) {
	fromFar := listen.NewHandover(listeners[0].Addr, nil)
	fromMultipath := listen.NewHandover(listeners[0].Addr, nil)
	served := make(chan struct{})
	failed := make(chan error, len(listeners)+1) // each Serve sends once, and so may the port for WebSockets
	var listening sync.WaitGroup
	closeLater := func(closeAll func()) {
		listening.Go(func() {
			select {
			case <-s.leaving:
			case <-served:
			}
			closeAll() // sessions continue; new connections have to find another replica
		})
	}
	for _, ln := range listeners {
		joining := s.newJoinListener(ln)
		listening.Go(func() { failed <- servers.near.Serve(nearListener{joining, fromFar, fromMultipath}) })
		closeLater(func() { joining.Close() })
	}
	// If a listener fails, servers.near.Serve returns its error as well.
	listening.Go(func() { servers.far.Serve(fromFar) })             //nolint:errcheck // see above
	listening.Go(func() { servers.multipath.Serve(fromMultipath) }) //nolint:errcheck // see above
	if web != nil {
		listening.Go(func() { servers.near.Serve(web.passed) }) //nolint:errcheck // see above
		listening.Go(func() {
			if webErr := web.serve(); webErr != nil {
				failed <- webErr
			}
		})
		closeLater(web.close)
	}
	err = <-failed
	fromFar.Close()
	fromMultipath.Close()
	close(served)
	if ctx.Err() == nil && !tunnel.IsClosed(s.leaving) {
		for _, server := range servers.all() {
			server.Stop()
		}
	}
	listening.Wait()
	return err
}

// requestsCertificates reports whether the TLS handshake requests a certificate of each client.
func (s *Server) requestsCertificates() bool { return s.cfg.Certificates || s.cfg.Replicas != nil }

// Leave prepares a stop while other replicas continue. Call Leave before the stop. A second call waits for the first
// call. From then on no edge may join this replica. Leave asks connected edges to open a session with another replica.
// The DNS names of nodes then lead to other replicas. Leave returns when every edge has such a session and no caller
// has come for leaveQuiet, but not before leaveFirst and not after leaveLast. By then, load balancers and clients of
// DNS have seen the change. Front doors should serve until Leave returns. If no other replica has joined this one,
// Leave does nothing. A replica that is also about to stop counts as joined: while both wait, a replica that starts
// may take their edges.
func (s *Server) Leave(ctx context.Context) {
	if (s.cfg.Replicas == nil || len(s.cfg.Replicas.Joined()) == 0) && !tunnel.IsClosed(s.leaving) {
		return
	}
	if !s.leaves() {
		select {
		case <-s.left:
		case <-ctx.Done():
		}
		return
	}
	defer close(s.left)
	s.cfg.Replicas.Leave()
	s.log.Info("leaving: the other replicas take over")
	s.announce() // before the edges are asked to move, so that none of them looks for this replica
	for _, cs := range s.allLive() {
		cs.role.leave(cs)
	}
	ctx, cancel := context.WithTimeout(ctx, leaveLast)
	defer cancel()
	if !sleep(ctx, leaveFirst) {
		return
	}
	if left := s.cfg.Replicas.NodesMoved(ctx); left > 0 {
		s.log.Warn("nodes have no session with another replica yet", "nodes", left)
	}
	for {
		quiet := time.Since(s.cfg.Sockets.LastAccepted(listen.Callers))
		if quiet >= leaveQuiet || !sleep(ctx, leaveQuiet-quiet) {
			return
		}
	}
}

// Unmoved returns how many edges have a session with this replica, and with no other one that continues.
func (s *Server) Unmoved() int {
	if s.cfg.Replicas == nil {
		return len(s.allLive())
	}
	now, cancel := context.WithCancel(context.Background())
	cancel()
	return s.cfg.Replicas.NodesMoved(now)
}

// sleep waits for d. It returns false if ctx is done before.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// leaves notes a call of Leave. It reports whether this is the first call.
func (s *Server) leaves() (first bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leftAt = time.Now()
	if tunnel.IsClosed(s.leaving) {
		return false
	}
	s.stopping.Store(true)
	close(s.leaving)
	return true
}

// Move asks the connected edges to open another session; this server continues. Call Move when another process accepts
// the connections of edges in place of this one. It returns the nodes that have a session here.
func (s *Server) Move() []tunnel.NodeName {
	s.moving.Store(true)
	for _, cs := range s.allLive() {
		cs.role.leave(cs)
	}
	return s.dir.Connected()
}

// Stay undoes Move, because the other process does not take over after all. nodes is the result of Move. The edges come
// back. Each gets a new session, and the conns of its old session continue.
func (s *Server) Stay(nodes []tunnel.NodeName) {
	s.moving.Store(false)
	s.dir.Expect(nodes, time.Now().Add(leaveLast))
}

// Alone reports whether no other replica could take the edges. A replica that is about to stop takes no edges.
func (s *Server) Alone() bool { return s.cfg.Replicas == nil || len(s.cfg.Replicas.Staying()) == 0 }

// stop ends gRPC servers, after the Server has told every session to end. If edges do not close their
// connections within a second, stop closes the connections. It also closes those of strangers: gRPC would wait for
// their handshakes.
func (s *Server) stop(servers ...*grpc.Server) {
	var wg sync.WaitGroup
	for _, server := range servers {
		wg.Go(func() {
			timer := time.AfterFunc(time.Second, func() {
				s.strangers.EvictAll()
				server.Stop()
			})
			defer timer.Stop()
			server.GracefulStop() // waits for the handlers
		})
	}
	wg.Wait()
}

// drain tells every edge that the server stops. It waits for the edges' conns, for at most the
// grace period.
func (s *Server) drain() {
	grace := s.grace()
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	var wg sync.WaitGroup
	for _, cs := range s.allLive() {
		wg.Go(func() {
			cs.drain(ctx, grace)
			// The edge closes the connection when its targets have taken the bytes in flight.
			select {
			case <-cs.done:
			case <-time.After(hangUpTimeout):
			}
		})
	}
	wg.Wait()
	for _, cs := range s.allLive() {
		cs.Close(errCloudStopping)
	}
}

// grace returns how long conns may continue when the server stops. The grace period counts from the last call of Leave,
// because Kubernetes' 30 s begin at that call. An earlier call of Leave was for a drain without a stop.
func (s *Server) grace() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.leftAt.IsZero() {
		return max(0, s.cfg.Grace-time.Since(s.leftAt))
	}
	return s.cfg.Grace
}

// allLive returns all live sessions: sessions of nodes and sessions of other replicas.
func (s *Server) allLive() []*cloudSession {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.live))
}

// errCloudStopping ends the sessions that are still live when the server stops.
var errCloudStopping = status.Error(codes.Unavailable, "the cloud is stopping")

// tooMany counts a connection that was closed because its source has too many connections that have
// not joined. It logs a warning at a limited rate.
func (s *Server) tooMany(remote net.Addr) {
	s.cfg.Counters.JoinsRefused.Add(1)
	s.cfg.Counters.Limited(tunnel.LimitJoiningPerAddress)
	if skipped, ok := s.groupWarnings.Allow(); ok {
		s.log.Warn("too many connections of one source have not joined yet; closing its new ones",
			"remote", remote.String(), "limit", s.cfg.Limits.JoiningPerAddress, "skipped", skipped)
	}
}

// intercept runs before every stream. It refuses all further streams of a connection after one refused stream.
// A panic ends the session of the stream, and no other session.
func (s *Server) intercept(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	t, err := transportOf(stream.Context())
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	t.unserved.Add(-1)
	if t.refused.Load() {
		return status.Error(codes.Unavailable, "this connection is being closed")
	}
	if err := s.metadataFits(stream.Context()); err != nil {
		if t.session.Load() == nil {
			t.refuse()
			s.refused(stream.Context(), t, &refusedJoin{told: err})
		}
		return err
	}
	var answer error
	if err := tunnel.Guard(s.log, s.cfg.Counters, "the session ends", func() error {
		answer = next(srv, stream)
		return nil
	}); err != nil {
		if cs := t.session.Load(); cs != nil {
			cs.Close(err)
			//nolint:errcheck // it has logged the error
			tunnel.Guard(s.log, s.cfg.Counters, "the session has ended", func() error {
				s.detach(cs)
				return nil
			})
		}
		t.refuse()
		return status.Error(codes.Internal, "internal error")
	}
	return answer
}

// maxUnserved bounds the streams of a session that have no handler yet. gRPC starts the handler of a stream soon after
// it has read the stream, so an honest edge has few such streams. gRPC refuses some streams without a handler, such as
// one with a wrong content type. A refused stream counts until the connection ends, because gRPC keeps its answer if
// the peer does not read. The answer may be 128 KiB long: it quotes up to 2 × Limits.Metadata bytes of the peer, and
// escapes each by up to four bytes.
const maxUnserved = 32

// With more than manyUnserved such streams, the server reads a node's next stream after a pause: see giveWay.
const manyUnserved = 12

// With more than maxUnserved such streams, or with one before a session, the server reads no further until handlers
// run. It checks every unservedPause, and unservedPauses times at most. A busy process may run the handlers late.
const (
	unservedPause  = time.Millisecond
	unservedPauses = 2000
)

// maxEarlyStreams is how many streams a connection may begin before it has a session. An edge needs one.
const maxEarlyStreams = 8

// count counts the streams that begin on t, and the HTTP/2 frames without data that have arrived. Too many end the
// session and close the connection. gRPC has no buffer (readBuffer), so it has processed all earlier frames when it
// reads the next one.
func (s *Server) count(t *transport, streams, frames int) (tooMany bool) {
	cs := t.session.Load()
	if cs == nil { // of frames, it can send few, because it can send few bytes
		t.early += streams
		tooMany = t.early > maxEarlyStreams || streams > 0 && !t.waitForHandlers(0, nil)
		t.unserved.Add(int64(streams))
		if tooMany {
			s.cfg.Counters.Limited(tunnel.LimitStreams)
			t.refuse()
			s.refused(context.Background(), t, &refusedJoin{told: limitErrorf(tunnel.LimitStreams,
				"a connection without a session has begun more than %d streams, or one that gRPC refuses", maxEarlyStreams)})
		}
		return tooMany
	}
	flooded := func(limit tunnel.Limit, err error) bool {
		if t.refuse() {
			s.cfg.Counters.Limited(limit)
		}
		cs.Close(err)
		return true
	}
	if streams > 0 && cs.isNode() {
		t.giveWay()
	}
	if streams > 0 && !t.waitForHandlers(maxUnserved, cs.done) {
		if tunnel.IsClosed(cs.done) {
			t.refuse()
			return true
		}
		return flooded(tunnel.LimitStreams, limitErrorf(tunnel.LimitStreams,
			"node %s has begun %d streams that gRPC refuses", cs.pub.Node, t.unserved.Load()))
	}
	t.unserved.Add(int64(streams))
	for range streams {
		if !cs.quota.mayOpen() {
			return flooded(tunnel.LimitStreams, limitErrorf(tunnel.LimitStreams,
				"node %s has opened more than %d streams in a second, and %d for each open",
				cs.pub.Node, ownStreams, openStreams))
		}
	}
	for range frames {
		if !cs.quota.mayFrame() {
			return flooded(tunnel.LimitFrames, limitErrorf(tunnel.LimitFrames,
				"node %s has sent more than %d HTTP/2 frames without data in a second, and %d for each open",
				cs.pub.Node, ownFrames, openFrames))
		}
	}
	return false
}

// unknownMethod answers calls of methods that the server does not have. The calls count as streams like
// any other call. unknownMethod also refuses a connection that has no session yet.
func unknownMethod(_ any, stream grpc.ServerStream) error {
	if t, err := transportOf(stream.Context()); err == nil && t.session.Load() == nil {
		t.refuse()
	}
	return status.Error(codes.Unimplemented, "there is no such method here")
}

// TunnelStreaming implements the control plane: one call is one session.
func (s *Server) TunnelStreaming(stream pb.Stream_TunnelStreamingServer) error {
	ctx := stream.Context()
	t, err := transportOf(ctx)
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	cs, refusal := s.join(stream, t)
	if refusal != nil {
		t.refuse()
		s.refused(ctx, t, refusal)
		return refusal.told
	}
	// From here on every return path ends the session.
	s.sessions.Add(1)
	defer func() {
		go func() {
			// Blocked loops end only after this handler has returned.
			cs.wg.Wait()
			s.sessions.Done()
		}()
	}()
	cs.start(ctx)
	// Called here, because a goroutine for it would cost every idle node 4 KiB.
	cs.endWhenExpiredOrRevoked(s.cfg.Issuer != nil)
	<-cs.done
	if err = cs.reason(); ctx.Err() != nil && status.Code(err) == codes.Canceled {
		err = errLost
	}
	cs.noteCause(err)
	why := cs.whyEnded(err)
	cs.pub.EndedBecause.Store(&why)
	s.detach(cs)
	cs.quota.release()
	cs.logEnd(err)
	s.auditEnd(cs, err)
	t.refuse()
	if errors.Is(err, io.EOF) {
		return nil // the edge has closed the stream: a clean end
	}
	return err
}

// errLost is why a session has ended if its control stream was cancelled, for example by a lost connection.
var errLost = errors.New("connection lost")

// auditedRefusals is how many events a minute the audit gets of each kind: refused joins, refused certificates, and
// faults of the cloud.
const auditedRefusals = 5

// auditEnd records the end of a session of a node.
func (s *Server) auditEnd(cs *cloudSession, err error) {
	if s.cfg.Audit == nil || cs.pub.Node == "" {
		return
	}
	why := ""
	if !cs.isCleanEnd(err) {
		why = cs.whyEnded(err)
	}
	s.cfg.Audit.Record(tunnel.Event{
		Kind: tunnel.EventLeave, Result: tunnel.ResultOK, Node: cs.pub.Node, Remote: cs.pub.Remote, Session: cs.pub.ID,
		Seconds: time.Since(cs.pub.Since).Seconds(), Err: why,
	})
}

// detach removes an ended session from the live sessions, and lets its role undo attach.
func (s *Server) detach(cs *cloudSession) {
	s.mu.Lock()
	delete(s.live, cs)
	s.mu.Unlock()
	cs.role.detach(cs)
}

// Connect implements the data plane. One call carries one conn; the edge opens it in answer to an
// open request. The handler returns when the conn has ended.
func (s *Server) Connect(stream pb.Stream_ConnectServer) error {
	cs, err := s.sessionOf(stream.Context())
	if err != nil {
		return err
	}
	return cs.connect(stream)
}

// sessionOf returns the session that belongs to the connection of a stream. If the connection has no session,
// sessionOf refuses the connection.
func (s *Server) sessionOf(ctx context.Context) (*cloudSession, error) {
	t, err := transportOf(ctx)
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	cs := t.session.Load()
	if cs == nil {
		// The stream came on another connection than the session's control stream. The cause is a proxy between
		// edge and cloud that spreads the streams over several connections.
		t.refuse()
		s.cfg.Counters.Refuse(tunnel.WrongSession)
		if skipped, ok := s.splitWarnings.Allow(); ok {
			s.log.Warn("wrong-session: a conn came on a connection without a session; "+
				"only a TCP (layer 4) balancer may stand between edge and cloud",
				"remote", t.conn.RemoteAddr().String(), "skipped", skipped)
		}
		return nil, status.Error(codes.FailedPrecondition,
			"wrong-session: this connection has no session; only a TCP (layer 4) balancer may stand in between")
	}
	return cs, nil
}
