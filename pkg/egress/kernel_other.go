//go:build !linux

package egress

// boundQueue does nothing: the front door is slower to notice that a reader takes something.
func boundQueue(uintptr) {}

// driverOf knows no device. There are no routes of Linux to ask it about, either.
func driverOf(string) string { return "" }
