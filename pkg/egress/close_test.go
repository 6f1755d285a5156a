package egress

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"tunnel/pkg/tunnel"
)

// toAgent dials every address through an agent.
type toAgent struct{ *agentsRig }

func (d toAgent) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	r.Node = "n1"
	return d.dir.Dial(ctx, r)
}

// Over TLS a target behind a konnectivity agent sees the end of an upload when the caller
// closes its connection. A caller that only ends its direction gets the answer.
func TestAgentCallerCloses(t *testing.T) {
	r := newAgentsRig(t, nil)
	r.agent(t, "n1", nil)
	o := newOverTLSTo(t, toAgent{r}, &nodes{refuse: map[tunnel.NodeName]error{}, changed: make(chan struct{})})
	connect := func(serve func(c *net.TCPConn)) *tls.Conn {
		addr := listen(t, serve)
		c, err := tls.Dial("tcp", o.connect, o.caller)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", addr)
		head := make([]byte, len("HTTP/1.1 200 Connection Established\r\n\r\n"))
		if _, err := io.ReadFull(c, head); err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, "upload")
		return c
	}
	got := make(chan string, 1)
	c := connect(func(c *net.TCPConn) {
		b, err := io.ReadAll(c)
		got <- fmt.Sprint(string(b), err)
	})
	c.Close()
	select {
	case g := <-got:
		if g != "upload<nil>" {
			t.Errorf("the target sees %s", g)
		}
	case <-time.After(halfOpen / 2):
		t.Error("the target waits for the end of the upload")
	}
	c = connect(func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, len("upload")))
		time.Sleep(200 * time.Millisecond)
		io.WriteString(c, "answer")
	})
	c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "answer" {
		t.Errorf("half-closed: %q, %v", b, err)
	}
}
