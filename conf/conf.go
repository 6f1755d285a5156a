// Package conf is the typed configuration of both modes, read from strict TOML.
//
//	c, err := conf.LoadCloud("/etc/tunnel/cloud.toml", env)
//	if err != nil {
//		return err // every problem of the file, one per line: file:line: key: what, and what to do
//	}
//	for _, w := range c.Warnings {
//		log.Warn(w)
//	}
//	ln, err := net.Listen("tcp", fmt.Sprintf(":%d", c.Server.GRPCPort))
//
// The keys are those of SuperEdge's tunnel, plus our own. cloud.toml and edge.toml in this directory
// show every key with its default. Errors are: an unknown key, a value of the wrong type, a file that
// cannot be opened, two listeners on one port, and the like. All errors of a file are reported
// together. [Check] reports the errors of a file and does nothing else, for both modes.
//
// A program can also fill in a [Cloud] or [Edge] itself. Zero values mean the documented defaults. Validate
// makes the same checks as LoadCloud and LoadEdge, except for checks of single values in a file, such as the
// range of a limit.
//
// Relative paths in a file are relative to that file. In the result they are relative to the working
// directory. The package opens certificates, keys and token files only to see that it can; their users
// parse and reload them. The package reads no environment variables and keeps no state.
//
// A file passes through three steps, each in files of its own:
//
//   - decode (decode.go, superedge.go) parses the TOML into tables (tables.go). It reports unknown keys
//     and wrong types, in the tables of both modes.
//   - newCloud and newEdge (cloud.go, edge.go, and one file per table) convert the tables of one mode.
//     They resolve paths, parse values, and report each value that is wrong by itself.
//   - The check methods report everything else: missing values, combinations, files and ports. They need
//     no tables, so Validate runs them on values that were made by hand.
//
// All steps add to one report (problem.go), so that a user sees all problems at once.
package conf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
)

// Env holds what cmd has read from the environment.
type Env struct {
	NodeName     string // NODE_NAME
	PodIP        string // POD_IP: one address, or one of each family, separated by a comma
	PodName      string // POD_NAME
	PodNamespace string // POD_NAMESPACE
	HostName     string // the kernel's host name of this machine

	// Elsewhere says that another process runs the cloud, such as a service of systemd. That process has the variables
	// POD_*; this one may lack them.
	Elsewhere bool
}

// LoadCloud reads and checks the cloud's part of a file. Its error is a [Problems].
func LoadCloud(path string, env Env) (*Cloud, error) {
	c, r := readCloud(path, env, true)
	if c == nil {
		return nil, r.err()
	}
	c.check(r)
	if err := r.err(); err != nil {
		return nil, err
	}
	c.Warnings = r.warnings()
	return c, nil
}

// ReadCloud reads the cloud's part of a file like LoadCloud, but checks only the token file, and does not read
// the file of forwards. others are other problems of the file. So a node can be revoked even if, for instance, a
// certificate is missing, or the file has a key that only a later program knows.
func ReadCloud(path string, env Env) (c *Cloud, others Problems, err error) {
	c, r := readCloud(path, env, false)
	if c == nil {
		return nil, nil, r.err()
	}
	others = sortedByLine(r.problems)
	if r.problems = nil; !slices.ContainsFunc(others, func(p Problem) bool { return p.Key == tokenFileKey }) {
		c.Server.checkTokenFile(r)
		if r.err() == nil {
			return c, others, nil
		}
	}
	r.problems = append(r.problems, others...)
	return nil, nil, r.err()
}

// readCloud reads the cloud's part of a file without checking it. If forwards is true, it also reads the file of
// forwards. It returns nil if the file has no cloud's part.
func readCloud(path string, env Env, forwards bool) (*Cloud, *report) {
	d, r := read(path)
	if d == nil {
		return nil, r
	}
	if d.Mode.Cloud == nil {
		r.wrongMode(d, "cloud")
		return nil, r
	}
	if !forwards {
		return newCloud(d.Mode.Cloud, env, r), r
	}
	return loadCloud(d, env, r), r
}

// loadCloud makes a Cloud from the tables of a file and of its file of forwards.
func loadCloud(d *tables, env Env, r *report) *Cloud {
	r.src.cloud, r.src.env = d.Mode.Cloud, env
	return newCloud(r.withForwards(d.Mode.Cloud), env, r)
}

// LoadEdge reads and checks the edge's part of a file. Its error is a [Problems].
func LoadEdge(path string, env Env) (*Edge, error) {
	e, r := readEdge(path, env)
	if e == nil {
		return nil, r.err()
	}
	e.check(r)
	if err := r.err(); err != nil {
		return nil, err
	}
	e.Warnings = r.warnings()
	return e, nil
}

// ReadEdge reads the edge's part of a file like LoadEdge, without the checks: files may be missing.
func ReadEdge(path string, env Env) (*Edge, error) {
	e, r := readEdge(path, env)
	return e, r.err()
}

// readEdge reads the edge's part of a file without checking it. It returns nil if the file has none.
func readEdge(path string, env Env) (*Edge, *report) {
	d, r := read(path)
	if d == nil {
		return nil, r
	}
	if d.Mode.Edge == nil {
		r.wrongMode(d, "edge")
		return nil, r
	}
	return newEdge(d.Mode.Edge, env, r), r
}

// Sockets are the admin sockets that a file names.
type Sockets struct {
	Cloud, Edge       string // paths; "": none
	HasCloud, HasEdge bool   // the file configures the mode
}

// ReadSockets reads only the admin sockets of both modes. It ignores other problems of the file, which do not keep a
// command from asking a running daemon.
func ReadSockets(path string) (s Sockets, err error) {
	d, r := read(path)
	if d == nil {
		return s, r.err()
	}
	if c := d.Mode.Cloud; c != nil {
		s.HasCloud, s.Cloud = true, r.src.path(c.Admin.Socket)
	}
	if e := d.Mode.Edge; e != nil {
		s.HasEdge, s.Edge = true, r.src.path(e.Admin.Socket)
	}
	return s, nil
}

// Checked is what a file configures: a cloud, an edge, or both.
type Checked struct {
	Cloud    *Cloud   // nil: the file configures no cloud
	Edge     *Edge    // nil: the file configures no edge
	Warnings []string // of both modes, in the order of the file
}

// Check reads a file and checks each mode that the file configures. Its error is a [Problems].
func Check(path string, env Env) (Checked, error) {
	d, r := read(path)
	if d == nil {
		return Checked{}, r.err()
	}
	var k Checked
	if d.Mode.Cloud != nil {
		k.Cloud = loadCloud(d, env, r)
		k.Cloud.check(r)
	}
	if d.Mode.Edge != nil {
		k.Edge = newEdge(d.Mode.Edge, env, r)
		k.Edge.check(r)
	}
	if k.Cloud == nil && k.Edge == nil {
		r.wrongMode(d, "")
	}
	if err := r.err(); err != nil {
		return Checked{}, err
	}
	// The report does not say to which mode a warning belongs, so both modes get all warnings.
	k.Warnings = r.warnings()
	if k.Cloud != nil {
		k.Cloud.Warnings = k.Warnings
	}
	if k.Edge != nil {
		k.Edge.Warnings = k.Warnings
	}
	return k, nil
}

// read returns the file's tables. It returns nil if the file cannot be read or is not valid TOML.
func read(path string) (*tables, *report) {
	r := newReport(&source{file: path})
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		r.add("", "the file does not exist: give the path of a configuration file with -c")
		return nil, r
	case errors.Is(err, fs.ErrPermission):
		r.add("", "this user may not read the file: run this as its owner, such as with sudo, or change its mode")
		return nil, r
	case err != nil:
		r.add("", "the file cannot be read: %s", withoutPath(err))
		return nil, r
	}
	return decode(data, r), r
}

// wrongMode adds the problem of a file that does not configure the wanted mode.
func (r *report) wrongMode(d *tables, want string) {
	switch {
	case want == "cloud" && d.Mode.Edge != nil:
		r.add("", "this file configures an edge: run tunnel edge -c %s, or give the cloud's file", r.src.file)
	case want == "edge" && d.Mode.Cloud != nil:
		r.add("", "this file configures a cloud: run tunnel cloud -c %s, or give the edge's file", r.src.file)
	case r.err() != nil:
		// The unknown key may be the misspelt mode, so the problems say enough.
	case want == "":
		r.add("", "this file configures nothing: it has neither [mode.cloud] nor [mode.edge]")
	default:
		r.add("", "this file configures nothing: it has no [mode.%s]", want)
	}
}

// withoutPath returns the text of err without the path, since the problem names the path already.
func withoutPath(err error) string {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err.Error()
	}
	return fmt.Sprint(err)
}
