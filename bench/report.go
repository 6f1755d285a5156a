package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// report is what one run has found: the JSON document.
type report struct {
	Date    string
	Commit  string
	Dirty   bool `json:",omitempty"` // whether something was measured that no commit holds
	Machine machine
	Go      string
	Edges   int `json:",omitempty"` // of the storm
	Ways    []peer
	Rows    []*row
}

type machine struct {
	CPU    string
	Cores  int
	Kernel string
	TCP    string // its congestion control
}

// peer is a way that was measured, or was to be.
type peer struct {
	ID, Name string
	Version  string `json:",omitempty"` // of what is not ours
	Missing  string `json:",omitempty"` // why it was not
}

// row is a figure, by the ids of the ways.
type row struct {
	Part, Name, Unit string
	Small            bool `json:",omitempty"` // less is better
	Values           map[string]*value
}

// value is what one way has shown in all rounds.
type value struct {
	Median, Min, Max float64
	Rounds           int    `json:",omitempty"` // that they are of
	Failed           int    `json:",omitempty"` // rounds
	Error            string `json:",omitempty"` // the first

	samples []float64
}

func (b *bench) newReport() (*report, error) {
	commit, err := git(b.top, "rev-parse", "HEAD")
	if err != nil {
		return nil, err
	}
	changes, err := git(b.top, "status", "--porcelain", "--", ".", ":!docs/benchmarks", ":!README.md")
	if err != nil {
		return nil, err
	}
	congestion, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
	if err != nil {
		return nil, err
	}
	var name unix.Utsname
	if err = unix.Uname(&name); err != nil {
		return nil, err
	}
	return &report{
		Date: time.Now().UTC().Format(time.DateOnly), Commit: commit, Dirty: changes != "",
		Machine: machine{processor(), runtime.NumCPU(), unix.ByteSliceToString(name.Release[:]),
			strings.TrimSpace(string(congestion))},
		Go: runtime.Version(),
	}, nil
}

func git(dir string, args ...string) (string, error) {
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w", args[0], err)
	}
	return strings.TrimSpace(string(out)), nil
}

// processor returns the model's name.
func processor() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if key, model, ok := strings.Cut(s.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(model)
		}
	}
	return "unknown"
}

// addWay notes that a way takes part, or why it does not.
func (r *report) addWay(w way, b *bench, missing error) {
	if slices.ContainsFunc(r.Ways, func(p peer) bool { return p.ID == w.id }) {
		return
	}
	p := peer{ID: w.id, Name: w.name}
	if missing != nil {
		p.Missing, _, _ = strings.Cut(missing.Error(), "\n")
	} else if w.version != nil {
		p.Version = w.version(b)
	}
	r.Ways = append(r.Ways, p)
}

// add notes what a gauge has shown of a way in one round, or that it has failed.
func (r *report) add(part string, figures []figure, id string, values []float64, err error) {
	for i, f := range figures {
		v := r.row(part, f).of(id)
		if err == nil {
			v.sample(values[i])
			continue
		}
		if v.Failed++; v.Failed == 1 {
			v.Error, _, _ = strings.Cut(err.Error(), "\n")
		}
	}
}

func (r *report) row(part string, f figure) *row {
	if w := r.find(part, f.name); w != nil {
		return w
	}
	added := &row{part, f.name, f.unit, f.small, make(map[string]*value)}
	r.Rows = append(r.Rows, added)
	return added
}

// find returns a row, nil if there is none.
func (r *report) find(part, name string) *row {
	at := slices.IndexFunc(r.Rows, func(w *row) bool { return w.Part == part && w.Name == name })
	if at < 0 {
		return nil
	}
	return r.Rows[at]
}

func (w *row) of(id string) *value {
	if w.Values[id] == nil {
		w.Values[id] = new(value)
	}
	return w.Values[id]
}

func (v *value) sample(s float64) {
	v.samples = append(v.samples, s)
	v.Rounds = len(v.samples)
	v.Median, v.Min, v.Max = round(median(v.samples)), round(slices.Min(v.samples)), round(slices.Max(v.samples))
}

// whole returns an error if something could not be measured.
func (r *report) whole() error {
	if len(r.failures()) > 0 {
		return errors.New("something could not be measured, see above")
	}
	return nil
}

// round keeps four digits: nobody can measure more.
func round(v float64) float64 {
	if v == 0 {
		return 0
	}
	unit := math.Pow(10, math.Floor(math.Log10(math.Abs(v)))-3)
	if unit < 1 {
		return math.Round(v/unit) / math.Round(1/unit) // 0.1 is no power of two
	}
	return math.Round(v/unit) * unit
}

// keep takes over what another report has of parts that this one has not.
func (r *report) keep(old *report) {
	parts := r.parts()
	for _, w := range old.Rows {
		if !slices.Contains(parts, w.Part) {
			r.Rows = append(r.Rows, w)
		}
	}
	order := []string{speedPart, costPart}
	for _, q := range append(qualities(), fairLinks()...) {
		order = append(order, q.name)
	}
	order = append(order, stalledPart, stormPart)
	slices.SortStableFunc(r.Rows, func(a, b *row) int { return slices.Index(order, a.Part) - slices.Index(order, b.Part) })
	for _, p := range old.Ways {
		if !slices.ContainsFunc(r.Ways, func(o peer) bool { return o.ID == p.ID }) {
			r.Ways = append(r.Ways, p)
		}
	}
	r.Edges = cmp.Or(r.Edges, old.Edges)
}

// measured reports whether there is a figure at all.
func (v *value) measured() bool { return v != nil && (v.Error == "" || v.Max != 0) }

// write writes the JSON document. What that has of parts that were not measured this time
// stays, if it is of the same commit and machine.
func (r *report) write(path string) error {
	if old, err := readReport(path); err == nil && old.Commit == r.Commit && old.Dirty == r.Dirty &&
		old.Machine == r.Machine {
		r.keep(old)
	}
	text, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}
