package main

import (
	"runtime"
	"syscall"
)

// childAttr has a child end with this process, however that ends, and keeps Ctrl-C
// from reaching it: we stop our children ourselves.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
}

// pinThread keeps the goroutine on its thread: Pdeathsig is about the thread.
func pinThread() { runtime.LockOSThread() }
