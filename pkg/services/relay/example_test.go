package relay_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/services/relay"
)

// An edge serves Services, and dials the endpoints of its own node. A session of package stream is behind watch and
// reach.
func Example() {
	watch := func(context.Context) (relay.Stream, error) { return nil, context.Canceled }
	reach := func(context.Context, string) (net.Conn, error) { return nil, context.Canceled }
	r, err := relay.New(relay.Config{
		Node: "edge1", File: "/var/lib/tunnel/services.db", Watch: watch, Reach: reach, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(relay.NewEdge(r, new(auth.Policy)).Name()) // a module of the edge
	fmt.Println(r.Run(context.Background()))
}
