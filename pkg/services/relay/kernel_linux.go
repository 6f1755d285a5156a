package relay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/services"
)

// These tables of nftables have the rules. No other program writes to them. Redirects of DNS have a table of their own,
// which the edge removes at once when it stops.
const (
	tableName    = services.RulesTable
	tableNameDNS = services.RulesTableDNS
)

// linux implements kernel for this machine. Only one goroutine may call its methods, apart from original.
type linux struct {
	dns       bool             // the table is the one for DNS; set once
	full      bool             // the table takes the place of kube-proxy's; set once
	listeners []netip.AddrPort // the listeners that the table was written for; nil: program has written no table
	// noAffinity: this kernel does not support session affinity (Linux 5.2 and 5.3). Each new connection of a caller may
	// go to any endpoint.
	noAffinity bool
	id         string             // the id in the names of the table's chains and sets
	chains     map[chain]struct{} // the chains of the table that elements lead to
	built      int                // how many chains program has made
	programs   int                // how often program has begun to write a table
	left       rules              // where earlier tables have led flows; nil: forget has looked for them
	routes     routes             // to ClusterIPs
}

func newKernel(full bool) (kernel, error) { return &linux{full: full}, nil }

func newDNSKernel() kernel { return &linux{dns: true} }

// isDenied reports whether an error says that this process lacks a right.
func isDenied(err error) bool { return errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) }

// withRights adds to an error about a missing right what the operator should do.
func withRights(err error) error {
	if isDenied(err) {
		return fmt.Errorf("%w: [mode.edge.services] needs the node's network and the capability CAP_NET_ADMIN", err)
	}
	return err
}

// withVersion adds to an error what the operator should do if the kernel lacks a feature that the table needs.
func withVersion(err error) error {
	for _, lacks := range []error{unix.ENOENT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT} {
		if errors.Is(err, lacks) {
			return fmt.Errorf("%w: [mode.edge.services] needs Linux 5.2 or newer with the modules nf_tables, nft_nat, "+
				"nft_chain_nat, nft_masq, nft_ct and nft_numgen; mode = \"full\" also nft_fib_inet and nft_reject_inet", err)
		}
	}
	return err
}

// RemoveRules removes the rules that an earlier edge with Services has left: in mode full, or when it was killed. An
// edge without Services calls it, since such rules lead nowhere. If the edge that made the rules still runs,
// RemoveRules leaves them and returns true. If this process lacks the right to look, it warns, but only if an edge with
// Services was on this machine.
func RemoveRules(log *slog.Logger) (stay bool) {
	stay, err := (&linux{}).tryRemove(log)
	if isDenied(err) && hasAddress() {
		log.Warn("rules of an earlier edge with [mode.edge.services] may be in force, and this one lacks CAP_NET_ADMIN to "+
			"remove them: run nft delete table inet "+tableName+" on the node; to end this warning, also remove "+
			"169.254.77.1 from loopback, and routes of mode full (docs/services.md, Remove it)", "table", tableName)
	}
	RemoveDNSRules(log)
	return stay
}

// hasAddress reports whether this machine has the address that an edge with Services adds to loopback. The address
// stays there when the edge ends.
func hasAddress() bool {
	addrs, err := net.InterfaceAddrs()
	return err == nil && slices.ContainsFunc(addrs, func(a net.Addr) bool {
		prefix, ok := a.(*net.IPNet)
		return ok && prefix.IP.Equal(addr4.AsSlice())
	})
}

// RemoveDNSRules removes the redirects of DNS that an earlier edge has left. It is for an edge that serves Services,
// but does not answer DNS queries.
func RemoveDNSRules(log *slog.Logger) { (&linux{dns: true}).removeLeft(log) }

func (k *linux) removeLeft(log *slog.Logger) { _, _ = k.tryRemove(log) }

// tryRemove removes the table. stays is true if the table stays, because the process that made it still runs.
func (k *linux) tryRemove(log *slog.Logger) (stays bool, err error) {
	c, err := nftables.New()
	if err != nil {
		return false, err
	}
	if owner, lives := k.owner(c); lives {
		log.Info("another edge of this machine serves Services: its rules stay", "table", k.table().Name, "listener", owner)
		return true, nil
	}
	c.DelTable(k.table())
	if err = c.Flush(); err == nil {
		log.Info("rules that an edge with [mode.edge.services] has left are removed", "table", k.table().Name)
	}
	if k.dns {
		return false, err
	}
	if routesErr := removeRoutes(); routesErr != nil && !isDenied(routesErr) {
		log.Warn("routes that an edge with [mode.edge.services] has left cannot be removed", "err", routesErr)
	}
	return false, err
}

// owner returns the listener of the process that made the table, if that process runs. Names of chains have the
// listener's port.
func (k *linux) owner(c *nftables.Conn) (at netip.AddrPort, lives bool) {
	chains, err := c.ListChainsOfTableFamily(k.table().Family)
	if err != nil {
		return at, false
	}
	for _, chain := range chains {
		id, ok := strings.CutPrefix(chain.Name, prefixPrerouting)
		id, _, _ = strings.Cut(id, ".")
		port, err := strconv.ParseUint(id, 10, 16)
		if !ok || err != nil || chain.Table.Name != k.table().Name {
			continue
		}
		at = netip.AddrPortFrom(addr4, uint16(port))
		ln, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		if errors.Is(err, unix.EADDRINUSE) {
			return at, true
		}
		if err == nil {
			_ = ln.Close()
		}
	}
	return at, false
}

// open implements kernel. It adds the addresses to loopback. Packets to these addresses are then for this machine,
// wherever they come from, without a route or forwarding. nft's redirect would need no address, but it fails for
// packets that come in by an interface without an address.
func (*linux) open() ([]netip.Addr, error) {
	link, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("finding loopback: %w", err)
	}
	if err = addAddress(link, addr4); err != nil {
		return nil, fmt.Errorf("adding %s to loopback: %w", addr4, withRights(err))
	}
	err = addAddress(link, addr6)
	switch {
	case err == nil:
		return []netip.Addr{addr4, addr6}, nil
	case slices.ContainsFunc([]error{unix.EACCES, unix.EPERM, unix.EOPNOTSUPP, unix.EAFNOSUPPORT},
		func(e error) bool { return errors.Is(err, e) }):
		return []netip.Addr{addr4}, nil // this machine has no IPv6; the rights sufficed for IPv4
	}
	return nil, fmt.Errorf("adding %s to loopback: %w", addr6, err)
}

// addAddress adds an address to a network interface, unless the interface has it. The kernel never chooses the address
// as the source of other connections: IPv4 because of its scope, IPv6 because it is deprecated.
func addAddress(link netlink.Link, addr netip.Addr) error {
	a := &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}}
	if addr.Is4() {
		a.Scope = unix.RT_SCOPE_LINK
	} else {
		a.Flags, a.ValidLft = unix.IFA_F_NODAD, math.MaxInt32 // PreferedLft is 0
	}
	err := netlink.AddrAdd(link, a)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// original implements kernel. It asks for the socket option SO_ORIGINAL_DST of linux/netfilter_ipv4.h, or
// IP6T_SO_ORIGINAL_DST.
func (*linux) original(c net.Conn) (at netip.AddrPort, err error) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return at, errors.New("it is no TCP connection")
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return at, err
	}
	is4 := listen.AddrOf(c.LocalAddr()).Is4()
	control := raw.Control(func(fd uintptr) {
		const originalDestination = 80
		if is4 {
			// A sockaddr_in, in a struct that is long enough.
			var sa *unix.IPv6Mreq
			if sa, err = unix.GetsockoptIPv6Mreq(int(fd), unix.IPPROTO_IP, originalDestination); err == nil {
				b := sa.Multiaddr
				at = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:4]))
			}
			return
		}
		// A sockaddr_in6, in a struct that begins with one.
		var sa *unix.IPv6MTUInfo
		if sa, err = unix.GetsockoptIPv6MTUInfo(int(fd), unix.IPPROTO_IPV6, originalDestination); err == nil {
			port := binary.NativeEndian.AppendUint16(nil, sa.Addr.Port)
			at = netip.AddrPortFrom(netip.AddrFrom16(sa.Addr.Addr), binary.BigEndian.Uint16(port))
		}
	})
	return at, errors.Join(control, err)
}
