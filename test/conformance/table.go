package conformance

import (
	"fmt"
	"strings"
)

// A Run is all that was run of one version of Kubernetes: results by the key of a door, "control" among them.
type Run struct {
	Version string // such as v1.34.4
	Results map[string][]Result
}

// Table returns the page's tables in Markdown, one for each run: a row for each group, a column for each door.
func Table(runs []Run) string {
	var b strings.Builder
	groups, doors := Groups(), append([]Door{Control()}, Doors()...)
	for _, run := range runs {
		fmt.Fprintf(&b, "### Kubernetes %s\n\n| tests |", run.Version)
		for _, d := range doors {
			fmt.Fprintf(&b, " %s |", d.Title)
		}
		b.WriteString("\n|---" + strings.Repeat("|---", len(doors)) + "|\n")
		for i, g := range groups {
			fmt.Fprintf(&b, "| %s |", g.Name)
			for _, d := range doors {
				fmt.Fprintf(&b, " %s |", cell(groups, i, d, run.Results[d.Key]))
			}
			b.WriteByte('\n')
		}
		b.WriteString(notes(run.Results[Control().Key]))
		b.WriteByte('\n')
	}
	return b.String()
}

// cell says how many tests of a group passed of those that ran. results is nil if the door was not tried.
func cell(groups []Group, group int, d Door, results []Result) string {
	switch {
	case d.Exception(groups[group]) != "":
		return "no way to pods"
	case results == nil:
		return "not run"
	}
	passed, ran := 0, 0
	for _, r := range results {
		if r.State == Skipped || GroupOf(groups, r.Test) != group {
			continue
		}
		ran++
		if r.State == Passed {
			passed++
		}
	}
	return fmt.Sprintf("%d of %d", passed, ran)
}

// notes lists, below the table, the tests that failed with direct reach and the tests that left themselves out, so that
// no number hides them. A line of a failed test has no message: messages hold paths of the machine that ran the test.
func notes(control []Result) string {
	var b strings.Builder
	for _, r := range control {
		switch r.State {
		case Failed:
			fmt.Fprintf(&b, "- failed with direct reach, so no front door has to pass it: %s\n", r.Test)
		case Skipped:
			fmt.Fprintf(&b, "- left out by the test itself: %s (%s)\n", r.Test, firstLine(r.Message))
		}
	}
	if b.Len() == 0 {
		return ""
	}
	return "\n" + b.String()
}

// end is the mark behind the last table of the page.
const end = "<!-- /conformance -->"

// Replace returns the page with the table of a run in place of the one of the same minor version, such as v1.34.
func Replace(page string, run Run) (string, error) {
	heading := "### Kubernetes " + run.Version[:strings.LastIndexByte(run.Version, '.')+1]
	head, rest, ok := strings.Cut(page, heading)
	next := strings.Index(rest, "\n### ") + 1
	if next == 0 {
		next = strings.Index(rest, end)
	}
	if !ok || next < 0 {
		return "", fmt.Errorf("the page has no %q with %s below", heading, end)
	}
	return head + Table([]Run{run}) + rest[next:], nil
}
