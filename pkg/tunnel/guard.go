package tunnel

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
)

// Guard calls f and returns a panic in f as an error. It counts the panic and logs its stack. In the
// log, the parameter what says which thing ends because of the panic, such as "the session ends".
// Every goroutine that handles a peer's input runs under Guard, since a panic that nothing recovers
// ends the process.
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

// panics carries a panic from the goroutine in which it happens to the goroutine that waits
// for it and runs under Guard.
type panics struct {
	first atomic.Pointer[string] // the first panic with its stack; nil: there was none
}

// catch must be deferred. After a panic it stores the panic and calls end.
func (p *panics) catch(end func()) {
	if v := recover(); v != nil {
		text := fmt.Sprintf("%v\n%s", v, debug.Stack())
		p.first.CompareAndSwap(nil, &text)
		end()
	}
}

// again panics with the stored panic, if there is one.
func (p *panics) again() {
	if text := p.first.Load(); text != nil {
		panic(*text)
	}
}
