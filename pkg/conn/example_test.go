package conn_test

import (
	"fmt"
	"io"
	"log/slog"
	"net"

	"tunnel.example/tunnel/pkg/conn"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Both ends of a conn over a data connection, with nothing else of a session around them.
func Example() {
	near, far := net.Pipe() // between cloud and edge; TLS over TCP in a session
	cfg := conn.Config{Blocks: new(conn.Blocks), Counters: new(tunnel.Counters), Log: slog.New(slog.DiscardHandler)}

	// The edge takes the open, and echoes what the cloud sends.
	edge := make(chan error, 1)
	go func() {
		edge <- func() error {
			d := conn.NewData(far, far, cfg.Blocks)
			if typ, _, err := d.Receive(conn.MaxControlFrame); err != nil || typ != conn.FrameOpen {
				return fmt.Errorf("no open: frame %#x, %w", typ, err)
			}
			var lease conn.Lease
			d.LendAtEdge(&lease)
			if err := lease.Accept(); err != nil {
				return err
			}
			gone := make(chan struct{})
			own := cfg
			own.IsEdge, own.Local, own.Remote = true, "node1", "caller"
			own.Ended = func(err error) {
				if err != nil {
					lease.Revoke()
				}
			}
			own.Gone = func() { close(gone) }
			c := conn.OverLease(&lease, own)
			_, err := io.Copy(c, c)
			c.Close()
			<-gone
			awaited := lease.EndAwaited()
			if err != nil {
				return err
			}
			if err = lease.ReturnAtEdge(); err == nil && awaited {
				_, _, err = d.Receive(0) // the cloud says that it has finished, too
			}
			return err
		}()
	}()

	// The cloud opens the conn.
	d := conn.NewData(near, near, cfg.Blocks)
	if err := d.Ask([]byte("what to dial")); err != nil {
		fmt.Println(err)
	}
	if typ, _, err := d.Receive(conn.MaxControlFrame); err != nil || typ != conn.FrameOpened {
		fmt.Println("not opened:", typ, err)
	}
	lease := d.LendAtCloud()
	own := cfg
	gone := make(chan struct{})
	var c *conn.Conn
	own.Local, own.Remote = "cloud", "node1"
	own.Ended = func(err error) {
		if err == nil {
			lease.End(c.PeerStopped())
		}
	}
	own.Gone = func() { close(gone) }
	c = conn.OverLease(lease, own)

	fmt.Fprint(c, "hello")
	c.CloseWrite()
	answer, err := io.ReadAll(c)
	fmt.Println(string(answer), err)
	c.Close()
	<-gone

	// The data connection is free for the next conn.
	err = lease.ReturnAtCloud()
	if err == nil && d.OwesEnd() {
		err = d.SayEnd()
	}
	fmt.Println(err, <-edge)
	// Output:
	// hello <nil>
	// <nil> <nil>
}
