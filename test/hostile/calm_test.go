package hostile

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// attack is one way to mean harm.
type attack struct {
	name string
	// offend does it once, or until ctx is done, and returns what it was answered with:
	// a gRPC code, an HTTP status, an HTTP/2 error, "closed", or "endured" when nobody
	// minded.
	offend func(ctx context.Context, v *victim, as string) string
	// answers are those that may come. One at least must, and no other.
	answers []string
	// counter is a metric of the cloud that shows it; "": it is no offence.
	counter string
	// holds is what the cloud may hold for the attackers, in bytes, by its limits.
	holds int64
	alone bool          // one attacker, not two
	after time.Duration // when it has reached what it can, and others are asked
	// prepare is called before the attackers start; nil: nothing is to be done.
	prepare func(t *testing.T, l *lab)
	// goroutines is how many more goroutines the cloud may have meanwhile. Afterwards they must end. 0: not looked at.
	goroutines int
}

const (
	// garbage is how much more than it holds a Go process may weigh: the collector lets
	// the heap double.
	garbage = 2
	// slack is for what is not the attackers': two handshakes more, the calm's own, and
	// the page cache of the program.
	slack = 32 << 20
	// spareHeap is how much more garbage a cloud lets be while it holds little, see roomyHeap in
	// cmd/tunnel. A busy cloud reaches it.
	spareHeap = 32 << 20
	// noWorse is how many times as long as in calm others may wait: the 99th of a hundred
	// requests.
	noWorse = 2
	// often is how long a caller waits before its next request.
	often = 4 * time.Millisecond
	// comesBack is after what time an attacker that was refused tries again. Faster ones
	// would weigh how many handshakes they do on the cloud's own processors.
	comesBack = 100 * time.Millisecond
	// takes is how long an attack may take to show on a busy machine.
	takes = time.Minute
)

// endure lets the attacks happen, one after the other, by turns with calm.
func (l *lab) endure(attacks []attack) {
	phase := 300 * time.Millisecond
	if long() {
		phase = 1500 * time.Millisecond
		debug.SetGCPercent(1000) // what calm callers wait for is not their own collector
	}
	probe := newProbe(l)
	defer probe.close()
	probe.sample(phase) // what is made once is made
	for _, a := range attacks {
		l.t.Run(a.name, func(t *testing.T) {
			before, err := l.cloud.Memory()
			if err != nil {
				t.Fatal(err)
			}
			if err := l.cloud.ResetPeak(); err != nil {
				t.Fatal(err)
			}
			if a.prepare != nil {
				a.prepare(t, l)
			}
			count := l.metric(t, a.counter)
			running := l.watchGoroutines(t)
			answers := newAnswers()
			var calm, attacked delays
			for round := 1; ; round++ {
				calm.add(probe.sample(phase))
				stop, err := a.start(l, answers)
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(a.after)
				attacked.add(probe.sample(phase))
				if !slices.Contains(a.answers, "endured") {
					answers.wait()
				}
				l.wantMore(t, a.counter, count)
				if err := get(l.CloudHealth(), "/healthz"); err != nil {
					t.Errorf("meanwhile the kubelet's probe fails: %v", err)
				}
				stop()
				time.Sleep(phase / 4) // what the attack leaves behind goes
				if !long() || probe.err != nil || enough(round, worse(calm, attacked)) {
					break
				}
			}
			if probe.err != nil {
				t.Fatalf("a well-behaved request failed: %v", probe.err)
			}
			answers.check(t, a.answers)
			l.checkMemory(t, before, a.holds)
			running.check(t, a.goroutines)
			if n := l.metric(t, "tunnel_panics_total"); n != 0 {
				t.Errorf("%v panics", n)
			}
			checkDelay(t, calm, attacked)
		})
		if !l.cloud.Alive() {
			l.t.Fatalf("%s has ended the cloud", a.name)
		}
	}
}

// enough reports whether that many rounds tell whether others wait too long. A round has some 270 requests, and only
// three are slower than its p99, so chance makes some rounds look bad. If five rounds look bad, 15 are judged, and then
// 45: they tell chance from harm.
func enough(rounds int, worse float64) bool {
	return rounds == 45 || (rounds == 5 || rounds == 15) && worse <= noWorse
}

// answers counts what attacks were answered with.
type answers struct {
	first chan struct{} // closed when there is one

	mu     sync.Mutex // guards the following
	counts map[string]int
}

func newAnswers() *answers {
	return &answers{first: make(chan struct{}), counts: make(map[string]int)}
}

func (a *answers) add(answer string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.counts) == 0 {
		close(a.first)
	}
	a.counts[answer]++
}

// wait waits for the first answer, if one comes before the attack is over.
func (a *answers) wait() {
	select {
	case <-a.first:
	case <-time.After(takes):
	}
}

func (a *answers) check(t *testing.T, may []string) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	t.Logf("answers: %v", a.counts)
	if len(a.counts) == 0 {
		t.Error("no attack was carried out")
	}
	for _, answer := range slices.Sorted(maps.Keys(a.counts)) {
		if !slices.Contains(may, answer) {
			t.Errorf("it is answered with %q; want one of %q", answer, may)
		}
	}
}

// metric returns a metric of the cloud; 0 for the name "".
func (l *lab) metric(t *testing.T, name string) float64 {
	t.Helper()
	if name == "" {
		return 0
	}
	var values map[string]float64
	testkit.Within(t, takes, "the cloud says its metrics", func() (err error) {
		values, err = rig.Metrics(l.CloudHealth())
		return err
	})
	v, ok := values[name]
	if !ok {
		t.Fatalf("there is no metric %s", name)
	}
	return v
}

// wantMore waits until a metric has grown.
func (l *lab) wantMore(t *testing.T, name string, than float64) {
	t.Helper()
	for started := time.Now(); name != "" && l.metric(t, name) <= than; time.Sleep(poll) {
		if time.Since(started) > takes {
			t.Errorf("%s does not show it", name)
			return
		}
	}
}

// checkMemory checks that the cloud has never held more than it promises.
func (l *lab) checkMemory(t *testing.T, before rig.Memory, holds int64) {
	t.Helper()
	now, err := l.cloud.Memory()
	if err != nil {
		t.Fatal(err)
	}
	const mib = 1 << 20
	grown, may := now.Peak-before.Now, garbage*holds+slack+spareHeap
	t.Logf("memory: %d MiB, at most %d MiB more; allowed are %d", before.Now/mib, grown/mib, may/mib)
	if grown > may {
		t.Errorf("the cloud grew by %d MiB; its limits promise %d", grown/mib, may/mib)
	}
}

// goroutines watches how many goroutines the cloud has.
type goroutines struct {
	l      *lab
	before float64
	stop   func() (most float64) // ends the watch
}

const (
	// spare is how many goroutines the well-behaved requests of the test may add at any moment.
	spare = 100
	// watchInterval is how often the cloud is asked how many goroutines it has, in the long form. Each answer takes it
	// some milliseconds, for which the well-behaved requests that are timed may have to wait.
	watchInterval = 250 * time.Millisecond
)

func (l *lab) watchGoroutines(t *testing.T) *goroutines {
	t.Helper()
	const metric = "go_goroutines"
	g := &goroutines{l: l, before: l.metric(t, metric)}
	interval := poll
	if long() {
		interval = watchInterval
	}
	stop, most := make(chan struct{}), make(chan float64)
	go func() {
		seen := 0.0
		for {
			select {
			case <-time.After(interval):
			case most <- seen:
				return
			case <-stop: // nobody asks
				return
			}
			if values, err := rig.Metrics(l.CloudHealth()); err == nil { // the loop of endure reports failures
				seen = max(seen, values[metric])
			}
		}
	}()
	t.Cleanup(func() { close(stop) })
	g.stop = func() float64 { return <-most }
	return g
}

// check checks that there have never been more than so many goroutines more, and that they end.
func (g *goroutines) check(t *testing.T, may int) {
	t.Helper()
	if may == 0 {
		return
	}
	more := g.stop() - g.before
	t.Logf("goroutines: %v, at most %v more; allowed are %d", g.before, more, may+spare)
	if more > float64(may+spare) {
		t.Errorf("the cloud had %v more goroutines; its limits promise %d", more, may)
	}
	testkit.Within(t, takes, "the goroutines end", func() error {
		if now := g.l.metric(t, "go_goroutines"); now > g.before+spare {
			return fmt.Errorf("%v; %v before the attack", now, g.before)
		}
		return nil
	})
}

// delays is how long requests took, round by round.
type delays struct {
	n        int
	p50, p99 []time.Duration // of each round
}

func (d *delays) add(round []time.Duration) {
	slices.Sort(round)
	d.n += len(round)
	d.p50 = append(d.p50, quantile(round, 0.5))
	d.p99 = append(d.p99, quantile(round, 0.99))
}

// typical returns the middle one of the rounds, which something else on this machine that
// made one of them slow does not change.
func typical(rounds []time.Duration) time.Duration {
	if len(rounds) == 0 {
		return 0
	}
	return quantile(slices.Sorted(slices.Values(rounds)), 0.5)
}

func (d *delays) String() string {
	return fmt.Sprintf("p50 %s p99 %s (%d)", typical(d.p50).Round(10*time.Microsecond),
		typical(d.p99).Round(10*time.Microsecond), d.n)
}

// worse returns p99 under attack divided by p99 in calm.
func worse(calm, attacked delays) float64 {
	return float64(typical(attacked.p99)) / float64(typical(calm.p99))
}

// checkDelay compares how long others have waited, in calm and under attack.
func checkDelay(t *testing.T, calm, attacked delays) {
	t.Helper()
	times := worse(calm, attacked)
	t.Logf("others wait: calm: %s; attacked: %s; %.1f × calm in %d rounds", &calm, &attacked, times, len(calm.p99))
	if long() && times > noWorse {
		t.Errorf("p99 of others is %.1f × that of calm; want %d × at most", times, noWorse)
	}
}

func quantile(sorted []time.Duration, q float64) time.Duration {
	return sorted[int(q*float64(len(sorted)-1))]
}

// probe is the well-behaved caller: a new connection through the TCP front door, and a
// request on a connection to the HTTPS one that it keeps.
type probe struct {
	l    *lab
	http *http.Client
	err  error // the first
}

func newProbe(l *lab) *probe {
	transport := &http.Transport{
		TLSClientConfig: l.victim().callerTLS(true), MaxIdleConnsPerHost: 1,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, l.HTTPSDoor())
		},
	}
	return &probe{l: l, http: &http.Client{Transport: transport, Timeout: hangs}}
}

func (p *probe) close() { p.http.CloseIdleConnections() }

// sample asks for so long and returns how long each request took.
func (p *probe) sample(d time.Duration) (took []time.Duration) {
	for started := time.Now(); time.Since(started) < d; time.Sleep(often) {
		at := time.Now()
		if err := p.ask(); err != nil {
			if p.err == nil {
				p.err = err
			}
			break
		}
		took = append(took, time.Since(at))
	}
	return append(took, 0)[:max(1, len(took))]
}

func (p *probe) ask() error {
	c, err := net.DialTimeout("tcp", p.l.Door("echo"), hangs)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(hangs))
	const line = "a small request, and its answer\n"
	if _, err := io.WriteString(c, line); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, make([]byte, len(line))); err != nil {
		return fmt.Errorf("tcp: %w", err)
	}
	resp, err := p.http.Get("https://" + rig.Node + "/")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("https: HTTP %d: %w", resp.StatusCode, err)
	}
	return nil
}

// get asks a health port as a kubelet does.
func get(addr, path string) error {
	client := &http.Client{Timeout: hangs, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + addr + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("HTTP %d", resp.StatusCode)
	}
	return nil
}
