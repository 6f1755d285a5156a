package egress

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/proxy"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The messages of a caller, and the answers to it.
const (
	greeting = "\x05\x01\x00"
	greeted  = "\x05\x00"
	granted  = "\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00"
)

// socks returns a request, without a greeting. An address that is not host:port becomes a domain name.
func socks(addr string) string {
	host, port, _ := net.SplitHostPort(addr)
	n, _ := strconv.Atoi(port)
	to := string([]byte{byte(n >> 8), byte(n)})
	a, err := netip.ParseAddr(host)
	switch {
	case err != nil:
		return "\x05\x01\x00\x03" + string([]byte{byte(len(host))}) + host + to
	case a.Is4():
		return "\x05\x01\x00\x01" + string(a.AsSlice()) + to
	}
	return "\x05\x01\x00\x04" + string(a.AsSlice()) + to
}

// open connects to the socket of HTTP CONNECT.
func (r *rig) open(t *testing.T) *net.UnixConn {
	t.Helper()
	c, err := net.Dial("unix", r.connect)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return c.(*net.UnixConn)
}

// want reads bytes, which must be those of text.
func want(t *testing.T, r io.Reader, text string) {
	t.Helper()
	b := make([]byte, len(text))
	if n, err := io.ReadFull(r, b); err != nil || string(b) != text {
		t.Fatalf("%q, %v; want %q", b[:n], err, text)
	}
}

// A client of another project reaches IPv4, IPv6 and a name, and both ends of a conn end on their own.
func TestSOCKS(t *testing.T) {
	r := newRig(t)
	sent := testkit.Random(4<<20 + 3)
	r.nodes.target = testkit.Serve(t, func(c *net.TCPConn) {
		b, _ := io.ReadAll(c)
		c.Write(b)
	})
	d, err := proxy.SOCKS5("unix", r.connect, nil, proxy.Direct)
	if err != nil {
		t.Fatal(err)
	}
	for _, addr := range []string{"10.1.2.3:80", "[fd00::1]:443", "web.shop.svc:65535"} {
		unix, err := d.Dial("tcp", addr)
		if err != nil {
			t.Fatalf("%s: %v", addr, err)
		}
		defer unix.Close()
		unix.SetDeadline(time.Now().Add(20 * time.Second))
		go func() {
			unix.Write(sent)
			unix.(interface{ CloseWrite() error }).CloseWrite()
		}()
		if got, err := io.ReadAll(unix); err != nil || !bytes.Equal(got, sent) {
			t.Errorf("%s: %d of %d bytes came back: %v", addr, len(got), len(sent), err)
		}
	}
}

// Each message may come together with the next, or in single bytes. Bytes behind a request are the target's.
func TestSOCKSPieces(t *testing.T) {
	r := newRig(t)
	early := string(testkit.Random(30_000))
	handshake := greeting + socks(testkit.Serve(t, testkit.Echo))
	all := func(c net.Conn) { io.WriteString(c, handshake+early) }
	bytewise := func(c net.Conn) {
		for i := range len(handshake) {
			io.WriteString(c, handshake[i:i+1])
		}
		io.WriteString(c, early)
	}
	for name, send := range map[string]func(net.Conn){"at once": all, "in single bytes": bytewise} {
		t.Run(name, func(t *testing.T) {
			c := r.open(t)
			go send(c)
			want(t, c, greeted+granted+early)
		})
	}
}

// A target that speaks first is not held back: only kube-apiserver needs a gap behind the answer.
func TestSOCKSTargetSpeaksFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer far.Close()
		c := &connectConn{Conn: near, door: doorSOCKS, gap: newAnswerGap()}
		began := time.Now()
		go func() {
			c.accept()
			c.Write([]byte("220 I speak first"))
			near.Close()
		}()
		if b, err := io.ReadAll(far); err != nil || string(b) != granted+"220 I speak first" {
			t.Errorf("%q, %v", b, err)
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("it took %v", took)
		}
	})
}

func TestSOCKSRefusals(t *testing.T) {
	r := newRig(t)
	every := "\x05\xff" // the most methods that a greeting can have: all but "no authentication required"
	for m := 1; m <= 255; m++ {
		every += string([]byte{byte(m)})
	}
	request := greeting + socks("10.0.0.1:1")
	reply := func(code byte) string { return greeted + string(socksAnswer(code)) }
	for name, tc := range map[string]struct {
		refusal tunnel.Code // of the dial
		send    string
		want    string
	}{
		"denied":                  {tunnel.Denied, request, reply(2)},
		"no node":                 {tunnel.NoSuchNode, request, reply(3)},
		"unreachable":             {tunnel.Unreachable, request, reply(4)},
		"refused":                 {tunnel.Refused, request, reply(5)},
		"timeout":                 {tunnel.Timeout, request, reply(6)},
		"overloaded":              {tunnel.Overloaded, request, reply(1)},
		"draining":                {tunnel.Draining, request, reply(1)},
		"gone":                    {tunnel.Gone, request, reply(1)},
		"an address in brackets":  {0, greeting + socks("x:80")[:4] + "\x05[::1]\x00\x50", reply(1)},
		"no method":               {0, "\x05\x00", "\x05\xff"},
		"only a password":         {0, "\x05\x01\x02", "\x05\xff"},
		"255 methods, not 0":      {0, every, "\x05\xff"},
		"bind":                    {0, greeting + "\x05\x02\x00\x01\x0a\x00\x00\x01\x00\x50", reply(7)},
		"UDP associate":           {0, greeting + "\x05\x03\x00\x01\x0a\x00\x00\x01\x00\x50", reply(7)},
		"unknown type of address": {0, greeting + "\x05\x01\x00\x02\x0a\x00\x00\x01\x00\x50", reply(8)},
		"version 4 in a request":  {0, greeting + "\x04\x01\x00\x01\x0a\x00\x00\x01\x00\x50", reply(1)},
		"an empty name":           {0, greeting + "\x05\x01\x00\x03\x00\x00\x50", reply(1)},
		"a line break in a name":  {0, greeting + socks("a\r\nb:80"), reply(1)},
		"a space in a name":       {0, greeting + socks("a b:80"), reply(1)},
		"a zero byte in a name":   {0, greeting + socks("a\x00b:80"), reply(1)},
		"a name in UTF-8":         {0, greeting + socks("b\u00fccher.example:80"), reply(1)},
		"1 MB of zero bytes":      {0, greeting + strings.Repeat("\x00", 1<<20), reply(1)},
	} {
		t.Run(name, func(t *testing.T) {
			r.nodes.mu.Lock()
			r.nodes.dialled = nil
			delete(r.nodes.refuse, "")
			if tc.refusal != 0 {
				r.nodes.refuse[""] = tunnel.Refusef(tc.refusal, "so it is")
			}
			r.nodes.mu.Unlock()
			c := r.open(t)
			go io.WriteString(c, tc.send)
			if b, err := io.ReadAll(c); err != nil || string(b) != tc.want {
				t.Errorf("%q, %v; want %q", b, err, tc.want)
			}
			r.nodes.mu.Lock()
			defer r.nodes.mu.Unlock()
			if (len(r.nodes.dialled) > 0) != (tc.refusal != 0) {
				t.Errorf("dialled: %q", r.nodes.dialled)
			}
		})
	}
}

// The method 0 may be any of 255.
func TestSOCKSManyMethods(t *testing.T) {
	r := newRig(t)
	addr := testkit.Serve(t, testkit.Echo) // ends after c
	c := r.open(t)
	go io.WriteString(c, "\x05\xff"+strings.Repeat("\x02", 254)+"\x00"+socks(addr)+"ping")
	want(t, c, greeted+granted+"ping")
}

// A caller that leaves in the middle of a handshake, or closes its direction, leaves no dial and no goroutine.
func TestSOCKSEarlyClose(t *testing.T) {
	r := newRig(t)
	handshake := greeting + socks("web.shop.svc:80")
	for n := range len(handshake) {
		c := r.open(t)
		io.WriteString(c, handshake[:n])
		c.CloseWrite()
		answer, err := io.ReadAll(c)
		if err != nil {
			t.Fatalf("%d bytes: %v", n, err)
		}
		switch got := string(answer); {
		case n == 0: // not told from HTTP
		case n < len(greeting) && got != "\x05\xff", n >= len(greeting) && got != greeted+string(socksAnswer(socksFailure)):
			t.Errorf("%d bytes: %q", n, got)
		}
		c = r.open(t)
		io.WriteString(c, handshake[:n])
		c.Close()
	}
	if len(r.nodes.dialled) > 0 {
		t.Errorf("dialled: %q", r.nodes.dialled)
	}
}

func TestSOCKSCancelsDials(t *testing.T) {
	r := newRig(t)
	cancelled := make(chan struct{})
	r.nodes.hang = cancelled
	c := r.open(t)
	io.WriteString(c, greeting+socks("10.0.0.1:1"))
	want(t, c, greeted)
	testkit.Eventually(t, "the dial waits", func() bool {
		r.nodes.mu.Lock()
		defer r.nodes.mu.Unlock()
		return len(r.nodes.dialled) == 1
	})
	c.Close()
	<-cancelled
}

// A caller has requestTimeout for greeting and request together, however it divides them.
func TestSOCKSTimeout(t *testing.T) {
	handshake := greeting + socks("web.shop.svc:80")
	for name, tc := range map[string]struct {
		send  string
		every time.Duration
		want  string
	}{
		"nothing after the version":  {"\x05", 0, "\x05\xff"},
		"nothing after the greeting": {greeting, 0, greeted + string(socksAnswer(socksFailure))},
		"a byte a second":            {handshake, time.Second, greeted + string(socksAnswer(socksFailure))},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &nodes{reach: map[tunnel.NodeName]konnectivity.Identifiers{}, changed: make(chan struct{})}
				f, err := New(Config{Identifiers: n}, n, n, slog.New(slog.DiscardHandler))
				if err != nil {
					t.Fatal(err)
				}
				ours, theirs := net.Pipe()
				began := time.Now()
				go f.serveConn(t.Context(), t.Context(), ours, nil)
				var sending sync.WaitGroup
				defer sending.Wait()
				sending.Go(func() {
					for i := range len(tc.send) {
						if _, err := io.WriteString(theirs, tc.send[i:i+1]); err != nil {
							return
						}
						time.Sleep(tc.every)
					}
				})
				if b, err := io.ReadAll(theirs); err != nil || string(b) != tc.want {
					t.Errorf("%q, %v; want %q", b, err, tc.want)
				}
				if took := time.Since(began); took != requestTimeout {
					t.Errorf("closed after %v, want %v", took, requestTimeout)
				}
				if len(n.dialled) > 0 {
					t.Errorf("dialled: %q", n.dialled)
				}
			})
		})
	}
}

// At a listener that requires client certificates, SOCKS5 goes inside TLS, and needs one too.
func TestSOCKSOverTLS(t *testing.T) {
	o := newOverTLS(t)
	addr := testkit.Serve(t, testkit.Echo)
	ask := func(conf *tls.Config) error {
		c, err := tls.Dial("tcp", o.connect, conf)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(20 * time.Second))
		io.WriteString(c, greeting+socks(addr)+"ping")
		b := make([]byte, len(greeted+granted+"ping"))
		if _, err := io.ReadFull(c, b); err != nil {
			return err
		}
		if string(b) != greeted+granted+"ping" {
			return fmt.Errorf("the answer is %q", b)
		}
		return nil
	}
	if err := ask(o.caller); err != nil {
		t.Error(err)
	}
	nameless := o.caller.Clone()
	nameless.Certificates = nil
	for name, conf := range map[string]*tls.Config{
		"without a certificate": nameless, "with one of another CA": o.stranger,
	} {
		if err := ask(conf); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
	}
	plain, err := net.Dial("tcp", o.connect)
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	plain.SetDeadline(time.Now().Add(20 * time.Second))
	io.WriteString(plain, greeting+socks(addr))
	if b, err := io.ReadAll(plain); bytes.HasPrefix(b, []byte{socksVersion}) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("without TLS: %q, %v", b, err)
	}
}

// A reset by the target becomes a reset of the caller's TCP connection.
func TestSOCKSReset(t *testing.T) {
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
	c.SetDeadline(time.Now().Add(20 * time.Second))
	io.WriteString(c, greeting+socks(addr))
	want(t, c, greeted+granted+"half of a sente")
	close(reset)
	if n, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the caller got %d bytes and %v", n, err)
	}
}

// An address has one spelling, whatever its type in the request.
func TestSOCKSAddress(t *testing.T) {
	for request, want := range map[string]string{
		socks("10.0.0.1:1"):                                            "10.0.0.1:1",
		socks("[::ffff:10.0.0.1]:80"):                                  "10.0.0.1:80",
		socks("[fd00::1]:65535"):                                       "[fd00::1]:65535",
		socks("Web.shop.svc.:80"):                                      "Web.shop.svc.:80",
		"\x05\x01\x00\x03\x07fd00::1\x00\x50":                          "[fd00::1]:80",
		"\x05\x01\x00\x03\x04\x31\x32\x33\x34\x00\x50":                 "1234:80", // four bytes are not always an address
		"\x05\x01\x00\x03\xff" + strings.Repeat("x", 255) + "\x00\x50": strings.Repeat("x", 255) + ":80",
	} {
		got, err := socksRequest(strings.NewReader(greeting+request), io.Discard)
		if err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", request, got, err, want)
		}
	}
}

// An accepted request is host:port and spelled by the caller, and bytes after the request are kept. Answers are whole.
func FuzzSOCKS(f *testing.F) {
	for _, addr := range []string{"10.0.0.1:80", "[fd00::1]:80", "web.shop.svc:80"} {
		f.Add([]byte(greeting + socks(addr) + "more"))
	}
	f.Add([]byte("\x05\x02\x02\x00\x05\x02\x00\x01"))
	f.Add([]byte("\x05\xff\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		b = slices.Concat([]byte{socksVersion}, b)
		var answer bytes.Buffer
		c := &connectConn{Conn: socksPeer{receivedConn{Reader: bytes.NewReader(b)}, &answer}, door: doorConnect}
		addr, err := c.request()
		if c.door != doorSOCKS {
			t.Fatalf("%q is taken for %s", b, c.door)
		}
		if err != nil {
			refusal := socksRefusal(err)
			if greeted := answer.Len() == 2; greeted != (len(refusal) == 10) || !greeted && answer.Len() != 0 {
				t.Fatalf("%q gets %q and %q", b, answer.Bytes(), refusal)
			}
			return
		}
		if answer.String() != greeted {
			t.Fatalf("%q gets %q", b, answer.Bytes())
		}
		host, port, err := net.SplitHostPort(addr)
		if _, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil {
			t.Fatalf("%q becomes %q: %v, %v", b, addr, err, perr)
		}
		if _, err := netip.ParseAddr(host); err != nil && !bytes.Contains(b, []byte(host)) {
			t.Fatalf("%q becomes %q", b, addr)
		}
		if !bytes.HasSuffix(b, c.buffered) {
			t.Fatalf("%q does not end with %q", b, c.buffered)
		}
	})
}

// socksPeer is a connection whose bytes have all been received already.
type socksPeer struct {
	receivedConn
	answer *bytes.Buffer
}

func (p socksPeer) Write(b []byte) (int, error) { return p.answer.Write(b) }
