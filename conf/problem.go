package conf

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is one mistake in a configuration, and how to correct it.
type Problem struct {
	File string // the path as the caller gave it; "": the configuration was not loaded from a file
	Line int    // from 1; 0: no line is known
	Key  string // dotted and quoted as in TOML; "": the problem concerns the whole file
	Text string // the mistake and its correction
}

// Error returns "file:line: key: text".
func (p Problem) Error() string {
	var b strings.Builder
	if p.File != "" {
		b.WriteString(p.File)
		if p.Line > 0 {
			fmt.Fprintf(&b, ":%d", p.Line)
		}
		b.WriteString(": ")
	}
	if p.Key != "" {
		b.WriteString(p.Key + ": ")
	}
	return b.String() + p.Text
}

// Problems are all problems of a configuration, in the order of the file. A function never returns empty Problems as
// an error.
type Problems []Problem

// Error returns one problem per line.
func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns the problems one by one.
func (ps Problems) Unwrap() []error {
	errs := make([]error, len(ps))
	for i, p := range ps {
		errs[i] = p
	}
	return errs
}

// source maps keys to lines of a file. A nil source belongs to a Cloud or Edge that was not read from a file.
type source struct {
	file  string         // path of the file
	lines map[string]int // by dotted key; a key that is missing in the file has no entry
	// elsewhere has the lines of the file of forwards; nil: there is none.
	elsewhere *source

	settings Settings // the settings of one mode, with those of the file of forwards
	// WithForwards needs these two: the tables of the main file, without the file of forwards, and the environment.
	cloud *cloudTable
	env   Env
}

// place returns the file and the line of a key.
func (s *source) place(key string) (file string, line int) {
	if s.elsewhere != nil && s.lines[key] == 0 && s.elsewhere.lines[key] > 0 {
		return s.elsewhere.file, s.elsewhere.lines[key]
	}
	return s.file, s.line(key)
}

// line returns the line of a key. For a missing key it returns the line of the nearest table above.
func (s *source) line(key string) int {
	// Cut off the last part until a known key remains. A quoted part may contain dots. Then the loop cuts off
	// its pieces one by one, and finds no known key among them.
	for key != "" {
		if n := s.lines[key]; n > 0 {
			return n
		}
		key = key[:max(strings.LastIndexByte(key, '.'), 0)]
	}
	return 0
}

// report collects problems and warnings while a configuration is read and checked. One goroutine uses
// it at a time.
type report struct {
	src      *source
	problems Problems
	warned   Problems
	muted    map[string]bool // keys whose first problem makes further problems of the key meaningless
}

// newReport returns an empty report. src gives each problem its line; nil: problems have no lines.
func newReport(src *source) *report {
	return &report{src: src, muted: make(map[string]bool)}
}

// add adds a problem of key, unless key is muted.
func (r *report) add(key, format string, args ...any) {
	if !r.muted[key] {
		r.problems = append(r.problems, r.problem(key, format, args...))
	}
}

// mute suppresses further problems of key. Callers mute a key whose reported problem causes others,
// such as a value that could not be read.
func (r *report) mute(key string) { r.muted[key] = true }

// warn adds a warning about key. Warnings do not make the configuration invalid.
func (r *report) warn(key, format string, args ...any) {
	r.warned = append(r.warned, r.problem(key, format, args...))
}

// problem makes a Problem with the file and the line of key.
func (r *report) problem(key, format string, args ...any) Problem {
	p := Problem{Key: key, Text: fmt.Sprintf(format, args...)}
	if r.src != nil {
		p.File, p.Line = r.src.place(key)
	}
	return p
}

// err returns the problems as a [Problems], in the order of the file; nil if there are none.
func (r *report) err() error {
	if len(r.problems) == 0 {
		return nil
	}
	return sortedByLine(r.problems)
}

// warnings returns the texts of the warnings, in the order of the file.
func (r *report) warnings() []string {
	var ws []string
	for _, p := range sortedByLine(r.warned) {
		ws = append(ws, p.Error())
	}
	return ws
}

// sortedByLine returns a copy of ps that is sorted by file and line. Problems of one line keep their order.
func sortedByLine(ps Problems) Problems {
	ps = slices.Clone(ps)
	slices.SortStableFunc(ps, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line))
	})
	return ps
}
