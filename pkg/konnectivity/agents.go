package konnectivity

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tunnel/pkg/auth"
	ports "tunnel/pkg/listen"
	"tunnel/pkg/tunnel"
)

// AgentsConfig is what [Agents] need.
type AgentsConfig struct {
	Listen   string             // host:port
	TLS      *tls.Config        // our certificate
	Auth     auth.Authenticator // who may join as which node
	Replicas func() int         // how many other replicas there are; nil: none
	Conns    int                // conns of a node at once; 0: no bound
	Dials    int                // dials of a node that it has not answered; 0: no bound

	Joining, JoiningPerAddress int           // connections without a session, in all and of one source
	JoinTimeout                time.Duration // how long one may go without

	Counters *tunnel.Counters
	Log      *slog.Logger
}

// Agents is the cloud's module that stock konnectivity agents join (AgentService of
// Konnectivity). An agent is a session of the node that its credential proves, as an edge
// is; its agent id must be that node's name.
type Agents struct {
	// Set once.
	cfg   AgentsConfig
	id    string // of this replica
	dir   *tunnel.Directory
	log   *slog.Logger
	grace time.Duration

	refusals tunnel.Limiter

	mu       sync.Mutex // guards the following
	addr     net.Addr   // nil: not listening
	stopping bool
	nodes    map[tunnel.NodeName][]*agentLink // live streams, in the order in which they came
}

var _ tunnel.Module = (*Agents)(nil)

// Bounds of agents beside those of the configuration.
const (
	agentStreams    = 4         // of one connection; an agent has one
	mostReach       = 4 << 10   // bytes of identifiers
	mostAgentPacket = 256 << 10 // a stock agent's data has 4 KiB, ours 32
	agentWindow     = 1 << 20
	// The server pings an agent that has sent nothing for agentPing. A link may be cut for 10 s, and
	// the answer still comes within agentAnswer; one that is lost is noticed within the 15 s of both.
	agentPing   = 3 * time.Second
	agentAnswer = 12 * time.Second
	// settled is how long a second stream of a node must last before it counts: the stock
	// agent looks for other replicas in this way, and hangs up when it finds the same.
	settled = 2 * time.Second
	// agentLinks is how many streams a node may have. An agent has one; while it comes back
	// there may be some that we have not missed yet.
	agentLinks = 8
)

// NewAgents returns the module. Its sessions are put into dir.
func NewAgents(cfg AgentsConfig, dir *tunnel.Directory) *Agents {
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	return &Agents{
		cfg: cfg, id: uuid.NewString(), dir: dir, log: cfg.Log.With("module", agentsName), grace: tunnel.GracePeriod,
		refusals: tunnel.Limiter{Every: time.Second, Burst: 10}, nodes: make(map[tunnel.NodeName][]*agentLink),
	}
}

const agentsName = "agents"

// Name implements tunnel.Module.
func (a *Agents) Name() string { return agentsName }

// Routes implements tunnel.Module.
func (a *Agents) Routes() map[string]tunnel.Handler { return nil }

// Ready returns nil while agents can join.
func (a *Agents) Ready() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.addr == nil || a.stopping {
		return errors.New("not listening for agents")
	}
	return nil
}

// Run implements tunnel.Module: it listens until ctx is done. Then conns have the grace
// period to end.
func (a *Agents) Run(ctx context.Context) error {
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", a.cfg.Listen)
	if err != nil {
		return fmt.Errorf("listening for agents: %w (is another process on that port? see agentport in [mode.cloud.egress])", err)
	}
	a.mu.Lock()
	a.addr = ln.Addr()
	a.mu.Unlock()
	conf := a.cfg.TLS.Clone()
	conf.ClientAuth = tls.RequestClientCert // whose it is is looked at when somebody joins
	strangers := ports.NewListener(ports.Steady(ln, a.log), ports.ListenerConfig{
		Max: a.cfg.Joining, MaxPerSource: a.cfg.JoiningPerAddress, Timeout: a.cfg.JoinTimeout, Bytes: StrangerBytes,
		Counters: a.cfg.Counters, OverMax: tunnel.LimitJoining, OverMaxPerSource: tunnel.LimitJoiningPerAddress, TooLate: tunnel.LimitJoinTimeout,
	})
	s := &agentService{agents: a}
	server := grpc.NewServer(
		grpc.Creds(agentCreds{credentials.NewTLS(conf)}),
		grpc.ForceServerCodecV2(NewCodec()),
		grpc.MaxRecvMsgSize(mostAgentPacket),
		grpc.MaxConcurrentStreams(agentStreams),
		grpc.MaxHeaderListSize(MaxHeaders),
		grpc.ConnectionTimeout(a.cfg.JoinTimeout+time.Second), // the listener is first, and counts
		grpc.StaticStreamWindowSize(agentWindow),
		grpc.StaticConnWindowSize(agentWindow),
		grpc.WaitForHandlers(true),
		grpc.StreamInterceptor(GuardStreams(a.log, a.cfg.Counters)),
		grpc.UnknownServiceHandler(unknownMethod),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: agentPing, Timeout: agentAnswer, MaxConnectionIdle: time.Minute}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	)
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "AgentService", // in no package
		HandlerType: (*any)(nil),
		Streams:     []grpc.StreamDesc{{StreamName: "Connect", Handler: s.handle, ServerStreams: true, ClientStreams: true}},
	}, s)
	served := make(chan error, 1)
	go func() { served <- server.Serve(strangers) }()
	select {
	case err = <-served:
		err = fmt.Errorf("serving agents on %s: %w", ln.Addr(), err)
	case <-ctx.Done():
		a.mu.Lock()
		a.stopping = true
		a.mu.Unlock()
		strangers.Close() // no more agents; those that there are go on
		<-served          //nolint:errcheck // because of that
		a.drain()
	}
	for _, l := range a.links() {
		l.end(status.Error(codes.Unavailable, "this replica is stopping"))
	}
	server.Stop()
	s.working.Wait()
	return err
}

func (a *Agents) links() []*agentLink {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all []*agentLink
	for _, ls := range a.nodes {
		all = append(all, ls...)
	}
	return all
}

// drain waits until no conn is left, for the grace period at most.
func (a *Agents) drain() {
	late := time.After(a.grace)
	for {
		if !slices.ContainsFunc(a.links(), func(l *agentLink) bool { return l.pub.Conns.Load() > 0 }) {
			return
		}
		select {
		case <-late:
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// count returns how many replicas an agent should find.
func (a *Agents) count() int {
	if a.cfg.Replicas == nil {
		return 1
	}
	return 1 + a.cfg.Replicas()
}

// attach makes l the session of its node, if it still lives. An edge is never displaced.
func (a *Agents) attach(l *agentLink) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !slices.Contains(a.nodes[l.pub.Node], l) {
		return
	}
	a.attachLocked(l)
}

// attachLocked is attach. The caller holds mu. Another stream of the agent stays, for its
// conns.
func (a *Agents) attachLocked(l *agentLink) {
	if !a.dir.AttachUnless(l.pub, isEdge) {
		l.end(errTaken(l.pub.Node))
	}
}

func isEdge(s *tunnel.Session) bool {
	_, agent := s.Link.(*agentLink)
	return !agent
}

func errTaken(node tunnel.NodeName) error {
	return status.Errorf(codes.AlreadyExists, "an edge has joined as node %s: stop it, or this agent", node)
}

// join files a stream that has just come.
func (a *Agents) join(l *agentLink) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := l.pub.Node
	switch other := a.dir.Lookup(n); {
	case a.stopping:
		return status.Error(codes.Unavailable, "this replica is stopping")
	case len(a.nodes[n]) >= agentLinks:
		a.cfg.Counters.Limited(tunnel.LimitAgentStreams)
		return status.Errorf(codes.ResourceExhausted, "limit agentstreams: node %s has %d streams here", n, agentLinks)
	case other != nil && !isEdge(other):
		time.AfterFunc(settled, l.guarded(func() { a.attach(l) }))
	case !a.dir.AttachUnless(l.pub, isEdge):
		return errTaken(n)
	}
	a.nodes[n] = append(a.nodes[n], l)
	return nil
}

// leave undoes join. Another stream of the node takes over; behind an edge that has taken
// the place of this one it ends.
func (a *Agents) leave(l *agentLink) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := l.pub.Node
	rest := slices.DeleteFunc(a.nodes[n], func(o *agentLink) bool { return o == l })
	a.nodes[n] = rest
	if len(rest) == 0 {
		delete(a.nodes, n)
	}
	detached := a.dir.Detach(l.pub)
	if now := a.dir.Lookup(n); len(rest) > 0 && (detached || now != nil && isEdge(now)) {
		a.attachLocked(rest[len(rest)-1])
	}
}

// drains has another stream of the node take the new dials, if there is one.
func (a *Agents) drains(l *agentLink) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !l.pub.Leaving.Swap(true) {
		a.log.Info("agent drains", "node", l.pub.Node, "session", l.pub.ID)
	}
	all := a.nodes[l.pub.Node]
	for i := len(all) - 1; i >= 0; i-- {
		if !all[i].pub.Leaving.Load() {
			a.attachLocked(all[i])
			return
		}
	}
}

// agentService is the gRPC server's streams.
type agentService struct {
	agents  *Agents
	working sync.WaitGroup // what gRPC frees only when a stream's handler has returned
}

// handle is one stream. It returns when the session is over, or to make it so. A connection
// is good for one attempt to join, and for one session.
func (s *agentService) handle(_ any, stream grpc.ServerStream) error {
	a := s.agents
	ctx := stream.Context()
	t, err := agentTransportOf(ctx)
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	if t.tried.Swap(true) {
		return uniform()
	}
	defer t.closeSoon()
	remote := t.conn.RemoteAddr().String()
	md, _ := metadata.FromIncomingContext(ctx)
	grant, told, err := a.authenticate(ctx, t, md)
	if err != nil {
		a.refused(remote, strings.Join(md.Get("agentid"), ","), err)
		return told
	}
	reach, err := reachOf(md)
	if err != nil {
		a.refused(remote, string(grant.Node), err)
		return err
	}
	l := &agentLink{agents: a, mux: newMux(stream, false, a.cfg.Counters, a.log), dials: make(map[int64]chan answer)}
	l.pub = &tunnel.Session{ID: uuid.NewString(), Node: grant.Node, Remote: remote, Since: time.Now(), Reach: reach, Link: l}
	l.queue.Name, l.queue.Conns, l.queue.Dials, l.queue.Counters = "node "+string(grant.Node), a.cfg.Conns, a.cfg.Dials, a.cfg.Counters
	log := a.log.With("node", grant.Node, "session", l.pub.ID)
	if err = a.join(l); err != nil {
		a.refused(remote, string(grant.Node), err)
		return err
	}
	defer a.leave(l)
	t.conn.Met()
	// The header goes before any packet, since nothing sends yet: the agent waits for it.
	if err = stream.SendHeader(metadata.Pairs("serverid", a.id, "servercount", strconv.Itoa(a.count()))); err != nil {
		l.end(err)
		return err
	}
	a.cfg.Counters.Sessions.Add(1)
	log.Info("agent joined", "remote", remote, "by", grant.By)
	s.working.Go(l.guarded(l.sendLoop))
	s.working.Go(l.guarded(l.receiveLoop))
	var expired <-chan time.Time
	if !grant.Expires.IsZero() {
		t := time.NewTimer(time.Until(grant.Expires))
		defer t.Stop()
		expired = t.C
	}
	select {
	case <-l.ended:
	case <-ctx.Done():
		l.end(errors.New("the agent has gone"))
	case <-grant.Revoked:
		l.end(uniform())
	case <-expired:
		l.end(uniform())
	}
	l.mu.Lock()
	err = l.err
	l.mu.Unlock()
	log.Info("agent left", "err", err)
	return err
}

// unknownMethod answers calls of what is not served here. A stranger has had its attempt.
func unknownMethod(_ any, stream grpc.ServerStream) error {
	if t, err := agentTransportOf(stream.Context()); err == nil && !t.tried.Swap(true) {
		t.closeSoon()
	}
	return status.Error(codes.Unimplemented, "there is no such method here")
}

// uniform is what a stranger is told whatever was wrong.
func uniform() error { return status.Error(codes.Unauthenticated, auth.ErrUnauthenticated.Error()) }

// authenticate returns the node that a stream's credential proves, or what the agent is
// told, and why. The name that it gives itself must be that node's. Nothing else of what it
// says is looked at before.
func (a *Agents) authenticate(ctx context.Context, t *agentTransport, md metadata.MD) (_ auth.Grant, told, err error) {
	refuse := func(format string, args ...any) (auth.Grant, error, error) {
		return auth.Grant{}, uniform(), fmt.Errorf(format, args...)
	}
	ids, bearers := md.Get("agentid"), md.Get("authorization")
	if len(ids) != 1 || ids[0] == "" {
		return refuse("an agent says which node it is, in one agentid")
	}
	c := auth.Credential{Node: ids[0], Chain: t.State.PeerCertificates, From: ports.AddrOf(t.conn.RemoteAddr())}
	if len(bearers) > 0 {
		token, ok := strings.CutPrefix(bearers[0], "Bearer ")
		if token = strings.TrimSpace(token); !ok || token == "" || len(bearers) > 1 {
			return refuse("the authorization is not one Bearer TOKEN")
		}
		c.Token, c.Chain = auth.Secret(token), nil
	}
	if c.Token == "" && len(c.Chain) == 0 {
		return refuse("it shows neither a token nor a client certificate")
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

// reachOf returns what an agent says that it reaches.
func reachOf(md metadata.MD) (reach string, err error) {
	all := md.Get("agentidentifiers")
	if len(all) > 1 {
		return "", status.Error(codes.InvalidArgument, "agentidentifiers stands there twice")
	}
	reach = strings.Join(all, "")
	if !utf8.ValidString(reach) { // gRPC lets any byte through
		return "", status.Error(codes.InvalidArgument, "agentidentifiers is not UTF-8")
	}
	if len(reach) > mostReach {
		return "", status.Errorf(codes.InvalidArgument, "agentidentifiers: %d bytes are allowed", mostReach)
	}
	if _, err = ParseIdentifiers(reach); err != nil {
		return "", status.Errorf(codes.InvalidArgument, "agentidentifiers: %v", err)
	}
	return reach, nil
}

// refused counts and logs a refusal, whose number strangers decide on.
func (a *Agents) refused(remote, node string, err error) {
	a.cfg.Counters.JoinsRefused.Add(1)
	if skipped, ok := a.refusals.Allow(); ok {
		if len(node) > 253 {
			node = node[:253]
		}
		a.log.Warn("agent refused", "remote", remote, "node", node, "err", err, "skipped", skipped)
	}
}
