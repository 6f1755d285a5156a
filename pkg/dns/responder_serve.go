package dns

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime/debug"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/errgroup"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// serveUDP answers the queries that arrive at conn, one packet at a time, until ctx is done or
// another process has taken over. A query for an upstream waits for its answer in a goroutine of g.
// It returns an error if the socket is broken.
func (r *Responder) serveUDP(ctx context.Context, g *errgroup.Group, conn *net.UDPConn) error {
	packet := make([]byte, maxQuery+1) // the additional byte shows that a packet is too long
	backoff := minBackoff
	for {
		n, client, err := dns.ReadFromSessionUDP(conn, packet)
		switch {
		case err == nil:
		case tunnel.IsClosed(r.cfg.Sockets.Left()), ctx.Err() != nil:
			return nil
		case !listen.Transient(err):
			return fmt.Errorf("reading DNS queries: %w", err)
		default:
			r.retry(ctx, "cannot read DNS queries, trying again", err, &backoff)
			continue
		}
		backoff = minBackoff
		if n > maxQuery {
			continue
		}
		reply, pending := r.answer(packet[:n], overUDP)
		if pending == nil {
			send(conn, client, reply)
			continue
		}
		from, _ := client.RemoteAddr().(*net.UDPAddr)
		addr := from.AddrPort().Addr().Unmap()
		if !r.cfg.AllowFrom.Permits(addr) {
			send(conn, client, r.refuse(pending, addr))
			continue
		}
		release, ok := r.admit(addr)
		if !ok {
			send(conn, client, r.servfail(pending))
			continue
		}
		g.Go(func() error {
			defer release()
			send(conn, client, r.resolve(ctx, pending))
			return nil
		})
	}
}

// send sends a reply, unless it is nil. It ignores errors: a client that gets no answer repeats
// the query.
func send(conn *net.UDPConn, client *dns.SessionUDP, reply []byte) {
	if reply != nil {
		_, _ = dns.WriteToSessionUDP(conn, reply, client)
	}
}

// serveTCP answers the queries that arrive on connections of ln until ctx is done, or until ln is
// broken. It returns after all connections have ended.
func (r *Responder) serveTCP(ctx context.Context, ln net.Listener, clients *listen.Strangers) error {
	var conns sync.WaitGroup
	defer conns.Wait()
	serving, endConns := context.WithCancel(ctx)
	defer endConns()
	err := listen.Accept(ctx, ln, func(c net.Conn) {
		overloaded := func() {
			r.stats.overloaded.Add(1)
			r.cfg.Counters.Limited(tunnel.LimitDNS)
			c.Close()
		}
		place, _ := clients.Admit(c, overloaded)
		if place == nil {
			overloaded()
			return
		}
		conns.Go(func() {
			defer place.Release()
			r.serveConn(serving, c, place)
		})
	})
	if err != nil {
		return fmt.Errorf("accepting DNS connections: %w", err)
	}
	return nil
}

// retry logs err, waits for backoff and doubles it. It returns early if ctx is done.
func (r *Responder) retry(ctx context.Context, what string, err error, backoff *time.Duration) {
	if n, ok := r.ioErrors.Allow(); ok {
		r.cfg.Log.Warn(what, "err", err, "skipped", n)
	}
	select {
	case <-time.After(*backoff):
	case <-ctx.Done():
	}
	*backoff = min(2**backoff, maxBackoff)
}

// serveConn answers the queries of a TCP connection, one after the other, and closes it. While it
// waits for a query, the connection counts as silent (see listen.Stranger).
func (r *Responder) serveConn(ctx context.Context, c net.Conn, place *listen.Stranger) {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	buf := make([]byte, maxQuery)
	for range maxConnQueries {
		packet, err := readTCP(c, buf)
		if err != nil || tunnel.IsClosed(r.cfg.Sockets.Left()) {
			return // once another process has taken over, the client asks that process
		}
		place.Spoke()
		reply, pending := r.answer(packet, overTCP)
		switch {
		case pending == nil:
		case r.cfg.AllowFrom.Permits(listen.AddrOf(c.RemoteAddr())):
			reply = r.resolveTCP(ctx, pending, listen.AddrOf(c.RemoteAddr()))
		default:
			reply = r.refuse(pending, listen.AddrOf(c.RemoteAddr()))
		}
		if reply == nil || writeTCP(c, reply) != nil {
			return // after a packet that is not a query, the connection is closed
		}
		place.Silent()
	}
}

// refuse returns the answer REFUSED for a client that AllowFrom does not permit, and logs a
// warning.
func (r *Responder) refuse(q *query, client netip.Addr) []byte {
	if n, ok := r.denials.Allow(); ok {
		r.cfg.Log.Warn("a DNS query for a name that is no node's is refused: "+
			"add the client's network to allowfrom of [mode.cloud.stream.dns] if it may ask",
			"remote", client.Unmap().String(), "skipped", n)
	}
	r.stats.count(outcomeRefused)
	return q.pack(q.reply(dns.RcodeRefused))
}

// resolveTCP calls resolve, or returns SERVFAIL if the client has too many of ResponderConfig.Lookups.
func (r *Responder) resolveTCP(ctx context.Context, q *query, client netip.Addr) []byte {
	release, ok := r.admit(client)
	if !ok {
		return r.servfail(q)
	}
	defer release()
	return r.resolve(ctx, q)
}

// readTCP reads a message with its length prefix (RFC 1035 section 4.2.2) into buf. It returns the
// message without the prefix.
func readTCP(c net.Conn, buf []byte) ([]byte, error) {
	if err := c.SetReadDeadline(time.Now().Add(idleTimeout)); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(c, buf[:2]); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint16(buf))
	if n > len(buf) {
		return nil, io.ErrShortBuffer
	}
	_, err := io.ReadFull(c, buf[:n])
	return buf[:n], err
}

// writeTCP writes a message with its length prefix.
func writeTCP(c net.Conn, reply []byte) error {
	if err := c.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	framed := make([]byte, 2, 2+len(reply)) // one write, so that prefix and message share a segment
	binary.BigEndian.PutUint16(framed, uint16(len(reply)))
	_, err := c.Write(append(framed, reply...))
	return err
}

// recoverPanic must be deferred. It stops a panic, so that the panic ends only one query, and logs
// it as a bug. The client gets no answer.
func (r *Responder) recoverPanic() {
	p := recover()
	if p == nil {
		return
	}
	r.cfg.Counters.Panics.Add(1)
	if n, ok := r.panics.Allow(); ok {
		r.cfg.Log.Error("a DNS query has ended in a panic; this is a bug",
			"err", p, "stack", string(debug.Stack()), "skipped", n)
	}
}
