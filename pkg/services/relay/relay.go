// Package relay is the edge's side of Services: it serves those with endpoints that this node does not reach by itself.
//
//	const file = "/var/lib/tunnel/services.db"
//	r, err := relay.New(relay.Config{Node: "edge1", File: file, Watch: watch, Reach: client.Reach})
//	err = r.Run(ctx)
//
//	client, err := stream.NewClient(cfg, relay.NewEdge(r, policy))   // the other end, at the endpoints
//
// The state of the cluster's Services comes from the cloud, batch by batch (watch.go), and stays in a file (file.go).
// So a node that starts without its cloud goes on with what it knew. From the state follows the plan (plan.go): the
// addresses and ports of Services that have an endpoint which this node does not reach by itself, and one that it or
// the tunnel reaches. kube-proxy would send connections to all of their endpoints. If the node reaches some of them by
// itself, the kernel sends connections there (layout.go, table_linux.go). Otherwise it redirects them to the relay. The
// relay accepts each of them, asks the cloud to reach an endpoint, and splices the two (conn.go). Connections to other
// Services are not touched: kube-proxy serves them.
//
// With Config.Full, the edge serves all Services of the node, in place of kube-proxy. Then it refuses to write rules
// while those of kube-proxy are there (kubeproxy_linux.go).
//
// Datagrams take the same way (datagrams.go). All those to one endpoint have one conn, with the frames of package udp.
// The relay asks the kernel's conntrack which Service a caller has sent to (conntrack_linux.go).
//
// At the node that has the endpoint, the cloud asks the module [Edge] to dial (edge.go). It dials the endpoints that
// its own state has on this node, and nothing else.
//
// With the module [Near], the edges of one site reach each other's endpoints over the local network (near.go,
// nearserve.go), and not through the cloud.
//
// With Config.DNS, the relay also answers the queries of pods (dns.go): package names makes the answers from the state.
//
// A [Relay] owns its file, its nftables tables, its two addresses on loopback, its listeners, and the connections that
// it accepts. When Run ends, the tables are gone, unless Config.Full; the file and the addresses stay.
//
// The relay serves TCP and UDP. It keeps no source addresses: an endpoint sees a connection of its own node.
package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/services/names"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

// name is the name of both modules, and the category of their messages.
const name = "services"

// Stream is one Watch: what a session's gRPC client returns. Its context ends it.
type Stream interface {
	Send(*pb.Next) error
	Recv() (*pb.Batch, error)
}

// Config configures a Relay.
type Config struct {
	Node   tunnel.NodeName
	File   string         // of the state
	Direct []netip.Prefix // networks that this node reaches without the tunnel
	Full   bool           // serves all Services, in place of kube-proxy
	// Watch opens a stream on the connection of a session. It waits until there is a session, or until ctx is done, which
	// also ends the stream.
	Watch func(ctx context.Context) (Stream, error)
	// Reach opens a conn to a target (see services.Target) through the cloud. ctx bounds the dialling only. A refusal is
	// a *tunnel.Refusal.
	Reach func(ctx context.Context, target string) (net.Conn, error)
	// InContainer reports whether packets to an address go to a container of this machine, and nowhere else. IsOwn
	// reports whether an address is one of this machine. nil: no address is. See Home.
	InContainer, IsOwn func(netip.Addr) bool

	Datagrams udp.EdgeConfig // of the ends at endpoints; Core and Log are those of the Config
	DNS       DNS            // answers DNS queries of pods; nil: the edge answers none
	Domain    string         // the cluster's DNS domain, such as cluster.local; used only if DNS is set
	Counters  *tunnel.Counters
	Log       *slog.Logger
}

// Relay is the edge's module. Any goroutine may call its methods.
type Relay struct {
	// Set once.
	cfg       Config
	kernel    kernel
	dnsKernel kernel // nil: the edge leaves DNS to others
	log       *slog.Logger
	grace     time.Duration // how long conns may go on after Run's ctx is done
	every     time.Duration // between two looks at the kernel
	dial      func(ctx context.Context, network, addr string) (net.Conn, error)
	wake      chan struct{} // capacity 1: there is a new plan for the kernel; never closed
	counts    counters
	affinity  *affinity
	refusals  refusals
	callers   callers
	near      *Near        // reaches edges of this site; nil: off
	direct    *udp.Edge    // sends datagrams to endpoints that this node reaches by itself
	ends      []*udp.Edge  // direct, and that of Edge
	udp       udp.Counters // of the datagrams that the kernel redirects
	failures  failures
	watchers  watchers
	warnFull  tunnel.Limiter
	warnFail  tunnel.Limiter
	warnItem  tunnel.Limiter

	mu      sync.RWMutex // guards the following
	planner planner
	permits func(netip.AddrPort) bool // which addresses of this node may be dialled; nil: those of Home
	state   *services.State
	loaded  bool          // the state of the file is in state, or there is none
	streams bool          // a stream of the cloud has begun with the digests of state
	zone    *names.Zone   // of state; nil: the edge leaves DNS to others
	changed tunnel.Change // of plan
	plan    plan
	since   time.Time // when the state was last known to be that of the cloud
	current bool      // a stream says that it still is
	watch   error     // why the last stream has ended; nil: it lives, or there was none
	broken  error     // of the kernel or of the file: what an operator should mend
	unkept  error     // why the file cannot be opened or written
	serves  int       // addresses in the kernel
	named   bool      // names are answered
	unnamed error     // why names are not answered; nil: they are, or nobody has asked for it
}

var _ tunnel.Module = (*Relay)(nil)

// New returns a relay. It opens nothing before Run. It fails on systems other than Linux.
func New(cfg Config) (*Relay, error) {
	k, err := newKernel(cfg.Full)
	if err != nil {
		return nil, err
	}
	r := newRelay(cfg, k)
	if cfg.DNS != nil {
		r.dnsKernel = newDNSKernel()
	}
	return r, nil
}

func newRelay(cfg Config, k kernel) *Relay {
	cfg.Datagrams.Core, cfg.Datagrams.Log, cfg.Datagrams.OneTarget = cfg.Counters, cfg.Log.With("module", name), true
	direct := udp.NewEdge(anyTarget{}, cfg.Datagrams)
	return &Relay{
		direct: direct, ends: []*udp.Edge{direct}, failures: failures{last: make(map[string]time.Time)},
		planner: planner{string(cfg.Node), cfg.Direct, cfg.Full},
		cfg:     cfg, kernel: k, log: cfg.Log.With("module", name), grace: tunnel.GracePeriod, every: interval,
		dial: (&net.Dialer{Control: directControl}).DialContext, wake: make(chan struct{}, 1),
		affinity: newAffinity(maxAffinity), callers: callers{max: maxPerCaller}, zone: newZone(cfg),
		state: services.NewState(), plan: newPlan(make(map[services.Path]part), nil),
	}
}

// Name implements tunnel.Module.
func (r *Relay) Name() string { return name }

// Run implements tunnel.Module: it serves until ctx is done, and then lets the conns that are open go on for
// tunnel.GracePeriod. What cannot be done now is tried again; Note says what it is. A broken listener or socket is an
// error: the kernel would go on redirecting connections to it.
func (r *Relay) Run(ctx context.Context) error {
	file := r.load()
	connCtx, endConns := tunnel.Grace(ctx, r.grace)
	defer endConns()
	serving, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	door := newDoor(connCtx, r, fail)
	r.guard(fail, func() error { r.apply(door); return nil }) // without waiting for the cloud
	var running sync.WaitGroup
	start := func(f func() error) { running.Go(func() { r.guard(fail, f) }) }
	start(func() error { r.follow(serving, file); return nil })
	start(func() error { file.keep(serving, r.noteFile, r.adopt, r.lastCurrent); return nil })
	start(func() error { return r.direct.Run(serving) })
	if r.dnsKernel != nil {
		start(func() error { r.serveDNS(serving, fail); return nil })
	}
	r.guard(fail, func() error { r.serve(serving, door); return nil })
	var err error
	if ctx.Err() == nil {
		err = context.Cause(serving)
		endConns() // ctx is not done, so nothing else would end them
	}
	running.Wait()
	r.noteCurrent(false, nil)
	file.close(r.lastCurrent())
	door.drain()
	if removeErr := r.kernel.remove(); removeErr != nil {
		r.log.Warn("the table of nftables cannot be removed", "err", removeErr)
	}
	return err
}

// guard calls f. An error or a panic ends Run, whose context fail cancels.
func (r *Relay) guard(fail context.CancelCauseFunc, f func() error) {
	if err := tunnel.Guard(r.log, r.cfg.Counters, "the edge stops", f); err != nil {
		fail(err)
	}
}

// interval is how often the relay looks whether its rules are still in the kernel, and tries again what has failed.
const interval = 10 * time.Second

// serve keeps the kernel as the plan says until ctx is done. Then the kernel redirects nothing more.
func (r *Relay) serve(ctx context.Context, d *door) {
	defer d.close()
	ticker := time.NewTicker(r.every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		case <-ticker.C:
			if d.programmed != nil && !r.kernel.intact() {
				r.log.Warn("another program has removed the rules of Services, or changed them: they are written again")
				d.programmed = nil
			}
		}
		r.apply(d)
	}
}

// apply makes the kernel as the plan says, and keeps what it cannot do for Note.
func (r *Relay) apply(d *door) {
	r.mu.RLock()
	want := r.plan.rules
	known := r.state.Len() > 0 || !r.since.IsZero()
	r.mu.RUnlock()
	var err error
	if known || !r.cfg.Full {
		err = d.program(want)
	} else {
		err = d.refused() // the table that the last process has left is better than an empty one
	}
	r.mu.Lock()
	before := r.broken
	r.broken, r.serves = err, d.programmed.ports()
	r.mu.Unlock()
	switch {
	case err != nil && (before == nil || before.Error() != err.Error()):
		r.log.Warn("Services are not served", "err", err)
	case err == nil && before != nil:
		r.log.Info("Services are served")
	}
}

// load opens the file, and makes the state of the file the state of the relay. The file is a cache: if it cannot be
// opened, the relay begins without it.
func (r *Relay) load() *file {
	f := closedFile(r.cfg.File, r.log)
	f.retry = r.every
	if err := f.open(r.adopt); err != nil {
		r.noteFile(err)
		r.mu.Lock()
		r.loaded = true
		r.mu.Unlock()
	}
	return f
}

// adopt makes a state of the file the state of the relay, unless the cloud has sent one, or is about to.
func (r *Relay) adopt(state *services.State, since time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.streams || r.state.Len() > 0 || !r.since.IsZero() {
		return false
	}
	r.state, r.since, r.loaded = state, since, true
	if r.zone != nil {
		r.zone.Load(state)
	}
	r.adoptLocked(r.planner.plan(state))
	r.log.Info("the state of Services is loaded", "file", r.cfg.File, "items", state.Len(),
		"redirected", len(r.plan.frontends))
	return true
}

// SetRouted tells to which networks of pods this node has routes: it reaches them, beside those of Config.Direct, by
// itself.
func (r *Relay) SetRouted(networks []netip.Prefix) {
	direct := slices.Concat(r.cfg.Direct, networks)
	r.mu.Lock()
	defer r.mu.Unlock()
	if slices.Equal(direct, r.planner.direct) {
		return
	}
	r.planner.direct = direct
	r.adoptLocked(r.planner.plan(r.state))
}

// adoptLocked makes p the plan, and tells everybody who waits for a change. The caller holds mu.
func (r *Relay) adoptLocked(p plan) {
	r.plan = p
	r.changed.Notify()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// noteFile keeps why the file cannot be written; nil: it can.
func (r *Relay) noteFile(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil && r.unkept == nil {
		r.log.Warn("the state of Services is in memory alone", "file", r.cfg.File, "err", err)
	}
	r.unkept = err
}

// noteCurrent keeps whether the state is that of the cloud, and why it is not.
func (r *Relay) noteCurrent(current bool, why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if current || r.current {
		r.since = time.Now()
	}
	r.current, r.watch = current, why
}

// lastCurrent returns when the state was last known to be that of the cloud; zero: never.
func (r *Relay) lastCurrent() time.Time {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.current {
		return time.Now()
	}
	return r.since
}

// Note says what an operator should mend; "" if nothing.
func (r *Relay) Note() string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var stale error
	if !r.current && r.loaded {
		stale = errors.New("the state is stale " + r.staleLocked())
		if r.watch != nil {
			stale = fmt.Errorf("%w: %w", stale, r.watch)
		}
	}
	var leftOut error
	if n := r.state.LeftOut(); n > 0 {
		leftOut = fmt.Errorf("the cluster has too many Services, endpoints and nodes: this node does not know %d of them; "+
			"name the namespaces that edges need in [mode.cloud.services], and start this edge again", n)
	}
	if err := errors.Join(r.broken, r.unnamed, r.unkept, stale, leftOut); err != nil {
		return err.Error()
	}
	return ""
}

// staleLocked says since when the state is stale. The caller holds mu.
func (r *Relay) staleLocked() string {
	if r.since.IsZero() {
		return "since ever: the cloud has never sent it"
	}
	return "since " + r.since.UTC().Format(time.RFC3339)
}

// Status says what the relay serves.
func (r *Relay) Status() string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return fmt.Sprintf("items: %d; addresses that are redirected: %d; conns: %d; flows of UDP: %d",
		r.state.Len(), r.serves, r.counts.live.Load(), r.udp.Flows.Load())
}
