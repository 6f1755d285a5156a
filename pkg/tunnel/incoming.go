package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net"
)

// Incoming is a received message, the session that the message came by, and the way to answer it:
// what the request and the writer are to an HTTP handler.
type Incoming struct {
	*Message
	From *Session // the session that the message came by; its Node is the sender
	Way  Way      // the way that an open came; nil at the cloud, which serves no opens
}

// Way is the way that an open came to the edge: the control stream, or a connection of its own.
// The answer takes the same way.
type Way interface {
	// ServeOpen answers the open in as [Incoming.Serve] says.
	ServeOpen(in *Incoming, dial DialFunc) error
}

// DialFunc dials the target of a request from the edge. ctx is done when the caller
// has left or the session has ended.
type DialFunc func(ctx context.Context, r Request) (net.Conn, error)

// Serve answers an open in a goroutine of the session. It splices the conn that dial returns to
// the caller's conn, or sends the error of dial as a refusal. A handler may call it: Serve
// returns at once, unless the open came by a connection of its own, whose goroutine then does
// the work. Serve returns an error if the message is not an open, or if this side is the cloud:
// the cloud never dials for an edge.
func (in *Incoming) Serve(dial DialFunc) error {
	switch {
	case in.Type != TypeOpen:
		return fmt.Errorf("%s/%s asks for no conn", in.Category, in.Type)
	case in.Way == nil:
		return errors.New("the cloud does not dial for an edge")
	}
	return in.Way.ServeOpen(in, dial)
}
