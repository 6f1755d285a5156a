package tunnel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Handler handles one message. It normally runs on the session's receive loop, so it must not dial,
// wait for the network, or wait to send. Work that takes time goes to [Incoming.Serve] or to a
// goroutine that the session waits for. An error ends the session. The sender is in.From.Node; a node
// name inside the message is not trusted.
type Handler func(ctx context.Context, in *Incoming) error

// Routed is a module that handles the messages of its category. A module that is not Routed gets no
// messages from peers.
type Routed interface {
	Module
	// Routes maps message types to handlers. NewRouter calls it once, before the first message.
	Routes() map[string]Handler
}

// Router finds the handler of a message by category and type. It does not change after
// NewRouter, so it needs no lock.
type Router struct {
	routes map[route]Handler
}

type route struct{ category, typ string }

// NewRouter reads the routes of the modules that are [Routed]. It reports all conflicts in one
// error: two modules with one name, or a route without a handler, for example.
func NewRouter(mods ...Module) (*Router, error) {
	r := &Router{routes: make(map[route]Handler)}
	seen := make(map[string]bool)
	var errs []error
	for _, m := range mods {
		name := m.Name()
		switch {
		case name == "":
			errs = append(errs, fmt.Errorf("a %T has no name", m))
			continue
		case seen[name]:
			errs = append(errs, fmt.Errorf("two modules are named %q", name))
			continue
		}
		seen[name] = true
		routed, ok := m.(Routed)
		if !ok {
			continue
		}
		for typ, h := range routed.Routes() {
			switch {
			case typ == "":
				errs = append(errs, fmt.Errorf("module %q has a route with an empty type", name))
			case h == nil:
				errs = append(errs, fmt.Errorf("route %s/%s has no handler", name, typ))
			default:
				r.routes[route{name, typ}] = h
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return r, nil
}

// Handle calls the handler of a message. known is false if the message has no handler. The
// caller then counts the message and continues, since a newer peer may send types that this
// version lacks.
func (r *Router) Handle(ctx context.Context, in *Incoming) (known bool, err error) {
	h, known := r.routes[route{in.Category, in.Type}]
	if !known {
		return false, nil
	}
	if err := h(ctx, in); err != nil {
		return true, fmt.Errorf("handling %s/%s: %w", in.Category, in.Type, err)
	}
	return true, nil
}

// Routes returns "category/type" of every route, sorted, for the log line at start-up.
func (r *Router) Routes() []string {
	var names []string
	for rt := range maps.Keys(r.routes) {
		names = append(names, rt.category+"/"+rt.typ)
	}
	slices.Sort(names)
	return names
}
