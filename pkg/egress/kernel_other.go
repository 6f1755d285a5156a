//go:build !linux

package egress

// hasEnded knows nothing: the target of a caller that has closed waits for halfOpen.
func hasEnded(uintptr) (ended, known bool) { return false, true }

// boundQueue does nothing: the front door is slower to notice that a reader takes something.
func boundQueue(uintptr) {}

// driverOf knows no device. There are no routes of Linux to ask it about, either.
func driverOf(string) string { return "" }
