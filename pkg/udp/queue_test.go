package udp

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"
)

// newTestQueue returns a queue. Tests read it on a fake clock: a datagram that waits for half a second is dropped.
func newTestQueue() (*queue, *Counters) {
	c := new(Counters)
	return newQueue(c, &c.ToTarget, 0), c
}

// mustAdd adds a datagram for which there is room.
func mustAdd(t *testing.T, q *queue, s *share, id flowID, p []byte) {
	t.Helper()
	if why, ok := q.add(s, kindDatagram, id, p, time.Now()); !ok {
		t.Fatalf("the datagram is dropped: %v", why)
	}
}

// Read gives whole frames, as many as fit, and cuts only a frame that is longer than its buffer.
func TestQueueReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, _ := newTestQueue()
		var s share
		var want []byte
		for i, n := range []int{0, 1, 1200, 1200, 30, 5000, 1200} {
			p := bytes.Repeat([]byte{byte('a' + i)}, n)
			mustAdd(t, q, &s, flowID(i), p)
			want = append(want, encode(kindDatagram, flowID(i), p)...)
		}
		q.end()
		var got []byte
		var sizes []int
		for buf := make([]byte, 2500); ; {
			n, err := q.Read(buf)
			got = append(got, buf[:n]...)
			if errors.Is(err, io.EOF) {
				break
			}
			sizes = append(sizes, n)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%d bytes differ from the %d that were added", len(got), len(want))
		}
		// 8+0, 8+1 and 8+1200 fit; another 1208 fits as well, 38 does, too; 5008 comes in three parts, the last
		// one with nothing behind it, since 1208 does not fit there.
		if want := []int{8 + 9 + 1208 + 1208 + 38, 2500, 2500, 8 + 1208}; !equalInts(sizes, want) {
			t.Errorf("reads of %v bytes, want %v", sizes, want)
		}
	})
}

func equalInts(a, b []int) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// A flow that sends more than the conn takes leaves room for the other flows.
func TestQueueIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, _ := newTestQueue()
		var greedy, second, modest share
		p := make([]byte, 1200)
		fill := func(s *share, id flowID) (n int) {
			for {
				if why, ok := q.add(s, kindDatagram, id, p, time.Now()); !ok {
					if why != DropFull {
						t.Fatalf("dropped because of %v", why)
					}
					return n
				}
				n++
			}
		}
		first, then := fill(&greedy, 1), fill(&second, 2)
		entry := entryHeader + frameHeader + len(p)
		if first < queueSize/entry/2-1 || first > queueSize/entry/2+1 {
			t.Errorf("one flow took %d of %d places", first, queueSize/entry)
		}
		if then < first/2-1 || then > first/2+1 {
			t.Errorf("the second flow took %d, the first one %d", then, first)
		}
		mustAdd(t, q, &modest, 3, p) // and there is still room
		if why, ok := q.add(&greedy, kindDatagram, 1, p, time.Now()); ok || why != DropFull {
			t.Errorf("the greedy flow gets more: %v, %v", why, ok)
		}
		io.ReadAtLeast(q, make([]byte, queueSize), (first+then)*(frameHeader+len(p)))
		mustAdd(t, q, &greedy, 1, p) // what it had was taken
	})
}

// Ends go into a full queue, but not without bound.
func TestQueueTakesEnds(t *testing.T) {
	q, _ := newTestQueue()
	for id := range flowID(1000) {
		for s := new(share); ; {
			if _, ok := q.add(s, kindDatagram, id, make([]byte, 1200), time.Now()); !ok {
				break
			}
		}
	}
	before := q.usedLocked()
	q.control(kindEnd, 7, nil)
	if q.usedLocked() != before+entryHeader+frameHeader {
		t.Error("the end is not there")
	}
	for range 100_000 {
		q.control(kindEnd, 7, nil)
	}
	if n := q.usedLocked(); n > queueSize+controlReserve {
		t.Errorf("%d bytes", n)
	}
}

// A datagram that comes alone is sent at once. A burst goes through the queue, and so does a datagram that the network
// does not take at once, or that has others before it.
func TestQueueSendsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, c := newTestQueue()
		var at, read []byte
		refuses := false
		(&wire{out: q}).SetTrySend(func(head, body []byte) bool {
			if !refuses {
				at = append(append(at, head...), body...)
			}
			return !refuses
		})
		var s share
		send := func(text string) {
			if why, ok := q.send(&s, 7, []byte(text), time.Now()); !ok {
				t.Errorf("%q is dropped: %v", text, why)
			}
		}
		send("nobody reads yet")
		go func() {
			for buf := make([]byte, 1000); ; {
				n, err := q.Read(buf)
				if err != nil {
					return
				}
				read = append(read, buf[:n]...)
			}
		}()
		pause := func() {
			time.Sleep(shortLull)
			synctest.Wait()
		}
		pause()
		send("alone")
		send("at the same moment")
		pause()
		refuses = true
		send("no room")
		refuses = false
		pause()
		mustAdd(t, q, &s, 7, []byte("in the queue"))
		pause()
		send("alone again")
		q.end()
		if why, ok := q.send(&s, 7, []byte("too late"), time.Now().Add(time.Second)); ok || why != DropLost {
			t.Errorf("behind the end: %v, %t", why, ok)
		}
		synctest.Wait()
		for name, want := range map[string]struct {
			got   []byte
			texts []string
		}{
			"at once": {at, []string{"alone", "alone again"}},
			"read":    {read, []string{"nobody reads yet", "at the same moment", "no room", "in the queue"}},
		} {
			var frames []byte
			for _, text := range want.texts {
				frames = append(frames, encode(kindDatagram, 7, []byte(text))...)
			}
			if !bytes.Equal(want.got, frames) {
				t.Errorf("%s: %q, want %q", name, want.got, frames)
			}
		}
		if n := c.ToTarget.Datagrams.Load(); n != 6 {
			t.Errorf("%d datagrams are counted", n)
		}
	})
}

// A datagram that has waited for half a second is dropped. Opens and ends are not.
func TestQueueDropsLateDatagrams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, c := newTestQueue()
		var s share
		mustAdd(t, q, &s, 1, []byte("late"))
		q.add(&s, kindOpen, 2, []byte("open"), time.Now())
		q.control(kindEnd, 1, nil)
		time.Sleep(maxWait + 2*time.Millisecond)
		mustAdd(t, q, &s, 1, []byte("fresh"))
		buf := make([]byte, 1000)
		n, err := q.Read(buf)
		want := append(append(encode(kindOpen, 2, []byte("open")), encode(kindEnd, 1, nil)...),
			encode(kindDatagram, 1, []byte("fresh"))...)
		if err != nil || !bytes.Equal(buf[:n], want) {
			t.Errorf("got %q, %v", buf[:n], err)
		}
		if c.Dropped(DropLate) != 1 {
			t.Errorf("%d are late", c.Dropped(DropLate))
		}

		// While the conn is being opened, no datagram gets late.
		q, c = newTestQueue()
		mustAdd(t, q, &s, 1, []byte("waits for the conn"))
		time.Sleep(9 * time.Second)
		q.opened()
		if n, err = q.Read(buf); err != nil || n != frameHeader+len("waits for the conn") || c.Dropped(DropLate) != 0 {
			t.Errorf("%d bytes, %v, %d late", n, err, c.Dropped(DropLate))
		}
	})
}

// Read waits for a frame, and end and abort wake it.
func TestQueueWakesRead(t *testing.T) {
	lost := errors.New("lost")
	for name, tc := range map[string]struct {
		do   func(*queue)
		n    int
		want error
	}{
		"add":   {func(q *queue) { q.add(new(share), kindDatagram, 1, []byte("x"), time.Now()) }, frameHeader + 1, nil},
		"end":   {(*queue).end, 0, io.EOF},
		"abort": {func(q *queue) { q.abort(lost, DropLost) }, 0, lost},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q, _ := newTestQueue()
				done := make(chan struct{})
				go func() {
					defer close(done)
					if n, err := q.Read(make([]byte, 100)); n != tc.n || !errors.Is(err, tc.want) {
						t.Errorf("%d, %v", n, err)
					}
				}()
				synctest.Wait()
				select {
				case <-done:
					t.Fatal("Read did not wait")
				default:
				}
				tc.do(q)
				<-done
			})
		})
	}
}

// What waits when the conn is lost is counted, and no more is taken.
func TestQueueCountsWhatIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, c := newTestQueue()
		var s share
		for range 5 {
			mustAdd(t, q, &s, 1, make([]byte, 1200))
		}
		q.Read(make([]byte, 2500)) // two
		mustAdd(t, q, &s, 1, nil)
		q.add(&s, kindOpen, 2, []byte("open"), time.Now())
		q.control(kindEnd, 1, nil)
		q.abort(io.ErrUnexpectedEOF, DropUnreachable)
		if n := c.Dropped(DropUnreachable); n != 5 {
			t.Errorf("%d were lost, want 3 + 1 + 1", n)
		}
		if n, bytes := c.ToTarget.Datagrams.Load(), c.ToTarget.Bytes.Load(); n != 2 || bytes != 2*1200 {
			t.Errorf("%d with %d bytes were passed on, want the 2 that Read has taken", n, bytes)
		}
		if why, ok := q.add(&s, kindDatagram, 1, nil, time.Now()); ok || why != DropLost {
			t.Errorf("%v, %v", why, ok)
		}
	})
}

// A datagram counts as passed on once, when Read takes it: with its own bytes, also in an open or in parts.
func TestQueueCountsWhatItHandsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, c := newTestQueue()
		var s share
		first := opening{addr: "127.0.0.1:53", caller: "192.0.2.1:7", datagram: make([]byte, 100)}.encode()
		q.add(&s, kindOpen, 1, first, time.Now())
		mustAdd(t, q, &s, 1, nil)
		mustAdd(t, q, &s, 1, make([]byte, 5000))
		q.control(kindEnd, 1, nil)
		if n := c.ToTarget.Datagrams.Load(); n != 0 {
			t.Errorf("%d were passed on before Read", n)
		}
		q.end()
		for buf := make([]byte, 1000); ; {
			if _, err := q.Read(buf); err != nil {
				break
			}
		}
		if n, bytes := c.ToTarget.Datagrams.Load(), c.ToTarget.Bytes.Load(); n != 3 || bytes != 100+0+5000 {
			t.Errorf("%d with %d bytes were passed on, want 3 with 5100", n, bytes)
		}
	})
}

// Neither adding nor reading allocates once the buffers have grown.
func TestQueueDoesNotAllocate(t *testing.T) {
	q, _ := newTestQueue()
	var s share
	p, buf := make([]byte, 1200), make([]byte, 32<<10)
	round := func() {
		for range 20 {
			q.add(&s, kindDatagram, 1, p, time.Now())
		}
		for range 20 {
			if n, _ := q.take(buf); n == 0 {
				break
			}
		}
	}
	for range 10 {
		round()
	}
	if n := testing.AllocsPerRun(100, round); n != 0 {
		t.Errorf("%v allocations", n)
	}
	q.trim()
	if cap(q.in)+cap(q.out) > 2*keepQueue {
		t.Errorf("an idle queue keeps %d bytes", cap(q.in)+cap(q.out))
	}
}
