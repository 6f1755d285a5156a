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
	"sync/atomic"
	"time"
)

// A probe provokes a fault that Konnectivity has been seen to have. It returns nil where that is
// absent, a fault where it is there, and another error where it could not look.
type probe struct {
	name string
	run  func(s *stack) error

	single, reusable, connect verdict // on Konnectivity 0.36, by the way to dial
}

type verdict string

const (
	fails  verdict = "fails"
	passes verdict = "passes"
	// rarely: the fault needs a race that Konnectivity loses now and then, so both results are right.
	rarely verdict = "rarely fails"
	cannot verdict = "" // what is asked for cannot be said in that way
)

var probes = []probe{
	{"a stalled reader stops its neighbours", stalledReader, fails, fails, fails},
	{"bytes before a close are lost", bytesBeforeClose, fails, fails, fails},
	{"a half-close is a close", halfClose, cannot, cannot, fails},
	{"closing a download freezes others", closedDownload, fails, fails, passes},
	{"a close does not reach the other end", closeArrives, passes, passes, passes}, // 0.36 has mended it
	{"the close of a stalled reader does not reach the target", closeOfStalled, fails, fails, passes},
	{"a caller that goes leaves a conn behind", goneCaller, rarely, rarely, fails},
	{"what a target says first is lost", firstBytes, fails, fails, fails},
	{"one write of more than 4 MiB kills the conn", bigWrite, fails, fails, passes},
	// the last: it leaves two edges that take turns
	{"answers of two sessions of one node cross", crossed, fails, fails, fails},
}

// wayNames are the names of the ways to dial.
var wayNames = []string{"single use", "reusable", "CONNECT"}

// by returns the verdict on one of them.
func (p probe) by(way string) verdict {
	return map[string]verdict{"single use": p.single, "reusable": p.reusable, "CONNECT": p.connect}[way]
}

// A fault is what a probe looks for.
type fault struct{ error }

// A dialer opens a conn to a target through a proxy.
type dialer func(ctx context.Context, addr string) (net.Conn, error)

// A stack is what a probe looks at: a proxy and its agent, ours or Konnectivity's.
type stack struct {
	dial    dialer
	echo    string // a target that says what it hears
	second  func() // has another session of the node take over
	control *stack // the same programs once more, which no probe touches
}

// patience is how long something may take that should be there at once, on a busy machine.
const patience = 10 * time.Second

// await returns what comes. What should be there at once, and is not after two seconds and
// twenty answers of the control, does not come: a fault. A slow machine is slow for both.
func await[T any](s *stack, missing string, ch <-chan T) (v T, err error) {
	select {
	case v = <-ch:
		return v, nil
	case <-time.After(2 * time.Second):
	}
	for range 20 {
		if err := roundTrip(s.control.dial, s.control.echo); err != nil {
			return v, fmt.Errorf("%s; and the control: %w", missing, err)
		}
	}
	select {
	case v = <-ch:
		return v, nil
	default:
		return v, fault{errors.New(missing)}
	}
}

// async returns what f will return.
func async[T any](f func() T) <-chan T {
	ch := make(chan T, 1)
	go func() { ch <- f() }()
	return ch
}

// open dials. It is an error, not a fault, if that fails.
func (s *stack) open(addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return s.dial(ctx, addr)
}

// download dials a target and asks.
func (s *stack) download(addr string) (net.Conn, error) {
	c, err := s.open(addr)
	if err != nil {
		return nil, err
	}
	if _, err = c.Write([]byte{1}); err != nil {
		hangUp(c)
		return nil, err
	}
	return c, nil
}

// hangUp closes without waiting: the stock client asks its server first, for up to 10 s.
func hangUp(c net.Conn) { go c.Close() }

// neighbour has another conn go there and back.
func (s *stack) neighbour() error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	err, late := await(s, "another conn gets no answer", async(func() error { return trip(ctx, s.dial, s.echo) }))
	switch {
	case late != nil:
		return late
	case err != nil:
		return fault{fmt.Errorf("another conn: %w", err)}
	}
	return nil
}

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

func echo(c *net.TCPConn) {
	io.Copy(c, c)
	c.CloseWrite()
}

// trip sends a few bytes to an echo and waits for them.
func trip(ctx context.Context, dial dialer, addr string) error {
	c, err := dial(ctx, addr)
	if err != nil {
		return err
	}
	defer hangUp(c)
	done := async(func() error {
		if _, err := io.WriteString(c, "hello"); err != nil {
			return err
		}
		_, err := io.ReadFull(c, make([]byte, 5))
		return err
	})
	select {
	case err = <-done:
	case <-ctx.Done():
		err = errors.New("no answer")
	}
	return err
}

// roundTrip is a trip that takes no longer than our patience.
func roundTrip(dial dialer, addr string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return trip(ctx, dial, addr)
}

// endless is a target that is asked and then sends without end.
func endless(c *net.TCPConn) { pour(c, new(atomic.Int64)) }

// pour is endless and counts what it has got rid of.
func pour(c *net.TCPConn, sent *atomic.Int64) {
	b := make([]byte, 32<<10)
	if _, err := c.Read(b); err != nil {
		return
	}
	for {
		n, err := c.Write(b)
		if err != nil {
			return
		}
		sent.Add(int64(n))
	}
}

// stall has a caller ask an endless target, and read nothing: when it returns, every buffer on
// the way is full. ended is closed when the target has heard of the end.
func (s *stack) stall() (c net.Conn, ended <-chan struct{}, stop func(), err error) {
	var sent atomic.Int64
	end := make(chan struct{})
	flood, stop, err := serve(func(c *net.TCPConn) {
		defer close(end)
		pour(c, &sent)
	})
	if err != nil {
		return nil, nil, nil, err
	}
	if c, err = s.download(flood); err != nil {
		stop()
		return nil, nil, nil, err
	}
	// Four equal looks: at one of them, a process on the way may wait for a processor.
	for before, equal := int64(0), 0; equal < 4; time.Sleep(500 * time.Millisecond) {
		now := sent.Load()
		if equal++; now == 0 || now != before {
			equal = 0
		}
		before = now
	}
	return c, end, stop, nil
}

func stalledReader(s *stack) error {
	c, _, stop, err := s.stall()
	if err != nil {
		return err
	}
	defer stop()
	defer hangUp(c)
	for range 20 {
		if err := s.neighbour(); err != nil {
			return err
		}
	}
	return nil
}

func bytesBeforeClose(s *stack) error {
	for _, n := range []int{4 << 10, 4 << 20} {
		for range 5 {
			if err := sendAndClose(s, n); err != nil {
				return err
			}
		}
	}
	return nil
}

func sendAndClose(s *stack, n int) error {
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
	defer stop()
	c, err := s.open(addr)
	if err != nil {
		return err
	}
	for part := sent; len(part) > 0 && err == nil; part = part[min(len(part), 32<<10):] {
		_, err = c.Write(part[:min(len(part), 32<<10)])
	}
	hangUp(c)
	if err != nil {
		return err
	}
	b, err := await(s, fmt.Sprintf("the target still waits for %d bytes", n), got)
	if err == nil && !bytes.Equal(b, sent) {
		err = fault{fmt.Errorf("%d of %d bytes arrived", len(b), n)}
	}
	return err
}

func halfClose(s *stack) error {
	addr, stop, err := serve(func(c *net.TCPConn) {
		b, _ := io.ReadAll(c)
		c.Write(b)
	})
	if err != nil {
		return err
	}
	defer stop()
	c, err := s.open(addr)
	if err != nil {
		return err
	}
	defer hangUp(c)
	if _, err = io.WriteString(c, "a question"); err != nil {
		return err
	}
	if err = c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		return err
	}
	answer, err := await(s, "no answer to what was said before a half-close", async(func() string {
		b, _ := io.ReadAll(c)
		return string(b)
	}))
	if err == nil && answer != "a question" {
		err = fault{fmt.Errorf("%q came back", answer)}
	}
	return err
}

func closedDownload(s *stack) error {
	flood, stop, err := serve(endless)
	if err != nil {
		return err
	}
	defer stop()
	for range 30 { // it takes bytes that are under way: one close in ten has none
		c, err := s.download(flood)
		if err != nil {
			return err
		}
		if _, err = io.ReadFull(c, make([]byte, 1<<20)); err != nil {
			return err
		}
		hangUp(c)
		if err := s.neighbour(); err != nil {
			return err
		}
	}
	return nil
}

func closeArrives(s *stack) error {
	ended := make(chan struct{})
	addr, stop, err := serve(func(c *net.TCPConn) {
		io.Copy(io.Discard, c)
		close(ended)
	})
	if err != nil {
		return err
	}
	defer stop()
	c, err := s.open(addr)
	if err != nil {
		return err
	}
	hangUp(c)
	if _, err = await(s, "the caller has closed, and the target has not heard of it", ended); err != nil {
		return err
	}

	// And the other way.
	addr, stopClosing, err := serve(func(c *net.TCPConn) { io.ReadFull(c, make([]byte, 1)) })
	if err != nil {
		return err
	}
	defer stopClosing()
	if c, err = s.download(addr); err != nil {
		return err
	}
	defer hangUp(c)
	err, late := await(s, "the target has closed, and the caller has not heard of it", async(func() error {
		_, err := c.Read(make([]byte, 1))
		return err
	}))
	if late == nil && !errors.Is(err, io.EOF) {
		late = fault{fmt.Errorf("the target has closed, and the caller reads: %w", err)}
	}
	return late
}

func closeOfStalled(s *stack) error {
	c, ended, stop, err := s.stall()
	if err != nil {
		return err
	}
	defer stop()
	hangUp(c)
	_, err = await(s, "the caller has closed, and the target goes on", ended)
	return err
}

// goneCaller has callers that go before they have been told that they are connected. What is
// dialled for them all the same has to be closed.
func goneCaller(s *stack) error {
	var open atomic.Int64
	addr, stop, err := serve(func(c *net.TCPConn) {
		open.Add(1)
		io.Copy(io.Discard, c)
		open.Add(-1)
	})
	if err != nil {
		return err
	}
	defer stop()
	for i := range 100 { // as early, and as late, as it may happen
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*20*time.Microsecond)
		if c, err := s.dial(ctx, addr); err == nil {
			hangUp(c)
		}
		cancel()
	}
	for range 20 { // until those dials are over, too
		if err := s.neighbour(); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	_, err = await(s, "targets wait for callers that have gone", async(func() bool {
		for open.Load() > 0 && ctx.Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		return true
	}))
	if err != nil {
		return fmt.Errorf("%d %w", open.Load(), err)
	}
	return nil
}

// firstBytes has targets that speak before they are asked, as SSH and SMTP do.
func firstBytes(s *stack) error {
	const banner = "220 how do you do"
	addr, stop, err := serve(func(c *net.TCPConn) {
		io.WriteString(c, banner)
		io.Copy(io.Discard, c)
	})
	if err != nil {
		return err
	}
	defer stop()
	for range 50 {
		c, err := s.open(addr)
		if err != nil {
			return fault{err}
		}
		got, err := await(s, "the target's first bytes have not arrived", async(func() string {
			b := make([]byte, len(banner))
			n, _ := io.ReadFull(c, b)
			return string(b[:n])
		}))
		hangUp(c)
		if err == nil && got != banner {
			err = fault{fmt.Errorf("%q arrived of %q", got, banner)}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func bigWrite(s *stack) error {
	const n = 5 << 20
	got := make(chan int64, 1)
	addr, stop, err := serve(func(c *net.TCPConn) {
		all, _ := io.Copy(io.Discard, io.LimitReader(c, n))
		got <- all
	})
	if err != nil {
		return err
	}
	defer stop()
	c, err := s.open(addr)
	if err != nil {
		return err
	}
	defer hangUp(c)
	if _, err = c.Write(make([]byte, n)); err != nil {
		return err
	}
	all, err := await(s, "the bytes have not arrived", got)
	if err == nil && all != n {
		err = fault{fmt.Errorf("%d of %d bytes arrived", all, n)}
	}
	return err
}

// crossed has conns of one session of a node, and of the session that has taken over. Each says
// its own name, and must hear nothing else.
func crossed(s *stack) error {
	t := &talk{stack: s, heard: make(chan hearing, 100)}
	defer t.end()
	var old []*talker
	for i := range 4 {
		c, err := t.dial(fmt.Sprintf("conn %d of the old session", i))
		if err != nil {
			return err
		}
		old = append(old, c)
	}
	s.second()
	for i, late := 0, time.Now().Add(patience); i < 4; {
		c, err := t.dial(fmt.Sprintf("conn %d of the new session", i))
		switch {
		case errors.As(err, new(fault)):
			return err
		case err == nil && !c.ended:
			i++
		case time.Now().After(late):
			return fmt.Errorf("no conn to the new session: %w", err)
		default: // a node whose sessions change may have none for a moment
			time.Sleep(10 * time.Millisecond)
		}
	}
	// The old session may have ended, and its conns with it.
	for _, c := range old {
		if err := t.say(c); err != nil {
			return err
		}
	}
	return nil
}

// talk is conns to an echo.
type talk struct {
	stack *stack
	all   []*talker
	heard chan hearing // from the readers of all; more room than they will ever need
}

type talker struct {
	net.Conn

	name    string // all have the same length
	answers int    // how often it has heard its name
	ended   bool
}

type hearing struct {
	by    *talker
	words string
	err   error
}

// dial has a new talker say its name for the first time.
func (t *talk) dial(name string) (*talker, error) {
	c, err := t.stack.open(t.stack.echo)
	if err != nil {
		return nil, err
	}
	talker := &talker{Conn: c, name: name}
	t.all = append(t.all, talker)
	go func() {
		for {
			b := make([]byte, len(name))
			_, err := io.ReadFull(c, b)
			t.heard <- hearing{talker, string(b), err}
			if err != nil {
				return
			}
		}
	}()
	return talker, t.say(talker)
}

// say has a talker say its name, and returns when it has heard it or has ended.
func (t *talk) say(c *talker) error {
	before := c.answers
	io.WriteString(c, c.name) // if that fails, so does reading
	for c.answers == before && !c.ended {
		h, err := await(t.stack, c.name+" hears nothing", t.heard)
		switch {
		case err != nil:
			return err
		case h.err != nil:
			h.by.ended = true
		case h.words != h.by.name:
			return fault{fmt.Errorf("%s hears %q", h.by.name, h.words)}
		default:
			h.by.answers++
		}
	}
	return nil
}

func (t *talk) end() {
	for _, c := range t.all {
		hangUp(c)
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
	return connecting(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	})
}

// connecting dials by HTTP CONNECT over a connection to the front door.
func connecting(door func(ctx context.Context) (net.Conn, error)) dialer {
	return func(ctx context.Context, addr string) (net.Conn, error) {
		c, err := door(ctx)
		if err != nil {
			return nil, err
		}
		defer context.AfterFunc(ctx, func() { c.Close() })()
		fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", addr)
		// Byte by byte, so that nothing of what follows is read.
		var head []byte
		for b := make([]byte, 1); !bytes.HasSuffix(head, []byte("\r\n\r\n")) && len(head) < 4<<10; head = append(head, b[0]) {
			if _, err := c.Read(b); err != nil {
				c.Close()
				return nil, fmt.Errorf("%q: %w", head, err)
			}
		}
		if !bytes.HasPrefix(head, []byte("HTTP/1.1 ")) {
			c.Close()
			return nil, fmt.Errorf("no status line: %q", head)
		}
		if !bytes.HasPrefix(head, []byte("HTTP/1.1 200 ")) {
			why, _ := io.ReadAll(c)
			c.Close()
			return nil, fmt.Errorf("%q", append(head, why...))
		}
		return c, nil
	}
}
