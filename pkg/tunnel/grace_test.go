package tunnel

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// movingConn is a conn of the tunnel whose bytes the test counts itself.
type movingConn struct {
	net.Conn
	moved   atomic.Int64
	pending bool // a request has no answer yet
	ends    GraceEnd
	told    chan time.Duration // gets what TellEnds is told; nil: TellEnds is not called
}

func (c *movingConn) Answered() (moved int64, ok bool) { return c.moved.Load(), !c.pending }

func (c *movingConn) Ends() *GraceEnd { return &c.ends }

func (c *movingConn) TellEnds(left time.Duration) { c.told <- left }

// TestQuietEnd: in the last ten seconds of a grace period, a conn ends as soon as it has been silent for a
// quarter of the time that is left. A conn that is never silent, or whose caller waits for an answer, ends
// with the grace period.
func TestQuietEnd(t *testing.T) {
	for _, test := range []struct {
		name     string
		pending  bool
		before   time.Duration // how long ago the process was asked to stop, when its context ends
		interval time.Duration // between two answers; 0: there is none
		earliest time.Duration // when the conn may end, after the process was asked to stop
		latest   time.Duration
	}{
		{"silent", false, 0, 0, 15 * time.Second, 23 * time.Second},
		{"silent, after leaving", false, 12 * time.Second, 0, 15 * time.Second, 23 * time.Second},
		{"a request every 2 s", false, 0, 2 * time.Second, 15 * time.Second, 24 * time.Second},
		{"a request that waits for its answer", true, 0, 0, 25 * time.Second, 25 * time.Second},
		{"a request that waits, after leaving", true, 12 * time.Second, 0, 25 * time.Second, 25 * time.Second},
		{"a request every 50 ms", false, 0, 50 * time.Millisecond, 25 * time.Second, 25 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				daemon, stop := context.WithCancelCause(t.Context())
				defer stop(nil)
				process, end := context.WithCancel(daemon) // as an errgroup derives it
				defer end()
				ctx, cancel := Grace(process, GracePeriod)
				defer cancel()
				_, a := net.Pipe()
				_, b := net.Pipe()
				target := &movingConn{Conn: b, pending: test.pending}
				done := splice(t, ctx, a, target)
				time.Sleep(7 * time.Second) // Splice has looked once before
				stopped := time.Now().Add(-test.before)
				stop(Stopping{Since: stopped})
				var answered time.Time
				if test.interval > 0 {
					ticker := time.NewTicker(test.interval)
					defer ticker.Stop()
				requests:
					for {
						select {
						case <-ticker.C:
							target.moved.Add(100)
							answered = time.Now()
						case <-done:
							break requests
						}
					}
				} else {
					<-done
				}
				took := time.Since(stopped)
				if took < test.earliest || took > test.latest {
					t.Errorf("the conn ended after %v, want %v to %v", took, test.earliest, test.latest)
				}
				if left := GracePeriod - took; left > 0 && !answered.IsZero() && time.Since(answered) < left/4 {
					t.Errorf("the conn ended %v after an answer, with %v left", time.Since(answered), left)
				}
			})
		})
	}
}

// A conn also ends at a quiet moment before the process at the other end of the tunnel ends, and not if its caller
// waits for an answer.
func TestQuietEndOfPeer(t *testing.T) {
	for _, pending := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			_, a := net.Pipe()
			_, b := net.Pipe()
			target := &movingConn{Conn: b, pending: pending}
			done := splice(t, ctx, a, target)
			time.Sleep(7 * time.Second) // Splice has looked once before
			stopped := time.Now()
			target.ends.Begin(GracePeriod)
			select {
			case <-done:
				if took := time.Since(stopped); pending || took < 15*time.Second || took > 23*time.Second {
					t.Errorf("pending: %t; the conn ended after %v", pending, took)
				}
			case <-time.After(2 * GracePeriod):
				if !pending {
					t.Error("the conn does not end")
				}
				cancel()
				<-done
			}
		})
	}
}

// A process that relays a conn does not end the idle conn itself, since bytes may be on their way to the caller. It
// tells the caller's process when the conn will be reset, and tells it again only if that time changes.
func TestQuietEndIsPassedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		daemon, stop := context.WithCancelCause(t.Context())
		defer stop(nil)
		ctx, cancel := Grace(daemon, GracePeriod)
		defer cancel()
		_, a := net.Pipe()
		_, b := net.Pipe()
		caller := &movingConn{Conn: a, told: make(chan time.Duration, 10)}
		target := &movingConn{Conn: b}
		done := splice(t, ctx, caller, target)
		time.Sleep(7 * time.Second) // Splice has looked once before
		stopped := time.Now()
		told := func(want time.Duration) {
			t.Helper()
			left := <-caller.told
			if at := time.Since(stopped) + left; at != want {
				t.Errorf("the caller's end is told that the conn is reset after %v, want %v", at, want)
			}
		}
		stop(Stopping{Since: stopped}) // this process
		told(GracePeriod)
		target.ends.Begin(9 * time.Second) // the other process, which ends earlier
		told(time.Since(stopped) + 9*time.Second)
		told(GracePeriod) // the other process should have reset the conn, and has not
		<-done
		if took := time.Since(stopped); took != GracePeriod || len(caller.told) != 0 {
			t.Errorf("the conn ended after %v; the caller's end was told %d times more", took, len(caller.told))
		}
	})
}
