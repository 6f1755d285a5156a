package arch

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// units are what docs/scale.md says that one node, conn or line costs, by name.
type units map[string]float64

// scaled is a row of the tables of docs/scale.md: what follows from the units for n nodes.
type scaled struct {
	what string
	of   func(u units, n float64) string
}

// replicas are as many as hold all nodes while one of them is away.
func (u units) replicas(n float64) float64 { return math.Ceil(n/u["nodes-per-replica"]) + 1 }

// held is how many nodes a replica has then.
func (u units) held(n float64) float64 { return n / (u.replicas(n) - 1) }

func (u units) others(n float64) float64 { return u.replicas(n) - 1 }

const day = 24 * 60 * 60

var scaleTable = []scaled{
	{"replicas", func(u units, n float64) string { return count(u.replicas(n)) }},
	{"nodes of a replica, one other down", func(u units, n float64) string { return count(u.held(n)) }},
	{"memory of a replica", func(u units, n float64) string {
		return size(u["base-memory"]*1024*1024 + u.held(n)*u["node-memory"]*1024 + (n-u.held(n))*u["known-memory"])
	}},
	{"memory of a replica with `sessions = \"all\"`",
		func(u units, n float64) string { return size(n * u["node-memory"] * 1024) }},
	{"idle: processors of a replica", func(u units, n float64) string { return num(u.held(n) * u["idle-cpu"] / 1e6) }},
	{"idle: a replica's wire", func(u units, n float64) string { return size(u.held(n)*u["idle-wire"]) + "/s" }},
	{"idle: all nodes' wire in a day", func(u units, n float64) string { return size(n * u["idle-wire"] * day) }},
	{"all join: processor time", func(u units, n float64) string { return num(n*u["join-cpu"]/1e3) + " s" }},
	{"all join: by two processors each",
		func(u units, n float64) string { return num(u.held(n)*u["join-cpu"]/1e3/2) + " s" }},
	{"all join: their wire", func(u units, n float64) string { return size(n * u["join-wire"]) }},
	{"all join: what a replica tells the others",
		func(u units, n float64) string { return size(u.held(n) * u["told-wire"] * u.others(n)) }},
	{"all join: processors that telling takes", func(u units, n float64) string {
		pass := u.held(n) * u["tell-pass"] / 1e9 // seconds
		return num(u.others(n) * pass / (pass + u["tell-pause"]/1e3))
	}},
	{"all join: TokenReviews take", func(u units, n float64) string { return num(n/(u["reviews"]*u.others(n))) + " s" }},
	{"all join: TokenReviews in a second", func(u units, n float64) string { return num(u["reviews"] * u.others(n)) }},
	{"a replica starts: list of replicas to all edges", func(u units, n float64) string {
		return size(n * (u.replicas(n)*u["instance-wire"] + u["message-wire"]))
	}},
	{"the hosts key", func(u units, n float64) string { return size(n * u["line"]) }},
	{"ConfigMaps that would take", func(u units, n float64) string { return count(math.Ceil(n / u["lines"])) }},
	{"a decision of the writer", func(u units, n float64) string { return num(n*u["decide"]/1e9) + " s" }},
	{"Kubernetes: TokenReviews in a second, calm", func(u units, n float64) string { return num(n / u["token-life"]) }},
	{"Kubernetes: Node events in a second",
		func(u units, n float64) string { return num(n / u["node-writes"] * u.replicas(n)) }},
	{"Kubernetes: Lease requests in a second",
		func(u units, n float64) string { return num(u.replicas(n) * u["lease-requests"]) }},
}

func count(v float64) string {
	s := strconv.FormatInt(int64(math.Round(v)), 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// num shows two digits, or what stands before the point.
func num(v float64) string {
	if v >= 10 {
		return count(v)
	}
	return strconv.FormatFloat(v, 'g', 2, 64)
}

func size(bytes float64) string {
	for _, unit := range []string{"B", "KiB", "MiB"} {
		if bytes < 1024 {
			return num(bytes) + " " + unit
		}
		bytes /= 1024
	}
	return num(bytes) + " GiB"
}

// readUnits returns the text of docs/scale.md, and its units.
func readUnits(t *testing.T) (page string, u units) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "scale.md"))
	if err != nil {
		t.Fatal(err)
	}
	page, u = string(b), make(units)
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\| ([0-9.,]+) ").FindAllStringSubmatch(page, -1) {
		v, err := strconv.ParseFloat(strings.ReplaceAll(m[2], ",", ""), 64)
		if err != nil || u[m[1]] != 0 {
			t.Errorf("unit %s: %v, or there twice", m[1], err)
		}
		u[m[1]] = v
	}
	return page, u
}

// What docs/scale.md says of many nodes follows from what it says of one: whoever
// measures anew changes the units, and is told the rest here.
func TestScalePage(t *testing.T) {
	page, u := readUnits(t)
	for _, r := range scaleTable {
		row := "| " + r.what + " |"
		for _, n := range []float64{10_000, 100_000, 1_000_000} {
			v := r.of(u, n)
			if strings.Contains(v, "Inf") || strings.Contains(v, "NaN") || v == "0" {
				t.Fatalf("%s: a unit is missing: %s", r.what, v)
			}
			row += fmt.Sprintf(" %s |", v)
		}
		if !strings.Contains(page, "\n"+row) {
			t.Errorf("by its units docs/scale.md should have the row\n%s", row)
		}
	}
}

// The table of docs/sizing.md follows from the units of docs/scale.md.
func TestSizingPage(t *testing.T) {
	_, u := readUnits(t)
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "sizing.md"))
	if err != nil {
		t.Fatal(err)
	}
	const month = 30 * day
	for _, n := range []float64{10, 100, 1_000, 5_000, 10_000, 20_000} {
		held := u.held(n)
		row := fmt.Sprintf("| %s | %s | %s | %s | %s/s | %s | %s s |", count(n), count(u.replicas(n)),
			size(u["base-memory"]*1024*1024+held*u["node-memory"]*1024), num(held*u["idle-cpu"]/1e6),
			size(n*u["idle-wire"]), size(n*u["idle-wire"]*month), num(n*u["join-cpu"]/1e3))
		if !strings.Contains(string(b), "\n"+row+"\n") {
			t.Errorf("by the units of docs/scale.md, docs/sizing.md should have the row\n%s", row)
		}
	}
}
