package tunnel

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
)

// Guard calls f and returns a panic in f as an error. It counts the panic and logs its
// stack; what names the thing that ends because of it, such as "the session ends". Every
// goroutine that handles a peer's input runs under a guard, since an unguarded panic ends
// the process.
func Guard(log *slog.Logger, counters *Counters, what string, f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			counters.Panics.Add(1)
			log.Error("panic; "+what, "err", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("internal error: %v", p)
		}
	}()
	return f()
}

// panics takes a panic from the goroutine in which it happens to the one that waits for
// it, which has a guard.
type panics struct{ first atomic.Pointer[string] }

// catch is deferred. After a panic it calls end.
func (p *panics) catch(end func()) {
	if v := recover(); v != nil {
		text := fmt.Sprintf("%v\n%s", v, debug.Stack())
		p.first.CompareAndSwap(nil, &text)
		end()
	}
}

// again panics if there was a panic.
func (p *panics) again() {
	if text := p.first.Load(); text != nil {
		panic(*text)
	}
}
