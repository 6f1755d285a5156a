package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"time"

	"tunnel/conf"
	"tunnel/pkg/auth"
	"tunnel/pkg/setup"
)

// demoGuest is a second node, which joins as a person has one join.
const demoGuest = "edge2"

// checkJoin has a second node join by a token: it gets a certificate, and a session by it.
// What tunnel token create, tunnel join and tunnel edge do is done in here.
func (d *demo) checkJoin(ctx context.Context) error {
	c, err := conf.LoadCloud(d.path("cloud.toml"), environment())
	if err != nil {
		return err
	}
	created, err := setup.CreateToken(c, host(), demoGuest, setup.LeastTTL)
	if err != nil {
		return err
	}
	if err = created.Unwritten(); err != nil {
		return err
	}
	created.Adopted(ctx)
	token, err := auth.ParseJoinToken(created.Token)
	if err != nil {
		return err
	}
	var steps bytes.Buffer
	err = setup.Join(ctx, setup.JoinConfig{Token: token, Dir: d.path(demoGuest), Host: host(), Out: &steps})
	if err != nil {
		return fmt.Errorf("%w:\n%s", err, steps.String())
	}
	e, err := conf.LoadEdge(d.path(demoGuest+"/"+"edge.toml"), environment())
	if err != nil {
		return err
	}
	return hasSession(ctx, e)
}

// hasSession runs an edge until it has a session.
func hasSession(ctx context.Context, e *conf.Edge) error {
	edge, err := newEdge(e, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	run, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- edge.run(run) }()
	defer func() {
		stop()
		<-ended //nolint:errcheck // it was asked to end
	}()
	for {
		err = edge.checks[0].Ready() // that of the client
		if err == nil {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}
