//go:build unix && !linux

package demo

import "syscall"

// childAttr gives a child a process group of its own, so that Ctrl-C reaches the demo alone:
// Run stops the children in order.
func childAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// pinThread does nothing: only Linux ties a child to a thread.
func pinThread() {}
