package egress

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/konnectivity"
	ports "tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// overTLS is a front door that requires client certificates.
type overTLS struct {
	grpc, connect string // host:port
	counters      *tunnel.Counters
	removed       *atomic.Bool // callers may no longer call
	caller        *tls.Config
	stranger      *tls.Config // a caller with a certificate of another CA
}

func newOverTLS(t *testing.T) overTLS {
	t.Helper()
	n := &nodes{refuse: map[tunnel.NodeName]error{}, changed: make(chan struct{})}
	return newOverTLSTo(t, n, n)
}

func newOverTLSTo(t *testing.T, dialer tunnel.Dialer, n *nodes) overTLS {
	t.Helper()
	ca, otherCA := testca.New(t, "callers"), testca.New(t, "callers")
	pool := ca.Pool()
	o := overTLS{counters: new(tunnel.Counters), removed: new(atomic.Bool)}
	for _, c := range []struct {
		into **tls.Config
		ca   testca.CA
	}{{&o.caller, ca}, {&o.stranger, otherCA}} {
		*c.into = &tls.Config{RootCAs: pool, ServerName: "egress",
			Certificates: []tls.Certificate{c.ca.Pair(t, auth.Leaf{CommonName: "me", Client: true})}}
	}
	ports := []string{testkit.FreeAddress(t), testkit.FreeAddress(t)}
	o.grpc, o.connect = ports[0], ports[1]
	door, err := New(Config{
		GRPC: []string{"tls://" + o.grpc}, HTTPConnect: []string{"tls://" + o.connect}, Identifiers: n,
		Counters: o.counters, Strangers: 16, StrangersPerAddress: 3,
		TLS: &tls.Config{
			Certificates: []tls.Certificate{ca.Pair(t, auth.Leaf{DNSNames: []string{"egress"}, Server: true})},
			ClientCAs:    pool, ClientAuth: tls.RequireAndVerifyClientCert,
			VerifyConnection: func(tls.ConnectionState) error {
				if o.removed.Load() {
					return errors.New("not in clientnames")
				}
				return nil
			},
		},
	}, dialer, n, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	door.grace = time.Second
	testkit.Run(t, door.Run)
	testkit.Eventually(t, "the front door is ready", func() bool { return door.Ready() == nil })
	return o
}

// dial asks for a conn over gRPC.
func (o overTLS) dial(t *testing.T, conf *tls.Config, addr string) error {
	t.Helper()
	cc, err := grpc.NewClient(o.grpc, grpc.WithTransportCredentials(credentials.NewTLS(conf)),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(konnectivity.NewCodec())))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	stream, err := cc.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/ProxyService/Proxy")
	if err != nil {
		return err
	}
	request := &konnectivity.Packet{Type: konnectivity.PacketDialReq, Protocol: "tcp", Address: addr}
	if err = stream.SendMsg(request); err != nil {
		return err
	}
	return stream.RecvMsg(new(konnectivity.Packet))
}

// ask asks for a conn over HTTP CONNECT.
func (o overTLS) ask(conf *tls.Config, addr string) (string, error) {
	c, err := tls.Dial("tcp", o.connect, conf)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if _, err := io.WriteString(c, connect(addr)); err != nil {
		return "", err
	}
	res, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: http.MethodConnect})
	if err != nil {
		return "", err
	}
	return res.Status, nil
}

func TestCallersOverTLS(t *testing.T) {
	o := newOverTLS(t)
	addr := testkit.Serve(t, testkit.Echo)
	if err := o.dial(t, o.caller, addr); err != nil {
		t.Errorf("over gRPC: %v", err)
	}
	if status, err := o.ask(o.caller, addr); err != nil || !strings.HasPrefix(status, "200 ") {
		t.Errorf("over HTTP: %s, %v", status, err)
	}
	nameless := o.caller.Clone()
	nameless.Certificates = nil
	for name, conf := range map[string]*tls.Config{
		"without a certificate": nameless, "with one of another CA": o.stranger,
	} {
		if err := o.dial(t, conf, addr); err == nil {
			t.Errorf("%s over gRPC: served", name)
		}
		if status, err := o.ask(conf, addr); err == nil {
			t.Errorf("%s over HTTP: %s", name, status)
		}
	}
}

// A caller that the operator has removed opens no more conns, also on a connection that is open.
func TestRemovedCaller(t *testing.T) {
	o := newOverTLS(t)
	addr := testkit.Serve(t, testkit.Echo)
	cc, err := grpc.NewClient(o.grpc, grpc.WithTransportCredentials(credentials.NewTLS(o.caller)),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(konnectivity.NewCodec())))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	dial := func() error {
		desc := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
		stream, err := cc.NewStream(t.Context(), desc, "/ProxyService/Proxy")
		if err != nil {
			return err
		}
		request := &konnectivity.Packet{Type: konnectivity.PacketDialReq, Protocol: "tcp", Address: addr}
		stream.SendMsg(request)
		return stream.RecvMsg(new(konnectivity.Packet))
	}
	if err := dial(); err != nil {
		t.Fatal(err)
	}
	o.removed.Store(true)
	if err := dial(); status.Code(err) != codes.PermissionDenied {
		t.Errorf("after its removal: %v", err)
	}
	o.removed.Store(false)
	if err := dial(); err != nil {
		t.Errorf("on the same connection: %v", err)
	}
}

// Strangers are bounded. A caller that has finished its handshake is no longer a stranger.
func TestStrangers(t *testing.T) {
	o := newOverTLS(t)
	addr := testkit.Serve(t, testkit.Echo)
	for _, door := range []string{o.grpc, o.connect} {
		before := o.counters.LimitedBy(tunnel.LimitStrangersPerAddress)
		var slow []net.Conn
		for range 3 {
			c, err := net.Dial("tcp", door)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			io.WriteString(c, "\x16") // else it may lose its place to a newcomer after a second
			slow = append(slow, c)
		}
		one, err := net.Dial("tcp", door)
		if err == nil { // otherwise it was reset during Dial
			defer one.Close()
			one.SetDeadline(time.Now().Add(20 * time.Second))
			_, err = one.Read(make([]byte, 1))
		}
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: one too many: %v", door, err)
		}
		if n := o.counters.LimitedBy(tunnel.LimitStrangersPerAddress); n != before+1 {
			t.Errorf("counted %d times", n-before)
		}
		slow[0].Close()
		known := func() error { return o.dial(t, o.caller, addr) }
		if door == o.connect {
			known = func() error { _, err := o.ask(o.caller, addr); return err }
		}
		for late := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			if err := known(); err == nil {
				break
			} else if time.Now().After(late) {
				t.Fatalf("%s: there is a place again, and: %v", door, err)
			}
		}
	}
}

// A caller can connect while strangers from a few addresses hold all places.
func TestStrangersFromFewAddresses(t *testing.T) {
	o := newOverTLS(t)
	addr := testkit.Serve(t, testkit.Echo)
	for _, door := range []string{o.grpc, o.connect} {
		for i := range 8 * 3 {
			c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(10+i%8))}}).Dial("tcp", door)
			if err == nil { // otherwise it was reset during Dial
				defer c.Close()
			}
		}
	}
	for range 20 {
		if err := o.dial(t, o.caller, addr); err != nil {
			t.Errorf("over gRPC: %v", err)
		}
		if status, err := o.ask(o.caller, addr); err != nil || !strings.HasPrefix(status, "200 ") {
			t.Errorf("over HTTP: %s, %v", status, err)
		}
	}
}

// A stranger that sends nothing is disconnected.
func TestSilentStranger(t *testing.T) {
	o := newOverTLS(t)
	for _, door := range []string{o.grpc, o.connect} {
		before, begun := o.counters.LimitedBy(tunnel.LimitHandshakeTimeout), time.Now()
		c, err := net.Dial("tcp", door)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(begun.Add(20 * time.Second))
		if _, err = c.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: nobody hangs up", door)
		}
		if d := time.Since(begun); d < ports.FirstByte || d > ports.FirstByte+15*time.Second {
			t.Errorf("%s: hung up on after %s, want %s", door, d, ports.FirstByte)
		}
		if n := o.counters.LimitedBy(tunnel.LimitHandshakeTimeout); n != before+1 {
			t.Errorf("%s: counted %d times", door, n-before)
		}
	}
}

// watchedContext counts the functions that wait for its end.
type watchedContext struct {
	context.Context
	done    chan struct{}
	waiting atomic.Int32
}

func (c *watchedContext) Done() <-chan struct{} { return c.done }

// AfterFunc is called by context.AfterFunc.
func (c *watchedContext) AfterFunc(func()) func() bool {
	c.waiting.Add(1)
	return sync.OnceValue(func() bool { return c.waiting.Add(-1) >= 0 })
}

// A failed handshake leaves no function waiting for the end of the front door.
func TestFailedHandshakeIsForgotten(t *testing.T) {
	f := &FrontDoor{log: slog.New(slog.DiscardHandler)}
	ctx := &watchedContext{Context: context.Background(), done: make(chan struct{})}
	ours, theirs := net.Pipe()
	theirs.Close()
	f.serveConn(ctx, ctx, ours, &tls.Config{})
	if n := ctx.waiting.Load(); n != 0 {
		t.Errorf("%d still wait for the end of the front door", n)
	}
}
