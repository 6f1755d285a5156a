package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// newEdgeReloader returns the reloader of an edge that runs with w.
func newEdgeReloader(
	w *edgeWiring, file string, hangups <-chan os.Signal, stop context.CancelFunc,
) *reloader {
	r := newReloader(w.daemon, w.conf.Settings(), hangups, stop)
	r.live = func([]conf.Change) liveKeys {
		return liveKeys{is: func(key string) bool { return key == "mode.edge.allow" || key == "mode.edge.limits.flows" }}
	}
	r.read = func() (*candidate, error) {
		e, err := conf.LoadEdge(file, environment())
		if err != nil {
			return nil, err
		}
		told := new(warnings)
		if _, err = newEdge(e, slog.New(told)); err != nil { // it opens nothing
			return nil, err
		}
		policy, err := auth.ParsePolicy(e.Allow)
		if err != nil {
			return nil, fmt.Errorf("mode.edge allow: %w", err)
		}
		return &candidate{
			settings: e.Settings(), warnings: slices.Concat(e.Warnings, told.texts),
			prepare: func(context.Context, func(string) bool) (tunnel.PreparedAll, error) {
				return prepareAll(atOnce(func() {
					w.policy.Adopt(policy)
					w.datagrams.SetFlows(e.Limits.Flows)
					if w.services != nil {
						w.services.SetFlows(e.Limits.Flows)
					}
				}))
			},
		}, nil
	}
	return r
}
