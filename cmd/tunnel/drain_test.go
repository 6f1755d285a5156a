package main

import (
	"log/slog"
	"testing"

	"tunnel.example/tunnel/pkg/tunnel"
)

// fakeSite counts conns of other edges that the test has made up.
type fakeSite struct {
	conns   int64
	drained int
}

func (s *fakeSite) Conns() int64 { return s.conns }
func (s *fakeSite) Drain()       { s.drained++ }

// A drain of an edge also reaches the conns of other edges of its site, which have no session.
func TestDrainOfSite(t *testing.T) {
	site, session := &fakeSite{conns: 3}, new(tunnel.Session)
	session.Conns.Store(12)
	r := &restarter{
		daemon: &daemon{
			mode: "edge", log: slog.New(slog.DiscardHandler), site: site,
			live: func() []*tunnel.Session { return []*tunnel.Session{session} },
		},
		reloader: new(reloader),
	}
	for range 2 {
		got, err := r.drain(t.Context(), false)
		if err != nil || *got != (drained{"edge", 15}) || site.drained != 1 {
			t.Errorf("drain says %+v, %v; the site was drained %d times", got, err, site.drained)
		}
	}
}
