package listen

import (
	"context"
	"net"
)

// Accept gives each connection of ln to serve, until ctx is done: then it returns nil. If ln fails earlier, Accept
// returns the error. Somebody else must close ln when ctx is done. The next connection waits until serve returns.
func Accept(ctx context.Context, ln net.Listener, serve func(net.Conn)) error {
	for {
		c, err := ln.Accept()
		switch {
		case err == nil:
			serve(c)
		case ctx.Err() != nil:
			return nil
		default:
			return err
		}
	}
}
