package api

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/peers"
	"tunnel.example/tunnel/pkg/tap"
	"tunnel.example/tunnel/pkg/tunnel"
)

// bomb does not stand being sent.
type bomb struct{}

func (bomb) MarshalJSON() ([]byte, error) { panic("this is a bug") }

// A panic over what another replica sends is the error of that replica. It does not end the process.
func TestReplicasArePanicSafe(t *testing.T) {
	log, _ := testkit.NewLog()
	s := New(Config{Mode: "cloud", Counters: new(tunnel.Counters), Log: log})
	asked := make(chan error, 1) // capacity 1: one answer
	go func() {
		asked <- s.askWith(context.Background(), peers.Replica{}, http.MethodGet, "/v1/nodes", bomb{}, nil)
	}()
	if err := <-asked; err == nil || !strings.Contains(err.Error(), "this is a bug") {
		t.Errorf("asked, and got %v", err)
	}

	hub := tap.New("cloud-0")
	watcher := hub.Watch("")
	defer watcher.Close()
	s.guardFollower(watcher, func() { panic("this is a bug") })
	line, ok := watcher.Next(t.Context())
	if !ok || !strings.Contains(line.Warning, "this is a bug") {
		t.Errorf("the operator sees %+v", line)
	}
	if n := s.cfg.Counters.Panics.Load(); n != 2 {
		t.Errorf("%d panics are counted", n)
	}
}
