// Command bench measures what the tunnel costs, on this machine and in one run, beside
// what else could be had:
//
//	make bench                                       # everything
//	go run ./test/bench -part speed -ways tunnel,ssh # some of it
//	go run ./test/bench -json docs/benchmarks/bench.json && go run ./test/bench -render
//
// The ends of each way, its target and the client are processes of their own, on loopback.
// Ways take turns, round by round, so that whatever else the machine does meets all of
// them. Figures of different machines, or of different runs, say little; the ratios are
// what counts. What hangs ends by a timeout, and is shown as failed. A way that cannot be had
// here is left out, and the output says why: ssh -R wants openssh-server.
//
// Two promises are checked, and the exit code is 1 when one is not kept: a conn beside
// 50 stalled readers of its node keeps at least 0.9 of its throughput, and cloud and
// edge grow by no more than five windows for each stalled reader and 32 MiB.
//
// Where things are: ways*.go are the ways to a target, gauges.go what is measured of each,
// client.go how, usage.go what the kernel knows of it; stalled.go has the stalled readers;
// peers*.go is the target and the relays, which are this program again; report.go what a run
// has found, tables.go how it is shown.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"tunnel/pkg/auth"
	"tunnel/test/rig"
)

func main() {
	part := flag.String("part", "", "a part of the measurement alone: speed, cost or stalled")
	only := flag.String("ways", "", "some of the ways alone, by commas: tunnel, tcp, tls, yamux, ssh, konnectivity")
	rounds := flag.Int("rounds", 3, "rounds of speed and cost")
	d := flag.Duration("time", 400*time.Millisecond, "how long each measurement of them takes")
	to := flag.String("json", "", "write what was measured to this file")
	dirty := flag.Bool("dirty", false, "write it even if it is not what a commit holds")
	page := flag.Bool("render", false, "measure nothing: write "+pagePath+" from "+jsonPath)
	flag.Parse()
	var err error
	switch role := flag.Arg(0); {
	case role != "":
		err = playRole(role, flag.Args()[1:])
	case *page:
		err = renderPage()
	default:
		err = measure(&bench{rounds: *rounds, time: *d}, *part, *only, *to, *dirty)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func measure(b *bench, part, only, to string, dirty bool) (err error) {
	if !slices.Contains([]string{"", "speed", "cost", "stalled"}, part) {
		return fmt.Errorf("there is no part %q", part)
	}
	defer b.close()
	if err = b.prepare(); err != nil {
		return err
	}
	if b.report, err = b.newReport(); err != nil {
		return err
	}
	if to != "" && b.report.Dirty && !dirty {
		return errors.New("the tree differs from the commit: commit first, or say -dirty")
	}
	chosen, err := choose(only)
	if err == nil && part != "stalled" {
		err = b.compare(part, chosen)
	}
	b.report.print(os.Stdout)
	if err == nil && (part == "" || part == "stalled") {
		err = b.stalled()
	}
	if to != "" && (err == nil || errors.Is(err, errNotKept)) {
		err = errors.Join(err, b.report.write(to))
	}
	return err
}

// choose returns the ways that were asked for; none is all.
func choose(only string) ([]way, error) {
	if only == "" {
		return ways(), nil
	}
	var chosen []way
	for id := range strings.SplitSeq(only, ",") {
		i := slices.IndexFunc(ways(), func(w way) bool { return w.id == id })
		if i < 0 {
			return nil, fmt.Errorf("there is no way %q", id)
		}
		chosen = append(chosen, ways()[i])
	}
	return chosen, nil
}

// bench is what one run shares.
type bench struct {
	top, dir string // of the repository, and of the run
	program  string
	ca       *auth.CA
	rounds   int
	time     time.Duration // of one measurement
	report   *report
	folders  []string
}

// prepare makes what every way needs.
func (b *bench) prepare() error {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "tunnel").Output()
	if err != nil {
		return fmt.Errorf("finding the repository: %w", err)
	}
	b.top = strings.TrimSpace(string(out))
	if b.dir, err = os.MkdirTemp("", "tunnel-bench-"); err != nil {
		return err
	}
	b.folders = append(b.folders, b.dir)
	if b.program, err = rig.Build(b.dir); err != nil {
		return err
	}
	return b.certify()
}

func (b *bench) close() {
	for _, dir := range b.folders {
		os.RemoveAll(dir) //nolint:errcheck // it is in the temporary folder
	}
}

// file returns the path of a file of the run.
func (b *bench) file(name string) string { return filepath.Join(b.dir, name) }

// certify writes the certificates that peers and clients need.
func (b *bench) certify() (err error) {
	if b.ca, err = rig.NewCA(); err != nil {
		return err
	}
	target, relay := rig.CloudLeaf(), rig.CloudLeaf()
	target.DNSNames = []string{rig.Node}
	errs := []error{os.WriteFile(b.file("ca.crt"), b.ca.CertPEM(), 0o600)}
	for name, leaf := range map[string]auth.Leaf{
		"target": target, "relay": relay, "client": {CommonName: "kube-apiserver-kubelet-client", Client: true},
	} {
		cert, key, err := b.ca.Issue(leaf)
		errs = append(errs, err, os.WriteFile(b.file(name+".crt"), cert, 0o600), os.WriteFile(b.file(name+".key"), key, 0o600))
	}
	return errors.Join(errs...)
}

// median returns the middle of values, which must not be none.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

const mib = 1 << 20
