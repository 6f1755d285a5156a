// Package takeover lets a new process of this program take over the listening sockets of the running process. Here the
// running process is called the old process.
//
// The old process starts the new process:
//
//	next, err := takeover.Start(takeover.Config{Program: "/usr/bin/tunnel", Args: os.Args, Sockets: sockets})
//	err = next.Ready(ctx)       // the new process has opened everything
//	sockets.Pause(listen.Edges) // edges that connect from now on reach the new process
//	err = next.Go(nodes)
//	err = next.Serving(ctx)     // the new process accepts callers
//	sockets.Leave()             // then drain
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
// Until the new process serves, the old process can still continue. After an error, or when the new process ends, the
// old process calls Kill, and sockets.Resume. If the old process ends first, the new process serves.
//
// The old process forks, so the new process has the same user, limits and namespaces. The sockets and one end of a
// socketpair(2) are open files of the new process. The processes exchange lines of JSON over the pair.
//
// SO_REUSEPORT would not do: it gives each process a queue of its own. When a process closes its listener, the kernel
// resets the connections in the queue of the listener. So each restart would refuse some callers.
//
// The package does not drain, and does not know for what the sockets are used.
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

// Config says how to start the new process, and what to pass to it.
type Config struct {
	Program string   // the path of the program
	Args    []string // in the form of os.Args: the first is the name of the program
	Env     []string // in the form of os.Environ
	Sockets *listen.Sockets
	// Instance is the instance of an edge (stream.Client). The new process keeps it. "" in a cloud.
	Instance string
	// Endpoints returns the endpoints of Multipath TCP that an edge has made (package multipath). Go passes them to the
	// new process. nil: there are none.
	Endpoints func() []string
	// Sibling makes the new process a child of this process's parent. Set it only if that parent is systemd. systemd waits
	// for the end of a service's main process only if it is a child of systemd. Of any other main process, `systemctl
	// stop` does not wait: unless the service has another process, systemd sends SIGTERM and SIGKILL together
	// (main_pid_alien in systemd's src/core/service.c). Only Linux has siblings: elsewhere Sibling changes nothing.
	Sibling bool
}

// Failure is the error of a new process that does not serve, as the new process has sent it.
type Failure struct {
	Text          string `json:"text"`
	Configuration bool   `json:"configuration,omitempty"` // the configuration has a problem
}

// Error implements error.
func (f *Failure) Error() string { return f.Text }

// message is one line of JSON between the two processes. Exactly one of Offer, Ready, Go, Serving and Failed is set.
type message struct {
	// The old process sends these. Offer is the first line.
	Offer     *offer            `json:"offer,omitempty"`
	Go        bool              `json:"go,omitempty"`
	Nodes     []tunnel.NodeName `json:"nodes,omitempty"`     // with Go: the nodes whose edges are about to connect
	Endpoints []string          `json:"endpoints,omitempty"` // with Go: Config.Endpoints

	// The new process sends these.
	Ready   bool     `json:"ready,omitempty"`
	Serving bool     `json:"serving,omitempty"`
	Failed  *Failure `json:"failed,omitempty"`
}

// offer tells the new process which sockets it has got from the old one. It names the sockets in the order in which the
// new process has them as open files, from firstSocket on.
type offer struct {
	Sockets  []listen.Name `json:"sockets"`
	Instance string        `json:"instance,omitempty"` // Config.Instance
}

// errEnded says that the other process has closed its end of the socketpair, usually because it has ended.
var errEnded = errors.New("the other process has ended")

// Numbers (file descriptors) of the new process's open files.
const (
	pairFile    = 3 // the new process's end of the socketpair
	firstSocket = 4 // the first socket of the offer; the others follow
)

// sockets returns the sockets that an offer names, from the open files of this process.
func (o *offer) sockets() []listen.Copy {
	var all []listen.Copy
	for i, name := range o.Sockets {
		all = append(all, listen.Copy{Name: name, File: os.NewFile(uintptr(firstSocket+i), name.Address)})
	}
	return all
}

// ErrVersion is the error of Join if another version of this program, with other messages, has started this process.
var ErrVersion = errors.New("the running process uses another version of the takeover messages: " +
	"stop it, and then start the new one")

// want reads the next message, and returns it if expected returns true for it. If the other process has sent Failed,
// want returns that Failure as its error.
func want(from *json.Decoder, expected func(*message) bool) (*message, error) {
	m := new(message)
	if err := from.Decode(m); err != nil {
		return nil, fmt.Errorf("%w: %w", errEnded, err)
	}
	switch {
	case m.Failed != nil:
		return nil, m.Failed
	case !expected(m):
		return nil, errors.New("the other process sent an unexpected message")
	}
	return m, nil
}

// Sockets returns the sockets of the old process. If there is no old process, it returns new Sockets.
func (p *Predecessor) Sockets() *listen.Sockets {
	if p == nil {
		return listen.NewSockets()
	}
	return p.sockets
}

// Endpoints returns the Config.Endpoints of the old process. Call it only after Ready has returned.
func (p *Predecessor) Endpoints() []string { return p.endpoints }

// Instance returns the instance of the old process; "": there is none.
func (p *Predecessor) Instance() string {
	if p == nil {
		return ""
	}
	return p.instance
}
