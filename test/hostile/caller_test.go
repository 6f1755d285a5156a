package hostile

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

const (
	// strangers is how many connections one source may have at the HTTPS front door
	// before it has said who it is, and hello what each may hold.
	strangers, hello = 256, 64 << 10
	// header is the longest header of a request.
	header = 64 << 10
)

// TestHostileCaller is callers of the front doors and of the health port.
func TestHostileCaller(t *testing.T) {
	l := newLab(t, nil, "")
	l.endure(callerAttacks())
	if n := l.kubelet.followed.Load(); n != 0 {
		t.Errorf("%d redirects were followed", n)
	}
	if n := l.kubelet.upgrades.Load(); n != 0 {
		t.Errorf("%d requests to switch to another protocol have reached the kubelet", n)
	}
}

func callerAttacks() []attack {
	held := []string{"endured", "closed"}
	tooLong := []string{"431", "closed"}
	badGateway := []string{"502"}
	return []attack{
		{name: "half a handshake", offend: halfHandshakes("https"), alone: true, answers: held,
			counter: limited("strangersperaddress"), holds: strangers * hello},
		{name: "handshakes without a certificate", offend: noCertificate, answers: []string{"closed"}, holds: 2 * mib},
		{name: "a hello of 1 MB", offend: longServerName, answers: []string{"closed"}, holds: 2 * hello},
		{name: "a header without end", offend: asks("GET / HTTP/1.1\r\nHost: edge1\r\n", lines{}), answers: tooLong,
			counter: limited("headers"), holds: 2 * header},
		{name: "a header of 1 MB",
			offend: asks("GET / HTTP/1.1\r\nHost: edge1\r\nX: "+strings.Repeat("x", mib)+"\r\n\r\n", nil), answers: tooLong,
			counter: limited("headers"), holds: 2 * mib},
		{name: "a host of 1 MB", offend: asks("GET / HTTP/1.1\r\nHost: "+strings.Repeat("x", mib)+"\r\n\r\n", nil),
			answers: tooLong, counter: limited("headers"), holds: 2 * mib},
		{name: "two lengths",
			offend: asks("POST / HTTP/1.1\r\nHost: edge1\r\nContent-Length: 4\r\n"+
				"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /next HTTP/1.1\r\nHost: edge1\r\n\r\n", nil),
			answers: []string{"400"}, holds: 2 * header},
		{name: "two lengths, in HTTP/1.0",
			offend: asks("POST / HTTP/1.0\r\nHost: edge1\r\nConnection: keep-alive\r\nContent-Length: 4\r\n"+
				"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /next HTTP/1.1\r\nHost: edge1\r\n\r\n", nil),
			answers: []string{"400"}, holds: 2 * header},
		{name: "another node's name", offend: asks("GET / HTTP/1.1\r\nHost: no-such-node\r\n\r\n", nil),
			answers: badGateway, holds: 2 * header},
		{name: "slow headers", offend: slow("https", true, "GET / HTTP/1.1\r\n"), alone: true, answers: held,
			holds: slowOnes * (header + connection)},
		{name: "slow bodies",
			offend: slow("https", true, "POST / HTTP/1.1\r\nHost: edge1\r\nContent-Length: 1000000\r\n\r\n"), alone: true,
			answers: append(held, "400"), holds: slowOnes * (2*window + connection)},
		{name: "other protocols",
			offend:  asks("GET / HTTP/1.1\r\nHost: edge1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", nil),
			answers: []string{"200"}, holds: 2 * mib},
		{name: "a redirecting kubelet", offend: asks("GET /redirect HTTP/1.1\r\nHost: edge1\r\n\r\n", nil), alone: true,
			answers: []string{"302"}, holds: 2 * mib},
		{name: "a kubelet whose header has no end", offend: asks("GET /endless-header HTTP/1.1\r\nHost: edge1\r\n\r\n", nil),
			alone: true, answers: badGateway, holds: 4 * mib},
		{name: "a kubelet that switches protocols unasked", offend: asks("GET /switch HTTP/1.1\r\nHost: edge1\r\n\r\n", nil),
			alone: true, answers: badGateway, holds: 2 * mib},
		{name: "a kubelet that speaks no HTTP", offend: asks("GET /garbage HTTP/1.1\r\nHost: edge1\r\n\r\n", nil),
			alone: true, answers: badGateway, holds: 4 * mib},
		{name: "rapid resets at the https port", offend: rapidConns("https", 500), answers: held, holds: 2 * mib},
		{name: "rapid resets at the tcp port", offend: rapidConns("echo", opens/4), answers: held, holds: 4 * mib},
		{name: "rapid resets at the health port", offend: rapidConns("health", 500), answers: held, holds: 2 * mib},
		{name: "idle connections at the health port", offend: idle("health"), alone: true, answers: held,
			counter: limited("health"), holds: 2 * mib},
		{name: "slow headers at the health port", offend: slow("health", false, "GET /metrics HTTP/1.1\r\n"), alone: true,
			answers: append(held, "408"), holds: slowOnes * (header + 16<<10)},
		{name: "a header of 1 MB at the health port",
			offend:  asksPlainly("GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", mib) + "\r\n\r\n"),
			answers: tooLong, holds: 2 * mib},
		{name: "a body of 1 MB at the health port",
			offend: asksPlainly("POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1048576\r\n\r\n" +
				strings.Repeat("x", mib)),
			answers: []string{"405", "closed"}, holds: 2 * mib},
	}
}

// answerOf reads the answer of an HTTP server.
func answerOf(c net.Conn) string {
	c.SetReadDeadline(time.Now().Add(hangs))
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		var timeout net.Error
		if errors.As(err, &timeout) && timeout.Timeout() {
			return "no answer"
		}
		return "closed"
	}
	defer resp.Body.Close()
	return fmt.Sprint(resp.StatusCode)
}

// lines are a header without end.
type lines struct{}

func (lines) Read(p []byte) (int, error) {
	const line = "X-Evil: 0123456789abcdef\r\n"
	n := 0
	for n+len(line) <= len(p) {
		n += copy(p[n:], line)
	}
	return n, nil
}

// asks sends a request, and what follows it, on a connection with a good certificate.
func asks(request string, then io.Reader) func(ctx context.Context, v *victim, _ string) string {
	return func(ctx context.Context, v *victim, _ string) string {
		c, err := v.caller(ctx)
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		go func() {
			io.WriteString(c, request)
			if then != nil {
				io.Copy(c, then)
			}
		}()
		return answerOf(c)
	}
}

func asksPlainly(request string) func(ctx context.Context, v *victim, _ string) string {
	return func(ctx context.Context, v *victim, _ string) string {
		c, err := attackerDial(ctx, v.Addr["health"])
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		go io.WriteString(c, request)
		return answerOf(c)
	}
}

// caller connects to the HTTPS front door with the certificate of a kube-apiserver.
func (v *victim) caller(ctx context.Context) (net.Conn, error) {
	raw, err := attackerDial(ctx, v.Addr["https"])
	if err != nil {
		return nil, err
	}
	c := tls.Client(raw, v.callerTLS(true))
	return c, c.HandshakeContext(ctx)
}

func noCertificate(ctx context.Context, v *victim, _ string) string {
	raw, err := attackerDial(ctx, v.Addr["https"])
	if err != nil {
		return err.Error()
	}
	defer raw.Close()
	c := tls.Client(raw, v.callerTLS(false))
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: edge1\r\n\r\n")
	return answerOf(c)
}

// longServerName sends a ClientHello that goes on for 1 MB.
func longServerName(ctx context.Context, v *victim, _ string) string {
	c, err := attackerDial(ctx, v.Addr["https"])
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	const record = 16 << 10
	hello := []byte{1, mib >> 16, 0, 0, 3, 3} // a handshake message: a ClientHello of 1 MB
	go func() {
		for sent := 0; sent < mib; sent += record {
			body := append(hello, make([]byte, record-len(hello))...)
			hello = nil
			if _, err := c.Write(append([]byte{22, 3, 1, record >> 8, record & 0xff}, body...)); err != nil {
				return
			}
		}
	}()
	c.SetReadDeadline(time.Now().Add(hangs))
	if _, err := io.Copy(io.Discard, c); errors.Is(err, context.DeadlineExceeded) {
		return "no answer"
	}
	return "closed"
}

// slowOnes is how many requests come slowly at once. The health port takes fewer from one
// source; what is too many there is closed.
const slowOnes = 24

// slow sends the beginning of requests, and then a byte now and then.
func slow(door string, encrypted bool, request string) func(ctx context.Context, v *victim, _ string) string {
	return func(ctx context.Context, v *victim, _ string) string {
		return hold(ctx, slowOnes, perHandshake, func() (net.Conn, error) {
			var c net.Conn
			var err error
			if encrypted {
				c, err = v.caller(ctx)
			} else {
				c, err = attackerDial(ctx, v.Addr[door])
			}
			if err != nil {
				return nil, err
			}
			go func() {
				io.WriteString(c, request)
				for {
					select {
					case <-time.After(50 * time.Millisecond):
					case <-ctx.Done():
						return
					}
					if _, err := io.WriteString(c, "x"); err != nil {
						return
					}
				}
			}()
			return c, nil
		})
	}
}

// idle opens connections and says nothing.
func idle(door string) func(ctx context.Context, v *victim, _ string) string {
	return func(ctx context.Context, v *victim, _ string) string {
		return hold(ctx, 300, perConnection, func() (net.Conn, error) { return attackerDial(ctx, v.Addr[door]) })
	}
}

// rapidConns connects and resets, so many times a second.
func rapidConns(door string, perSecond int) func(ctx context.Context, v *victim, _ string) string {
	return func(ctx context.Context, v *victim, _ string) string {
		err := pace(ctx, perSecond, func() error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel() // closes it, by a reset
			c, err := attackerDial(ctx, v.Addr[door])
			if err != nil {
				return err
			}
			c.Write([]byte{22})
			return nil
		})
		if ctx.Err() != nil {
			return "endured"
		}
		return err.Error()
	}
}
