package stream

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A cancel that overtakes its open, since the two came by different connections, ends the dial.
func TestCancelOvertakesTheOpen(t *testing.T) {
	r := newRig(t)
	dialled := make(chan error, 1)
	e := r.join("edge1", func(ctx context.Context, _ tunnel.Request) (net.Conn, error) {
		select {
		case <-ctx.Done():
		case <-time.After(patience):
		}
		dialled <- ctx.Err()
		return nil, tunnel.Refusef(tunnel.Gone, "given up")
	})
	s := e.client.Session().Link.(*edgeSession)
	if err := s.cancelTopic(message(typeCancel, "early", nil)); err != nil {
		t.Fatal(err)
	}
	open := message(tunnel.TypeOpen, "early", &pb.Open{Network: "tcp"})
	open.Category, open.Addr = "tcp", "127.0.0.1:1"
	if known, err := s.handle(s.ctx, open, s); !known || err != nil {
		t.Fatal(err)
	}
	if err := <-dialled; err == nil {
		t.Error("the edge dials for an open that was cancelled")
	}
	r.idle(e)
}

// An edge stores no long topic: an open or a cancel with one breaks the protocol.
func TestLongTopics(t *testing.T) {
	r := newRig(t)
	e := r.join("edge1", func(context.Context, tunnel.Request) (net.Conn, error) {
		return nil, errors.New("it dials nothing")
	})
	s := e.client.Session().Link.(*edgeSession)
	topic := strings.Repeat("t", maxTopic+1)
	open := message(tunnel.TypeOpen, topic, &pb.Open{Network: "tcp"})
	open.Category, open.Addr = "tcp", "127.0.0.1:1"
	if _, err := s.handle(s.ctx, open, s); !errors.Is(err, errTopic) {
		t.Errorf("open: %v", err)
	}
	if err := s.cancelTopic(message(typeCancel, topic, nil)); !errors.Is(err, errTopic) {
		t.Errorf("cancel: %v", err)
	}
	r.idle(e)
}
