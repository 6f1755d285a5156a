package tap_test

import (
	"context"
	"fmt"

	"tunnel.example/tunnel/pkg/tap"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A watcher sees the conns of a node, until its context is done.
func Example() {
	hub := tap.New("cloud-0")
	sink := tunnel.Sink{Tap: hub}
	_ = sink // a front door feeds it

	w := hub.Watch("edge1")
	defer w.Close()
	ctx, stop := context.WithCancel(context.Background())
	stop()
	for {
		line, ok := w.Next(ctx)
		if !ok {
			break
		}
		fmt.Println(line)
	}
	// Output:
}
