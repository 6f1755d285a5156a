// Package multipath tells the kernel by which addresses of this machine Multipath TCP (RFC 8684) may reach
// the cloud.
//
//	paths := multipath.New(sessions, log)
//	client, err := stream.NewClient(stream.ClientConfig{Dial: paths.DialContext, …})
//	err = tunnel.Run(ctx, client, paths)
//
// A connection with Multipath TCP begins with one path. The kernel adds a path for each endpoint
// (ip-mptcp(8)), and uses all paths at once. While Run runs, each address of an uplink is an endpoint. An
// uplink is a network device that is up and has a default route. When an uplink gets or loses an address,
// Run adds or removes the endpoint, and open connections gain or lose a path. If another program removes the
// endpoint, Run adds it again within a minute. Run leaves alone the endpoints of other programs at other addresses.
//
// Only a process with CAP_NET_ADMIN may change endpoints. Without it, the module logs what an operator can do.
// Endpoints belong to a network namespace, so other programs with Multipath TCP use them as well.
//
// The kernel decides about further paths when a connection begins, and again for each endpoint that is added
// after the connection is established. So DialContext waits until Run has added the endpoints. An address that
// is added during the handshake of a connection is not used by this connection.
package multipath

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Endpoints is the module "multipath".
type Endpoints struct {
	// Set once.
	sessions func() []*tunnel.Session
	log      *slog.Logger
	told     chan struct{} // closed when Run has told the kernel the addresses once, or cannot

	// Left is closed when another process of the edge has taken over, with the endpoints: this process then changes
	// none of them. nil: no process takes over. Set it before Run.
	Left <-chan struct{}

	// Control is passed to the net.Dialer that DialContext uses. Set it before Run.
	Control func(network, address string, c syscall.RawConn) error

	failure atomic.Pointer[string] // why the kernel lacks addresses; nil: it has all

	mu   sync.Mutex      // guards the following
	ours map[string]bool // names of the endpoints to remove at the stop: made here, or named to Inherit
}

var _ tunnel.Module = (*Endpoints)(nil)

// New returns the module. sessions returns the live sessions, for Status.
func New(sessions func() []*tunnel.Session, log *slog.Logger) *Endpoints {
	return &Endpoints{
		sessions: sessions, log: log.With("module", "multipath"),
		told: make(chan struct{}), ours: make(map[string]bool),
	}
}

// Made returns the names of the endpoints that this process has to remove when it stops. A process that takes over
// passes them to its own Inherit.
func (e *Endpoints) Made() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Sorted(maps.Keys(e.ours))
}

// Inherit notes endpoints of the process from which this one has taken over. This process removes them when it stops.
func (e *Endpoints) Inherit(made []string) {
	for _, name := range made {
		e.setOurs(name, true)
	}
}

// setOurs notes whether this process has to remove an endpoint when it stops.
func (e *Endpoints) setOurs(name string, ours bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if ours {
		e.ours[name] = true
	} else {
		delete(e.ours, name)
	}
}

// DialContext connects with Multipath TCP. Before the first connection it waits until Run has told the kernel
// the addresses of this machine. If lost SYNs have led to plain TCP, DialContext connects once more.
func (e *Endpoints) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	select {
	case <-e.told:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	dialer := &net.Dialer{Control: e.Control}
	dialer.SetMultipathTCP(true)
	start := time.Now()
	conn, err := dialer.DialContext(ctx, network, addr)
	if err != nil || time.Since(start) < lostSYN || isMultipath(conn) {
		return conn, err
	}
	if again, err := dialer.DialContext(ctx, network, addr); err == nil {
		conn.Close()
		return again, nil
	}
	return conn, nil
}

// lostSYN is the first timeout of a SYN (RFC 6298, 2.1). After two lost SYNs the kernel leaves the option of Multipath
// TCP out (net.mptcp.syn_retrans_before_tcp_fallback), since a box in between may drop SYNs that have it.
// DialContext then connects again: the link may have lost the SYNs.
const lostSYN = time.Second

func isMultipath(conn net.Conn) bool {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return false
	}
	multipath, err := tcp.MultipathTCP()
	return err == nil && multipath
}

// Name implements tunnel.Module.
func (e *Endpoints) Name() string { return "multipath" }

// Status is for /readyz?verbose: the paths of the sessions, and whether the kernel knows the addresses of
// this machine.
func (e *Endpoints) Status() string {
	var all []string
	for _, s := range e.sessions() {
		all = append(all, describe(s))
	}
	if len(all) == 0 {
		all = append(all, "no session")
	}
	if why := e.failure.Load(); why != nil {
		all = append(all, *why)
	}
	return strings.Join(all, "; ")
}

// describe says which paths a session has.
func describe(s *tunnel.Session) string {
	var paths []tunnel.Path
	if s.Paths != nil {
		paths = s.Paths()
	}
	switch {
	case paths == nil:
		return "plain TCP, since this kernel, the cloud or a box in between has no Multipath TCP"
	case len(paths) == 0:
		return "no path now"
	case len(paths) == 1:
		return "1 path: " + paths[0].String()
	}
	var all []string
	for _, p := range paths {
		all = append(all, p.String())
	}
	return fmt.Sprintf("%d paths: %s", len(paths), strings.Join(all, ", "))
}

// failed notes why the kernel cannot be told. It logs the first of several equal reasons.
func (e *Endpoints) failed(why string) {
	if last := e.failure.Swap(&why); last == nil || *last != why {
		e.log.Info(why)
	}
}
