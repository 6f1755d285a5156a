// Package freeport chooses ports for programs and listeners that a test starts.
//
//	port, err := freeport.New()
//
// Tests of several packages run at once, and a port is free for a while before the program under test listens on it.
// So a process locks a file for each port that it has chosen. A test writes testkit.FreePort or testkit.FreeAddress.
// The package does not import testing, so test/rig and the benchmarks use it as well.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
)

// Ports stay below those that the kernel gives to outgoing connections, from 32768: while a cloud is down, no other
// connection must take its port. They also stay below those of `tunnel demo`, which locks none:
// internal/demo/files.go. And they stay above the ports of Kubernetes, such as 10250: tests name these as targets, and
// mean a port on which nobody listens.
const (
	first = 10300
	last  = 25000
)

// taken holds the locked file of each port that this process has chosen.
var taken sync.Map //nolint:gochecknoglobals // a port belongs to the process, until the process ends

// New returns a port on which nobody listens now, neither for TCP nor for UDP. No other call of New on this machine
// returns the port until the process ends.
func New() (int, error) {
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("tunnel-test-ports-%d", os.Getuid()))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return 0, err
	}
	for range 1000 {
		port := first + rand.IntN(last-first) //nolint:gosec // a port number is no secret
		file, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(port)), os.O_CREATE|os.O_RDWR, 0o644)
		if err != nil {
			return 0, err
		}
		if lock(file) == nil && free(port) {
			taken.Store(port, file)
			return port, nil
		}
		file.Close()
	}
	return 0, fmt.Errorf("no free port between %d and %d", first, last)
}

// free reports whether nobody listens on a port, on any address of this machine.
func free(port int) bool {
	address := ":" + strconv.Itoa(port)
	ln, err := net.Listen("tcp", address)
	if err != nil {
		return false
	}
	defer ln.Close()
	c, err := net.ListenPacket("udp", address)
	if err != nil {
		return false
	}
	return c.Close() == nil
}
