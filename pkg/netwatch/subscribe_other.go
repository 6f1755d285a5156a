//go:build !linux

package netwatch

import "context"

// subscribe waits until ctx is done: only on Linux does it report changes.
func subscribe(ctx context.Context, _ chan<- struct{}) error {
	<-ctx.Done()
	return nil
}
