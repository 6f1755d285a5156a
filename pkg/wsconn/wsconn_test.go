package wsconn

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// patience is how long a test waits for what must happen.
const patience = time.Minute

// counted is a connection that counts its Writes.
type counted struct {
	net.Conn
	writes atomic.Int64
}

func (c *counted) Write(b []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(b)
}

// NetConn returns the connection below.
func (c *counted) NetConn() net.Conn { return c.Conn }

type rawKey struct{}

// serve serves WebSockets on loopback until the test ends. Accepted ones come on the channel.
func serve(t *testing.T) (addr string, accepted <-chan *Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	conns := make(chan *Conn, 1)
	server := &http.Server{
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, rawKey{}, c) },
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/tunnel":
				if c, err := Accept(w, r, r.Context().Value(rawKey{}).(net.Conn)); err == nil {
					conns <- c
				}
			case "/moved":
				http.Redirect(w, r, "/tunnel", http.StatusFound)
			default:
				http.NotFound(w, r)
			}
		}),
	}
	served := make(chan struct{})
	go func() { server.Serve(ln); close(served) }()
	t.Cleanup(func() { server.Close(); <-served })
	return ln.Addr().String(), conns
}

// pair returns the two ends of a WebSocket.
func pair(t *testing.T, idle time.Duration) (client, server *Conn, raw *counted) {
	t.Helper()
	addr, accepted := serve(t)
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	raw = &counted{Conn: c}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if client, err = dial(ctx, raw, "ws://"+addr+"/tunnel", "test", idle); err != nil {
		t.Fatal(err)
	}
	server = <-accepted
	t.Cleanup(func() { client.Close(); server.Close() })
	return client, server, raw
}

// Megabytes pass both ways at once, in writes of any size, and a close is io.EOF.
func TestBytes(t *testing.T) {
	client, server, _ := pair(t, Idle)
	text := testkit.Random(3 << 20)
	send := func(c net.Conn) {
		for rest, n := text, 1; len(rest) > 0; n = n*3%50021 + 1 {
			k := min(n, len(rest))
			if _, err := c.Write(rest[:k]); err != nil {
				t.Error(err)
				return
			}
			rest = rest[k:]
		}
	}
	receive := func(c net.Conn) {
		got := make([]byte, len(text))
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, text) {
			t.Errorf("other bytes, %v", err)
		}
	}
	done := make(chan struct{})
	go func() { send(client); done <- struct{}{} }()
	go func() { send(server); done <- struct{}{} }()
	go func() { receive(client); done <- struct{}{} }()
	receive(server)
	for range 3 {
		<-done
	}
	server.Close()
	if n, err := client.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("after the close: %d, %v", n, err)
	}
}

// A deadline interrupts a waiting reader, also in the middle of a stream, and no byte is lost. A deadline in the
// past interrupts even when bytes are there, as that of a TCP connection does.
func TestReadDeadline(t *testing.T) {
	client, server, _ := pair(t, Idle)
	text := testkit.Random(200_000)
	go server.Write(text)
	var got []byte
	buf := make([]byte, 7001)
	interrupts := 0
	for len(got) < len(text) {
		client.SetReadDeadline(time.Unix(1, 0))
		if n, err := client.Read(buf); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("in the past: %d, %v", n, err)
		}
		interrupts++
		client.SetReadDeadline(time.Time{})
		n, err := client.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, buf[:n]...)
	}
	if !bytes.Equal(got, text) || interrupts < 10 {
		t.Errorf("other bytes after %d interrupts", interrupts)
	}
	// A reader that waits already.
	failed := make(chan error)
	go func() {
		_, err := client.Read(buf)
		failed <- err
	}()
	time.Sleep(10 * time.Millisecond)
	client.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if err := <-failed; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	var timeout net.Error
	if !errors.As(os.ErrDeadlineExceeded, &timeout) || !timeout.Timeout() {
		t.Error("not a timeout")
	}
	client.SetReadDeadline(time.Now().Add(time.Hour))
	go server.Write([]byte("x"))
	if n, err := client.Read(buf); n != 1 || err != nil {
		t.Errorf("after it: %d, %v", n, err)
	}
}

// An end that is silent sends empty messages, and the other end's reader does not see them. An end that sends
// needs none.
func TestKeepAlive(t *testing.T) {
	client, server, raw := pair(t, 200*time.Millisecond) // a flood is 100 in 20 s
	before := raw.writes.Load()
	testkit.Eventually(t, "the silent end has sent five times", func() bool { return raw.writes.Load() >= before+5 })
	go client.Write([]byte("x"))
	buf := make([]byte, 10)
	if n, err := server.Read(buf); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	busy, _, counted := pair(t, time.Hour)
	begun := counted.writes.Load()
	busy.Write([]byte("x"))
	time.Sleep(50 * time.Millisecond)
	if n := counted.writes.Load() - begun; n != 1 {
		t.Errorf("%d writes, want 1", n)
	}
}

// A peer that sends nothing but empty messages, pings, pongs or empty fragments, or a text, is cut off. Each end
// notices.
func TestFlood(t *testing.T) {
	// frames returns n empty frames, of which all but the first begin with the byte then.
	frames := func(n int, first, then byte) func(*Conn) error {
		return func(c *Conn) error {
			length := []byte{0} // without data
			if c.below != nil {
				length = []byte{1 << 7, 0, 0, 0, 0} // a client masks
			}
			all := append([]byte{first}, length...)
			for range n - 1 {
				all = append(append(all, then), length...)
			}
			_, err := c.Conn.Write(all)
			return err
		}
	}
	const final, binary, ping, pong = 1 << 7, 2, 9, 10
	for name, send := range map[string]func(*Conn) error{
		"empty": func(c *Conn) error {
			for range 2*maxEmpty + 1 {
				if err := c.ws.Write(context.Background(), websocket.MessageBinary, nil); err != nil {
					return err
				}
			}
			return nil
		},
		"pings":           frames(maxEmpty+1, final|ping, final|ping),
		"pongs":           frames(maxEmpty+1, final|pong, final|pong),
		"empty fragments": frames(maxOverhead, binary, 0),
		"text": func(c *Conn) error {
			return c.ws.Write(context.Background(), websocket.MessageText, []byte("hello"))
		},
	} {
		for _, end := range []string{"client", "server"} {
			t.Run(name+" from the "+end, func(t *testing.T) {
				from, to, _ := pair(t, Idle)
				if end == "server" {
					from, to = to, from
				}
				sent := make(chan struct{})
				go func() { defer close(sent); send(from) }()
				defer func() { to.Close(); <-sent }()
				to.SetReadDeadline(time.Now().Add(patience))
				if _, err := to.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("the reader gets %v", err)
				} else if name != "text" && !errors.Is(err, errFlood) {
					t.Errorf("the reader gets %v, want %v", err, errFlood)
				}
			})
		}
	}
}

// Data is no flood, in pieces of any size, and neither are some pings.
func TestNoFlood(t *testing.T) {
	client, server, _ := pair(t, Idle)
	text := testkit.Random(maxOverhead)
	for _, ends := range [][2]*Conn{{client, server}, {server, client}} {
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			for i := range text {
				if i%2000 == 0 { // the pongs to them count, too
					ends[0].ws.Ping(ctx)
				}
				if _, err := ends[0].Write(text[i : i+1]); err != nil {
					t.Error(err)
					return
				}
			}
		}()
		got := make([]byte, len(text))
		ends[1].SetReadDeadline(time.Now().Add(3 * patience))
		if _, err := io.ReadFull(ends[1], got); err != nil || !bytes.Equal(got, text) {
			t.Errorf("other bytes, %v", err)
		}
		<-sent
	}
}

// Close returns although the peer does not read and a Write waits, and both ends of every call return.
func TestCloseWhileStalled(t *testing.T) {
	client, server, _ := pair(t, Idle)
	wrote := make(chan error)
	go func() {
		for {
			if _, err := client.Write(make([]byte, 64<<10)); err != nil {
				wrote <- err
				return
			}
		}
	}()
	time.Sleep(200 * time.Millisecond) // the buffers of both kernels are full
	began := time.Now()
	client.Close()
	if took := time.Since(began); took > 4*time.Second { // package websocket would wait for five
		t.Errorf("Close took %s", took)
	}
	if err := <-wrote; err == nil {
		t.Error("no error")
	}
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.EOF) {
		t.Errorf("reading from a closed end: %v", err)
	}
	if _, err := io.Copy(io.Discard, server); err == nil {
		t.Log("the other end sees a clean end; TLS says whether it was one")
	}
}

// A stalled reader does not end a WebSocket: an empty message waits as long as any other.
func TestStalledReader(t *testing.T) {
	// A ping a second: while the reader stalls, more than maxEmpty of them would look like a flood to it afterwards.
	client, server, _ := pair(t, time.Second)
	const most = 64 << 20
	sent := make(chan int)
	go func() {
		n := 0
		for n < most {
			client.SetWriteDeadline(time.Now().Add(patience))
			k, err := client.Write(make([]byte, 16<<10))
			n += k
			if err != nil {
				t.Error(err)
				break
			}
		}
		sent <- n
	}()
	time.Sleep(7 * time.Second) // package websocket gives a ping or a pong 5 s
	n, err := io.CopyN(io.Discard, server, most)
	if want := <-sent; err != nil || int(n) != want {
		t.Errorf("%d bytes of %d, %v", n, want, err)
	}
}

// What opens no WebSocket is an error that says why, and a redirect is not followed.
func TestDialErrors(t *testing.T) {
	addr, _ := serve(t)
	for path, status := range map[string]int{"/": 404, "/moved": 302} {
		raw, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		_, err = Dial(t.Context(), raw, "ws://"+addr+path, "test")
		if e, ok := errors.AsType[*HandshakeError](err); !ok || e.Status != status || !strings.Contains(e.Text, "0") {
			t.Errorf("%s: %v", path, err)
		}
		raw.Close()
	}
	silent, other := net.Pipe()
	defer other.Close()
	go io.Copy(io.Discard, other)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, silent, "ws://cloud/tunnel", ""); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a silent server: %v", err)
	}
	silent.Close()
}

// TLS inside of the WebSocket works, and its clean end is one.
func TestTLSInside(t *testing.T) {
	ca := testca.New(t, "test")
	cert := ca.Pair(t, auth.Leaf{CommonName: "cloud", DNSNames: []string{"cloud"}, Server: true, TTL: time.Hour})
	client, server, _ := pair(t, Idle)
	text := testkit.Random(1 << 20)
	go func() {
		c := tls.Server(server, &tls.Config{Certificates: []tls.Certificate{cert}})
		c.Write(text)
		c.CloseWrite()
	}()
	c := tls.Client(client, &tls.Config{RootCAs: ca.Pool(), ServerName: "cloud"})
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, text) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}
