package egress

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// ask sends a request, and any bytes right after it, and returns the answer.
func (r *rig) ask(t *testing.T, request string) (*net.UnixConn, *bufio.Reader, *http.Response) {
	t.Helper()
	c, err := net.Dial("unix", r.connect)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	go io.WriteString(c, request)
	br := bufio.NewReader(c)
	res, err := http.ReadResponse(br, &http.Request{Method: http.MethodConnect})
	if err != nil {
		t.Fatalf("%.60q: %v", request, err)
	}
	return c.(*net.UnixConn), br, res
}

// connect returns a request as kube-apiserver sends it.
func connect(addr string) string {
	return fmt.Sprintf("CONNECT %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", addr)
}

func TestConnectHalfClose(t *testing.T) {
	r := newRig(t)
	sent := testkit.Random(4<<20 + 3)
	// The target answers after the end of the request.
	addr := testkit.Serve(t, func(c *net.TCPConn) {
		b, _ := io.ReadAll(c)
		c.Write(b)
	})
	c, br, res := r.ask(t, connect(addr))
	if res.StatusCode != 200 {
		t.Fatal(res.Status)
	}
	go func() {
		c.Write(sent)
		c.CloseWrite()
	}()
	if got, err := io.ReadAll(br); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d of %d bytes came back: %v", len(got), len(sent), err)
	}
}

// The answer is exactly what kube-apiserver expects. It comes without bytes of the target.
func TestConnectAnswerStandsAlone(t *testing.T) {
	r := newRig(t)
	addr := testkit.Serve(t, func(c *net.TCPConn) {
		io.WriteString(c, "220 I speak first")
		io.Copy(io.Discard, c)
	})
	const answer, first = "HTTP/1.1 200 Connection Established\r\n\r\n", "220 I speak first"
	for quick, started := 0, time.Now(); quick < 20 && time.Since(started) < 10*time.Second; {
		c, err := net.Dial("unix", r.connect)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		asked := time.Now()
		io.WriteString(c, connect(addr))
		b := make([]byte, 1000)
		n, err := c.Read(b)
		got := string(b[:n])
		inTime := time.Since(asked) < answerGapTime // else the target's bytes may be there as well
		if err == nil && got == answer {
			n, err = c.Read(b)
			got += string(b[:n])
		} else if inTime {
			t.Fatalf("%q, %v", got, err)
		}
		if err != nil || got != answer+first {
			t.Fatalf("%q, %v", got, err)
		}
		c.Close()
		if inTime {
			quick++
		}
	}
}

func TestConnectPipelined(t *testing.T) {
	r := newRig(t)
	early := string(testkit.Random(30_000))
	c, br, _ := r.ask(t, connect(testkit.Serve(t, testkit.Echo))+early)
	c.CloseWrite()
	if got, err := io.ReadAll(br); err != nil || string(got) != early {
		t.Errorf("%d of %d bytes came back: %v", len(got), len(early), err)
	}
}

func TestConnectRefusals(t *testing.T) {
	r := newRig(t)
	refuse := func(code tunnel.Code) func() {
		return func() { r.nodes.refuse[""] = tunnel.Refusef(code, "so it is") }
	}
	nothing := func() {}
	for name, tc := range map[string]struct {
		before  func()
		request string
		status  int
		text    string
	}{
		"another method": {nothing, "GET / HTTP/1.1\r\nHost: x\r\n\r\n", 405,
			"this proxy only supports CONNECT passthrough"},
		"no node": {refuse(tunnel.NoSuchNode), connect("10.0.0.1:1"), 500,
			"currently no tunnels available: No agent available"},
		"timeout":        {refuse(tunnel.Timeout), connect("10.0.0.1:1"), 504, "so it is"},
		"overloaded":     {refuse(tunnel.Overloaded), connect("10.0.0.1:1"), 503, "so it is"},
		"denied":         {refuse(tunnel.Denied), connect("10.0.0.1:1"), 502, "so it is"},
		"not an address": {nothing, connect("nowhere"), 502, "not host:port"},
		"no HTTP":        {nothing, "SSH-2.0-hello\r\n\r\n", 502, "not a request"},
		"a head of 1 MB": {nothing, "CONNECT 10.0.0.1:1 HTTP/1.1\r\nX: " + strings.Repeat("x", 1<<20) + "\r\n\r\n", 502,
			"longer than"},
		"a target of 1 MB": {nothing, connect(strings.Repeat("x", 1<<20) + ":1"), 502, "longer than"},
	} {
		delete(r.nodes.refuse, "")
		tc.before()
		_, br, res := r.ask(t, tc.request)
		body, _ := io.ReadAll(br)
		// kube-apiserver shows its user only the status line.
		if res.StatusCode != tc.status || !strings.Contains(string(body), tc.text) || !strings.Contains(res.Status, tc.text) {
			t.Errorf("%s: %s, %q", name, res.Status, body)
		}
	}
}

// A reason phrase has no control characters, which could end the status line.
func TestPhrase(t *testing.T) {
	for text, want := range map[string]string{
		"so it is":                        "so it is",
		"a\r\nSet-Cookie: b\x00\tc\u00e9": "a  Set-Cookie: b  c ",
		strings.Repeat("x", 9999):         strings.Repeat("x", 500),
	} {
		if got := phrase(text); got != want {
			t.Errorf("%q became %q", text, got)
		}
	}
}

func TestConnectCancelsDials(t *testing.T) {
	r := newRig(t)
	cancelled := make(chan struct{})
	r.nodes.hang = cancelled
	c, err := net.Dial("unix", r.connect)
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(c, connect("10.0.0.1:1"))
	time.Sleep(10 * time.Millisecond) // so that the dial waits; the test also holds without
	c.Close()
	<-cancelled
}

// A reset by the target becomes a reset of the caller's TCP connection.
func TestConnectReset(t *testing.T) {
	o := newOverTLS(t)
	reset := make(chan struct{})
	addr := testkit.Serve(t, func(conn *net.TCPConn) {
		io.WriteString(conn, "half of a sente")
		<-reset
		tunnel.Reset(conn)
	})
	c, err := tls.Dial("tcp", o.connect, o.caller)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	io.WriteString(c, connect(addr))
	br := bufio.NewReader(c)
	if _, err := http.ReadResponse(br, &http.Request{Method: http.MethodConnect}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(br, make([]byte, len("half of a sente"))); err != nil {
		t.Fatal(err)
	}
	close(reset)
	if n, err := br.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the caller got %d bytes and %v", n, err)
	}
}

// receivedConn is a connection whose bytes have all been received already.
type receivedConn struct {
	net.Conn
	*bytes.Reader
}

func (c receivedConn) Read(b []byte) (int, error) { return c.Reader.Read(b) }

// Write takes what is answered to a client of SOCKS5 before its request.
func (receivedConn) Write(b []byte) (int, error) { return len(b), nil }

// An accepted request contains its target, and bytes after the request are kept.
func FuzzConnect(f *testing.F) {
	f.Add([]byte(connect("10.0.0.1:80") + "more"))
	f.Add([]byte("CONNECT [::1]:80 HTTP/1.1\nHost: x\n\n"))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte("CONNECT a:1 HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &connectConn{Conn: receivedConn{Reader: bytes.NewReader(b)}}
		addr, err := c.request()
		if err != nil || b[0] == 5 { // SOCKS5, see FuzzSOCKS
			return
		}
		if !bytes.Contains(b, []byte("CONNECT "+addr)) {
			t.Fatalf("%q was taken from %q", addr, b)
		}
		if !bytes.HasSuffix(b, c.buffered) {
			t.Fatalf("%q does not end with %q", b, c.buffered)
		}
	})
}

// A conn without CloseRead, such as one with TLS, stops reading as well.
func TestCloseReadWithoutOne(t *testing.T) {
	ours, theirs := net.Pipe()
	defer theirs.Close()
	c := &connectConn{Conn: ours, gap: newAnswerGap()}
	ended := make(chan error, 1) // one send
	go func() {
		_, err := c.Read(make([]byte, 1))
		ended <- err
	}()
	if err := c.CloseRead(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the read ends with %v", err)
	}
}
