package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
)

// present returns the ways that were measured, ours first.
func (r *report) present() (present []peer) {
	for _, p := range r.Ways {
		if p.Missing == "" {
			present = append(present, p)
		}
	}
	return present
}

// of returns the rows of a part, and the ways that are in them.
func (r *report) of(part string) (rows []*row, present []peer) {
	for _, w := range r.Rows {
		if w.Part == part {
			rows = append(rows, w)
		}
	}
	for _, p := range r.present() {
		if slices.ContainsFunc(rows, func(w *row) bool { return w.Values[p.ID] != nil }) {
			present = append(present, p)
		}
	}
	return rows, present
}

// ratios are rows of ours divided by theirs, below a row of titles.
func (r *report) ratios(part string) [][]string {
	rows, present := r.of(part)
	table := [][]string{{"tunnel :"}}
	for _, p := range present {
		if p.ID != ours {
			table[0] = append(table[0], p.Name)
		}
	}
	for _, w := range rows {
		cells, any := []string{w.title()}, false
		mine := w.Values[ours]
		for _, p := range present {
			theirs := w.Values[p.ID]
			switch {
			case p.ID == ours:
				continue
			case theirs != nil && !theirs.measured():
				cells, any = append(cells, "it fails"), true
			case mine.measured() && theirs.measured():
				cells, any = append(cells, fmt.Sprintf("%.2f", mine.Median/theirs.Median)), true
			default:
				cells = append(cells, "")
			}
		}
		if any {
			table = append(table, cells)
		}
	}
	return table
}

// figures are the medians, with the least and the most, below a row of titles.
func (r *report) figures(part string) [][]string {
	rows, present := r.of(part)
	table := [][]string{{"", "unit"}}
	for _, p := range present {
		table[0] = append(table[0], p.Name)
	}
	for _, w := range rows {
		cells := []string{w.title(), w.Unit}
		for _, p := range present {
			cells = append(cells, w.Values[p.ID].String())
		}
		table = append(table, cells)
	}
	return table
}

func (w *row) title() string {
	if w.Small {
		return w.Name + " ↓"
	}
	return w.Name
}

// String implements fmt.Stringer.
func (v *value) String() string {
	if v == nil {
		return ""
	}
	if !v.measured() {
		return "fails"
	}
	s := fmt.Sprintf("%s (%s–%s)", digits(v.Median), digits(v.Min), digits(v.Max))
	if v.Failed > 0 {
		s += fmt.Sprintf(", failed %d×", v.Failed)
	}
	return s
}

// digits shows three of them, or what stands before the point.
func digits(v float64) string {
	switch {
	case math.Abs(v) >= 100:
		return fmt.Sprintf("%.0f", v)
	case math.Abs(v) >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// less is what the tables say of themselves.
const less = "less is better where there is a ↓"

// print writes the tables to a terminal.
func (r *report) print(w io.Writer) {
	fmt.Fprintf(w, "\nMedians, and the least and the most; %s\n", less)
	for _, part := range r.parts() {
		fmt.Fprintf(w, "\n%s\n", part)
		columns(w, r.figures(part))
		if ratios := r.ratios(part); len(ratios) > 1 {
			fmt.Fprintln(w)
			columns(w, ratios)
		}
	}
	fmt.Fprintln(w, "\nbudgets")
	columns(w, slices.DeleteFunc(r.promised(), func(cells []string) bool { return slices.Contains(cells, notMeasured) }))
	for _, f := range r.failures() {
		fmt.Fprintln(w, f)
	}
}

// parts are those that were measured.
func (r *report) parts() (all []string) {
	for _, w := range r.Rows {
		if !slices.Contains(all, w.Part) {
			all = append(all, w.Part)
		}
	}
	return all
}

func columns(w io.Writer, table [][]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, cells := range table {
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	t.Flush() //nolint:errcheck // standard output: nobody is left to tell
}

// failures says who is missing, and what has failed. If more than a few rows of a part failed for the same reason, it
// only counts them.
func (r *report) failures() (all []string) {
	for _, p := range r.Ways {
		if p.Missing != "" {
			all = append(all, fmt.Sprintf("%s is missing: %s", p.Name, p.Missing))
			continue
		}
		const few = 4
		type failure struct{ part, err string }
		var order []failure
		rows := make(map[failure][]string)
		for _, w := range r.Rows {
			if v := w.Values[p.ID]; v != nil && v.Failed > 0 {
				f := failure{w.Part, v.Error}
				if rows[f] == nil {
					order = append(order, f)
				}
				rows[f] = append(rows[f], fmt.Sprintf("%s: failed %d×", w.Name, v.Failed))
			}
		}
		for _, f := range order {
			what := rows[f]
			if n := len(what); n > few {
				what = []string{fmt.Sprintf("%d rows failed", n)}
			}
			for _, row := range what {
				all = append(all, fmt.Sprintf("%s, %s, %s: %s", p.Name, f.part, row, f.err))
			}
		}
	}
	return all
}

func markdown(w io.Writer, table [][]string) {
	if len(table) == 1 {
		fmt.Fprintln(w, "Nothing was measured.")
		return
	}
	for i, cells := range table {
		fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | "))
		if i == 0 {
			fmt.Fprintln(w, "|"+strings.Repeat("---|", len(cells)))
		}
	}
}
