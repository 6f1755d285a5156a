package https

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"
)

// requestBody is the body of a request on its way to a target. It adds to what
// httputil.ReverseProxy does with one:
//
//   - trailers are passed on;
//   - the answer may end before the body has. The transport may then still be reading
//     from a caller that sends nothing, and net/http's own Close would wait for that
//     read; [requestBody.finish] interrupts it.
type requestBody struct {
	// Set once.
	in   io.ReadCloser
	r    *http.Request
	w    http.ResponseWriter
	conn *clientConn

	reading sync.Mutex // held during a Read of in

	last bool // the answer is the last on its connection; owned by the handler

	mu     sync.Mutex // guards the following
	to     http.Header
	ended  bool  // in's end was seen, or there is nothing in it
	err    error // what ended in before its time
	closed bool
}

func newRequestBody(w http.ResponseWriter, r *http.Request, c *clientConn) *requestBody {
	return &requestBody{in: r.Body, r: r, w: w, conn: c, ended: r.Body == nil || r.Body == http.NoBody}
}

// passTrailers makes out carry the trailers of the request, those too that were not
// announced.
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
		out.ContentLength = -1 // HTTP/1.1 has trailers on chunked bodies only
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.to = out.Trailer
}

func (b *requestBody) Read(p []byte) (int, error) {
	b.reading.Lock()
	defer b.reading.Unlock()
	if b.isClosed() {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := b.in.Read(p)
	if err != nil {
		b.end(err)
	}
	return n, err
}

func (b *requestBody) isClosed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.closed
}

// end records how in ended. The trailers are complete now, and the transport, which
// called Read, has yet to write them.
func (b *requestBody) end(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !errors.Is(err, io.EOF) {
		b.err = err
		return
	}
	b.ended = true
	if b.to == nil {
		return
	}
	for _, k := range slices.Collect(maps.Keys(b.r.Trailer)) {
		if httpguts.ValidTrailerHeader(k) {
			b.to[k] = b.r.Trailer[k]
		}
	}
}

// failure returns why the body could not be read to its end, if that was so.
func (b *requestBody) failure() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	return b.err
}

// Close says that nobody will read on. It does not wait for a Read in flight.
func (b *requestBody) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	return nil
}

// closing is called before the answer's header is written. An answer that comes
// before the end of the request's body is the last one on its HTTP/1 connection: what
// is left of the body must not be taken for a request. With HTTP/2 the last answer
// goes with a GOAWAY, and net/http ends the connection after the requests in flight.
func (b *requestBody) closing() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.last || !b.ended && b.r.ProtoMajor == 1 {
		b.w.Header().Set("Connection", "close")
	}
}

// finish is called when the answer is complete. It returns when nobody reads the
// body, and lets nobody do so again.
func (b *requestBody) finish() {
	b.Close() //nolint:errcheck // it returns none
	b.mu.Lock()
	ended := b.ended
	b.mu.Unlock()
	if ended {
		return
	}
	if b.r.ProtoMajor == 1 {
		b.conn.lingers.Store(true)
		http.NewResponseController(b.w).SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // then the connection has gone
	} else {
		b.in.Close()
	}
	b.reading.Lock()
	defer b.reading.Unlock()
}
