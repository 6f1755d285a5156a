package main

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"google.golang.org/grpc"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/services/hub"
	"tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

// newServices sets services, if the configuration has [mode.cloud.services]. The server needs it, because edges watch.
func (w *cloudWiring) newServices() error {
	c := w.conf.Services
	if !c.On {
		return nil
	}
	serves := func(node tunnel.NodeName) bool {
		_, serves := w.reach.ServesServices(node)
		return serves
	}
	cfg := hub.Config{Cluster: c.Cluster, Serves: serves, AwaitNodes: true, Log: w.log}
	if w.conf.Egress.Configured() {
		cfg.Domain = c.Domain
	}
	w.services = hub.New(cfg)
	var err error
	w.anyEndpoint, err = auth.ParsePolicy([]string{"0.0.0.0/0:*", "[::/0]:*"})
	// datagrams does not run as a module: when sessions end, its conns end, too.
	w.datagrams = udp.NewEdge(w.anyEndpoint, udp.EdgeConfig{
		Counters: w.udp, Core: w.counters, Log: w.log.With("module", "services"), OneTarget: true,
		Share: 4, // the caller is a node
	})
	return err
}

// addServices adds the modules that tell edges of the cluster's Services, if the configuration has
// [mode.cloud.services].
func (w *cloudWiring) addServices() {
	if w.services == nil {
		return
	}
	w.add(w.cluster.client.Services(w.conf.Services.Namespaces, w.services, w.counters, w.log), nil)
	w.add(joinedNodes{w}, nil)
	w.collectors = append(w.collectors, w.services.Collector())
}

// serveServices makes the server of sessions answer edges that watch Services or connect to endpoints, if the
// configuration has [mode.cloud.services].
func (w *cloudWiring) serveServices(config *stream.ServerConfig) {
	if w.services == nil {
		return
	}
	config.Reach, config.ReachSink = w.reachService, w.sink()
	config.Services = []stream.SessionService{{Desc: &servicesv1.Services_ServiceDesc, Handler: w.watchServices}}
}

// watchServices serves Services.Watch on the connection of a session.
func (w *cloudWiring) watchServices(from *tunnel.Session, stream grpc.ServerStream) error {
	return w.services.Watch(from.Node, &grpc.GenericServerStream[servicesv1.Next, servicesv1.Batch]{ServerStream: stream})
}

// reachService connects to a target that the node of a session asks for. It reaches an endpoint on an edge node through
// the session of that edge node. The cloud itself dials all other endpoints.
func (w *cloudWiring) reachService(ctx context.Context, reach *stream.ReachRequest) (net.Conn, error) {
	request, refusal := w.services.Target(reach.From.Node, reach.Target)
	if refusal != nil {
		return nil, refusal
	}
	reach.Node, reach.Addr, request.Trace = request.Node, request.Addr, reach.Trace
	if request.Node != "" {
		return w.reach.Dial(ctx, request)
	}
	if request.Network == tunnel.NetworkUDP {
		request.Caller = string(reach.From.Node)
		return w.datagrams.Open(ctx, request)
	}
	return w.anyEndpoint.Dial(ctx, request.Network, request.Addr)
}

// endpoints finds the endpoints of Services for the egress front door: first those on connected nodes. The cloud itself
// dials endpoints on nodes without an edge, if the configuration says that edges may reach such endpoints.
func (w *cloudWiring) endpoints(addr string) (found []egress.Endpoint, err error) {
	host, text, err := net.SplitHostPort(addr)
	port, perr := strconv.ParseUint(text, 10, 16)
	if err != nil || perr != nil {
		return nil, tunnel.Refusef(tunnel.Unreachable, "%q is not host:port", addr)
	}
	all, err := w.services.Endpoints(host, uint16(port))
	for _, e := range all {
		to := egress.Endpoint{Addr: e.Addr.String(), Node: e.Node}
		if e.Cloud && !w.reach.Holds(e.Node) {
			to.Dial = func(ctx context.Context) (net.Conn, error) { return w.dialEndpoint(ctx, e.Addr) }
		}
		found = append(found, to)
	}
	slices.SortStableFunc(found, func(a, b egress.Endpoint) int {
		return cmp.Compare(w.distance(a), w.distance(b))
	})
	return found, err
}

// dialEndpoint dials an endpoint for a caller of the egress front door.
func (w *cloudWiring) dialEndpoint(ctx context.Context, at netip.AddrPort) (net.Conn, error) {
	if w.mayDial != nil {
		if err := w.mayDial(ctx, at); err != nil {
			return nil, err
		}
	}
	return w.anyEndpoint.Dial(ctx, "tcp", at.String())
}

// distance returns 0 if this replica dials the endpoint or holds the session of its node; else 1.
func (w *cloudWiring) distance(e egress.Endpoint) int {
	if e.Dial != nil || w.reach.Holds(e.Node) {
		return 0
	}
	return 1
}

// joinedNodes is the module that tells the hub which nodes serve Services: those that have a session with any replica,
// and those that the inventory remembers.
type joinedNodes struct{ *cloudWiring }

const (
	// joinedPause is the least time between two looks at the nodes: many nodes come at once when a cloud has started.
	joinedPause = time.Second
	// nodesBack is how long edges that watch Services wait if the cloud remembers no nodes: when a cloud has started
	// again, edges are back within a second or two. Meanwhile, edges keep what they know.
	nodesBack = 3 * time.Second
	// nodesLate is how long edges that watch Services wait at most until nodesKnown returns true.
	nodesLate = 10 * time.Second
	// nodesPause is the time between two calls of nodesKnown.
	nodesPause = 50 * time.Millisecond
)

// Name implements tunnel.Module.
func (joinedNodes) Name() string { return "services-nodes" }

// Run implements tunnel.Module.
func (j joinedNodes) Run(ctx context.Context) error {
	defer j.services.Stop() // the module that reads Services ends, too
	select {
	case <-j.sockets.Serving(): // no edge joins before this process has taken over
	case <-ctx.Done():
		return nil
	}
	began := time.Now()
	known := func() bool {
		// An inventory without a place of its own, for the admin socket alone, is empty after a start.
		return j.nodesKnown() && (j.conf.Inventory != "" || time.Since(began) >= nodesBack)
	}
	for late := began.Add(nodesLate); !known() && time.Now().Before(late); {
		select {
		case <-time.After(nodesPause):
		case <-ctx.Done():
			return nil
		}
	}
	all := false // the inventory has told all nodes that it remembers
	for {
		if !all && j.inventory != nil { // without this, the cloud would tell edges of every node that comes back
			all = j.nodesKnown()
			for _, node := range j.inventory.ServeServices() {
				j.services.Joined(node)
			}
		}
		changed := j.reach.Changed() // before Connected, so that no node is missed
		for _, node := range j.reach.Connected() {
			// A node whose session has ended since Connected counts as before.
			switch connected, serves := j.reach.ServesServices(node); {
			case serves:
				j.services.Joined(node)
			case connected:
				j.services.Left(node) // its edge has started again, without Services
			}
		}
		j.services.NodesKnown()
		select {
		case <-time.After(joinedPause):
		case <-ctx.Done():
			return nil
		}
		var again <-chan time.Time
		if !all && j.inventory != nil {
			again = time.After(joinedPause)
		}
		select {
		case <-changed:
		case <-again:
		case <-ctx.Done():
			return nil
		}
	}
}

// nodesKnown reports whether the inventory has been read, and the other replicas have told their nodes.
func (w *cloudWiring) nodesKnown() bool {
	return (w.inventory == nil || w.inventory.Known()) && (w.peers == nil || w.peers.Ready() == nil)
}
