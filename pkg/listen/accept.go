package listen

import (
	"context"
	"net"
)

// Accept accepts connections from ln and calls serve for each, one after the other. When ctx is done it returns nil.
// If ln fails earlier, Accept returns the error. When ctx is done, the caller must close ln to end a waiting Accept.
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
