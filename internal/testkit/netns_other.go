//go:build !linux

package testkit

import "testing"

// InOwnNetwork skips the test: only Linux has network namespaces.
func InOwnNetwork(t *testing.T, _ ...string) bool {
	t.Helper()
	t.Skip("only Linux has network namespaces")
	return false
}
