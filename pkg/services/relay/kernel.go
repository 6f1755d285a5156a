package relay

import (
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// address is a port of a Service at one of its addresses, or of an endpoint. It also names what rules are for that are
// no port of a Service, see kind.
type address struct {
	netip.AddrPort
	protocol string
}

// The protocols, as the state names them. The relay does not serve SCTP.
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

// addresses are those of the cluster's DNS.
type addresses map[netip.AddrPort]struct{}

// sorted returns the addresses in order.
func (a addresses) sorted() []netip.AddrPort {
	return slices.SortedFunc(maps.Keys(a), netip.AddrPort.Compare)
}

// errUntracked says that the kernel knows no flow of a datagram.
var errUntracked = errors.New("the kernel does not know where the datagram was sent to")

// errKubeProxy says that rules of kube-proxy are there.
var errKubeProxy = errors.New("mode = \"full\" takes the place of kube-proxy, but its rules are on this node")

// kernel is what the relay needs of the operating system.
type kernel interface {
	// open adds the relay's own addresses to the machine, and returns them: of IPv4, and of IPv6 if the machine has it.
	open() ([]netip.Addr, error)
	// refused returns why there must be no rules now: kube-proxy's are there, whose place they take. nil: there may be.
	// Rules of kube-proxy are errKubeProxy.
	refused() error
	// removeLeft removes the table of a process that does not run any more.
	removeLeft(log *slog.Logger)
	// program makes the table anew, with these rules. Where the table was before, no packet meets a moment without one.
	// listeners are those of TCP. They tell the table from that of another process. Rules of a family without listener are
	// left out.
	program(listeners []netip.AddrPort, all rules) error
	// change makes some rules of the table others. before are those that end or change, after is what they should be.
	change(before, after rules) error
	// forget ends the translation of datagrams to the addresses of before and after by which they lead elsewhere than
	// after says. Of addresses that after lacks, it ends that to where before has led. It is the same with connections of
	// TCP that have had no answer yet; others go on. The kernel decides by the table again for the next packet of each
	// caller.
	forget(before, after rules) error
	// clear has the table send nothing to the relay any more. Without the table that program has made it does nothing.
	clear() error
	// intact reports whether the table is as program has made it, apart from the elements of its sets.
	intact() bool
	// remove removes the table, if it is the one that program has made. In place of kube-proxy, the table stays: endpoints
	// that the node reaches by itself go on without the edge.
	remove() error
	// original returns where the caller of a redirected connection has connected to.
	original(c net.Conn) (netip.AddrPort, error)
	// destination returns where a caller has sent a datagram to that was redirected to the socket at local. If it is
	// local, the datagram was not redirected. The error errUntracked means that the kernel does not know the datagram.
	destination(caller, local netip.AddrPort) (netip.AddrPort, error)
}
