package interop

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// A dialer opens a conn to a target through a proxy.
type dialer func(ctx context.Context, addr string) (net.Conn, error)

// A probe is a fault that Konnectivity has been seen to have. It returns nil where that is absent.
type probe struct {
	name    string
	connect bool // the fault is of HTTP CONNECT
	grpc    bool // the fault is of gRPC
	run     func(dial dialer) error
}

var probes = []probe{
	{"a stalled reader stops its neighbours", true, true, stalledReader},
	{"bytes before a close are lost", true, true, bytesBeforeClose},
	{"a half-close is a close", true, false, halfClose},
	{"closing a download freezes others", false, true, closedDownload},
	{"a close does not reach the target", true, false, closeArrives},
	{"one write of more than 4 MiB kills the conn", false, true, bigWrite},
}

// patience is how long something may take that should be there at once, on a busy machine.
const patience = 10 * time.Second

// serve answers every connection with f until the probe is over.
func serve(f func(c *net.TCPConn)) (addr string, stop func(), err error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	var mu sync.Mutex
	open := make(map[net.Conn]bool)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open[c] = true
			mu.Unlock()
			all.Go(func() {
				defer c.Close()
				f(c.(*net.TCPConn))
			})
		}
	})
	return ln.Addr().String(), func() {
		ln.Close()
		mu.Lock()
		for c := range open {
			c.Close()
		}
		mu.Unlock()
		all.Wait()
	}, nil
}

// endless is a target that sends without end.
func endless(c *net.TCPConn) {
	b := make([]byte, 32<<10)
	for {
		if _, err := c.Write(b); err != nil {
			return
		}
	}
}

func echo(c *net.TCPConn) {
	io.Copy(c, c)
	c.CloseWrite()
}

// roundTrip sends a few bytes to an echo and waits for them.
func roundTrip(dial dialer, addr string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := dial(ctx, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	done := make(chan error, 1)
	go func() {
		if _, err := io.WriteString(c, "hello"); err != nil {
			done <- err
			return
		}
		_, err := io.ReadFull(c, make([]byte, 5))
		done <- err
	}()
	select {
	case err = <-done:
	case <-ctx.Done():
		err = errors.New("no answer")
	}
	return err
}

func stalledReader(dial dialer) error {
	flood, stop, err := serve(endless)
	if err != nil {
		return err
	}
	defer stop()
	addr, stopEcho, err := serve(echo)
	if err != nil {
		return err
	}
	defer stopEcho()
	stalled, err := dial(context.Background(), flood)
	if err != nil {
		return err
	}
	defer stalled.Close()
	time.Sleep(2 * time.Second) // until every buffer on the way is full
	for range 20 {
		if err := roundTrip(dial, addr); err != nil {
			return fmt.Errorf("beside a stalled reader: %w", err)
		}
	}
	return nil
}

func bytesBeforeClose(dial dialer) error {
	for _, n := range []int{4 << 10, 4 << 20} {
		for range 5 {
			sent := make([]byte, n)
			rand.Read(sent)
			got := make(chan []byte, 1)
			addr, stop, err := serve(func(c *net.TCPConn) {
				b, _ := io.ReadAll(c)
				got <- b
			})
			if err != nil {
				return err
			}
			c, err := dial(context.Background(), addr)
			if err != nil {
				stop()
				return err
			}
			for part := sent; len(part) > 0 && err == nil; part = part[min(len(part), 32<<10):] {
				_, err = c.Write(part[:min(len(part), 32<<10)])
			}
			c.Close()
			select {
			case b := <-got:
				if !bytes.Equal(b, sent) {
					err = fmt.Errorf("%d of %d bytes arrived", len(b), n)
				}
			case <-time.After(patience):
				err = fmt.Errorf("the target still waits for %d bytes", n)
			}
			stop()
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func halfClose(dial dialer) error {
	addr, stop, err := serve(func(c *net.TCPConn) {
		b, _ := io.ReadAll(c)
		c.Write(b)
	})
	if err != nil {
		return err
	}
	defer stop()
	c, err := dial(context.Background(), addr)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	if _, err = io.WriteString(c, "a question"); err != nil {
		return err
	}
	if err = c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		return err
	}
	if answer, err := io.ReadAll(c); err != nil || string(answer) != "a question" {
		return fmt.Errorf("%q came back: %w", answer, err)
	}
	return nil
}

func closedDownload(dial dialer) error {
	flood, stop, err := serve(endless)
	if err != nil {
		return err
	}
	defer stop()
	addr, stopEcho, err := serve(echo)
	if err != nil {
		return err
	}
	defer stopEcho()
	for range 3 {
		c, err := dial(context.Background(), flood)
		if err != nil {
			return err
		}
		if _, err = io.ReadFull(c, make([]byte, 1<<20)); err != nil {
			return err
		}
		go c.Close()
		start := time.Now()
		if err := roundTrip(dial, addr); err != nil {
			return err
		}
		if d := time.Since(start); d > 2*time.Second {
			return fmt.Errorf("another conn waited for %v", d)
		}
	}
	return nil
}

func closeArrives(dial dialer) error {
	ended := make(chan struct{})
	addr, stop, err := serve(func(c *net.TCPConn) {
		io.Copy(io.Discard, c)
		close(ended)
	})
	if err != nil {
		return err
	}
	defer stop()
	c, err := dial(context.Background(), addr)
	if err != nil {
		return err
	}
	c.Close()
	select {
	case <-ended:
		return nil
	case <-time.After(patience):
		return errors.New("the target has not heard of it")
	}
}

func bigWrite(dial dialer) error {
	const n = 5 << 20
	got := make(chan int, 1)
	addr, stop, err := serve(func(c *net.TCPConn) {
		all, _ := io.Copy(io.Discard, io.LimitReader(c, n))
		got <- int(all)
	})
	if err != nil {
		return err
	}
	defer stop()
	c, err := dial(context.Background(), addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err = c.Write(make([]byte, n)); err != nil {
		return err
	}
	select {
	case all := <-got:
		if all != n {
			return fmt.Errorf("%d of %d bytes arrived", all, n)
		}
	case <-time.After(patience):
		return errors.New("the bytes have not arrived")
	}
	return nil
}

// connector dials by HTTP CONNECT at a unix socket.
func connector(socket string) dialer {
	return func(ctx context.Context, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "unix", socket)
		if err != nil {
			return nil, err
		}
		defer context.AfterFunc(ctx, func() { c.Close() })()
		fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", addr)
		// Byte by byte, so that nothing of what follows is read.
		var head []byte
		for b := make([]byte, 1); !bytes.HasSuffix(head, []byte("\r\n\r\n")); head = append(head, b[0]) {
			if _, err := c.Read(b); err != nil {
				c.Close()
				return nil, fmt.Errorf("%q: %w", head, err)
			}
		}
		if !bytes.HasPrefix(head, []byte("HTTP/1.1 200 ")) {
			why, _ := io.ReadAll(c)
			c.Close()
			return nil, fmt.Errorf("%q", append(head, why...))
		}
		return c, nil
	}
}

// Ours has none of the faults.
func TestProbes(t *testing.T) {
	o := start(t)
	dialers := o.dialers(t)
	for _, p := range probes {
		if p.grpc {
			for name, dial := range dialers {
				t.Run(p.name+"/"+name, func(t *testing.T) {
					if err := p.run(dial); err != nil {
						t.Error(err)
					}
				})
			}
		}
		if p.connect {
			t.Run(p.name+"/connect", func(t *testing.T) {
				if err := p.run(connector(o.connect)); err != nil {
					t.Error(err)
				}
			})
		}
	}
}
