package stream

import (
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/conn"
)

// memNet is a network in memory with one listener. It works on the fake clock of
// testing/synctest, and its cables can be cut so that nobody is told.
type memNet struct {
	accept chan net.Conn
	dead   atomic.Bool // bytes are taken and go nowhere, both ways
	dials  atomic.Int64
	spread atomic.Bool                 // every connection comes from an address of its own
	from   atomic.Pointer[net.TCPAddr] // where connections come from; nil: as spread says
	delay  atomic.Int64                // nanoseconds that every write takes
	queue  atomic.Int64                // nanoseconds for which what the cloud sends waits on its way; 0 when a connection is made: there is no queue

	mu     sync.Mutex    // guards closed
	closed chan struct{} // nil while nobody listens
}

func newMemNet() *memNet { return &memNet{accept: make(chan net.Conn)} }

type memListener struct {
	*memNet
	closed chan struct{}
	once   *sync.Once
}

func (n *memNet) listen(string, string) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = make(chan struct{})
	return memListener{n, n.closed, new(sync.Once)}, nil
}

func (l memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l memListener) Addr() net.Addr { return conn.Addr("cloud:9000") }

func (l memListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (n *memNet) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	nth := n.dials.Add(1)
	n.mu.Lock()
	closed := n.closed
	n.mu.Unlock()
	ours, near := net.Pipe()
	theirs, far := net.Pipe()
	if from := n.from.Load(); from != nil {
		theirs = sourcedConn{theirs, from}
	} else if n.spread.Load() {
		theirs = sourcedConn{theirs, &net.TCPAddr{IP: net.IPv4(10, 0, byte(nth>>8), byte(nth)), Port: 1}}
	}
	select {
	case n.accept <- theirs:
		if n.queue.Load() > 0 {
			go n.hold(near, far)
		} else {
			go n.relay(near, far)
		}
		go n.relay(far, near)
		return ours, nil
	case <-closed:
		return nil, &net.OpError{Op: "dial", Net: "mem", Err: syscall.ECONNREFUSED}
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// sourcedConn has a remote address.
type sourcedConn struct {
	net.Conn
	remote net.Addr
}

func (c sourcedConn) RemoteAddr() net.Addr { return c.remote }

// relay carries bytes in one direction until either end closes. Of a dead cable
// neither end hears that.
func (n *memNet) relay(dst, src net.Conn) {
	defer func() {
		src.Close()
		if !n.dead.Load() {
			dst.Close()
		}
	}()
	io.Copy(writerFunc(func(p []byte) (int, error) {
		if n.dead.Load() {
			return len(p), nil
		}
		time.Sleep(time.Duration(n.delay.Load()))
		return dst.Write(p)
	}), src)
}

// hold passes on what has waited for as long as queue says.
func (n *memNet) hold(dst, src net.Conn) {
	type packet struct {
		due time.Time
		p   []byte
	}
	packets, ended := make(chan packet, 1000), make(chan struct{})
	go func() {
		defer src.Close()
		defer dst.Close()
		for {
			select {
			case p := <-packets:
				select {
				case <-time.After(time.Until(p.due)):
				case <-ended:
					return
				}
				if _, err := dst.Write(p.p); err != nil {
					return
				}
			case <-ended:
				return
			}
		}
	}()
	defer close(ended)
	for {
		p := make([]byte, 32<<10)
		m, err := src.Read(p)
		if err != nil {
			return
		}
		packets <- packet{time.Now().Add(time.Duration(n.queue.Load())), p[:m]}
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
