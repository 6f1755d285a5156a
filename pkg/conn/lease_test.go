package conn

import (
	"bytes"
	"io"
	"net"
	"strings"
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

// writerFunc is a writer that calls a function.
type writerFunc func(b []byte)

func (f writerFunc) Write(b []byte) (int, error) {
	f(b)
	return len(b), nil
}

// A conn whose caller sends its next request while the answer is written has a request without an answer.
func TestAnsweredByTheLastBytes(t *testing.T) {
	p := newDataPair(t)
	defer p.close()
	f := p.next()
	defer f.edge.Close()
	defer f.cloud.Close()
	f.cloud.asked = true
	go func() {
		f.edge.Write([]byte("answer"))
		f.edge.CloseWrite()
	}()
	_, err := f.cloud.WriteTo(writerFunc(func([]byte) {
		if _, err := f.cloud.ReadFrom(strings.NewReader("request")); err != nil {
			t.Error(err)
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := f.cloud.Answered(); ok {
		t.Error("a request without an answer counts as answered")
	}
}

// An answer that comes while a request still waits to be sent is not the answer to that request.
func TestRequestThatWaitsIsNotAnswered(t *testing.T) {
	p := newDataPair(t)
	defer p.close()
	late := &lateWire{Conn: p.cloud.Conn, begun: make(chan struct{}), goOn: make(chan struct{})}
	p.cloud.Conn = late
	f := p.next()
	defer f.edge.Close()
	defer f.cloud.Close()
	f.cloud.asked = true
	sent := make(chan error, 1)
	go func() {
		_, err := f.cloud.ReadFrom(bytes.NewReader(make([]byte, 3000)))
		sent <- err
	}()
	<-late.begun
	go func() {
		f.edge.Write([]byte("answer"))
		f.edge.CloseWrite()
	}()
	if _, err := f.cloud.WriteTo(io.Discard); err != nil {
		t.Error(err)
	}
	if _, ok := f.cloud.Answered(); ok {
		t.Error("a request that waits counts as answered")
	}
	time.Sleep(longSend)
	close(late.goOn)
	if err := <-sent; err != nil {
		t.Error(err)
	}
	if _, ok := f.cloud.Answered(); ok {
		t.Error("a request that was sent last counts as answered")
	}
}
