package https

import (
	"cmp"
	"net/http"
	"time"
)

// Limits bound what callers may cost. A zero field means the default, which fits 1,000 nodes on two
// processors. docs/limits.md says what happens when each limit is reached.
type Limits struct {
	// Strangers is how many connections may be open that have not finished their handshake. Each
	// costs a descriptor, a goroutine and up to hello.MaxLen bytes.
	Strangers           int
	StrangersPerAddress int // how many of them one source may have, see listen.Strangers
	// HandshakeTimeout is how long a caller may take for its ClientHello, then for its handshake, and
	// then for the header of each request. It is also how long a caller that may not call stays
	// connected, so that it can read the refusal.
	HandshakeTimeout time.Duration
	// ConnsPerAddress is how many connections one source may have passed through to one node. The
	// front door cannot see whether such a caller has any credential.
	ConnsPerAddress int
	Headers         int // bytes of a request's or a response's header
}

// DefaultLimits returns the values that zero fields stand for.
func DefaultLimits() Limits {
	return Limits{
		Strangers: 1024,
		// It leaves room for other sources. It is not smaller because all callers behind a load
		// balancer share the balancer's address.
		StrangersPerAddress: 256,
		HandshakeTimeout:    10 * time.Second,
		// A quarter of a node's conns. kube-apiserver needs few: it multiplexes requests over
		// HTTP/2.
		ConnsPerAddress: 256,
		Headers:         64 << 10,
	}
}

func (l Limits) orDefault() Limits {
	d := DefaultLimits()
	return Limits{
		Strangers:           cmp.Or(l.Strangers, d.Strangers),
		StrangersPerAddress: cmp.Or(l.StrangersPerAddress, d.StrangersPerAddress),
		HandshakeTimeout:    cmp.Or(l.HandshakeTimeout, d.HandshakeTimeout),
		ConnsPerAddress:     cmp.Or(l.ConnsPerAddress, d.ConnsPerAddress),
		Headers:             cmp.Or(l.Headers, d.Headers),
	}
}

// maxHeaderBytes is net/http's limit for a request's header. It is twice ours, because net/http
// answers longer headers without telling us; proxy.ServeHTTP applies and counts our own limit.
func (l Limits) maxHeaderBytes() int { return 2 * l.Headers }

// headerSize returns the size of a request's header in bytes, as written in HTTP/1.
func headerSize(r *http.Request) int {
	size := len(r.Method) + len(r.RequestURI) + len(r.Host)
	for k, values := range r.Header {
		for _, v := range values {
			size += len(k) + len(v) + len(": \r\n")
		}
	}
	return size
}
