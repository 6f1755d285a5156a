//go:build !linux

package konnectivity

// boundQueue does nothing: the front door is slower to notice that a reader takes something.
func boundQueue(uintptr) {}
