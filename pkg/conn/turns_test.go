package conn

import (
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// thinTurns is a link of so many bytes a second, and n conns on it that each have a chunk waiting
// for its turn, behind those that gRPC has.
type thinTurns struct {
	*Turns
	t     *testing.T
	done  chan struct{}
	order chan *flow // those that have had a turn
}

func newThinTurns(t *testing.T, rate int64) *thinTurns {
	tt := &thinTurns{Turns: new(Turns), t: t, done: make(chan struct{}), order: make(chan *flow, 1000)}
	tt.rate.Store(rate)
	return tt
}

// ask has a conn wait for its turn with n bytes, and returns when it does, or has had it.
func (tt *thinTurns) ask(f *flow, n int) {
	go func() {
		granted := tt.wait(f, n, tt.done)
		if granted > tt.chunk() && !tunnel.IsClosed(tt.done) {
			tt.t.Errorf("%d bytes have their turn at once, want %d at most", granted, tt.chunk())
		}
		f.add()
		tt.order <- f
	}()
	synctest.Wait()
}

func (tt *thinTurns) flow() *flow {
	f := &flow{turns: tt.Turns}
	f.init(new(Blocks))
	return f
}

// next has gRPC write a chunk of f, and returns the conn whose turn it is then, nil if there is
// none.
func (tt *thinTurns) next(wrote *flow) *flow {
	wrote.Put(wrote.blocks.get())
	synctest.Wait()
	select {
	case f := <-tt.order:
		return f
	default:
		return nil
	}
}

// On a thin link gRPC has few chunks at a time, conns take turns, and one with little to send
// goes before bulk transfers.
func TestTurnsOnThinLink(t *testing.T) {
	bubble(t, func(t *testing.T) {
		tt := newThinTurns(t, 12500)
		defer close(tt.done)
		var bulk []*flow
		for range 100 {
			f := tt.flow()
			bulk = append(bulk, f)
			tt.ask(f, MaxPayload)
		}
		if n := len(tt.order); n != fewest {
			t.Fatalf("gRPC has %d chunks, want %d", n, fewest)
		}
		sending := <-tt.order
		tt.ask(<-tt.order, MaxPayload)
		keystroke := tt.flow()
		tt.ask(keystroke, 1)
		if f := tt.next(sending); f != keystroke {
			t.Fatal("a keystroke waits for bulk transfers")
		}
		tt.ask(sending, MaxPayload)
		sending = keystroke
		turns := map[*flow]int{}
		for range 300 {
			f := tt.next(sending)
			if f == nil {
				t.Fatal("nobody has a turn")
			}
			turns[f]++
			tt.ask(f, MaxPayload)
			sending = f
		}
		for i, f := range bulk {
			if n := turns[f]; n < 2 || n > 4 {
				t.Errorf("bulk transfer %d had %d turns of 300 for 100", i, n)
			}
		}
	})
}

// A link that gets fast lets everybody go.
func TestTurnsOnFastLink(t *testing.T) {
	bubble(t, func(t *testing.T) {
		tt := newThinTurns(t, 12500)
		defer close(tt.done)
		for range 10 {
			tt.ask(tt.flow(), MaxPayload)
		}
		sending := <-tt.order
		tt.rate.Store(sharedRate)
		tt.next(sending)
		if n := len(tt.order); n != 8 {
			t.Errorf("%d of 8 wait no longer", n)
		}
	})
}

// Chunks that gRPC cannot write, since their readers are stalled, hold up nobody for long; a
// connection that takes nothing does.
func TestTurnsBehindStalledReaders(t *testing.T) {
	bubble(t, func(t *testing.T) {
		tt := newThinTurns(t, 12500)
		defer close(tt.done)
		var stalled []*flow
		for range fewest {
			f := tt.flow()
			stalled = append(stalled, f)
			tt.ask(f, MaxPayload)
			<-tt.order
		}
		other := tt.flow()
		tt.ask(other, MaxPayload)
		tt.busy.Store(true)
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(tt.order) != 0 {
			t.Error("a chunk goes to gRPC while the connection takes nothing")
		}
		tt.busy.Store(false)
		time.Sleep(2 * stallTime)
		synctest.Wait()
		if len(tt.order) != 1 {
			t.Error("a conn waits for stalled readers")
		}
		// When the readers go on, their chunks make no room that is not there.
		tt.next(stalled[0])
		tt.mu.Lock()
		held := tt.held
		tt.mu.Unlock()
		if held != 1 {
			t.Errorf("%d chunks are counted, want the other conn's", held)
		}
	})
}

// A conn that ends gives its place to others.
func TestTurnsOfConnThatEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		tt := newThinTurns(t, 12500)
		defer close(tt.done)
		first := tt.flow()
		for range fewest {
			tt.ask(first, MaxPayload)
			<-tt.order
		}
		tt.ask(tt.flow(), MaxPayload)
		first.leave()
		synctest.Wait()
		if len(tt.order) != 1 {
			t.Error("the place of a conn that has ended is not free")
		}
	})
}

// A conn that has had its turn and then may not send gives its place to others at once.
func TestTurnOfConnThatMayNotSend(t *testing.T) {
	tt := newThinTurns(t, 12500)
	c := OverStream(nil, tt.Turns, Config{Blocks: new(Blocks), Counters: new(tunnel.Counters)})
	block := c.blocks.get()
	if n := c.out.flow.turn(1, nil); n != 1 || tt.held != 1 {
		t.Fatalf("%d bytes have their turn, %d chunks are counted", n, tt.held)
	}
	close(c.out.done)
	if err := c.sendBlock(block, 1); err == nil {
		t.Fatal("it may send")
	}
	if tt.held != 0 {
		t.Errorf("%d chunks are counted that gRPC does not have", tt.held)
	}
}
