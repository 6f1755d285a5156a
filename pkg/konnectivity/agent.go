package konnectivity

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/oauth2"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/tunnel"
)

// AgentConfig configures an [Agent].
type AgentConfig struct {
	Servers     []string           // proxy-servers or their load balancers, tls://host:port
	TLS         func() *tls.Config // CAs and our certificate, read at each attempt; gRPC adds the server's name
	Token       oauth2.TokenSource // asked at each attempt; nil: the certificate authenticates us
	Node        tunnel.NodeName    // our agent id
	Identifiers string             // what this node reaches, besides its name; see [ParseIdentifiers]
	Dial        tunnel.DialFunc    // dials targets, and decides which are allowed
	Budget      tunnel.Budget
	Counters    *tunnel.Counters
	Log         *slog.Logger
}

// Agent is the edge's module that joins proxy-servers of Konnectivity in place of the stock agent. A
// load balancer may hide several servers behind one address. The agent connects through each address
// until it has a stream with every server behind it.
type Agent struct {
	// Set once.
	cfg         AgentConfig
	identifiers string // cfg.Identifiers, with the name of the node added
	log         *slog.Logger
	grace       time.Duration // how long conns may continue after Run's ctx is done
	quiet       time.Duration // quietPeriod; tests shorten it

	mu   sync.Mutex     // guards the following
	held map[string]int // number of live streams, by address in Servers
}

var _ tunnel.Module = (*Agent)(nil)

// NewAgent returns the module. It fails if cfg.Identifiers are malformed.
func NewAgent(cfg AgentConfig) (*Agent, error) {
	query, err := url.ParseQuery(cfg.Identifiers)
	if err == nil {
		_, err = ParseIdentifiers(cfg.Identifiers)
	}
	if err != nil {
		return nil, err
	}
	query.Add("host", string(cfg.Node)) // callers dial the node by its name
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	return &Agent{
		cfg: cfg, identifiers: query.Encode(), log: cfg.Log.With("module", agentName), grace: tunnel.GracePeriod,
		quiet: quietPeriod, held: make(map[string]int),
	}, nil
}

const agentName = "konnectivity"

// Name implements tunnel.Module.
func (a *Agent) Name() string { return agentName }

// Ready returns nil while at least one server behind every address is joined.
func (a *Agent) Ready() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.cfg.Servers {
		if a.held[s] == 0 {
			return fmt.Errorf("no proxy-server has been joined at %s", s)
		}
	}
	return nil
}

// Run implements tunnel.Module. When ctx is done, the agent tells its servers to send new dials
// elsewhere, and its conns may go on for the grace period.
func (a *Agent) Run(ctx context.Context) error {
	conns, endConns := tunnel.Grace(ctx, a.grace)
	defer endConns()
	var g errgroup.Group
	for _, s := range a.cfg.Servers {
		g.Go(func() error {
			e := &endpoint{
				agent: a, url: s, conns: conns, servers: make(map[string]bool), want: 1,
				lost: make(chan struct{}, 1),
			}
			e.run(ctx)
			return nil
		})
	}
	return g.Wait()
}

// guard calls do, which handles a server's input, and returns a panic in do as an error. In the log,
// the parameter what names the thing that the panic ends.
func (a *Agent) guard(what string, do func() error) error {
	return tunnel.Guard(a.log, a.cfg.Counters, what, do)
}

// count adds n to the number of live streams through an address.
func (a *Agent) count(url string, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held[url] += n
}

// endpoint is one address, with the servers that have been found behind it.
type endpoint struct {
	// Set once.
	agent *Agent
	url   string          // an entry of AgentConfig.Servers
	conns context.Context // context of the conns; it ends a grace period after the context of run
	lost  chan struct{}   // signals run that a server has been lost; capacity 1, so that signals merge
	brief atomic.Bool     // the stream that ended last had lived for no longer than tunnel.BackoffMax

	mu      sync.Mutex      // guards the following
	servers map[string]bool // joined servers, by id
	want    int             // how many servers are behind the address, as the server that joined last has said
}

const (
	// joinTime bounds an attempt: connecting, the TLS handshake, and the server's header.
	joinTime = 10 * time.Second
	// maxServers bounds the servers behind an address, and maxServerID the id of a server in bytes.
	maxServers  = 64
	maxServerID = 253
	// maxServerPacket is the longest packet that we accept, in bytes. A stock server accepts 4 MiB from
	// its clients.
	maxServerPacket = 8 << 20
)

// errDuplicate says that a load balancer has led to a server that is joined already.
var errDuplicate = errors.New("this server is joined already")

// run joins servers until ctx is done. It returns when all their streams have ended.
func (e *endpoint) run(ctx context.Context) {
	log := e.agent.log.With("server", e.url)
	var live sync.WaitGroup
	defer live.Wait()
	var backoff tunnel.Backoff
	var failures tunnel.Repeats
	for ctx.Err() == nil {
		if e.full() {
			select {
			case <-e.lost:
			case <-ctx.Done():
				return
			}
		}
		var s *agentStream
		err := e.agent.guard("the attempt to join ends", func() (err error) { s, err = e.join(ctx); return err })
		refused := false
		switch c := status.Code(err); {
		case err == nil:
			if !e.brief.Load() { // else a server that ends each stream at once would be joined several times a second
				failures.Reset()
				backoff.Reset() // the next server, if there is one, is tried within tunnel.BackoffMin
			}
			e.agent.count(e.url, 1)
			log.Info("proxy-server joined", "id", s.server, "servers", s.count)
			began := time.Now()
			live.Go(func() {
				why := e.agent.guard("the stream ends", func() error { return s.serve(ctx) })
				s.end(why) // needed only after a panic of serve, which otherwise has ended the stream
				e.brief.Store(time.Since(began) <= tunnel.BackoffMax)
				e.agent.count(e.url, -1)
				e.remove(s.server)
				log.Info("proxy-server left", "id", s.server, "err", why)
				s.running.Wait() // data that came before a close may still be on their way to targets
			})
		case ctx.Err() != nil:
			return
		case errors.Is(err, errDuplicate):
			log.Debug("joining a proxy-server", "err", err)
		default:
			refused = c == codes.Unauthenticated || c == codes.PermissionDenied
			level := slog.LevelWarn
			skipped, ok := failures.Allow(err.Error())
			if !ok {
				level = slog.LevelDebug // the server may be away for days
			}
			log.Log(ctx, level, "joining a proxy-server", "err", err, "skipped", skipped)
		}
		var wait time.Duration
		if refused { // the server refuses again until an operator changes a credential
			wait = backoff.NextRefused()
		} else {
			wait = backoff.Next(tunnel.BackoffMax)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// full reports whether the agent has a stream to each of the servers behind the address.
func (e *endpoint) full() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.servers) >= e.want
}

// add registers the id of a joined server. count is how many servers there are, as this server says.
func (e *endpoint) add(server string, count int) error {
	if len(server) > maxServerID {
		return fmt.Errorf("the id of the server has %d bytes; %d are allowed", len(server), maxServerID)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.want = min(max(1, count), maxServers)
	switch {
	case e.servers[server]:
		return errDuplicate
	case len(e.servers) >= maxServers:
		return fmt.Errorf("%d servers are joined, and more are not allowed", maxServers)
	}
	e.servers[server] = true
	return nil
}

// remove unregisters a server, and makes run look for another server.
func (e *endpoint) remove(server string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.servers, server)
	notify(e.lost)
}
