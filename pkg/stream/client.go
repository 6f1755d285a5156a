package stream

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel/pkg/auth"
	"tunnel/pkg/conn"
	pb "tunnel/pkg/stream/tunnelv1"
	"tunnel/pkg/tunnel"
)

// ClientConfig is what a [Client] needs.
type ClientConfig struct {
	Address string // of the cloud, host:port
	// TLS returns the CA, the name to verify (ServerName), and the certificate to show if
	// there is one. It is asked at every connection, so that files may change. Its
	// GetClientCertificate is asked before the handshake, without what the cloud says.
	TLS  func() *tls.Config
	Node tunnel.NodeName // this node
	// Token is asked at every join and once a minute, so that a file may change; nil: the
	// proof is the certificate.
	Token    func() (auth.Secret, error)
	Counters *tunnel.Counters // nil: nobody looks
	Log      *slog.Logger
	Grace    time.Duration // how long conns may go on when the client stops; 0: tunnel.GracePeriod
	Software string        // what the cloud is told runs here
	All      bool          // keep a session with every replica behind Address, not with one
	Reach    string        // what the cloud is told that this edge reaches (Konnectivity's identifiers)
	Limits   EdgeLimits
	// Connections is how many connections a session has at most, its own included: the others
	// are data connections, which it opens when the cloud asks for them. 0: its own alone.
	Connections int

	// Dial connects to Address; nil: a net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)

	replica *asReplica    // a replica joins another one; nil: an edge joins the cloud
	farTrip time.Duration // not 0 in tests alone
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
	blocks   *conn.Blocks
	log      *slog.Logger
	instance string // of this process

	tickets tickets
	queue   tunnel.Queue // of opens: what cfg.Limits bounds, of all sessions
	denials tunnel.Limiter

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
	shown  *handshake
	token  [sha256.Size]byte // the sum of the one that it was opened with
	moving bool              // the replica stops: another session takes over. Guarded by Client.mu
	told   bool              // of another token. Owned by followToken
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
	cfg.Connections = max(1, cfg.Connections)
	cfg.farTrip = cmp.Or(cfg.farTrip, farTrip)
	cfg.Limits = cfg.Limits.orDefault()
	if cfg.replica != nil {
		cfg.Limits = EdgeLimits{Conns: maxConnsHere} // each node has its own, where it is held
	}
	c := &Client{cfg: cfg, blocks: new(conn.Blocks), log: cfg.Log.With("module", category, "node", cfg.Node), instance: uuid.NewString()}
	if cfg.replica != nil {
		c.log = cfg.Log.With("module", category, "remote", cfg.Address)
	}
	c.queue.Name, c.queue.Conns, c.queue.Dials, c.queue.Counters =
		"the edge of node "+string(cfg.Node), cfg.Limits.Conns, cfg.Limits.Dials, cfg.Counters
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

		typeConnection: edgeHandler((*edgeSession).moreConnections),
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
	serving.Go(func() { c.followToken(ctx) })
	var wait backoff
	for {
		err := c.wanted(ctx, &wait)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			var l *link
			if err = guard(c.log, c.cfg.Counters, "there is no session", func() error { l, err = c.open(ctx); return err }); err == nil {
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
	var shown *handshake
	defer func() {
		if err != nil {
			err = c.explain(err, shown)
			c.mu.Lock()
			c.err = err
			c.mu.Unlock()
		}
	}()
	conf, shown, err := c.tlsConfig()
	if err != nil {
		return nil, err
	}
	credential, token, err := c.credential(shown)
	if err != nil {
		return nil, err
	}
	cc, own, hangUp, err := connect(ctx, c.cfg.Address, conf, shown, c.cfg.Software, c.cfg.Dial, c.cfg.farTrip)
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
	s, err := c.join(ctx, sctx, cc, own, credential)
	if err != nil {
		return fail(err)
	}
	if r := c.cfg.replica; r != nil {
		if err = r.started(s); err != nil {
			s.abandon(err)
			return fail(err)
		}
	}
	l = &link{edgeSession: s, sctx: sctx, cancel: cancel, hangUp: hangUp, shown: shown, token: token}
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
	err := l.guard(func() error { return l.serveUntil(ctx, l.sctx) })
	l.Close(err) // it has ended, unless there was a panic
	err = c.explain(err, l.shown)
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
