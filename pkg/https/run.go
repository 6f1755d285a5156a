package https

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"tunnel.example/tunnel/pkg/hello"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Run opens the ports and serves them until ctx is done. Then it stops accepting, gives open
// connections the grace period to end, and resets the rest.
func (f *FrontDoor) Run(ctx context.Context) error {
	listeners, addrs, err := f.listen(ctx)
	if err != nil {
		return err
	}
	f.setAddrs(addrs)
	defer f.setAddrs(nil)
	f.log.Info("https front door is open", "module", Name, "frontend", fmt.Sprint(addrs), "type", f.cfg.Mode.String())
	if f.cfg.Mode == Auto && !f.cfg.terminates() {
		f.log.Info("https connections without a node's name in their SNI will be closed: "+
			"set clientca, cert and key in [mode.cloud.https] to serve them", "module", Name)
	}

	live, kill := tunnel.Grace(ctx, f.grace) // done when open connections must end
	defer kill()
	var web *web
	if f.cfg.terminates() {
		web = f.startWeb(live)
		f.setWeb(web)
		defer f.setWeb(nil)
	}
	// gctx is done with ctx, or when a listener fails.
	accepting, gctx := errgroup.WithContext(ctx)
	var conns sync.WaitGroup
	accept := func(l net.Listener, port int) {
		accepting.Go(func() error {
			stop := context.AfterFunc(gctx, func() { l.Close() })
			defer stop()
			broken := listen.Accept(gctx, l, func(c net.Conn) {
				conns.Go(func() { f.serve(gctx, live, web, c, port) })
			})
			if broken != nil {
				return fmt.Errorf("accepting on %s: %w", l.Addr(), broken)
			}
			return nil
		})
	}
	for i, opened := range listeners {
		accept(f.balancers.Listener(listen.Steady(opened, f.log.With("module", Name))), i)
	}
	if f.cfg.OnePort != nil {
		accept(f.cfg.OnePort, slices.IndexFunc(f.ports, func(p port) bool { return p.number == f.cfg.OnePortAs }))
	}
	if len(listeners) == 0 {
		<-ctx.Done()
	}
	if err = accepting.Wait(); err != nil {
		kill() // no grace period: a listener has failed, and the process is about to end
	}
	if web != nil {
		web.stop(live)
	}
	conns.Wait()
	kill()
	if web != nil {
		web.wait()
	}
	return err
}

// listen opens all ports, or none if one fails.
func (f *FrontDoor) listen(ctx context.Context) (listeners []net.Listener, addrs []net.Addr, err error) {
	// A caller that vanished silently is detected after about a minute. An idle `kubectl logs -f`
	// that is still there answers the probes.
	lc := net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 4,
	}}
	listeners, err = listen.OpenAll(f.ports, func(p port) (net.Listener, error) {
		l, failed := f.cfg.Sockets.Listen(ctx, listen.Callers, lc, "tcp", net.JoinHostPort(f.cfg.listen(), p.number))
		if failed != nil {
			return nil, f.listenError(p, failed)
		}
		return l, nil
	}, func(l net.Listener) { l.Close() })
	for _, l := range listeners {
		addrs = append(addrs, l.Addr())
	}
	return listeners, addrs, err
}

// listenError adds to err what to do about a port that cannot be opened.
func (f *FrontDoor) listenError(p port, err error) error {
	at := fmt.Sprintf("port %s of [mode.cloud.https.addr] on %s", p.number, f.cfg.listen())
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%s is taken: stop what listens there (ss -ltnp 'sport = :%s' names it) "+
			"or choose another port: %w",
			at, p.number, err)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%s may not be opened: choose a port above 1023 or grant CAP_NET_BIND_SERVICE: %w", at, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%s cannot be opened: "+
			"this machine does not have the address that listen in [mode.cloud.https] names: %w",
			at, err)
	default:
		return fmt.Errorf("%s cannot be opened: %w", at, err)
	}
}

// serve owns one accepted connection. ctx is done when the front door stops accepting; the caller
// must have sent its ClientHello and finished its handshake by then. live bounds the connection
// after that.
func (f *FrontDoor) serve(ctx, live context.Context, web *web, raw net.Conn, index int) {
	p := f.ports[index]
	defer func() {
		if v := recover(); v != nil {
			f.panicked(v)
			tunnel.Reset(raw)
		}
	}()
	remote := raw.RemoteAddr().String()
	log := f.log.With("module", Name, "frontend", raw.LocalAddr().String(), "target", p.target)

	source := listen.AddrOf(raw.RemoteAddr())
	if allowed := f.lists.Load().AllowFrom; allowed != nil && !allowed.Permits(source) {
		f.deny(raw, p.target)
		return
	}
	place, ok := f.admit(raw)
	if !ok {
		return
	}
	defer place.Release() // often earlier: before pass, and by terminate

	c := &clientConn{Conn: raw, port: index, target: p.target}
	h, err := c.peek(ctx, f.cfg.Limits.HandshakeTimeout, place.Spoke)
	if err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			f.cfg.Counters.Limited(tunnel.LimitHandshakeTimeout)
		}
		f.balancers.UnexpectedIn(raw, err)
		log.Debug("https connection closed: no ClientHello", "err", fmt.Errorf("%s: %w", remote, err))
		if hello.IsPlainHTTP(err) {
			io.WriteString(c, hello.PlainHTTPAnswer) //nolint:errcheck // it fails only if the caller has gone
			c.lingeringClose()
			return
		}
		tunnel.Reset(raw)
		return
	}
	c.sni = h.ServerName

	switch d := f.decide(h); d.mode {
	case Passthrough:
		place.Release()
		if err = f.pass(live, c, source, d.node, p.target, log); err != nil {
			f.notPassed(ctx, live, web, c, d.node, err, log)
		}
	case Terminate:
		f.terminate(ctx, live, web, c, place, log)
	default:
		f.warn(denySNI, "https connection denied", "frontend", raw.LocalAddr().String(), "remote", remote,
			"node", string(d.node), "err", d.reason)
		c.alert(d.alert)
	}
}

// notPassed tells a caller why its connection was not passed through: by an HTTP response after a
// handshake or, if the front door cannot terminate, by a TLS alert. For the handshake, the connection
// needs a place among the strangers again, since serve has released its first place. If the front door
// terminates the connection, it logs the warning with the handshake or the request.
func (f *FrontDoor) notPassed(ctx, live context.Context, web *web, c *clientConn, node tunnel.NodeName, err error,
	log *slog.Logger) {
	if !f.cfg.terminates() {
		code := tunnel.CodeOf(err)
		f.cfg.Counters.Doors[tunnel.DoorHTTPS].Failed(code)
		f.warn(failureOf(code), "https connection not passed through", "frontend", c.LocalAddr().String(),
			"target", c.target, "node", string(node), "remote", c.RemoteAddr().String(), "err", err)
		c.alert(alertOf(err))
		return
	}
	log.Debug("https connection not passed through", "node", string(node), "remote", c.RemoteAddr().String(), "err", err)
	place, ok := f.admit(c.Conn)
	if !ok {
		return
	}
	defer place.Release()
	place.Spoke() // its ClientHello
	c.passErr = err
	f.terminate(ctx, live, web, c, place, log)
}

// panicked counts and logs a panic that has ended one connection or request.
func (f *FrontDoor) panicked(v any) {
	f.cfg.Counters.Panics.Add(1)
	f.log.Error("panic in the https front door; the connection was closed",
		"module", Name, "err", fmt.Sprintf("%v\n%s", v, debug.Stack()))
}
