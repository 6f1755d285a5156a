package main

import (
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// Two signals at once count as one: the process drains and exits with 0.
func TestDoubledSignal(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	cmd := exec.Command(os.Args[0], "demo")
	cmd.Env = append(os.Environ(), runMain+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	io.ReadFull(out, make([]byte, 1))
	go io.Copy(io.Discard, out)
	// Stopped, the process gets both when it goes on.
	for _, s := range []os.Signal{syscall.SIGSTOP, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCONT} {
		cmd.Process.Signal(s)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the demo ended with %v", err)
	}
	wantNothingLeft(t)
}
