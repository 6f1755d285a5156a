package stream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"tunnel/pkg/auth"
	pb "tunnel/pkg/stream/tunnelv1"
	"tunnel/pkg/tunnel"
)

// ClientConfig is what a [Client] needs.
type ClientConfig struct {
	Address  string                      // of the cloud, host:port
	TLS      *tls.Config                 // the CA, and the name to verify (ServerName)
	Node     tunnel.NodeName             // this node
	Token    func() (auth.Secret, error) // asked at every join, so that a file may change
	Counters *tunnel.Counters            // nil: nobody looks
	Log      *slog.Logger
	Grace    time.Duration // how long conns may go on when the client stops; 0: tunnel.GracePeriod
	Software string        // what the cloud is told runs here
	All      bool          // keep a session with every replica behind Address, not with one

	// Dial connects to Address; nil: a net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)

	replica *asReplica // a replica joins another one; nil: an edge joins the cloud
}

// asReplica is what is different when a replica joins another one.
type asReplica struct {
	id    string
	hello *pb.Replica
	have  func() []string // instances of the replicas that need not be joined once more
	// started is told of each session. It may refuse it.
	started func(*edgeSession) error
	hint    func(error) error
}

// Client keeps a session with the cloud, or one with each of its replicas, and makes a
// new one whenever one is lost. It is the module "stream" of the edge.
type Client struct {
	// Set once.
	cfg      ClientConfig
	router   *tunnel.Router
	blocks   *blocks
	log      *slog.Logger
	instance string // of this process

	mu       sync.Mutex // guards the following
	links    []*link    // live sessions, the newest last
	replicas []string   // instances that the cloud has told; none: it is one replica, or has not said
	ended    []ending   // that Run has not looked at
	err      error      // why there is no session
	changed  chan struct{}

	hurry chan struct{} // ends a pause; capacity 1, so that nobody waits to send
}

// link is a session and what has to be undone after it.
type link struct {
	*edgeSession
	sctx   context.Context // outlives Run's by the grace period
	cancel func()
	hangUp func()
	moving bool // the replica stops: another session takes over. Guarded by Client.mu
}

// ending says how a session ended.
type ending struct {
	lived time.Duration
	err   error
}

// NewClient makes a client that gives messages to the routes of mods, and to its own.
func NewClient(cfg ClientConfig, mods ...tunnel.Module) (*Client, error) {
	if cfg.Grace == 0 {
		cfg.Grace = tunnel.GracePeriod
	}
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{}).DialContext
	}
	if cfg.TLS != nil && cfg.TLS.ClientSessionCache == nil {
		// Coming back to a cloud that still runs costs neither end a signature (RFC 8446
		// section 2.2).
		cfg.TLS = cfg.TLS.Clone()
		cfg.TLS.ClientSessionCache = tls.NewLRUClientSessionCache(0)
	}
	c := &Client{cfg: cfg, blocks: new(blocks), log: cfg.Log.With("module", category, "node", cfg.Node), instance: uuid.NewString()}
	if cfg.replica != nil {
		c.log = cfg.Log.With("module", category, "remote", cfg.Address)
	}
	c.err, c.changed, c.hurry = errNotYet, make(chan struct{}), make(chan struct{}, 1)
	router, err := tunnel.NewRouter(append([]tunnel.Module{c}, mods...)...)
	if err != nil {
		return nil, err
	}
	c.router = router
	return c, nil
}

// Name implements tunnel.Module.
func (c *Client) Name() string { return category }

// Routes implements tunnel.Module: what the cloud may send besides opens, which go
// to the module that dials.
func (c *Client) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		typeHeartbeat: edgeHandler((*edgeSession).heartbeat),
		typeCancel:    edgeHandler((*edgeSession).cancelTopic),
		typeDrain:     edgeHandler((*edgeSession).cloudLeaves),
		typeReplicas:  edgeHandler((*edgeSession).cloudReplicas),
	}
}

func edgeHandler(f func(*edgeSession, *tunnel.Message) error) tunnel.Handler {
	return func(_ context.Context, from *tunnel.Session, m *tunnel.Message) error {
		return f(from.Link.(*edgeSession), m)
	}
}

// Router returns the routes of this end, for the start-up line.
func (c *Client) Router() *tunnel.Router { return c.router }

// Ready returns nil while there is a session.
func (c *Client) Ready() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.links) == 0 {
		return fmt.Errorf("no session with %s: %w", c.cfg.Address, c.err)
	}
	return nil
}

// Session returns the newest live session, or nil.
func (c *Client) Session() *tunnel.Session {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.links) == 0 {
		return nil
	}
	return c.links[len(c.links)-1].pub
}

// Run implements tunnel.Module: it keeps its sessions until ctx is done. A lost session
// or a refusal never ends it.
func (c *Client) Run(ctx context.Context) error {
	var serving sync.WaitGroup
	defer serving.Wait()
	var wait backoff
	for {
		err := c.wanted(ctx, &wait)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			var l *link
			if l, err = c.open(ctx); err == nil {
				serving.Go(func() { c.serve(ctx, l) })
				continue
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		d := wait.next(err)
		if isSecond(err) || errors.Is(err, errTwice) || errors.Is(err, errSelf) {
			c.log.Debug("this address leads to a replica that has a session already; trying again", "dur", d.Round(time.Millisecond))
		} else {
			c.log.Warn("no session; trying again", "err", err, "dur", d.Round(time.Millisecond))
		}
		if c.pause(ctx, d) {
			wait.reset()
		}
	}
}

// errNotYet is why there is no session before the first attempt.
var errNotYet = errors.New("has not connected yet")

// hurryUp ends a pause: there is reason to believe that the next attempt works.
func (c *Client) hurryUp() {
	select {
	case c.hurry <- struct{}{}:
	default:
	}
}

// pause waits for d; less when the last session is lost meanwhile, since a session that
// was to be one more is then the first, and when it is told to hurry, which it reports.
func (c *Client) pause(ctx context.Context, d time.Duration) (hurried bool) {
	late := time.After(d)
	for had := false; ; {
		c.mu.Lock()
		has, changed := len(c.links) > 0, c.changed
		c.mu.Unlock()
		if had && !has {
			return false
		}
		had = has
		select {
		case <-changed:
		case <-c.hurry:
			return true
		case <-late:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// wanted waits until a session is missing. It returns why the last one was lost, nil if
// it was not, so that the next is to be opened at once.
func (c *Client) wanted(ctx context.Context, wait *backoff) error {
	for {
		c.mu.Lock()
		missing, ended, changed := c.missingLocked(), c.ended, c.changed
		c.ended = nil
		c.mu.Unlock()
		for _, e := range ended {
			if e.lived > backoffMax {
				wait.reset()
			}
		}
		switch {
		case missing && len(ended) > 0:
			return ended[len(ended)-1].err
		case missing:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// missingLocked reports whether there should be another session. The caller holds mu.
func (c *Client) missingLocked() bool {
	var with []string
	for _, l := range c.links {
		if !l.moving {
			with = append(with, l.remoteInstance)
		}
	}
	if len(with) == 0 {
		return true
	}
	return c.cfg.All && slices.ContainsFunc(c.replicas, func(r string) bool { return !slices.Contains(with, r) })
}

// noteLocked wakes who waits for a change. The caller holds mu.
func (c *Client) noteLocked() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// open connects and joins.
func (c *Client) open(ctx context.Context) (l *link, err error) {
	defer func() {
		if err != nil {
			err = c.explain(err)
			c.mu.Lock()
			c.err = err
			c.mu.Unlock()
		}
	}()
	credential, err := c.credential()
	if err != nil {
		return nil, err
	}
	cc, hangUp, err := c.connect(ctx)
	if err != nil {
		return nil, err
	}
	// The session outlives ctx by the grace period.
	sctx, cancel := tunnel.Grace(ctx, c.cfg.Grace+time.Second)
	fail := func(err error) (*link, error) {
		cancel()
		hangUp()
		return nil, err
	}
	s, err := c.join(ctx, sctx, cc, credential)
	if err != nil {
		return fail(err)
	}
	if r := c.cfg.replica; r != nil {
		if err = r.started(s); err != nil {
			s.abandon(err)
			return fail(err)
		}
	}
	l = &link{edgeSession: s, sctx: sctx, cancel: cancel, hangUp: hangUp}
	c.mu.Lock()
	c.links = append(c.links, l)
	c.replicas = nil // those that there are now are told next; none, where there are no others any more
	c.noteLocked()
	c.mu.Unlock()
	s.log.Info("session started", "remote", s.pub.Remote)
	return l, nil
}

// serve serves a session until it ends.
func (c *Client) serve(ctx context.Context, l *link) {
	defer l.cancel()
	err := c.explain(l.serveUntil(ctx, l.sctx))
	c.mu.Lock()
	c.links = slices.DeleteFunc(c.links, func(other *link) bool { return other == l })
	c.err = err
	c.mu.Unlock()
	l.cancel()
	l.hangUp() // frees whatever waits for the network
	l.wg.Wait()
	lived := time.Since(l.pub.Since)
	l.log.Info("session ended", "err", err, "dur", lived.Round(time.Millisecond))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = append(c.ended, ending{lived, err})
	c.noteLocked()
}

// moves notes that the replica of s is about to stop, and returns when another session
// has taken over or s has ended.
func (c *Client) moves(s *edgeSession) {
	for {
		c.mu.Lock()
		others := false
		for _, l := range c.links {
			if l.edgeSession == s {
				if !l.moving {
					l.moving = true
					c.noteLocked()
				}
				continue
			}
			others = others || !l.moving
		}
		changed := c.changed
		c.mu.Unlock()
		if others {
			return
		}
		select {
		case <-changed:
		case <-s.done:
			return
		}
	}
}

// have returns the instances of the replicas that there is a session with.
func (c *Client) have() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []string
	for _, l := range c.links {
		if l.remoteInstance != "" {
			all = append(all, l.remoteInstance)
		}
	}
	return all
}

// know takes what the cloud says about its replicas.
func (c *Client) know(instances []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	slices.Sort(instances)
	if !slices.Equal(instances, c.replicas) && c.cfg.All {
		c.hurryUp() // one of them may be new
	}
	c.replicas = instances
	c.noteLocked()
}

// isSecond reports whether a replica has refused a second session of this process.
func isSecond(err error) bool { return status.Code(err) == codes.AlreadyExists }

// connect makes the one TCP connection of a session and the ClientConn around it.
// The ClientConn never connects again: a second connection could reach another
// replica, while the session lives on the first. hangUp closes both; gRPC by itself
// closes only a connection that it has asked for, which it does at the first call.
func (c *Client) connect(ctx context.Context) (cc *grpc.ClientConn, hangUp func(), err error) {
	dctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	raw, err := c.cfg.Dial(dctx, "tcp", c.cfg.Address)
	if err != nil {
		return nil, nil, fmt.Errorf("dialing the cloud: %w", err)
	}
	var once sync.Once
	dial := func(context.Context, string) (conn net.Conn, err error) {
		err = errors.New("the session's connection is gone")
		once.Do(func() { conn, err = raw, nil })
		return conn, err
	}
	opts := append(dialOptions(),
		grpc.WithContextDialer(dial),
		grpc.WithTransportCredentials(credentials.NewTLS(c.cfg.TLS)),
		grpc.WithUserAgent(c.cfg.Software),
	)
	cc, err = grpc.NewClient("passthrough:///"+c.cfg.Address, opts...)
	if err != nil {
		raw.Close()
		return nil, nil, err
	}
	return cc, func() {
		cc.Close()
		raw.Close()
	}, nil
}

// join opens the control stream and exchanges hellos, before ctx is done and within
// the join timeout. The stream lives until sctx is done.
func (c *Client) join(ctx, sctx context.Context, cc *grpc.ClientConn, credential credentials.PerRPCCredentials) (*edgeSession, error) {
	sctx, abandon := context.WithCancelCause(sctx)
	late := time.AfterFunc(joinTimeout, func() { abandon(errJoinTimeout) })
	stopped := context.AfterFunc(ctx, func() { abandon(context.Canceled) })
	fail := func(err error) (*edgeSession, error) {
		late.Stop()
		stopped()
		if cause := context.Cause(sctx); cause != nil {
			err = cause
		}
		abandon(err)
		if c.cfg.replica != nil {
			return nil, fmt.Errorf("joining as a replica: %w", err)
		}
		return nil, fmt.Errorf("joining as node %s: %w", c.cfg.Node, err)
	}
	client := pb.NewStreamClient(cc)
	stream, err := client.TunnelStreaming(sctx, grpc.PerRPCCredentials(credential))
	if err != nil {
		return fail(err)
	}
	s := &edgeSession{client: client, abandon: abandon, owner: c}
	s.pub = &tunnel.Session{Node: c.cfg.Node, Remote: c.cfg.Address, Link: s}
	s.router, s.counters, s.blocks = c.router, c.cfg.Counters, c.blocks
	s.stream, s.unknown, s.hangUp = stream, s.nobody, stream.CloseSend
	s.init()
	hello := &pb.Hello{Version: Version, Software: c.cfg.Software, Instance: c.instance, All: c.cfg.All, Have: c.have()}
	if r := c.cfg.replica; r != nil {
		hello.Replica, hello.Have = r.hello, r.have()
	}
	err = s.write(message(typeHello, "", hello))
	if err != nil && !errors.Is(err, io.EOF) { // io.EOF says that Recv knows the reason
		return fail(err)
	}
	hello, err = receiveHello(stream)
	if err != nil {
		return fail(err)
	}
	if hello.GetVersion() != Version {
		return fail(status.Errorf(codes.FailedPrecondition,
			"the cloud speaks version %d of the protocol and this edge version %d: install the release of the cloud (%s) here",
			hello.GetVersion(), Version, text(hello.GetSoftware())))
	}
	if !late.Stop() {
		return fail(errJoinTimeout)
	}
	if !stopped() {
		return fail(context.Canceled)
	}
	s.remoteInstance = hello.GetInstance()
	s.pub.ID, s.pub.Since = text(hello.GetSession()), time.Now()
	// The cloud keeps to its limit. More than twice that here, since conns that have
	// ended at the cloud may still be ending here when their successors are asked for.
	s.maxConns = 2*int64(hello.GetMaxConns()) + 128
	if hello.GetMaxConns() == 0 || s.maxConns > maxConnsHere {
		s.maxConns = maxConnsHere
	}
	s.log = c.log.With("session", s.pub.ID)
	c.cfg.Counters.Sessions.Add(1)
	return s, nil
}

// maxConnsHere bounds what a cloud may have an edge, or another replica, do at once.
const maxConnsHere = 16 * DefaultMaxConns

// credential returns what proves who we are.
func (c *Client) credential() (credentials.PerRPCCredentials, error) {
	if r := c.cfg.replica; r != nil {
		return replicaID(r.id), nil // the proof is our certificate
	}
	token, err := c.cfg.Token()
	if err != nil {
		return nil, err
	}
	return accessToken(auth.EncodeToken(string(c.cfg.Node), token)), nil
}

// accessToken sends an OAuth2 access token with a call (RFC 6750 section 2.1). grpc's
// own credentials/oauth does the same and brings Google's client libraries along.
type accessToken auth.Secret

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (t accessToken) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + auth.Secret(t).Reveal()}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (accessToken) RequireTransportSecurity() bool { return true }

var errJoinTimeout = fmt.Errorf("the cloud did not answer within %s: is that address the tunnel's gRPC port?", joinTimeout)

// explain adds to an error what a person can do about it.
func (c *Client) explain(err error) error {
	if r := c.cfg.replica; r != nil {
		return r.hint(err)
	}
	return explain(err)
}

func explain(err error) error {
	var hint string
	switch msg := fmt.Sprint(err); {
	case err == nil:
		return nil
	case status.Code(err) == codes.Unauthenticated:
		hint = "check that this node's line in the cloud's token file matches the token here"
	case status.Code(err) == codes.Aborted:
		hint = "is another edge running with this node's name and token?"
	case strings.Contains(msg, "certificate signed by unknown authority"):
		hint = "cert in [mode.edge.stream.client] must be the CA that signed the cloud's certificate"
	case strings.Contains(msg, "x509: certificate is"), strings.Contains(msg, "x509: cannot validate certificate"):
		hint = "dns in [mode.edge.stream.client] must be a name in the cloud's certificate"
	case strings.Contains(msg, "certificate has expired or is not yet valid"):
		hint = "check this machine's clock, then the cloud's certificate"
	case strings.Contains(msg, "first record does not look like a TLS handshake"):
		hint = "servername in [mode.edge.stream.client] must be the cloud's grpcport, which speaks TLS; something else answers there"
	case strings.Contains(msg, "connection refused"):
		hint = "is the cloud running, and is servername in [mode.edge.stream.client] its address?"
	case strings.Contains(msg, "no such host"):
		hint = "check servername in [mode.edge.stream.client]"
	default:
		return err
	}
	return fmt.Errorf("%w (%s)", err, hint)
}
