package testkit

import (
	"net"
	"strconv"
	"testing"

	"tunnel.example/tunnel/internal/freeport"
)

// FreePort returns a port on which nobody listens, neither for TCP nor for UDP. No other test of this machine gets it.
func FreePort(t testing.TB) int {
	t.Helper()
	port, err := freeport.New()
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// FreeAddress returns an address on loopback with a port of FreePort.
func FreeAddress(t testing.TB) string {
	t.Helper()
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(FreePort(t)))
}
