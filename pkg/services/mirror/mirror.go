// Package mirror lets pods of the cluster reach Services whose pods run on edge nodes, without proxy settings.
//
// A Service with the annotation tunnel.example/mirror is an original. The cloud makes a twin for each original: a
// Service without selector, with the TCP ports of the original. The endpoints of the twin are the replicas of the
// cloud, with one port of the cloud for each TCP port. A replica forwards a connection to that port to an endpoint of
// the original, which package egress chooses.
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
// The EndpointSlice of a twin records the ports of the cloud, and all replicas read the EndpointSlices. One replica
// holds a Lease. That replica assigns ports, and writes twins and EndpointSlices (writer.go). It copies the ready
// endpoints of a Service that selects the pods of the cloud. So a replica that stops leaves the EndpointSlices of twins
// at the same time as those of that Service.
//
// Users who may change an original may also change its twin, but few users may change EndpointSlices. Therefore the
// cloud reads no port from a twin. If two EndpointSlices claim the same port, the older one counts.
//
// The cloud does not authenticate the callers of a twin. callers.go limits their connections, and refuses connections
// from one twin to another.
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
	// Annotation marks an original: its value is "true", or the name that the twin gets.
	Annotation = "tunnel.example/mirror"
	// Label of a twin and of its EndpointSlices: its value is the namespace of the cloud that made them.
	Label = "tunnel.example/mirrored-by"
	// labelOf is the label of a twin and of its EndpointSlices with the name of the original.
	labelOf = "tunnel.example/mirror-of"
)

// Config configures a [Mirror].
type Config struct {
	Objects     *kube.Mirrors // reads and writes Services and EndpointSlices; with Annotation, Label and Owner
	Owner       string        // the namespace of the cloud: the value of Label
	First, Last uint16        // the ports that the cloud may open
	Namespaces  []string      // where originals may be; nil: in all namespaces
	// Serve forwards c, the connection of a caller, to addr, the host:port of a Service. Serve owns c. It returns when the
	// connection has ended; when ctx is done, it ends the connection.
	Serve    func(ctx context.Context, c net.Conn, addr string)
	Sockets  *listen.Sockets  // opens the listeners; nil: nobody can take them over
	Counters *tunnel.Counters // counts panics, and limits that are reached
	Log      *slog.Logger
}

// Mirror is the module that opens the ports of twins, and forwards the connections of callers to endpoints of
// originals.
type Mirror struct {
	// Set once.
	cfg    Config
	log    *slog.Logger
	grace  time.Duration // how long conns may continue after the context of Run is done
	listen func(ctx context.Context, port uint16) (net.Listener, error)

	callers  callers
	warnFull tunnel.Limiter                      // limits log lines about connections that are reset
	replicas atomic.Pointer[map[netip.Addr]bool] // the addresses of the replicas; nil: not known yet

	doors map[uint16]*door // owned by Run

	mu     sync.Mutex      // guards the following
	opened bool            // Run has opened the ports once
	failed error           // why a port is not open; nil: all are
	seen   map[uint16]bool // the ports in the EndpointSlices
	// freed says since when a port that a twin had is in no EndpointSlice. For freedFor, no other twin gets the port:
	// kube-proxy on some node may still send callers of the old twin there.
	freed map[uint16]time.Time
}

// door is an open port of the cloud that belongs to a port of a twin.
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

// Ready returns an error until Run has opened the ports of twins once. If Kubernetes cannot be read, Ready returns nil:
// only twins need Kubernetes. Note reports that failure.
func (m *Mirror) Ready() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.opened && m.cfg.Objects.Err() == nil {
		return errors.New("the Services to mirror have not been read yet")
	}
	return nil
}

// Note returns why a twin may not work at this replica; "": all twins work.
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

// openAgain is the pause before Run tries again to open a port.
const openAgain = 5 * time.Second

// Run serves the ports of twins until ctx is done. Then Run closes the ports, and conns may continue for
// tunnel.GracePeriod.
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

// open opens the ports that the twins in v have, and closes all other ports. It calls start for each door that is new.
func (m *Mirror) open(ctx context.Context, v kube.MirrorView, start func(*door)) error {
	m.track(v.Slices)
	m.know(v.Replicas)
	originals, _ := m.cfg.originals(v)
	wanted := m.cfg.routes(v.Slices, originals)
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

// freedFor is how long a port stays without a twin before another twin gets the port. kube-proxy needs a few seconds to
// forget the old twin.
const freedFor = time.Minute

// track notes which ports are in EndpointSlices now, and which ports have left them.
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

// accept accepts connections at the port of d until the listener is closed. It serves each connection in a goroutine
// that running counts. conns is the context of the connections.
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

// maxPorts is the most ports of a Service with a twin. The cloud knows no endpoints of a Service with more ports.
const maxPorts = 100

// original is a Service that should have a twin.
type original struct {
	kube.Service
	twin string // the name of the twin
}

// addr returns the host:port of a port of the original, as package egress reads it.
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

// originals returns the Services that should have a twin, by NAMESPACE/NAME of the twin. problems say, by
// NAMESPACE/NAME of the Service, why a Service gets no twin, or which ports the twin lacks.
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
		case len(o.tcp()) > maxPorts:
			problems[s.Key()] = fmt.Sprintf("it has %d TCP ports, and a twin has %d at most", len(o.tcp()), maxPorts)
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

// routes returns, for each port of the cloud that one of all records, the host:port of the original. If two
// EndpointSlices claim one port, the older one counts: a new twin must not take over the callers of an old one.
func (c Config) routes(all []kube.Slice, originals map[string]original) map[uint16]string {
	routes := make(map[uint16]string)
	oldest := slices.Clone(all)
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
