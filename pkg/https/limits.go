package https

import (
	"cmp"
	"net/http"
	"time"
)

// Limits bound what callers may cost. A zero field is the default, which fits 1,000 nodes
// on two processors. docs/limits.md says what happens at each.
type Limits struct {
	// Strangers bounds connections that have not finished their handshake. Each costs a
	// descriptor, a goroutine and up to maxHello bytes.
	Strangers           int
	StrangersPerAddress int // of them, of one source, see listen.Strangers
	// HandshakeTimeout is how long a caller may take for its ClientHello, as long again for
	// its handshake, and for the header of each request; and one that may not call, to be
	// told so.
	HandshakeTimeout time.Duration
	// ConnsPerAddress bounds the connections that one source has to one node through us.
	// Whether a caller that is passed through has any credential, we cannot tell.
	ConnsPerAddress int
	Headers         int // bytes, both ways
}

// DefaultLimits returns what zero fields stand for.
func DefaultLimits() Limits {
	return Limits{
		Strangers: 1024,
		// It leaves room for others, and is not smaller because behind a balancer everybody
		// comes from its address.
		StrangersPerAddress: 256,
		HandshakeTimeout:    10 * time.Second,
		// A quarter of a node's conns. kube-apiserver needs few: it multiplexes requests by
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

// mostHeaders is what net/http takes of a caller. It answers what is longer without
// telling us, so we look at what is shorter, too (proxy.ServeHTTP).
func (l Limits) mostHeaders() int { return 2 * l.Headers }

// headerSize returns the bytes of a request's header, as HTTP/1 writes it.
func headerSize(r *http.Request) int {
	size := len(r.Method) + len(r.RequestURI) + len(r.Host)
	for k, values := range r.Header {
		for _, v := range values {
			size += len(k) + len(v) + len(": \r\n")
		}
	}
	return size
}
