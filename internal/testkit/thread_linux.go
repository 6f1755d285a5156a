package testkit

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThread runs f on a thread that ends after it, so f may change the network namespace of its thread.
func OnThread(f func() error) error {
	done := make(chan error, 1) // capacity 1: the goroutine ends even if nobody receives
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine, unless the goroutine unlocks it
		if unix.Gettid() != os.Getpid() {
			done <- f()
			return
		}
		done <- OnThread(f) // the main thread never ends
		runtime.UnlockOSThread()
	}()
	return <-done
}
