// Command bench measures what the tunnel costs, on this machine and in one run, beside
// what else could be had:
//
//	make bench                                       # everything once
//	make bench-long                                  # at length, into docs/benchmarks
//	go run ./bench -part speed -ways tunnel,ssh # some of it
//	go run ./bench -render                      # the pages again, from the JSON
//
// The ends of each way, its target and the client are processes of their own, on loopback or
// in two networks with a link between them that is long, lossy or narrow (see rig.Link).
// Ways take turns, round by round, so that whatever else the machine does meets all of
// them. Figures of different machines, or of different runs, say little; the ratios are
// what counts. What hangs ends by a timeout, and is shown as failed. A way that cannot be had
// here is left out, and the output says why: ssh -R wants openssh-server.
//
// Two promises are checked, and the exit code is 1 when one is not kept: a conn beside
// 50 stalled readers of its node keeps at least 0.9 of its throughput, and cloud and
// edge grow by no more than five windows for each stalled reader and 32 MiB.
//
// Where things are: ways*.go are the ways to a target, place.go where they run, gauges.go and
// links.go and fairness.go what is measured of each, client.go how, usage.go what the kernel knows of it;
// stalled.go has the stalled readers, storm.go the storm; peers*.go is the target and the relays,
// which are this program again; report.go what a run has found, tables.go how it is shown,
// budgets.go what was promised, pages.go how it gets into documents, plots.go how it is drawn.
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

func main() {
	var o options
	b := new(bench)
	flag.StringVar(&o.part, "part", "", "a part of the measurement alone: speed, cost, stalled, links or storm")
	flag.StringVar(&o.ways, "ways", "",
		"some of the ways alone, by commas: tunnel, tcp, tls, yamux, ssh, konnectivity; over links plain instead of tcp")
	flag.StringVar(&o.rows, "rows", "",
		"the rows alone whose names match this regular expression; one that cannot be measured is an error")
	flag.StringVar(&o.links, "link", "", "this link alone: "+linkNames())
	flag.BoolVar(&o.long, "long", false, "more rounds, all links, and everybody over them")
	flag.IntVar(&b.rounds, "rounds", 0, "rounds of speed and cost, if not 2, or 4 with -long; over links there is one")
	flag.DurationVar(&b.time, "time", 0,
		"how long each measurement of them takes, if not 200ms, or 500ms with -long; over links it is a multiple")
	flag.IntVar(&o.edges, "edges", 5000, "edges of the storm")
	flag.StringVar(&o.to, "json", "",
		"write what was measured to this file, such as "+jsonPath+"; parts that it has of the same commit and machine stay")
	flag.BoolVar(&o.dirty, "dirty", false, "write it even if it is not what a commit holds")
	page := flag.Bool("render", false, "write the pages from "+jsonPath+"; without -json nothing is measured")
	all := flag.Bool("all", false, "a peer listens at all addresses: it has a network of its own")
	flag.Parse()
	var err error
	switch role := flag.Arg(0); {
	case role != "":
		err = playRole(*all, role, flag.Args()[1:])
	case *page && o.to == "":
		if b.top, err = repository(); err == nil {
			err = renderPages(b.top)
		}
	default:
		if err = measure(b, o); *page && (err == nil || errors.Is(err, errNotKept)) {
			err = errors.Join(err, renderPages(b.top))
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options say what is measured.
type options struct {
	part, ways, rows, links string
	to                      string
	long, dirty             bool
	edges                   int
}

// wants reports whether a part is measured. Stalled readers and the storm have one way and no
// rows to choose from.
func (o options) wants(part string) bool {
	if o.part == "" {
		return part != stalledPart && part != stormPart || o.rows == "" && o.ways == ""
	}
	return o.part == part
}

func parts() []string { return []string{speedPart, costPart, "links", stalledPart, stormPart} }

func measure(b *bench, o options) (err error) {
	if o.part != "" && !slices.Contains(parts(), o.part) {
		return fmt.Errorf("there is no part %q", o.part)
	}
	rounds, d := 2, 200*time.Millisecond
	if o.long {
		rounds, d = 4, 500*time.Millisecond
	}
	b.rounds, b.time, b.long = cmp.Or(b.rounds, rounds), cmp.Or(b.time, d), o.long
	defer b.close()
	if err = b.prepare(); err != nil {
		return err
	}
	if b.report, err = b.newReport(); err != nil {
		return err
	}
	if o.to != "" && b.report.Dirty && !o.dirty {
		return errors.New("the tree differs from the commit: commit first, or say -dirty")
	}
	comparisons, err := b.comparisons(o)
	if err != nil {
		return err
	}
	for _, c := range comparisons {
		if err = b.compare(c); err != nil {
			break
		}
	}
	if err == nil && o.rows == "" && o.wants(costPart) {
		err = b.weighBinary()
	}
	if err == nil && o.wants(stalledPart) {
		err = b.stalled()
	}
	if (err == nil || errors.Is(err, errNotKept)) && o.wants(stormPart) {
		err = errors.Join(err, b.storm(o.edges))
	}
	b.report.print(os.Stdout)
	if err == nil && o.rows != "" {
		err = b.report.whole()
	}
	if o.to != "" && (err == nil || errors.Is(err, errNotKept)) {
		err = errors.Join(err, b.report.write(o.to))
	}
	return err
}

// weighBinary notes the size of the program.
func (b *bench) weighBinary() error {
	st, err := os.Stat(b.program)
	if err == nil {
		b.report.addWay(ways()[0], b, nil)
		b.report.row(costPart, figure{binaryName, "MB", 1, true}).of(ours).sample(float64(st.Size()) / 1e6)
	}
	return err
}

// comparisons are what was asked for of speed, cost and links.
func (b *bench) comparisons(o options) (all []comparison, err error) {
	here := func() (place, error) { return place{}, nil }
	if o.wants(speedPart) {
		all = append(all, comparison{speedPart, ways(), b.speed(), b.rounds, here})
	}
	if o.wants(costPart) {
		all = append(all, comparison{costPart, ways(), b.cost(), b.rounds, here})
	}
	for _, q := range append(qualities(), fairLinks()...) {
		wanted := o.links == q.name || o.links == "" && (o.long || q.promised)
		if !o.wants("links") || !wanted {
			continue
		}
		c := comparison{q.name, linkWays(), b.far(), 1, func() (place, error) { return apart(q.Quality) }}
		if q.name == fairDeep || q.name == fairShallow {
			c.ways, c.gauges = fairWays(), b.fair()
		} else if !o.long && o.ways == "" {
			c.ways = slices.DeleteFunc(c.ways, func(w way) bool { return w.id != ours && w.id != direct })
		}
		all = append(all, c)
	}
	rows, err := regexp.Compile(o.rows)
	if err != nil {
		return nil, err
	}
	measured := 0
	for i, c := range all {
		if o.ways != "" {
			c.ways = slices.DeleteFunc(c.ways, func(w way) bool { return !slices.Contains(strings.Split(o.ways, ","), w.id) })
		}
		c.gauges = slices.DeleteFunc(c.gauges, func(g gauge) bool {
			return !slices.ContainsFunc(g.figures, func(f figure) bool { return rows.MatchString(f.name) })
		})
		all[i] = c
		measured += len(c.gauges) * len(c.ways)
	}
	if measured == 0 && (o.rows != "" || o.ways != "" || o.links != "") {
		return nil, errors.New("nothing is left to measure: -help says what there is")
	}
	return all, nil
}

// bench is what one run shares.
type bench struct {
	top, dir string // of the repository, and of the run
	program  string
	ca       *auth.CA
	rounds   int
	time     time.Duration // of one measurement
	long     bool          // whether to take one's time
	report   *report
	folders  []string
}

// prepare makes what every way needs.
func (b *bench) prepare() (err error) {
	if b.top, err = repository(); err != nil {
		return err
	}
	if b.dir, err = os.MkdirTemp("", "tunnel-bench-"); err != nil {
		return err
	}
	b.folders = append(b.folders, b.dir)
	if b.program, err = rig.Build(b.dir); err != nil {
		return err
	}
	return b.certify()
}

// repository returns the folder of the module.
func repository() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("finding the repository: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

func (b *bench) close() {
	for _, dir := range b.folders {
		os.RemoveAll(dir)
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
	relay.IPs = append(relay.IPs, net.ParseIP(cloudIP)) // Konnectivity's agent verifies it over links
	errs := []error{os.WriteFile(b.file("ca.crt"), b.ca.CertPEM(), 0o600)}
	for name, leaf := range map[string]auth.Leaf{
		"target": target, "relay": relay, "client": {CommonName: "kube-apiserver-kubelet-client", Client: true},
	} {
		cert, key, err := b.ca.Issue(leaf)
		errs = append(errs, err, os.WriteFile(b.file(name+".crt"), cert, 0o600),
			os.WriteFile(b.file(name+".key"), key, 0o600))
	}
	return errors.Join(errs...)
}

// median returns the middle of values, which must not be none.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

const mib = 1 << 20
