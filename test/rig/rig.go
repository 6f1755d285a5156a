// Package rig starts a cloud and an edge as processes of their own, on loopback, for
// tests and benchmarks that need to kill, stop, restart and weigh them.
//
//	binary, err := rig.Build(dir)
//	pair, err := rig.NewPair(rig.Config{Binary: binary, Dir: dir, TCP: map[string]string{"echo": target}})
//	cloud, err := pair.StartCloud()
//	edge, err := pair.StartEdge()
//	conn, err := net.Dial("tcp", pair.Door("echo"))
//	cloud.Signal(syscall.SIGKILL)
//	<-cloud.Done()
//
// A [Fleet] is several clouds that are replicas of each other, and edges; a [Network]
// keeps processes apart, so that what passes between them can be cut.
//
// A process started here ends at the latest when the process that started it does,
// however that ends. Whoever starts one waits for it: see [Process.Kill].
//
// The package knows nothing of testing, so that a program can use it as well as a
// test. It works on Linux alone, like /proc and Pdeathsig.
package rig

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
)

// Build builds the program into dir, as `make build` does, and returns its path.
func Build(dir string) (string, error) {
	path := filepath.Join(dir, "tunnel")
	build := exec.Command("go", "build", "-trimpath", "-tags=grpcnotrace", "-ldflags=-s -w",
		"-o", path, "tunnel.example/tunnel/cmd/tunnel")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building the program: %w\n%s", err, out)
	}
	return path, nil
}

// TempDir makes a folder for the files of a program, with tokens and keys in them. If the program is interrupted,
// TempDir removes the folder and ends the program; processes started here end with it. The caller calls remove at its
// own end.
func TempDir(prefix string) (dir string, remove func(), err error) {
	if dir, err = os.MkdirTemp("", prefix); err != nil {
		return "", nil, err
	}
	remove = func() { os.RemoveAll(dir) }
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-interrupted
		remove()
		os.Exit(1)
	}()
	return dir, remove, nil
}

// write writes the files of a folder.
func write(dir string, files map[string]string) error {
	var errs []error
	for name, text := range files {
		errs = append(errs, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	return errors.Join(errs...)
}
