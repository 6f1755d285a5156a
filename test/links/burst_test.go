package links

import (
	"fmt"
	"math"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/test/rig"
)

// burst opens conns through the door, so many at a time and, unless it is 0, so many in a
// second. Each echoes a byte and closes. It returns what went wrong, and how long the
// slowest took.
func (f *far) burst(conns, atOnce, perSecond int) (failed []error, slowest time.Duration) {
	var mu sync.Mutex // guards failed and slowest
	turns, dialling := make(chan struct{}, atOnce), make(chan struct{}, 16)
	var all sync.WaitGroup
	began := time.Now()
	for i := range conns {
		if perSecond > 0 {
			time.Sleep(time.Until(began.Add(time.Duration(i) * time.Second / time.Duration(perSecond))))
		}
		turns <- struct{}{}
		all.Go(func() {
			defer func() { <-turns }()
			start := time.Now()
			err := f.echoOne(dialling)
			mu.Lock()
			defer mu.Unlock()
			slowest = max(slowest, time.Since(start))
			if err != nil {
				failed = append(failed, err)
			}
		})
	}
	all.Wait()
	return failed, slowest
}

// echoOne opens a conn, has a byte echoed and closes it. dialling bounds the threads that
// connect: each is one of its own.
func (f *far) echoOne(dialling chan struct{}) error {
	dialling <- struct{}{}
	c, err := dial(f.cloud, f.door)
	<-dialling
	if err != nil {
		return err
	}
	defer c.Close()
	return echoByte(c)
}

func echoByte(c net.Conn) error {
	c.SetDeadline(time.Now().Add(20 * time.Second))
	_, err := c.Write([]byte("x"))
	if err == nil {
		_, err = c.Read(make([]byte, 1))
	}
	return err
}

// One node has 3,000 conns at once with the default limits, and each of them works.
func TestManyConns(t *testing.T) {
	f := newFar(t)
	var open [3000]net.Conn
	each := func(do func(i int) error) {
		var all sync.WaitGroup
		for first := range 64 {
			all.Go(func() {
				for i := first; i < len(open); i += 64 {
					if err := do(i); err != nil {
						t.Errorf("conn %d: %v", i, err)
						return
					}
				}
			})
		}
		all.Wait()
	}
	each(func(i int) (err error) {
		if open[i], err = dial(f.cloud, f.door); err != nil {
			return err
		}
		return echoByte(open[i])
	})
	if !t.Failed() {
		each(func(i int) error { return echoByte(open[i]) })
	}
	for _, c := range open {
		if c != nil {
			c.Close()
		}
	}
}

// Bursts and a high rate of conns to one node, over a far link and with the default limits:
// each is served, as TCP would serve it.
func TestBurst(t *testing.T) {
	f := newFar(t)
	f.link.Set(rig.Quality{Delay: 25 * time.Millisecond})
	possible := math.MaxInt // conns a second
	for _, tt := range []struct {
		name                     string
		conns, atOnce, perSecond int
	}{
		{"600 at once", 600, 600, 0},
		{"10,000, 500 at a time", 10_000, 500, 0},
		{"1,000 a second", 4000, 4000, 1000},
	} {
		began := time.Now()
		failed, slowest := f.burst(tt.conns, tt.atOnce, min(tt.perSecond, possible))
		// A busy machine may not serve so many a second: conns would then wait for longer than a front door permits.
		possible = int(float64(tt.conns)/time.Since(began).Seconds()) / 2
		t.Logf("%s: %d of %d were served in %v, the slowest took %v", tt.name, tt.conns-len(failed), tt.conns,
			time.Since(began).Round(time.Millisecond), slowest.Round(time.Millisecond))
		if len(failed) > 0 {
			t.Errorf("%s: %d of %d failed, such as: %v", tt.name, len(failed), tt.conns, failed[0])
		}
	}
	page, err := get(f.cloud, f.replica.Health(), "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	for _, limit := range []string{"conns", "opens", "dials"} {
		if line := fmt.Sprintf("tunnel_limited_total{limit=%q} 0", limit); !strings.Contains(page, "\n"+line+"\n") {
			t.Errorf("the metrics of the cloud have no line %q: a caller was refused", line)
		}
	}
}
