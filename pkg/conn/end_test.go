package conn

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// fakeCall is one Connect call in memory, with gRPC's rules where they matter to the
// end of a conn: a few chunks fit into a window; a status comes behind the data; a
// cancel throws data away; SendMsg is freed by nothing but the end of the call.
type fakeCall struct {
	up, down  chan []byte
	cancelled chan struct{} // by the edge
	cancel    func()
	returned  chan struct{} // the cloud's handler; then status is set
	status    error
}

func newFakeCall() *fakeCall {
	f := &fakeCall{
		up: make(chan []byte, 2), down: make(chan []byte, 2),
		cancelled: make(chan struct{}), returned: make(chan struct{}),
	}
	f.cancel = sync.OnceFunc(func() { close(f.cancelled) })
	return f
}

var errCallEnded = errors.New("the call has ended")

// sendInto does what gRPC does with a chunk: it takes the block and gives it back.
func (f *fakeCall) sendInto(window chan []byte, m any, ended error) error {
	buffers, err := NewCodec().Marshal(m)
	if err != nil {
		return err
	}
	wire := buffers.Materialize()
	buffers.Free()
	if tunnel.IsClosed(f.returned) || tunnel.IsClosed(f.cancelled) {
		return ended
	}
	select {
	case window <- wire:
		return nil
	case <-f.returned:
	case <-f.cancelled:
	}
	return ended
}

type fakeCloud struct{ *fakeCall }

func (f fakeCloud) SendMsg(m any) error { return f.sendInto(f.down, m, errCallEnded) }

func (f fakeCloud) RecvMsg(m any) error {
	select {
	case wire := <-f.up:
		return NewCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(wire)}, m)
	case <-f.returned:
	case <-f.cancelled:
	}
	return errCallEnded
}

type fakeEdge struct{ *fakeCall }

func (f fakeEdge) SendMsg(m any) error { return f.sendInto(f.up, m, io.EOF) }

func (f fakeEdge) RecvMsg(m any) error {
	if tunnel.IsClosed(f.cancelled) {
		return errCallEnded
	}
	var wire []byte
	select {
	case wire = <-f.down:
	case <-f.cancelled:
		return errCallEnded
	case <-f.returned:
		select {
		case wire = <-f.down: // the status comes behind it
		default:
			if f.status == nil {
				return io.EOF
			}
			return f.status
		}
	}
	return NewCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(wire)}, m)
}

// fakeConns is a conn, both ends of it, over a fakeCall.
type fakeConns struct {
	call        *fakeCall
	cloud, edge *Conn
	gone        atomic.Int32 // ends whose goroutines have all ended; wants 2
}

// newFakeConns does what the two sessions do around their conns.
func newFakeConns() *fakeConns {
	p := &fakeConns{call: newFakeCall()}
	cfg := Config{
		Blocks: new(Blocks), Counters: new(tunnel.Counters), Log: slog.New(slog.DiscardHandler),
		Gone: func() { p.gone.Add(1) },
	}
	edge, cloud := cfg, cfg
	edge.IsEdge = true
	edge.Ended = func(err error) {
		if err != nil {
			p.call.cancel()
		}
	}
	cloud.Ended = func(err error) {
		if err != nil {
			go p.edge.end(tunnel.ErrReset) // the cancel on the control stream
		}
	}
	p.edge, p.cloud = OverStream(fakeEdge{p.call}, nil, edge), OverStream(fakeCloud{p.call}, nil, cloud)
	go func() { // the Connect handler
		select {
		case <-p.call.cancelled:
			p.cloud.end(tunnel.ErrReset)
		case <-p.cloud.over:
		}
		if p.cloud.err != nil {
			p.call.status = status.Error(codes.Aborted, "reset")
		}
		close(p.call.returned)
	}()
	return p
}

// script is what one end of a conn does.
type script struct {
	writes   []int         // sizes
	pause    time.Duration // before each write
	fast     bool          // by ReadFrom and WriteTo, as Splice does
	then     string        // after the last write: closeWrite, close, reset
	reads    int           // bytes to read before stop; -1: until the end
	readLag  time.Duration // before the first read
	stopWith string        // after that many bytes: closeRead, close, reset
}

func drawScript(t *rapid.T, name string) script {
	ends := rapid.SampledFrom([]string{"closeWrite", "closeWrite", "close", "reset"})
	return script{
		writes: rapid.SliceOfN(rapid.SampledFrom([]int{1, 100, MaxPayload, MaxPayload + 1, 5 * MaxPayload}), 0, 5).
			Draw(t, name+" writes"),
		pause: rapid.SampledFrom([]time.Duration{0, time.Microsecond, time.Millisecond}).Draw(t, name+" pause"),
		fast:  rapid.Bool().Draw(t, name+" fast"),
		then:  ends.Draw(t, name+" then"),
		reads: rapid.SampledFrom([]int{-1, -1, -1, 0, 1, 3 * MaxPayload}).Draw(t, name+" reads"),
		readLag: rapid.SampledFrom([]time.Duration{0, time.Microsecond, time.Millisecond, 5 * time.Millisecond}).
			Draw(t, name+" lag"),
		stopWith: rapid.SampledFrom([]string{"closeRead", "close", "reset"}).Draw(t, name+" stop"),
	}
}

// resets says whether the script may end its conn by a reset.
func (s script) resets() bool {
	return s.then == "reset" || s.reads >= 0 && s.stopWith == "reset"
}

// cutsOwnReads says whether the script may close while it reads.
func (s script) closes() bool {
	return s.then == "close" || s.reads >= 0 && s.stopWith == "close"
}

func finish(c *Conn, how string) {
	switch how {
	case "closeWrite":
		c.CloseWrite()
	case "closeRead":
		c.CloseRead()
	case "close":
		c.Close()
	case "reset":
		c.Reset()
	}
}

// scripted is what has come of a script.
type scripted struct {
	written  int // bytes that the conn has taken
	writeErr error
	read     bytes.Buffer
	readErr  error // nil: clean end, or it stopped by itself
	atEnd    bool  // it read a clean end
}

func (s script) run(c *Conn, data []byte) (r *scripted, done chan struct{}) {
	r, done = &scripted{}, make(chan struct{})
	var both sync.WaitGroup
	both.Go(func() {
		src := &scriptReader{s, data}
		if s.fast {
			n, err := c.ReadFrom(src)
			r.written, r.writeErr = int(n), err
		} else {
			for r.writeErr == nil && len(src.s.writes) > 0 {
				time.Sleep(s.pause)
				var n int
				n, r.writeErr = c.Write(src.next(src.s.writes[0]))
				r.written += n
			}
		}
		finish(c, s.then)
	})
	both.Go(func() {
		time.Sleep(s.readLag)
		into := &limitedWriter{&r.read, s.reads}
		if s.fast {
			_, r.readErr = c.WriteTo(into)
		} else {
			_, r.readErr = io.Copy(into, struct{ io.Reader }{c})
		}
		switch {
		case errors.Is(r.readErr, errEnough):
			r.readErr = nil
			finish(c, s.stopWith)
		case r.readErr == nil:
			r.atEnd = true
		}
	})
	go func() {
		both.Wait()
		close(done)
	}()
	return r, done
}

// scriptReader gives the writes of a script, one each Read where it fits.
type scriptReader struct {
	s    script
	data []byte
}

func (r *scriptReader) next(n int) []byte {
	out := r.data[:n]
	r.data = r.data[n:]
	if r.s.writes[0] -= n; r.s.writes[0] == 0 {
		r.s.writes = r.s.writes[1:]
	}
	return out
}

func (r *scriptReader) Read(p []byte) (int, error) {
	if len(r.s.writes) == 0 {
		return 0, io.EOF
	}
	time.Sleep(r.s.pause)
	return copy(p, r.next(min(len(p), r.s.writes[0]))), nil
}

var errEnough = errors.New("has read enough")

type limitedWriter struct {
	w     io.Writer
	limit int // -1: none
}

func (l *limitedWriter) Write(p []byte) (int, error) {
	if l.limit < 0 {
		return l.w.Write(p)
	}
	n, _ := l.w.Write(p[:min(len(p), l.limit)])
	if l.limit -= n; l.limit == 0 {
		return n, errEnough
	}
	return n, nil
}

// However two ends write, read, stop, close and reset at once: what arrives is what
// was sent, a clean end means that all of it has arrived, nobody sees a reset unless
// somebody made one, and nothing is left of the conn when both ends have closed.
func TestEveryEndOfAConn(t *testing.T) {
	data := blob(40 * MaxPayload)
	eachWay(t, func(t *testing.T, newConns func() *fakeConns) {
		rapid.Check(t, func(rt *rapid.T) {
			cloud, edge := drawScript(rt, "cloud"), drawScript(rt, "edge")
			for _, w := range runScripts(newConns(), cloud, edge, data) {
				rt.Error(w)
			}
		})
	})
}

func runScripts(p *fakeConns, cloud, edge script, data []byte) (wrong []string) {
	bad := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	cloud.writes, edge.writes = append([]int(nil), cloud.writes...), append([]int(nil), edge.writes...)
	c, cDone := cloud.run(p.cloud, data)
	e, eDone := edge.run(p.edge, data)

	// Whoever has read and written closes, as Splice does.
	late, deadline := time.After(patience), time.Now().Add(patience)
	for _, done := range []chan struct{}{cDone, eDone} {
		select {
		case <-done:
		case <-late:
		}
	}
	p.cloud.Close()
	p.edge.Close()
	for p.gone.Load() != 2 && time.Now().Before(deadline) {
		time.Sleep(10 * time.Microsecond)
	}
	if n := p.gone.Load(); n != 2 || !tunnel.IsClosed(cDone) || !tunnel.IsClosed(eDone) {
		bad("something is left: %d of 2 ends are gone, cloud's script done: %t, edge's: %t", n, tunnel.IsClosed(cDone),
			tunnel.IsClosed(eDone))
		p.cloud.Reset()
		p.edge.Reset()
		return wrong
	}
	reset := cloud.resets() || edge.resets()
	for _, d := range []struct {
		name       string
		from, to   *scripted
		self, peer script
	}{{"cloud to edge", c, e, cloud, edge}, {"edge to cloud", e, c, edge, cloud}} {
		got := d.to.read.Bytes()
		if len(got) > d.from.written || !bytes.Equal(got, data[:len(got)]) {
			bad("%s: %d bytes arrived that are not what was sent (%d)", d.name, len(got), d.from.written)
		}
		if d.to.atEnd && len(got) != d.from.written {
			bad("%s: a clean end after %d of %d bytes", d.name, len(got), d.from.written)
		}
		if reset {
			continue
		}
		if errors.Is(d.to.readErr, syscall.ECONNRESET) || errors.Is(d.from.writeErr, syscall.ECONNRESET) {
			bad("%s: a reset that nobody made: read %v, write %v", d.name, d.to.readErr, d.from.writeErr)
		}
		if d.peer.reads < 0 && !d.peer.closes() && !d.to.atEnd {
			bad("%s: no clean end for who reads to the end: %v", d.name, d.to.readErr)
		}
		if d.from.writeErr != nil && d.peer.reads < 0 && !d.peer.closes() && !d.self.closes() {
			bad("%s: write fails with %v although the other side reads all", d.name, d.from.writeErr)
		}
	}
	return wrong
}

// A peer that sends on after fin harms its own conn and nothing else. (It brought the
// process down: the reader's queue is closed by then.)
func TestBytesAfterFin(t *testing.T) {
	for name, read := range map[string]func(c *Conn) error{
		"Read":    func(c *Conn) error { _, err := io.ReadAll(struct{ io.Reader }{c}); return err },
		"WriteTo": func(c *Conn) error { _, err := c.WriteTo(io.Discard); return err },
	} {
		t.Run(name, func(t *testing.T) {
			p := newFakeConns()
			p.call.up <- []byte{keyData, 1, 'x', keyFin, 1}
			if err := read(p.cloud); err != nil {
				t.Fatalf("reading to fin: %v", err)
			}
			p.call.up <- []byte{keyData, 1, 'y'}
			testkit.Eventually(t, "the conn is reset",
				func() bool { return tunnel.IsClosed(p.cloud.over) && p.cloud.err != nil })
			p.edge.end(tunnel.ErrReset)
			testkit.Eventually(t, "nothing is left", func() bool { return p.gone.Load() == 2 })
		})
	}
}

// Bytes that a reset has swallowed do not become a clean end because fin came right
// behind them.
func TestResetBeforeFin(t *testing.T) {
	for range 200 {
		p := newFakeConns()
		p.call.up <- []byte{keyData, 1, '1'} // fills the reader's queue
		p.cloud.startReceiver()
		testkit.Eventually(t, "the first chunk waits for a Read", func() bool { return len(p.cloud.in.queue) == 1 })
		p.call.up <- []byte{keyData, 1, '2'}
		p.call.up <- []byte{keyFin, 1}
		testkit.Eventually(t, "the second is in the receiver's hands", func() bool { return len(p.call.up) == 1 })
		p.cloud.Reset()
		got, err := io.ReadAll(struct{ io.Reader }{p.cloud})
		if err == nil && string(got) != "12" {
			t.Fatalf("a clean end after %q of \"12\"", got)
		}
		testkit.Eventually(t, "nothing is left", func() bool { return p.gone.Load() == 2 })
	}
}

// CloseWrite from another goroutine ends a running ReadFrom, and nothing goes behind
// fin.
func TestCloseWriteDuringReadFrom(t *testing.T) {
	for range 200 {
		p := newFakeConns()
		sent := make(chan int64)
		go func() {
			n, err := p.cloud.ReadFrom(endless{})
			if !errors.Is(err, syscall.EPIPE) {
				t.Errorf("ReadFrom ends with %v, want a broken pipe", err)
			}
			sent <- n
		}()
		got := make(chan int64)
		go func() {
			n, err := io.Copy(io.Discard, struct{ io.Reader }{p.edge})
			if err != nil {
				t.Errorf("the other end reads %v, want a clean end", err)
			}
			got <- n
		}()
		testkit.Eventually(t, "bytes flow", func() bool { return p.edge.counters.BytesReceived.Load() > 0 })
		p.cloud.CloseWrite()
		if n, m := <-sent, <-got; n != m {
			t.Fatalf("%d bytes sent, %d received", n, m)
		}
		p.cloud.Close()
		p.edge.Close()
		testkit.Eventually(t, "nothing is left", func() bool { return p.gone.Load() == 2 })
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// A stop that arrives while ReadFrom waits for the window frees it with a broken pipe,
// and so does the end of the call. Neither is a reset.
func TestWriterIsToldThatNobodyReads(t *testing.T) {
	for range 100 {
		p := newFakeConns()
		result := make(chan error, 1)
		go func() {
			_, err := p.cloud.ReadFrom(endless{})
			result <- err
		}()
		testkit.Eventually(t, "the window is full", func() bool { return len(p.call.down) == cap(p.call.down) })
		go p.cloud.WriteTo(io.Discard)
		p.edge.Close() // stop and fin
		if err := <-result; !errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("ReadFrom ends with %v, want a broken pipe", err)
		}
		p.cloud.Close()
		testkit.Eventually(t, "nothing is left", func() bool { return p.gone.Load() == 2 })
		if p.cloud.err != nil || p.edge.err != nil {
			t.Fatalf("cloud %v, edge %v; want two clean ends", p.cloud.err, p.edge.err)
		}
	}
}

// A caller that closes while the target still talks does not lose what it wrote
// before, nor is that a reset for the target.
func TestSpliceOfACallerThatCloses(t *testing.T) {
	for range 100 {
		p := newFakeConns()
		target := newHalves(t)
		spliced := make(chan struct{})
		go func() {
			tunnel.Splice(context.Background(), p.edge, target)
			close(spliced)
		}()
		go io.Copy(target.says, endless{})
		want := blob(3 * MaxPayload)
		if _, err := p.cloud.Write(want); err != nil {
			t.Fatal(err)
		}
		p.cloud.Close()
		if got, err := io.ReadAll(target.hears); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%d of %d bytes written before the close arrive, %v", len(got), len(want), err)
		}
		<-spliced
		testkit.Eventually(t, "nothing is left", func() bool { return p.gone.Load() == 2 })
	}
}

// A Read that runs while its own side closes does not report a reset, also when the whole conn is over before the
// Read looks again.
func TestCloseDuringRead(t *testing.T) {
	eachWay(t, func(t *testing.T, newConns func() *fakeConns) {
		for range 100 {
			p := newConns()
			result := make(chan error)
			go func() {
				_, err := p.cloud.Read(make([]byte, 1))
				result <- err
			}()
			p.cloud.Close()
			if err := <-result; !errors.Is(err, net.ErrClosed) {
				t.Fatalf("Read returns %v", err)
			}
			p.edge.Close()
			testkit.Eventually(t, "nothing is left", func() bool { return p.gone.Load() == 2 })
			if err := p.cloud.endOfInput(); errors.Is(err, syscall.ECONNRESET) { // for a Read that has begun before
				t.Fatalf("at the end of the conn Read returns %v", err)
			}
		}
	})
}

// Bytes that a close has discarded do not become a clean end for a Read that runs while its own side closes.
func TestCloseDiscardsBeforeFin(t *testing.T) {
	for range 100 {
		p := newFakeConns()
		p.call.up <- []byte{keyData, 1, '1'} // fills the reader's queue
		p.cloud.startReceiver()
		testkit.Eventually(t, "the first chunk waits for a Read", func() bool { return len(p.cloud.in.queue) == 1 })
		p.call.up <- []byte{keyData, 1, '2', keyFin, 1}
		testkit.Eventually(t, "the second is in the receiver's hands", func() bool { return len(p.call.up) == 0 })
		p.cloud.Close()
		for range p.cloud.in.queue { // until the receiver closes it
		}
		if err := p.cloud.endOfInput(); !errors.Is(err, net.ErrClosed) {
			t.Fatalf("Read returns %v", err)
		}
		p.edge.Close()
		testkit.Eventually(t, "nothing is left", func() bool { return p.gone.Load() == 2 })
	}
}

// halves is a target whose directions end by themselves and which must not be reset.
type halves struct {
	net.Conn // nil
	t        *testing.T
	in       *io.PipeReader
	out      *io.PipeWriter
	says     *io.PipeWriter // what the target sends
	hears    *io.PipeReader // what it receives
}

func newHalves(t *testing.T) *halves {
	h := &halves{t: t}
	h.in, h.says = io.Pipe()
	h.hears, h.out = io.Pipe()
	return h
}

func (h *halves) Read(p []byte) (int, error)  { return h.in.Read(p) }
func (h *halves) Write(p []byte) (int, error) { return h.out.Write(p) }
func (h *halves) CloseWrite() error           { return h.out.Close() }
func (h *halves) CloseRead() error            { return h.in.Close() }

func (h *halves) Close() error {
	h.in.Close()
	return h.out.Close()
}

func (h *halves) Reset() error {
	h.t.Error("the target sees a reset")
	return h.Close()
}

// A peer of an older release is sent no chunk that it does not know.
func TestNoAbortToAnOlderPeer(t *testing.T) {
	for range 20 {
		p := newFakeConns()
		p.edge.ordered = false
		if _, err := p.edge.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "a chunk is on its way", func() bool { return len(p.call.up) == 1 })
		p.edge.ResetBehind()
		testkit.Eventually(t, "the edge's end is over", func() bool { return tunnel.IsClosed(p.edge.over) })
		if p.edge.err == nil || p.edge.out.reset == noticeSent {
			t.Fatalf("the edge's conn ends with %v, abort sent: %t", p.edge.err, p.edge.out.reset == noticeSent)
		}
		p.cloud.Reset()
		testkit.Eventually(t, "nothing is left", func() bool { return p.gone.Load() == 2 })
	}
}
