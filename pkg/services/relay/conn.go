package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// maxConns bounds the connections that the relay has at once. Each takes some 70 KiB.
	maxConns = 8192
	// reachTimeout bounds how long a caller waits for a conn to an endpoint. The relay tries up to maxAttempts endpoints,
	// each for at most attemptTimeout.
	reachTimeout   = 20 * time.Second
	attemptTimeout = 10 * time.Second
	maxAttempts    = 5
	// maxPerCaller bounds the connections of one caller, so that a caller with many idle connections leaves room for
	// others.
	maxPerCaller = maxConns / 4
	// refusalTime is how long the relay does not ask the cloud again for a target that the cloud has refused. Each refused
	// request counts against a limit of the session for two seconds. maxRefusals bounds the targets that the relay
	// remembers.
	refusalTime = time.Second
	maxRefusals = 4096
)

// door has the sockets to which the kernel redirects connections and datagrams, and knows which rules the kernel has.
// The goroutine of Relay.serve owns it.
type door struct {
	relay *Relay                  // set once
	fail  context.CancelCauseFunc // ends Relay.Run; set once

	ctx     context.Context    //nolint:containedctx // of the conns; it outlives the context of Run, see tunnel.Grace
	serving context.Context    //nolint:containedctx // of the listeners and sockets: no flow begins after its end
	stop    context.CancelFunc // ends serving

	listeners  []net.Listener
	sockets    []*net.UDPConn // one for each listener, at the same address
	programmed bool           // the kernel has the rules of the plan, apart from those that plan.take returns
	accepting  sync.WaitGroup
	conns      sync.WaitGroup // counts the goroutines of conns and of sockets
}

func newDoor(ctx context.Context, r *Relay, fail context.CancelCauseFunc) *door {
	d := &door{relay: r, ctx: ctx, fail: fail}
	d.serving, d.stop = context.WithCancel(ctx)
	return d
}

// open adds the relay's own addresses to the machine, and listens on each of them. It skips an address on which it
// listens already.
func (d *door) open() error {
	addrs, err := d.relay.kernel.open()
	if err != nil {
		return err
	}
	for _, addr := range addrs {
		if slices.ContainsFunc(d.addrs(), func(a netip.AddrPort) bool { return a.Addr() == addr }) {
			continue
		}
		// The kernel chooses the port, so that a new process can listen beside this one.
		var cfg net.ListenConfig
		ln, err := cfg.Listen(d.ctx, "tcp", netip.AddrPortFrom(addr, 0).String())
		if err != nil {
			return fmt.Errorf("listening on %s, the relay's own address: %w", addr, err)
		}
		socket, err := cfg.ListenPacket(d.ctx, "udp", netip.AddrPortFrom(addr, 0).String())
		if err != nil {
			ln.Close()
			return fmt.Errorf("opening a UDP socket at %s, the relay's own address: %w", addr, err)
		}
		datagrams := socket.(*net.UDPConn) //nolint:forcetypeassert // it listens by "udp"
		d.listeners, d.sockets = append(d.listeners, ln), append(d.sockets, datagrams)
		d.programmed = false // the rules lack this listener
		steady := listen.Steady(ln, d.relay.log)
		d.accepting.Go(func() { d.relay.guard(d.fail, func() error { return d.accept(steady) }) })
		d.conns.Go(func() {
			d.relay.guard(d.fail, func() error { return d.relay.forward(d.serving, d.ctx, datagrams) })
		})
	}
	return nil
}

// refused returns why the kernel must have no rules of this edge now, or nil. If the reason is rules of kube-proxy, and
// this process has opened no listener yet, refused also removes the table that an earlier process left. The rules of
// that table would come before those of kube-proxy, and nobody would keep them current.
func (d *door) refused() error {
	err := d.relay.kernel.refused()
	if errors.Is(err, errKubeProxy) && len(d.listeners) == 0 {
		d.relay.kernel.removeLeft(d.relay.log)
	}
	return err
}

// program brings the rules of the plan into the kernel.
func (d *door) program() error {
	if !d.programmed {
		if err := d.refused(); err != nil {
			return err
		}
	}
	if err := d.open(); err != nil {
		d.programmed = false
		return err
	}
	r := d.relay
	r.mu.Lock()
	before, after := r.plan.take()
	r.mu.Unlock()
	d.setPorts(before)
	d.setPorts(after)
	err := r.write(r.kernel, d.addrs(), d.programmed, before, after, d.all)
	d.programmed = err == nil
	return err
}

// all returns the rules of the plan, with the ports of the relay. pending are the rules that the kernel may still have,
// and that have changed since program last asked the plan.
func (d *door) all() (pending, all rules) {
	d.relay.mu.Lock()
	pending, _ = d.relay.plan.take()
	all = d.relay.plan.all()
	d.relay.mu.Unlock()
	d.setPorts(pending)
	d.setPorts(all)
	return pending, all
}

// write replaces the rules before by the rules after in a kernel. known: it is known that the kernel has the rules
// before, and which others it has. If it is not, or if the kernel cannot make the change, write calls all, and the
// kernel gets the rules that all returns, in place of any others. After an error, it is not known what the kernel has.
func (r *Relay) write(
	k kernel, listeners []netip.AddrPort, known bool, before, after rules, all func() (pending, all rules),
) error {
	if known && len(before)+len(after) > 0 {
		if err := k.change(before, after); err != nil {
			known = false
			if n, ok := r.warnChange.Allow(); ok {
				r.log.Info("the kernel does not take a change of the rules of Services, so all are written again",
					"err", err, "skipped", n)
			}
		}
	}
	if !known {
		var pending rules
		pending, after = all()
		maps.Copy(pending, before) // of two rules that an address had, the kernel has the older one
		before = pending
		if err := k.program(listeners, after); err != nil {
			return err
		}
	}
	if err := k.route(before, after); err != nil {
		if n, ok := r.warnRoute.Allow(); ok {
			r.log.Warn("processes of this node need another route, such as a default route, to reach some ClusterIPs",
				"err", err, "skipped", n)
		}
	}
	if err := k.forget(before, after); err != nil {
		if n, ok := r.warnForget.Allow(); ok {
			r.log.Warn("existing UDP flows keep their old endpoint until they are idle", "err", err, "skipped", n)
		}
	}
	return nil
}

// setPorts adds the ports of the relay to the rules that redirect to the relay. A family without listener gets no port:
// the kernel leaves out its rules.
func (d *door) setPorts(all rules) {
	for i, listener := range d.addrs() {
		datagrams := d.sockets[i].LocalAddr().(*net.UDPAddr).AddrPort() //nolint:forcetypeassert // it is a UDP socket
		for at, r := range all {
			if !at.isPort() || !r.flowsRelayed() || at.Addr().Is4() != listener.Addr().Is4() {
				continue
			}
			r.port = listener.Port()
			if at.protocol == protocolUDP {
				r.port = datagrams.Port()
			}
			all[at] = r
		}
	}
}

// addrs returns the addresses of the TCP listeners.
func (d *door) addrs() []netip.AddrPort {
	all := make([]netip.AddrPort, len(d.listeners))
	for i, ln := range d.listeners {
		all[i] = ln.Addr().(*net.TCPAddr).AddrPort() //nolint:forcetypeassert // it listens by "tcp"
	}
	return all
}

// accept accepts connections at a listener until serving is done. It serves each in a goroutine of its own.
func (d *door) accept(ln net.Listener) error {
	r := d.relay
	err := listen.Accept(d.serving, ln, func(c net.Conn) {
		from := listen.AddrOf(c.RemoteAddr())
		if r.counts.live.Add(1) > maxConns || !r.callers.enter(from) {
			r.counts.live.Add(-1)
			r.counts.refused.add(tunnel.Overloaded)
			tunnel.Reset(c)
			if n, ok := r.warnFull.Allow(); ok {
				r.log.Warn("connections to Services are reset: there are too many", "max", maxConns,
					"max_per_caller", r.callers.max, "caller", from, "skipped", n)
			}
			return
		}
		d.conns.Go(func() {
			defer r.counts.live.Add(-1)
			defer r.callers.leave(from)
			serve := func() error { r.serveConn(d.ctx, c); return nil }
			if tunnel.Guard(r.log, r.cfg.Counters, "the connection ends", serve) != nil {
				tunnel.Reset(c)
			}
		})
	})
	if err != nil {
		return fmt.Errorf("accepting connections to Services on %s: %w", ln.Addr(), err)
	}
	return nil
}

// lastCallers is how long the relay still accepts connections after the kernel stops redirecting them to it. The kernel
// would reset those that wait in the listener's queue, or whose handshake is not complete.
const lastCallers = 500 * time.Millisecond

// close stops the redirects in the kernel, and closes the listeners. The table stays while conns live: the kernel
// translates the packets of a conn only as long as its rule is there.
func (d *door) close() {
	if err := d.relay.kernel.clear(); err != nil {
		d.relay.log.Warn("Services cannot be taken out of nftables", "err", err)
	}
	d.stop()
	for _, ln := range d.listeners {
		if err := ln.(*net.TCPListener).SetDeadline(time.Now().Add(lastCallers)); err != nil { // so accept ends
			ln.Close()
		}
	}
	d.accepting.Wait()
	for _, ln := range d.listeners {
		ln.Close()
	}
}

// drain waits until the conns and the flows have ended. Then it removes the kernel's entries for redirected flows. So
// kube-proxy gets the datagrams that callers still send from the same ports.
func (d *door) drain() {
	d.conns.Wait()
	pending, all := d.all()
	maps.Copy(all, pending)
	if err := d.relay.kernel.forget(all.toRelay(), nil); err != nil {
		d.relay.log.Warn("existing UDP flows still go to this edge, which is stopping", "err", err)
	}
}

// serveConn connects c to an endpoint of the Service that the caller has dialled. It returns when both directions have
// ended, or when ctx is done.
func (r *Relay) serveConn(ctx context.Context, c net.Conn) {
	tunnel.ResetOnDeath(c)
	to, err := r.kernel.original(c)
	if local, ok := c.LocalAddr().(*net.TCPAddr); err != nil || !ok || to == unmapped(local.AddrPort()) {
		tunnel.Reset(c) // the kernel did not redirect it: a program dialled the relay's own address
		return
	}
	from := listen.AddrOf(c.RemoteAddr())
	start := time.Now()
	target, err := r.reach(ctx, address{to, protocolTCP}, from)
	if err != nil {
		r.counts.refused.add(tunnel.CodeOf(err))
		r.log.Debug("conn refused", "caller", from, "target", to, "dur", time.Since(start), "err", err)
		if n, ok := r.warnFail.Allow(); ok {
			r.log.Warn("a Service cannot be reached", "target", to, "err", err, "skipped", n)
		}
		tunnel.Reset(c)
		return
	}
	r.counts.opened.Add(1)
	sent, received, err := tunnel.Splice(ctx, c, target)
	r.counts.sent.Add(sent)
	r.counts.received.Add(received)
	r.log.Debug("conn ended", "caller", from, "target", to, "bytes", sent+received, "dur", time.Since(start), "err", err)
}

func unmapped(at netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
}

// reach connects to an endpoint of the frontend at an address. If it cannot reach an endpoint, it tries another. If an
// endpoint itself refuses the connection, reach returns that refusal, as the answer of the Service.
func (r *Relay) reach(ctx context.Context, to address, from netip.Addr) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	f, w, spread, known := r.waysNow(to)
	if !known {
		return nil, tunnel.Refusef(tunnel.Denied, "no Service that this node knows has %s", to)
	}
	sticky := time.Duration(f.service.GetAffinitySeconds()) * time.Second
	key := affinityKey{from, f.path, f.port.GetName()}
	ordered := order(w, r.affinity.get(key, sticky), spread)
	err := error(tunnel.Refusef(tunnel.Unreachable, "no endpoint of %s can be reached", nameOf(f.path)))
	for _, one := range ordered[:min(len(ordered), maxAttempts)] {
		var c net.Conn
		c, err = r.try(ctx, one)
		if err == nil {
			r.affinity.put(key, one.address(), sticky)
			return c, nil
		}
		if tunnel.CodeOf(err) == tunnel.Refused || ctx.Err() != nil {
			break
		}
	}
	return nil, err
}

// waysNow returns the frontend at an address, and the ways to its endpoints as the state has them now. spread says
// whether each of them has the same chance. known is false if there is no such frontend.
func (r *Relay) waysNow(to address) (f frontend, w ways, spread, known bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	places := []address{to}
	if r.planner.full {
		every := netip.IPv4Unspecified()
		if to.Addr().Is6() {
			every = netip.IPv6Unspecified()
		}
		places = append(places, address{netip.AddrPortFrom(every, to.Port()), to.protocol}) // a node port
	}
	for _, at := range places {
		if one := r.plan.frontends[at]; one != nil {
			f, known = *one, true
			break
		}
	}
	if !known {
		f, known = r.scanLocked(places)
	}
	if known {
		w = r.planner.ways(r.state, f, chosen(f, r.state.Endpoints(f.path), r.planner.self(r.state)))
	}
	return f, w, r.planner.spreads(f), known
}

// scanLocked looks in the state for the frontend at the first of places that a Service has. It is for a connection that
// the kernel redirected before the plan changed: the plan has no frontend any more if the node now reaches all
// endpoints by itself. The caller holds mu.
func (r *Relay) scanLocked(places []address) (f frontend, known bool) {
	first := len(places)
	for path, service := range r.state.Services() {
		for other := range r.planner.frontends(path, service) {
			if i := slices.Index(places[:first], other.at); i >= 0 {
				f, first = other, i
			}
		}
	}
	return f, first < len(places)
}

// attempt is a way to an endpoint. far says that this node does not reach the endpoint by itself.
type attempt struct {
	way
	far bool
}

// order returns the ways in the order in which the relay tries them. The endpoint that the caller had before is first.
// Then come endpoints that the node reaches by itself, and then the far ones, each group at random. With spread, any
// endpoint may be the first one, with equal chances.
func order(w ways, before netip.AddrPort, spread bool) []attempt {
	all := make([]attempt, 0, len(w.direct)+len(w.far))
	for _, one := range shuffled(w.direct) {
		all = append(all, attempt{one, false})
	}
	for _, one := range shuffled(w.far) {
		all = append(all, attempt{one, true})
	}
	if spread && len(all) > 0 {
		i := rand.IntN(len(all))
		all[0], all[i] = all[i], all[0]
	}
	if i := slices.IndexFunc(all, func(a attempt) bool { return a.address() == before }); i > 0 {
		first := all[i]
		all = slices.Insert(slices.Delete(all, i, i+1), 0, first)
	}
	return all
}

func shuffled(list []way) []way {
	rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list
}

// try connects to one endpoint: over the local network or through the cloud if it is far, else directly.
func (r *Relay) try(ctx context.Context, a attempt) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	if a.far {
		if c, answered, err := r.near.reach(ctx, a.way); answered {
			return r.opened(viaNear, c, err)
		}
		c, err := r.reachFar(ctx, a.target())
		return r.opened(viaCloud, c, err)
	}
	if err := r.mayDial(a.Endpoint, a.address()); err != nil {
		return nil, err
	}
	c, err := r.dial(ctx, "tcp", a.address().String())
	switch {
	case err == nil:
		return r.opened(viaNode, c, nil)
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil, tunnel.Refusef(tunnel.Refused, "%v", err)
	}
	return nil, tunnel.Refusef(tunnel.Unreachable, "%v", err)
}

// opened counts a conn to an endpoint by its way if err is nil. It returns c or err.
func (r *Relay) opened(way via, c net.Conn, err error) (net.Conn, error) {
	if err != nil {
		return nil, err
	}
	r.counts.ways[way].Add(1)
	return c, nil
}

// mayDial returns a refusal if this node must not dial an endpoint. A user who may write EndpointSlices can claim that
// any address is on this node, and the edge dials from the node's own network. Networks of Config.Direct and of
// SetRouted are permitted.
func (r *Relay) mayDial(e *services.Endpoint, at netip.AddrPort) error {
	r.mu.RLock()
	permits, routed := r.permits, r.planner.isRouted(e)
	r.mu.RUnlock()
	if routed || permits == nil && r.Home(at.Addr()) || permits != nil && permits(at) {
		return nil
	}
	return tunnel.Refusef(tunnel.Denied, "an EndpointSlice places %s on this node, but neither the node nor a pod has "+
		"that address: if it is right, add it to allow in [mode.edge]", at)
}

// directControl is net.Dialer.Control for the dial to an endpoint that this node reaches by itself. The kernel's rules
// do not redirect the connection. If the relay gives up the dial, or dies before it splices, the endpoint sees a reset.
func directControl(network, addr string, c syscall.RawConn) error {
	return errors.Join(Unredirected(network, addr, c), tunnel.ResetOnDeathControl(network, addr, c))
}

// reachFar asks the cloud for a conn to a target. For refusalTime after the cloud has refused that target, reachFar
// returns the old refusal and does not ask.
func (r *Relay) reachFar(ctx context.Context, target string) (net.Conn, error) {
	if err := r.refusals.get(target); err != nil {
		return nil, err
	}
	c, err := r.cfg.Reach(ctx, target)
	if err == nil {
		return c, nil
	}
	switch tunnel.CodeOf(err) {
	case tunnel.NoSuchNode, tunnel.Denied, tunnel.Internal:
		r.refusals.put(target, err)
	}
	return c, err
}

// refusals remembers the last refusal of each target for a while.
type refusals struct {
	keep time.Duration // set once
	max  int           // set once: how many targets are remembered

	mu   sync.Mutex // guards the following
	last map[string]refusal
}

type refusal struct {
	err   error
	until time.Time
}

// get returns the refusal of a target that is remembered, or nil.
func (f *refusals) get(target string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if had, ok := f.last[target]; ok && time.Now().Before(had.until) {
		return had.err
	}
	return nil
}

// put remembers the refusal of a target. If the map is full, put first forgets all other targets.
func (f *refusals) put(target string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.last == nil || len(f.last) >= f.max {
		f.last = make(map[string]refusal)
	}
	f.last[target] = refusal{err, time.Now().Add(f.keep)}
}

// callers counts the connections of each caller, by its address.
type callers struct {
	max int // set once

	mu sync.Mutex // guards the following
	of map[netip.Addr]int
}

// enter counts a connection of a caller. If the caller has max connections already, enter counts nothing and returns
// false.
func (c *callers) enter(from netip.Addr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of[from] >= c.max {
		return false
	}
	if c.of == nil {
		c.of = make(map[netip.Addr]int)
	}
	c.of[from]++
	return true
}

// leave uncounts a connection that enter has counted.
func (c *callers) leave(from netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of[from]--; c.of[from] == 0 {
		delete(c.of, from)
	}
}

// maxAffinity bounds the callers whose last endpoint the relay remembers.
const maxAffinity = 1 << 16

// affinityKey identifies a caller of a port of a Service. A caller keeps its endpoint at all ClusterIPs of the Service,
// so the key has the name of the port and no address.
type affinityKey struct {
	caller netip.Addr
	path   string // of the Service
	port   string // its name
}

// affinity remembers which endpoint a caller had, for Services with session affinity (sessionAffinity: ClientIP).
type affinity struct {
	max int // set once

	mu   sync.Mutex // guards the following
	last map[affinityKey]affine
}

type affine struct {
	endpoint netip.AddrPort
	until    time.Time
}

func newAffinity(limit int) *affinity {
	return &affinity{max: limit, last: make(map[affinityKey]affine)}
}

// get returns the address of the endpoint that the caller had; the zero AddrPort: none. sticky is the time of the
// session affinity; 0: the Service has none.
func (a *affinity) get(key affinityKey, sticky time.Duration) (endpoint netip.AddrPort) {
	if sticky == 0 {
		return endpoint
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if had := a.last[key]; time.Now().Before(had.until) {
		return had.endpoint
	}
	return endpoint
}

// put remembers the endpoint of a caller for sticky. If there is no room, put first forgets callers whose time is over,
// and then any others.
func (a *affinity) put(key affinityKey, endpoint netip.AddrPort, sticky time.Duration) {
	if sticky == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if _, had := a.last[key]; !had && len(a.last) >= a.max {
		for k, v := range a.last {
			if now.After(v.until) {
				delete(a.last, k)
			}
		}
		for k := range a.last {
			if len(a.last) < a.max {
				break
			}
			delete(a.last, k)
		}
	}
	a.last[key] = affine{endpoint, now.Add(sticky)}
}
