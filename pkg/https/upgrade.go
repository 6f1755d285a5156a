package https

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"

	"tunnel.example/tunnel/pkg/tunnel"
)

// upgradeOf returns the protocol to which r asks to switch. It returns "" if kubelets do not speak
// that protocol; the request is then an ordinary one.
func upgradeOf(r *http.Request) string {
	u := r.Header["Upgrade"]
	if r.ProtoMajor != 1 || len(u) != 1 || !httpguts.HeaderValuesContainsToken(r.Header["Connection"], "Upgrade") {
		return ""
	}
	for _, supported := range []string{"SPDY/3.1", "websocket"} {
		if strings.EqualFold(u[0], supported) {
			return u[0]
		}
	}
	return ""
}

// switched is the error by which a 101 response leaves httputil.ReverseProxy: from here on the conn
// carries bytes that are not HTTP. (ReverseProxy's own upgrade supports neither half-close nor
// reset.)
type switched struct {
	res  *http.Response
	conn net.Conn // to the target
}

func (s *switched) Error() string { return "switched protocols" }

// upgrader returns a round tripper for one request that asks to switch to protocol. It opens a conn
// for this request only. It returns a response other than 101 as usual.
func (p *proxy) upgrader(h hop, protocol string) roundTripper {
	return func(out *http.Request) (*http.Response, error) {
		var conn net.Conn // set before RoundTrip returns
		t := new(http.Transport)
		configureTransport(t, p.pool.headers, func(ctx context.Context, _, _ string) (net.Conn, error) {
			// The end of the request's own context also ends the dial: no other request uses this
			// conn.
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			defer context.AfterFunc(out.Context(), cancel)()
			c, err := p.dial(ctx, h, func() {})
			if err != nil {
				return nil, err
			}
			conn = c
			return c, nil
		})
		t.MaxIdleConnsPerHost = -1 // the conn ends after its response
		res, err := t.RoundTrip(out)
		if err != nil || res.StatusCode != http.StatusSwitchingProtocols {
			return res, err
		}
		if got := res.Header.Get("Upgrade"); !strings.EqualFold(got, protocol) {
			tunnel.Reset(conn)
			return nil, fmt.Errorf("the target switched to %q when %q was asked for", got, protocol)
		}
		return nil, &switched{res: res, conn: conn}
	}
}

// splice sends the 101 to the caller, and then splices both conns, which it owns.
func (s *switched) splice(w *entry, out *http.Request) {
	nc, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		tunnel.Reset(s.conn)
		w.why = err.Error()
		return
	}
	fc := nc.(*framedConn)
	client := &tlsConn{Conn: fc.Conn, raw: fc.NetConn(), replay: append(buffered(rw.Reader), fc.buffered...)}
	reset := func() {
		tunnel.Reset(client)
		tunnel.Reset(s.conn)
	}
	stop := context.AfterFunc(out.Context(), reset) // a caller that does not read must not keep the process
	if err = s.writeHead(client); err != nil {
		stop()
		reset()
		w.why = err.Error()
		return
	}
	stop()
	w.head(http.StatusSwitchingProtocols)
	// The response's body is the conn, preceded by the bytes that the transport read too early.
	target := &upgradedConn{Conn: s.conn, r: s.res.Body}
	sent, received, err := tunnel.Splice(out.Context(), client, target)
	w.received.Add(sent) // from the caller
	w.sent += received
	w.why = tunnel.TextOf(err)
}

// writeHead writes the 101 and its headers.
func (s *switched) writeHead(w io.Writer) error {
	h := s.res.Header.Clone()
	for _, hop := range []string{
		"Keep-Alive", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Content-Length",
	} {
		h.Del(hop)
	}
	h.Set("Connection", "Upgrade")
	bw := bufio.NewWriter(w)
	fmt.Fprintf(bw, "HTTP/1.1 101 %s\r\n", http.StatusText(http.StatusSwitchingProtocols))
	h.Write(bw)                //nolint:errcheck // Flush returns the error
	io.WriteString(bw, "\r\n") //nolint:errcheck // Flush returns the error
	return bw.Flush()
}

// buffered returns the bytes that r holds.
func buffered(r *bufio.Reader) []byte {
	b := make([]byte, r.Buffered())
	io.ReadFull(r, b) //nolint:errcheck // r has that many bytes
	return b
}

// upgradedConn is a conn to a target; the transport has read the response's head from it.
type upgradedConn struct {
	net.Conn
	r io.Reader
}

func (c *upgradedConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// CloseWrite half-closes the conn: we send nothing more.
func (c *upgradedConn) CloseWrite() error { return closeWrite(c.Conn) }

// ResetBehind aborts the conn after the bytes written so far.
func (c *upgradedConn) ResetBehind() { tunnel.ResetBehind(c.Conn) }

// Reset aborts the conn.
func (c *upgradedConn) Reset() error {
	tunnel.Reset(c.Conn)
	return nil
}
