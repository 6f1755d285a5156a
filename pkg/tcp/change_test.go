package tcp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
)

// told returns a target that tells each caller its name, and then echoes.
func told(t *testing.T, name string) string {
	t.Helper()
	return target(t, func(c *net.TCPConn) {
		io.WriteString(c, name)
		echo(c)
	})
}

// change changes the listeners of the running front door.
func (r *running) change(listeners ...Listener) error {
	r.t.Helper()
	p, err := r.door.Prepare(r.t.Context(), listeners)
	if err == nil {
		p.Commit()
	}
	return err
}

// wantHears connects to addr and expects the name of its target.
func wantHears(t *testing.T, addr, want string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	b := make([]byte, len(want))
	if _, err = io.ReadFull(c, b); err != nil || string(b) != want {
		t.Fatalf("%s leads to %q, %v; want %q", addr, b, err, want)
	}
	return c
}

// wantLives expects an echo of a conn that a change must not touch.
func wantLives(t *testing.T, c net.Conn) {
	t.Helper()
	b := make([]byte, 1)
	if _, err := io.WriteString(c, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, b); err != nil || b[0] != 'x' {
		t.Fatalf("a live conn answers %q, %v", b, err)
	}
}

func TestListenersChange(t *testing.T) {
	first, second, third := testkit.FreeAddress(t), testkit.FreeAddress(t), testkit.FreeAddress(t)
	a, b := told(t, "target a"), told(t, "target b")
	r := run(t, Listener{Listen: first, Target: a}, new(tunnelDouble))
	if err := r.change(Listener{Listen: first, Target: a}, Listener{Listen: second, Target: a}); err != nil {
		t.Fatal(err)
	}
	kept, removed := wantHears(t, first, "target a"), wantHears(t, second, "target a")

	if err := r.change(Listener{Listen: first, Target: b}, Listener{Listen: third, Target: b}); err != nil {
		t.Fatal(err)
	}
	wantHears(t, first, "target b")
	wantHears(t, third, "target b")
	if _, err := net.Dial("tcp", second); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the removed listener answers with %v", err)
	}
	wantLives(t, kept)
	wantLives(t, removed)
	if n := len(r.door.Addrs()); n != 2 || r.door.Idle() {
		t.Errorf("%d listeners are open, idle: %t", n, r.door.Idle())
	}

	if err := r.change(); err != nil || !r.door.Idle() || r.door.Ready() != nil {
		t.Errorf("without a listener: %v, idle %t, %v", err, r.door.Idle(), r.door.Ready())
	}
	wantLives(t, kept)
	if err := r.change(Listener{Listen: first, Target: a}); err != nil {
		t.Fatal(err)
	}
	wantHears(t, first, "target a")
}

// An allow list that changes counts for the next callers.
func TestAllowListChanges(t *testing.T) {
	addr := testkit.FreeAddress(t)
	a := told(t, "target a")
	r := run(t, Listener{Listen: addr, Target: a}, new(tunnelDouble))
	live := wantHears(t, addr, "target a")
	others, err := auth.ParseSources([]string{"192.0.2.0/24"})
	if err != nil {
		t.Fatal(err)
	}
	if err = r.change(Listener{Listen: addr, Target: a, Allow: others}); err != nil {
		t.Fatal(err)
	}
	r.wantTurnedAway("allow names other addresses")
	wantLives(t, live)
	if err = r.change(Listener{Listen: addr, Target: a}); err != nil {
		t.Fatal(err)
	}
	wantHears(t, addr, "target a")
}

// A change that fails, or is aborted, changes nothing.
func TestFailedChange(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	addr, free := testkit.FreeAddress(t), testkit.FreeAddress(t)
	a, b := told(t, "target a"), told(t, "target b")
	r := run(t, Listener{Listen: addr, Target: a}, new(tunnelDouble))
	unchanged := func(why string) {
		t.Helper()
		wantHears(t, addr, "target a")
		if _, err := net.Dial("tcp", free); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: the new listener is open: %v", why, err)
		}
	}
	err = r.change(Listener{Listen: addr, Target: b}, Listener{Listen: free, Target: b},
		Listener{Listen: taken.Addr().String(), Target: b}, Listener{Listen: "0.0.0.0:1", Target: b})
	for _, want := range []string{taken.Addr().String(), "address already in use; stop what listens there", "tcpallow"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the change fails with %v; want %q in it", err, want)
		}
	}
	unchanged("it failed")

	p, err := r.door.Prepare(t.Context(), []Listener{{Listen: addr, Target: b}, {Listen: free, Target: b}})
	if err != nil {
		t.Fatal(err)
	}
	p.Abort()
	unchanged("it was aborted")

	// A new address that overlaps an old one: the old listener is opened again.
	_, port, _ := net.SplitHostPort(addr)
	all, _ := auth.ParseSources([]string{"127.0.0.0/8"})
	wide := Listener{Listen: "0.0.0.0:" + port, Target: b, Allow: all}
	if err = r.change(wide, Listener{Listen: taken.Addr().String(), Target: b}); err == nil {
		t.Fatal("a change to a port that is taken works")
	}
	unchanged("it failed after the old listener was closed")
	if err = r.change(wide); err != nil {
		t.Fatal(err)
	}
	wantHears(t, addr, "target b")
}

// A change before Run is for Run to open, and a change while Run stops fails.
func TestChangeBeforeAndAfterRun(t *testing.T) {
	addr := testkit.FreeAddress(t)
	a := told(t, "target a")
	r := run(t, Listener{Listen: testkit.FreeAddress(t), Target: "127.0.0.1:1"}, new(tunnelDouble), func(f *FrontDoor) {
		p, err := f.Prepare(t.Context(), []Listener{{Listen: addr, Target: a}})
		if err != nil {
			t.Fatal(err)
		}
		p.Commit()
	})
	live := wantHears(t, addr, "target a")
	r.stop()
	for end := time.Now().Add(patience); r.door.Ready() == nil && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if err := r.change(Listener{Listen: addr, Target: a}); err == nil || !strings.Contains(err.Error(), "about to close") {
		t.Errorf("a change while the front door stops: %v", err)
	}
	live.Close()
}

// No caller is refused while the line of a listener changes, and other listeners come and go.
func TestNobodyIsRefused(t *testing.T) {
	addr, other := testkit.FreeAddress(t), testkit.FreeAddress(t)
	targets := []string{told(t, "target a"), told(t, "target b")}
	r := run(t, Listener{Listen: addr, Target: targets[0]}, new(tunnelDouble))
	stop, done := make(chan struct{}), make(chan error, 1)
	var callers atomic.Int64
	go func() {
		done <- func() error {
			for {
				select {
				case <-stop:
					return nil
				default:
				}
				c, err := net.Dial("tcp", addr)
				if err != nil {
					return err
				}
				c.SetDeadline(time.Now().Add(patience))
				b := make([]byte, len("target a"))
				if _, err = io.ReadFull(c, b); err != nil || !strings.HasPrefix(string(b), "target ") {
					return fmt.Errorf("%q: %w", b, err)
				}
				c.Close()
				callers.Add(1)
			}
		}()
	}()
	for i := range 50 {
		listeners := []Listener{{Listen: addr, Target: targets[i%2]}, {Listen: other, Target: targets[0]}}
		if err := r.change(listeners[:1+i/2%2]...); err != nil {
			t.Fatal(err)
		}
		for n := callers.Load(); callers.Load() < n+2 && len(done) == 0; {
			time.Sleep(time.Millisecond)
		}
	}
	close(stop)
	if err := <-done; err != nil {
		t.Errorf("caller %d: %v", callers.Load(), err)
	}
}
