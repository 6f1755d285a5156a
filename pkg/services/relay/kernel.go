package relay

import (
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"
)

// address is a port of a Service at one of its addresses, or a port of an endpoint. For rules about an address alone,
// it has a text in place of the protocol, such as aboutClusterIP.
type address struct {
	netip.AddrPort
	protocol string
}

// The protocols, as the state names them. Rules may lead SCTP to endpoints; the relay serves only TCP and UDP.
const (
	protocolTCP  = "TCP"
	protocolUDP  = "UDP"
	protocolSCTP = "SCTP"
)

func (a address) compare(b address) int {
	if n := a.AddrPort.Compare(b.AddrPort); n != 0 {
		return n
	}
	return strings.Compare(a.protocol, b.protocol)
}

// errUntracked says that the kernel has no conntrack entry for a datagram.
var errUntracked = errors.New("the kernel does not know where the datagram was sent to")

// errKubeProxy says that rules of kube-proxy are on this node, so that the edge must not write its own.
var errKubeProxy = errors.New("mode = \"full\" takes the place of kube-proxy, but its rules are on this node")

// kernel is what the relay needs of the operating system.
type kernel interface {
	// open adds the relay's own addresses to the machine, and returns them: one of IPv4, and one of IPv6 if the machine
	// has IPv6.
	open() ([]netip.Addr, error)
	// refused returns why the edge must not write rules now; nil: it may. If rules of kube-proxy are on the node, and the
	// edge would take its place, the error is errKubeProxy.
	refused() error
	// removeLeft removes the table of another process that no longer runs.
	removeLeft(log *slog.Logger)
	// program replaces the whole table by one with these rules. Between the old table and the new one, no packet meets a
	// moment without a table. listeners are the relay's TCP listeners; their ports distinguish this table from that of
	// another process. Rules of a family without a listener are left out.
	program(listeners []netip.AddrPort, all rules) error
	// change changes some rules of the table. before are the rules that end or change, and after are the rules that come
	// in their place.
	change(before, after rules) error
	// forget removes conntrack entries of UDP flows to addresses of before and after. It removes an entry if after would
	// send the flow elsewhere. For an address that after lacks, it removes the entries that lead where before led. Entries
	// of TCP connections without an answer so far are removed in the same way; other TCP connections continue. The next
	// packet of each caller then follows the table.
	forget(before, after rules) error
	// route adds routes for the ClusterIPs in after, and removes those for the ClusterIPs that only before has. So
	// processes of this node reach ClusterIPs without any other route. The first call after program must have all rules in
	// after. An error is about some routes; others are as they should be.
	route(before, after rules) error
	// clear stops all redirects to the relay. It does nothing if the table that program made is gone.
	clear() error
	// intact reports whether the table is as program made it, and has the routes of route. It does not look at elements of
	// sets.
	intact() bool
	// remove removes the table that program made. In place of kube-proxy, the table stays: connections to endpoints that
	// the node reaches by itself continue without the edge.
	remove() error
	// original returns the address that the caller of a redirected connection dialled.
	original(c net.Conn) (netip.AddrPort, error)
	// destination returns the address to which a caller sent a datagram that arrived at the socket local. If destination
	// returns local, the kernel did not redirect the datagram. The error errUntracked means that the kernel does not know
	// the datagram.
	destination(caller, local netip.AddrPort) (netip.AddrPort, error)
}
