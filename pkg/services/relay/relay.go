// Package relay is the part of an edge that serves the cluster's Services to the pods and processes of its node. It
// serves the Services that have endpoints which the node does not reach by itself.
//
//	const file = "/var/lib/tunnel/services.db"
//	r, err := relay.New(relay.Config{Node: "edge1", File: file, Watch: watch, Reach: client.Reach})
//	err = r.Run(ctx)
//
//	client, err := stream.NewClient(cfg, relay.NewEdge(r, policy))   // the other end, at the endpoints
//
// The cloud sends the state of the cluster's Services in batches (watch.go), and the relay keeps the state in a file
// (file.go). So a node that starts without its cloud continues with what it knew. The relay makes a plan from the state
// (plan.go). The plan has the ports of Services with an endpoint that the node does not reach by itself, if the node or
// the tunnel reaches another one. kube-proxy would send connections to all endpoints of such a port. If the node
// reaches some of them by itself, rules of the kernel send connections only there (layout.go, table_linux.go).
// Otherwise the rules redirect connections to the relay. The relay accepts a connection, asks the cloud to reach an
// endpoint, and splices the two connections (conn.go). kube-proxy serves all other Services.
//
// With Config.Full, the edge serves all Services, in place of kube-proxy. Then it writes no rules while rules of
// kube-proxy are on the node (kubeproxy_linux.go).
//
// Datagrams go the same way (datagrams.go). One conn has all datagrams to one endpoint, in frames of package udp. The
// relay asks the kernel's conntrack to which Service a caller has sent a datagram (conntrack_linux.go).
//
// On the node that has the endpoint, the cloud asks the module [Edge] to dial it (edge.go). Edge dials only endpoints
// that the state of this node has on this node.
//
// With the module [Near], the edges of one site reach each other's endpoints over the local network (near.go,
// nearserve.go), and not through the cloud.
//
// With Config.DNS, the relay also answers DNS queries of pods (dns.go). Package names makes the answers from the state.
//
// A [Relay] owns its file, its nftables tables, its two addresses on loopback, its listeners, and the connections that
// it accepts. When Run ends, the tables are removed, but with Config.Full the table of the Services stays. The file and
// the addresses always stay.
//
// The relay serves TCP and UDP. An endpoint does not see the address of the caller: the connection comes from the
// endpoint's own node.
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
	"sync/atomic"
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
	File   string         // the path of the file that keeps the state
	Direct []netip.Prefix // networks that this node reaches without the tunnel
	Full   bool           // the edge serves all Services, in place of kube-proxy
	// Spread: each endpoint of a Service has the same chance to get a connection. Otherwise, those that this node reaches
	// by itself come first, unless the Service asks for the same (services.Service.spread).
	Spread bool
	// Watch opens a stream on the connection of a session. It waits for a session. When ctx is done, the wait or the
	// stream ends.
	Watch func(ctx context.Context) (Stream, error)
	// Reach opens a conn to a target (see services.Target) through the cloud. ctx ends only the dial, not the conn. A
	// refusal is a *tunnel.Refusal.
	Reach func(ctx context.Context, target string) (net.Conn, error)
	// AwaitsRouted: Run waits for the first call of SetRouted, for routedTime at most, before it writes rules. Rules
	// written earlier would send connections to neighbours through the tunnel, and open connections keep their way.
	AwaitsRouted bool
	// InContainer reports whether packets to an address go to a container of this machine. IsOwn reports whether an
	// address is one of this machine. nil stands for a function that always returns false. Home uses both.
	InContainer, IsOwn func(netip.Addr) bool

	// Left is closed when the next process of this edge takes over; nothing is sent. Then Run serves callers until that
	// process does. nil: never.
	Left <-chan struct{}

	Datagrams udp.EdgeConfig // of the UDP sockets to endpoints; New sets Core, Log and OneTarget
	DNS       DNS            // answers DNS queries of pods; nil: the edge answers none
	Domain    string         // the cluster's DNS domain, such as cluster.local; used only if DNS is set
	Counters  *tunnel.Counters
	Log       *slog.Logger
}

// Relay is the edge's module. Any goroutine may call its methods.
type Relay struct {
	// Set once.
	cfg        Config
	kernel     kernel
	dnsKernel  kernel // nil: the edge leaves DNS to others
	log        *slog.Logger
	grace      time.Duration // how long conns may go on after Run's ctx is done
	successor  time.Duration // successorTime, except in tests
	every      time.Duration // how often Run checks the rules in the kernel
	dial       func(ctx context.Context, network, addr string) (net.Conn, error)
	handedOver chan struct{} // closed when Run no longer serves new callers; nothing is sent
	routed     chan struct{} // closed by the first call of SetRouted; nothing is sent
	patience   time.Duration // routedTime; tests replace it
	wake       chan struct{} // Run must bring a new plan into the kernel; capacity 1, never closed
	release    *time.Timer   // calls collect, see releaseMemory
	garbage    atomic.Int64  // how many items have changed since release was last set
	counts     counters
	affinity   *affinity
	refusals   refusals
	callers    callers
	near       *Near        // reaches edges of this site; nil: off
	direct     *udp.Edge    // sends datagrams to endpoints that this node reaches by itself
	ends       []*udp.Edge  // all that send datagrams to endpoints: direct, and the one of Edge
	udp        udp.Counters // of the datagrams that the kernel redirects
	failures   refusals     // endpoints that could not be reached: new flows avoid them
	watchers   watchers
	warnFull   tunnel.Limiter
	warnFail   tunnel.Limiter
	warnItem   tunnel.Limiter

	warnHealth tunnel.Limiter
	warnChange tunnel.Limiter
	warnForget tunnel.Limiter
	warnRoute  tunnel.Limiter

	mu      sync.RWMutex // guards the following
	planner planner
	permits func(netip.AddrPort) bool // which endpoints on this node may be dialled; nil: see Home
	state   *services.State
	loaded  bool          // the file was read, or cannot be read
	streams bool          // a stream of the cloud runs, and has sent the digests of state
	zone    *names.Zone   // the DNS names in state; nil: the edge leaves DNS to others
	changed tunnel.Change // wakes goroutines that wait for a new plan
	plan    *plan
	since   time.Time // when the state was last known to be that of the cloud
	current bool      // the state is that of the cloud now, as a live stream says
	watch   error     // why the last stream has ended; nil: a stream runs, or there was none
	broken  error     // why the kernel does not do what the plan says; nil: it does
	beside  error     // what else serves the Services of this node; nil: nothing
	unkept  error     // why the file cannot be opened or written
	inForce bool      // the kernel's rules are those of plan
	serves  int       // how many ports of Services the kernel's rules are for
	named   bool      // queries for names are redirected to this edge
	unnamed error     // why they are not; nil: they are, or the configuration has no dns
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
	release := time.AfterFunc(time.Hour, collect)
	release.Stop()
	return &Relay{
		direct: direct, ends: []*udp.Edge{direct},
		refusals: refusals{keep: refusalTime, max: maxRefusals}, failures: refusals{keep: avoidTime, max: maxFailures},
		planner: planner{string(cfg.Node), cfg.Direct, cfg.Full, cfg.Spread},
		cfg:     cfg, kernel: k, log: cfg.Log.With("module", name), grace: tunnel.GracePeriod, every: interval,
		successor: successorTime,
		dial:      (&net.Dialer{Control: directControl}).DialContext, wake: make(chan struct{}, 1),
		handedOver: make(chan struct{}), routed: make(chan struct{}), patience: routedTime,
		release:  release,
		affinity: newAffinity(maxAffinity), callers: callers{max: maxPerCaller}, zone: newZone(cfg),
		state: services.NewState(), plan: newPlan(),
	}
}

// routedTime is how long Run waits for SetRouted. The network of the pods is ready within some tens of milliseconds.
const routedTime = 2 * time.Second

// Name implements tunnel.Module.
func (r *Relay) Name() string { return name }

// Run implements tunnel.Module. It serves until ctx is done. Then open conns may continue for tunnel.GracePeriod. What
// fails is tried again, and Note reports it. But a listener or a socket that breaks ends Run with an error: the kernel
// would still redirect connections to it.
func (r *Relay) Run(ctx context.Context) error {
	defer r.release.Stop()
	file := r.load()
	connCtx, endConns := tunnel.Grace(ctx, r.grace)
	defer endConns()
	serving, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	called, endCalls := context.WithCancel(context.WithoutCancel(ctx)) // lasts as long as callers are served
	defer endCalls()
	door := newDoor(connCtx, r, fail)
	if r.cfg.AwaitsRouted {
		select {
		case <-r.routed:
		case <-time.After(r.patience):
		case <-ctx.Done():
		}
	}
	r.guard(fail, func() error { r.apply(door); return nil }) // without waiting for the cloud
	var keeping, running sync.WaitGroup
	keeping.Go(func() { r.guard(fail, func() error { r.follow(serving, file); return nil }) })
	keeping.Go(func() {
		r.guard(fail, func() error { file.keep(serving, r.noteFile, r.adopt, r.lastCurrent); return nil })
	})
	start := func(f func() error) { running.Go(func() { r.guard(fail, f) }) }
	start(func() error {
		keeping.Wait()
		r.noteCurrent(false, nil)
		file.close(r.lastCurrent()) // the next process waits for the file
		return nil
	})
	start(func() error { return r.direct.Run(called) })
	if r.dnsKernel != nil {
		start(func() error { r.serveDNS(serving, fail); return nil })
	}
	if r.cfg.Full {
		start(func() error { r.serveHealth(called, fail); return nil })
	}
	r.guard(fail, func() error { r.serve(serving, door); return nil })
	endCalls()
	close(r.handedOver)
	var err error
	if ctx.Err() == nil {
		err = context.Cause(serving)
		endConns() // ctx is not done, so nothing else would end them
	}
	running.Wait()
	door.drain()
	if removeErr := r.kernel.remove(); removeErr != nil {
		r.log.Warn("the table of nftables cannot be removed", "err", removeErr)
	}
	return err
}

// guard calls f. If f fails or panics, guard calls fail with the error, which makes Run end.
func (r *Relay) guard(fail context.CancelCauseFunc, f func() error) {
	if err := tunnel.Guard(r.log, r.cfg.Counters, "the edge stops", f); err != nil {
		fail(err)
	}
}

// interval is how often the relay checks that its rules are still in the kernel, and tries again what has failed.
const interval = 10 * time.Second

const (
	// successorTime bounds how long the relay waits for the rules of the next process. That process needs the file first.
	successorTime = 10 * time.Second
	// successorPause is how often the relay looks for these rules.
	successorPause = 20 * time.Millisecond
)

// serve keeps the kernel's rules as the plan says until ctx is done. Then serve removes the redirects. If the next
// process of this edge takes over, serve waits for its rules before.
func (r *Relay) serve(ctx context.Context, d *door) {
	defer d.close()
	ticker := time.NewTicker(r.every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			r.awaitSuccessor(func() bool { return d.programmed && r.kernel.intact() })
			return
		case <-r.wake:
		case <-ticker.C:
			if ctx.Err() != nil {
				continue // the next process may have written its rules
			}
			if d.programmed && !r.kernel.intact() {
				r.log.Warn("another program has removed the rules of Services, or changed them: they are written again")
				d.programmed = false
			}
			r.noteBeside(d)
		}
		if ctx.Err() == nil {
			r.apply(d)
		}
	}
}

// awaitSuccessor waits until stands returns false: the rules of the next process are in the kernel in place of those of
// this process. It waits for r.successor at most, and not at all if no process takes over.
func (r *Relay) awaitSuccessor(stands func() bool) {
	if !tunnel.IsClosed(r.cfg.Left) {
		return
	}
	for end := time.Now().Add(r.successor); stands() && time.Now().Before(end); {
		time.Sleep(successorPause)
	}
}

// HandedOver returns a channel that is closed when Run no longer serves new callers; nothing is sent.
func (r *Relay) HandedOver() <-chan struct{} { return r.handedOver }

// noteBeside stores that rules of kube-proxy have come while those of this edge are in the kernel, for Note.
func (r *Relay) noteBeside(d *door) {
	var err error
	if r.cfg.Full && d.programmed {
		if err = r.kernel.refused(); !errors.Is(err, errKubeProxy) {
			err = nil
		}
	}
	r.mu.Lock()
	before := r.beside
	r.beside = err
	r.mu.Unlock()
	if err != nil && before == nil {
		r.log.Warn("rules of kube-proxy have appeared on this node: two programs now serve its Services", "err", err)
	}
}

// apply brings the plan into the kernel. It keeps the error for Note.
func (r *Relay) apply(d *door) {
	r.mu.RLock()
	known := r.state.Len() > 0 || !r.since.IsZero()
	r.mu.RUnlock()
	var err error
	if known || !r.cfg.Full {
		err = d.program()
	} else {
		err = d.refused() // the rules that the last process has left are better than an empty table
	}
	r.mu.Lock()
	before := r.broken
	r.inForce = d.programmed && err == nil
	if r.broken, r.serves = err, 0; d.programmed {
		r.serves = len(r.plan.frontends)
	} else {
		clear(r.plan.changed) // next time, program takes all rules
	}
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

// adopt makes the state from the file the state of the relay. It returns false if the cloud has sent a state already,
// or is sending one.
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
	r.planner.renew(r.plan, state)
	r.plannedLocked()
	r.log.Info("the state of Services is loaded", "file", r.cfg.File, "items", state.Len(),
		"redirected", len(r.plan.frontends))
	r.releaseMemory(state.Len())
	return true
}

// SetRouted tells the relay to which networks of pods this node has routes. The node reaches these networks by itself,
// like those of Config.Direct.
func (r *Relay) SetRouted(networks []netip.Prefix) {
	direct := slices.Concat(r.cfg.Direct, networks)
	r.mu.Lock()
	defer r.mu.Unlock()
	if !tunnel.IsClosed(r.routed) {
		close(r.routed)
	}
	if slices.Equal(direct, r.planner.direct) {
		return
	}
	r.planner.direct = direct
	r.planner.renew(r.plan, r.state)
	r.plannedLocked()
}

// plannedLocked wakes the goroutines that wait for a new plan. The caller holds mu.
func (r *Relay) plannedLocked() {
	r.changed.Notify()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// noteFile stores why the file cannot be opened or written; nil: it can.
func (r *Relay) noteFile(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil && r.unkept == nil {
		r.log.Warn("the state of Services is only in memory", "file", r.cfg.File, "err", err)
	}
	r.unkept = err
}

// noteCurrent stores whether the state is that of the cloud now. If it is not, why says the reason.
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

// Note says what an operator should repair; "": nothing.
func (r *Relay) Note() string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var stale error
	if !r.current && r.loaded {
		stale = r.staleLocked()
		if r.watch != nil {
			stale = fmt.Errorf("%w: %w", stale, r.watch)
		}
	}
	var leftOut error
	if n := r.state.LeftOut(); n > 0 {
		leftOut = fmt.Errorf("the cluster has too many Services, endpoints and nodes: this node does not know %d of them; "+
			"name the namespaces that edges need in [mode.cloud.services], and start this edge again", n)
	}
	if err := errors.Join(r.broken, r.beside, r.unnamed, r.unkept, stale, leftOut); err != nil {
		return err.Error()
	}
	return ""
}

// staleLocked says since when the state may be out of date. The caller holds mu.
func (r *Relay) staleLocked() error {
	if r.since.IsZero() {
		return errors.New("the cloud has never sent the Services of the cluster")
	}
	return fmt.Errorf("the state of Services is out of date since %s", r.since.UTC().Format(time.RFC3339))
}

// Status says what the relay serves.
func (r *Relay) Status() string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return fmt.Sprintf("items: %d; addresses that are redirected: %d; conns: %d; flows of UDP: %d",
		r.state.Len(), r.serves, r.counts.live.Load(), r.udp.Flows.Load())
}
