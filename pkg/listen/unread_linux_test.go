package listen

import (
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// unreadConn returns a TCP connection whose peer has sent bytes that have not been read.
func unreadConn(t *testing.T) net.Conn {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	peer, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peer.Close() })
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if Unread(c) {
		t.Error("bytes are unread before any was sent")
	}
	if _, err = peer.Write([]byte{22, 3}); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); !Unread(c); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the bytes do not arrive")
		}
	}
	return c
}

// A connection is not silent when its bytes wait in the kernel because this process reads late. It
// keeps its place and has its full time.
func TestUnreadConnIsNotSilent(t *testing.T) {
	const all = 10 * time.Second
	for _, tc := range []struct {
		name             string
		total, perSource int
		from             string // address of the newcomer
	}{
		{"among all", 1, 1, "192.0.2.1"},
		{"of one source", 10, 1, "127.0.0.1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := unreadConn(t)
			synctest.Test(t, func(t *testing.T) {
				lab := newLab(t, tc.total, tc.perSource)
				var late atomic.Int32
				p, _ := lab.Probation(c, Terms{
					Time: all, Bytes: 10,
					Late: func() { late.Add(1) }, Evicted: func() { t.Error("evicted") },
				})
				time.Sleep(evictAfter)
				lab.wantFull(tc.from, Full{Source: tc.perSource < tc.total})
				time.Sleep(FirstByte)
				synctest.Wait()
				if late.Load() != 0 {
					t.Error("closed as silent")
				}
				time.Sleep(all)
				synctest.Wait()
				if n := late.Load(); n != 1 {
					t.Errorf("after %s it was closed %d times", all, n)
				}
				p.Release()
			})
		})
	}
	t.Run("of the largest source", func(t *testing.T) {
		first, second := unreadConn(t), connFrom(AddrOf(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}))
		s, lost := NewStrangers(2, 2), ""
		s.Admit(first, func() { lost += "the one that spoke " })
		s.Admit(second, func() { lost += "the silent one" })
		s.Admit(connFrom(AddrOf(&net.TCPAddr{IP: net.IPv4(192, 0, 2, 1)})), nil)
		if lost != "the silent one" {
			t.Errorf("lost its place: %q", lost)
		}
	})
}
