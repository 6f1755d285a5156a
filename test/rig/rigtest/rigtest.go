// Package rigtest has what the tests that use test/rig share: building the program before the tests
// run, and networks that a test skips without.
//
//	var program string // the program under test
//
//	func TestMain(m *testing.M) {
//		flag.Parse()
//		rigtest.Parallel(16)
//		os.Exit(rigtest.Main(m, &program))
//	}
//
// Benchmarks use test/rig without it.
package rigtest

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"tunnel.example/tunnel/test/rig"
)

// Main builds the program, stores its path in program, and runs the tests of m. It returns the exit
// code.
func Main(m *testing.M, program *string) int {
	dir, err := os.MkdirTemp("", "tunnel-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if *program, err = rig.Build(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// Parallel lets n tests of the package run at once, unless -parallel says otherwise. The default, one
// for each processor, is too few for tests that wait most of the time. Call it after flag.Parse.
func Parallel(n int) {
	const name = "test.parallel"
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == name })
	if given {
		return
	}
	if err := flag.Set(name, strconv.Itoa(n)); err != nil {
		panic(err)
	}
}

// Network makes a network that is closed when the test ends. It skips the test where no network can
// be made.
func Network(t testing.TB) *rig.Network {
	t.Helper()
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skipf("networks are made with ip(8), of iproute2: %v", err)
	}
	n, err := rig.NewNetwork()
	if errors.Is(err, syscall.EPERM) {
		t.Skip("needs the right to make network namespaces (CAP_SYS_ADMIN)")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return n
}
