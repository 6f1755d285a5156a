package main

import (
	"fmt"
	"slices"
	"strings"
)

// budget is what was promised before it was measured.
type budget struct {
	what      string
	part, row string
	than      string // id of the way whose multiple it is; "": it is absolute
	least     bool   // at least so much, else at most
	bound     float64
}

// budgets are all of them, those of one kind next to each other.
func budgets() (all []budget) {
	for _, name := range []string{downloadName, uploadName} {
		for _, conns := range []int{1, 8} {
			for _, than := range []struct {
				id    string
				bound float64
			}{{"tls", 0.8}, {"konnectivity", 3}, {"yamux", 1.1}, {"ssh", 1.1}} {
				all = append(all, budget{"throughput, 1 and 8 conns", speedPart, withConns(name, conns), than.id, true, than.bound})
			}
		}
	}
	all = append(all,
		budget{"round trip", speedPart, roundTripName, "tls", false, 2},
		budget{"new conns", speedPart, newConnsName, "tcp", true, 0.9},
		budget{"small writes, 1,000 a second", costPart, oneWriterName, "", false, 1.6},
		budget{"small writes, 1,000 a second", costPart, manyWritersName, "", false, 1.6},
		budget{"small requests beside a bulk transfer", name100Loss, besideName, direct, false, 3},
		budget{"a bulk transfer far away", name100, downloadName, direct, true, 0.8},
		budget{"a bulk transfer far away", name100, uploadName, direct, true, 0.8},
		budget{"a bulk transfer over a link that loses packets", name100Loss, downloadName, direct, true, 40},
		budget{"a bulk transfer over a link that loses packets", name100Loss, uploadName, direct, true, 40},
		budget{"a bulk transfer over a link that loses packets", name300, downloadName, "", true, partOf(0.7, name300)},
		budget{"a bulk transfer over a link that loses packets", name300, uploadName, "", true, partOf(0.7, name300)},
		budget{"small requests beside a download", name20Mbit, besideMedianName, "", false, 60},
		budget{"small requests beside a download", name20Mbit, downloadName, "", true, partOf(0.9, name20Mbit)},
	)
	stalled := fmt.Sprintf("beside %d stalled readers", stalledConns)
	for _, s := range stallings(true) {
		if s.rounds > 1 { // one says nothing of speed
			all = append(all, budget{stalled, stalledPart, keptName + s.name, "", true, minRatio})
		}
		for _, end := range ends() {
			all = append(all, budget{stalled, stalledPart, growthName(end, s), "", false, maxGrowth / mib})
		}
	}
	return append(all,
		budget{"memory of the cloud, idle", stormPart, nodeName, "", false, 80},
		budget{"the edge, idle", costPart, edgeIdleName, "", false, 24},
		budget{"the binary, stripped", costPart, binaryName, "", false, 40},
		budget{"a replica restarts", stormPart, stormBackName, "", false, 60},
	)
}

// partOf returns a part of the rate of a link, in MiB/s.
func partOf(part float64, link string) float64 {
	for _, q := range qualities() {
		if q.name == link {
			return part * float64(q.Rate) / mib
		}
	}
	return 0
}

// verdict returns what was measured, and what becomes of the budget; "" when it was not
// measured.
func (p budget) verdict(r *report) (measured float64, state string) {
	w := r.find(p.part, p.row)
	if w == nil || !w.Values[ours].measured() {
		return 0, ""
	}
	v := w.Values[ours]
	switch {
	case p.than != "" && !w.Values[p.than].measured():
		return 0, ""
	case p.than != "":
		measured = v.Median / w.Values[p.than].Median
	case p.least:
		measured = v.Median
	default:
		measured = v.Max
	}
	over := measured/p.bound - 1
	if p.least {
		over = 1 - measured/p.bound
	}
	if over <= 0 {
		return measured, "kept"
	}
	return measured, fmt.Sprintf("**missed** by %.0f %%", max(1, 100*over))
}

const notMeasured = "not measured"

// promised is the table of budgets.
func (r *report) promised() [][]string {
	table := [][]string{{"budget", "measured by", "wanted", "is", ""}}
	last := ""
	for _, p := range budgets() {
		what, by := p.what, p.row
		if what == last {
			what = ""
		}
		last = p.what
		if slices.ContainsFunc(qualities(), func(q quality) bool { return q.name == p.part }) {
			by = p.part + ": " + by
		}
		wanted := "≤ "
		if p.least {
			wanted = "≥ "
		}
		wanted += strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.2f", p.bound), "0"), ".")
		if p.than != "" {
			wanted += " × " + nameOf(p.than)
		} else if w := r.find(p.part, p.row); w != nil && w.Unit != "" {
			wanted += " " + w.Unit
		}
		measured, state := p.verdict(r)
		is := digits(measured)
		if state == "" {
			is, state = "", notMeasured
		}
		table = append(table, []string{what, by, wanted, is, state})
	}
	return table
}

// kept says how many budgets are kept, of those that were measured.
func (r *report) kept() string {
	kept, measured := 0, 0
	for _, p := range budgets() {
		switch _, state := p.verdict(r); state {
		case "":
		case "kept":
			kept++
			fallthrough
		default:
			measured++
		}
	}
	return fmt.Sprintf("%d of %d", kept, measured)
}

// nameOf returns the name of a way.
func nameOf(id string) string {
	all := append(linkWays(), ways()...)
	return all[slices.IndexFunc(all, func(w way) bool { return w.id == id })].name
}
