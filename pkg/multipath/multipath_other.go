//go:build !linux

package multipath

import "context"

// Run implements tunnel.Module.
func (e *Endpoints) Run(ctx context.Context) error {
	close(e.told)
	e.failed("only Linux has endpoints of Multipath TCP")
	<-ctx.Done()
	return nil
}
