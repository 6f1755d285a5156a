package links

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// lossy is a long link that loses packets, and still has a rate.
var lossy = rig.Quality{Delay: 50 * time.Millisecond, Loss: 0.01, Rate: 20 * mbit}

// needBBR skips the test if programs in a network may not choose bbr.
func needBBR(t *testing.T, n *rig.Network) {
	t.Helper()
	var list []byte
	if err := n.Do(func() (err error) {
		list, err = os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(strings.Fields(string(list)), "bbr") {
		t.Skipf("this kernel has no bbr: %s", strings.TrimSpace(string(list)))
	}
}

// switched returns how many connections the two ends have switched to bbr.
func (f *far) switched() (n float64) {
	f.t.Helper()
	for _, m := range []*rig.Member{&f.replica.Member, f.member} {
		all, err := m.Metrics()
		if err != nil {
			f.t.Fatal(err)
		}
		n += all["tunnel_connections_switched_total"]
	}
	return n
}

// plain transfers over a TCP connection without a tunnel, in the networks' congestion control. It returns the
// bytes a second over d, after it has warmed up for as long.
func (f *far) plain(up bool, d time.Duration) float64 {
	f.t.Helper()
	from, to := f.edge, f.cloud
	address := cloudIP + ":0"
	if up {
		from, to, address = f.cloud, f.edge, edgeIP+":0"
	}
	var got atomic.Int64
	ln, err := to.Listen(address)
	if err != nil {
		f.t.Fatal(err)
	}
	address = testkit.ServeOn(f.t, ln, func(_ context.Context, c net.Conn) { io.Copy(counted{&got}, c) })
	c, err := dial(from, address)
	if err != nil {
		f.t.Fatal(err)
	}
	defer c.Close()
	sending := make(chan error, 1) // one send
	go func() { sending <- rig.SendNoise(c, 0, 1<<30) }()
	time.Sleep(d)
	began, before := time.Now(), got.Load()
	time.Sleep(d)
	rate := float64(got.Load()-before) / time.Since(began).Seconds()
	c.Close()
	<-sending
	return rate
}

// rate returns the bytes a second of all transfers together over d, after they have warmed up for as long.
func (b *bulk) rate(d time.Duration) float64 {
	time.Sleep(d)
	began, before := time.Now(), b.sum()
	time.Sleep(d)
	return float64(b.sum()-before) / time.Since(began).Seconds()
}

// sum returns how many bytes the transfers have brought.
func (b *bulk) sum() (n int64) {
	bytes := b.bytes
	if bytes == nil {
		b.f.mu.Lock()
		defer b.f.mu.Unlock()
		bytes = b.f.sunk
	}
	for _, one := range bytes {
		n += one.Load()
	}
	return n
}

// Over a long link that loses packets, a transfer is many times as fast as plain TCP with Reno, because its
// sender switches it to bbr in mid-life. The session's own connection is switched as well.
func TestLossyLink(t *testing.T) {
	t.Parallel()
	const d = 5 * time.Second
	for _, up := range []bool{false, true} {
		for _, own := range []bool{false, true} {
			t.Run(fmt.Sprintf("up %v, own %v", up, own), func(t *testing.T) {
				t.Parallel()
				f := newNetworks(t, lossy)
				needBBR(t, f.cloud)
				connections := ""
				if own {
					connections = "connections = 1"
				}
				f.startBoth(connections)
				f.warm()
				// Beside other tests, the emulator and both ends may lack processor time for one measurement.
				least, tries := 5.0, 1
				if !atLength() {
					least, tries = 2, 3
				}
				var ours, plain float64
				for range tries {
					b := f.bulk(1, up)
					ours = b.rate(d)
					b.stop()
					plain = f.plain(up, d)
					t.Logf("%.0f KiB/s, %.1f times plain TCP; %.0f connections were switched", ours/1024, ours/plain, f.switched())
					if ours >= least*plain {
						break
					}
				}
				if ours < least*plain {
					t.Errorf("%.0f bytes a second, plain TCP has %.0f", ours, plain)
				}
				if f.switched() == 0 {
					t.Error("no connection was switched")
				}
			})
		}
	}
}

// The same over a link without a rate: there, what loss costs plain TCP is all that counts. The rates need processor
// time for the emulator and both ends, so the test runs alone.
func TestLossyLinkWithoutRate(t *testing.T) {
	if !atLength() {
		t.Skip("takes three minutes, and wants the machine for itself: make links runs it")
	}
	const (
		d     = 20 * time.Second
		least = 40 // times plain TCP
	)
	for _, up := range []bool{false, true} {
		t.Run(fmt.Sprintf("up %v", up), func(t *testing.T) {
			f := newNetworks(t, rig.Quality{Delay: lossy.Delay, Loss: lossy.Loss})
			needBBR(t, f.cloud)
			f.startBoth("")
			f.warm()
			b := f.bulk(1, up)
			ours := b.rate(d)
			b.stop()
			plain := f.plain(up, d)
			t.Logf("%.0f KiB/s, %.1f times plain TCP with %s, which has %.0f KiB/s",
				ours/1024, ours/plain, congestion(), plain/1024)
			if ours < least*plain {
				t.Errorf("%.1f times plain TCP, want %d times at least", ours/plain, least)
			}
		})
	}
}

// A transfer that fills a router's queue is switched although it loses packets in its first moments alone, so that
// others do not wait behind that queue. With Reno its next losses come after 40 MiB.
func TestFullQueue(t *testing.T) {
	t.Parallel()
	for _, up := range []bool{false, true} {
		t.Run(fmt.Sprintf("up %v", up), func(t *testing.T) {
			f := newNetworks(t, rig.Quality{Delay: 10 * time.Millisecond, Rate: 20 * mbit})
			needBBR(t, f.cloud)
			f.startBoth("")
			// The session's own connection carries the first transfer, and a data connection the second.
			for done := range 2 {
				b := f.bulk(1, up)
				testkit.Eventually(t, "a connection is switched", func() bool { return f.switched() > float64(done) })
				if n := b.sum(); n > 20<<20 {
					t.Errorf("a connection was switched after %d bytes only", n)
				}
				b.stop()
			}
		})
	}
}

// Over a long link that loses nothing, no connection is switched.
func TestCleanLink(t *testing.T) {
	t.Parallel()
	d := 15 * time.Second
	if atLength() {
		d = 10 * time.Minute
	}
	f := newNetworks(t, rig.Quality{Delay: 50 * time.Millisecond})
	needBBR(t, f.cloud)
	f.startBoth("")
	f.warm()
	c, err := f.open(door)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var got atomic.Int64
	go io.Copy(counted{&got}, c) // it ends with the conn
	// An echo at a steady rate, a thirtieth of what fits, so that a busy machine loses nothing either.
	chunk := make([]byte, 64<<10)
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if _, err := c.Write(chunk); err != nil {
			t.Fatal(err)
		}
	}
	if n := f.switched(); n > 0 {
		t.Errorf("%.0f connections were switched", n)
	}
	if got.Load() == 0 {
		t.Error("nothing has come back")
	}
}
