package conformance

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// A Run is all that was run of one version of Kubernetes: results by the key of a door, the control among them.
type Run struct {
	Version string // such as v1.34.4
	Results map[string][]Result
}

// Table returns the table of a run in Markdown: a row for each group, a column for the control and for each door.
func (s Suite) Table(run Run) string {
	var b strings.Builder
	columns := append([]Door{s.Control}, s.Doors...)
	fmt.Fprintf(&b, "### %s %s\n\n| tests |", s.Heading, run.Version)
	for _, d := range columns {
		fmt.Fprintf(&b, " %s |", d.Title)
	}
	b.WriteString("\n|---" + strings.Repeat("|---", len(columns)) + "|\n")
	for i, g := range s.Groups {
		fmt.Fprintf(&b, "| %s |", g.Name)
		for _, d := range columns {
			fmt.Fprintf(&b, " %s |", s.cell(i, d, run.Results[d.Key]))
		}
		b.WriteByte('\n')
	}
	b.WriteString(s.notes(run))
	b.WriteByte('\n')
	return b.String()
}

// cell says how many tests of a group passed of those that ran. results is nil if the door was not tried.
func (s Suite) cell(group int, d Door, results []Result) string {
	switch {
	case d.exception(s.Groups[group]) != "":
		return "no way to pods"
	case results == nil:
		return "not run"
	}
	passed, ran := 0, 0
	for _, r := range results {
		if r.State == Skipped || s.groupOf(r.Test) != group {
			continue
		}
		ran++
		if r.State == Passed {
			passed++
		}
	}
	return fmt.Sprintf("%d of %d", passed, ran)
}

// notes lists, below the table, the tests that failed in the control, the tests that left themselves out, and the
// excused tests, so that no number hides them. A line of a failed test has no message: messages hold paths of the
// machine that ran the test.
func (s Suite) notes(run Run) string {
	var b strings.Builder
	for _, r := range run.Results[s.Control.Key] {
		if s.groupOf(r.Test) < 0 { // of an earlier list
			continue
		}
		switch r.State {
		case Failed:
			fmt.Fprintf(&b, "- failed in the column %q, so no other column has to pass it: `%s`\n", s.Control.Title, r.Test)
		case Skipped:
			fmt.Fprintf(&b, "- left out by the test itself: `%s` (%s)\n", r.Test, firstLine(r.Message))
		}
	}
	for _, test := range slices.Sorted(maps.Keys(s.Excused)) {
		fmt.Fprintf(&b, "- need not pass: `%s`. %s\n", test, s.Excused[test])
	}
	if b.Len() == 0 {
		return ""
	}
	return "\n" + b.String()
}

// end is the mark behind the last table of the page.
const end = "<!-- /conformance -->"

// nextHeading matches what may follow a table.
var nextHeading = regexp.MustCompile(`(?m)^(##+ |` + end + `)`)

// Replace returns the page with the table of a run in place of the one of the same minor version, such as v1.34.
func (s Suite) Replace(page string, run Run) (string, error) {
	heading := "### " + s.Heading + " " + run.Version[:strings.LastIndexByte(run.Version, '.')+1]
	head, rest, ok := strings.Cut(page, heading)
	next := nextHeading.FindStringIndex(rest)
	if !ok || next == nil {
		return "", fmt.Errorf("the page has no %q with %s below", heading, end)
	}
	return head + s.Table(run) + rest[next[0]:], nil
}
