package main

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// The target and the relays listen on ports of the kernel's choice, print them, and
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
	orderSink         // take what comes
	orderBoth         // flood and sink
	orderCubic        // flood, with the congestion control cubic
	orderTell         // say what was taken and written, see taken; then the conn ends
	orderRest         // orderTell, and the conns whose readers stall get nothing more, see flood
)

// handshakeRecord is what a TLS connection begins with. No order does.
const handshakeRecord = 22

// taken is what the target tells of itself.
type taken struct {
	Bytes   int64 // by orderSink and orderBoth
	Written int64 // bytes by orderFlood and orderBoth
	Open    int64 // conns with an order
}

// playRole is the main function of a peer, which listens on loopback, or at all addresses. It
// does not return but with an error.
func playRole(all bool, role string, args []string) error {
	ip := "127.0.0.1"
	if all {
		ip = ""
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		return err
	}
	var serve func(net.Conn)
	switch role {
	case "target": // CERTIFICATE KEY
		serve, err = target(args[0], args[1])
	case "relay": // SIDE-THAT-SPEAKS-TLS ADDRESS CERTIFICATE KEY
		serve, ln, err = relay(args, ln)
	default:
		err = fmt.Errorf("there is no role %q", role)
	}
	if err != nil {
		return err
	}
	fmt.Println(port(ln))
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go serve(c)
	}
}

func port(ln net.Listener) string { return strconv.Itoa(ln.Addr().(*net.TCPAddr).Port) }

// target returns the server of orders, which speaks HTTPS as well: to whoever begins so.
func target(cert, key string) (serve func(net.Conn), err error) {
	cfg, err := serverTLS(cert, key)
	if err != nil {
		return nil, err
	}
	cfg.NextProtos = []string{"http/1.1"}
	encrypted := make(handed)
	answer := []byte(strings.Repeat("x", 127) + "\n")
	web := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Write(answer)
	})}
	go web.Serve(tls.NewListener(encrypted, cfg)) //nolint:errcheck // it serves until the process ends
	var bytes, written, rests, open atomic.Int64
	return func(c net.Conn) {
		r := bufio.NewReaderSize(c, 16)
		if first, err := r.Peek(1); err == nil && first[0] == handshakeRecord {
			encrypted <- peeked{c, r}
			return
		}
		defer c.Close()
		var o order
		if err := binary.Read(r, binary.BigEndian, &o); err != nil {
			return
		}
		if o.Kind == orderRest {
			rests.Add(1)
		}
		if o.Kind == orderTell || o.Kind == orderRest {
			told := taken{bytes.Load(), written.Load(), open.Load()}
			binary.Write(c, binary.BigEndian, told) //nolint:errcheck // the client judges
			return
		}
		open.Add(1)
		defer open.Add(-1)
		switch o.Kind {
		case orderEcho:
			io.Copy(c, r) //nolint:errcheck // the client has gone
		case orderFlood:
			flood(c, o, &written, &rests)
			io.Copy(io.Discard, r) // until the client has gone
		case orderCubic:
			if useCubic(c) == nil { // else the client sees the conn end
				flood(c, o, &written, &rests)
			}
		case orderSink:
			sink(r, &bytes)
		case orderBoth:
			go flood(c, o, &written, &rests) // it ends when the sink has, which closes
			sink(r, &bytes)
		}
	}, nil
}

// flood sends chunks until the conn ends, and counts their bytes. A flood for a reader that stalls, which has
// small chunks, also ends when rests changes: then the conn stays open.
func flood(c net.Conn, o order, written, rests *atomic.Int64) {
	stalls, before := o.Chunk < bulkChunk, rests.Load()
	if stalls {
		// For a reader that stalls. Filling the kernel's buffers in tiny pieces would
		// keep the processors busy long after the tunnel has come to rest.
		c.(*net.TCPConn).SetWriteBuffer(16 << 10) //nolint:errcheck // it only takes longer, then
	}
	chunk := make([]byte, o.Chunk)
	started := time.Now()
	for n := int64(1); !stalls || rests.Load() == before; n++ {
		if _, err := c.Write(chunk); err != nil {
			return
		}
		written.Add(int64(o.Chunk))
		if o.Pace > 0 {
			// A sleep is never exact, so several chunks follow a long one at once.
			time.Sleep(time.Until(started.Add(time.Duration(n) * time.Second / time.Duration(o.Pace))))
		}
	}
}

// sink counts what comes.
func sink(r io.Reader, bytes *atomic.Int64) {
	buf := make([]byte, bulkBuffer)
	for {
		n, err := r.Read(buf)
		bytes.Add(int64(n))
		if err != nil {
			return
		}
	}
}

// peeked is a conn that something was read from.
type peeked struct {
	net.Conn
	r *bufio.Reader
}

func (p peeked) Read(b []byte) (int, error) { return p.r.Read(b) }

// handed is a listener of conns that others have accepted.
type handed chan net.Conn

func (h handed) Accept() (net.Conn, error) { return <-h, nil }
func (h handed) Close() error              { return nil }
func (h handed) Addr() net.Addr            { return &net.TCPAddr{} }

// relay returns the server of one hop. Its arguments say where TLS is spoken ("in", "out" or
// "none"), and where the hop leads.
func relay(args []string, ln net.Listener) (serve func(net.Conn), _ net.Listener, err error) {
	dial := through(nil, args[1])
	switch args[0] {
	case "in":
		cfg, err := serverTLS(args[2], args[3])
		if err != nil {
			return nil, nil, err
		}
		ln = tls.NewListener(ln, cfg)
	case "out":
		dial = func() (net.Conn, error) { return tls.Dial("tcp", args[1], anyServer()) }
	}
	return func(in net.Conn) {
		if out, err := dial(); err == nil {
			splice(in, out)
		} else {
			in.Close()
		}
	}, ln, nil
}

// splice copies both ways until both have ended.
func splice(a, b net.Conn) {
	defer a.Close()
	defer b.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		half(b, a)
	}()
	half(a, b)
	<-done
}

// half copies until src ends, and says so to dst.
func half(dst, src net.Conn) {
	io.Copy(dst, src) //nolint:errcheck // the client judges
	dst.(interface{ CloseWrite() error }).CloseWrite()
}

func serverTLS(cert, key string) (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(cert, key)
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}}, err
}

// anyServer believes everybody: whom it speaks to is not the question, what TLS costs is.
func anyServer() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true}
}
