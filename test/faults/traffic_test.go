package faults

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

const (
	// bulkRate is the pace of a bulk stream, each way: enough to be always in the
	// middle of something, little enough for ten pairs on two cores.
	bulkRate = 1 << 20
	// between is the pause between two attempts of the same kind.
	between = 100 * time.Millisecond
	// hangs is after how long an attempt that neither fails nor succeeds hangs. It
	// leaves a busy machine a little room beyond the promise.
	hangs = noticeWithin + 2*time.Second
)

// attempt is one try of a client.
type attempt struct {
	started time.Time
	up      time.Time // zero: it never worked
	ended   time.Time // zero: it has not
	err     error     // nil: it worked to its end
}

// kind is one sort of traffic: attempts, one after the other.
type kind struct {
	name string
	// try is one attempt. It calls up when the attempt has proven that the way is
	// open, for what never ends by itself; else its return of nil proves it.
	try func(ctx context.Context, up func()) error

	mu       sync.Mutex // guards the following
	attempts []attempt
}

// traffic is what all the clients of a pair do.
type traffic struct {
	t      *testing.T
	kinds  []*kind
	cancel context.CancelFunc
	wg     sync.WaitGroup
	// release has the target of the half-closed conns end them: nobody on the way
	// reads from such a client, and so nobody sees it go.
	release *gate
}

// startTraffic starts the clients and waits until each kind works.
func (p *pair) startTraffic() *traffic {
	p.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	tr := &traffic{t: p.t, cancel: cancel, kinds: p.kinds(), release: p.targets.release}
	tr.release.set(false)
	for _, k := range tr.kinds {
		tr.wg.Go(func() { k.run(ctx) })
	}
	p.t.Cleanup(tr.stop)
	tr.wait(time.Now().Add(-time.Second), patience)
	return tr
}

// stop ends the clients, which reset what they have open.
func (tr *traffic) stop() {
	tr.cancel()
	tr.wg.Wait()
	tr.release.set(true)
}

func (k *kind) run(ctx context.Context) {
	for ctx.Err() == nil {
		i := k.begin()
		err := k.try(ctx, func() { k.works(i) })
		if ctx.Err() != nil {
			err = nil // we have ended it
		}
		k.end(i, err)
		select {
		case <-time.After(between):
		case <-ctx.Done():
		}
	}
}

func (k *kind) begin() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.attempts = append(k.attempts, attempt{started: time.Now()})
	return len(k.attempts) - 1
}

func (k *kind) works(i int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if a := &k.attempts[i]; a.up.IsZero() {
		a.up = time.Now()
	}
}

func (k *kind) end(i int, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	a := &k.attempts[i]
	a.ended, a.err = time.Now(), err
	if err == nil && a.up.IsZero() {
		a.up = a.ended
	}
}

// since returns the attempts that were open at t or began later.
func (k *kind) since(t time.Time) (found []attempt) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, a := range k.attempts {
		if a.ended.IsZero() || a.ended.After(t) {
			found = append(found, a)
		}
	}
	return found
}

// firstSuccess returns when the first attempt that began after t worked.
func (k *kind) firstSuccess(t time.Time) (at time.Time, err error) {
	err = errors.New("no attempt has ended")
	for _, a := range k.since(t) {
		if a.started.Before(t) {
			continue
		}
		if !a.up.IsZero() {
			return a.up, nil
		}
		if a.err != nil {
			err = a.err
		}
	}
	return time.Time{}, err
}

// wait waits until every kind has had a success that began after t, and returns how
// long after t the last of them had its first.
func (tr *traffic) wait(t time.Time, limit time.Duration) (took time.Duration) {
	tr.t.Helper()
	for _, k := range tr.kinds {
		testkit.Within(tr.t, time.Until(t.Add(limit)), k.name+" works", func() error {
			at, err := k.firstSuccess(t)
			if err == nil {
				took = max(took, at.Sub(t))
			}
			return err
		})
	}
	return took
}

// judge looks at the time from a fault to its mending: what was open ended with an
// error within the limit, and nothing that began in between, after the process was
// dead, worked, hung, or looked like a clean end.
func (tr *traffic) judge(fault, dead, mended time.Time, limit time.Duration) (slowest time.Duration) {
	tr.t.Helper()
	for _, k := range tr.kinds {
		for _, a := range k.since(fault) {
			if a.started.After(mended) {
				continue
			}
			from := fault
			if a.started.After(fault) {
				from = a.started
			}
			what := fmt.Sprintf("%s, begun %s after the fault", k.name, a.started.Sub(fault).Round(time.Millisecond))
			switch {
			case a.ended.IsZero():
				tr.t.Errorf("%s: has not ended %s after it", what, time.Since(fault).Round(time.Millisecond))
				continue
			case a.started.After(dead) && !a.up.IsZero() && a.up.Before(mended):
				tr.t.Errorf("%s: worked", what)
			case a.err == nil && a.started.After(dead) && a.ended.Before(mended):
				tr.t.Errorf("%s: ended without an error", what)
			case errors.Is(a.err, io.EOF), errors.Is(a.err, io.ErrUnexpectedEOF):
				tr.t.Errorf("%s: a clean end in the middle of a stream: %v", what, a.err)
			case errors.Is(a.err, rig.ErrCorrupt):
				tr.t.Errorf("%s: %v", what, a.err)
			}
			took := a.ended.Sub(from)
			slowest = max(slowest, took)
			if took > limit {
				tr.t.Errorf("%s: its error came after %s, want %s: %v", what, took.Round(time.Millisecond), limit, a.err)
			}
		}
	}
	return slowest
}

// kinds are the clients of a pair.
func (p *pair) kinds() []*kind {
	return []*kind{
		{name: "short echo", try: func(ctx context.Context, _ func()) error { return tryEcho(ctx, p.Door("echo")) }},
		{name: "bulk both ways", try: func(ctx context.Context, up func()) error { return tryBulk(ctx, p.Door("bulk"), up) }},
		{name: "idle", try: func(ctx context.Context, up func()) error { return tryHold(ctx, p.Door("hold"), false, up) }},
		{name: "half-closed",
			try: func(ctx context.Context, up func()) error { return tryHold(ctx, p.Door("hold"), true, up) }},
		{name: "https passed through", try: p.tryHTTPS(false)},
		{name: "https terminated", try: p.tryHTTPS(true)},
	}
}

// dial connects to a front door. The conn is reset when ctx ends, and by close: the
// client is done with it, whatever is still on its way.
func dial(ctx context.Context, door string) (c *net.TCPConn, closeIt func(), err error) {
	raw, err := (&net.Dialer{Timeout: hangs}).DialContext(ctx, "tcp", door)
	if err != nil {
		return nil, nil, err
	}
	c = raw.(*net.TCPConn)
	if err := c.SetLinger(0); err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	return c, func() {
		stop()
		c.Close()
	}, nil
}

// errHang is what an attempt that took too long ends with.
var errHang = errors.New("it hangs")

func orHang(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w: %w", errHang, err)
	}
	return err
}

// tryEcho sends a line and reads it back.
func tryEcho(ctx context.Context, door string) error {
	c, closeIt, err := dial(ctx, door)
	if err != nil {
		return err
	}
	defer closeIt()
	if err := c.SetDeadline(time.Now().Add(hangs)); err != nil {
		return err
	}
	line := rig.Noise[:100]
	if _, err := c.Write(line); err != nil {
		return err
	}
	if err := c.CloseWrite(); err != nil {
		return err
	}
	got, err := io.ReadAll(c)
	switch {
	case err != nil:
		return orHang(err)
	case len(got) < len(line):
		return io.ErrUnexpectedEOF
	case !bytes.Equal(got, line):
		return rig.ErrCorrupt
	}
	return nil
}

// tryBulk streams both ways without end.
func tryBulk(ctx context.Context, door string, up func()) error {
	c, closeIt, err := dial(ctx, door)
	if err != nil {
		return err
	}
	defer closeIt()
	return transfer{BytesPerSecond: bulkRate}.run(c, func(n int64) {
		if n >= 64<<10 {
			up()
		}
	})
}

// tryHold waits for an end of a conn on which nothing happens.
func tryHold(ctx context.Context, door string, halfClosed bool, up func()) error {
	c, closeIt, err := dial(ctx, door)
	if err != nil {
		return err
	}
	defer closeIt()
	if err := c.SetDeadline(time.Now().Add(hangs)); err != nil {
		return err
	}
	b := make([]byte, 1)
	if _, err := io.ReadFull(c, b); err != nil {
		return orHang(err)
	}
	if halfClosed {
		if err := c.CloseWrite(); err != nil {
			return err
		}
	}
	up()
	if err := c.SetDeadline(time.Time{}); err != nil {
		return err
	}
	_, err = io.ReadFull(c, b)
	return err
}

// tryHTTPS gets a page, on a connection of its own. The error is rig.ErrLate if the front door may have hung up on a
// caller that was silent.
func (p *pair) tryHTTPS(terminated bool) func(ctx context.Context, _ func()) error {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(p.CA().CertPEM())
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool, ServerName: rig.Node}
	if terminated {
		cfg.ServerName = "127.0.0.1" // an address is never sent as SNI
		pair, err := tls.LoadX509KeyPair(p.Path("client.crt"), p.Path("client.key"))
		if err != nil {
			p.t.Fatal(err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return func(ctx context.Context, _ func()) (err error) {
		var late atomic.Bool
		defer func() {
			if err != nil && late.Load() {
				err = fmt.Errorf("%w: %w", rig.ErrLate, err)
			}
		}()
		client := &http.Client{Timeout: hangs, Transport: &http.Transport{
			TLSClientConfig: cfg,
			DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
				begun := time.Now()
				c, err := new(net.Dialer).DialContext(ctx, network, p.HTTPSDoor())
				if err != nil {
					return nil, err
				}
				return rig.NewLateConn(c, begun, &late), nil
			},
			DisableKeepAlives: true,
		}}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+rig.Node+"/", nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return httpError(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		switch {
		case err != nil:
			return httpError(err)
		case resp.StatusCode != http.StatusOK:
			return fmt.Errorf("HTTP %d: %s", resp.StatusCode, bytes.TrimSpace(body))
		case !bytes.Equal(body, page()):
			return rig.ErrCorrupt
		}
		return nil
	}
}

// httpError makes an end of input an error like others: TLS and HTTP know by
// themselves that an answer was cut short, so no clean end can be taken for one.
func httpError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("cut short: %v", err) //nolint:errorlint // it is not to be found as io.EOF
	}
	return orHang(err)
}
