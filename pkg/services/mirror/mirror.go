// Package mirror lets pods of the cluster reach Services whose pods run on edge nodes, without proxy settings.
//
// A Service with the annotation tunnel.example/mirror, the original, gets a twin: a Service without selector, whose
// endpoints are the replicas of the cloud, on a port of the cloud for each of its TCP ports. A connection to such a
// port goes to an endpoint of the original, as package egress chooses it.
//
//	objects := client.Mirrors(kube.MirrorsConfig{
//		Annotation: mirror.Annotation, Label: mirror.Label, Value: "tunnel-system",
//		Namespace: "tunnel-system", Service: "tunnel-cloud-peers",
//	}, counters, log)
//	door := mirror.New(mirror.Config{Objects: objects, First: 20000, Last: 20999, Serve: frontDoor.Serve, Log: log})
//	writer := mirror.NewWriter(door, client.Lease("tunnel-system", kube.MirrorLease, "cloud-1", log))
//
// One conn:
//
//	pod ── ClusterIP of the twin ──▶ a replica, port 20000 ── Mirror: web.shop.svc:80 ── Config.Serve
//
// The EndpointSlice of a twin records the port, and all replicas follow the EndpointSlices. One replica, which holds
// the Lease, assigns ports and writes twins and EndpointSlices (writer.go). It copies the ready endpoints of a Service
// that selects the pods of the cloud, so a replica that stops or dies leaves the EndpointSlices as it leaves that
// Service.
//
// Users may change a twin, as they may change the original. Few users may change EndpointSlices. Therefore no port is
// read from the twin. If two EndpointSlices claim one port, the older one counts.
//
// Nobody authenticates callers. callers.go bounds them, and refuses to dial a port of a twin for a caller of a twin.
package mirror

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// Annotation of a Service says that it has a twin: "true", or the name of the twin.
	Annotation = "tunnel.example/mirror"
	// Label of twins and of their EndpointSlices has the namespace of the cloud that has made them.
	Label = "tunnel.example/mirrored-by"
	// labelOf has the name of the original.
	labelOf = "tunnel.example/mirror-of"
)

// Config configures a [Mirror].
type Config struct {
	Objects     *kube.Mirrors // what Kubernetes has; with Annotation, Label and Owner
	Owner       string        // the namespace of the cloud: the value of Label
	First, Last uint16        // the ports that the cloud may open
	Namespaces  []string      // whose Services are mirrored; nil: all
	// Serve connects a caller to addr, host:port of a Service. It owns c, and returns when the conn has ended, which ctx
	// ends at the latest.
	Serve    func(ctx context.Context, c net.Conn, addr string)
	Sockets  *listen.Sockets  // opens the listeners; nil: nobody can take them over
	Counters *tunnel.Counters // counts panics, and limits that are reached
	Log      *slog.Logger
}

// Mirror is the module that serves the ports of twins.
type Mirror struct {
	// Set once.
	cfg    Config
	log    *slog.Logger
	grace  time.Duration // how long conns may go on after Run's ctx is done
	listen func(ctx context.Context, port uint16) (net.Listener, error)

	callers  callers
	warnFull tunnel.Limiter                      // of log lines about connections that are reset
	replicas atomic.Pointer[map[netip.Addr]bool] // the addresses of the replicas; nil: not known yet

	doors map[uint16]*door // owned by Run

	mu     sync.Mutex      // guards the following
	opened bool            // Run has opened the ports once
	failed error           // why a port is not open; nil: all are
	seen   map[uint16]bool // the ports in the EndpointSlices
	// freed says since when a port is in no EndpointSlice, for freedFor. It gets no other twin meanwhile: kube-proxy on
	// some node may still lead callers of the old twin there.
	freed map[uint16]time.Time
}

// door is an open port.
type door struct {
	ln   net.Listener
	addr atomic.Pointer[string] // host:port of the original; never nil
}

// New returns a Mirror. It opens nothing before Run.
func New(cfg Config) *Mirror {
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	m := &Mirror{
		cfg: cfg, log: cfg.Log.With("module", "mirror"), grace: tunnel.GracePeriod,
		callers: callers{max: maxConns, maxPerAddress: maxConnsPerAddress},
		doors:   make(map[uint16]*door), freed: make(map[uint16]time.Time),
	}
	m.listen = func(ctx context.Context, port uint16) (net.Listener, error) {
		addr := ":" + strconv.Itoa(int(port))
		return cfg.Sockets.Listen(ctx, listen.Callers, net.ListenConfig{}, "tcp", addr)
	}
	return m
}

// Name implements tunnel.Module.
func (m *Mirror) Name() string { return "mirror" }

// Ready returns an error until the ports of twins were opened once. If Kubernetes cannot be read, it returns nil: only
// twins need it. Note reports the failure.
func (m *Mirror) Ready() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.opened && m.cfg.Objects.Err() == nil {
		return errors.New("the Services to mirror have not been read yet")
	}
	return nil
}

// Note returns why a twin may not work here; "": all do.
func (m *Mirror) Note() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch err := m.cfg.Objects.Err(); {
	case err != nil:
		return "the Services to mirror cannot be read: " + err.Error()
	case m.failed != nil:
		return m.failed.Error()
	}
	return ""
}

// openAgain is the pause before another attempt to open a port.
const openAgain = 5 * time.Second

// Run serves the ports of twins until ctx is done. Then it closes them, and conns may go on for tunnel.GracePeriod.
func (m *Mirror) Run(ctx context.Context) error {
	conns, endConns := tunnel.Grace(context.WithValue(ctx, callerKey{}, true), m.grace)
	defer endConns()
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { m.cfg.Objects.Run(ctx) })
	for ctx.Err() == nil {
		changed := m.cfg.Objects.Changed() // before View, so that no change is missed
		var again <-chan time.Time
		err := tunnel.Guard(m.log, m.cfg.Counters, "the ports of twins stay as they are", func() error {
			v := m.cfg.Objects.View()
			if !v.Known {
				return nil
			}
			return m.open(ctx, v, func(d *door) { running.Go(func() { m.accept(conns, d, &running) }) })
		})
		if err != nil {
			again = time.After(openAgain)
		}
		select {
		case <-changed:
		case <-again:
		case <-ctx.Done():
		}
	}
	for _, d := range m.doors {
		d.ln.Close()
	}
	return nil
}

// open opens and closes ports, so that those of v are open. It calls start for each that is new.
func (m *Mirror) open(ctx context.Context, v kube.MirrorView, start func(*door)) error {
	m.track(v.Slices)
	m.know(v.Replicas)
	originals, _ := m.cfg.originals(v)
	wanted := m.cfg.routes(v, originals)
	for port, d := range m.doors {
		if _, stays := wanted[port]; !stays {
			d.ln.Close()
			delete(m.doors, port)
		}
	}
	var failed error
	for _, port := range slices.Sorted(maps.Keys(wanted)) {
		addr := wanted[port]
		if d := m.doors[port]; d != nil {
			d.addr.Store(&addr)
			continue
		}
		ln, err := m.listen(ctx, port)
		if err != nil {
			failed = fmt.Errorf("the port %d of the twin of %s cannot be opened: %w", port, addr, err)
			m.log.Warn("a port of a twin cannot be opened", "target", addr, "err", err)
			continue
		}
		d := &door{ln: listen.Steady(ln, m.log)}
		d.addr.Store(&addr)
		m.doors[port] = d
		start(d)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.opened, m.failed = true, failed
	return failed
}

// freedFor is how long a port has no twin before it gets another one. kube-proxy needs seconds at most.
const freedFor = time.Minute

// track notes which ports are in EndpointSlices, and which no longer are.
func (m *Mirror) track(all []kube.Slice) {
	now := make(map[uint16]bool)
	for _, s := range all {
		for _, p := range s.Ports {
			now[p.Port] = true
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for port := range m.seen {
		if !now[port] {
			m.freed[port] = time.Now()
		}
	}
	m.seen = now
	maps.DeleteFunc(m.freed, func(_ uint16, at time.Time) bool { return time.Since(at) >= freedFor })
}

// accept serves callers of a port until its listener is closed.
func (m *Mirror) accept(conns context.Context, d *door, running *sync.WaitGroup) {
	err := listen.Accept(conns, d.ln, func(c net.Conn) {
		from := listen.AddrOf(c.RemoteAddr())
		if limit, full := m.callers.enter(from); full {
			m.reset(c, d, limit)
			return
		}
		running.Go(func() {
			defer m.callers.leave(from)
			serve := func() error { m.cfg.Serve(conns, c, *d.addr.Load()); return nil }
			if tunnel.Guard(m.log, m.cfg.Counters, "the connection ends", serve) != nil {
				tunnel.Reset(c)
			}
		})
	})
	if err != nil && !errors.Is(err, net.ErrClosed) {
		m.log.Error("a port of a twin is closed", "target", *d.addr.Load(), "err", err)
	}
}

// An original is a Service that shall have a twin.
type original struct {
	kube.Service
	twin string // the name of the twin
}

// addr returns the host:port by which callers of egress name a port of the original.
func (o original) addr(p kube.ServicePort) string {
	return fmt.Sprintf("%s.%s.svc:%d", o.Name, o.Namespace, p.Port)
}

// key returns NAMESPACE/NAME of the twin.
func (o original) key() string { return o.Namespace + "/" + o.twin }

// tcp returns the TCP ports of the original.
func (o original) tcp() (all []kube.ServicePort) {
	for _, p := range o.Ports {
		if p.Protocol == "TCP" {
			all = append(all, p)
		}
	}
	return all
}

// originals returns the Services that shall have a twin, by the key of the twin. problems say by the key of a Service
// why it has none, or why its twin lacks a port.
func (c Config) originals(v kube.MirrorView) (all map[string]original, problems map[string]string) {
	all, problems = make(map[string]original), make(map[string]string)
	for _, s := range v.Services {
		if s.Labels[Label] != "" || s.Annotation == "" || s.Annotation == "false" ||
			c.Namespaces != nil && !slices.Contains(c.Namespaces, s.Namespace) {
			continue
		}
		o := original{s, s.Annotation}
		if o.twin == "true" {
			o.twin = s.Name + "-tunnel"
		}
		other, twice := all[o.key()]
		switch {
		case !isServiceName(o.twin):
			problems[s.Key()] = fmt.Sprintf("%q is not a name for the twin: write one of 63 characters at most as value of the "+
				"annotation %s", o.twin, Annotation)
		case o.twin == s.Name:
			problems[s.Key()] = "the twin needs another name: write \"true\" or a name as value of the annotation " + Annotation
		case twice:
			problems[s.Key()] = "the Service " + other.Name + " has a twin of the same name: choose another"
		case s.Alias:
			problems[s.Key()] = "it is an alias (ExternalName), which has no endpoints"
		case len(o.tcp()) == 0:
			problems[s.Key()] = "it has no TCP port"
		default:
			all[o.key()] = o
			if len(o.tcp()) < len(s.Ports) {
				problems[s.Key()] = "the twin has only its TCP ports"
			}
		}
	}
	return all, problems
}

// isServiceName reports whether Kubernetes accepts s as the name of a Service (IsDNS1035Label).
func isServiceName(s string) bool {
	_, err := tunnel.ParseNodeName(s)
	return err == nil && len(s) <= 63 && !strings.Contains(s, ".") && s[0] >= 'a'
}

// routes returns the address of an original for each port of the cloud that an EndpointSlice records. If two claim a
// port, the older one counts, or else one could take the callers of the other.
func (c Config) routes(v kube.MirrorView, originals map[string]original) map[uint16]string {
	routes := make(map[uint16]string)
	oldest := slices.Clone(v.Slices)
	slices.SortStableFunc(oldest, func(a, b kube.Slice) int { return a.Created.Compare(b.Created) })
	for _, s := range oldest {
		o, ok := originals[s.Namespace+"/"+s.Of()]
		if !ok || o.Name != s.Labels[labelOf] {
			continue
		}
		for _, p := range s.Ports {
			i := slices.IndexFunc(o.tcp(), func(tcp kube.ServicePort) bool { return tcp.Name == p.Name })
			if _, taken := routes[p.Port]; i >= 0 && !taken && c.First <= p.Port && p.Port <= c.Last {
				routes[p.Port] = o.addr(o.tcp()[i])
			}
		}
	}
	return routes
}
