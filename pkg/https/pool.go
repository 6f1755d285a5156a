package https

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	// kubeletIdle ends a pooled conn to a kubelet. It is shorter than the 90 s
	// after which a kubelet closes one (kubernetes/pkg/kubelet/server), so that a
	// request never meets a conn that is just being closed.
	kubeletIdle = 30 * time.Second
	// maxIdlePerHop bounds the pooled conns to one target for one caller.
	maxIdlePerHop = 2
	// continueTimeout is how long a target may take to say 100-continue before the
	// body is sent anyway (RFC 9110 section 10.1.1), as http.DefaultTransport has it.
	continueTimeout = time.Second
)

// dialHop opens a conn for HTTP to where h leads. The conn's Close is called once.
type dialHop func(ctx context.Context, h hop, ended func()) (net.Conn, error)

// pool has an http.Transport for each hop that is in use: while a request is on its
// way, or a conn is open. A conn ends after kubeletIdle, and with its session, so
// nodes that come and go leave nothing behind. (One transport for all would keep an
// entry for every hop it ever failed to dial.)
type pool struct {
	dial    dialHop // set once
	headers int     // set once: bytes of an answer's header

	mu   sync.Mutex // guards the following
	hops map[hop]*pooled
}

type pooled struct {
	http.Transport
	users int // guarded by pool.mu: requests and conns
}

// acquire returns the transport for h. release is called once, when the request has
// ended.
func (p *pool) acquire(h hop) (t *pooled, release func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t = p.hops[h]
	if t == nil {
		t = &pooled{}
		configureTransport(&t.Transport, p.headers, func(ctx context.Context, _, _ string) (net.Conn, error) {
			p.use(t)
			c, err := p.dial(ctx, h, func() { p.leave(h, t) })
			if err != nil {
				p.leave(h, t)
			}
			return c, err
		})
		if p.hops == nil {
			p.hops = make(map[hop]*pooled)
		}
		p.hops[h] = t
	}
	t.users++
	return t, func() { p.leave(h, t) }
}

func (p *pool) use(t *pooled) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t.users++
}

// leave forgets t when nobody uses it. A dial that its request did not wait for may
// start after that: its conn is in a pool that nobody asks, and ends when it is idle.
func (p *pool) leave(h hop, t *pooled) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.users--; t.users == 0 && p.hops[h] == t {
		delete(p.hops, h)
	}
}

func (p *pool) size() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.hops)
}

// configureTransport makes t speak HTTP/1.1 over what dial returns.
func configureTransport(t *http.Transport, headers int, dial func(ctx context.Context, network, addr string) (net.Conn, error)) {
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	t.DialContext = dial
	t.DialTLSContext = dial
	t.DisableCompression = true
	t.MaxIdleConnsPerHost = maxIdlePerHop
	t.IdleConnTimeout = kubeletIdle
	t.ExpectContinueTimeout = continueTimeout
	t.MaxResponseHeaderBytes = int64(headers)
	t.WriteBufferSize = copySize
	t.ReadBufferSize = copySize
}
