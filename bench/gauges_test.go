package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/test/rig"
)

// TestMain lets the test's own program be a peer.
func TestMain(m *testing.M) {
	all := flag.Bool("all", false, "as the program has it")
	flag.Parse()
	if role := flag.Arg(0); role != "" {
		fmt.Println(playRole(*all, role, flag.Args()[1:]))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// Every gauge of what a conn costs has a figure of every way that needs nothing but us; no
// test says which. Those of speed keep a machine busy.
func TestGauges(t *testing.T) {
	if _, err := exec.LookPath("ss"); err != nil {
		t.Skipf("what passes on a connection is asked of ss(8), of iproute2: %v", err)
	}
	measured(t, options{part: "cost", ways: "tunnel,tcp,tls,yamux"})
}

// The same over a link, which takes its time.
func TestLinks(t *testing.T) {
	at, err := apart(rig.Quality{})
	switch {
	case errors.Is(err, syscall.EPERM):
		t.Skip("needs the right to make network namespaces (CAP_SYS_ADMIN)")
	case errors.Is(err, os.ErrNotExist):
		t.Skip("this kernel has no /dev/net/tun")
	case errors.Is(err, exec.ErrNotFound):
		t.Skipf("networks are made with ip(8), of iproute2: %v", err)
	case err != nil:
		t.Fatal(err)
	}
	at.close()
	const link = "20 ms"
	r := measured(t, options{part: "links", links: link, ways: "plain,tunnel,tls,yamux"})
	for _, w := range r.Ways {
		if v := r.find(link, roundTripName).Values[w.ID]; v.measured() && v.Min < 20 {
			t.Errorf("%s: a round trip takes %v ms, want 20 and more", w.Name, v.Min)
		}
	}
}

// measured returns a short run, of which each figure of every way has to be there.
func measured(t *testing.T, o options) *report {
	t.Helper()
	b := &bench{rounds: 1, time: 20 * time.Millisecond, report: new(report)}
	defer b.close()
	if err := b.prepare(); err != nil {
		t.Fatal(err)
	}
	all, err := b.comparisons(o)
	if err != nil {
		t.Fatal(err)
	}
	want := 0
	for _, c := range all {
		if err := b.compare(c); err != nil {
			t.Fatal(err)
		}
		for _, g := range c.gauges {
			want += len(g.figures)
		}
	}
	for _, failed := range b.report.failures() {
		t.Error(failed)
	}
	if len(b.report.Rows) != want || want == 0 {
		t.Errorf("%d rows, want %d", len(b.report.Rows), want)
	}
	return b.report
}
