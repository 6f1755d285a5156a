package replicas

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/test/rig"
)

const (
	// askReplicas is how often the balancer asks a replica whether it is ready.
	askReplicas = 200 * time.Millisecond
	// connectWithin is how long the balancer tries one replica: a SYN that is lost is sent again
	// after a second (RFC 6298 section 2).
	connectWithin = 2500 * time.Millisecond
)

// balancer leads connections to the replicas that say they are ready, in turn, and to
// the next one where it cannot connect.
type balancer struct {
	// Set once.
	t        *testing.T
	replicas []*rig.Replica
	network  *rig.Network // where connections come from; nil: our own
	wg       sync.WaitGroup

	mu    sync.Mutex // guards the following
	ready []bool
	next  int
	only  int // the one replica that takes edges now; -1: all do
}

func newBalancer(t *testing.T, replicas []*rig.Replica, network *rig.Network) *balancer {
	b := &balancer{t: t, replicas: replicas, network: network, ready: make([]bool, len(replicas)), only: -1}
	ctx, cancel := context.WithCancel(context.Background())
	for i, r := range replicas {
		b.wg.Go(func() {
			ticker := time.NewTicker(askReplicas)
			defer ticker.Stop()
			for {
				err := rig.Ready(r.Health())
				b.mu.Lock()
				b.ready[i] = err == nil
				b.mu.Unlock()
				select {
				case <-ticker.C:
				case <-ctx.Done():
					return
				}
			}
		})
	}
	t.Cleanup(func() {
		cancel()
		b.wg.Wait()
	})
	return b
}

// order returns the replicas to try.
func (b *balancer) order() (order []int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.next++
	for k := range b.replicas {
		i := (b.next + k) % len(b.replicas)
		if b.ready[i] && (b.only < 0 || b.only == i) {
			order = append(order, i)
		}
	}
	return order
}

// lead makes edges that connect from now on come to one replica; -1: to any.
func (b *balancer) lead(only int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.only = only
}

// connect connects to some address of a replica, of first if that is ready, and returns which
// one it is.
func (b *balancer) connect(
	ctx context.Context, addr func(*rig.Replica) string, first int,
) (c net.Conn, replica int, err error) {
	errs := []error{errors.New("the balancer has found no replica")}
	order := b.order()
	if at := slices.Index(order, first); at >= 0 {
		order = slices.Insert(slices.Delete(order, at, at+1), 0, first)
	}
	for _, i := range order {
		dctx, cancel := context.WithTimeout(ctx, connectWithin)
		err := b.network.Do(func() (err error) {
			c, err = new(net.Dialer).DialContext(dctx, "tcp", addr(b.replicas[i]))
			return err
		})
		cancel()
		if err == nil {
			return c, i, nil
		}
		errs = append(errs, err)
	}
	return nil, -1, errors.Join(errs...)
}

// joinPort is where one edge, or all of them, dial the cloud. That of one leads all its
// connections to one replica, while it has any, as docs/replicas.md would have it.
type joinPort struct {
	addr   string // set once
	sticky bool   // likewise

	mu   sync.Mutex // guards live
	live []led      // the newest last
}

// led is a connection of an edge, and the replica to which it was led.
type led struct {
	edge net.Conn
	to   int
}

// joinPort makes a port before the replicas' grpcports.
func (b *balancer) joinPort(sticky bool) *joinPort {
	p := &joinPort{sticky: sticky}
	p.addr = serve(b.t, b.network, func(edge net.Conn) {
		ctx := context.Background() // the edge or the replica ends it
		first := -1
		if p.sticky {
			first = p.holder()
		}
		cloud, i, err := b.connect(ctx, (*rig.Replica).GRPC, first)
		if err != nil {
			edge.(*net.TCPConn).SetLinger(0)
			return
		}
		p.mu.Lock()
		p.live = append(p.live, led{edge, i})
		p.mu.Unlock()
		tunnel.Splice(ctx, edge, cloud)
		p.mu.Lock()
		p.live = slices.DeleteFunc(p.live, func(l led) bool { return l.edge == edge })
		p.mu.Unlock()
	})
	return p
}

// holder returns the replica that the edge's newest connection leads to, -1 if it has
// none.
func (p *joinPort) holder() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.live) == 0 {
		return -1
	}
	return p.live[len(p.live)-1].to
}
