//go:build unix

package main

import (
	"os/exec"
	"syscall"
)

// inGroup has a process start in a process group of its own, which Ctrl-C in a terminal does not reach.
func inGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// ctrlC sends SIGINT to the group of a process, as a terminal does.
func ctrlC(cmd *exec.Cmd) error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
