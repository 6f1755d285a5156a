package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// patience bounds everything that a client waits for.
const patience = 30 * time.Second

// call connects and gives the target an order.
func call(addr string, o order) (net.Conn, error) {
	return callWith(new(net.Dialer), addr, o)
}

func callWith(d *net.Dialer, addr string, o order) (net.Conn, error) {
	c, err := d.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return nil, err
	}
	if err := binary.Write(c, binary.BigEndian, o); err != nil {
		c.Close()
		return nil, fmt.Errorf("asking the target at %s: %w", addr, err)
	}
	return c, nil
}

const (
	warmUp    = 200 * time.Millisecond // connecting, and TCP finding its pace
	bulkChunk = 64 << 10
)

// throughput downloads on so many conns at once and returns bytes a second.
func throughput(addr string, conns int, d time.Duration) (float64, error) {
	var bytes atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, conns) // one send each
	stop := time.Now().Add(warmUp + d)
	for range conns {
		c, err := call(addr, order{Kind: orderFlood, Chunk: bulkChunk})
		if err != nil {
			return 0, err
		}
		defer c.Close()
		wg.Go(func() {
			buf := make([]byte, 256<<10)
			for time.Now().Before(stop) {
				n, err := c.Read(buf)
				bytes.Add(int64(n))
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	time.Sleep(warmUp)
	from, started := bytes.Load(), time.Now()
	wg.Wait()
	took := time.Since(started)
	select {
	case err := <-errs:
		return 0, err
	default:
		return float64(bytes.Load()-from) / took.Seconds(), nil
	}
}

// roundTrip returns the median time that 64 bytes take there and back, in seconds.
func roundTrip(addr string, d time.Duration) (float64, error) {
	c, err := call(addr, order{Kind: orderEcho})
	if err != nil {
		return 0, err
	}
	defer c.Close()
	var times []float64
	buf := make([]byte, 64)
	for stop := time.Now().Add(d); time.Now().Before(stop); {
		at := time.Now()
		if _, err := c.Write(buf); err != nil {
			return 0, err
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			return 0, err
		}
		times = append(times, time.Since(at).Seconds())
	}
	return median(times), nil
}

// newConns connects, exchanges a byte and closes, eight at a time, and returns how
// often a second.
func newConns(addr string, d time.Duration) (float64, error) {
	const workers = 8
	var count atomic.Int64
	errs := make(chan error, workers) // one send each
	started := time.Now()
	stop := started.Add(d)
	for range workers {
		go func() {
			errs <- func() error {
				for time.Now().Before(stop) {
					c, err := call(addr, order{Kind: orderEcho})
					if err != nil {
						return err
					}
					b := make([]byte, 1)
					_, err = c.Write(b)
					if err == nil {
						_, err = io.ReadFull(c, b)
					}
					c.Close()
					if err != nil {
						return err
					}
					count.Add(1)
				}
				return nil
			}()
		}()
	}
	for range workers {
		if err := <-errs; err != nil {
			return 0, err
		}
	}
	return float64(count.Load()) / time.Since(started).Seconds(), nil
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
		c, err := callWith(d, addr, o)
		if err != nil {
			closeAll()
			return nil, err
		}
		open = append(open, c)
	}
	return closeAll, nil
}
