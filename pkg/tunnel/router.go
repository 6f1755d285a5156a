package tunnel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Router finds the handler of a message by category and type. It does not change after
// NewRouter, so it needs no lock.
type Router struct {
	routes map[route]Handler
}

type route struct{ category, typ string }

// NewRouter reads the routes of all modules. It reports all conflicts in one error: two
// modules with one name, or a route without a handler, for example.
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
		for typ, h := range m.Routes() {
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

// Handle calls the handler of m. known is false if m has no handler. The caller then
// counts m and continues, since a newer peer may send types that this version lacks.
func (r *Router) Handle(ctx context.Context, from *Session, m *Message) (known bool, err error) {
	h, known := r.routes[route{m.Category, m.Type}]
	if !known {
		return false, nil
	}
	if err := h(ctx, from, m); err != nil {
		return true, fmt.Errorf("handling %s/%s: %w", m.Category, m.Type, err)
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
