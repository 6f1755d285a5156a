// Package peers joins the replicas of a cloud: a directory of the directories of all replicas.
//
//	others, err := peers.New(peers.Config{Service: "tunnel-cloud-peers:9000", TLS: ours, Server: cert, Log: log}, dir)
//	srv, err := stream.NewServer(stream.ServerConfig{Replicas: others, TLS: cert, …}, dir, mods...)
//	err = tunnel.Run(ctx, append(mods, srv, others)...)
//	conn, err := others.Dial(ctx, tunnel.Request{Node: "edge7", …}) // through the replica that holds edge7
//
// Each replica joins each other replica over mutual TLS. The joining replica tells the other replica
// which nodes it holds, and opens conns to these nodes on request. So a replica learns about another
// replica only by the session that the other replica opened. Relayed conns are conns of that session.
// In that session, the replica that dials is the server, as a cloud is for its edges. The replica
// that holds the node is the client, and serves opens as an edge does.
//
//	front door ─ Peers.Dial(edge7) ─▶ its session with us ─ open{relay, edge7} ─▶ replica B ─ Directory.Dial ─▶ edge7
//
// A request is relayed once, since replica B asks only its own directory.
//
// Files: peers.go looks up the other replicas and joins them. replicas.go holds the sessions that
// they have opened here. nodes.go shares which replica holds which node. relay.go dials through the
// replica that holds the node. api.go asks another replica's own API. certificate.go checks that a
// certificate is a replica's.
//
// Package stream implements the sessions between replicas: [stream.ReplicaConfig] makes a client join
// as a replica, and [stream.Replicas] is what a server asks when another replica joins it. Package
// peers does not decide who may join as a node, or who may send requests.
package peers

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// lookupInterval is how often the Service's name is resolved.
	lookupInterval = 5 * time.Second
	// readyAnyway is how long a starting replica waits until the other replicas have told which
	// nodes they hold. A replica that hangs must not keep this one from serving.
	readyAnyway = 15 * time.Second
	// refusesAnyway is how long a starting replica waits for an address that refuses connections. A replica that is
	// about to stop refuses them. If the name of the others has led to it anew, it still joins this replica, when it
	// next looks up the name.
	refusesAnyway = lookupInterval + 2*time.Second
	// forgetReplica is how long the nodes of a lost replica are remembered. In that time the
	// replica may come back, or its nodes may connect to other replicas.
	forgetReplica = 15 * time.Second
)

// Config names the other replicas of this cloud, and says how replicas authenticate each other.
type Config struct {
	Service   string       // host:port; every address behind the name is a replica
	Addresses []string     // host:port; each is the address of a replica
	Addrs     []netip.Addr // addresses at which clients reach this replica; the other replicas publish them
	// TLS returns this replica's certificate, the CA of all replicas' certificates (RootCAs), and
	// the name that all replicas' certificates contain (ServerName). Peers calls TLS each time it
	// needs one of them, so the files may change.
	TLS func() *tls.Config
	// Server is the TLS configuration of this replica's [stream.Server]. New checks that the other
	// replicas would accept the certificate in Server.
	Server   *tls.Config
	Counters *tunnel.Counters // counts relayed conns; nil: not counted
	Log      *slog.Logger
	Software string
	Grace    time.Duration // how long relayed conns may go on when this replica stops; 0: tunnel.GracePeriod

	// Congestion is the congestion control of the connections to other replicas; nil: the system's choice.
	Congestion *stream.Congestion

	Tracer *tunnel.Tracer // makes spans of what other replicas relay to this one; nil: off

	// API opens a conn to the API of this replica, which the other replicas ask about its nodes; nil: there is none.
	API func(ctx context.Context) (net.Conn, error)

	// LookUp returns the addresses behind a name; nil: the system's resolver.
	LookUp func(ctx context.Context, host string) ([]netip.Addr, error)

	dial func(ctx context.Context, network, addr string) (net.Conn, error) // nil: a net.Dialer; only tests set it
}

// Peers represents the other replicas of this cloud. It is the module "peers".
type Peers struct {
	// Set once.
	cfg      Config
	id       string
	dir      *tunnel.Directory // the nodes that this replica holds
	counters *tunnel.Counters
	log      *slog.Logger
	left     chan struct{}   // closed when this replica is about to stop
	ends     tunnel.GraceEnd // when this replica stops, and so resets the conns that it relays

	mu       sync.Mutex                 // guards the fields below
	replicas map[string]*replica        // by id: the replicas that have joined here, or were lost a moment ago
	links    map[string]*stream.Client  // by address: the clients that keep a session with another replica, or try to
	joined   map[string]*tunnel.Session // by replica id: the sessions with the replicas that this replica has joined
	changed  tunnel.Change              // a node has come or gone at any replica
	began    time.Time                  // when Run began; zero: not yet
	complete bool                       // Ready has returned nil
	ended    bool                       // Run has returned: a lost replica is forgotten at once
}

var (
	_ tunnel.Module   = (*Peers)(nil)
	_ tunnel.Dialer   = (*Peers)(nil)
	_ tunnel.Nodes    = (*Peers)(nil)
	_ stream.Replicas = (*Peers)(nil)
)

// New returns the other replicas of the replica whose nodes are in dir. Nothing is known about them
// before Run. The caller also passes the result to the [stream.Server].
func New(cfg Config, dir *tunnel.Directory) (*Peers, error) {
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	if cfg.Grace == 0 {
		cfg.Grace = tunnel.GracePeriod
	}
	if cfg.LookUp == nil {
		cfg.LookUp = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		}
	}
	p := &Peers{
		cfg: cfg, id: uuid.NewString(), dir: dir, counters: cfg.Counters,
		log:  cfg.Log.With("module", "peers"),
		left: make(chan struct{}), replicas: make(map[string]*replica),
		joined: make(map[string]*tunnel.Session), links: make(map[string]*stream.Client),
	}
	if err := p.verifyOwn(cfg.TLS(), x509.ExtKeyUsageClientAuth, "as a client"); err != nil {
		return nil, err
	}
	if cfg.Server == nil {
		return nil, errors.New("peers: the TLS configuration of this replica's server is missing")
	}
	if err := p.verifyOwn(cfg.Server, x509.ExtKeyUsageServerAuth, "as a server"); err != nil {
		return nil, err
	}
	return p, nil
}

// Name implements tunnel.Module.
func (p *Peers) Name() string { return "peers" }

// Run implements tunnel.Module. It looks up the other replicas and joins each, until ctx is done.
func (p *Peers) Run(ctx context.Context) error {
	defer p.forgetLost()
	p.mu.Lock()
	p.began = time.Now()
	p.mu.Unlock()
	var running sync.WaitGroup
	defer running.Wait()
	jctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx)) // the sessions outlive ctx: see handOver
	defer func() { cancel(context.Cause(ctx)) }()                       // which says since when this replica stops
	context.AfterFunc(ctx, func() { p.ends.Begin(tunnel.GraceLeft(ctx, p.cfg.Grace)) })
	running.Go(func() { p.passOn(ctx) })
	joining := make(map[string]context.CancelFunc) // by address
	ticker := time.NewTicker(lookupInterval)
	defer ticker.Stop()
	failing := false
	for {
		addresses, err := p.discover(ctx)
		if failed := err != nil; failed != failing && ctx.Err() == nil {
			failing = failed
			if failed {
				p.log.Warn("cannot look up the other replicas; the replicas known before stay", "target", p.cfg.Service, "err", err)
			} else {
				p.log.Info("the other replicas can be looked up again", "target", p.cfg.Service)
			}
		}
		for a := range addresses {
			if joining[a] == nil {
				actx, cancel := context.WithCancel(jctx)
				joining[a] = cancel
				running.Go(func() { p.join(actx, a) })
			}
		}
		for a, cancel := range joining {
			// DNS may leave out an address for a moment. A lost replica has no session.
			if !addresses[a] && err == nil && !p.lives(a) {
				cancel()
				delete(joining, a)
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			p.handOver()
			return nil
		}
	}
}

// lives reports whether this replica has a session with the replica at an address.
func (p *Peers) lives(address string) bool {
	p.mu.Lock()
	c := p.links[address]
	p.mu.Unlock()
	return c != nil && c.Ready() == nil
}

// handOver returns when each node of this replica is also held by another replica, or has gone.
// Until then the other replicas must be able to reach the node through this one. handOver takes
// at most the grace period.
func (p *Peers) handOver() {
	late := time.After(p.cfg.Grace)
	for {
		mine, theirs := p.dir.Changed(), p.Changed()
		if !slices.ContainsFunc(p.dir.Connected(), func(n tunnel.NodeName) bool { return len(p.holders(n)) == 0 }) {
			return
		}
		select {
		case <-mine:
		case <-theirs:
		case <-late:
			return
		}
	}
}

// passOn notifies p.changed at each change of this replica's own directory, until ctx is done. So
// Changed covers the nodes of all replicas.
func (p *Peers) passOn(ctx context.Context) {
	for {
		changed := p.dir.Changed()
		p.mu.Lock()
		p.changed.Notify()
		p.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// discover returns the addresses of all replicas, perhaps including this replica. If it also returns
// an error, some addresses are missing.
func (p *Peers) discover(ctx context.Context) (map[string]bool, error) {
	all := make(map[string]bool)
	for _, a := range p.cfg.Addresses {
		all[a] = true
	}
	if p.cfg.Service == "" {
		return all, nil
	}
	host, port, err := net.SplitHostPort(p.cfg.Service)
	if err != nil {
		return all, err
	}
	ctx, cancel := context.WithTimeout(ctx, lookupInterval)
	defer cancel()
	ips, err := p.cfg.LookUp(ctx, host)
	for _, ip := range ips {
		all[net.JoinHostPort(ip.Unmap().String(), port)] = true
	}
	return all, err
}

// join keeps a session with the replica at an address until ctx is done.
func (p *Peers) join(ctx context.Context, address string) {
	c, err := stream.NewClient(stream.ClientConfig{
		Address: address, TLS: p.cfg.TLS, Counters: p.counters, Log: p.cfg.Log, Grace: p.cfg.Grace, Software: p.cfg.Software,
		Connections: stream.MaxConnections, // a session carries the conns of many nodes
		Dial:        p.cfg.dial,
		Congestion:  p.cfg.Congestion,
		Tracer:      p.cfg.Tracer,
		Replica: &stream.ReplicaConfig{
			ID: p.id, Addrs: addrStrings(p.cfg.Addrs),
			Have:    func() []string { return p.have(address) },
			Serve:   p.serve,
			Started: p.publish, Hint: hint, Ends: &p.ends,
		},
	})
	if err != nil {
		p.log.Error("cannot join another replica", "remote", address, "err", err) // a bug: the routes are wrong
		return
	}
	p.mu.Lock()
	p.links[address] = c
	p.mu.Unlock()
	c.Run(ctx) //nolint:errcheck // it ends with ctx
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.links[address] == c { // the address may have come back while c still ended its conns
		delete(p.links, address)
	}
}

// have returns the ids of the replicas that this replica has joined at addresses other than address. A
// second session with such a replica would replace the first.
func (p *Peers) have(address string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []string
	for id, s := range p.joined {
		if s.Remote != address {
			all = append(all, id)
		}
	}
	return all
}

// Note lists the replicas that this replica cannot join; "" if there are none.
func (p *Peers) Note() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var notes []string
	for _, address := range slices.Sorted(maps.Keys(p.links)) {
		err := p.links[address].Ready()
		if err != nil && !errors.Is(err, stream.ErrSelf) && !errors.Is(err, stream.ErrTwice) {
			notes = append(notes, err.Error())
		}
	}
	return strings.Join(notes, "; ")
}

// Ready returns nil once the other replicas have told which nodes they hold. Before that, a starting
// replica would refuse callers whose node another replica holds. Ready waits only at the start, only
// for replicas that can be joined, and for readyAnyway at most.
func (p *Peers) Ready() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.complete {
		return nil
	}
	err := p.missingLocked()
	if err != nil && (p.began.IsZero() || time.Since(p.began) < readyAnyway) {
		return err
	}
	p.complete = true
	return nil
}

// missingLocked returns an error that says which replica has not yet told its nodes. The caller
// holds mu.
func (p *Peers) missingLocked() error {
	if len(p.links) == 0 {
		return errors.New("the other replicas have not been looked up yet")
	}
	for _, address := range slices.Sorted(maps.Keys(p.links)) {
		err := p.links[address].Ready()
		if errors.Is(err, stream.ErrNotYet) ||
			errors.Is(err, syscall.ECONNREFUSED) && time.Since(p.began) < refusesAnyway && !p.hasToldLocked(address) {
			return err
		}
	}
	for id := range p.joined {
		if r := p.replicas[id]; r == nil || r.nodes == nil {
			return fmt.Errorf("replica %s has not sent its list of nodes yet", id)
		}
	}
	return nil
}

// hasToldLocked reports whether the replica with this IP address and port has joined here, and has told which nodes it
// holds. It is known by the address from which it has joined, and by those for its clients. Of several replicas with
// one IP address, none is known. The caller holds mu.
func (p *Peers) hasToldLocked(address string) bool {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return false // a name
	}
	ip := at.Addr().Unmap()
	for other, link := range p.links {
		o, err := netip.ParseAddrPort(other)
		if err == nil && o.Port() != at.Port() && o.Addr().Unmap() == ip && !errors.Is(link.Ready(), stream.ErrSelf) {
			return false
		}
	}
	for _, r := range p.replicas {
		if r.link == nil || r.nodes == nil {
			continue
		}
		from, _ := netip.ParseAddrPort(r.link.Remote)
		if from.Addr().Unmap() == ip || slices.Contains(r.addrs, ip) {
			return true
		}
	}
	return false
}

// Status says how many other replicas there are.
func (p *Peers) Status() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return fmt.Sprintf("%d others joined, %d have joined here", len(p.joined), p.hereLocked())
}

// Replicas returns how many other replicas take edges and konnectivity agents: the replicas that have joined here and
// are not about to stop.
func (p *Peers) Replicas() int { return len(p.Staying()) }

// hereLocked counts the replicas that have joined here. The caller holds mu.
func (p *Peers) hereLocked() int {
	n := 0
	for _, r := range p.replicas {
		if r.link != nil {
			n++
		}
	}
	return n
}

// hint adds to an error what an operator can do about it.
func hint(err error) error {
	switch {
	case status.Code(err) == codes.Unauthenticated:
		return fmt.Errorf("%w (its log says why; ca and servername of [mode.cloud.stream.peers] must be the same "+
			"on all replicas, and their certificates must allow client authentication)", err)
	case is[x509.UnknownAuthorityError](err):
		return fmt.Errorf("%w (ca in [mode.cloud.stream.peers] must have signed the replicas' certificates)", err)
	case is[x509.HostnameError](err):
		return fmt.Errorf("%w (servername in [mode.cloud.stream.peers] must stand in the replicas' certificates)", err)
	}
	if cert, problem := stream.OutOfDate(err); cert != nil {
		whose, what := "the other replica's certificate", "cert and key in [mode.cloud.stream.server] there"
		if cert.IsCA {
			whose, what = "the certificate of the replicas' CA", "ca in [mode.cloud.stream.peers]"
		}
		return fmt.Errorf("%w (%s %s: replace %s, or correct this machine's clock)", err, whose, problem, what)
	}
	return err
}

// is reports whether err, or an error that err wraps, has the type E.
func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

func addrStrings(all []netip.Addr) []string {
	var s []string
	for _, a := range all {
		s = append(s, a.String())
	}
	return s
}
