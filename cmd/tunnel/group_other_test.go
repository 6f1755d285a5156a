//go:build !unix

package main

import (
	"os"
	"os/exec"
)

func inGroup(*exec.Cmd) {}

func ctrlC(cmd *exec.Cmd) error { return cmd.Process.Signal(os.Interrupt) }
