// Storm has thousands of edges lose their cloud at the same moment, and says how they
// come back and what they cost:
//
//	go run ./test/storm [-edges 5000] [-json FILE]
//
// The cloud is a process of its own; the edges are clients in this one, over TLS, each
// with a token of its own, and they join as every edge does. After a kill -9 of the cloud
// and its restart it prints when half of them, 99 % and all were back, and the cloud's
// memory: per idle node, and at its peak. Exit code 1 says that a bound was missed
// (all back within 60 s; the peak at most 1.5 times what it is afterwards, at rest).
package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel/pkg/auth"
	"tunnel/pkg/stream"
	"tunnel/pkg/tunnel"
	"tunnel/test/rig"
)

const (
	backWithin  = time.Minute
	peakAtMost  = 1.5                    // times the memory at rest
	settle      = 20 * time.Second       // until memory is at rest: collections, the kernel's buffers
	sample      = 100 * time.Millisecond // between two looks at the cloud's memory
	restartLate = 5 * time.Second        // how long the cloud is away, so that all edges have noticed
)

func main() {
	edges := flag.Int("edges", 5000, "how many")
	to := flag.String("json", "", "write the figures to this file, too")
	flag.Parse()
	if err := run(*edges, *to); err != nil {
		fmt.Fprintln(os.Stderr, "storm:", err)
		os.Exit(1)
	}
}

// figures are what -json writes: bytes and seconds.
type figures struct {
	PerNode         float64 // memory of the cloud at rest, without what it takes for itself
	Peak            float64 // memory of the cloud after its restart
	Half, Most, All float64 // since the restart; most are 99 %
}

func (f figures) write(path string) error {
	text, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

func run(n int, to string) error {
	dir, err := os.MkdirTemp("", "tunnel-storm-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a folder of temporary files
	binary, err := rig.Build(dir)
	if err != nil {
		return err
	}
	pair, err := rig.NewPair(rig.Config{Binary: binary, Dir: dir})
	if err != nil {
		return err
	}
	tokens := make([]auth.Secret, n)
	var lines strings.Builder
	for i := range tokens {
		tokens[i] = auth.NewToken()
		fmt.Fprintf(&lines, "%s:%s\n", node(i), tokens[i].Hashed())
	}
	if err = os.WriteFile(filepath.Join(dir, "tokens"), []byte(lines.String()), 0o600); err != nil {
		return err
	}
	cloud, err := pair.StartCloud()
	if err != nil {
		return err
	}
	defer func() { cloud.Kill() }()
	bare, err := ready(pair, cloud)
	if err != nil {
		return err
	}

	f, err := newFleet(pair, tokens)
	if err != nil {
		return err
	}
	defer f.stop()
	began := time.Now()
	if err = f.all(began.Add(2 * backWithin)); err != nil {
		return fmt.Errorf("joining for the first time: %w", err)
	}
	fmt.Printf("%d edges have joined in %.1f s\n", n, time.Since(began).Seconds())
	time.Sleep(settle)
	rest := rss(cloud)
	perNode := float64(rest-bare) / float64(n)
	fmt.Printf("cloud at rest: %d MiB, of that %.1f KiB for each idle node\n", rest>>20, perNode/1024)

	cloud.Kill()
	time.Sleep(restartLate)
	if cloud, err = pair.StartCloud(); err != nil {
		return err
	}
	if _, err = ready(pair, cloud); err != nil {
		return err
	}
	peak := watchPeak(cloud)
	began = time.Now()
	var missed []error
	half, most, all := f.back(n/2, began), f.back(n*99/100, began), f.back(n, began)
	fmt.Printf("after a restart of the cloud: half back in %.1f s, 99 %% in %.1f s, all in %.1f s\n", half.Seconds(), most.Seconds(), all.Seconds())
	if all >= backWithin {
		missed = append(missed, fmt.Errorf("%d of %d are back after %s", f.ready(), n, backWithin))
	}
	time.Sleep(settle)
	rest, highest := rss(cloud), peak()
	fmt.Printf("cloud: %d MiB at its peak, %d MiB at rest: %.2f times\n", highest>>20, rest>>20, float64(highest)/float64(rest))
	if float64(highest) > peakAtMost*float64(rest) {
		missed = append(missed, fmt.Errorf("the peak is more than %.1f times the memory at rest", peakAtMost))
	}
	if to != "" {
		missed = append(missed, figures{perNode, float64(highest), half.Seconds(), most.Seconds(), all.Seconds()}.write(to))
	}
	return errors.Join(missed...)
}

func node(i int) tunnel.NodeName { return tunnel.NodeName(fmt.Sprintf("edge-%05d", i)) }

// ready waits until edges can join, and returns the cloud's memory then.
func ready(pair *rig.Pair, cloud *rig.Process) (int64, error) {
	for end := time.Now().Add(backWithin); ; time.Sleep(20 * time.Millisecond) {
		err := rig.Ready(pair.CloudHealth())
		if err == nil {
			return rss(cloud), nil
		}
		if time.Now().After(end) || !cloud.Alive() {
			return 0, fmt.Errorf("the cloud is not ready: %w\n%s", err, cloud.Log())
		}
	}
}

// rss returns the resident memory of a process in bytes, 0 when it has gone.
func rss(p *rig.Process) int64 {
	var pages, resident int64
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.PID()))
	if err != nil {
		return 0
	}
	if _, err := fmt.Sscan(string(b), &pages, &resident); err != nil {
		return 0
	}
	return resident * int64(syscall.Getpagesize())
}

// watchPeak looks at a process's memory until the function that it returns is called,
// which tells the highest.
func watchPeak(p *rig.Process) func() int64 {
	var highest atomic.Int64
	stop := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		ticker := time.NewTicker(sample)
		defer ticker.Stop()
		for {
			highest.Store(max(highest.Load(), rss(p)))
			select {
			case <-ticker.C:
			case <-stop:
				return
			}
		}
	})
	return func() int64 {
		close(stop)
		watching.Wait()
		return highest.Load()
	}
}

// fleet are the edges.
type fleet struct {
	clients []*stream.Client
	stop    func()
}

func newFleet(pair *rig.Pair, tokens []auth.Secret) (*fleet, error) {
	conf := pair.EdgeTLS()
	ctx, cancel := context.WithCancel(context.Background())
	f := new(fleet)
	var running sync.WaitGroup
	f.stop = func() {
		cancel()
		running.Wait()
	}
	for i, token := range tokens {
		c, err := stream.NewClient(stream.ClientConfig{
			Address: pair.GRPC(), TLS: func() *tls.Config { return conf },
			Node: node(i), Token: func() (auth.Secret, error) { return token, nil },
			Log: slog.New(slog.DiscardHandler), Software: "storm", Grace: time.Millisecond,
		})
		if err != nil {
			f.stop()
			return nil, err
		}
		f.clients = append(f.clients, c)
		running.Go(func() { c.Run(ctx) }) //nolint:errcheck // it ends with ctx
	}
	return f, nil
}

// ready returns how many have a session.
func (f *fleet) ready() (n int) {
	for _, c := range f.clients {
		if c.Ready() == nil {
			n++
		}
	}
	return n
}

// all waits until all have a session.
func (f *fleet) all(deadline time.Time) error {
	for f.ready() < len(f.clients) {
		if time.Now().After(deadline) {
			return fmt.Errorf("%d of %d have a session", f.ready(), len(f.clients))
		}
		time.Sleep(sample)
	}
	return nil
}

// back waits until n have a session again, for backWithin at most, and returns how long
// that took since began.
func (f *fleet) back(n int, began time.Time) time.Duration {
	for f.ready() < n && time.Since(began) < backWithin {
		time.Sleep(sample)
	}
	return time.Since(began)
}
