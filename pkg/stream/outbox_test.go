package stream

import (
	"net"
	"sync"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Callers that leave all at once cost the node's other conns nothing: each of them
// makes a message, and a session that could not queue so many would end.
func TestManyResetsAtOnce(t *testing.T) {
	r := newRig(t, func(c *ServerConfig) { c.Limits.Opens = 100_000 })
	e := r.join("edge1", direct)
	other, far := r.pair("edge1")
	session := r.dir.Lookup("edge1")
	l := testkit.NewTarget(t)
	go func() {
		for {
			if _, err := l.Accept(); err != nil { // held by the kernel, and closed with the listener
				return
			}
		}
	}()
	for range 3 {
		conns := make([]net.Conn, 0, DefaultMaxConns)
		for range cap(conns) - 1 {
			conns = append(conns, r.mustDial("edge1", l.Address()))
		}
		var wg sync.WaitGroup
		for _, c := range conns {
			wg.Go(func() { tunnel.Reset(c) })
		}
		wg.Wait()
		r.eventually("only the other conn is left", func() bool { return session.Conns.Load() == 1 })
	}
	go far.Write([]byte("x"))
	if _, err := other.Read(make([]byte, 1)); err != nil {
		t.Errorf("another conn of the node: %v", err)
	}
	if r.dir.Lookup("edge1") != session {
		t.Error("the session has ended")
	}
	other.Close()
	far.Close()
	r.idle(e)
}

// A peer that does not read its control stream is given up, at a bound.
func TestOutboxIsBounded(t *testing.T) {
	var o outbox
	o.init()
	for i := range 3 {
		if !o.put(&tunnel.Message{}, 3) {
			t.Fatalf("message %d finds no room", i)
		}
	}
	if o.put(&tunnel.Message{}, 3) {
		t.Error("a fourth message finds room for three")
	}
	if n := len(o.take()); n != 3 {
		t.Errorf("%d messages come out, want 3", n)
	}
	if !o.put(&tunnel.Message{}, 3) {
		t.Error("an emptied outbox has no room")
	}
}
