package dial

import (
	"context"
	"net"
	"time"

	"tunnel.example/tunnel/pkg/wsconn"
)

// openWebSocket opens a WebSocket at s over raw, a connection to the server's host. trip is how long the answer
// took. After an error it has closed raw.
func (d *Dialer) openWebSocket(
	ctx context.Context, raw net.Conn, s Server,
) (_ net.Conn, trip time.Duration, err error) {
	c := raw
	if s.tls {
		if c, err = d.wrap(ctx, raw, s.host()); err != nil {
			raw.Close()
			return nil, 0, explainOuterTLS(err, s, d.cfg.Keys)
		}
	}
	began := time.Now()
	ws, err := wsconn.Dial(ctx, c, s.text, d.cfg.UserAgent)
	if err != nil {
		raw.Close()
		return nil, 0, explainWebSocket(err, s)
	}
	return ws, time.Since(began), nil
}
