//go:build !linux

package netwatch

import "context"

// subscribe waits until ctx is done: only on Linux does it report changes.
func subscribe(ctx context.Context, _ chan<- struct{}) (opened bool, err error) {
	<-ctx.Done()
	return false, nil
}
