//go:build !linux

package egress

import "errors"

// hasEnded cannot look for a FIN here. If a caller has closed its connection, the target sees the end
// only when the conn has been idle for a while (konnectivity.Conn).
func hasEnded(uintptr) (ended, known bool) { return false, true }

// driverOf knows no device. Without Linux there are no routes to ask about, either.
func driverOf(string) string { return "" }

// nameOf knows no device.
func nameOf(int) string { return "" }

// readRoutes reads no routing table.
func readRoutes() ([]route, error) { return nil, errors.New("no routing table can be read") }
