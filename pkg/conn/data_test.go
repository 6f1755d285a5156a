package conn

import (
	"io"
	"net"
	"testing"
	"time"
)

// The cloud may open the next conn before the edge has noted that it has said end.
func TestOpenOvertakesTheEnd(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	d := NewData(near, near, new(Blocks))
	go func() {
		far.Write(append(header(FrameOpen, 2), "xx"...))
		far.Close()
	}()
	var l Lease
	d.LendAtEdge(&l)
	l.step(phaseAsked, phaseCarrying)
	if err := l.RecvMsg(new(incoming)); err != io.EOF { //nolint:errorlint // it is that itself
		t.Errorf("the conn before it gets %v, want EOF", err)
	}
	if typ, data, err := d.Receive(MaxControlFrame); typ != FrameOpen || string(data) != "xx" || err != nil {
		t.Errorf("the next one gets %#x, %q, %v", typ, data, err)
	}
}

// FuzzFrames has both ends receive what they like.
func FuzzFrames(f *testing.F) {
	f.Add([]byte{}, true)
	f.Add(append(header(frameChunk|flagFin, 3), "abc"...), true)
	f.Add(append(header(FrameOpen, 2), 0x12, 0x00), false)
	f.Add(header(frameChunk|flagEnd, 0), true)
	f.Fuzz(func(t *testing.T, data []byte, chunks bool) {
		near, far := net.Pipe()
		defer near.Close()
		go func() {
			far.Write(data)
			far.Close()
		}()
		near.SetDeadline(time.Now().Add(patience))
		l := NewData(near, near, new(Blocks)).LendAtCloud()
		left := len(data)
		for {
			n, err := 0, error(nil)
			if chunks {
				var in incoming
				err = l.RecvMsg(&in)
				n = in.data.Len()
				in.free()
			} else {
				var b []byte
				_, b, err = l.data.Receive(MaxControlFrame)
				n = len(b)
			}
			left -= frameHeader + n
			if err != nil {
				break
			}
			if left < 0 {
				t.Fatal("more came out than went in")
			}
		}
	})
}
