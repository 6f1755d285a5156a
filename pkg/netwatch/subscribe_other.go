//go:build !linux

package netwatch

import "context"

// subscribe waits: only Linux tells.
func subscribe(ctx context.Context, _ chan<- struct{}) error {
	<-ctx.Done()
	return nil
}
