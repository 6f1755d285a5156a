package relay

import (
	"context"
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A broken listener or socket ends the relay, because the kernel would still redirect connections to it.
func TestBrokenListener(t *testing.T) {
	for name, breaks := range map[string]func(d *door) error{
		"TCP": func(d *door) error {
			ln := d.listeners[0].(*net.TCPListener)
			return control(ln, func(fd int) error { return syscall.Shutdown(fd, syscall.SHUT_RD) })
		},
		"UDP": func(d *door) error {
			// A datagram to a closed port comes back as an error, and the next one as well.
			closed := &syscall.SockaddrInet4{Port: 1, Addr: [4]byte{127, 0, 0, 1}}
			return control(d.sockets[0], func(fd int) error {
				return errors.Join(syscall.Connect(fd, closed), syscall.Sendto(fd, []byte("x"), 0, closed))
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := newTestRelay(t, new(fake), newCloud())
			failed := make(chan error, 2)
			d := newDoor(t.Context(), r, func(err error) { failed <- err })
			if err := d.open(); err != nil {
				t.Fatal(err)
			}
			defer d.drain()
			defer d.close()
			if err := breaks(d); err != nil {
				t.Fatal(err)
			}
			select {
			case err := <-failed:
				if !strings.Contains(err.Error(), "127.0.0.1") {
					t.Errorf("the error does not name the listener: %v", err)
				}
			case <-time.After(10 * time.Second):
				t.Error("the relay goes on")
			}
		})
	}
}

// control calls f with the descriptor of a socket.
func control(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	if cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}

// brokenDNS is a DNS whose Serve fails.
type brokenDNS struct {
	DNS
	serve func() error
}

func (b brokenDNS) Serve(context.Context, *net.UDPConn, net.Listener) error { return b.serve() }

// panicking is a kernel that panics when the relay writes rules.
type panicking struct{ *fake }

func (p panicking) change(before, after rules) error {
	if len(after) > 0 {
		panic("this is a bug")
	}
	return p.fake.change(before, after)
}

// A failure that a further attempt cannot mend ends Run with an error. A panic does not end the process at once. The
// kernel redirects nothing more.
func TestRunFails(t *testing.T) {
	for name, c := range map[string]struct {
		kernel func(*fake) kernel
		serve  func() error // of DNS
		want   string
	}{
		"DNS fails":         {serve: func() error { return errors.New("bad descriptor") }, want: "bad descriptor"},
		"DNS panics":        {serve: func() error { panic("this is a bug") }, want: "this is a bug"},
		"the kernel panics": {kernel: func(f *fake) kernel { return panicking{f} }, want: "this is a bug"},
	} {
		t.Run(name, func(t *testing.T) {
			k, far := new(fake), newCloud()
			r, _ := newTestRelay(t, k, far)
			if c.serve != nil {
				r = withDNS(r, new(fake), "/etc/resolv.conf")
				r.cfg.DNS = brokenDNS{r.cfg.DNS, c.serve}
			}
			if c.kernel != nil {
				r.kernel = c.kernel(k)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1) // capacity 1: Run returns once
			go func() { ended <- r.Run(ctx) }()
			<-far.nexts
			changes := shop(t)
			changes.Set = append(changes.Set, kubeDNS(t, dns4.Addr().String()))
			far.batches <- batch(t, false, changes)
			select {
			case err := <-ended:
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("Run ends with %v", err)
				}
			case <-time.After(20 * time.Second):
				t.Error("the relay goes on")
				cancel()
				<-ended
			}
			if k.intact() {
				t.Error("the kernel still redirects connections")
			}
			if n := r.cfg.Counters.Panics.Load(); n > 0 != (c.want == "this is a bug") {
				t.Errorf("%d panics are counted", n)
			}
		})
	}
}
