package vanish

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// outcome is how a conn ended at the end that is still there.
type outcome string

const (
	cutOff outcome = "reset"     // the reader got an error
	clean  outcome = "clean end" // the reader took a part for the whole
	held   outcome = "held"      // the tunnel still has the conn
	freed  outcome = "freed"     // the tunnel has forgotten the conn; no stream was cut off
)

// state is what a conn does when its peer vanishes.
type state struct {
	name string
	// begin brings a new conn into the state.
	begin func(*exchange) error
	// resets: the peer resets the conn just before it vanishes.
	resets bool
	// judge waits for the end, from the cut on. It is nil if the peer's stream had ended
	// before: then no stream is cut off, and the tunnel must forget the conn, no more.
	judge func(*exchange) outcome
}

func states() []state {
	return []state{
		{name: "idle", begin: (*exchange).nothing, judge: (*exchange).readEnd},
		{name: "writing, the other half waits", begin: (*exchange).cross, judge: (*exchange).ended},
		{name: "writing both ways", begin: (*exchange).chat, judge: (*exchange).ended},
		{name: "answering a half-closed peer", begin: (*exchange).answer, judge: (*exchange).ended},
		{name: "half-closed", begin: (*exchange).ask},
		{name: "waiting for a reader", begin: (*exchange).block, judge: (*exchange).blocked},
		{name: "waiting for a reader, then reset", begin: (*exchange).block, resets: true, judge: (*exchange).blocked},
		{name: "waiting for a reader that writes, then reset", begin: (*exchange).blockAndHear, resets: true,
			judge: (*exchange).blocked},
	}
}

// exchange is one conn in one state.
type exchange struct {
	pair
	state state
	wg    sync.WaitGroup
	read  chan error    // one send: why seen reads no more
	wrote chan error    // one send: why seen writes no more; nil: seen does not write
	quiet chan struct{} // closed: seen's writer shall stop
	late  time.Time     // when the end must have come; set at the cut
}

func newExchange(p pair, s state) *exchange {
	return &exchange{pair: p, state: s, read: make(chan error, 1), quiet: make(chan struct{})}
}

// grain is what a trickle writes, and how often.
const (
	grain = 512
	every = 20 * time.Millisecond
)

// trickle writes to c until it fails or stop is closed.
func trickle(c conn, stop <-chan struct{}) error {
	for {
		if _, err := c.Write(make([]byte, grain)); err != nil {
			return err
		}
		select {
		case <-stop:
			return nil
		case <-time.After(every):
		}
	}
}

// fill writes to c until nothing has been taken for a second.
func fill(c conn) error {
	block := make([]byte, 64<<10)
	for {
		c.SetWriteDeadline(time.Now().Add(time.Second))
		_, err := c.Write(block)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (x *exchange) nothing() error { return nil }

// hear has seen read to the end.
func (x *exchange) hear() {
	x.wg.Go(func() {
		_, err := io.Copy(io.Discard, x.seen)
		x.read <- err
	})
}

// say has seen write until it is told to be quiet.
func (x *exchange) say() {
	x.wrote = make(chan error, 1)
	x.wg.Go(func() { x.wrote <- trickle(x.seen, x.quiet) })
}

// send has gone write as long as it is there.
func (x *exchange) send() { x.wg.Go(func() { trickle(x.gone, nil) }) }

// cross: gone sends and does not read, so that what seen has sent waits. Seen only reads.
func (x *exchange) cross() error {
	err := fill(x.seen)
	x.send()
	x.hear()
	return err
}

func (x *exchange) chat() error {
	x.wg.Go(func() { io.Copy(io.Discard, x.gone) })
	x.send()
	x.hear()
	x.say()
	return nil
}

// answer: seen has sent its request; gone has begun to answer.
func (x *exchange) answer() error {
	err := expectEnd(x.seen, x.gone)
	x.send()
	x.hear()
	return err
}

// ask: gone has sent its request; seen has not begun to answer.
func (x *exchange) ask() error { return expectEnd(x.gone, x.seen) }

// expectEnd ends from's direction, and waits until to has seen it.
func expectEnd(from, to conn) error {
	if err := from.CloseWrite(); err != nil {
		return err
	}
	to.SetReadDeadline(time.Now().Add(takes))
	defer to.SetReadDeadline(time.Time{})
	_, err := to.Read(make([]byte, 1))
	if errors.Is(err, io.EOF) {
		return nil
	}
	return errors.Join(errors.New("the end of a direction did not pass"), err)
}

// block: gone has sent more than seen takes.
func (x *exchange) block() error { return fill(x.gone) }

// blockAndHear: seen writes as well, and does not read.
func (x *exchange) blockAndHear() error {
	x.say()
	return fill(x.gone)
}

// readEnd reads until the end, from now on.
func (x *exchange) readEnd() outcome {
	x.hear()
	return x.ended()
}

// ended waits for the end of what seen reads.
func (x *exchange) ended() outcome {
	select {
	case err := <-x.read:
		if err != nil {
			return cutOff
		}
	case <-time.After(time.Until(x.late)):
		return held
	}
	if x.wrote != nil {
		// The reset may have gone to the write. After a clean end it would be EPIPE.
		select {
		case err := <-x.wrote:
			if errors.Is(err, syscall.ECONNRESET) {
				return cutOff
			}
		case <-time.After(time.Second):
		}
	}
	return clean
}

// blocked waits until seen's kernel knows of the end, and then reads it.
func (x *exchange) blocked() outcome {
	err := testkit.Poll(time.Until(x.late), func() error {
		if state, err := tcpState(socketOf(x.seen)); err != nil || state == established {
			return errors.Join(err, errors.New("still established"))
		}
		return nil
	})
	if err != nil {
		return held
	}
	x.late = time.Now().Add(takes)
	return x.readEnd()
}

// end gives everything back.
func (x *exchange) end() {
	close(x.quiet)
	reset(x.gone)
	reset(x.seen)
	x.wg.Wait()
}
