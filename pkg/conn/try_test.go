package conn

import (
	"io"
	"net"
	"sync/atomic"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
)

// roomyWire is a wire that says whether it has room.
type roomyWire struct {
	net.Conn
	room atomic.Bool
}

// HasRoom is what a data connection asks.
func (w *roomyWire) HasRoom() bool { return w.room.Load() }

// TrySend sends a message while ReadFrom waits for its source. It sends nothing that would have to wait.
func TestTrySend(t *testing.T) {
	p := newDataPair(t)
	defer p.close()
	wire := &roomyWire{Conn: p.edge.raw}
	p.edge.raw = wire
	f := p.next()
	source, feed := io.Pipe()
	sent := make(chan int64, 1)
	go func() {
		n, err := f.edge.ReadFrom(source)
		if err != nil {
			t.Error(err)
		}
		f.edge.CloseWrite()
		sent <- n
	}()
	buf := make([]byte, 100)
	read := func(want string) {
		t.Helper()
		if n, err := io.ReadFull(f.cloud, buf[:len(want)]); err != nil || string(buf[:n]) != want {
			t.Fatalf("got %q, %v; want %q", buf[:n], err, want)
		}
	}
	if f.edge.TrySend([]byte("the wire"), []byte("has no room")) {
		t.Error("it sends where it would have to wait")
	}
	wire.room.Store(true)
	if f.edge.TrySend(nil, make([]byte, maxTry+1)) {
		t.Error("it sends a large message")
	}
	feed.Write([]byte("read "))
	read("read ")
	testkit.Eventually(t, "it sends, since ReadFrom waits for its source", func() bool {
		return f.edge.TrySend([]byte("head "), []byte("body"))
	})
	read("head body")
	f.edge.out.sendMu.Lock()
	if f.edge.TrySend(nil, []byte("another goroutine sends")) {
		t.Error("it sends beside another goroutine")
	}
	f.edge.out.sendMu.Unlock()
	feed.Close()
	if n := <-sent; n != int64(len("read head body")) {
		t.Errorf("ReadFrom has counted %d bytes", n)
	}
	if f.edge.TrySend(nil, []byte("behind the end")) {
		t.Error("it sends behind the end of the bytes")
	}
	rest, err := io.ReadAll(f.cloud)
	if err != nil || len(rest) != 0 {
		t.Errorf("at the end come %q, %v", rest, err)
	}
	f.cloud.CloseWrite()
	if got, err := io.ReadAll(f.edge); err != nil || len(got) != 0 {
		t.Errorf("the cloud sends %q, %v", got, err)
	}
	f.cloud.Close()
	f.edge.Close()
	testkit.Eventually(t, "the data connection waits for the next conn", p.idle)
}
