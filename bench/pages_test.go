package main

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
)

// Documents come from the JSON alone, so nothing of a report may be lost on the way.
func TestFill(t *testing.T) {
	text, err := json.Marshal(sampled())
	if err != nil {
		t.Fatal(err)
	}
	r := new(report)
	if err = json.Unmarshal(text, r); err != nil {
		t.Fatal(err)
	}
	filled, err := r.fill([]byte(`Ours is <!-- bench: ratio; speed; download; stock -->9<!-- /bench --> of theirs, ` +
		`<!-- bench: figure; speed; p99; tcp --><!-- /bench -->.
<!-- bench: run -->
old
<!-- /bench -->
<!-- bench: figures; speed --><!-- /bench -->
<!-- bench: failures --><!-- /bench -->
`))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"Ours is <!-- bench: ratio; speed; download; stock -->4.00<!-- /bench --> of theirs, " +
			"<!-- bench: figure; speed; p99; tcp -->124 µs<!-- /bench -->.\n",
		"<!-- bench: run -->\nMeasured on 2026-01-31 at commit 0123456789ab: a processor, 2 processors, Linux 6.1, go1.26, " +
			"cubic on loopback", "- a stock: v1.2.3\n<!-- /bench -->\n",
		"| p99 ↓ | µs | 90.0 (90.0–90.0) | 124 (124–124) | fails |\n", "- another is missing: it is not there\n",
		"- a stock, speed, download: failed 1×: reset\n", "- a stock, speed, p50: failed 2×: i/o timeout\n",
	} {
		if !strings.Contains(string(filled), want) {
			t.Errorf("the document has no %q:\n%s", want, filled)
		}
	}
	for _, not := range []string{"The tree differed", "old"} {
		if strings.Contains(string(filled), not) {
			t.Errorf("the document has %q:\n%s", not, filled)
		}
	}
	if again, err := r.fill(filled); err != nil || !bytes.Equal(again, filled) {
		t.Errorf("filled again it is another: %v\n%s", err, again)
	}
	for _, wrong := range []string{"speed", "ratio; speed; download", "ratio; speed; nothing; tcp",
		"ratio; speed; p99; stock", "figure; cost; p99; tcp"} {
		if _, err := r.fill([]byte("<!-- bench: " + wrong + " --><!-- /bench -->")); err == nil {
			t.Errorf("%q is no error", wrong)
		}
	}
}

func TestBudgets(t *testing.T) {
	r := new(report)
	sample := func(part, name, id string, v float64) { r.row(part, figure{name: name}).of(id).sample(v) }
	for id, v := range map[string]float64{ours: 60, "tls": 100, "konnectivity": 20} {
		sample(speedPart, "download, 1 conn", id, v)
	}
	sample(speedPart, roundTripName, ours, 3)
	sample(speedPart, roundTripName, "tls", 1)
	sample(costPart, edgeIdleName, ours, 20)
	sample(costPart, edgeIdleName, ours, 30) // the most is what counts
	sample(costPart, binaryName, ours, 39)
	got := make(map[string]string)
	for _, p := range budgets() {
		if v, state := p.verdict(r); state != "" {
			got[p.row+" "+p.than] = digits(v) + " " + state
		}
	}
	want := map[string]string{
		"download, 1 conn tls": "0.60 **missed** by 25 %", "download, 1 conn konnectivity": "3.00 kept",
		roundTripName + " tls": "3.00 **missed** by 50 %",
		edgeIdleName + " ":     "30.0 **missed** by 25 %", binaryName + " ": "39.0 kept",
	}
	for name, w := range want {
		if got[name] != w {
			t.Errorf("%s: %q, want %q", name, got[name], w)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d budgets are judged, want %d: %v", len(got), len(want), got)
	}
}

// A budget of a row that nobody measures would never be missed.
func TestBudgetsAreMeasured(t *testing.T) {
	b := new(bench)
	all, err := b.comparisons(options{long: true})
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{ // what other than comparisons measures
		costPart + binaryName: true, stormPart + nodeName: true, stormPart + stormBackName: true,
	}
	for _, s := range stallings(true) {
		known[stalledPart+keptName+s.name] = true
		for _, end := range ends() {
			known[stalledPart+growthName(end, s)] = true
		}
	}
	for _, c := range all {
		for _, g := range c.gauges {
			for _, f := range g.figures {
				known[c.part+f.name] = true
			}
		}
	}
	for _, p := range budgets() {
		if !known[p.part+p.row] {
			t.Errorf("%s: nobody measures %q of %q", p.what, p.row, p.part)
		}
	}
}

// A part that is measured alone takes the place of what the document had of it.
func TestWriteKeeps(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bench.json")
	first, second := sampled(), sampled()
	first.add(stormPart, []figure{{name: nodeName}}, ours, []float64{70}, nil)
	first.Ways = append(first.Ways, peer{ID: direct, Name: "plain TCP"})
	second.Rows = second.Rows[:1]
	other := sampled()
	other.Commit = "another"
	for _, c := range []struct {
		r    *report
		want string
	}{{first, "speed speed speed speed storm"}, {second, "speed storm"}, {other, "speed speed speed speed"}} {
		if err := c.r.write(path); err != nil {
			t.Fatal(err)
		}
		got, err := readReport(path)
		if err != nil {
			t.Fatal(err)
		}
		var parts []string
		for _, w := range got.Rows {
			parts = append(parts, w.Part)
		}
		if s := strings.Join(parts, " "); s != c.want {
			t.Errorf("the document has rows of %q, want %q", s, c.want)
		}
	}
	if last := second.Ways[len(second.Ways)-1].ID; last != direct {
		t.Errorf("the last way is %q, want %q", last, direct)
	}
}
