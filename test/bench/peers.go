package main

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"tunnel/pkg/auth"
	"tunnel/test/rig"
)

// The target and the relays listen on a port of the kernel's choice, print it, and
// live until the measurement ends.

// order is what a client asks of the target, right after it has connected.
type order struct {
	Kind  byte
	Chunk int32 // bytes a write
	Pace  int64 // chunks a second; 0: as fast as they are taken
}

// Kinds of order.
const (
	orderEcho  = iota // send back what comes
	orderFlood        // send chunks without end
)

// peer starts this program as a target or a relay, and returns its address.
func (b *bench) peer(role string, args ...string) (addr string, p *rig.Process, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", nil, err
	}
	log := new(rig.Log)
	p, err = rig.Start(log, self, append([]string{role}, args...)...)
	if err != nil {
		return "", nil, err
	}
	b.processes = append(b.processes, p)
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if addr, _, ok := strings.Cut(log.String(), "\n"); ok {
			return addr, p, nil
		}
	}
	return "", nil, fmt.Errorf("the %s does not say where it listens: %s", role, log)
}

// playRole is the main function of a peer. It does not return but with an error.
func playRole(role string, args []string) error {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	serve := serveOrder
	switch role {
	case "target":
	case "relay": // PLAIN-OR-TLS-SIDE ADDRESS
		if serve, ln, err = relay(args[0], args[1], ln); err != nil {
			return err
		}
	default:
		return fmt.Errorf("there is no role %q", role)
	}
	fmt.Println(ln.Addr())
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go serve(c)
	}
}

func serveOrder(c net.Conn) {
	defer c.Close()
	var o order
	r := bufio.NewReaderSize(c, 16)
	if err := binary.Read(r, binary.BigEndian, &o); err != nil {
		return
	}
	if o.Kind == orderEcho {
		io.Copy(c, r) //nolint:errcheck // the client has gone
		return
	}
	if o.Chunk < bulkChunk {
		// For a reader that stalls. Filling the kernel's buffers in tiny pieces would
		// keep the processors busy long after the tunnel has come to rest.
		c.(*net.TCPConn).SetWriteBuffer(16 << 10) //nolint:errcheck // it only takes longer, then
	}
	chunk := make([]byte, o.Chunk)
	started := time.Now()
	for n := int64(1); ; n++ {
		if _, err := c.Write(chunk); err != nil {
			return
		}
		if o.Pace > 0 {
			// A sleep is never exact, so several chunks follow a long one at once.
			time.Sleep(time.Until(started.Add(time.Duration(n) * time.Second / time.Duration(o.Pace))))
		}
	}
}

// relay returns the server of one hop to addr. side says where TLS is spoken: "in",
// "out" or "none".
func relay(side, addr string, ln net.Listener) (serve func(net.Conn), _ net.Listener, err error) {
	dial := func() (net.Conn, error) { return net.Dial("tcp", addr) }
	switch side {
	case "in":
		pair, err := certificate()
		if err != nil {
			return nil, nil, err
		}
		ln = tls.NewListener(ln, &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}})
	case "out":
		// Whom it speaks to is not the question here; what TLS costs is.
		cfg := &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true} //nolint:gosec // see above
		dial = func() (net.Conn, error) { return tls.Dial("tcp", addr, cfg) }
	}
	return func(in net.Conn) {
		defer in.Close()
		out, err := dial()
		if err != nil {
			return
		}
		defer out.Close()
		done := make(chan struct{})
		go func() {
			defer close(done)
			half(out, in)
		}()
		half(in, out)
		<-done
	}, ln, nil
}

// half copies until src ends, and says so to dst.
func half(dst, src net.Conn) {
	io.Copy(dst, src)                                  //nolint:errcheck // the client judges
	dst.(interface{ CloseWrite() error }).CloseWrite() //nolint:errcheck // likewise
}

func certificate() (tls.Certificate, error) {
	ca, err := auth.NewCA("tunnel bench", time.Hour)
	if err != nil {
		return tls.Certificate{}, err
	}
	cert, key, err := ca.Issue(auth.Leaf{CommonName: "relay", DNSNames: []string{"relay"}, Server: true})
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(cert, key)
}
