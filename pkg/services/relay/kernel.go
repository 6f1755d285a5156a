package relay

import (
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// address is a port of a Service at one of its ClusterIPs, or of an endpoint.
type address struct {
	netip.AddrPort
	protocol string // TCP or UDP
}

// The protocols that the relay serves, as the state names them.
const (
	protocolTCP = "TCP"
	protocolUDP = "UDP"
)

func (a address) compare(b address) int {
	if n := a.AddrPort.Compare(b.AddrPort); n != 0 {
		return n
	}
	return strings.Compare(a.protocol, b.protocol)
}

// redirects say which packets the kernel redirects: those to an address go to this port of the relay's own address.
type redirects map[address]uint16

// sorted returns the addresses in order.
func (r redirects) sorted() []address { return slices.SortedFunc(maps.Keys(r), address.compare) }

// difference returns what makes r the same as want. An address whose port changes is in both.
func (r redirects) difference(want redirects) (add, gone redirects) {
	add, gone = make(redirects), make(redirects)
	for at, port := range want {
		if had, ok := r[at]; !ok || had != port {
			add[at] = port
		}
	}
	for at, port := range r {
		if stays, ok := want[at]; !ok || stays != port {
			gone[at] = port
		}
	}
	return add, gone
}

// addresses are those of the cluster's DNS.
type addresses map[netip.AddrPort]struct{}

// sorted returns the addresses in order.
func (a addresses) sorted() []netip.AddrPort {
	return slices.SortedFunc(maps.Keys(a), netip.AddrPort.Compare)
}

// errUntracked says that the kernel knows no flow of a datagram.
var errUntracked = errors.New("the kernel does not know where the datagram was sent to")

// kernel is what the relay needs of the operating system.
type kernel interface {
	// open adds the relay's own addresses to the machine, and returns them: of IPv4, and of IPv6 if the machine has it.
	open() ([]netip.Addr, error)
	// program makes the table anew: packets to all go to the relay's own address of their family, if it listens there.
	// listeners are those of TCP. They tell the table from that of another process.
	program(listeners []netip.AddrPort, all redirects) error
	// change adds addresses to the table, and removes others.
	change(add, gone redirects) error
	// forget ends the translation of datagrams to these addresses by which they go elsewhere, or if leave is true, by
	// which they go to the relay. It is the same with connections of TCP that have had no answer yet; others go on. The
	// kernel decides by the table again for the next packet of each caller.
	forget(all redirects, leave bool) error
	// clear removes all addresses from the table that program has made. Without that table it does nothing.
	clear() error
	// intact reports whether the table is as program has made it, apart from its addresses.
	intact() bool
	// remove removes the table, if it is the one that program has made.
	remove() error
	// original returns where the caller of a redirected connection has connected to.
	original(c net.Conn) (netip.AddrPort, error)
	// destination returns where a caller has sent a datagram to that was redirected to the socket at local. If it is
	// local, the datagram was not redirected. The error errUntracked means that the kernel does not know the datagram.
	destination(caller, local netip.AddrPort) (netip.AddrPort, error)
}
