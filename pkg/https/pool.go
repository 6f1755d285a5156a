package https

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	// kubeletIdle is how long a pooled conn to a kubelet stays idle before it is closed. A kubelet
	// closes an idle conn after 90 s (kubernetes/pkg/kubelet/server); ours is shorter, so that a
	// request never uses a conn that the kubelet is closing.
	kubeletIdle = 30 * time.Second
	// maxIdlePerHop bounds the pooled conns to one target for one caller.
	maxIdlePerHop = 2
	// continueTimeout is how long a target may take to send 100-continue before the body is sent
	// anyway (RFC 9110 section 10.1.1). http.DefaultTransport uses the same value.
	continueTimeout = time.Second
)

// dialHop opens a conn for HTTP to h. If it succeeds, onClose is called once, when the conn ends.
type dialHop func(ctx context.Context, h hop, onClose func()) (net.Conn, error)

// pool has an http.Transport for each hop in use, that is with a request in flight or an open conn.
// A conn ends after kubeletIdle, or with its session, so nodes that come and go leave nothing
// behind. (A single transport would keep an entry for every hop that it ever failed to dial.)
type pool struct {
	dial    dialHop // set once
	headers int     // set once: bytes of a response's header

	mu   sync.Mutex // guards the following
	hops map[hop]*pooled
}

// pooled is the transport for one hop.
type pooled struct {
	http.Transport
	refs int // requests and conns; guarded by pool.mu
}

// acquire returns the transport for h. The caller calls release once, when the request has ended.
func (p *pool) acquire(h hop) (t *pooled, release func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t = p.hops[h]
	if t == nil {
		t = &pooled{}
		configureTransport(&t.Transport, p.headers, func(ctx context.Context, _, _ string) (net.Conn, error) {
			p.addRef(t)
			c, err := p.dial(ctx, h, func() { p.dropRef(h, t) })
			if err != nil {
				p.dropRef(h, t)
			}
			return c, err
		})
		if p.hops == nil {
			p.hops = make(map[hop]*pooled)
		}
		p.hops[h] = t
	}
	t.refs++
	return t, func() { p.dropRef(h, t) }
}

// addRef counts one more user of t.
func (p *pool) addRef(t *pooled) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t.refs++
}

// dropRef counts one user less, and removes t after the last one. A dial that its request did not
// wait for may start after that. Its conn goes into a transport that no request uses, and ends when
// idle.
func (p *pool) dropRef(h hop, t *pooled) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.refs--; t.refs == 0 && p.hops[h] == t {
		delete(p.hops, h)
	}
}

// size returns how many hops are in use.
func (p *pool) size() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.hops)
}

// configureTransport makes t speak HTTP/1.1 over conns that dial returns. headers bounds the bytes
// of a response's header.
func configureTransport(t *http.Transport, headers int,
	dial func(ctx context.Context, network, addr string) (net.Conn, error)) {
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
