package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// What documents say of a run is written by this program: whatever stands between
//
//	<!-- bench: DIRECTIVE; ARGUMENT; … --> and <!-- /bench -->
//
// The rest of a document is somebody's own. The directives are
//
//	run                   when, where and with what
//	budgets               the table of them, and kept, how many are
//	ratios; PART          the tunnel as a multiple of the others
//	figures; PART         medians, least and most
//	failures              what could not be measured
//	ratio; PART; ROW; WAY     one of the ratios
//	figure; PART; ROW; WAY    one of the medians, with its unit
//
// and a part is speed, cost, stalled, storm, or the name of a link.
var marked = regexp.MustCompile(`(?s)<!-- bench: ([^>]*) -->(.*?)<!-- /bench -->`)

const jsonPath = "docs/benchmarks/bench.json"

// plotPath is where a plot goes.
func plotPath(name string) string { return "docs/benchmarks/" + name + ".svg" }

// renderPages writes the documents and plots of the repository at top from its JSON.
func renderPages(top string) error {
	files, err := render(top)
	for path, text := range files {
		err = errors.Join(err, os.WriteFile(filepath.Join(top, path), text, 0o644))
	}
	return err
}

// render returns the files that say something of the run in the JSON, as they should be.
func render(top string) (files map[string][]byte, err error) {
	r, err := readReport(filepath.Join(top, jsonPath))
	if err != nil {
		return nil, err
	}
	files = make(map[string][]byte)
	for name, p := range r.plots() {
		files[plotPath(name)] = p.svg()
	}
	documents, err := documents(top)
	if err != nil {
		return nil, err
	}
	for _, path := range documents {
		text, err := os.ReadFile(filepath.Join(top, path))
		if err != nil {
			return nil, err
		}
		if !marked.Match(text) {
			continue
		}
		if files[path], err = r.fill(text); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	return files, nil
}

func readReport(path string) (*report, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r := new(report)
	return r, json.Unmarshal(text, r)
}

// documents are those of the repository at top.
func documents(top string) (paths []string, err error) {
	if paths, err = fs.Glob(os.DirFS(top), "*.md"); err != nil {
		return nil, err
	}
	err = fs.WalkDir(os.DirFS(top), "docs", func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".md") {
			paths = append(paths, path)
		}
		return err
	})
	return paths, err
}

// fill writes what stands between marks.
func (r *report) fill(document []byte) (filled []byte, err error) {
	filled = marked.ReplaceAllFunc(document, func(mark []byte) []byte {
		directive := string(marked.FindSubmatch(mark)[1])
		said, serr := r.say(directive)
		if serr != nil {
			err = errors.Join(err, fmt.Errorf("%q: %w", directive, serr))
		}
		return fmt.Appendf(nil, "<!-- bench: %s -->%s<!-- /bench -->", directive, said)
	})
	return filled, err
}

// say returns what a directive asks for.
func (r *report) say(directive string) (string, error) {
	arguments := strings.Split(directive, "; ")
	var b bytes.Buffer
	b.WriteByte('\n')
	switch directive = arguments[0]; {
	case directive == "run" && len(arguments) == 1:
		r.tellRun(&b)
	case directive == "budgets" && len(arguments) == 1:
		markdown(&b, r.promised())
	case directive == "kept" && len(arguments) == 1:
		return r.kept(), nil
	case directive == "ratios" && len(arguments) == 2:
		markdown(&b, r.ratios(arguments[1]))
	case directive == "figures" && len(arguments) == 2:
		markdown(&b, r.figures(arguments[1]))
	case directive == "failures" && len(arguments) == 1:
		for _, f := range append(r.failures(), "Nothing else.") {
			fmt.Fprintf(&b, "- %s\n", f)
		}
	case (directive == "ratio" || directive == "figure") && len(arguments) == 4:
		return r.quote(directive == "ratio", arguments[1], arguments[2], arguments[3])
	default:
		return "", errors.New("there is no such directive, or not with so many arguments")
	}
	return b.String(), nil
}

// quote returns a figure, or ours as a multiple of it.
func (r *report) quote(ratio bool, part, name, way string) (string, error) {
	w := r.find(part, name)
	switch {
	case w == nil:
		return "", errors.New("there is no such row")
	case !w.Values[way].measured() || ratio && !w.Values[ours].measured():
		return "", errors.New("that was not measured")
	case ratio:
		return fmt.Sprintf("%.2f", w.Values[ours].Median/w.Values[way].Median), nil
	}
	return strings.TrimSpace(digits(w.Values[way].Median) + " " + w.Unit), nil
}

// tellRun says when, where and with what.
func (r *report) tellRun(b *bytes.Buffer) {
	fmt.Fprintf(b, "Measured on %s at commit %.12s: %s, %d processors, Linux %s, %s, %s on loopback and %s over links.\n",
		r.Date, r.Commit, r.Machine.CPU, r.Machine.Cores, r.Machine.Kernel, r.Go, r.Machine.TCP, congestion)
	if r.Dirty {
		b.WriteString("**The tree differed from that commit.**\n")
	}
	b.WriteByte('\n')
	for _, p := range r.present() {
		if p.Version != "" {
			fmt.Fprintf(b, "- %s: %s\n", p.Name, p.Version)
		}
	}
}
