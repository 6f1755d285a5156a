package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
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

// ratios are rows of ours divided by theirs, below a row of titles.
func (r *report) ratios() [][]string {
	table := [][]string{{"tunnel :"}}
	for _, p := range r.present() {
		if p.ID != ours {
			table[0] = append(table[0], p.Name)
		}
	}
	for _, w := range r.Rows {
		cells, any := []string{w.title()}, false
		mine := w.Values[ours]
		for _, p := range r.present() {
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
func (r *report) figures() [][]string {
	table := [][]string{{"", "unit"}}
	for _, p := range r.present() {
		table[0] = append(table[0], p.Name)
	}
	for _, w := range r.Rows {
		cells := []string{w.title(), w.Unit}
		for _, p := range r.present() {
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

// print writes both tables to a terminal.
func (r *report) print(w io.Writer) {
	if len(r.Rows) == 0 {
		return
	}
	fmt.Fprintf(w, "\nThe tunnel as a multiple of the others; %s\n", less)
	columns(w, r.ratios())
	fmt.Fprintf(w, "\nMedians of %d rounds, and the least and the most; %s\n", r.Rounds, less)
	columns(w, r.figures())
	for _, f := range r.failures() {
		fmt.Fprintln(w, f)
	}
}

func columns(w io.Writer, table [][]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, cells := range table {
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	t.Flush() //nolint:errcheck // it is the terminal
}

// failures says who is missing, and what has failed.
func (r *report) failures() (all []string) {
	for _, p := range r.Ways {
		if p.Missing != "" {
			all = append(all, fmt.Sprintf("%s is missing: %s", p.Name, p.Missing))
		}
		for _, w := range r.Rows {
			if v := w.Values[p.ID]; v != nil && v.Failed > 0 {
				all = append(all, fmt.Sprintf("%s, %s: failed in %d of %d rounds: %s", p.Name, w.Name, v.Failed, r.Rounds, v.Error))
			}
		}
	}
	return all
}

const (
	jsonPath = "docs/benchmarks/bench.json"
	pagePath = "docs/benchmarks/README.md"
)

// renderPages writes the page from the JSON document.
func renderPages() error {
	text, err := os.ReadFile(jsonPath)
	if err != nil {
		return err
	}
	page, err := render(text)
	if err != nil {
		return err
	}
	return os.WriteFile(pagePath, page, 0o644) //nolint:gosec // it is to be read
}

// render returns the page.
func render(document []byte) ([]byte, error) {
	r := new(report)
	if err := json.Unmarshal(document, r); err != nil {
		return nil, err
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, `# What a conn costs, beside what else could be had

This page is made from [bench.json](bench.json) by `+"`go run ./test/bench -render`"+`, and that by `+"`go run ./test/bench -json %s`"+`.
Both ends of each way, its target and the client are processes of their own, on the loopback of one machine; the ways take turns. Absolute figures
do not carry over to other machines; ratios do, to some degree.

The cloud is the end that clients connect to, the edge the one that dials the target. Konnectivity is asked by HTTP CONNECT over a unix socket,
the others over TCP. Small writes are 128 bytes, 1,000 a second on each conn; wire bytes are what TCP carries both ways, and %d of headers for
each packet.

Measured on %s at %.12s: %s, %d processors, Linux %s, %s. The binary has %s.

`, jsonPath, headers, r.Date, r.Commit, r.Machine.CPU, r.Machine.Cores, r.Machine.Kernel, r.Go, r.Binary)
	if r.Dirty {
		b.WriteString("The tree differed from that commit.\n\n")
	}
	for _, p := range r.present() {
		if p.Version != "" {
			fmt.Fprintf(&b, "- %s: %s\n", p.Name, p.Version)
		}
	}
	fmt.Fprintf(&b, "\n## The tunnel as a multiple of the others\n\nMedians divided by medians; %s.\n\n", less)
	markdown(&b, r.ratios())
	fmt.Fprintf(&b, "\n## Figures\n\nMedians of %d rounds, and the least and the most; %s.\n\n", r.Rounds, less)
	markdown(&b, r.figures())
	if failures := r.failures(); len(failures) > 0 {
		fmt.Fprintf(&b, "\n## What has failed\n\n- %s\n", strings.Join(failures, "\n- "))
	}
	return b.Bytes(), nil
}

func markdown(w io.Writer, table [][]string) {
	for i, cells := range table {
		fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | "))
		if i == 0 {
			fmt.Fprintln(w, "|"+strings.Repeat("---|", len(cells)))
		}
	}
}
