package main

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// The rules of the process before are removed once, after the last moment at which it may serve.
func TestLeftRules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start, removed := time.Now(), []time.Duration(nil)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1) // one error is sent
		go func() {
			ended <- leftRules{func() { removed = append(removed, time.Since(start)) }}.Run(ctx)
		}()
		time.Sleep(time.Hour)
		synctest.Wait()
		if len(removed) != 1 || removed[0] <= lastTime+handOverTime+tunnel.GracePeriod || removed[0] > time.Minute {
			t.Errorf("the rules are removed after %v", removed)
		}
		select {
		case err := <-ended:
			t.Errorf("the module has ended before the process: %v", err)
		default:
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		go func() { ended <- leftRules{func() { t.Error("an edge that ends removes rules") }}.Run(ctx) }()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
