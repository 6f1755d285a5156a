package demo

import (
	"runtime"
	"syscall"
)

// childAttr gives a child a process group of its own, so that Ctrl-C reaches the demo alone:
// Run stops the children in order. When the demo dies, the kernel sends the child SIGTERM
// (prctl(2), PR_SET_PDEATHSIG).
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
}

// pinThread keeps the goroutine on its thread: the kernel sends Pdeathsig when the thread
// that started the child ends, not when the process does.
func pinThread() { runtime.LockOSThread() }
