package takeover_test

import (
	"context"
	"fmt"
	"os"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/takeover"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The old process starts the new one, and leaves its sockets to it.
func ExampleStart() {
	ctx, sockets, connected := context.Background(), new(listen.Sockets), []tunnel.NodeName{"edge1"}
	next, err := takeover.Start(takeover.Config{Program: "/usr/bin/tunnel", Args: os.Args, Sockets: sockets})
	if err != nil {
		fmt.Println(err)
		return
	}
	if err = next.Ready(ctx); err != nil {
		next.Kill()
		fmt.Println(err)
		return
	}
	sockets.Pause(listen.Edges)
	if err = next.Go(connected); err == nil {
		err = next.Serving(ctx)
	}
	if err != nil {
		sockets.Resume(listen.Edges)
		next.Kill()
		fmt.Println(err)
		return
	}
	sockets.Leave()
}

// The new process takes the sockets over, and says when it serves.
func ExampleJoin() {
	before, err := takeover.Join(os.Getenv(takeover.Variable))
	if err != nil || before == nil { // nil: there is no old process
		fmt.Println(err)
		return
	}
	sockets := before.Sockets()
	nodes, err := before.Ready(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	sockets.Resume(listen.Edges)
	fmt.Println("waiting for", nodes)
	sockets.Serve()
	before.Serving()
}
