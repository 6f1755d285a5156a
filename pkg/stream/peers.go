package stream

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
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "tunnel/pkg/stream/tunnelv1"
	"tunnel/pkg/tunnel"
)

const (
	// lookupInterval is how often the Service's name is resolved.
	lookupInterval = 5 * time.Second
	// readyAnyway is how long a starting replica waits until the others have told which nodes
	// they hold. A replica that hangs must not keep this one from serving.
	readyAnyway = 15 * time.Second
	// forgetReplica is how long the nodes of a lost replica are remembered. In that time the
	// replica may come back, or its nodes may connect to other replicas.
	forgetReplica = 15 * time.Second
)

// PeersConfig names the other replicas of this cloud, and says how replicas authenticate each
// other.
type PeersConfig struct {
	Service   string       // host:port; every address behind the name is a replica
	Addresses []string     // host:port; each is the address of a replica
	Addrs     []netip.Addr // addresses at which clients reach this replica; the other replicas publish them
	// TLS returns this replica's certificate, the CA of all replicas' certificates (RootCAs), and
	// the name that all of them contain (ServerName). TLS is called each time they are needed, so
	// the files may change.
	TLS      func() *tls.Config
	Counters *tunnel.Counters // counts relayed conns; nil: not counted
	Log      *slog.Logger
	Software string
	Grace    time.Duration // how long relayed conns may go on when this replica stops; 0: tunnel.GracePeriod

	// LookUp returns the addresses behind a name; nil: the system's resolver.
	LookUp func(ctx context.Context, host string) ([]netip.Addr, error)
}

// Peers represents the other replicas of this cloud. It is the module "peers". Each replica joins
// each other replica over mutual TLS. It tells the other replica which nodes it holds, and opens
// conns to these nodes on request. So all that is known about another replica comes by the
// session that the other replica opened here. Relayed conns are conns of that session: in it this
// replica is the cloud, and the other replica is the edge.
//
//	front door ─ Peers.Dial(edge7) ─▶ its session with us ─ open{relay, edge7} ─▶ replica B ─ Directory.Dial ─▶ edge7
//
// A request is relayed once, since B asks only its own directory.
type Peers struct {
	// Set once.
	cfg      PeersConfig
	id       string
	dir      *tunnel.Directory // the nodes that this replica holds
	counters *tunnel.Counters
	log      *slog.Logger
	router   *tunnel.Router // routes what other replicas send to this replica
	left     chan struct{}  // closed when this replica is about to stop

	telling sync.Mutex // held while edges are told the replicas, so that the last message is the newest

	mu       sync.Mutex              // guards the fields below
	replicas map[string]*replica     // by id: the replicas that have joined here, or were lost a moment ago
	links    map[string]*Client      // by address: the replicas that this replica keeps a session with, or tries to
	joined   map[string]*edgeSession // by id of the replica that this replica has joined
	changed  chan struct{}           // closed at the next change; nil while nobody waits
	began    time.Time               // when Run began; zero: not yet
	complete bool                    // Ready has returned nil
	ended    bool                    // Run has returned: a lost replica is forgotten at once
}

// replica is what another replica has told this one. Peers.mu guards it.
type replica struct {
	id     string
	link   *cloudSession // its session with this replica; nil: lost
	lost   *time.Timer   // timer that forgets the replica; nil while link is set
	addrs  []netip.Addr  // its addresses for clients, at most two
	nodes  map[tunnel.NodeName]held
	coming map[tunnel.NodeName]held // a full set of nodes that is not complete yet
	leaves bool                     // the replica is about to stop: names should not lead to it
}

// held is a session of a node with another replica.
type held struct {
	since    time.Time // by this replica's clock
	instance string    // instance of the edge; "" for a konnectivity agent, which has none
	reach    string    // addresses that the edge says it reaches
}

// before reports whether h takes precedence over another session of the node. An edge's session
// precedes an agent's. Otherwise the later session precedes.
func (h held) before(other held) bool {
	if agent := h.instance == ""; agent != (other.instance == "") {
		return !agent
	}
	return h.since.After(other.since)
}

var (
	_ tunnel.Module = (*Peers)(nil)
	_ tunnel.Dialer = (*Peers)(nil)
	_ tunnel.Nodes  = (*Peers)(nil)
)

// NewPeers returns the other replicas of the replica whose nodes are in dir. Nothing is known
// about them before Run. The caller also passes the result to the [Server].
func NewPeers(cfg PeersConfig, dir *tunnel.Directory) (*Peers, error) {
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
		left: make(chan struct{}), replicas: make(map[string]*replica), joined: make(map[string]*edgeSession), links: make(map[string]*Client),
	}
	if err := p.verifyOwn(cfg.TLS(), x509.ExtKeyUsageClientAuth, "as a client"); err != nil {
		return nil, err
	}
	var err error
	p.router, err = tunnel.NewRouter(peerRoutes{})
	return p, err
}

// Name implements tunnel.Module.
func (p *Peers) Name() string { return "peers" }

// peerRoutes are the messages that a replica may send after it has joined here: the messages of
// an edge, and the nodes that it holds.
type peerRoutes struct{}

func (peerRoutes) Name() string              { return category }
func (peerRoutes) Run(context.Context) error { return nil }

func (peerRoutes) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		typeHeartbeat: handler((*cloudSession).heartbeat),
		typeRefused:   handler((*cloudSession).refused),
		typeCancel:    handler((*cloudSession).cancelConn),
		typeDrain:     handler((*cloudSession).edgeLeaves),
		typeNodes:     handler((*cloudSession).peerNodes),
	}
}

// Run implements tunnel.Module. It looks up the other replicas and joins each, until ctx is done.
func (p *Peers) Run(ctx context.Context) error {
	defer p.forgetLost()
	p.mu.Lock()
	p.began = time.Now()
	p.mu.Unlock()
	var running sync.WaitGroup
	defer running.Wait()
	jctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // the sessions outlive ctx: see handOver
	defer cancel()
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
				p.log.Warn("cannot look up the other replicas; those known stay", "target", p.cfg.Service, "err", err)
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
			if !addresses[a] && err == nil {
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

// passOn reports each change of this replica's own directory as a change of Peers, until ctx is
// done.
func (p *Peers) passOn(ctx context.Context) {
	for {
		changed := p.dir.Changed()
		p.mu.Lock()
		p.noteLocked()
		p.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// discover returns the addresses of all replicas, perhaps including this one. If it returns an
// error, addresses are missing.
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

// errSelf ends a link from this replica to itself. errTwice ends a second link to the same
// replica.
var (
	errSelf  = errors.New("this address is our own")
	errTwice = errors.New("this replica has been joined by another of its addresses")
)

// join keeps a session with the replica at an address until ctx is done.
func (p *Peers) join(ctx context.Context, address string) {
	c, err := NewClient(ClientConfig{
		Address: address, TLS: p.cfg.TLS, Counters: p.counters, Log: p.cfg.Log, Grace: p.cfg.Grace, Software: p.cfg.Software,
		Connections: MaxConnections, // a session carries the conns of many nodes
		replica: &asReplica{
			id: p.id, hello: &pb.Replica{Addrs: addrStrings(p.cfg.Addrs)},
			have:    func() []string { return p.have(address) },
			started: p.publish, hint: p.hint,
		},
	}, relayModule{p.dir})
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

// have returns the ids of the replicas that this replica has joined by another address. A second
// session would replace the first.
func (p *Peers) have(address string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []string
	for id, s := range p.joined {
		if s.pub.Remote != address {
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
		if err != nil && !errors.Is(err, errSelf) && !errors.Is(err, errTwice) {
			notes = append(notes, err.Error())
		}
	}
	return strings.Join(notes, "; ")
}

// Ready returns nil once the other replicas have told which nodes they hold. So a starting
// replica refuses no caller whose node another replica holds. Ready waits only at the start, only
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
		if err := p.links[address].Ready(); errors.Is(err, errNotYet) {
			return err
		}
	}
	for id := range p.joined {
		if r := p.replicas[id]; r == nil || r.nodes == nil {
			return fmt.Errorf("replica %s has not said yet which nodes it holds", id)
		}
	}
	return nil
}

// Status says how many other replicas there are.
func (p *Peers) Status() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return fmt.Sprintf("%d others joined, %d have joined here", len(p.joined), p.hereLocked())
}

// Replicas returns how many other replicas have joined here.
func (p *Peers) Replicas() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hereLocked()
}

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
func (p *Peers) hint(err error) error {
	if err == nil {
		return nil
	}
	switch {
	case isSecond(err) && reasonOf(err) == reasonSelf:
		return errSelf
	case isSecond(err), status.Code(err) == codes.Aborted: // Aborted: both sessions came at the same time
		return errTwice
	case status.Code(err) == codes.Unauthenticated:
		return fmt.Errorf("%w (its log says why; ca and servername of [mode.cloud.stream.peers] must be the same on all replicas, and their certificates must allow client authentication)", err)
	case isUnknownAuthority(err):
		return fmt.Errorf("%w (ca in [mode.cloud.stream.peers] must have signed the replicas' certificates)", err)
	case isOtherName(err):
		return fmt.Errorf("%w (servername in [mode.cloud.stream.peers] must stand in the replicas' certificates)", err)
	}
	return err
}

// replicaID is the id of this replica. A replica sends its id when it joins another replica.
type replicaID string

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (id replicaID) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{replicaKey: string(id)}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (replicaID) RequireTransportSecurity() bool { return true }

// claimsReplica returns the id under which a client wants to join as a replica, or "" if it does
// not.
func claimsReplica(ctx context.Context) string {
	if v := metadata.ValueFromIncomingContext(ctx, replicaKey); len(v) == 1 {
		return v[0]
	}
	return ""
}

// authenticate returns nil if the other end of a connection is a replica.
func (p *Peers) authenticate(state tls.ConnectionState) error {
	if len(state.PeerCertificates) == 0 {
		return errors.New("it shows no certificate")
	}
	return p.verify(state.PeerCertificates, x509.ExtKeyUsageClientAuth)
}

// verify returns nil if a certificate is a replica's. The replicas' CA must have signed it. It
// must be valid for usage, and contain the name that only replicas have.
func (p *Peers) verify(chain []*x509.Certificate, usage x509.ExtKeyUsage) error {
	intermediates := x509.NewCertPool()
	for _, c := range chain[1:] {
		intermediates.AddCert(c)
	}
	conf := p.cfg.TLS()
	_, err := chain[0].Verify(x509.VerifyOptions{
		Roots: conf.RootCAs, Intermediates: intermediates, DNSName: conf.ServerName,
		KeyUsages: []x509.ExtKeyUsage{usage},
	})
	return err
}

// verifyOwn checks that the other replicas would accept this replica's certificate.
func (p *Peers) verifyOwn(conf *tls.Config, usage x509.ExtKeyUsage, what string) error {
	var own *tls.Certificate
	var err error
	switch {
	case len(conf.Certificates) > 0:
		own = &conf.Certificates[0]
	case usage == x509.ExtKeyUsageServerAuth && conf.GetCertificate != nil:
		own, err = conf.GetCertificate(&tls.ClientHelloInfo{ServerName: p.cfg.TLS().ServerName})
	case usage == x509.ExtKeyUsageClientAuth && conf.GetClientCertificate != nil:
		own, err = conf.GetClientCertificate(&tls.CertificateRequestInfo{})
	}
	if err != nil {
		return fmt.Errorf("this replica's certificate %s: %w", what, err)
	}
	if own == nil || len(own.Certificate) == 0 {
		return fmt.Errorf("this replica has no certificate %s", what)
	}
	var chain []*x509.Certificate
	for _, der := range own.Certificate {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return fmt.Errorf("this replica's certificate %s: %w", what, err)
		}
		chain = append(chain, c)
	}
	if err := p.verify(chain, usage); err != nil {
		return fmt.Errorf("other replicas would not accept this replica's certificate %s: %w (it must be signed by ca, hold the name %q, and allow client and server authentication)", what, err, p.cfg.TLS().ServerName)
	}
	return nil
}

func addrStrings(all []netip.Addr) []string {
	var s []string
	for _, a := range all {
		s = append(s, a.String())
	}
	return s
}

// noteLocked tells every waiting goroutine that something has changed. The caller holds mu.
func (p *Peers) noteLocked() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// attach makes cs the session of the replica with that id.
func (p *Peers) attach(id string, hello *pb.Replica, cs *cloudSession) {
	var addrs []netip.Addr
	for _, text := range hello.GetAddrs() {
		a, err := netip.ParseAddr(text)
		if err == nil && a.Zone() == "" && len(addrs) < 2 { // a zone may hold anything, even a line break
			addrs = append(addrs, a.Unmap())
		}
	}
	p.mu.Lock()
	r := p.replicas[id]
	if r == nil {
		r = &replica{id: id}
		p.replicas[id] = r
	}
	if r.lost != nil {
		r.lost.Stop()
		r.lost = nil
	}
	old := r.link
	r.link, r.addrs, cs.replica = cs, addrs, r
	p.noteLocked()
	for _, c := range p.links {
		c.hurryUp() // the replica has found this one, so this one can probably join it now
	}
	p.mu.Unlock()
	p.announce()
	if old != nil {
		old.Close(status.Error(codes.Aborted, "replaced by a newer session of this replica"))
	}
}

// detach records that a session with another replica has ended.
func (p *Peers) detach(cs *cloudSession) {
	p.mu.Lock()
	r := cs.replica
	if r.link != cs {
		p.mu.Unlock()
		return
	}
	r.link, r.coming = nil, nil
	if p.ended {
		delete(p.replicas, r.id)
	} else {
		r.lost = time.AfterFunc(forgetReplica, func() { p.forget(r) })
	}
	p.noteLocked()
	p.mu.Unlock()
	p.announce()
}

// leave tells the other replicas that this replica is about to stop.
func (p *Peers) leave() {
	close(p.left)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.noteLocked()
}

// forget removes a replica that has not come back.
func (p *Peers) forget(r *replica) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.link != nil || p.replicas[r.id] != r {
		return
	}
	delete(p.replicas, r.id)
	p.noteLocked()
	p.log.Info("another replica is gone for good", "replica", r.id, "nodes", len(r.nodes))
}

// forgetLost removes the lost replicas, and makes detach remove a replica at once from now on.
// Connected replicas stay: the server has yet to end their sessions, and the conns between them
// and this replica.
func (p *Peers) forgetLost() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	for id, r := range p.replicas {
		if r.lost != nil {
			r.lost.Stop()
			delete(p.replicas, id)
		}
	}
}

// sessions returns the sessions that other replicas have opened with this one.
func (p *Peers) sessions() []*cloudSession {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []*cloudSession
	for r := range maps.Values(p.replicas) {
		if r.link != nil {
			all = append(all, r.link)
		}
	}
	return all
}
