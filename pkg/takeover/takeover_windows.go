package takeover

import (
	"context"
	"errors"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

var errWindows = errors.New("Windows cannot hand sockets over: stop the process, and then start the new one")

// Successor is never used on Windows: see Start.
type Successor struct{}

// Predecessor is never used on Windows: Join returns nil.
type Predecessor struct {
	sockets  *listen.Sockets
	instance string

	endpoints []string
}

// Start fails: Windows cannot hand sockets over.
func Start(Config) (*Successor, error) { return nil, errWindows }

// Join returns nil: there is no old process.
func Join(string) (*Predecessor, error) { return nil, nil }

// Nobody calls the methods: there is no Successor, and Predecessor is always nil.

func (*Successor) PID() int                      { return 0 }
func (*Successor) Ready(context.Context) error   { return errWindows }
func (*Successor) Go([]tunnel.NodeName) error    { return errWindows }
func (*Successor) Serving(context.Context) error { return errWindows }
func (*Successor) Release()                      {}
func (*Successor) Kill()                         {}

func (*Predecessor) Ready(context.Context) ([]tunnel.NodeName, error) { return nil, errWindows }
func (*Predecessor) Serving()                                         {}
func (*Predecessor) Failed(*Failure)                                  {}
