package stream

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/oauth2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/conn"
	"tunnel.example/tunnel/pkg/dial"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// ClientConfig configures a [Client].
type ClientConfig struct {
	Address string // address of the cloud, host:port; if Connect is set, only a name for logs and errors
	// TLS returns the CA, the name to verify (ServerName), and the client certificate if there is
	// one. The client calls TLS for every connection, so that files may change. The client calls
	// GetClientCertificate with an empty request, because it calls it before the handshake.
	TLS  func() *tls.Config
	Node tunnel.NodeName // this node
	// Token is the source of the node's token. The client asks Token at every join and once a
	// minute, so that a file may change. nil: the certificate proves the node.
	Token    oauth2.TokenSource
	Counters *tunnel.Counters // nil: the client makes counters that nothing shows
	Log      *slog.Logger
	Grace    time.Duration // how long conns may continue when the client stops; 0: tunnel.GracePeriod
	Software string        // name and version of this program, sent to the cloud
	All      bool          // keep a session with every replica behind Address, not with one only
	Reach    string        // targets that this edge reaches (Konnectivity's identifiers), sent to the cloud
	Limits   EdgeLimits
	Instance string // instance of the process from which this one takes over; "": the client makes a new instance
	// Succeeds reports whether the process from which this one takes over still has conns. If so, the cloud lets them
	// continue on their old session. nil: there is no such process.
	Succeeds func() bool
	// Connections is how many connections a session has at most, its own connection included.
	// The others are data connections. The edge opens a data connection when the cloud asks for
	// one. 0: only the session's own connection.
	Connections int

	Congestion *Congestion // congestion control of the connections to the cloud; nil: the system's choice

	Tracer *tunnel.Tracer // makes spans of dials; nil: off

	// Services says that the edge serves Services of the cluster (package relay). The cloud tells the other edges that
	// they reach endpoints on this node.
	Services bool

	// Trusts returns the ids (auth.CAID) of the CAs by which this edge verifies the cloud; nil: the edge sends none.
	Trusts func() []string
	// Told gets the CAs and addresses that the cloud sends with a renewed certificate. chain is the certificate chain
	// that the cloud has shown in the TLS handshake. nil: the client ignores them.
	Told func(told auth.TellEdges, chain []*x509.Certificate)
	// AskedToRenew is called when the cloud asks this edge to renew its certificate within a time. nil: the edge
	// cannot renew its certificate, and tells the cloud so.
	AskedToRenew func(within time.Duration)

	// Dial connects to Address; nil: a net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Connect connects to the cloud in place of Dial: by a dial.Dialer, which knows proxies and WebSockets.
	Connect func(ctx context.Context) (*dial.Conn, error)

	// Replica makes the client join as a replica of the cloud. If Replica is set, Node, Token,
	// Limits, All and Reach stay unset. nil: the client joins as Node.
	Replica *ReplicaConfig

	farTrip time.Duration // round trip from which a link is far; 0: the constant farTrip; only tests set another value
}

// Client keeps a session with the cloud, or a session with each replica of the cloud. Client
// opens a new session whenever a session is lost. In an edge, Client is the module "stream". A
// replica has a Client for each other replica.
type Client struct {
	// Set once.
	cfg      ClientConfig
	as       joiner // what the client joins as: a node or a replica
	router   *tunnel.Router
	blocks   *conn.Blocks
	log      *slog.Logger
	instance string // the random id of this client; a process that takes over keeps it

	tickets tickets
	queue   tunnel.Queue   // applies cfg.Limits to the opens of all sessions
	denials tunnel.Limiter // limits log lines about denied dials
	// failures limits repeated log lines about failed attempts to join.
	failures tunnel.Repeats
	// source returns the local address from which the kernel would connect to remote; tests replace it.
	source func(remote string) (netip.Addr, error)

	mu       sync.Mutex // guards the following
	links    []*link    // live sessions, the newest last
	draining bool       // see Drain
	paused   bool       // see Pause
	replicas []string   // instances that the cloud has sent; none: one replica, or nothing sent yet
	ended    []ending   // sessions that have ended since the last call of the method wanted
	err      error      // why the last attempt or session failed, see Ready
	hurry    hurry      // why the next pause ends at once; pause clears it
	tried    string     // the address that the last attempt to join has reached or tried; empty: none
	sources  sources    // as they were at the last attempt, or at the last call of NetworkChanged
	// endAttempt ends the newest attempt to open a session; nil: there was none.
	endAttempt context.CancelCauseFunc
	// changed wakes Run and waitForSuccessor when a field above changes.
	changed tunnel.Change
}

// hurry says why a pause between two attempts ends at once. If there are two reasons, the one further down counts.
type hurry int

const (
	noHurry      hurry = iota
	hurryRoute         // this machine has another address towards the cloud; see NetworkChanged
	hurryReplica       // HurryUp was called, or a replica may be new
)

// link is a live session with the resources to release when the session ends.
type link struct {
	*edgeSession
	sctx   context.Context // ends a grace period and a second after the context of Run
	cancel func()          // cancels sctx
	hangUp func()          // closes the connection
	shown  *handshake
	route  *dial.Conn        // nil: a direct connection, made by ClientConfig.Dial
	token  [sha256.Size]byte // SHA-256 of the token that opened the session
	moving bool              // the replica is about to stop, and another session takes over; guarded by Client.mu

	tokenSent bool // the edge has sent another token over this session; owned by followToken
}

// ending says how long a session lived and why it ended.
type ending struct {
	lived time.Duration
	err   error
}

// NewClient makes a client. The client passes messages to the routes of mods and to its own
// routes.
func NewClient(cfg ClientConfig, mods ...tunnel.Module) (*Client, error) {
	if cfg.Grace == 0 {
		cfg.Grace = tunnel.GracePeriod
	}
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	cfg.Connections = max(1, cfg.Connections)
	cfg.farTrip = cmp.Or(cfg.farTrip, farTrip)
	c := &Client{cfg: cfg, blocks: new(conn.Blocks), instance: cmp.Or(cfg.Instance, uuid.NewString()), source: sourceTo}
	c.as = joinerOf(c)
	c.cfg.Limits = c.as.limits()
	key, value := c.as.logs()
	c.log = cfg.Log.With("module", category, key, value)
	c.queue.Name, c.queue.Conns, c.queue.Dials, c.queue.Counters =
		"the edge of node "+string(cfg.Node), c.cfg.Limits.Conns, c.cfg.Limits.Dials, cfg.Counters
	c.err = ErrNotYet
	router, err := tunnel.NewRouter(slices.Concat([]tunnel.Module{c}, c.as.modules(), mods)...)
	if err != nil {
		return nil, err
	}
	c.router = router
	return c, nil
}

// Name implements tunnel.Module.
func (c *Client) Name() string { return category }

// Routes implements tunnel.Routed. It returns the handlers of the messages that the cloud may
// send besides opens. Opens go to the module that dials.
func (c *Client) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		typeHeartbeat:  handler((*edgeSession).heartbeat),
		typeCancel:     handler((*edgeSession).cancelTopic),
		typeDrain:      handler((*edgeSession).cloudLeaves),
		typeEnds:       handler((*edgeSession).connEnds),
		typeReplicas:   handler((*edgeSession).cloudReplicas),
		typeRenew:      handler((*edgeSession).askedToRenew),
		typeConnection: handler((*edgeSession).moreConnections),
	}
}

// Instance returns the id of this client, for a process that takes over.
func (c *Client) Instance() string { return c.instance }

// Router returns the routes of the edge, for the log line at start-up.
func (c *Client) Router() *tunnel.Router { return c.router }

// Ready returns nil while there is a live session, otherwise an error with the last failure.
func (c *Client) Ready() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.links) == 0 {
		return fmt.Errorf("no session with %s: %w", c.cfg.Address, c.err)
	}
	return nil
}

// Status says through which server and proxy the newest session reaches the cloud; "" if it simply connects to
// ClientConfig.Address. pkg/admin shows the text.
func (c *Client) Status() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.links) == 0 {
		return ""
	}
	route := c.links[len(c.links)-1].route
	if route == nil || route.Route() == c.cfg.Address {
		return ""
	}
	return route.Route()
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

// Sessions returns the live sessions, the newest last.
func (c *Client) Sessions() []*tunnel.Session {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]*tunnel.Session, len(c.links))
	for i, l := range c.links {
		all[i] = l.pub
	}
	return all
}

// Drain tells the cloud to ask for no more conns, on live and on later sessions. Open conns continue, and Reach may
// still open new ones.
func (c *Client) Drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.draining = true
	for _, l := range c.links {
		l.post(takesNoConns())
	}
}

// Pause makes the client open no sessions until Resume: another process takes over this node, and a new session would
// replace the session of that process. An attempt that is under way ends. The client's live sessions continue.
func (c *Client) Pause() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.paused = true
	if c.endAttempt != nil {
		c.endAttempt(errPaused)
	}
}

// Resume ends a Pause.
func (c *Client) Resume() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.paused = false
	c.changed.Notify()
}

// errPaused is why Pause ends an attempt to open a session.
var errPaused = errors.New("another process takes over")

// beginAttempt returns a context for an attempt to open a session. Pause ends the context, and so does the caller.
func (c *Client) beginAttempt(ctx context.Context) (context.Context, func()) {
	ctx, end := context.WithCancelCause(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endAttempt = end
	if c.paused {
		end(errPaused)
	}
	return ctx, func() { end(nil) }
}

// takesNoConns is the message of an edge that takes no new conns, but does not stop: a Drain without a grace period.
func takesNoConns() *tunnel.Message { return message(typeDrain, "", new(pb.Drain)) }

// Run implements tunnel.Module: it keeps the sessions open until ctx is done. A lost session or
// a refusal never ends Run.
func (c *Client) Run(ctx context.Context) error {
	var serving sync.WaitGroup
	defer serving.Wait()
	serving.Go(func() { c.followToken(ctx) })
	var wait backoff
	seconds := 0 // how often in a row the cloud has refused a second session with one replica
	for {
		err := c.wanted(ctx, &wait)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			var l *link
			open := func() error { l, err = c.open(ctx); return err }
			if err = tunnel.Guard(c.log, c.cfg.Counters, "there is no session", open); err == nil {
				serving.Go(func() { c.serve(ctx, l) })
				seconds = 0
				continue
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, errPaused) {
			continue
		}
		d := wait.next(err, c.isMoving())
		if isSecond(err) || errors.Is(err, ErrTwice) || errors.Is(err, ErrSelf) {
			seconds++
			d = c.afterSecond(seconds, d)
			c.log.Debug("this address leads to a replica that has a session already; trying again",
				"retry_in", d.Round(time.Millisecond))
		} else {
			seconds = 0
			c.logFailed(err, d)
		}
		// The cloud would refuse the edge at another address of this machine as well.
		if why := c.pause(ctx, d); why == hurryReplica || why == hurryRoute && !isRefusal(err) {
			wait.Reset()
			seconds = 0
		}
	}
}

// A balancer that chooses at random leads to a missing replica after some attempts. After manySeconds attempts in a row
// for each replica, all of which led to replicas with a session, the pauses grow up to secondMax.
const (
	manySeconds = 12
	secondMax   = 5 * time.Minute
)

// afterSecond returns how long to wait after the n-th refusal in a row of a second session. d is how long the client
// waits after other failures.
func (c *Client) afterSecond(n int, d time.Duration) time.Duration {
	c.mu.Lock()
	many := manySeconds * max(1, len(c.replicas))
	c.mu.Unlock()
	if n < many || !c.cfg.All || c.isMoving() {
		return d
	}
	if n == many {
		c.log.Info(`the address leads again and again to replicas that have a session with this edge already, and never to ` +
			`another one: with sessions = "all", nothing may tie an edge to one replica, such as sessionAffinity: ClientIP`)
	}
	return max(d, min(tunnel.BackoffMax<<min(n-many, 10), secondMax))
}

// logFailed logs that the client has no session, and will try again after d. A cloud may be away for days, so a
// repeated error is logged as a warning only at growing intervals (tunnel.Repeats), and otherwise at level debug.
func (c *Client) logFailed(err error, d time.Duration) {
	level := slog.LevelWarn
	skipped, ok := c.failures.Allow(err.Error())
	if !ok {
		level = slog.LevelDebug
	}
	c.log.Log(context.Background(), level, "no session; trying again",
		"err", err, "skipped", skipped, "retry_in", d.Round(time.Millisecond))
}

// ErrNotYet is the error that Ready reports before the first attempt.
var ErrNotYet = errors.New("has not connected yet")

// HurryUp ends the pause between two attempts to join, or else the next pause. Call it when the next
// attempt is likely to succeed.
func (c *Client) HurryUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hurryLocked(hurryReplica)
}

// hurryLocked ends the pause between two attempts, or else the next pause. The caller holds mu.
func (c *Client) hurryLocked(why hurry) {
	c.hurry = max(c.hurry, why)
	c.changed.Notify()
}

// pause waits for d. It returns early when ctx is done, or when the last live session is lost: the next
// session is then urgent. It also returns early when there is a reason to hurry, and returns this reason.
func (c *Client) pause(ctx context.Context, d time.Duration) (why hurry) {
	late := time.After(d)
	for had := false; ; {
		c.mu.Lock()
		has, changed := len(c.links) > 0, c.changed.Next()
		why, c.hurry = c.hurry, noHurry
		c.mu.Unlock()
		if why != noHurry || had && !has {
			return why
		}
		had = has
		select {
		case <-changed:
		case <-late:
			return noHurry
		case <-ctx.Done():
			return noHurry
		}
	}
}

// wanted waits until the client needs another session. It returns the error of the session that ended last.
// If no session has ended since the last call, it returns nil, and the caller opens the next session at once.
func (c *Client) wanted(ctx context.Context, wait *backoff) error {
	for {
		c.mu.Lock()
		missing, ended, changed := c.missingLocked(), c.ended, c.changed.Next()
		c.ended = nil
		c.mu.Unlock()
		for _, e := range ended {
			if e.lived > tunnel.BackoffMax {
				wait.Reset()
				c.failures.Reset()
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

// isMoving reports whether the client has a session only with replicas that are about to stop.
func (c *Client) isMoving() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	stays := func(l *link) bool { return !l.moving }
	return len(c.links) > 0 && !slices.ContainsFunc(c.links, stays)
}

// missingLocked reports whether the client needs another session: it has none, or cfg.All is set
// and a replica has none. A session whose replica stops does not count. During a Pause, missingLocked returns false.
// The caller holds mu.
func (c *Client) missingLocked() bool {
	var with []string
	for _, l := range c.links {
		if !l.moving {
			with = append(with, l.pub.Instance)
		}
	}
	switch {
	case c.paused:
		return false
	case len(with) == 0:
		return true
	}
	return c.cfg.All && slices.ContainsFunc(c.replicas, func(r string) bool { return !slices.Contains(with, r) })
}

// open connects to the cloud, joins, and adds the new session to links. When ctx is done, the session still has the
// grace period. If Pause ends the attempt, the error is errPaused.
func (c *Client) open(ctx context.Context) (l *link, err error) {
	attempt, end := c.beginAttempt(ctx)
	defer end()
	var shown *handshake
	defer func() {
		if err != nil {
			if errors.Is(context.Cause(attempt), errPaused) {
				err = errPaused
			}
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
	credential, token, err := c.as.credential(shown)
	if err != nil {
		return nil, err
	}
	c.noteAttempt()
	raw, err := c.cfg.connect(attempt)
	c.noteTried(raw, err)
	if err != nil {
		return nil, err
	}
	route, _ := raw.(*dial.Conn)
	defer func() {
		noteRoute(route, shown, err)
		if err != nil && route != nil && route.Route() != c.cfg.Address {
			err = fmt.Errorf("%s: %w", route.Route(), err)
		}
	}()
	cc, own, hangUp, err := connect(raw, c.cfg.Address, conf, shown, c.cfg.Software, c.cfg.farTrip, c.cfg.Congestion)
	if err != nil {
		return nil, err
	}
	// The session outlives ctx by the grace period and a second.
	sctx, cancel := tunnel.Grace(ctx, c.cfg.Grace+time.Second)
	fail := func(err error) (*link, error) {
		cancel()
		hangUp()
		return nil, err
	}
	s, err := c.join(attempt, sctx, cc, own, credential)
	if err != nil {
		return fail(err)
	}
	if err = c.as.started(s); err != nil {
		s.abandon(err)
		return fail(err)
	}
	l = &link{edgeSession: s, sctx: sctx, cancel: cancel, hangUp: hangUp, shown: shown, route: route, token: token}
	c.mu.Lock()
	if c.paused {
		c.mu.Unlock()
		s.abandon(errPaused)
		return fail(errPaused)
	}
	c.links = append(c.links, l)
	if c.draining {
		l.post(takesNoConns())
	}
	c.replicas = nil // the cloud sends the list of replicas next, if it is configured with other replicas
	c.changed.Notify()
	c.mu.Unlock()
	s.log.Info("session started", "remote", s.pub.Remote, "addr", own.RemoteAddr().String())
	return l, nil
}

// serve serves a session until the session ends, then releases its resources.
func (c *Client) serve(ctx context.Context, l *link) {
	defer l.cancel()
	err := l.guard(func() error { return l.serveUntil(ctx, l.sctx) })
	l.Close(err) // the session has ended already, unless there was a panic
	err = c.explain(l.explainCut(err, l.route), l.shown)
	c.mu.Lock()
	c.links = slices.DeleteFunc(c.links, func(other *link) bool { return other == l })
	c.err = err
	c.mu.Unlock()
	l.cancel()
	l.hangUp() // unblocks every goroutine that waits for the network
	l.wg.Wait()
	lived := time.Since(l.pub.Since)
	l.logEnd(err, lived.Round(time.Millisecond))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = append(c.ended, ending{lived, err})
	if c.cfg.All && lived > tunnel.BackoffMax {
		c.hurryLocked(hurryReplica) // Run may be in a long pause, see afterSecond
	}
	c.changed.Notify()
}

// waitForSuccessor marks s as moving, because its replica is about to stop. It returns when a session
// that is not moving exists, or when s has ended.
func (c *Client) waitForSuccessor(s *edgeSession) {
	for {
		c.mu.Lock()
		others := false
		for _, l := range c.links {
			if l.edgeSession == s {
				if !l.moving {
					l.moving = true
					c.changed.Notify()
				}
				continue
			}
			others = others || !l.moving
		}
		changed := c.changed.Next()
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

// have returns the instances of the replicas with which the client has a session.
func (c *Client) have() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []string
	for _, l := range c.links {
		if l.pub.Instance != "" {
			all = append(all, l.pub.Instance)
		}
	}
	return all
}

// setReplicas stores the instances of the cloud's replicas, as the cloud has sent them.
func (c *Client) setReplicas(instances []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	slices.Sort(instances)
	if !slices.Equal(instances, c.replicas) && c.cfg.All {
		c.hurryLocked(hurryReplica)
	}
	c.replicas = instances
	c.changed.Notify()
}

// isSecond reports whether err says that a replica refused a second session of this process.
func isSecond(err error) bool { return status.Code(err) == codes.AlreadyExists }
