package links

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/test/rig"
)

const (
	mbit = 1e6 / 8 // bytes a second

	// openTime is how long a front door waits for a conn.
	openTime = 10 * time.Second
	// openInterval is how often a new conn is tried beside bulk transfers.
	openInterval = 2 * time.Second
)

// atLength reports whether the whole matrix is run, which takes minutes.
func atLength() bool { return os.Getenv("TUNNEL_LINKS") != "" }

// load is bulk transfers over a thin link.
type load struct {
	rate  int // of the link, in bytes a second
	conns int
	up    bool // from the caller to the target
	warm  bool // short conns came before
}

func (l load) String() string {
	direction := "down"
	if l.up {
		direction = "up"
	}
	if l.warm {
		direction += ", warm"
	}
	return fmt.Sprintf("%g Mbit/s, %d conns %s", float64(l.rate)/mbit, l.conns, direction)
}

// loads returns what to try, and for how long.
func loads() (all []load, d time.Duration) {
	if !atLength() {
		return []load{
			{rate: mbit / 10, conns: 4},
			{rate: mbit, conns: 110, up: true},
			{rate: 10 * mbit, conns: 110},
		}, 30 * time.Second
	}
	for _, rate := range []int{10 * mbit, mbit, mbit / 10} {
		for _, conns := range []int{4, 40, 110} {
			for _, up := range []bool{false, true} {
				all = append(all, load{rate: rate, conns: conns, up: up})
			}
		}
	}
	for _, rate := range []int{mbit, mbit / 10} {
		for _, conns := range []int{40, 110} {
			for _, up := range []bool{false, true} {
				all = append(all, load{rate: rate, conns: conns, up: up, warm: true})
			}
		}
	}
	return all, 2 * time.Minute
}

// However many bulk transfers share a thin link, its session lives, none of them is reset, and a
// new conn is open and has an answer within 10 s.
func TestBulkOverThinLink(t *testing.T) {
	t.Parallel()
	all, d := loads()
	for _, l := range all {
		t.Run(l.String(), func(t *testing.T) {
			t.Parallel()
			newFarOver(t, rig.Quality{Delay: 20 * time.Millisecond, Rate: l.rate}).bear(l, d)
		})
	}
}

// bear puts a load on the link, and tries new conns meanwhile.
func (f *far) bear(l load, d time.Duration) {
	if l.warm {
		f.warm()
	}
	began := time.Now()
	end := began.Add(d)
	b := f.bulk(l.conns, l.up)
	var opened []time.Duration
	var failed []error
	limit := openTime
	if !atLength() {
		limit *= 3 // other tests may take processor time from both ends and from the link
	}
	for time.Now().Before(end) {
		tried := time.Now()
		c, err := f.open(door)
		if err == nil {
			err = answers(c, limit-time.Since(tried))
			c.Close()
		}
		took := time.Since(tried)
		opened = append(opened, took)
		if err != nil {
			failed = append(failed, fmt.Errorf("a new conn, %v after the start: %w after %v",
				tried.Sub(began).Round(time.Second), err, took.Round(time.Millisecond)))
		}
		time.Sleep(openInterval - min(took, openInterval))
	}
	share, took := b.stop()
	nothing := 0 // transfers that have had nothing
	for nothing < len(share) && share[nothing] == 0 {
		nothing++
	}
	slices.Sort(opened)
	f.t.Logf("%v for %v: %d new conns, median %v, longest %v; a transfer had from %d to %d bytes; all together %.0f%% "+
		"of the link",
		l, took.Round(time.Second), len(opened), opened[len(opened)/2].Round(time.Millisecond),
		opened[len(opened)-1].Round(time.Millisecond),
		share[0], share[len(share)-1], 100*float64(sum(share))/took.Seconds()/float64(l.rate))
	if len(failed) > 0 {
		f.t.Errorf("%d new conns are not open in time: %v", len(failed), errors.Join(failed...))
	}
	if n := strings.Count(f.member.Log.String(), "session ended"); n > 0 {
		f.t.Errorf("the session has ended %d times", n)
	}
	permitted := 0
	if !atLength() {
		permitted = len(share) / 10 // on a busy machine, some began too late
	}
	if l.conns*4 < int(took.Seconds())*l.rate>>10 && nothing > permitted { // 4 KiB for each fit
		f.t.Errorf("%d transfers have had nothing", nothing)
	}
}

func sum(all []int64) (n int64) {
	for _, one := range all {
		n += one
	}
	return n
}

// warm has short conns come and go, so that the session has data connections.
func (f *far) warm() {
	for range 3 {
		var asking sync.WaitGroup
		for range 8 {
			asking.Go(func() {
				if err := f.exchange(100, openTime); err != nil {
					f.t.Errorf("before the load: %v", err)
				}
			})
		}
		asking.Wait()
	}
}

// open dials a front door.
func (f *far) open(name string) (net.Conn, error) {
	return dial(f.cloud, f.replica.Door(name))
}

// answers returns nil when an echo comes back in time.
func answers(c net.Conn, limit time.Duration) error {
	c.SetDeadline(time.Now().Add(limit))
	defer c.SetDeadline(time.Time{})
	if _, err := c.Write([]byte("?")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

// bulk is transfers without end.
type bulk struct {
	f       *far
	began   time.Time
	conns   []net.Conn
	bytes   []*atomic.Int64 // that each has brought; nil: they are those of the sink
	ended   atomic.Bool     // by stop
	running sync.WaitGroup
}

// bulk starts n transfers at once.
func (f *far) bulk(n int, up bool) *bulk {
	f.t.Helper()
	b := &bulk{f: f, began: time.Now()}
	name := source
	if up {
		name = sink
	}
	for range n {
		c, err := f.open(name)
		if err != nil {
			f.t.Fatal(err)
		}
		b.conns = append(b.conns, c)
	}
	for i, c := range b.conns {
		got := new(atomic.Int64)
		if !up {
			b.bytes = append(b.bytes, got)
		}
		b.running.Go(func() {
			var err error
			if up {
				err = rig.SendNoise(c, 0, 1<<30)
			} else {
				_, err = io.Copy(counted{got}, c)
			}
			if !b.ended.Load() {
				f.t.Errorf("transfer %d has ended after %v: %v", i, time.Since(b.began).Round(time.Second), err)
			}
		})
	}
	return b
}

// stop ends the transfers. It returns how many bytes each has brought, the least first, and how
// long they lasted.
func (b *bulk) stop() (share []int64, took time.Duration) {
	took = time.Since(b.began)
	bytes := b.bytes
	if bytes == nil {
		b.f.mu.Lock()
		bytes = b.f.sunk
		b.f.mu.Unlock()
	}
	for _, n := range bytes {
		share = append(share, n.Load())
	}
	for len(share) < len(b.conns) {
		share = append(share, 0) // the target has not seen it
	}
	slices.Sort(share)
	b.ended.Store(true)
	for _, c := range b.conns {
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
	b.running.Wait()
	return share, took
}

// A link may be cut for up to 10 s, as it is when a phone changes its cell: no conn is reset,
// whatever it is doing, and everything goes on.
func TestShortCut(t *testing.T) {
	t.Parallel()
	cuts := []time.Duration{4 * time.Second, 10 * time.Second}
	if atLength() {
		cuts = []time.Duration{2 * time.Second, 4 * time.Second, 6 * time.Second, 8 * time.Second, 10 * time.Second,
			10 * time.Second, 10 * time.Second}
	}
	for name, l := range map[string]struct {
		q       rig.Quality
		up      bool
		retries string // net.ipv4.tcp_retries2 of both ends; "": Linux' own 15
	}{
		"few retries": {q: rig.Quality{Delay: 20 * time.Millisecond, Rate: 10 * mbit}, retries: "4"},
		"down":        {q: rig.Quality{Delay: 20 * time.Millisecond, Rate: 10 * mbit}},
		"up":          {q: rig.Quality{Delay: 20 * time.Millisecond, Rate: 10 * mbit}, up: true},
		"idle":        {q: good},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFarOver(t, l.q)
			if l.retries != "" {
				for _, n := range []*rig.Network{f.cloud, f.edge} {
					if err := n.Do(func() error {
						return os.WriteFile("/proc/sys/net/ipv4/tcp_retries2", []byte(l.retries), 0)
					}); err != nil {
						t.Fatal(err)
					}
				}
			}
			f.warm()
			var b *bulk
			if name != "idle" {
				b = f.bulk(12, l.up) // some by data connections, others by the session's own
			}
			var quiet []net.Conn
			for range 12 {
				c, err := f.open(door)
				if err == nil {
					err = answers(c, openTime)
				}
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				quiet = append(quiet, c)
			}
			for i, d := range cuts {
				cut := l.q
				cut.Cut = true
				time.Sleep(time.Duration(i) * 1100 * time.Millisecond) // at another moment between two pings
				f.link.Set(cut)
				time.Sleep(d)
				f.link.Set(l.q)
				healed := time.Now()
				for j, c := range quiet {
					if err := answers(c, noticed); err != nil {
						t.Fatalf("after a cut of %v: conn %d: %v", d, j, err)
					}
				}
				t.Logf("a cut of %v: all answer %v after it", d, time.Since(healed).Round(time.Millisecond))
			}
			if b != nil {
				b.stop()
			}
			if n := strings.Count(f.member.Log.String(), "session ended"); n > 0 {
				t.Errorf("the session has ended %d times", n)
			}
		})
	}
}
