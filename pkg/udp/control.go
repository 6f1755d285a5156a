package udp

import (
	"net"
	"net/netip"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// control is what the kernel says about received datagrams, beside the caller's address.
type control struct {
	local   netip.Addr // the address to which the caller has sent; zero: the address of the socket
	reply   []byte     // control message that sends a reply from the address local; nil: the kernel chooses an address
	segment int        // the size of each datagram, if the kernel gives several at once; 0: there is one datagram
}

const (
	// maxControls is how many controls are remembered: a machine may have a whole network of addresses,
	// and datagrams of any size.
	maxControls = 1 << 10
	// controlRoom is the length of the buffer for control messages, in bytes: IPV6_PKTINFO (40), IP_PKTINFO (32)
	// and UDP_GRO (24) are the longest that are asked for.
	controlRoom = 128
)

// controls parses control messages. The same ones come with every datagram to one address, so it
// remembers what they mean. One goroutine owns it.
type controls struct {
	v6    bool                  // the socket is an IPv6 socket
	known map[string]*control   // by the bytes of the control messages
	local map[netip.Addr][]byte // control.reply by control.local
}

// wantLocal makes the kernel say to which address a caller has sent, if the socket receives datagrams
// for several addresses. On a system that cannot say it, the kernel chooses the source of replies.
func wantLocal(c *net.UDPConn, listen netip.AddrPort) (v6 bool) {
	v6 = !listen.Addr().Unmap().Is4()
	if !listen.Addr().IsUnspecified() {
		return v6
	}
	if v6 {
		ipv6.NewPacketConn(c).SetControlMessage(ipv6.FlagDst|ipv6.FlagInterface, true) //nolint:errcheck // see above
	}
	// Also on an IPv6 socket, for IPv4 callers: see sourceFor.
	ipv4.NewPacketConn(c).SetControlMessage(ipv4.FlagDst|ipv4.FlagInterface, true) //nolint:errcheck // see above
	return v6
}

// of returns what control messages mean. The caller does not change it.
func (c *controls) of(messages []byte) *control {
	if k := c.known[string(messages)]; k != nil {
		return k
	}
	if c.known == nil || len(c.known) >= maxControls {
		c.known, c.local = make(map[string]*control), make(map[netip.Addr][]byte)
	}
	k := c.parse(messages)
	c.known[string(messages)] = k
	return k
}

func (c *controls) parse(messages []byte) *control {
	var dst net.IP
	if c.v6 {
		var m ipv6.ControlMessage
		if m.Parse(messages) == nil {
			dst = m.Dst
		}
	} else {
		var m ipv4.ControlMessage
		if m.Parse(messages) == nil {
			dst = m.Dst
		}
	}
	k := &control{segment: trainSegment(messages)}
	a, ok := netip.AddrFromSlice(dst)
	if source := sourceFor(messages); source.IsValid() {
		a = source
	}
	// No reply may leave from a broadcast or multicast address.
	if ok && !a.Unmap().IsMulticast() && !dst.Equal(net.IPv4bcast) {
		k.local, k.reply = a, c.replyFrom(a)
	}
	return k
}

// replyFrom returns the control message with which a datagram leaves from a. Flows share it.
func (c *controls) replyFrom(a netip.Addr) []byte {
	if reply := c.local[a]; reply != nil {
		return reply
	}
	// An IPv6 socket accepts the control message of IPv4 for an IPv4 caller.
	reply := (&ipv4.ControlMessage{Src: a.Unmap().AsSlice()}).Marshal()
	if a.Unmap().Is6() {
		reply = (&ipv6.ControlMessage{Src: a.AsSlice()}).Marshal()
	}
	c.local[a] = reply
	return reply
}
