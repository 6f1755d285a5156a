//go:build unix && !linux

package main

import "syscall"

// childAttr keeps Ctrl-C from reaching a child: we stop our children ourselves.
func childAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// pinThread does nothing where no child depends on a thread.
func pinThread() {}
