package multipath

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// settle is how long the kernel must have reported no change before the endpoints are updated. An address and its
	// route come within milliseconds of each other. A network manager deletes a route and adds it again as fast.
	settle = 50 * time.Millisecond
	// settleMost is how long an update waits for a kernel that keeps reporting changes, as for pods that start and stop.
	settleMost = 500 * time.Millisecond
	// sessionsEnd is how long the sessions may take to end when the edge stops: more than the grace period.
	sessionsEnd = tunnel.GracePeriod + 5*time.Second
	// resync is how often the endpoints are updated although the kernel has reported no change.
	resync = time.Minute
)

// endpoint is an address of an uplink. The kernel binds a path from the address to the device, so that the
// path takes the device's default route, whatever its metric.
type endpoint struct {
	addr netip.Addr
	link int // index of the device
}

// name names the endpoint in Endpoints.Made.
func (e endpoint) name() string { return fmt.Sprintf("%s dev %d", e.addr, e.link) }

// Run implements tunnel.Module.
func (e *Endpoints) Run(ctx context.Context) error {
	changed := make(chan struct{}, 1) // the capacity remembers a change during an update
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	if err != nil {
		close(e.told)
		e.failed(fmt.Sprintf("the kernel does not report changes of addresses: %v", err))
		<-ctx.Done()
		return nil
	}
	var receiving sync.WaitGroup
	receiving.Go(func() { receive(socket, changed) })
	defer receiving.Wait()
	defer socket.Close()

	has := make(known)
	e.update(has)
	close(e.told)
	e.follow(ctx, changed, func() { e.update(has) })
	<-ctx.Done()
	e.leave(has)
	return nil
}

// follow calls update some time after each change, and every resync. It returns when ctx is done or Left is closed.
func (e *Endpoints) follow(ctx context.Context, changed <-chan struct{}, update func()) {
	for {
		select {
		case <-changed:
		case <-time.After(resync):
		case <-e.Left:
		case <-ctx.Done():
		}
		e.settled(ctx, changed)
		if ctx.Err() != nil || tunnel.IsClosed(e.Left) { // no process would remove what this one adds from now on
			return
		}
		update()
	}
}

// settled waits until the kernel has reported no change for settle. It waits for settleMost at most, and returns early
// when ctx is done or Left is closed.
func (e *Endpoints) settled(ctx context.Context, changed <-chan struct{}) {
	latest := time.After(settleMost)
	for {
		select {
		case <-changed:
			continue
		case <-time.After(settle):
		case <-latest:
		case <-e.Left:
		case <-ctx.Done():
		}
		return
	}
}

// known is the set of endpoints at addresses of this machine's uplinks. Another maker than this process, such as an
// operator or a killed edge, has made each endpoint that is not in Endpoints.ours.
type known map[endpoint]struct{}

// leave removes the endpoints that are in Endpoints.ours. It first waits until the sessions have ended, because the
// kernel closes the paths of a removed endpoint, and conns may still use them.
func (e *Endpoints) leave(has known) {
	if tunnel.IsClosed(e.Left) {
		return
	}
	for last := time.Now().Add(sessionsEnd); len(e.sessions()) > 0 && time.Now().Before(last); {
		time.Sleep(settle)
	}
	ours := e.Made()
	for endpoint := range has {
		if slices.Contains(ours, endpoint.name()) {
			remove(endpoint) //nolint:errcheck // the kernel has removed it, or refuses this process
		}
	}
}

// receive sends to changed when the kernel reports a change. It returns when socket is closed.
func receive(socket *nl.NetlinkSocket, changed chan<- struct{}) {
	for {
		_, _, err := socket.Receive()
		if err != nil && !errors.Is(err, unix.ENOBUFS) { // ENOBUFS: there were too many reports
			return
		}
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}

// update makes the endpoints agree with the addresses of the uplinks.
func (e *Endpoints) update(has known) {
	want, err := uplinks()
	if err != nil {
		e.failed(fmt.Sprintf("the kernel does not say which addresses this machine has: %v", err))
		return
	}
	var failure error
	for gone := range has {
		if slices.Contains(want, gone) {
			continue
		}
		delete(has, gone)
		e.setOurs(gone.name(), false)
		failure = errors.Join(failure, remove(gone))
		if slices.ContainsFunc(want, func(w endpoint) bool { return w.addr == gone.addr }) {
			continue // another uplink has the address, too
		}
		failure = errors.Join(failure, closeFirst(gone))
		e.log.Info("an address of this machine is gone", "addr", gone.addr.String())
	}
	e.forgetRemoved(has)
	for _, w := range want {
		if _, ok := has[w]; ok {
			continue
		}
		switch err := e.make(w); {
		case err == nil, errors.Is(err, os.ErrExist):
			e.log.Info("connections to the cloud may use another address of this machine", "addr", w.addr.String())
			has[w] = struct{}{}
		default:
			failure = errors.Join(failure, err)
		}
	}
	switch {
	case errors.Is(failure, os.ErrPermission):
		e.failed("without CAP_NET_ADMIN this edge cannot tell the kernel the addresses of this machine: " +
			"as root, run `ip mptcp endpoint add ADDRESS dev DEVICE subflow` for each")
	case failure != nil:
		e.failed(fmt.Sprintf("telling the kernel the addresses of this machine: %v", failure))
	default:
		e.failure.Store(nil)
	}
}

// make adds an endpoint, and notes that this process has to remove it. Made waits for both.
func (e *Endpoints) make(w endpoint) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := add(w)
	if err == nil {
		e.ours[w.name()] = true
	}
	return err
}

// forgetRemoved deletes the endpoints from has that the kernel has no more, so that update adds them again: another
// program may have removed them. forgetRemoved compares addresses alone: the kernel has at most one endpoint at an
// address, and an operator may have made it for all devices.
func (e *Endpoints) forgetRemoved(has known) {
	all, err := list()
	if err != nil {
		return // if the kernel gives no list, update trusts has
	}
	for h := range has {
		if !slices.ContainsFunc(all, func(l listed) bool { return l.addr == h.addr }) {
			delete(has, h)
			e.setOurs(h.name(), false)
			e.log.Info("the endpoint of an address of this machine is gone", "addr", h.addr.String())
		}
	}
}

// uplinks returns the addresses of all uplinks, in the order of the devices.
func uplinks() (all []endpoint, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routed, err := defaultRoutes(family)
		if err != nil {
			return nil, err
		}
		for _, l := range links {
			const usable = unix.IFF_UP | unix.IFF_RUNNING
			attrs := l.Attrs()
			if attrs.RawFlags&(usable|unix.IFF_LOOPBACK) != usable || !routed[attrs.Index] {
				continue
			}
			addrs, err := netlink.AddrList(l, family)
			if err != nil {
				return nil, err
			}
			for _, a := range addrs {
				if ip, ok := netip.AddrFromSlice(a.IP); ok && isLasting(a) {
					all = append(all, endpoint{ip.Unmap(), attrs.Index})
				}
			}
		}
	}
	return all, nil
}

// isLasting reports whether connections may use an address. It has global scope, is neither temporary nor
// deprecated, and has passed duplicate address detection. IFA_F_SECONDARY and IFA_F_TEMPORARY (RFC 8981) are one bit.
func isLasting(a netlink.Addr) bool {
	const not = unix.IFA_F_SECONDARY | unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED | unix.IFA_F_DEPRECATED
	return a.Scope == unix.RT_SCOPE_UNIVERSE && a.Flags&not == 0
}

// defaultRoutes returns the devices that have a default route, in any table.
func defaultRoutes(family int) (map[int]bool, error) {
	routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, err
	}
	routed := make(map[int]bool)
	for _, r := range routes {
		if !isDefault(r.Dst) || r.Type != unix.RTN_UNICAST {
			continue
		}
		routed[r.LinkIndex] = true
		for _, hop := range r.MultiPath {
			routed[hop.LinkIndex] = true
		}
	}
	return routed, nil
}

func isDefault(dst *net.IPNet) bool {
	if dst == nil {
		return true
	}
	ones, _ := dst.Mask.Size()
	return ones == 0
}

// The generic netlink family mptcp_pm (include/uapi/linux/mptcp_pm.h).
const (
	pmName    = "mptcp_pm"
	pmVersion = 1

	pmAddAddr = 1
	pmDelAddr = 2
	pmGetAddr = 3

	pmAttrAddr = 1 // nested; the attributes below are in it

	addrFamily = 1
	addrID     = 2
	addrIPv4   = 3
	addrIPv6   = 4
	addrFlags  = 6
	addrDevice = 7

	// flagSubflow makes the kernel open paths from the address.
	flagSubflow = 1 << 1
)

// add makes an endpoint.
func add(e endpoint) error {
	attr := attribute(e.addr)
	attr.AddRtAttr(addrFlags, nl.Uint32Attr(flagSubflow))
	attr.AddRtAttr(addrDevice, nl.Uint32Attr(uint32(e.link))) //nolint:gosec // an index
	_, err := ask(pmAddAddr, 0, attr)
	return err
}

// remove removes an endpoint. The kernel then closes the paths from its address. An endpoint at the same address of
// another device stays.
func remove(e endpoint) error {
	all, err := list()
	if err != nil {
		return err
	}
	for _, l := range all {
		if l.endpoint != e {
			continue
		}
		attr := nl.NewRtAttr(pmAttrAddr|int(nl.NLA_F_NESTED), nil)
		attr.AddRtAttr(addrID, nl.Uint8Attr(l.id))
		_, err = ask(pmDelAddr, 0, attr)
		return err
	}
	return nil
}

// closeFirst closes the first paths of connections from an address that has gone. The first path of a connection
// has the number 0, even if its address is an endpoint with another number. Some versions of Linux close the
// first path only at a request with the number 0.
func closeFirst(e endpoint) error {
	attr := attribute(e.addr)
	attr.AddRtAttr(addrID, nl.Uint8Attr(0))
	_, err := ask(pmDelAddr, 0, attr)
	if errors.Is(err, os.ErrPermission) {
		return err
	}
	return nil // no connection has its first path from this address
}

// attribute returns the attribute of an address.
func attribute(addr netip.Addr) *nl.RtAttr {
	attr := nl.NewRtAttr(pmAttrAddr|int(nl.NLA_F_NESTED), nil)
	if addr.Is4() {
		attr.AddRtAttr(addrFamily, nl.Uint16Attr(unix.AF_INET))
		attr.AddRtAttr(addrIPv4, addr.AsSlice())
	} else {
		attr.AddRtAttr(addrFamily, nl.Uint16Attr(unix.AF_INET6))
		attr.AddRtAttr(addrIPv6, addr.AsSlice())
	}
	return attr
}

// ask sends a command to mptcp_pm. attr may be nil.
func ask(command uint8, flags int, attr *nl.RtAttr) ([][]byte, error) {
	family, err := netlink.GenlFamilyGet(pmName)
	if err != nil {
		return nil, fmt.Errorf("this kernel has no Multipath TCP: %w", err)
	}
	if flags == 0 {
		flags = unix.NLM_F_ACK
	}
	request := nl.NewNetlinkRequest(int(family.ID), flags)
	request.AddData(&nl.Genlmsg{Command: command, Version: pmVersion})
	if attr != nil {
		request.AddData(attr)
	}
	return request.Execute(unix.NETLINK_GENERIC, 0)
}

// listed is an endpoint in the kernel's list. Its link is 0 if its paths may use any device.
type listed struct {
	endpoint

	id uint8
}

// list returns the endpoints that the kernel has.
func list() (all []listed, err error) {
	messages, err := ask(pmGetAddr, unix.NLM_F_DUMP, nil)
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		l, err := decode(m)
		if err != nil {
			return nil, err
		}
		all = append(all, l)
	}
	return all, nil
}

// decode returns the endpoint in a message of the kernel's list.
func decode(message []byte) (l listed, err error) {
	outer, err := nl.ParseRouteAttr(message[nl.SizeofGenlmsg:])
	if err != nil {
		return l, err
	}
	for _, o := range outer {
		if o.Attr.Type&^uint16(nl.NLA_F_NESTED) != pmAttrAddr {
			continue
		}
		inner, err := nl.ParseRouteAttr(o.Value)
		if err != nil {
			return l, err
		}
		for _, a := range inner {
			switch a.Attr.Type {
			case addrID:
				l.id = a.Value[0]
			case addrIPv4, addrIPv6:
				l.addr, _ = netip.AddrFromSlice(a.Value)
			case addrDevice:
				l.link = int(nl.NativeEndian().Uint32(a.Value))
			}
		}
	}
	l.addr = l.addr.Unmap()
	return l, nil
}
