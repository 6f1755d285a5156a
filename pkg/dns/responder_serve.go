package dns

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"runtime/debug"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/errgroup"

	"tunnel/pkg/listen"
	"tunnel/pkg/tunnel"
)

// serveUDP answers what comes in at conn, one packet at a time, until ctx is done. What
// has to wait for an upstream waits in a goroutine of g.
func (r *Responder) serveUDP(ctx context.Context, g *errgroup.Group, conn *net.UDPConn) {
	packet := make([]byte, maxQuery+1) // one more, to see that one is too long
	backoff := backoffFirst
	for {
		n, asker, err := dns.ReadFromSessionUDP(conn, packet)
		if err != nil {
			if !r.again(ctx, "cannot read DNS queries, trying again", err, &backoff) {
				return
			}
			continue
		}
		backoff = backoffFirst
		if n > maxQuery {
			continue
		}
		reply, open := r.answer(packet[:n], overUDP)
		if open == nil {
			send(conn, asker, reply)
			continue
		}
		from, _ := asker.RemoteAddr().(*net.UDPAddr)
		if addr := from.AddrPort().Addr(); !r.cfg.AllowFrom.Permits(addr) {
			send(conn, asker, r.refuse(open, addr))
			continue
		}
		release, ok := r.admit()
		if !ok {
			send(conn, asker, r.fail(open))
			continue
		}
		g.Go(func() error {
			defer release()
			send(conn, asker, r.resolve(ctx, open))
			return nil
		})
	}
}

// send sends a reply, if there is one. One that is lost is asked for again.
func send(conn *net.UDPConn, asker *dns.SessionUDP, reply []byte) {
	if reply != nil {
		_, _ = dns.WriteToSessionUDP(conn, reply, asker)
	}
}

// serveTCP answers what comes in over the connections of ln until ctx is done, and
// returns when all of them have ended.
func (r *Responder) serveTCP(ctx context.Context, ln net.Listener, askers *listen.Strangers) {
	var conns sync.WaitGroup
	defer conns.Wait()
	backoff := backoffFirst
	for {
		c, err := ln.Accept()
		if err != nil {
			if !r.again(ctx, "cannot accept DNS connections, trying again", err, &backoff) {
				return
			}
			continue
		}
		backoff = backoffFirst
		overloaded := func() {
			r.stats.overloaded.Add(1)
			r.cfg.Counters.Limited(tunnel.LimitDNS)
			c.Close()
		}
		place, _ := askers.Admit(c, overloaded)
		if place == nil {
			overloaded()
			continue
		}
		conns.Go(func() {
			defer place.Release()
			r.serveConn(ctx, c, place)
		})
	}
}

// again reports whether to try again, after a while, what has failed with err. Not when
// ctx is done, which is why it failed then.
func (r *Responder) again(ctx context.Context, what string, err error, backoff *time.Duration) bool {
	if ctx.Err() != nil {
		return false
	}
	if n, ok := r.tired.Allow(); ok {
		r.cfg.Log.Warn(what, "err", err, "skipped", n)
	}
	select {
	case <-time.After(*backoff):
	case <-ctx.Done():
	}
	*backoff = min(2**backoff, backoffMost)
	return ctx.Err() == nil
}

// serveConn answers the queries of a TCP connection, one after the other, and closes it.
// While it waits for a query it counts as silent.
func (r *Responder) serveConn(ctx context.Context, c net.Conn, place *listen.Stranger) {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	buf := make([]byte, maxQuery)
	for range maxConnQueries {
		packet, err := readTCP(c, buf)
		if err != nil {
			return
		}
		place.Spoke()
		reply, open := r.answer(packet, overTCP)
		switch {
		case open == nil:
		case r.cfg.AllowFrom.Permits(listen.AddrOf(c.RemoteAddr())):
			reply = r.resolveTCP(ctx, open)
		default:
			reply = r.refuse(open, listen.AddrOf(c.RemoteAddr()))
		}
		if reply == nil || writeTCP(c, reply) != nil {
			return // who sends what is no question has no second one
		}
		place.Silent()
	}
}

// refuse answers an asker for whom no upstream is asked.
func (r *Responder) refuse(q *query, asker netip.Addr) []byte {
	if n, ok := r.denied.Allow(); ok {
		r.cfg.Log.Warn("a DNS query for a name that is no node's is refused: add the asker's network to allowfrom of [mode.cloud.stream.dns] if it may ask", "remote", asker.Unmap().String(), "skipped", n)
	}
	r.stats.count(toldRefused)
	return q.pack(q.reply(dns.RcodeRefused))
}

// resolveTCP is resolve within the bound of exchanges.
func (r *Responder) resolveTCP(ctx context.Context, q *query) []byte {
	release, ok := r.admit()
	if !ok {
		return r.fail(q)
	}
	defer release()
	return r.resolve(ctx, q)
}

// readTCP reads a message and its length (RFC 1035 section 4.2.2) into buf.
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

func writeTCP(c net.Conn, reply []byte) error {
	if err := c.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	framed := make([]byte, 2, 2+len(reply)) // one write, so that it is one segment
	binary.BigEndian.PutUint16(framed, uint16(len(reply)))
	_, err := c.Write(append(framed, reply...))
	return err
}

// survive ends the panic of one query, if there is one, so that it ends nothing else.
// It is a bug; the asker hears nothing.
func (r *Responder) survive() {
	p := recover()
	if p == nil {
		return
	}
	r.cfg.Counters.Panics.Add(1)
	if n, ok := r.panicked.Allow(); ok {
		r.cfg.Log.Error("a DNS query has ended in a panic; this is a bug", "err", p, "stack", string(debug.Stack()), "skipped", n)
	}
}
