package main

import (
	"errors"
	"strings"
	"testing"
)

// sampled is what a run of two rounds might say.
func sampled() *report {
	r := &report{Date: "2026-01-31", Commit: "0123456789abcdef",
		Machine: machine{"a processor", 2, "6.1", "cubic"}, Go: "go1.26"}
	r.Ways = []peer{{ID: ours, Name: "tunnel"}, {ID: "tcp", Name: "two TCP hops"},
		{ID: "stock", Name: "a stock", Version: "v1.2.3"}, {ID: "away", Name: "another", Missing: "it is not there"}}
	rate, times := []figure{{"download", "MiB/s", 1, false}}, []figure{{"p50", "µs", 1, true}, {"p99", "µs", 1, true}}
	alone := []figure{{"growth", "MiB", 1, true}}
	for round := range 2 {
		r.add("speed", rate, ours, []float64{900 + 200*float64(round)}, nil)
		r.add("speed", rate, "tcp", []float64{2000}, nil)
		r.add("speed", times, ours, []float64{30, 90}, nil)
		r.add("speed", times, "tcp", []float64{20, 123.456}, nil)
		r.add("speed", times, "stock", nil, errors.New("i/o timeout\nand a log"))
		r.add("speed", alone, ours, []float64{0}, nil)
	}
	r.add("speed", rate, "stock", []float64{250}, nil)
	r.add("speed", rate, "stock", nil, errors.New("reset"))
	return r
}

func TestTables(t *testing.T) {
	for name, c := range map[string]struct {
		got  [][]string
		want string
	}{
		"ratios": {sampled().ratios("speed"), `
tunnel :|two TCP hops|a stock
download|0.50|4.00
p50 ↓|1.50|it fails
p99 ↓|0.73|it fails`},
		"figures": {sampled().figures("speed"), `
|unit|tunnel|two TCP hops|a stock
download|MiB/s|1000 (900–1100)|2000 (2000–2000)|250 (250–250), failed 1×
p50 ↓|µs|30.0 (30.0–30.0)|20.0 (20.0–20.0)|fails
p99 ↓|µs|90.0 (90.0–90.0)|124 (124–124)|fails
growth ↓|MiB|0.00 (0.00–0.00)||`},
	} {
		var got strings.Builder
		for _, cells := range c.got {
			got.WriteString("\n" + strings.Join(cells, "|"))
		}
		if got.String() != c.want {
			t.Errorf("%s:%s\nwant:%s", name, got.String(), c.want)
		}
	}
}

func TestRound(t *testing.T) {
	for v, want := range map[float64]float64{0: 0, 123456: 123500, 0.0012344: 0.001234, 1.68049: 1.68, -12.3456: -12.35} {
		if got := round(v); got != want {
			t.Errorf("round(%v) = %v, want %v", v, got, want)
		}
	}
}
