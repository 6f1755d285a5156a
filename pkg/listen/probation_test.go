package listen

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// approach connects an unauthenticated peer over a net.Pipe, which buffers nothing.
func approach(s *Strangers, terms Terms) (stranger net.Conn, p *Probation, full Full) {
	if terms.Late == nil {
		terms.Late = func() {}
	}
	if terms.Evicted == nil {
		terms.Evicted = func() {}
	}
	stranger, ours := net.Pipe()
	p, full = s.Probation(ours, terms)
	return stranger, p, full
}

// Bytes beyond Terms.Bytes wait at the sender until Met.
func TestProbationBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const may, all = 1000, 5000
		stranger, p, _ := approach(NewStrangers(1, 1), Terms{Time: time.Minute, Bytes: may})
		sent := make(chan int, 1)
		go func() {
			n, _ := stranger.Write(bytes.Repeat([]byte("x"), all))
			stranger.Close()
			sent <- n
		}()
		read := 0
		done := make(chan struct{})
		go func() {
			defer close(done)
			for b := make([]byte, 300); ; {
				n, err := p.Read(b)
				read += n
				if err != nil {
					return
				}
			}
		}()
		synctest.Wait()
		if read != may {
			t.Errorf("%d bytes are read of a stranger, want %d", read, may)
		}
		p.Met()
		<-done
		if n := <-sent; n != all || read != all {
			t.Errorf("%d bytes were sent and %d read, want %d", n, read, all)
		}
	})
}

// The connection is closed when the first byte or the authentication comes too late. Its reader
// gets an error, even when the peer has sent more bytes than it may.
func TestProbationTime(t *testing.T) {
	for _, tc := range []struct {
		name  string
		sends int
		after time.Duration
	}{
		{"silent", 0, FirstByte},
		{"one byte", 1, 5 * time.Second},
		{"too much", 100, 5 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				late := 0
				s := NewStrangers(1, 1)
				start := time.Now()
				stranger, p, _ := approach(s, Terms{Time: 5 * time.Second, Bytes: 10, Late: func() { late++ }})
				go stranger.Write(make([]byte, tc.sends))
				_, err := io.Copy(io.Discard, readerFunc(p.Read))
				if d := time.Since(start); err == nil || d != tc.after || late != 1 || s.Len() != 0 {
					t.Errorf("it ended after %s with %v, was counted %d times, and %d places are taken; "+
						"want %s, an error, once and none", d, err, late, s.Len(), tc.after)
				}
				p.Release()
				time.Sleep(time.Minute)
				if late != 1 {
					t.Errorf("counted %d times", late)
				}
				stranger.Close()
			})
		})
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

// After Met or Release, the deadline no longer closes the connection.
func TestProbationEnds(t *testing.T) {
	for name, end := range map[string]func(*Probation){"met": (*Probation).Met, "released": (*Probation).Release} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := NewStrangers(1, 1)
				late := func() { t.Error("counted as late") }
				stranger, p, _ := approach(s, Terms{Time: 5 * time.Second, Bytes: 1, Late: late})
				go stranger.Write([]byte("ab"))
				for range 2 {
					if _, err := p.Read(make([]byte, 1)); err != nil {
						t.Error(err)
					}
					end(p)
				}
				time.Sleep(time.Minute)
				go stranger.Write([]byte("c"))
				if _, err := p.Read(make([]byte, 1)); err != nil || s.Len() != 0 {
					t.Errorf("got %v, and %d places are taken", err, s.Len())
				}
				stranger.Close()
			})
		})
	}
}

// An evicted connection is closed and counted once, and its reader gets an error.
func TestProbationEvicted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStrangers(1, 1)
		evicted := 0
		stranger, p, _ := approach(s, Terms{
			Time: time.Minute, Bytes: 10,
			Evicted: func() { evicted++ }, Late: func() { t.Error("counted as late") },
		})
		defer stranger.Close()
		read := make(chan error, 1)
		go func() {
			_, err := p.Read(make([]byte, 1))
			read <- err
		}()
		time.Sleep(evictAfter)
		other, q, full := approach(s, Terms{Time: time.Minute})
		defer other.Close()
		if q == nil {
			t.Fatalf("there is no place: %+v", full)
		}
		if err := <-read; !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("its reader gets %v", err)
		}
		p.Release()
		if evicted != 1 || s.Len() != 1 {
			t.Errorf("counted %d times; %d places are taken, want 1 and 1", evicted, s.Len())
		}
		q.Release()
		time.Sleep(time.Hour)
	})
}

// A connection stays open when Met comes before the eviction takes effect, or before Extend.
func TestEndedProbationIgnoresEviction(t *testing.T) {
	for name, late := range map[string]func(*Probation){
		"evicted":  func(p *Probation) { p.place.evict() },
		"extended": func(p *Probation) { p.Extend(time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				never := func() { t.Error("counted") }
				terms := Terms{Time: 5 * time.Second, Bytes: 1, Late: never, Evicted: never}
				stranger, p, _ := approach(NewStrangers(1, 1), terms)
				defer stranger.Close()
				p.Met()
				late(p)
				time.Sleep(time.Minute)
				go stranger.Write([]byte("a"))
				if _, err := p.Read(make([]byte, 1)); err != nil {
					t.Errorf("the connection is closed: %v", err)
				}
			})
		})
	}
}
