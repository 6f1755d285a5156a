package https

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

// helloBytes returns crypto/tls's ClientHello for a server name.
func helloBytes(t testing.TB, serverName string) []byte {
	t.Helper()
	var sent bytes.Buffer
	cfg := &tls.Config{ServerName: serverName, InsecureSkipVerify: true}
	tls.Client(&recorder{w: &sent}, cfg).Handshake()
	return sent.Bytes()
}

// recorder is a conn that records what is written. Reading returns io.EOF.
type recorder struct {
	net.Conn
	w io.Writer
}

func (r *recorder) Write(p []byte) (int, error)      { return r.w.Write(p) }
func (r *recorder) Read([]byte) (int, error)         { return 0, io.EOF }
func (r *recorder) Close() error                     { return nil }
func (r *recorder) SetDeadline(time.Time) error      { return nil }
func (r *recorder) SetWriteDeadline(time.Time) error { return nil }

func TestPeekHello(t *testing.T) {
	long := append([]byte{22, 3, 1, 0x40, 0, 1, 0, 0xff, 0xff}, make([]byte, 1<<14-4)...) // a ClientHello of 64 KiB
	for range 8 {
		long = append(append(long, 22, 3, 1, 0x40, 0), make([]byte, 1<<14)...)
	}
	fragmented := helloBytes(t, "edge1")
	body := fragmented[5:]
	fragmented = append([]byte{22, 3, 1, 0, 10}, body[:10]...)
	fragmented = append(append(fragmented, 22, 3, 1, byte((len(body)-10)>>8), byte(len(body)-10)), body[10:]...)
	for name, test := range map[string]struct {
		in   []byte
		want string
		ok   bool
	}{
		"name":         {helloBytes(t, "edge1"), "edge1", true},
		"case":         {helloBytes(t, "Edge1.Example"), "edge1.example", true},
		"no name":      {helloBytes(t, ""), "", true},
		"IP":           {helloBytes(t, "127.0.0.1"), "", true},
		"more follows": {append(helloBytes(t, "edge1"), "early data"...), "edge1", true},
		"fragmented":   {fragmented, "edge1", true},
		"too long":     {long, "", false},
		"cut":          {helloBytes(t, "edge1")[:50], "", false},
		"empty":        {nil, "", false},
		"HTTP":         {[]byte("GET / HTTP/1.1\r\n\r\n"), "", false},
		"SSH":          {[]byte("SSH-2.0-x\r\n"), "", false},
		"zeroes":       {make([]byte, 100), "", false},
	} {
		t.Run(name, func(t *testing.T) {
			h, read, err := peekHello(iotestOneByte{bytes.NewReader(test.in)})
			if (err == nil) != test.ok || h.serverName != test.want {
				t.Errorf("got %+v, %v", h, err)
			}
			if !bytes.HasPrefix(test.in, read) || len(read) > maxHello {
				t.Errorf("%d bytes read are not the input's", len(read))
			}
			if name == "HTTP" && !isPlainHTTP(err) {
				t.Errorf("HTTP was not recognised in %v", err)
			}
		})
	}
}

// iotestOneByte returns one byte at a time.
type iotestOneByte struct{ r io.Reader }

func (r iotestOneByte) Read(p []byte) (int, error) { return r.r.Read(p[:min(1, len(p))]) }

func TestPeekReplays(t *testing.T) {
	here, there := net.Pipe()
	sent := append(helloBytes(t, "edge1"), "and more"...)
	go there.Write(sent)
	c := &clientConn{Conn: here}
	h, err := c.peek(context.Background(), patience, func() {})
	must(t, err)
	got := make([]byte, len(sent))
	_, err = io.ReadFull(c, got)
	must(t, err)
	if h.serverName != "edge1" || !bytes.Equal(got, sent) {
		t.Errorf("name %q; %d of %d bytes come again", h.serverName, len(got), len(sent))
	}
}

func TestPeekGivesUp(t *testing.T) {
	t.Run("on silence", func(t *testing.T) {
		here, there := net.Pipe()
		defer there.Close()
		c := &clientConn{Conn: here}
		var timeout net.Error
		_, err := c.peek(context.Background(), 10*time.Millisecond, func() {})
		if !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("error %v is not a timeout", err)
		}
	})
	t.Run("when told to", func(t *testing.T) {
		here, there := net.Pipe()
		defer there.Close()
		c := &clientConn{Conn: here}
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(time.Millisecond, cancel)
		if _, err := c.peek(ctx, patience, func() {}); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
	})
}

func FuzzPeekClientHello(f *testing.F) {
	f.Add(helloBytes(f, "edge1"))
	f.Add(helloBytes(f, ""))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte{22, 3, 1, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, in []byte) {
		_, read, err := peekHello(bytes.NewReader(in))
		if !bytes.HasPrefix(in, read) || len(read) > maxHello {
			t.Errorf("%d bytes read are not the input's", len(read))
		}
		if err == nil && len(read) == 0 {
			t.Error("a hello was found in nothing")
		}
	})
}

func BenchmarkPeekClientHello(b *testing.B) {
	in := helloBytes(b, "edge1")
	b.ReportAllocs()
	for b.Loop() {
		peekHello(bytes.NewReader(in))
	}
}
