package conf

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is one thing that is wrong, and what to do about it.
type Problem struct {
	File string // as it was given; "" when the configuration was not loaded
	Line int    // from 1; 0 when the problem has no place
	Key  string // dotted and quoted as in TOML; "" when it concerns the whole file
	Text string
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

// Problems is everything that is wrong, in the order of the file. It is never empty
// where it is an error.
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

// source tells where a key stands. A nil source is that of a value made by hand.
type source struct {
	file  string
	lines map[string]int // by dotted key; values made of a missing key have none
}

// line returns the line of a key, or of the table that it is missing from.
func (s *source) line(key string) int {
	for key != "" {
		if n := s.lines[key]; n > 0 {
			return n
		}
		key = key[:max(strings.LastIndexByte(key, '.'), 0)]
	}
	return 0
}

// report collects problems and warnings while a configuration is read and checked.
type report struct {
	src      *source
	problems Problems
	warned   Problems
	muted    map[string]bool // keys whose value could not be read: nothing more is said of them
}

func newReport(src *source) *report {
	return &report{src: src, muted: make(map[string]bool)}
}

// add reports what is wrong with key, unless its value could not even be read.
func (r *report) add(key, format string, args ...any) {
	if !r.muted[key] {
		r.problems = append(r.problems, r.problem(key, format, args...))
	}
}

// mute says that a problem of key is on the list already, so that what follows from
// it is not another one.
func (r *report) mute(key string) { r.muted[key] = true }

func (r *report) warn(key, format string, args ...any) {
	r.warned = append(r.warned, r.problem(key, format, args...))
}

func (r *report) problem(key, format string, args ...any) Problem {
	p := Problem{Key: key, Text: fmt.Sprintf(format, args...)}
	if r.src != nil {
		p.File, p.Line = r.src.file, r.src.line(key)
	}
	return p
}

// err returns the problems in the order of the file, or nil.
func (r *report) err() error {
	if len(r.problems) == 0 {
		return nil
	}
	return inOrder(r.problems)
}

func (r *report) warnings() []string {
	var ws []string
	for _, p := range inOrder(r.warned) {
		ws = append(ws, p.Error())
	}
	return ws
}

func inOrder(ps Problems) Problems {
	ps = slices.Clone(ps)
	slices.SortStableFunc(ps, func(a, b Problem) int { return cmp.Compare(a.Line, b.Line) })
	return ps
}
