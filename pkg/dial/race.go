package dial

import (
	"context"
	"net"
	"strings"
	"time"
)

// raceError is why each of the tries has failed, in their order.
type raceError []error

// Error returns one line.
func (e raceError) Error() string {
	var all []string
	for _, err := range e {
		all = append(all, err.Error())
	}
	return strings.Join(all, "; ")
}

// Unwrap returns the errors, for errors.Is and errors.As.
func (e raceError) Unwrap() []error { return e }

// race calls try for 0 to n-1 and returns the first connection. It starts the next try when delay has passed
// since the last start, or when a try has failed. It cancels the other tries, closes connections that come
// too late, and returns after all tries have returned. If the time of ctx would not suffice for that, the delay is
// shorter, so that each try has a turn. If n is 1, its error is that of the try, else a raceError.
func race[C net.Conn](
	ctx context.Context, n int, delay time.Duration, try func(ctx context.Context, i int) (C, error),
) (won C, err error) {
	type result struct {
		i    int
		conn C
		err  error
	}
	if end, ok := ctx.Deadline(); ok {
		delay = min(delay, time.Until(end)/time.Duration(n+2)) // the last try has three times the delay
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan result) // race receives the result of every try, so no try blocks for ever
	errs := make(raceError, n)
	next := time.NewTimer(0) // starts the next try
	defer next.Stop()
	started, running, has := 0, 0, false
	for started < n && !has || running > 0 {
		select {
		case <-next.C:
			if has || started == n {
				continue
			}
			i := started
			started++
			running++
			go func() {
				c, err := try(ctx, i)
				results <- result{i, c, err}
			}()
			next.Reset(delay)
		case r := <-results:
			running--
			switch {
			case r.err != nil:
				errs[r.i] = r.err
				next.Reset(0)
			case has:
				r.conn.Close()
			default:
				won, has = r.conn, true
				cancel()
			}
		}
	}
	switch {
	case has:
		return won, nil
	case n == 1:
		return won, errs[0]
	}
	return won, errs
}
