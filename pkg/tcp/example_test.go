package tcp_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"tunnel.example/tunnel/pkg/tcp"
	"tunnel.example/tunnel/pkg/tunnel"
)

// here is a dialer without a tunnel: it dials targets on this machine. A cloud uses a tunnel.Directory.
type here struct{}

func (here) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, r.Network, r.Addr)
}

// A cloud forwards one of its ports to a target of node edge1.
func Example() {
	target, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer target.Close()
	go func() {
		if c, err := target.Accept(); err == nil {
			io.WriteString(c, "hello from the target")
			c.Close()
		}
	}()

	door := tcp.New([]tcp.Listener{
		{Listen: "127.0.0.1:0", Node: "edge1", Target: target.Addr().String()},
	}, here{}, slog.New(slog.DiscardHandler))
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- door.Run(ctx) }()
	for door.Ready() != nil {
		select {
		case err := <-ended:
			fmt.Println("it does not listen:", err)
			return
		case <-time.After(time.Millisecond):
		}
	}

	c, err := net.Dial("tcp", door.Addrs()[0].String())
	if err != nil {
		fmt.Println(err)
		return
	}
	answer, err := io.ReadAll(c)
	fmt.Println(string(answer), err)
	c.Close()

	stop()
	fmt.Println(<-ended)
	// Output:
	// hello from the target <nil>
	// <nil>
}
