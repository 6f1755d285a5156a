package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"
)

// TestMain lets the test's own program be a peer.
func TestMain(m *testing.M) {
	flag.Parse()
	if role := flag.Arg(0); role != "" {
		fmt.Println(playRole(role, flag.Args()[1:]))
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
	b := &bench{rounds: 1, time: 20 * time.Millisecond, report: new(report)}
	defer b.close()
	if err := b.prepare(); err != nil {
		t.Fatal(err)
	}
	chosen, err := choose("tunnel,tcp,tls,yamux")
	if err != nil {
		t.Fatal(err)
	}
	if err := b.compare("cost", chosen); err != nil {
		t.Fatal(err)
	}
	for _, failed := range b.report.failures() {
		t.Error(failed)
	}
	want := 0
	for _, g := range b.gauges() {
		if g.part == "cost" {
			want += len(g.figures)
		}
	}
	if len(b.report.Rows) != want {
		t.Errorf("%d rows, want %d", len(b.report.Rows), want)
	}
}
