//go:build !linux

package konnectivity

// limitSocketBuffer does nothing: progress of a slow reader is seen later than on Linux.
func limitSocketBuffer(uintptr) {}
