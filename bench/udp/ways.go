package main

import (
	"net"
	"net/netip"

	"golang.org/x/net/ipv4"
)

func listenUDP(addr string) (*net.UDPConn, error) {
	a, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(a))
	if err != nil {
		return nil, err
	}
	return c, c.SetReadBuffer(buffer)
}

// serveTarget sends every datagram back.
func serveTarget(addr string) error {
	c, err := listenUDP(addr)
	if err != nil {
		return err
	}
	p := ipv4.NewPacketConn(c)
	messages := receivers()
	answers := make([]ipv4.Message, len(messages))
	for {
		n, err := p.ReadBatch(messages, 0)
		if err != nil {
			return err
		}
		for i, m := range messages[:n] {
			answers[i] = ipv4.Message{Buffers: [][]byte{m.Buffers[0][:m.N]}, Addr: m.Addr}
		}
		for rest := answers[:n]; len(rest) > 0; {
			n, err := p.WriteBatch(rest, 0)
			if err != nil {
				return err
			}
			rest = rest[n:]
		}
	}
}

// serveRelay passes datagrams on as the simplest relay does: a socket and a goroutine for each caller,
// and a system call for each datagram.
func serveRelay(addr, target string) error {
	c, err := listenUDP(addr)
	if err != nil {
		return err
	}
	callers := make(map[netip.AddrPort]*net.UDPConn)
	for b := make([]byte, 64<<10); ; {
		n, from, err := c.ReadFromUDPAddrPort(b)
		if err != nil {
			return err
		}
		to := callers[from]
		if to == nil {
			d, err := net.Dial("udp", target)
			if err != nil {
				return err
			}
			to = d.(*net.UDPConn)
			to.SetReadBuffer(buffer) //nolint:errcheck // the default is less
			callers[from] = to
			go func() {
				for answer := make([]byte, 64<<10); ; {
					got, err := to.Read(answer)
					if err != nil {
						return
					}
					c.WriteToUDPAddrPort(answer[:got], from) //nolint:errcheck // a datagram may be lost
				}
			}()
		}
		to.Write(b[:n]) //nolint:errcheck // a datagram may be lost
	}
}
