package konnectivity

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/balancer"
	ports "tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// AgentsConfig configures [Agents].
type AgentsConfig struct {
	Listen    string             // host:port
	ProxyFrom auth.Sources       // balancers that send a PROXY header; see package balancer
	TLS       *tls.Config        // our certificate
	Auth      auth.Authenticator // who may join as which node
	Replicas  func() int         // how many other replicas of this cloud take agents; nil: none
	Conns     int                // the most conns of a node at once; 0: no bound
	Dials     int                // the most unanswered dials of a node; 0: no bound

	Joining, JoiningPerAddress int           // the most connections without a session, in all and of one source
	JoinTimeout                time.Duration // how long a connection may be without a session

	Counters *tunnel.Counters // nil: not counted
	Audit    tunnel.Trail     // gets an event for each join and each end of a session; nil: off
	Sockets  *ports.Sockets   // opens the listener; nil: no other process can take it over
	Log      *slog.Logger
}

// Agents is the cloud's module that stock konnectivity agents join: it serves AgentService as a
// proxy-server does. Each stream of an agent is a session of the node that its credential proves, as
// each stream of an edge is. The agent id must be the name of that node.
//
// The newest stream of a node is attached to the directory and takes new dials. Older streams keep
// their conns. An edge with the name of the node takes precedence: agents never replace an edge.
type Agents struct {
	// Set once.
	cfg       AgentsConfig
	balancers *balancer.Balancers // in front of the port
	id        string              // the id of this replica, for serverid
	dir       *tunnel.Directory   // has the attached stream of each node
	log       *slog.Logger
	grace     time.Duration // how long conns may continue after Run's ctx is done

	refusals tunnel.Limiter // limits log lines about refused agents

	// mu is locked before the mutexes of the directory and of a mux.
	mu       sync.Mutex                        // guards the following
	addr     net.Addr                          // nil: not listening
	stopping bool                              // Run's ctx is done: no new stream is registered
	nodes    map[tunnel.NodeName][]*agentLink  // live streams, oldest first
	joins    map[tunnel.NodeName]*rate.Limiter // of nodes that have joined lately
}

var _ tunnel.Module = (*Agents)(nil)

// Bounds of agents, besides those of the configuration.
const (
	maxStreamsPerConnection = 4         // an agent needs one
	maxReach                = 4 << 10   // bytes of agentidentifiers
	maxAgentPacket          = 256 << 10 // bytes; a stock agent sends data of 4 KiB, ours of 32 KiB
	agentStreamWindow       = 1 << 20   // bytes in flight, of a stream and of its connection
	// The server pings an agent that has sent nothing for pingInterval, and waits pingTimeout for the
	// answer. A stream thus survives a link that is cut for 10 s, and a lost agent is noticed within
	// 15 s.
	pingInterval = 3 * time.Second
	pingTimeout  = 12 * time.Second
	// settleTime is how long a further stream of a node must live before it takes new dials. The stock
	// agent opens such streams to look for other replicas, and closes one that led to the same replica.
	settleTime = 2 * time.Second
	// maxStreamsPerNode bounds the streams of a node. An agent needs one; after a reconnect there may
	// be lost streams that we have not yet noticed.
	maxStreamsPerNode = 8
	// A node may join joinRate times a second, and joinBurst times at once, as edges may. Each join writes to the log and
	// the audit, and all replicas and front doors look at the nodes again.
	joinRate, joinBurst = 2, 30
)

// NewAgents returns the module. It attaches its sessions to dir.
func NewAgents(cfg AgentsConfig, dir *tunnel.Directory) *Agents {
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	log := cfg.Log.With("module", agentsName)
	return &Agents{
		cfg: cfg, id: uuid.NewString(), dir: dir, log: log, grace: tunnel.GracePeriod,
		balancers: balancer.New(balancer.Config{
			From: cfg.ProxyFrom, Key: "proxyfrom", Table: "[mode.cloud.egress]", Counters: cfg.Counters, Log: log,
		}),
		refusals: tunnel.Limiter{Every: time.Second, Burst: 10}, nodes: make(map[tunnel.NodeName][]*agentLink),
		joins: make(map[tunnel.NodeName]*rate.Limiter),
	}
}

const agentsName = "agents"

// Name implements tunnel.Module.
func (a *Agents) Name() string { return agentsName }

// Ready returns nil while agents can join.
func (a *Agents) Ready() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.addr == nil || a.stopping {
		return errors.New("not listening for agents")
	}
	return nil
}

// Run implements tunnel.Module. It listens until ctx is done; then conns may go on for the grace period.
func (a *Agents) Run(ctx context.Context) error {
	ln, err := a.cfg.Sockets.Listen(ctx, ports.Edges, net.ListenConfig{}, "tcp", a.cfg.Listen)
	if err != nil {
		const advice = "is another process on that port? see agentport in [mode.cloud.egress]"
		return fmt.Errorf("listening for agents: %w (%s)", err, advice)
	}
	a.mu.Lock()
	a.addr = ln.Addr()
	a.mu.Unlock()
	strangers := ports.NewListener(a.balancers.Listener(ports.Steady(ln, a.log)), ports.ListenerConfig{
		Max: a.cfg.Joining, MaxPerSource: a.cfg.JoiningPerAddress,
		Timeout: a.cfg.JoinTimeout, Bytes: StrangerBytes, Counters: a.cfg.Counters,
		OverMax: tunnel.LimitJoining, OverMaxPerSource: tunnel.LimitJoiningPerAddress,
		TooLate: tunnel.LimitJoinTimeout,
	})
	s := &agentService{agents: a}
	server := a.newServer(s)
	served := make(chan error, 1) // the result of Serve; capacity 1, so that sending never blocks
	go func() { served <- server.Serve(strangers) }()
	select {
	case err = <-served:
		err = fmt.Errorf("serving agents on %s: %w", ln.Addr(), err)
	case <-ctx.Done():
		a.mu.Lock()
		a.stopping = true
		a.mu.Unlock()
		strangers.Close() // no new agents; live streams go on
		<-served          //nolint:errcheck // Close is the reason
		a.drain(ctx)
	}
	for _, l := range a.links() {
		l.end(status.Error(codes.Unavailable, "this replica is stopping"))
	}
	strangers.EvictAll() // gRPC would wait for their handshakes
	server.Stop()
	s.working.Wait()
	return err
}

// newServer returns a gRPC server for AgentService. s handles its streams.
func (a *Agents) newServer(s *agentService) *grpc.Server {
	conf := a.cfg.TLS.Clone()
	// Agents.authenticate verifies the certificate, if the agent shows no token.
	conf.ClientAuth, conf.VerifyPeerCertificate = tls.RequestClientCert, ports.CheckShown
	conf.GetConfigForClient = ports.CheckHello
	server := grpc.NewServer(
		grpc.Creds(agentCreds{credentials.NewTLS(conf), a.balancers, a.flooded}),
		grpc.ForceServerCodecV2(NewCodec()),
		grpc.MaxRecvMsgSize(maxAgentPacket),
		grpc.MaxConcurrentStreams(maxStreamsPerConnection),
		grpc.MaxHeaderListSize(MaxHeaders),
		grpc.ConnectionTimeout(a.cfg.JoinTimeout+time.Second), // the listener times out first, and counts
		grpc.StaticStreamWindowSize(agentStreamWindow),
		grpc.StaticConnWindowSize(agentStreamWindow),
		grpc.WaitForHandlers(true),
		grpc.StreamInterceptor(GuardStreams(a.log, a.cfg.Counters)),
		grpc.UnknownServiceHandler(unknownMethod),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: pingInterval, Timeout: pingTimeout, MaxConnectionIdle: time.Minute,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	)
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "AgentService", // without a protobuf package
		HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{
			{StreamName: "Connect", Handler: s.handle, ServerStreams: true, ClientStreams: true},
		},
	}, s)
	return server
}

// links returns all live streams.
func (a *Agents) links() []*agentLink {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all []*agentLink
	for _, ls := range a.nodes {
		all = append(all, ls...)
	}
	return all
}

// drain waits until no conn is left, at most for the grace period.
func (a *Agents) drain(ctx context.Context) {
	late := time.After(tunnel.GraceLeft(ctx, a.grace))
	for {
		if !slices.ContainsFunc(a.links(), func(l *agentLink) bool { return l.session.Conns.Load() > 0 }) {
			return
		}
		select {
		case <-late:
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// replicas returns how many replicas an agent should join, for servercount.
func (a *Agents) replicas() int {
	if a.cfg.Replicas == nil {
		return 1
	}
	return 1 + a.cfg.Replicas()
}

// settle attaches the newest stream of the node of l, if l is still live.
func (a *Agents) settle(l *agentLink) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if all := a.nodes[l.session.Node]; slices.Contains(all, l) {
		a.attachLocked(newest(all))
	}
}

// newest returns the newest stream that is not leaving; if all are leaving, the newest one.
func newest(all []*agentLink) *agentLink {
	for _, l := range slices.Backward(all) {
		if !l.session.Leaving.Load() {
			return l
		}
	}
	return all[len(all)-1]
}

// attachLocked attaches l, unless it is attached. The stream that was attached before continues to serve its conns. If
// an edge is attached, attachLocked ends l instead. The caller holds mu.
func (a *Agents) attachLocked(l *agentLink) {
	if a.dir.Lookup(l.session.Node) != l.session && !a.dir.AttachUnless(l.session, isEdge) {
		l.end(errEdgeJoined(l.session.Node))
	}
}

// isEdge reports whether s is the session of an edge, and not that of an agent.
func isEdge(s *tunnel.Session) bool { return !s.Agent }

func errEdgeJoined(node tunnel.NodeName) error {
	return status.Errorf(codes.AlreadyExists, "an edge has joined as node %s: stop it, or this agent", node)
}

// register adds a new stream, and attaches it at once if it is the first of its node.
func (a *Agents) register(l *agentLink) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := l.session.Node
	switch other := a.dir.Lookup(n); {
	case a.stopping:
		return status.Error(codes.Unavailable, "this replica is stopping")
	case !a.mayJoinLocked(n):
		a.cfg.Counters.Limited(tunnel.LimitJoins)
		const text = "limit joins: node %s has joined more than %d times in a few seconds"
		return status.Errorf(codes.ResourceExhausted, text, n, joinBurst)
	case len(a.nodes[n]) >= maxStreamsPerNode:
		a.cfg.Counters.Limited(tunnel.LimitAgentStreams)
		const text = "limit agentstreams: node %s has %d streams here"
		return status.Errorf(codes.ResourceExhausted, text, n, maxStreamsPerNode)
	case other != nil && !isEdge(other):
		time.AfterFunc(settleTime, l.guarded(func() { a.settle(l) }))
	case !a.dir.AttachUnless(l.session, isEdge):
		return errEdgeJoined(n)
	}
	a.nodes[n] = append(a.nodes[n], l)
	return nil
}

// mayJoinLocked counts a join of a node. It returns false if the node has joined too often. The caller holds mu.
func (a *Agents) mayJoinLocked(n tunnel.NodeName) bool {
	if len(a.joins) > 2*len(a.nodes)+maxStreamsPerNode {
		maps.DeleteFunc(a.joins, func(_ tunnel.NodeName, l *rate.Limiter) bool { return l.Tokens() >= joinBurst })
	}
	if a.joins[n] == nil {
		a.joins[n] = rate.NewLimiter(joinRate, joinBurst)
	}
	return a.joins[n].Allow()
}

// unregister removes a stream. If the stream was attached, another stream of the node takes over, see newest. If
// an edge is attached, unregister ends that stream instead.
func (a *Agents) unregister(l *agentLink) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := l.session.Node
	rest := slices.DeleteFunc(a.nodes[n], func(o *agentLink) bool { return o == l })
	a.nodes[n] = rest
	if len(rest) == 0 {
		delete(a.nodes, n)
	}
	detached := a.dir.Detach(l.session)
	if now := a.dir.Lookup(n); len(rest) > 0 && (detached || now != nil && isEdge(now)) {
		a.attachLocked(newest(rest))
	}
}

// drains handles the DRAIN of an agent. It marks l as leaving, and attaches the node's newest stream that is not
// leaving.
func (a *Agents) drains(l *agentLink) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !l.session.Leaving.Swap(true) {
		a.log.Info("agent drains", "node", l.session.Node, "session", l.session.ID)
	}
	if all := a.nodes[l.session.Node]; len(all) > 0 {
		if stays := newest(all); !stays.session.Leaving.Load() {
			a.attachLocked(stays)
		}
	}
}

// whyLost returns why the stream of an agent has ended, for an error of RecvMsg.
func (a *Agents) whyLost(err error) error {
	switch status.Code(err) {
	case codes.ResourceExhausted: // gRPC has rejected a packet that is too long
		a.cfg.Counters.Limited(tunnel.LimitMessage)
	case codes.Internal: // the packet cannot be decoded
	default:
		return errors.New("the agent has gone")
	}
	return fmt.Errorf("the agent has sent what no agent sends: %w", err)
}

// agentService handles the streams of the gRPC server.
type agentService struct {
	agents  *Agents
	working sync.WaitGroup // sendLoops and receiveLoops: gRPC may block them until the stream's handler has returned
}

// handle handles one stream. The session ends before handle returns, or because it returns. A
// connection allows one attempt to join, and thus one session.
func (s *agentService) handle(_ any, stream grpc.ServerStream) error {
	a := s.agents
	ctx := stream.Context()
	t, err := agentTransportOf(ctx)
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	if t.attempted.Swap(true) { // one attempt a connection, whatever its credential
		return errUnauthenticated()
	}
	defer t.closeSoon()
	l, grant, err := a.admit(ctx, stream, t)
	if err != nil {
		return err
	}
	if err = a.register(l); err != nil {
		a.refused(l.session.Remote, string(grant.Node), err)
		return err
	}
	defer a.unregister(l)
	t.conn.Met()
	return s.serve(stream, l, grant)
}

// admit authenticates the agent of a new stream. It returns the server's end of the stream, which is
// not yet registered. admit logs and counts a refusal; its error is then the answer to the agent.
func (a *Agents) admit(
	ctx context.Context, stream grpc.ServerStream, t *agentTransport,
) (*agentLink, auth.Grant, error) {
	remote := t.conn.RemoteAddr().String()
	md, _ := metadata.FromIncomingContext(ctx)
	grant, answer, err := a.authenticate(ctx, t, md)
	if err != nil {
		a.refused(remote, strings.Join(md.Get("agentid"), ","), err)
		return nil, auth.Grant{}, answer
	}
	reach, err := reachOf(md)
	if err != nil {
		a.refused(remote, string(grant.Node), err)
		return nil, auth.Grant{}, err
	}
	l := &agentLink{agents: a, mux: newMux(stream, false, a.cfg.Counters, a.log), dials: make(map[int64]chan dialResult)}
	l.session = &tunnel.Session{
		ID: uuid.NewString(), Node: grant.Node, Remote: remote, Since: time.Now(), Reach: reach,
		Link: l, Dialer: l, Agent: true,
	}
	l.queue.Name, l.queue.Counters = "node "+string(grant.Node), a.cfg.Counters
	l.queue.Conns, l.queue.Dials = a.cfg.Conns, a.cfg.Dials
	return l, grant, nil
}

// clockStep is how often the expiry of a credential is compared with the clock. One timer until the expiry is not
// enough, because the clock may be set while the session lives.
const clockStep = time.Minute

// awaitEnd returns when the session has ended. It ends the session when the agent has gone, or when the credential is
// no longer valid.
func (l *agentLink) awaitEnd(stream context.Context, grant auth.Grant) {
	for {
		var look <-chan time.Time // nil: the credential does not expire
		if !grant.Expires.IsZero() {
			look = time.After(min(time.Until(grant.Expires), clockStep))
		}
		select {
		case <-l.ended:
			return
		case <-stream.Done():
			l.streamEnded(errors.New("the agent has gone"))
			return
		case <-grant.Revoked:
			l.end(errUnauthenticated())
			return
		case <-look:
			if !time.Now().Before(grant.Expires) {
				l.end(errUnauthenticated())
				return
			}
		}
	}
}

// serve serves the session of a registered stream. The session ends with its stream, or when the
// credential is no longer valid.
func (s *agentService) serve(stream grpc.ServerStream, l *agentLink, grant auth.Grant) error {
	a := s.agents
	log := a.log.With("node", grant.Node, "session", l.session.ID)
	// The agent waits for the header. No packet precedes the header, since sendLoop has not
	// started.
	header := metadata.Pairs("serverid", a.id, "servercount", strconv.Itoa(a.replicas()))
	if err := stream.SendHeader(header); err != nil {
		l.end(err)
		return err
	}
	a.cfg.Counters.Sessions.Add(1)
	log.Info("agent joined", "remote", l.session.Remote, "by", grant.By)
	event := tunnel.Event{
		Kind: tunnel.EventJoin, Result: tunnel.ResultOK, Node: grant.Node, Remote: l.session.Remote, Session: l.session.ID,
		By: grant.By,
	}
	a.cfg.Audit.Record(event)
	s.working.Go(l.guarded(l.sendLoop))
	s.working.Go(l.guarded(l.receiveLoop))
	l.awaitEnd(stream.Context(), grant)
	l.mu.Lock()
	err := l.err
	l.mu.Unlock()
	log.Info("agent left", "err", err)
	event.Kind, event.Seconds = tunnel.EventLeave, time.Since(l.session.Since).Seconds()
	event.Err = tunnel.TextOf(err)
	a.cfg.Audit.Record(event)
	return err
}

// unknownMethod answers calls of unknown methods. Such a call counts as its connection's one attempt to join.
func unknownMethod(_ any, stream grpc.ServerStream) error {
	if t, err := agentTransportOf(stream.Context()); err == nil && !t.attempted.Swap(true) {
		t.closeSoon()
	}
	return status.Error(codes.Unimplemented, "there is no such method here")
}

// errUnauthenticated is the one answer to every peer that fails to authenticate. It gives no reason, so that the
// answer does not help a peer that guesses credentials.
func errUnauthenticated() error {
	return status.Error(codes.Unauthenticated, auth.ErrUnauthenticated.Error())
}

// authenticate returns the grant for the credential in a stream's metadata. The agent id must be the
// node of the grant. On failure, answer is for the agent, and err is the reason for the log. All
// other metadata is read only after authenticate has succeeded.
func (a *Agents) authenticate(
	ctx context.Context, t *agentTransport, md metadata.MD,
) (_ auth.Grant, answer, err error) {
	refuse := func(format string, args ...any) (auth.Grant, error, error) {
		return auth.Grant{}, errUnauthenticated(), fmt.Errorf(format, args...)
	}
	ids, bearers := md.Get("agentid"), md.Get("authorization")
	if len(ids) != 1 || ids[0] == "" {
		return refuse("an agent must name its node in one agentid")
	}
	c := auth.Credential{Node: ids[0], Chain: t.State.PeerCertificates, From: ports.AddrOf(t.conn.RemoteAddr())}
	if len(bearers) > 0 {
		token, ok := strings.CutPrefix(bearers[0], "Bearer ")
		if token = strings.TrimSpace(token); !ok || token == "" || len(bearers) > 1 {
			return refuse("the metadata authorization must be one Bearer TOKEN")
		}
		c.Token, c.Chain = auth.Secret(token), nil
	}
	if c.Token == "" && len(c.Chain) == 0 {
		return refuse("the agent shows neither a token nor a client certificate")
	}
	grant, err := a.cfg.Auth.Authenticate(ctx, c)
	switch {
	case errors.Is(err, auth.ErrUnauthenticated):
		return refuse("%w", err)
	case err != nil:
		return auth.Grant{}, status.Error(codes.Unavailable, "the cloud cannot check who joins now"), err
	case string(grant.Node) != c.Node:
		return refuse("the proof is that of node %s", grant.Node)
	}
	return grant, nil, nil
}

// reachOf checks the identifiers in the metadata of an agent, and returns them.
func reachOf(md metadata.MD) (reach string, err error) {
	all := md.Get("agentidentifiers")
	if len(all) > 1 {
		return "", status.Error(codes.InvalidArgument, "agentidentifiers occurs twice")
	}
	reach = strings.Join(all, "")
	if !utf8.ValidString(reach) { // gRPC accepts any byte in metadata
		return "", status.Error(codes.InvalidArgument, "agentidentifiers is not UTF-8")
	}
	if len(reach) > maxReach {
		return "", status.Errorf(codes.InvalidArgument, "agentidentifiers: %d bytes are allowed", maxReach)
	}
	if _, err = ParseIdentifiers(reach); err != nil {
		return "", status.Errorf(codes.InvalidArgument, "agentidentifiers: %v", err)
	}
	return reach, nil
}

// flooded counts and logs a connection that is closed because of a limit on streams or frames.
func (a *Agents) flooded(remote string, limit tunnel.Limit) {
	a.cfg.Counters.Limited(limit)
	if skipped, ok := a.refusals.Allow(); ok {
		a.log.Warn("the connection of an agent is closed: a limit is reached, see docs/limits.md",
			"limit", limit, "remote", remote, "skipped", skipped)
	}
}

// refused counts and logs a refusal. The log is limited, since strangers cause refusals at any rate.
func (a *Agents) refused(remote, node string, err error) {
	a.cfg.Counters.JoinsRefused.Add(1)
	if skipped, ok := a.refusals.Allow(); ok {
		if len(node) > 253 {
			node = node[:253]
		}
		why := err.Error() // it may quote a certificate of the stranger
		a.log.Warn("agent refused", "remote", remote, "node", node, "err", tunnel.Printable(why[:min(len(why), 512)]),
			"skipped", skipped)
	}
}
