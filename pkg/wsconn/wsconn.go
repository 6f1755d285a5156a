// Package wsconn is a net.Conn inside a WebSocket (RFC 6455), for networks that pass nothing else.
//
//	c, err := wsconn.Dial(ctx, raw, "wss://tunnel.example.com/tunnel", "tunnel/1.0")    // raw is connected
//	c, err := wsconn.Accept(w, r, raw)                                                  // in an http.Handler
//
// The bytes of a Conn are a stream: the borders of messages mean nothing. The caller speaks TLS over the
// Conn. So boxes in between see no plain byte, and this package need not authenticate the other end.
//
// Boxes in between close a silent WebSocket, most of them after 60 s. So each end sends an empty message
// when it has sent nothing for [Idle]. An empty message needs no answer. A ping would: its pong might wait
// behind bytes that a stalled reader does not take.
//
// A WebSocket has no half-close. TLS ends one direction by an alert, and conns end by frames of their own.
// Unlike the net.Conn of package websocket, a Conn stays usable after a read deadline.
package wsconn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
)

const (
	// Idle is after how long of silence an end sends an empty message. Boxes in between wait 30 s or more.
	Idle = 20 * time.Second
	// chunkSize is how many bytes of a message are read at once: a TLS record fits.
	chunkSize = 18 << 10
	// maxAnswer bounds the header of an answer to the handshake, in bytes.
	maxAnswer = 16 << 10
)

// Conn is one end of a WebSocket. A read deadline interrupts Read and loses no byte. After a write deadline
// the Conn can only be closed.
type Conn struct {
	net.Conn // below the WebSocket: its addresses, its write deadline and Close

	// Set once.
	ws    *websocket.Conn
	below *gather // its flood is owned by receive
	since time.Time
	idle  time.Duration

	wrote atomic.Int64 // time of the last Write, in nanoseconds after since
	timer *time.Timer  // calls keepAlive

	deadline *deadline     // the deadline of Read
	chunks   chan []byte   // from receive to Read; unbuffered, so that an idle Conn holds no chunk
	ended    chan struct{} // receive closes it; err is then set
	err      error         // why receive has ended
	closed   chan struct{} // Close closes it
	once     sync.Once

	writing sync.Mutex // held by Write, so that below gathers one message at a time
	reading sync.Mutex // guards the following
	chunk   []byte     // taken from chunks; it returns to the pool once rest is empty
	rest    []byte     // the part of chunk that Read has not returned
}

// pool holds chunks of all connections.
//
//nolint:gochecknoglobals // a pool is no state: it holds only unused buffers
var pool = sync.Pool{New: func() any { return make([]byte, chunkSize) }}

// newConn returns a Conn over an established WebSocket. raw is the connection below; the WebSocket reads and writes it
// by below.
func newConn(ws *websocket.Conn, raw net.Conn, below *gather, idle time.Duration) *Conn {
	*below.flood = flood{window: idle} // the bytes of the handshake do not count
	ws.SetReadLimit(-1)                // Read takes any message piece by piece
	c := &Conn{
		Conn: raw, ws: ws, below: below, since: time.Now(), idle: idle,
		deadline: newDeadline(), chunks: make(chan []byte),
		ended: make(chan struct{}), closed: make(chan struct{}),
	}
	c.timer = time.AfterFunc(idle, c.keepAlive)
	go func() { // ends when the WebSocket ends, at the latest by Close
		defer close(c.ended)
		c.err = clean(c.receive())
	}()
	return c
}

// NetConn returns the connection below the WebSocket.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// receive passes the bytes of messages to Read until the WebSocket ends. It reads even while no Read waits,
// because package websocket answers pings only during a read.
func (c *Conn) receive() error {
	for {
		typ, r, err := c.ws.Reader(context.Background())
		switch {
		case err != nil:
			return err
		case typ != websocket.MessageBinary:
			return errors.New("the WebSocket's other end has sent text")
		}
		n, err := c.pass(r)
		if err != nil {
			return err
		}
		if n == 0 && !c.below.flood.empty() {
			return errFlood
		}
	}
}

// pass passes the bytes of one message to Read. It returns how many bytes the message had.
func (c *Conn) pass(r io.Reader) (n int, err error) {
	for err == nil {
		chunk, _ := pool.Get().([]byte)
		var got, more int
		for err == nil && got < chunkSize { // a message comes in two pieces, since package websocket reads ahead
			more, err = r.Read(chunk[got:chunkSize])
			got += more
			c.below.flood.data(more)
		}
		n += got
		if got == 0 {
			pool.Put(chunk) //nolint:staticcheck // allocating a slice header is cheap beside allocating its bytes
			continue
		}
		select {
		case c.chunks <- chunk[:got]:
		case <-c.closed:
			return n, net.ErrClosed
		}
	}
	if err == io.EOF { // the end of the message; a wrapped io.EOF would be the end of the connection
		err = nil
	}
	return n, err
}

// clean returns io.EOF for each error that says that the other end, or a box in between, has closed the
// connection. TLS above the Conn tells a clean end from a cut-off one by its own alert.
func clean(err error) error {
	switch websocket.CloseStatus(err) {
	case websocket.StatusNormalClosure, websocket.StatusGoingAway:
		return io.EOF
	}
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return io.ErrUnexpectedEOF
	case errors.Is(err, io.EOF):
		return io.EOF
	}
	return err
}

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	passed := c.deadline.passed()
	select {
	case <-passed:
		return 0, os.ErrDeadlineExceeded
	default:
	}
	if len(c.rest) == 0 {
		select {
		case c.chunk = <-c.chunks:
			c.rest = c.chunk
		case <-c.ended:
			return 0, c.err
		case <-c.closed:
			return 0, net.ErrClosed
		case <-passed:
			return 0, os.ErrDeadlineExceeded
		}
	}
	n := copy(b, c.rest)
	if c.rest = c.rest[n:]; len(c.rest) == 0 {
		pool.Put(c.chunk[:cap(c.chunk)]) //nolint:staticcheck // see pass
		c.chunk = nil
	}
	return n, nil
}

// Write implements net.Conn. Each call is a message.
func (c *Conn) Write(b []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.wrote.Store(int64(time.Since(c.since)))
	c.below.begin()
	err := c.ws.Write(context.Background(), websocket.MessageBinary, b)
	if flushed := c.below.end(); err == nil {
		err = flushed
	}
	if err != nil {
		return 0, err
	}
	return len(b), nil
}

// keepAlive sends an empty message if the Conn has sent nothing for idle. Like any Write, it may block. A
// blocked Write does no harm here: boxes in between then still have bytes to pass on, and see no silence.
func (c *Conn) keepAlive() {
	wait := c.idle - (time.Since(c.since) - time.Duration(c.wrote.Load()))
	if wait <= 0 {
		if _, err := c.Write(nil); err != nil {
			return
		}
		wait = c.idle
	}
	select {
	case <-c.closed:
	default:
		c.timer.Reset(wait)
	}
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.deadline.set(t)
	return nil
}

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	c.deadline.set(t)
	return c.Conn.SetWriteDeadline(t)
}

// Close implements net.Conn. It does not wait for the other end: TLS above the Conn tells a clean end.
func (c *Conn) Close() error {
	err := net.ErrClosed
	c.once.Do(func() {
		close(c.closed)
		c.timer.Stop()
		err = bottom(c.Conn).Close() // first, since closing TLS waits for a peer that does not read
		c.ws.CloseNow()              //nolint:errcheck // the connection is closed already; this frees the rest
		c.deadline.set(time.Time{})  // stops its timer
		<-c.ended
	})
	return err
}

// bottom returns the connection below all layers that name the next one.
func bottom(c net.Conn) net.Conn {
	for {
		layer, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return c
		}
		c = layer.NetConn()
	}
}

// HandshakeError is a server's answer that opens no WebSocket.
type HandshakeError struct {
	Status int    // the status code of HTTP
	Text   string // the status line, without the version
}

func (e *HandshakeError) Error() string { return "the answer is " + e.Text + ", and not a WebSocket" }

// Dial opens a WebSocket at a URL over raw, a connection to its host; for wss:// raw already speaks TLS.
// After an error the caller closes raw.
func Dial(ctx context.Context, raw net.Conn, url, userAgent string) (*Conn, error) {
	return dial(ctx, raw, url, userAgent, Idle)
}

func dial(ctx context.Context, raw net.Conn, url, userAgent string, idle time.Duration) (*Conn, error) {
	f := &flood{window: idle}
	below := &gather{Conn: raw, flood: f}
	given := func(context.Context, string, string) (net.Conn, error) { return below, nil }
	transport := &http.Transport{
		DialContext: given, DialTLSContext: given, // neither is called twice: redirects are not followed
		MaxResponseHeaderBytes: maxAnswer, DisableCompression: true,
	}
	//nolint:bodyclose // package websocket closes the body; of a refusal's body it keeps the first bytes in memory
	ws, answer, err := websocket.Dial(ctx, url, &websocket.DialOptions{
		HTTPClient: &http.Client{
			Transport:     transport,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		HTTPHeader:     http.Header{"User-Agent": {userAgent}},
		OnPingReceived: f.ping, OnPongReceived: f.pong,
	})
	switch {
	case err == nil:
		return newConn(ws, below, below, idle), nil
	case answer != nil && answer.StatusCode != http.StatusSwitchingProtocols:
		return nil, &HandshakeError{answer.StatusCode, answer.Status}
	}
	return nil, fmt.Errorf("opening a WebSocket: %w", cause(err))
}

// cause returns the innermost error that is about the connection, without the layers that only repeat
// "failed to".
func cause(err error) error {
	for {
		next := errors.Unwrap(err)
		if op, ok := err.(*net.OpError); next == nil || ok && op != nil { //nolint:errorlint // one layer at a time
			return err
		}
		err = next
	}
}

// Accept opens the WebSocket that a request asks for. raw is the connection of the request. If Accept returns an
// error, it has answered the request.
func Accept(w http.ResponseWriter, r *http.Request, raw net.Conn) (*Conn, error) {
	f := &flood{window: Idle}
	below := &gather{flood: f}
	ws, err := websocket.Accept(hijacked{w, below}, r, &websocket.AcceptOptions{
		OnPingReceived: f.ping, OnPongReceived: f.pong,
	})
	if err != nil {
		return nil, err
	}
	return newConn(ws, raw, below, Idle), nil
}
