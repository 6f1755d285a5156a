//go:build unix

package listen

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// opened opens a listener for callers.
func opened(t *testing.T, s *Sockets, users Users, name Name) net.Listener {
	t.Helper()
	ln, err := s.Open(users, name, func() (net.Listener, error) { return net.Listen(name.Network, name.Address) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln
}

// accepted accepts in the background.
func accepted(ln net.Listener) <-chan error {
	result := make(chan error, 1) // capacity 1: the goroutine ends without a reader
	go func() {
		c, err := ln.Accept()
		if err == nil {
			c.Close()
		}
		result <- err
	}()
	return result
}

// acceptWaits reports whether the goroutine that accepted has started is blocked in Accept.
func acceptWaits() bool {
	stacks := make([]byte, 1<<20)
	for one := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
		if strings.Contains(one, "[IO wait") && strings.Contains(one, "listen.accepted.func") {
			return true
		}
	}
	return false
}

func connect(t *testing.T, addr net.Addr) {
	t.Helper()
	c, err := net.Dial(addr.Network(), addr.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
}

// want waits for the result of accepted; late: there is none yet.
func want(t *testing.T, what string, result <-chan error, expected error) {
	t.Helper()
	select {
	case err := <-result:
		if !errors.Is(err, expected) {
			t.Errorf("%s: %v, want %v", what, err, expected)
		}
	case <-time.After(10 * time.Second):
		t.Errorf("%s: nothing is accepted", what)
	}
}

// A connection that comes while the old process is paused, and the new one not yet serving, waits. It is lost neither
// if the new process serves, nor if the old one goes on.
func TestSockets(t *testing.T) {
	for _, name := range []Name{
		{"tcp", "127.0.0.1:0"}, {"unix", filepath.Join(t.TempDir(), "s")},
	} {
		t.Run(name.Network, func(t *testing.T) {
			old := NewSockets()
			ln := opened(t, old, Callers, name)
			waiting := accepted(ln)
			testkit.Eventually(t, "Accept waits in the kernel", acceptWaits)
			old.Pause(Callers)
			testkit.Eventually(t, "Pause interrupts it", func() bool { return !acceptWaits() })
			old.Resume(Callers)
			connect(t, ln.Addr())
			want(t, "the interrupted Accept goes on", waiting, nil)

			old.Pause(Callers)
			first := accepted(ln)
			connect(t, ln.Addr())
			select {
			case err := <-first:
				t.Fatalf("a paused listener accepts: %v", err)
			case <-time.After(50 * time.Millisecond):
			}
			old.Resume(Callers)
			want(t, "the old process goes on", first, nil)
			if old.LastAccepted(Callers).IsZero() || !old.LastAccepted(Edges).IsZero() {
				t.Error("an accepted caller is not noted, or is noted as an edge")
			}

			copies, err := old.Copies()
			if err != nil || len(copies) != 1 {
				t.Fatalf("%d copies, %v", len(copies), err)
			}
			next := Inherit(append(copies, Copy{Name{"tcp", "nobody"}, os.NewFile(uintptr(openNull(t)), "null")}))
			ln2 := opened(t, next, Callers, name)
			if ln2.Addr().String() != ln.Addr().String() {
				t.Errorf("the new process has %v, the old one %v", ln2.Addr(), ln.Addr())
			}
			second := accepted(ln2)
			old.Pause(Callers)
			connect(t, ln.Addr())
			select {
			case err := <-second:
				t.Fatalf("a process that does not serve accepts: %v", err)
			case <-next.Serving():
				t.Fatal("it serves")
			case <-time.After(50 * time.Millisecond):
			}
			if !next.LastAccepted(Callers).IsZero() {
				t.Error("a caller is noted that was not accepted")
			}
			next.Serve()
			want(t, "the new process serves", second, nil)
			if next.LastAccepted(Callers).IsZero() {
				t.Error("the new process does not note its callers")
			}
			<-next.Serving()
			old.Leave()
			<-old.Left()
			ln.Close()
			third := accepted(ln2)
			connect(t, ln2.Addr())
			want(t, "after the end of the old process", third, nil)
			if len(next.inherited) != 0 {
				t.Error("a socket that nobody has opened is not closed")
			}
			fourth := accepted(ln2)
			ln2.Close()
			want(t, "a listener that is closed", fourth, net.ErrClosed)
			if name.Network == "unix" {
				if _, err := os.Stat(name.Address); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("the file of the socket: %v, want none", err)
				}
			}
		})
	}
}

// A unix socket that the new process does not open is there until the new process serves.
func TestSocketsAnotherPath(t *testing.T) {
	dir := t.TempDir()
	before, after := Name{"unix", filepath.Join(dir, "before")}, Name{"unix", filepath.Join(dir, "after")}
	old := NewSockets()
	ln := opened(t, old, Operators, before)
	copies, err := old.Copies()
	if err != nil {
		t.Fatal(err)
	}
	next := Inherit(copies)
	ln2 := opened(t, next, Operators, after)
	connect(t, ln.Addr())
	next.Serve()
	old.Leave()
	ln.Close()
	if _, err := os.Stat(before.Address); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file of the old socket: %v, want none", err)
	}
	connect(t, ln2.Addr())
}

func openNull(t *testing.T) int {
	t.Helper()
	fd, err := syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// Closed sockets refuse callers. Their owner goes on until it closes its listener.
func TestSocketsClose(t *testing.T) {
	s := NewSockets()
	ln := opened(t, s, Callers, Name{"tcp", "127.0.0.1:0"})
	other := opened(t, s, Operators, Name{"tcp", "127.0.0.1:0"})
	result := accepted(ln)
	s.Close(Callers)
	if c, err := net.Dial("tcp", ln.Addr().String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a caller: %v, %v", c, err)
	}
	select {
	case err := <-result:
		t.Errorf("its owner notices: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	ln.Close()
	want(t, "its owner closes it", result, net.ErrClosed)

	late := opened(t, s, Callers, Name{"tcp", "127.0.0.1:0"})
	result = accepted(late)
	if c, err := net.Dial("tcp", late.Addr().String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a caller of a listener that is opened later: %v, %v", c, err)
	}
	select {
	case err := <-result:
		t.Errorf("the owner of a listener that is opened later notices: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	late.Close()
	want(t, "its owner closes the listener that was opened later", result, net.ErrClosed)
	served := accepted(other)
	connect(t, other.Addr())
	want(t, "other users", served, nil)
}

// Both processes have one UDP socket. A socket that its owner has closed has no copy.
func TestSocketsPacket(t *testing.T) {
	old := NewSockets()
	name := Name{"udp", "127.0.0.1:0"}
	open := func() (net.PacketConn, error) {
		return new(net.ListenConfig).ListenPacket(context.Background(), "udp", name.Address)
	}
	c, err := old.OpenPacket(name, open)
	if err != nil {
		t.Fatal(err)
	}
	copies, err := old.Copies()
	if err != nil || len(copies) != 1 {
		t.Fatalf("%d copies, %v", len(copies), err)
	}
	another := func() (net.PacketConn, error) { return nil, errors.New("it opens another one") }
	c2, err := Inherit(copies).OpenPacket(name, another)
	if err != nil {
		t.Fatal(err)
	}
	defer c2.Close()
	c.Close()
	if c2.LocalAddr().String() != c.LocalAddr().String() {
		t.Errorf("the new process has %v, the old one %v", c2.LocalAddr(), c.LocalAddr())
	}
	connect(t, c2.LocalAddr())
	if copies, err = old.Copies(); err != nil || len(copies) != 0 {
		t.Errorf("a closed socket: %v, %v", copies, err)
	}
}

// Without Sockets everything is opened as usual.
func TestNoSockets(t *testing.T) {
	var s *Sockets
	ln, err := s.Listen(t.Context(), Edges, net.ListenConfig{}, "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	<-s.Serving()
	if s.Left() != nil {
		t.Error("somebody may take over")
	}
}
