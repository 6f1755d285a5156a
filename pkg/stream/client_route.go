package stream

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// routeTimeout is how long the cloud may take to answer a heartbeat after this machine's routes have changed. It
// covers a lost packet and a busy link. Without a change of routes a session waits for lostAfter.
const routeTimeout = 3 * time.Second

// errRouteChanged ends a session whose local address no longer leads to the cloud.
var errRouteChanged = fmt.Errorf("this machine has another address towards the cloud now, and the cloud has not "+
	"answered on the connection from the old one for %s", routeTimeout)

// NetworkChanged is called after a change of this machine's addresses or routes. Most changes on a Kubernetes node are
// about pods. So NetworkChanged first asks the kernel from which address it would connect to the cloud now.
//
// If the client has no session, and the address differs from that of the last attempt to join, NetworkChanged ends the
// pause before the next attempt. If the address differs from that of a session, NetworkChanged checks the session: if
// the cloud does not answer within routeTimeout, the session ends, and the client joins again.
//
// NetworkChanged does not check a session while there is no route at all: a link that comes back within ten seconds
// must not end the session. It does not check a session with Multipath TCP while one of its paths begins at an address
// of this machine. It also leaves a dial in progress alone, which takes at most joinTimeout. NetworkChanged returns
// when the checks are done.
func (c *Client) NetworkChanged() {
	links := c.live()
	if len(links) == 0 {
		c.mu.Lock()
		defer c.mu.Unlock()
		now := c.sourcesLocked()
		if now.isNewSince(c.sources) {
			c.hurryLocked(hurryRoute)
		}
		c.sources = now
		return
	}
	var checks sync.WaitGroup
	for _, l := range links {
		if !moved(l.own) {
			continue
		}
		checks.Go(func() {
			if err := l.guard(l.checkRoute); err != nil {
				l.Close(err)
			}
		})
	}
	checks.Wait()
}

// sources are three local addresses from which the kernel would connect: to the address that was tried last, to any
// other IPv4 address, and to any other IPv6 address. The zero address means that there is no route. The last two
// matter for a name whose lookup has failed, or that has addresses of both families.
type sources [3]netip.Addr

// isNewSince reports whether an address has appeared or changed since before.
func (s sources) isNewSince(before sources) bool {
	for i, now := range s {
		if now.IsValid() && now != before[i] {
			return true
		}
	}
	return false
}

// sourcesLocked returns the sources as they are now. The caller holds mu.
func (c *Client) sourcesLocked() (all sources) {
	// The last two are addresses for documentation (RFC 5737, RFC 3849): they follow the default route.
	for i, remote := range []string{c.tried, "192.0.2.1:9", "[2001:db8::1]:9"} {
		if remote == "" {
			continue
		}
		if source, err := c.source(remote); err == nil {
			all[i] = source
		}
	}
	return all
}

// noteAttempt stores the sources at the begin of an attempt to join.
func (c *Client) noteAttempt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sources = c.sourcesLocked()
}

// noteTried stores the address that an attempt has reached or tried: the cloud's, or that of a proxy before it.
func (c *Client) noteTried(raw net.Conn, err error) {
	var tried net.Addr
	if err == nil {
		tried = raw.RemoteAddr()
	} else if op, ok := errors.AsType[*net.OpError](err); ok {
		tried = op.Addr
	}
	if tried == nil {
		return
	}
	if _, err := netip.ParseAddrPort(tried.String()); err != nil {
		return // the attempt failed before the name was looked up
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tried != tried.String() {
		c.tried = tried.String()
		c.sources = c.sourcesLocked()
	}
}

// moved reports whether the kernel would make the connection from another address now, and none of its paths
// begins at an address of this machine.
func moved(c *carrier) bool {
	if hasPath(c.Paths()) {
		return false
	}
	local, err := netip.ParseAddrPort(c.LocalAddr().String())
	if err != nil {
		return false // a network of a test
	}
	source, err := sourceTo(c.RemoteAddr().String())
	return err == nil && source != local.Addr().Unmap().WithZone("")
}

// hasPath reports whether a path begins at an address of this machine.
func hasPath(paths []tunnel.Path) bool {
	if len(paths) == 0 {
		return false
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	return slices.ContainsFunc(paths, func(p tunnel.Path) bool {
		return slices.ContainsFunc(own, func(a net.Addr) bool {
			prefix, err := netip.ParsePrefix(a.String())
			return err == nil && prefix.Addr().WithZone("") == p.Local.Addr()
		})
	})
}

// sourceTo returns the address from which the kernel would connect to remote.
func sourceTo(remote string) (netip.Addr, error) {
	c, err := net.Dial("udp", remote) // sends nothing
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close()
	local, ok := c.LocalAddr().(*net.UDPAddr)
	if !ok {
		return netip.Addr{}, errors.New("not a UDP address")
	}
	return local.AddrPort().Addr().Unmap().WithZone(""), nil
}

// checkRoute sends a heartbeat. It returns an error if the cloud does not answer within routeTimeout. It looks twice,
// since this process may have been paused before it read the answer.
func (s *edgeSession) checkRoute() error {
	began := time.Now()
	s.sendBeat()
	for _, wait := range []time.Duration{routeTimeout, doubtTime} {
		select {
		case <-time.After(wait):
		case <-s.done:
			return nil
		}
		s.mu.Lock()
		silent := s.silenceLocked()
		s.mu.Unlock()
		if silent < time.Since(began) {
			return nil
		}
	}
	return errRouteChanged
}
