package conn

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// lateWire delays its first large Write, as if the goroutine of the caller were not scheduled.
type lateWire struct {
	net.Conn
	begun, goOn chan struct{}
	late        bool
}

func (w *lateWire) Write(b []byte) (int, error) {
	if !w.late && len(b) > 1000 {
		w.late = true
		close(w.begun)
		<-w.goOn
	}
	return w.Conn.Write(b)
}

// An edge does not give the data connection back while a caller still sends: the bytes would follow the end of the
// conn, and might reach the next one.
func TestReturnAtEdgeWaitsForASender(t *testing.T) {
	p := newDataPair(t)
	defer p.close()
	late := &lateWire{Conn: p.edge.Conn, begun: make(chan struct{}), goOn: make(chan struct{})}
	p.edge.Conn = late
	f := p.next()
	read := make(chan error, 1)
	go func() {
		_, err := f.edge.ReadFrom(bytes.NewReader(make([]byte, 3000)))
		read <- err
	}()
	go f.edge.WriteTo(io.Discard) // the other half of a relay
	<-late.begun
	f.cloud.Close()
	for range 20 {
		time.Sleep(10 * time.Millisecond)
		if p.idle() {
			t.Fatal("the data connection waits for the next conn, and a caller of this one still sends")
		}
	}
	close(late.goOn)
	<-read
	testkit.Eventually(t, "the data connection waits for the next conn", p.idle)
}
