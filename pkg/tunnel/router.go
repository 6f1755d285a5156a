package tunnel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Router finds the handler of a message by its category and type. It never changes
// after NewRouter, so it needs no lock.
type Router struct {
	routes map[route]Handler
}

type route struct{ category, typ string }

// NewRouter reads the routes of every module. All conflicts (two modules of one
// name, a route without a handler) are reported in one error.
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

// Handle gives m to its handler. known is false when nobody handles such a message:
// the caller counts that and goes on, so that a newer peer does no harm.
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

// Routes lists "category/type" of every route, sorted, for the start-up line.
func (r *Router) Routes() []string {
	var names []string
	for rt := range maps.Keys(r.routes) {
		names = append(names, rt.category+"/"+rt.typ)
	}
	slices.Sort(names)
	return names
}
