package replicas

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

const (
	// A request that takes longer than hangs has hung. A peer that is lost is noticed earlier.
	hangs = noticeWithin + atOnce
	// workers is how many requests may be under way at once.
	workers = 64
	// balanced stands for a replica: whichever the balancer chooses.
	balanced = -1
)

// request is one short request, or a stream.
type request struct {
	node    int
	replica int // through which; or balanced
	tls     bool
}

func (f *fleet) dial(ctx context.Context, replica int, addr func(*rig.Replica) string) (net.Conn, error) {
	if replica == balanced {
		c, _, err := f.balancer.connect(ctx, addr, -1)
		return c, err
	}
	return new(net.Dialer).DialContext(ctx, "tcp", addr(f.Replicas[replica]))
}

// do makes one request, on a connection of its own. The error is rig.ErrLate if the https front door may have hung up
// on a caller that was silent.
func (f *fleet) do(ctx context.Context, r request) (err error) {
	var late atomic.Bool
	defer func() {
		if err != nil && late.Load() {
			err = fmt.Errorf("%w: %w", rig.ErrLate, err)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, hangs)
	defer cancel()
	node := f.nodes[r.node]
	addr, url := func(c *rig.Replica) string { return c.Door(door(node, "http")) }, "http://"+node+"/"
	tr := &http.Transport{DisableKeepAlives: true}
	if r.tls {
		addr, url = (*rig.Replica).HTTPSDoor, "https://"+node+"/"
		tr.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: f.pool(), ServerName: node}
	}
	tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		begun := time.Now()
		c, err := f.dial(ctx, r.replica, addr)
		if err != nil || !r.tls {
			return c, err
		}
		return rig.NewLateConn(c, begun, &late), nil
	}
	word := strconv.FormatInt(time.Now().UnixNano(), 36)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"?word="+word, nil)
	if err != nil {
		return err
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && (resp.StatusCode != http.StatusOK || string(body) != answer(node, word)) {
		err = fmt.Errorf("HTTP %d: %q", resp.StatusCode, body)
	}
	return err
}

func (f *fleet) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(f.CA().CertPEM())
	return pool
}

// result is how a request went.
type result struct {
	request
	started time.Time
	took    time.Duration
	err     error
}

// load is requests at a steady rate.
type load struct {
	// Set once.
	t       *testing.T
	stop    func()
	wg      sync.WaitGroup
	rate    int // per second
	started time.Time

	lasted time.Duration // owned by the pacer; after wg it may be read

	mu      sync.Mutex // guards the following
	results []result
}

// startLoad makes requests at a steady rate, however long each takes.
func (f *fleet) startLoad(rate int, next func(i int) request) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{t: f.t, stop: cancel, rate: rate, started: time.Now()}
	due := make(chan int) // the pacer sends and closes
	l.wg.Go(func() {
		defer close(due)
		defer func() { l.lasted = time.Since(l.started) }()
		for i := 0; ; i++ {
			at := time.Duration(float64(i) / float64(rate) * float64(time.Second))
			select {
			case <-time.After(time.Until(l.started.Add(at))):
			case <-ctx.Done():
				return
			}
			select {
			case due <- i:
			case <-ctx.Done():
				return
			}
		}
	})
	for range workers {
		l.wg.Go(func() {
			for i := range due {
				r := result{request: next(i), started: time.Now()}
				// What is under way at the end of the load counts as well.
				r.err = f.do(context.Background(), r.request)
				r.took = time.Since(r.started)
				l.mu.Lock()
				l.results = append(l.results, r)
				l.mu.Unlock()
			}
		})
	}
	f.t.Cleanup(func() { l.end() })
	return l
}

// end ends the load, waits for the requests under way, and returns how all went, in
// the order in which they ended.
func (l *load) end() []result {
	l.stop()
	l.wg.Wait()
	return l.results
}

// sent returns how many requests have ended.
func (l *load) sent() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.results)
}

// want ends the load. It fails the test for each request that has failed and must not
// have, and when fewer were sent than the load was meant to.
func (l *load) want(must func(result) bool) {
	l.t.Helper()
	if !soak() { // other tests want the processors as well: then it takes longer
		meant := int(float64(l.rate) * time.Since(l.started).Seconds())
		testkit.Within(l.t, time.Minute, "as many requests are sent as were meant to be", func() error {
			if n := l.sent(); n < meant {
				return fmt.Errorf("%d of %d", n, meant)
			}
			return nil
		})
	}
	all := l.end()
	if want := int(0.99 * float64(l.rate) * l.lasted.Seconds()); soak() && len(all) < want {
		l.t.Errorf("%d requests were sent in %s, want %d: the test proves less than it says", len(all),
			l.lasted.Round(time.Millisecond), want)
	}
	failed := 0
	for _, r := range all {
		if r.err == nil || !must(r) {
			continue
		}
		if failed++; failed <= 10 {
			l.t.Errorf("%s after the start: node %d through replica %d (TLS: %t): %v, after %s",
				r.started.Sub(l.started).Round(time.Millisecond),
				r.node, r.replica, r.tls, r.err, r.took.Round(time.Millisecond))
		}
	}
	if failed > 0 {
		l.t.Errorf("%d of %d requests have failed", failed, len(all))
	}
}

// every says that no request may fail, if this process was not late itself.
func every(r result) bool { return !errors.Is(r.err, rig.ErrLate) }

// echo sends bytes at a pace, half-closes, and checks each byte that comes back and
// that none is missing.
func (f *fleet) echo(r request, o order, arrived func(n int64)) error {
	c, err := f.stream(r, "echo")
	if err != nil {
		return err
	}
	defer c.Close()
	sent := make(chan error, 1) // one send
	go func() {
		err := rig.SendNoise(c, o.Bytes, o.BytesPerSecond)
		if err == nil {
			err = c.CloseWrite()
		}
		sent <- err
	}()
	if err := wholly(c, o.Bytes, arrived); err != nil {
		c.Close()
		return errors.Join(err, <-sent)
	}
	return <-sent
}

// stream connects to a target for a stream, whose first byte comes before the stream hangs.
func (f *fleet) stream(r request, kind string) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), hangs)
	defer cancel()
	c, err := f.dial(ctx, r.replica, func(c *rig.Replica) string { return c.Door(door(f.nodes[r.node], kind)) })
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), c.SetDeadline(time.Now().Add(hangs))
}

// wholly reads n bytes of noise and the end. It fails when nothing comes for so long that the stream hangs.
func wholly(c *net.TCPConn, n int64, arrived func(n int64)) error {
	var at int64
	err := rig.CheckNoise(c, n, func(n int64) {
		at = n
		c.SetDeadline(time.Now().Add(hangs))
		if arrived != nil {
			arrived(n)
		}
	})
	if err != nil {
		return fmt.Errorf("after %d of %d bytes: %w", at, n, err)
	}
	if m, err := c.Read(make([]byte, 1)); m != 0 || !errors.Is(err, io.EOF) {
		return fmt.Errorf("after all of %d bytes: %d more, and %w", n, m, err)
	}
	return nil
}

// streams are echo streams, a steady number of them.
type streams struct {
	// Set once.
	t    *testing.T
	stop func()
	wg   sync.WaitGroup

	mu      sync.Mutex // guards the following
	whole   int        // streams that have ended as they should
	bytes   int64      // of those
	arrived int        // first bytes seen
	errs    []error
}

// startStreams keeps n streams running, each as o says, and waits until the first n
// have had something back.
func (f *fleet) startStreams(n int, o order, next func(i int) request) *streams {
	f.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s := &streams{t: f.t, stop: cancel}
	for w := range n {
		s.wg.Go(func() {
			for i := w; ctx.Err() == nil; i += n {
				s.one(f, o, next(i))
			}
		})
	}
	f.t.Cleanup(s.end)
	testkit.Within(f.t, hangs, "all streams run", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.arrived < n {
			return fmt.Errorf("%d of %d do: %w", s.arrived, n, errors.Join(s.errs...))
		}
		return nil
	})
	return s
}

func (s *streams) one(f *fleet, o order, r request) {
	started := time.Now()
	var once sync.Once
	err := f.echo(r, o, func(int64) {
		once.Do(func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.arrived++
		})
	})
	s.mu.Lock()
	if err != nil {
		err = fmt.Errorf("a stream of node %d through replica %d, after %s: %w", r.node, r.replica,
			time.Since(started).Round(time.Millisecond), err)
		s.errs = append(s.errs, err)
	} else {
		s.whole++
		s.bytes += o.Bytes
	}
	s.mu.Unlock()
	if err != nil {
		time.Sleep(poll)
	}
}

// end starts no more streams and waits for the end of those that run.
func (s *streams) end() {
	s.stop()
	s.wg.Wait()
}

// want ends the streams, and fails the test if one has lost a byte or there were fewer
// than least.
func (s *streams) want(least int) {
	s.t.Helper()
	s.end()
	for _, err := range s.errs[:min(10, len(s.errs))] {
		s.t.Error(err)
	}
	if s.whole < least || len(s.errs) > 0 {
		s.t.Errorf("%d streams were whole, want at least %d; %d were not, want none", s.whole, least, len(s.errs))
	}
}
