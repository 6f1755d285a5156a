package testkit

import "context"

// Deadline returns a context whose deadline is when passed is closed. With it, a test sees the timeout of a certain
// step, however slowly the machine runs the steps before.
func Deadline(ctx context.Context, passed <-chan struct{}) context.Context {
	return deadline{ctx, passed}
}

type deadline struct {
	context.Context

	passed <-chan struct{}
}

// Done implements context.Context.
func (d deadline) Done() <-chan struct{} { return d.passed }

// Err implements context.Context.
func (d deadline) Err() error {
	select {
	case <-d.passed:
		return context.DeadlineExceeded
	default:
		return nil
	}
}
