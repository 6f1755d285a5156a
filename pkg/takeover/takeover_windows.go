package takeover

import (
	"context"
	"errors"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

var errWindows = errors.New("Windows cannot hand sockets over: stop the process, and then start the new one")

// Successor is the new process. Windows has none.
type Successor struct{}

// Predecessor is the old process. Windows has none.
type Predecessor struct {
	sockets  *listen.Sockets
	instance string

	endpoints []string
}

// Start fails.
func Start(Config) (*Successor, error) { return nil, errWindows }

// Join returns nil.
func Join(string) (*Predecessor, error) { return nil, nil }

// The methods are never called.

func (*Successor) PID() int                      { return 0 }
func (*Successor) Ready(context.Context) error   { return errWindows }
func (*Successor) Go([]tunnel.NodeName) error    { return errWindows }
func (*Successor) Serving(context.Context) error { return errWindows }
func (*Successor) Release()                      {}
func (*Successor) Kill() error                   { return nil }

func (*Predecessor) Ready(context.Context) ([]tunnel.NodeName, error) { return nil, errWindows }
func (*Predecessor) Serving()                                         {}
func (*Predecessor) Failed(*Failure)                                  {}
