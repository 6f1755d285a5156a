package https

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

func TestPeekReplays(t *testing.T) {
	here, there := net.Pipe()
	sent := append(testkit.ClientHello("edge1"), "and more"...)
	go there.Write(sent)
	c := &clientConn{Conn: here}
	h, err := c.peek(context.Background(), patience, func() {})
	must(t, err)
	got := make([]byte, len(sent))
	_, err = io.ReadFull(c, got)
	must(t, err)
	if h.ServerName != "edge1" || !bytes.Equal(got, sent) {
		t.Errorf("name %q; %d of %d bytes come again", h.ServerName, len(got), len(sent))
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
