package https

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"tunnel/pkg/tunnel"
)

// upgradeOf returns the protocol that r asks to switch to, or nothing when it is not
// one that kubelets speak: others are ignored, and the request is an ordinary one.
func upgradeOf(r *http.Request) string {
	u := r.Header["Upgrade"]
	if r.ProtoMajor != 1 || len(u) != 1 || !httpguts.HeaderValuesContainsToken(r.Header["Connection"], "Upgrade") {
		return ""
	}
	for _, known := range []string{"SPDY/3.1", "websocket"} {
		if strings.EqualFold(u[0], known) {
			return u[0]
		}
	}
	return ""
}

// switched leaves httputil.ReverseProxy on its error path: the target has answered
// 101, and from here on the conn carries bytes that are not HTTP. (ReverseProxy's own
// upgrade knows neither half-close nor reset.)
type switched struct {
	res  *http.Response
	conn net.Conn // to the target
}

func (s *switched) Error() string { return "switched protocols" }

// upgrader returns a round tripper for one request that asks to switch to protocol,
// on a conn of its own. Any answer but 101 comes back as usual.
func (p *proxy) upgrader(h hop, protocol string) roundTripper {
	return func(out *http.Request) (*http.Response, error) {
		var conn net.Conn // written before RoundTrip returns
		t := new(http.Transport)
		configureTransport(t, p.pool.headers, func(ctx context.Context, _, _ string) (net.Conn, error) {
			// The request's own context ends the dialling, too: this conn is for nobody else.
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
		t.MaxIdleConnsPerHost = -1 // it ends with its answer
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

// splice gives the 101 to the caller, and then the bytes. It owns both conns.
func (s *switched) splice(w http.ResponseWriter, out *http.Request, log *slog.Logger) {
	start := time.Now()
	nc, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		tunnel.Reset(s.conn)
		log.Debug("https connection not upgraded", "err", err)
		return
	}
	fc := nc.(*framedConn)
	client := &tlsConn{Conn: fc.Conn, raw: fc.NetConn(), again: append(buffered(rw.Reader), fc.held...)}
	if err = s.writeHead(client); err != nil {
		tunnel.Reset(client)
		tunnel.Reset(s.conn)
		log.Debug("https connection not upgraded", "err", err)
		return
	}
	// The response's body is the conn, after what the transport had read too much.
	target := &upgradedConn{Conn: s.conn, r: s.res.Body}
	in, outBytes, err := tunnel.Splice(out.Context(), client, target)
	log.Debug("https connection upgraded", "bytes", in+outBytes, "dur", time.Since(start), "err", err)
}

// writeHead writes the 101 and its headers.
func (s *switched) writeHead(w io.Writer) error {
	h := s.res.Header.Clone()
	for _, hop := range []string{"Keep-Alive", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Content-Length"} {
		h.Del(hop)
	}
	h.Set("Connection", "Upgrade")
	bw := bufio.NewWriter(w)
	fmt.Fprintf(bw, "HTTP/1.1 101 %s\r\n", http.StatusText(http.StatusSwitchingProtocols))
	h.Write(bw)                //nolint:errcheck // likewise
	io.WriteString(bw, "\r\n") //nolint:errcheck // likewise
	return bw.Flush()
}

// buffered returns what r has read and nobody has asked for.
func buffered(r *bufio.Reader) []byte {
	b := make([]byte, r.Buffered())
	io.ReadFull(r, b) //nolint:errcheck // it has them
	return b
}

// upgradedConn is a conn to a target of which the transport has read the head.
type upgradedConn struct {
	net.Conn
	r io.Reader
}

func (c *upgradedConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// CloseWrite ends our direction.
func (c *upgradedConn) CloseWrite() error { return closeWrite(c.Conn) }

// ResetBehind aborts the conn behind what was written.
func (c *upgradedConn) ResetBehind() { tunnel.ResetBehind(c.Conn) }

// Reset aborts the conn.
func (c *upgradedConn) Reset() error {
	tunnel.Reset(c.Conn)
	return nil
}
