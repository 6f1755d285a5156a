package main

import (
	"context"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// leftRules is a module of an edge without [mode.edge.services] that has taken over from an edge with the table. In
// mode full, the old process leaves its rules in the kernel. leftRules removes them after the old process has ended.
type leftRules struct {
	remove func() // set once
}

// endTime is the longest time until the old process has ended, counted from when this process serves.
const endTime = lastTime + handOverTime + tunnel.GracePeriod + 5*time.Second

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
