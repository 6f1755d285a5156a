package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net"
)

// Incoming is a received message, the session that the message came by, and the way to answer it. It
// is to a [Handler] what the request and the response writer are to an HTTP handler.
type Incoming struct {
	*Message
	From *Session // the session that the message came by; its Node is the sender
	Way  Way      // how an open came; nil at the side that only sends opens, such as the cloud
}

// Way is how an open came to the edge: by the control stream, or by a data connection. The answer takes
// the same way. A replica that has joined another replica serves opens as an edge does.
type Way interface {
	// ServeOpen answers the open in as [Incoming.Serve] says.
	ServeOpen(in *Incoming, dial DialFunc) error
}

// DialFunc dials the target of a request from the edge. ctx is done when the caller
// has left or the session has ended.
type DialFunc func(ctx context.Context, r Request) (net.Conn, error)

// Serve answers an open. It splices the conn that dial returns to the caller's conn, or sends the
// error of dial as a refusal. A handler may call Serve. An open that came by the control stream is
// served in a new goroutine, and Serve returns at once. An open that came by a data connection is
// served by the goroutine that reads that connection, before Serve returns. Serve returns an error if
// the message is not an open, or if this side serves no opens: the cloud never dials for an edge.
func (in *Incoming) Serve(dial DialFunc) error {
	switch {
	case in.Type != TypeOpen:
		return fmt.Errorf("%s/%s asks for no conn", in.Category, in.Type)
	case in.Way == nil:
		return errors.New("the cloud does not dial for an edge")
	}
	return in.Way.ServeOpen(in, dial)
}
