package interop

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tunnel/test/rig"
)

// A dialer opens a conn to a target through a proxy.
type dialer func(ctx context.Context, addr string) (net.Conn, error)

// A probe is a fault that Konnectivity has been seen to have. It returns nil where that is absent.
type probe struct {
	name string
	ways []string                               // the ways to dial in which it is one; nil: all of them
	run  func(dial dialer, second func()) error // second has another session of the node take over
}

var probes = []probe{
	{"a stalled reader stops its neighbours", nil, stalledReader},
	{"bytes before a close are lost", nil, bytesBeforeClose},
	{"a half-close is a close", []string{"connect"}, halfClose},
	{"closing a download freezes others", nil, closedDownload},
	{"a close does not reach the other end", nil, closeArrives},
	{"one write of more than 4 MiB kills the conn", nil, bigWrite},
	{"answers of two sessions of one node cross", nil, crossed},
}

// patience is how long something may take that should be there at once, on a busy machine.
const patience = 10 * time.Second

// serve answers every connection with f until the probe is over.
func serve(f func(c *net.TCPConn)) (addr string, stop func(), err error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	return ln.Addr().String(), accept(ln, func(c net.Conn) { f(c.(*net.TCPConn)) }), nil
}

// accept gives every connection to f until stop.
func accept(ln net.Listener, f func(c net.Conn)) (stop func()) {
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
				f(c)
			})
		}
	})
	return func() {
		ln.Close()
		mu.Lock()
		for c := range open {
			c.Close()
		}
		mu.Unlock()
		all.Wait()
	}
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

func stalledReader(dial dialer, _ func()) error {
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

func bytesBeforeClose(dial dialer, _ func()) error {
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

func halfClose(dial dialer, _ func()) error {
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

func closedDownload(dial dialer, _ func()) error {
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

func closeArrives(dial dialer, _ func()) error {
	for name, target := range map[string]func(c *net.TCPConn){
		"silent": func(c *net.TCPConn) { io.Copy(io.Discard, c) },
		"sends":  endless,
	} {
		ended := make(chan struct{})
		addr, stop, err := serve(func(c *net.TCPConn) {
			target(c)
			close(ended)
		})
		if err != nil {
			return err
		}
		c, err := dial(context.Background(), addr)
		if err == nil {
			if name == "sends" {
				_, err = io.ReadFull(c, make([]byte, 1000))
			}
			c.Close()
		}
		if err == nil {
			select {
			case <-ended:
			case <-time.After(patience):
				err = fmt.Errorf("the caller has closed, and a target that %s has not heard of it", name)
			}
		}
		stop()
		if err != nil {
			return err
		}
	}
	// And the other way.
	addr, stop, err := serve(func(c *net.TCPConn) { io.ReadFull(c, make([]byte, 1)) })
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
	if _, err = c.Write([]byte{1}); err != nil {
		return err
	}
	if _, err = c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		return fmt.Errorf("the target has closed, and the caller reads: %w", err)
	}
	return nil
}

func bigWrite(dial dialer, _ func()) error {
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

// crossed has a conn of one session of a node, and one of the session that has taken over. Each
// has bytes of its own.
func crossed(dial dialer, second func()) error {
	addr, stop, err := serve(echo)
	if err != nil {
		return err
	}
	defer stop()
	first, err := soon(dial, addr)
	if err != nil {
		return err
	}
	defer first.Close()
	if answer, err := say(first, "first, before"); err != nil || answer != "first, before" {
		return fmt.Errorf("%q, %w", answer, err)
	}
	second()
	later, err := soon(dial, addr)
	if err != nil {
		return err
	}
	defer later.Close()
	if answer, err := say(later, "later"); err != nil || answer != "later" {
		return fmt.Errorf("the conn of the new session hears %q, %w", answer, err)
	}
	// The old session may have ended, and its conn with it. What it hears must be its own.
	if answer, err := say(first, "first, after"); err == nil && answer != "first, after" {
		return fmt.Errorf("the conn of the old session hears %q", answer)
	} else if errors.Is(err, errSilent) {
		return errors.New("the conn of the old session hears nothing")
	}
	return nil
}

// soon dials until it succeeds: while a node has no session it does not.
func soon(dial dialer, addr string) (net.Conn, error) {
	for late := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		c, err := dial(context.Background(), addr)
		if err == nil || time.Now().After(late) {
			return c, err
		}
	}
}

var errSilent = errors.New("no answer")

// say sends words to an echo and returns what comes back.
func say(c net.Conn, words string) (string, error) { return sayAndHear(c, words, len(words)) }

// sayAndHear sends words and returns n bytes of the answer.
func sayAndHear(c net.Conn, words string, n int) (string, error) {
	if _, err := io.WriteString(c, words); err != nil {
		return "", err
	}
	type heard struct {
		words string
		err   error
	}
	done := make(chan heard, 1)
	go func() {
		b := make([]byte, n)
		_, err := io.ReadFull(c, b)
		done <- heard{string(b), err}
	}()
	select {
	case h := <-done:
		return h.words, h.err
	case <-time.After(patience):
		return "", errSilent
	}
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

// Ours has none of the faults, whatever the way to dial.
func TestProbes(t *testing.T) {
	for _, way := range []string{"single use", "reusable", "connect"} {
		t.Run(way, func(t *testing.T) {
			o := start(t)
			dial := connector(o.connect)
			if way != "connect" {
				dial = o.dialers(t)[way]
			}
			for _, p := range probes { // the last one leaves two edges that take turns
				if p.ways != nil && !slices.Contains(p.ways, way) {
					continue
				}
				t.Run(p.name, func(t *testing.T) {
					if err := p.run(dial, func() { o.startTwin(t) }); err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
}

// startTwin starts another edge of the same node, with which the first will take turns.
func (o *ours) startTwin(t *testing.T) {
	t.Helper()
	b, err := os.ReadFile(o.pair.Path("edge.toml"))
	if err != nil {
		t.Fatal(err)
	}
	twin := o.pair.Path("twin.toml")
	b = regexp.MustCompile(`logport = \d+`).ReplaceAll(b, fmt.Appendf(nil, "logport = %d", port(t)))
	if err := os.WriteFile(twin, b, 0o600); err != nil {
		t.Fatal(err)
	}
	log := new(rig.Log)
	p, err := rig.Start(log, o.pair.Path("tunnel"), "edge", "-c", twin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	until(t, "it has joined", log.String, func() bool { return strings.Contains(log.String(), "session started") })
}
