// Package takeover starts this program once more, and gives the new process the listening sockets of the old one.
//
// The old process:
//
//	next, err := takeover.Start(takeover.Config{Program: "/usr/bin/tunnel", Args: os.Args, Sockets: sockets})
//	err = next.Ready(ctx)       // it has opened everything
//	sockets.Pause(listen.Edges) // edges that connect from now on find the new process
//	err = next.Go(nodes)
//	err = next.Serving(ctx)     // it accepts callers
//	sockets.Leave()             // drain
//
// The new process:
//
//	before, err := takeover.Join(os.Getenv(takeover.Variable)) // nil: there is no old process
//	sockets := before.Sockets()
//	nodes, err := before.Ready(ctx)
//	sockets.Resume(listen.Edges) // wait for nodes
//	sockets.Serve()
//	before.Serving()
//
// Until the new process serves, the old one can go on as if nothing had happened: with an error, or when the new
// process ends, call Kill and resume. If the old process ends first, the new one serves.
//
// The new process is a child, so it has the same user, limits and namespaces. The sockets and one end of a
// socketpair(2) are open files of the child. The processes exchange lines of JSON over the pair.
//
// Why not SO_REUSEPORT: with it, each process has a queue of its own. The kernel resets the connections that wait in
// the queue of a listener that is closed, so callers are refused at each restart.
//
// The package does not drain, and does not know what the sockets are for.
package takeover

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Variable is the environment variable by which a process knows that it takes over. Its value is [Value].
const Variable = "TUNNEL_TAKE_OVER"

// Value is the value of Variable: the version of the messages.
const Value = "1"

// Config says what to start.
type Config struct {
	Program string   // path
	Args    []string // with the name of the program, as os.Args
	Env     []string // as os.Environ returns it
	Sockets *listen.Sockets
	// Instance is the instance of an edge (stream.Client), which the new process keeps. "" in a cloud.
	Instance string
	// Endpoints returns the endpoints that an edge has made (package multipath). Go hands them over. nil: there are none.
	Endpoints func() []string
}

// Failure is why a new process does not serve, in its own words.
type Failure struct {
	Text          string `json:"text"`
	Configuration bool   `json:"configuration,omitempty"` // the configuration has a problem
}

// Error implements error.
func (f *Failure) Error() string { return f.Text }

// message is a line of either side. Exactly one field is set, except in offer.
type message struct {
	Offer   *offer            `json:"offer,omitempty"`   // old: the first line
	Ready   bool              `json:"ready,omitempty"`   // new
	Go      bool              `json:"go,omitempty"`      // old
	Nodes   []tunnel.NodeName `json:"nodes,omitempty"`   // old, with Go
	Serving bool              `json:"serving,omitempty"` // new
	// Endpoints are those that the old process has made (package multipath). old, with Go.
	Endpoints []string `json:"endpoints,omitempty"`
	Failed    *Failure `json:"failed,omitempty"` // new
}

// offer names the sockets, in the order of the open files.
type offer struct {
	Sockets  []listen.Name `json:"sockets"`
	Instance string        `json:"instance,omitempty"`
}

// errEnded is the error of a process that has ended before it said why.
var errEnded = errors.New("the other process has ended")

// Open files of the new process.
const (
	pairFile    = 3 // its end of the socketpair
	firstSocket = 4
)

// sockets makes the sockets of an offer.
func (o *offer) sockets() []listen.Copy {
	var all []listen.Copy
	for i, name := range o.Sockets {
		all = append(all, listen.Copy{Name: name, File: os.NewFile(uintptr(firstSocket+i), name.Address)})
	}
	return all
}

// ErrVersion is why a process cannot take over from another version of this program.
var ErrVersion = errors.New("the running process hands over in another way: stop it, and then start the new one")

// want decodes a line, and returns it if it is what is expected.
func want(from *json.Decoder, expected func(*message) bool) (*message, error) {
	m := new(message)
	if err := from.Decode(m); err != nil {
		return nil, fmt.Errorf("%w: %w", errEnded, err)
	}
	switch {
	case m.Failed != nil:
		return nil, m.Failed
	case !expected(m):
		return nil, errors.New("the other process has sent something else than expected")
	}
	return m, nil
}

// Sockets returns the sockets of the old process; without one, new sockets.
func (p *Predecessor) Sockets() *listen.Sockets {
	if p == nil {
		return listen.NewSockets()
	}
	return p.sockets
}

// Endpoints returns the endpoints of the old process, once Ready has returned.
func (p *Predecessor) Endpoints() []string { return p.endpoints }

// Instance returns the instance of the old process.
func (p *Predecessor) Instance() string {
	if p == nil {
		return ""
	}
	return p.instance
}
