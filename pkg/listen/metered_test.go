package listen

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"

	"golang.org/x/net/http2"
)

// Streams and frames are found wherever reads are cut.
func TestMeteredCounts(t *testing.T) {
	var wire bytes.Buffer
	wire.WriteString(http2.ClientPreface)
	f := http2.NewFramer(&wire, nil)
	want := 0
	for i := range 50 {
		f.WriteData(1, false, bytes.Repeat([]byte{0, 0, 1, 6}, 2+100*i)) // what looks like a ping
		f.WriteData(1, false, []byte("tail"))
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte("xyz"), EndHeaders: true})
		f.WritePing(false, [8]byte{})
		f.WriteSettings()
		f.WriteSettings(http2.Setting{ID: 1, Val: 2})
		f.WriteData(1, true, nil)
		f.WriteDataPadded(1, false, []byte("x"), []byte{0})
		f.WriteContinuation(1, true, []byte("xyz"))
		f.WriteGoAway(0, 0, []byte("bye"))
		want += 9
	}
	for _, most := range []int{1, 2, 7, 8, 9, 10, 100, 1000, 1 << 20} {
		opened, got := 0, 0
		c := NewMetered(readConn{Reader: bytes.NewReader(wire.Bytes())}, 0, func(streams, frames int) bool {
			opened, got = opened+streams, got+frames
			return false
		})
		io.CopyBuffer(io.Discard, onlyReader{c}, make([]byte, most))
		if got != want || opened != 50 {
			t.Errorf("%d streams and %d frames are counted in reads of %d bytes, want 50 and %d", opened, got, most, want)
		}
	}
}

type readConn struct {
	net.Conn
	io.Reader
}

func (c readConn) Read(b []byte) (int, error) { return c.Reader.Read(b) }

type onlyReader struct{ io.Reader }

// After a flood, the server reads nothing of it.
func TestMeteredFlood(t *testing.T) {
	wire := bytes.NewBufferString(http2.ClientPreface)
	http2.NewFramer(wire, nil).WritePing(false, [8]byte{})
	c := NewMetered(readConn{Reader: wire}, 0, func(streams, frames int) bool { return streams == 0 && frames == 1 })
	for range 2 {
		if n, err := c.Read(make([]byte, 1000)); n != 0 || !errors.Is(err, ErrFlooded) {
			t.Errorf("%d bytes, %v", n, err)
		}
	}
}
