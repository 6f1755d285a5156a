package main

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel.example/tunnel/test/rig"
)

const (
	// patience bounds everything that is waited for, and the life of a client's conn.
	patience   = 10 * time.Second
	warmUp     = 150 * time.Millisecond // TCP finds its pace
	bulkChunk  = 64 << 10
	bulkBuffer = 256 << 10
)

// call connects and gives the target an order.
func (l *line) call(o order) (net.Conn, error) { return callWith(l.dial, o) }

func callWith(dial func() (net.Conn, error), o order) (net.Conn, error) {
	c, err := dial()
	if err != nil {
		return nil, err
	}
	if err = o.give(c); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// give gives the target an order, and the conn its last moment.
func (o order) give(c net.Conn) error {
	err := c.SetDeadline(time.Now().Add(patience))
	if err == nil {
		err = binary.Write(c, binary.BigEndian, o)
	}
	if err != nil {
		return fmt.Errorf("asking the target: %w", err)
	}
	return nil
}

// taken asks the target itself what it has taken.
func (l *line) taken() (taken, error) { return l.tell(orderTell) }

// rest has the target write nothing more to readers that stall. Other conns, and later ones, are as before.
func (l *line) rest() error {
	_, err := l.tell(orderRest)
	return err
}

// tell gives the target an order that it answers with what it has taken.
func (l *line) tell(kind byte) (t taken, err error) {
	c, err := callWith(through(l.at.edge.Network, l.target), order{Kind: kind})
	if err != nil {
		return t, err
	}
	defer c.Close()
	return t, binary.Read(c, binary.BigEndian, &t)
}

// settle waits until the target has no conn any more.
func (l *line) settle() error {
	for late := time.Now().Add(patience / 5); ; time.Sleep(5 * time.Millisecond) {
		t, err := l.taken()
		switch {
		case err != nil:
			return err
		case t.Open == 0:
			return nil
		case time.Now().After(late):
			return fmt.Errorf("%d conns of clients that have gone do not end", t.Open)
		}
	}
}

// stream is some conns that move bytes until they are stopped.
type stream struct {
	line    *line
	conns   []net.Conn
	moving  sync.WaitGroup
	came    atomic.Int64 // bytes
	stopped atomic.Bool

	mu  sync.Mutex // guards the following
	err error      // the first of a conn that has ended by itself
}

// start opens conns, and then gives the order to all: a new one beside those that move
// bytes is another measurement.
func (l *line) start(conns int, o order) (*stream, error) {
	s := &stream{line: l}
	for range conns {
		c, err := l.dial()
		if err != nil {
			s.stop() //nolint:errcheck // the caller gets the first error
			return nil, err
		}
		s.conns = append(s.conns, c)
	}
	for _, c := range s.conns {
		if err := o.give(c); err != nil {
			s.stop() //nolint:errcheck // the caller gets the first error
			return nil, err
		}
		if o.Kind != orderSink {
			s.moving.Go(func() { s.move(func() error { return s.read(c) }) })
		}
		if o.Kind != orderFlood && o.Kind != orderCubic {
			s.moving.Go(func() { s.move(func() error { return s.write(c) }) })
		}
	}
	return s, nil
}

func (s *stream) move(once func() error) {
	if err := once(); !s.stopped.Load() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.err = errors.Join(s.err, err)
	}
}

func (s *stream) read(c net.Conn) error {
	buf := make([]byte, bulkBuffer)
	for {
		n, err := c.Read(buf)
		s.came.Add(int64(n))
		if err != nil {
			return err
		}
	}
}

func (s *stream) write(c net.Conn) error {
	chunk := make([]byte, bulkChunk)
	for {
		if _, err := c.Write(chunk); err != nil {
			return err
		}
	}
}

// stop closes the conns, and returns the error of those that had ended before.
func (s *stream) stop() error {
	s.stopped.Store(true)
	for _, c := range s.conns {
		c.Close()
	}
	s.moving.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// moved is the bytes that have arrived, here and at the target.
func (s *stream) moved() (int64, error) {
	t, err := s.line.taken()
	return t.Bytes + s.came.Load(), err
}

// watch returns what moved returns after so long, and later if nothing has moved until then.
func (s *stream) watch(d time.Duration, from int64) (to int64, err error) {
	for late := time.Now().Add(patience / 2); ; {
		time.Sleep(d)
		if to, err = s.moved(); err != nil || to > from {
			return to, err
		}
		if time.Now().After(late) {
			return to, errors.New("nothing moves")
		}
	}
}

// throughput moves bytes on so many conns at once, and returns bytes a second and the
// processor seconds of both ends for a GiB.
func throughput(l *line, conns int, kind byte, d time.Duration) ([]float64, error) {
	s, err := l.start(conns, order{Kind: kind, Chunk: bulkChunk})
	if err != nil {
		return nil, err
	}
	time.Sleep(warmUp)
	started := time.Now()
	from, err1 := s.moved()
	used, err2 := l.cpu()
	to, err3 := s.watch(d, from)
	took := time.Since(started)
	usedThen, err4 := l.cpu()
	if err = errors.Join(err1, err2, err3, err4, s.stop()); err != nil {
		return nil, err
	}
	n := float64(to - from)
	return []float64{n / took.Seconds(), (usedThen - used).Seconds() / n * (1 << 30)}, nil
}

// roundTrips returns how long 64 bytes take there and back: p50, p99 and p99.9, in seconds.
func roundTrips(l *line, d time.Duration) ([]float64, error) {
	times, err := l.roundTrips(d)
	if err != nil {
		return nil, err
	}
	return percentiles(times, 500, 990, 999), nil
}

// roundTrips sends 64 bytes there and back on one conn, and returns how long each took.
func (l *line) roundTrips(d time.Duration) (times []float64, err error) {
	c, err := l.call(order{Kind: orderEcho})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err = c.SetDeadline(time.Now().Add(d + patience)); err != nil {
		return nil, err
	}
	buf := make([]byte, 64)
	for stop := time.Now().Add(d); time.Now().Before(stop); {
		at := time.Now()
		if _, err := c.Write(buf); err != nil {
			return nil, err
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			return nil, err
		}
		times = append(times, time.Since(at).Seconds())
	}
	return times, nil
}

// roundTripsBeside is roundTrips while another conn downloads.
func roundTripsBeside(l *line, d time.Duration) ([]float64, error) {
	s, err := l.start(1, order{Kind: orderFlood, Chunk: bulkChunk})
	if err != nil {
		return nil, err
	}
	time.Sleep(warmUp)
	times, err := roundTrips(l, d)
	return times, errors.Join(err, s.stop())
}

// percentiles returns those parts of a thousand of the values.
func percentiles(values []float64, of ...int) (at []float64) {
	slices.Sort(values)
	for _, p := range of {
		at = append(at, values[len(values)*p/1000])
	}
	return at
}

// newConns connects, exchanges a byte and closes, eight at a time, and returns how
// often a second, and the processor seconds of both ends for each.
func newConns(l *line, d time.Duration) ([]float64, error) {
	used, err1 := l.cpu()
	started := time.Now()
	rate, err2 := atOnce(d, func() error { return l.echo() })
	took := time.Since(started)
	usedThen, err3 := l.cpu()
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, err
	}
	return append(rate, (usedThen-used).Seconds()/(rate[0]*took.Seconds())), nil
}

// atOnce repeats f in eight goroutines, and returns how often a second.
func atOnce(d time.Duration, f func() error) ([]float64, error) {
	const workers = 8
	var count atomic.Int64
	errs := make([]error, workers)
	started := time.Now()
	var all sync.WaitGroup
	for i := range workers {
		all.Go(func() {
			for time.Since(started) < d && errs[i] == nil {
				if errs[i] = f(); errs[i] == nil {
					count.Add(1)
				}
			}
		})
	}
	all.Wait()
	return []float64{float64(count.Load()) / time.Since(started).Seconds()}, errors.Join(errs...)
}

// firstByte returns how long it takes to connect, send a byte and have it back, one conn
// after the other: p50 and p99, in seconds.
func firstByte(l *line, d time.Duration) ([]float64, error) {
	var times []float64
	for stop := time.Now().Add(d); time.Now().Before(stop); {
		at := time.Now()
		c, err := l.call(order{Kind: orderEcho})
		if err != nil {
			return nil, err
		}
		err = oneByte(c)
		times = append(times, time.Since(at).Seconds())
		c.Close()
		if err != nil {
			return nil, err
		}
	}
	return percentiles(times, 500, 990), nil
}

// smallRate is how many small writes a second are many.
const smallRate = 1000

// smallWrites has the target write as `kubectl logs -f` does, on so many conns at such a rate
// each, and returns what passes between the ends for each byte of that.
func smallWrites(l *line, conns int, rate int64, d time.Duration) ([]float64, error) {
	s, err := l.start(conns, order{Kind: orderFlood, Chunk: 128, Pace: rate})
	if err != nil {
		return nil, err
	}
	time.Sleep(warmUp)
	from, err1 := s.moved()
	sent, err2 := l.wire()
	to, err3 := s.watch(d, from)
	sentThen, err4 := l.wire() // to ask takes as long as it did at the start
	if err = errors.Join(err1, err2, err3, err4, s.stop()); err != nil {
		return nil, err
	}
	return []float64{float64(sentThen-sent) / float64(to-from)}, nil
}

// weigh returns what the ends weigh with nothing to do, cloud and edge, and what each of so
// many idle conns adds to either, in bytes.
func weigh(l *line, conns int) ([]float64, error) {
	before, err := l.memory()
	if err != nil {
		return nil, err
	}
	var open []net.Conn
	defer func() {
		for _, c := range open {
			c.Close()
		}
	}()
	for range conns {
		var c net.Conn
		if c, err = l.call(order{Kind: orderEcho}); err != nil {
			return nil, err
		}
		open = append(open, c)
		if err = oneByte(c); err != nil {
			return nil, err
		}
	}
	after, err := l.memory()
	each := func(i int) float64 { return (after[i] - before[i]) / float64(conns) }
	return []float64{before[0], before[1], each(0), each(1)}, err
}

// httpsDoor is where HTTPS goes in.
type httpsDoor struct {
	dial       func() (net.Conn, error)
	serverName string // SNI; "": none is sent
	client     bool   // whether a certificate is shown
}

// requests asks for 128 bytes over HTTPS, on eight connections that stay, and returns how
// often a second.
func (b *bench) requests(door httpsDoor, d time.Duration) ([]float64, error) {
	cfg := anyServer()
	cfg.ServerName = door.serverName
	if door.client {
		cert, err := tls.LoadX509KeyPair(b.file("client.crt"), b.file("client.key"))
		if err != nil {
			return nil, err
		}
		cfg.Certificates = []tls.Certificate{cert}
	}
	transport := &http.Transport{
		DialTLS: func(string, string) (net.Conn, error) { //nolint:staticcheck // it has a deadline of its own
			c, err := door.dial()
			if err != nil {
				return nil, err
			}
			return tls.Client(c, cfg), c.SetDeadline(time.Now().Add(patience))
		},
		MaxIdleConnsPerHost: 8,
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: patience}
	return atOnce(d, func() error {
		resp, err := client.Get("https://" + rig.Node + "/")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		n, err := io.Copy(io.Discard, resp.Body)
		if err == nil && (resp.StatusCode != http.StatusOK || n != 128) {
			err = fmt.Errorf("HTTP %d and %d bytes", resp.StatusCode, n)
		}
		return err
	})
}

// stall has a target send on so many conns, and reads none of them.
func stall(addr string, conns int, o order) (closeAll func(), err error) {
	// What the kernels hold between cloud and client must be little beside a window, so
	// that the window fills up: a small receive buffer here, and small segments, by
	// which the other kernel chooses the size of its send buffer.
	d := &net.Dialer{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		cerr := raw.Control(func(fd uintptr) {
			if err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4<<10); err == nil {
				err = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_MAXSEG, 536)
			}
		})
		if err == nil {
			err = cerr
		}
		return err
	}}
	var open []net.Conn
	closeAll = func() {
		for _, c := range open {
			c.Close()
		}
	}
	for range conns {
		c, err := callWith(func() (net.Conn, error) { return d.Dial("tcp", addr) }, o)
		if err != nil {
			closeAll()
			return nil, err
		}
		open = append(open, c)
	}
	return closeAll, nil
}
