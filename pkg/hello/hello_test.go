package hello

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"slices"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
)

func TestPeek(t *testing.T) {
	long := append([]byte{22, 3, 1, 0x40, 0, 1, 0, 0xff, 0xff}, make([]byte, 1<<14-4)...) // a ClientHello of 64 KiB
	for range 8 {
		long = append(append(long, 22, 3, 1, 0x40, 0), make([]byte, 1<<14)...)
	}
	fragmented := testkit.ClientHello("edge1")
	body := fragmented[5:]
	fragmented = append([]byte{22, 3, 1, 0, 10}, body[:10]...)
	fragmented = append(append(fragmented, 22, 3, 1, byte((len(body)-10)>>8), byte(len(body)-10)), body[10:]...)
	for name, test := range map[string]struct {
		in   []byte
		want string
		ok   bool
	}{
		"name":         {testkit.ClientHello("edge1"), "edge1", true},
		"case":         {testkit.ClientHello("Edge1.Example"), "edge1.example", true},
		"no name":      {testkit.ClientHello(""), "", true},
		"IP":           {testkit.ClientHello("127.0.0.1"), "", true},
		"more follows": {append(testkit.ClientHello("edge1"), "early data"...), "edge1", true},
		"fragmented":   {fragmented, "edge1", true},
		"too long":     {long, "", false},
		"cut":          {testkit.ClientHello("edge1")[:50], "", false},
		"empty":        {nil, "", false},
		"HTTP":         {[]byte("GET / HTTP/1.1\r\n\r\n"), "", false},
		"SSH":          {[]byte("SSH-2.0-x\r\n"), "", false},
		"zeroes":       {make([]byte, 100), "", false},
	} {
		t.Run(name, func(t *testing.T) {
			h, read, err := Peek(oneByte{bytes.NewReader(test.in)})
			if (err == nil) != test.ok || h.ServerName != test.want {
				t.Errorf("got %+v, %v", h, err)
			}
			if !bytes.HasPrefix(test.in, read) || len(read) > MaxLen {
				t.Errorf("%d bytes read are not the input's", len(read))
			}
			if name == "HTTP" && !IsPlainHTTP(err) {
				t.Errorf("HTTP was not recognised in %v", err)
			}
		})
	}
}

func TestProtocols(t *testing.T) {
	for _, want := range [][]string{{"h2"}, {"h2", "http/1.1"}, nil} {
		h, _, err := Peek(bytes.NewReader(testkit.ClientHello("edge1", want...)))
		if err != nil || !slices.Equal(h.Protocols, want) {
			t.Errorf("%v: got %v, %v", want, h.Protocols, err)
		}
	}
}

// oneByte returns one byte at a time.
type oneByte struct{ r io.Reader }

func (r oneByte) Read(p []byte) (int, error) { return r.r.Read(p[:min(1, len(p))]) }

// A connection returns the ClientHello once more, however it is read, and then what follows.
func TestConn(t *testing.T) {
	for name, read := range map[string]func(c *Conn) ([]byte, error){
		"Read": func(c *Conn) ([]byte, error) { return io.ReadAll(struct{ io.Reader }{c}) },
		"WriteTo": func(c *Conn) ([]byte, error) {
			var b bytes.Buffer
			_, err := c.WriteTo(&b)
			return b.Bytes(), err
		},
		"Again": func(c *Conn) ([]byte, error) {
			h, first := c.Again()
			if h.ServerName != "edge1" {
				t.Errorf("the name is %q", h.ServerName)
			}
			rest, err := io.ReadAll(c)
			return append(slices.Clone(first), rest...), err
		},
	} {
		t.Run(name, func(t *testing.T) {
			sent := append(testkit.ClientHello("edge1"), "and more"...)
			addr := testkit.Serve(t, func(c *net.TCPConn) {
				c.Write(sent)
				c.CloseWrite()
				io.Copy(io.Discard, c)
			})
			dialled, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer dialled.Close()
			h, peeked, err := Peek(oneByte{dialled})
			if err != nil {
				t.Fatal(err)
			}
			remote := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 1}
			c := NewConn(dialled.(*net.TCPConn), remote, h, peeked)
			if !c.HasUnread() || c.RemoteAddr() != net.Addr(remote) {
				t.Errorf("unread bytes: %t; remote address %v", c.HasUnread(), c.RemoteAddr())
			}
			got, err := read(c)
			if err != nil || !bytes.Equal(got, sent) {
				t.Errorf("%d bytes and %v, want %d bytes", len(got), err, len(sent))
			}
			if c.HasUnread() {
				t.Error("unread bytes are left")
			}
		})
	}
}

func FuzzPeekClientHello(f *testing.F) {
	f.Add(testkit.ClientHello("edge1", "h2"))
	f.Add(testkit.ClientHello(""))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte{22, 3, 1, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, in []byte) {
		_, read, err := Peek(bytes.NewReader(in))
		if !bytes.HasPrefix(in, read) || len(read) > MaxLen {
			t.Errorf("%d bytes read are not the input's", len(read))
		}
		if err == nil && len(read) == 0 {
			t.Error("a hello was found in nothing")
		}
	})
}

func BenchmarkPeekClientHello(b *testing.B) {
	in := testkit.ClientHello("edge1")
	b.ReportAllocs()
	for b.Loop() {
		Peek(bytes.NewReader(in))
	}
}

// A ClientHello with very many protocols is refused, and its connection does not keep the protocols.
func TestManyProtocols(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	defer far.Close()
	protocols := make([]string, 10_000)
	for i := range protocols {
		protocols[i] = "x"
	}
	go tls.Client(far, &tls.Config{NextProtos: protocols, InsecureSkipVerify: true}).Handshake()
	if h, _, err := Peek(near); err == nil || len(h.Protocols) > 0 {
		t.Errorf("%d protocols, %v", len(h.Protocols), err)
	}
	c := NewConn(nil, nil, Hello{Protocols: protocols[:1]}, nil)
	if h, _ := c.Again(); len(h.Protocols) != 1 || len(c.hello.Protocols) != 0 {
		t.Errorf("again %v, kept %v", h, c.hello)
	}
}
