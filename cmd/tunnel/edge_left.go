package main

import (
	"context"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// leftRules is the module of an edge without [mode.edge.services] that has taken over from an edge with the table: it
// removes the rules when the process before has ended. In mode full, that process leaves them.
type leftRules struct {
	remove func() // set once
}

// endTime is how long the process before goes on after this one serves, with time for its end.
const endTime = lastTime + tunnel.GracePeriod + 5*time.Second

// Name implements tunnel.Module.
func (leftRules) Name() string { return "services-left" }

// Run implements tunnel.Module.
func (l leftRules) Run(ctx context.Context) error {
	select {
	case <-time.After(endTime):
		l.remove()
	case <-ctx.Done():
		return nil
	}
	<-ctx.Done() // a module ends with the process
	return nil
}
