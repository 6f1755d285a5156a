package trace_test

import (
	"context"
	"fmt"
	"log/slog"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/trace"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The edge serves traces by its policy.
func ExampleNewEdge() {
	e := trace.NewEdge(new(auth.Policy).Try, new(tunnel.Counters), slog.New(slog.DiscardHandler))
	fmt.Println(e.Name())
	// Output: trace
}

// The cloud asks the edge of a node that is not connected.
func ExampleTarget() {
	_, err := trace.Target(context.Background(), new(tunnel.Directory), "edge1", "db:5432")
	fmt.Println(tunnel.CodeOf(err))
	// Output: no-such-node
}
