package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"

	"tunnel.example/tunnel/pkg/services/names"
)

// DNS answers DNS queries of pods. It gets the answers from Relay.Resolve.
type DNS interface {
	// Open opens a socket for UDP and a listener for TCP with the same port. Port 0: the kernel chooses the port.
	Open(ctx context.Context, addr string) (*net.UDPConn, net.Listener, error)
	// Serve answers queries until ctx is done. Then it closes both.
	Serve(ctx context.Context, udp *net.UDPConn, tcp net.Listener) error
}

// resolver redirects queries for the cluster's DNS to a DNS server of this process. The goroutine of Relay.serveDNS
// owns it.
type resolver struct {
	relay *Relay          // set once
	ctx   context.Context //nolint:containedctx // of the servers, which end after the redirects
	end   context.CancelFunc
	fail  context.CancelCauseFunc // makes Relay.Run end

	listeners  []netip.AddrPort
	programmed rules // the redirects that the kernel has; nil: not known
	serving    sync.WaitGroup
}

// newZone returns the zone of names; nil if the edge leaves DNS to others.
func newZone(cfg Config) *names.Zone {
	if cfg.DNS == nil {
		return nil
	}
	return names.NewZone(cfg.Domain)
}

// Resolve answers a question from the state. nil: the name is not in the cluster's zone.
func (r *Relay) Resolve(q dns.Question) *dns.Msg {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.zone.Answer(r.state, q)
}

// ServesDNS reports whether this edge answers in place of the cluster's DNS at addr. A query that the edge itself sends
// to such an address would come back to it.
func (r *Relay) ServesDNS(addr netip.Addr) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for at := range r.plan.dns {
		if at.Addr() == addr.Unmap() {
			return true
		}
	}
	return addr.Unmap() == addr4 || addr == addr6
}

// serveDNS keeps the redirects of queries as the plan says until ctx is done. Then it removes the redirects and ends
// the servers. If the next process of this edge takes over, serveDNS waits for its redirects before. If a server fails,
// serveDNS calls fail.
func (r *Relay) serveDNS(ctx context.Context, fail context.CancelCauseFunc) {
	d := &resolver{relay: r, fail: fail}
	d.ctx, d.end = context.WithCancel(context.WithoutCancel(ctx))
	defer d.close()
	ticker := time.NewTicker(r.every)
	defer ticker.Stop()
	for {
		r.mu.Lock()
		want, changed := maps.Clone(r.plan.dns), r.changed.Next()
		r.mu.Unlock()
		if ctx.Err() == nil {
			r.noteDNS(d.program(want))
		}
		select {
		case <-ctx.Done():
			r.awaitSuccessor(func() bool { return len(d.programmed) > 0 && r.dnsKernel.intact() })
			return
		case <-changed:
		case <-ticker.C:
			if ctx.Err() == nil && len(d.programmed) > 0 && !r.dnsKernel.intact() {
				r.log.Warn("another program has removed the redirect of DNS, or changed it: it is written again")
				d.programmed = nil
			}
		}
	}
}

// errNoDNS says that the state has no Service whose queries the edge could answer.
var errNoDNS = errors.New("dns = true, but the cloud has sent no Service for DNS: that Service needs a ClusterIP, " +
	"port 53, " +
	"the namespace kube-system, and the name kube-dns or the label k8s-app=kube-dns; " +
	"see also namespaces in [mode.cloud.services]")

// program makes the kernel redirect queries to the addresses in want.
func (d *resolver) program(want counted[netip.AddrPort]) error {
	if len(want)+len(d.programmed) > 0 {
		if err := d.open(); err != nil {
			d.programmed = nil
			return err
		}
		all := d.rules(want)
		before, after := d.programmed.difference(all)
		err := d.relay.write(d.relay.dnsKernel, d.listeners, d.programmed != nil, before, after,
			func() (pending, now rules) { return make(rules), all })
		if d.programmed = all; err != nil {
			d.programmed = nil
			return err
		}
	}
	if len(want) == 0 {
		return errNoDNS
	}
	return nil
}

// rules returns the rules that redirect queries to the servers of this process.
func (d *resolver) rules(want counted[netip.AddrPort]) rules {
	all := make(rules)
	for at := range want {
		var r rule // the kernel leaves out a family without listener
		for _, listener := range d.listeners {
			if at.Addr().Is4() == listener.Addr().Is4() {
				r.port = listener.Port()
			}
		}
		all[address{at, protocolUDP}], all[address{at, protocolTCP}] = r, r
	}
	return all
}

// open opens a server on each of the relay's own addresses. It skips an address that has a server already.
func (d *resolver) open() error {
	addrs, err := d.relay.dnsKernel.open()
	if err != nil {
		return err
	}
	for _, addr := range addrs {
		if slices.ContainsFunc(d.listeners, func(a netip.AddrPort) bool { return a.Addr() == addr }) {
			continue
		}
		udp, tcp, err := d.relay.cfg.DNS.Open(d.ctx, netip.AddrPortFrom(addr, 0).String())
		if err != nil {
			return fmt.Errorf("listening on %s for DNS: %w", addr, err)
		}
		at, _ := udp.LocalAddr().(*net.UDPAddr)
		d.listeners = append(d.listeners, netip.AddrPortFrom(addr, at.AddrPort().Port()))
		d.programmed = nil // the rules lack this listener
		d.serving.Go(func() {
			d.relay.guard(d.fail, func() error { return d.relay.cfg.DNS.Serve(d.ctx, udp, tcp) })
		})
	}
	return nil
}

// close removes the redirects, and ends the servers.
func (d *resolver) close() {
	if err := d.relay.dnsKernel.remove(); err != nil {
		d.relay.log.Warn("the redirect of DNS cannot be removed", "err", err)
	}
	if err := d.relay.dnsKernel.forget(d.programmed, nil); err != nil {
		d.relay.log.Warn("queries by UDP lead to the edge after its end", "err", err)
	}
	d.end()
	d.serving.Wait()
}

// noteDNS stores why queries for names are not answered; nil: they are.
func (r *Relay) noteDNS(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if errors.Is(err, errNoDNS) && r.state.Len() == 0 {
		return // the cloud has told of nothing yet
	}
	switch before := r.unnamed; {
	case err != nil && (before == nil || before.Error() != err.Error()):
		r.log.Warn("the names of Services are not answered", "err", err)
	case err == nil && (before != nil || !r.named):
		r.log.Info("the names of Services are answered", "domain", r.cfg.Domain,
			"addresses", slices.SortedFunc(maps.Keys(r.plan.dns), netip.AddrPort.Compare))
	}
	r.unnamed, r.named = err, err == nil
}
