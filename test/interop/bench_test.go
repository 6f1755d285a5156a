package interop

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/test/rig"
)

// What the egress front door costs, beside Konnectivity's own server and agent:
//
//	make bench-egress
//
// Both ends, and the target, are processes of their own, on loopback. The client is the same
// for both: konnectivity-client as it is used once and as it is used again, and HTTP CONNECT.
// They take turns, round by round, so that whatever else the machine does meets both. Figures
// of different runs say little; the ratios are what counts.
//
// A third taker of turns is our front door with no tunnel behind it: it dials the target by
// itself. What it has is what client, target and front door leave for any tunnel on this
// machine, were that free.

const (
	benchRounds = 5
	// benchBytes is what one transfer sends, all of its conns together.
	benchBytes = 96 << 20
	// benchTime is how long round trips are repeated, and dials.
	benchTime = 500 * time.Millisecond
	// benchPatience is after how long something hangs.
	benchPatience = 10 * time.Second
	// dialWorkers is how many dial at once.
	dialWorkers = 8
)

// A gauge measures one thing, for one way to dial. It may have several figures. The last one
// is the processor time of the two processes in between, which the client's does not blur.
type gauge struct {
	run     func(dial dialer, to *benchTarget) ([]float64, error)
	figures []figure
	units   func(v float64) float64 // what was done when the first figure is v
}

// A figure is a row of the table for each way to dial.
type figure struct {
	name, unit string
	promise    float64 // ours as a multiple of stock's: the least; where small is better, the most; 0: none
	small      bool
}

func gauges() []gauge {
	throughput := func(name string, run func(dialer, *benchTarget) ([]float64, error)) gauge {
		return gauge{run, []figure{{name, "MiB/s", 3, false}, {name + ", CPU", "µs/MiB", 0, true}},
			func(float64) float64 { return benchBytes >> 20 }}
	}
	return []gauge{
		throughput("download, 1 conn", download(1)),
		throughput("download, 8 conns", download(8)),
		throughput("upload, 1 conn", upload(1)),
		throughput("upload, 8 conns", upload(8)),
		{
			roundTrips, []figure{{"round trip, p50", "µs", 0.6, true}, {"round trip, p99", "µs", 0, true},
				{"round trip, CPU", "µs", 0, true}},
			func(p50 float64) float64 { return benchTime.Seconds() * 1e6 / p50 }, // about
		},
		{dials, []figure{{"dials", "/s", 2, false}, {"dials, CPU", "µs", 0, true}},
			func(rate float64) float64 { return rate * benchTime.Seconds() }},
	}
}

// BenchmarkEgress fails when ours does not keep what is promised of it. One run is one
// measurement: -benchtime=1x.
func BenchmarkEgress(b *testing.B) {
	target := startTarget(b)
	o := prepare(b, "[mode.cloud.limits]\nopens = 1000000\n", "") // how many are possible is what is measured
	o.startCloud(b)
	o.startEdge(b)
	ourWays := ways(b, o.grpc, o.connect)
	bareWays, bare := o.startBare(b, target)
	server, agent := stock(b, "server"), stock(b, "agent")
	r := make(results)
	for range benchRounds {
		for _, mode := range []string{"grpc", "http-connect"} {
			k := o.startKonnectivity(b, server, agent, mode, target)
			for _, way := range wayNames {
				if (way == "CONNECT") != (mode == "http-connect") {
					continue
				}
				for _, g := range gauges() {
					v, err := g.measure(ourWays[way], target, o.cloud, o.edge)
					if err != nil {
						b.Fatalf("ours: %s, %s: %v\n%s", way, g.figures[0].name, err, o.pair.CloudLog.String()+o.pair.EdgeLog.String())
					}
					r.add(g, way, ofOurs, v)
					if v, err = g.measure(bareWays[way], target, bare); err != nil {
						b.Fatalf("front door alone: %s, %s: %v", way, g.figures[0].name, err)
					}
					r.add(g, way, ofBare, v)
					if v, err = g.measure(k.ways[way], target, k.ends[:]...); err == nil {
						r.add(g, way, ofStock, v)
						continue
					}
					fmt.Printf("Konnectivity: %s, %s: %v\n", way, g.figures[0].name, err)
					k.stop()
					k = o.startKonnectivity(b, server, agent, mode, target)
				}
			}
			k.stop()
		}
	}
	if missed := r.print(os.Stdout); missed > 0 {
		b.Errorf("%d promises are not kept", missed)
	}
}

// stockPair is a stock server and agent.
type stockPair struct {
	ways map[string]dialer
	ends [2]*rig.Process
}

func (k *stockPair) stop() {
	for _, p := range k.ends {
		p.Kill()
	}
}

// startKonnectivity starts them and waits until a dial gets through.
func (o *ours) startKonnectivity(b *testing.B, server, agent, mode string, target *benchTarget) *stockPair {
	b.Helper()
	s := o.startServer(b, server, mode, "stock", 1, port(b))
	log := new(rig.Log)
	a, err := rig.Start(log, agent, "--agent-id=stock", "--ca-cert="+o.pair.Path("ca.crt"),
		"--agent-cert="+o.pair.Path("client.crt"), "--agent-key="+o.pair.Path("client.key"),
		"--proxy-server-host=127.0.0.1", fmt.Sprintf("--proxy-server-port=%d", s.agentPort),
		fmt.Sprintf("--health-server-port=%d", port(b)), fmt.Sprintf("--admin-server-port=%d", port(b)), "-v=0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(a.Kill)
	k := &stockPair{ends: [2]*rig.Process{s.process, a}}
	first := "single use"
	if mode == "grpc" {
		k.ways = ways(b, s.socket, "")
	} else {
		k.ways = ways(b, "", s.socket)
		first = "CONNECT"
	}
	logs := func() string { return s.log.String() + log.String() }
	until(b, "a dial gets through", logs, func() bool { return works(k.ways[first], target.echo) == nil })
	return k
}

// measure returns the figures.
func (g gauge) measure(dial dialer, to *benchTarget, ends ...*rig.Process) ([]float64, error) {
	before, err := cpu(ends)
	if err != nil {
		return nil, err
	}
	v, err := g.within(dial, to)
	if err != nil {
		return nil, err
	}
	after, err := cpu(ends)
	return append(v, (after-before)*1e6/g.units(v[0])), err
}

// cpu is the processor time of processes together, in seconds.
func cpu(of []*rig.Process) (sum float64, err error) {
	for _, p := range of {
		d, perr := p.CPU()
		sum += d.Seconds()
		err = errors.Join(err, perr)
	}
	return sum, err
}

// within runs the gauge; what hangs goes on by itself.
func (g gauge) within(dial dialer, to *benchTarget) ([]float64, error) {
	type outcome struct {
		v   []float64
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		v, err := g.run(dial, to)
		done <- outcome{v, err}
	}()
	select {
	case o := <-done:
		return o.v, o.err
	case <-time.After(benchPatience):
		return nil, errors.New("hangs")
	}
}

// benchTarget is what both dial, in a process of its own.
type benchTarget struct{ echo, bulk string }

// targetRole is the argument with which this program is the target; see TestMain.
const targetRole = "bench-target"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == targetRole {
		serveTarget()
	}
	if len(os.Args) == 4 && os.Args[1] == bareRole {
		serveBare(os.Args[2], os.Args[3])
	}
	os.Exit(m.Run())
}

func startTarget(b *testing.B) *benchTarget {
	b.Helper()
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	log := new(rig.Log)
	p, err := rig.Start(log, self, targetRole)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(p.Kill)
	to := new(benchTarget)
	until(b, "the target listens", log.String, func() bool {
		n, err := fmt.Sscanln(log.String(), &to.echo, &to.bulk)
		return n == 2 && err == nil
	})
	return to
}

// serveTarget listens until it is killed.
func serveTarget() {
	echoes, _, err := serve(echo)
	if err == nil {
		var bulk string
		if bulk, _, err = serve(transfer); err == nil {
			fmt.Println(echoes, bulk)
			select {}
		}
	}
	fmt.Println(err)
	os.Exit(1)
}

// bareRole is the argument with which this program is a front door alone.
const bareRole = "bench-front-door"

// startBare starts our front door with no tunnel behind it.
func (o *ours) startBare(b *testing.B, target *benchTarget) (map[string]dialer, *rig.Process) {
	b.Helper()
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	grpc, connect := o.grpc+"-bare", o.connect+"-bare"
	log := new(rig.Log)
	p, err := rig.Start(log, self, bareRole, grpc, connect)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(p.Kill)
	all := ways(b, grpc, connect)
	until(b, "a dial gets through", log.String, func() bool { return works(all["CONNECT"], target.echo) == nil })
	return all, p
}

// serveBare serves until it is killed.
func serveBare(grpc, connect string) {
	door, err := egress.New(egress.Config{
		GRPC: []string{"unix://" + grpc}, HTTPConnect: []string{"unix://" + connect},
		Strategies: []egress.Strategy{egress.Default}, Identifiers: nobody{},
	}, itself{}, nobody{}, slog.New(slog.DiscardHandler))
	if err == nil {
		err = door.Run(context.Background())
	}
	fmt.Println(err)
	os.Exit(1)
}

// itself dials without a tunnel.
type itself struct{}

func (itself) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", r.Addr)
}

// nobody are the nodes of a front door that has none.
type nobody struct{}

func (nobody) Identifiers() map[tunnel.NodeName]konnectivity.Identifiers { return nil }
func (nobody) Known() bool                                               { return true }
func (nobody) Changed() <-chan struct{}                                  { return nil }
func (nobody) Holds(tunnel.NodeName) bool                                { return false }
func (nobody) Connected() []tunnel.NodeName                              { return nil }

// order asks the target for a transfer. Whoever sends does not close: what is on the way then
// is not what is measured.
type order struct {
	Up    bool // the client sends; the target answers with a byte when it has everything
	Bytes int64
}

func transfer(c *net.TCPConn) {
	var o order
	if binary.Read(c, binary.BigEndian, &o) != nil {
		return
	}
	if o.Up {
		io.CopyN(io.Discard, c, o.Bytes)
		c.Write([]byte{1})
	} else {
		inRecords(c, o.Bytes)
	}
	io.Copy(io.Discard, c)
}

// record is what crypto/tls writes at once, which is how kube-apiserver uses a conn.
const record = 16<<10 + 22

// inRecords writes n bytes.
func inRecords(w io.Writer, n int64) error {
	chunk := make([]byte, record)
	for ; n > 0; n -= int64(len(chunk)) {
		if _, err := w.Write(chunk[:min(n, int64(len(chunk)))]); err != nil {
			return err
		}
	}
	return nil
}

func download(conns int) func(dialer, *benchTarget) ([]float64, error) {
	return bulk(conns, func(c net.Conn, n int64) error {
		if err := binary.Write(c, binary.BigEndian, order{Bytes: n}); err != nil {
			return err
		}
		buf := make([]byte, 64<<10)
		for n > 0 {
			m, err := c.Read(buf)
			if n -= int64(m); err != nil && n > 0 {
				return err
			}
		}
		return nil
	})
}

func upload(conns int) func(dialer, *benchTarget) ([]float64, error) {
	return bulk(conns, func(c net.Conn, n int64) error {
		if err := binary.Write(c, binary.BigEndian, order{Up: true, Bytes: n}); err != nil {
			return err
		}
		if err := inRecords(c, n); err != nil {
			return err
		}
		_, err := io.ReadFull(c, make([]byte, 1))
		return err
	})
}

// bulk has so many conns move benchBytes together, and returns MiB a second.
func bulk(conns int, move func(c net.Conn, n int64) error) func(dialer, *benchTarget) ([]float64, error) {
	return func(dial dialer, to *benchTarget) ([]float64, error) {
		open, closeAll, err := dialAll(dial, to.bulk, conns)
		if err != nil {
			return nil, err
		}
		began := time.Now()
		errs := make([]error, conns)
		var all sync.WaitGroup
		for i, c := range open {
			all.Go(func() { errs[i] = move(c, benchBytes/int64(conns)) })
		}
		all.Wait()
		took := time.Since(began)
		closeAll()
		return []float64{benchBytes / took.Seconds() / (1 << 20)}, errors.Join(errs...)
	}
}

// dialAll opens conns; their ends, which the stock client waits for, are not measured.
func dialAll(dial dialer, addr string, conns int) (open []net.Conn, closeAll func(), err error) {
	closeAll = func() {
		var all sync.WaitGroup
		for _, c := range open {
			all.Go(func() { c.Close() })
		}
		all.Wait()
	}
	for range conns {
		c, err := dial(context.Background(), addr)
		if err != nil {
			closeAll()
			return nil, nil, err
		}
		open = append(open, c)
	}
	return open, closeAll, nil
}

// roundTrips returns how long 64 bytes take there and back on an open conn, in µs.
func roundTrips(dial dialer, to *benchTarget) ([]float64, error) {
	c, err := dial(context.Background(), to.echo)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	var times []float64
	buf := make([]byte, 64)
	for stop := time.Now().Add(benchTime); time.Now().Before(stop); {
		began := time.Now()
		if _, err := c.Write(buf); err != nil {
			return nil, err
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			return nil, err
		}
		times = append(times, time.Since(began).Seconds()*1e6)
	}
	slices.Sort(times)
	return []float64{times[len(times)/2], times[len(times)*99/100]}, nil
}

// dials dials, exchanges a byte and closes, and returns how often a second.
func dials(dial dialer, to *benchTarget) ([]float64, error) {
	var count atomic.Int64
	errs := make([]error, dialWorkers)
	began := time.Now()
	var all sync.WaitGroup
	for i := range dialWorkers {
		all.Go(func() {
			for time.Since(began) < benchTime && errs[i] == nil {
				errs[i] = works(dial, to.echo)
				count.Add(1)
			}
		})
	}
	all.Wait()
	return []float64{float64(count.Load()) / time.Since(began).Seconds()}, errors.Join(errs...)
}

// whose figure it is.
const (
	ofOurs = iota
	ofBare // our front door alone
	ofStock
)

// results are samples by figure, way and whose they are.
type results map[sample][]float64

type sample struct {
	figure, way string
	whose       int
}

func (r results) add(g gauge, way string, whose int, values []float64) {
	for i, f := range g.figures {
		key := sample{f.name, way, whose}
		r[key] = append(r[key], values[i])
	}
}

// print returns how many promises are not kept.
func (r results) print(w io.Writer) (missed int) {
	fmt.Fprintf(w, "\nMedians of %d rounds\n", benchRounds)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "\t\tours\tKonnectivity\tratio\tpromised\tno tunnel at all")
	for _, g := range gauges() {
		for _, f := range g.figures {
			for _, way := range wayNames {
				row, kept := f.row(r[sample{f.name, way, ofOurs}], r[sample{f.name, way, ofStock}], r[sample{f.name, way, ofBare}])
				fmt.Fprintf(table, "%s\t%s\t%s\n", f.name, way, row)
				if !kept {
					missed++
				}
			}
		}
	}
	table.Flush()
	return missed
}

// row is what the table says of one way. What stock cannot do is no reason to fail.
func (f figure) row(ours, stocks, bare []float64) (row string, kept bool) {
	row = fmt.Sprintf("%.0f %s\t", median(ours), f.unit)
	if len(stocks) == 0 {
		return row + "fails every time\t\t\t", true
	}
	defer func() { row += fmt.Sprintf("\t%.2f", median(bare)/median(stocks)) }()
	row += fmt.Sprintf("%.0f %s", median(stocks), f.unit)
	if n := benchRounds - len(stocks); n > 0 {
		row += fmt.Sprintf(" (failed %d times)", n)
	}
	ratio := median(ours) / median(stocks)
	row += fmt.Sprintf("\t%.2f\t", ratio)
	sign := "≥"
	kept = ratio >= f.promise
	if f.small {
		sign, kept = "≤", ratio <= f.promise
	}
	if f.promise == 0 {
		return row, true
	}
	row += fmt.Sprintf("%s %g", sign, f.promise)
	if !kept {
		row += ", not kept"
	}
	return row, kept
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}
