package https

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"
)

// requestBody is the body of a request on its way to a target. It adds two things to what
// httputil.ReverseProxy does with a body:
//
//   - It passes trailers on.
//   - [requestBody.finish] interrupts a Read in progress. The response may end before the request's
//     body. The transport may then still be reading from a caller that sends nothing, and
//     net/http's own Close would wait for that read.
type requestBody struct {
	// Set once.
	in   io.ReadCloser // the caller's body
	r    *http.Request // the caller's request
	w    http.ResponseWriter
	conn *clientConn // the connection of r

	received *atomic.Int64 // counts the bytes that were read; nil: not counted

	// reading is locked before mu.
	reading sync.Mutex // held while in.Read runs

	closeAfter bool // the response is the last one on its connection; owned by the handler

	mu       sync.Mutex  // guards the following
	trailers http.Header // trailers of the outgoing request, which recordEnd fills in; nil: none
	ended    bool        // in has returned io.EOF, or is empty
	err      error       // error of in other than io.EOF
	closed   bool        // Read fails from now on
}

func newRequestBody(w http.ResponseWriter, r *http.Request, c *clientConn) *requestBody {
	return &requestBody{in: r.Body, r: r, w: w, conn: c, ended: r.Body == nil || r.Body == http.NoBody}
}

// passTrailers makes out carry the request's trailers, also those that were not announced.
func (b *requestBody) passTrailers(out *http.Request) {
	if out.Body == nil {
		return
	}
	out.Trailer = make(http.Header)
	for k := range b.r.Trailer {
		if httpguts.ValidTrailerHeader(k) {
			out.Trailer[k] = nil
		}
	}
	if len(out.Trailer) > 0 {
		out.ContentLength = -1 // in HTTP/1.1 only chunked bodies have trailers
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.trailers = out.Trailer
}

func (b *requestBody) Read(p []byte) (int, error) {
	b.reading.Lock()
	defer b.reading.Unlock()
	if b.isClosed() {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := b.in.Read(p)
	if b.received != nil {
		b.received.Add(int64(n))
	}
	if err != nil {
		b.recordEnd(err)
	}
	return n, err
}

func (b *requestBody) isClosed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.closed
}

// recordEnd records the error with which in ended. The trailers are complete now; the transport,
// which called Read, writes them afterwards.
func (b *requestBody) recordEnd(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !errors.Is(err, io.EOF) {
		b.err = err
		return
	}
	b.ended = true
	if b.trailers == nil {
		return
	}
	for _, k := range slices.Collect(maps.Keys(b.r.Trailer)) {
		if httpguts.ValidTrailerHeader(k) {
			b.trailers[k] = b.r.Trailer[k]
		}
	}
}

// failure returns the error that prevented reading the body to its end; nil if there was none.
func (b *requestBody) failure() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	return b.err
}

// Close makes later Reads fail. It does not wait for a Read in progress.
func (b *requestBody) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	return nil
}

// markLast is called before the response's header is written. If the response comes before the end
// of the request's body, it is the last one on its HTTP/1 connection, because the rest of the body
// must not be taken for a request. With HTTP/2, "Connection: close" makes net/http send a GOAWAY
// with the last response; net/http closes the connection when the requests in flight have ended.
func (b *requestBody) markLast() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closeAfter || !b.ended && b.r.ProtoMajor == 1 {
		b.w.Header().Set("Connection", "close")
	}
}

// finish is called when the response is complete. It returns when no Read is in progress, and later
// Reads fail.
func (b *requestBody) finish() {
	b.Close()
	b.mu.Lock()
	ended := b.ended
	b.mu.Unlock()
	if ended {
		return
	}
	if b.r.ProtoMajor == 1 {
		b.conn.mustLinger.Store(true)
		http.NewResponseController(b.w).SetReadDeadline(time.Unix(1, 0))
	} else {
		b.in.Close()
	}
	b.reading.Lock()
	defer b.reading.Unlock()
}
