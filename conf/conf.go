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
// The keys are those of SuperEdge's tunnel, and ours beside them; cloud.toml and
// edge.toml in this directory hold every one of them, with its default. A key that
// nobody knows, a value of the wrong type, a file that cannot be opened and two
// listeners on one port are errors, and all of them are reported together; [Check]
// does no more than that, for whatever a file configures. A
// [Cloud] or [Edge] can also be made by hand: its zero values mean the documented
// defaults, and Validate checks it as it checks a loaded one.
//
// Paths in the result are relative to the working directory, not to the file any
// more. Certificates, keys and tokens are looked at only as far as opening them:
// their owners parse them, and reload them. The package reads no environment
// variable and keeps no state.
package conf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// Env is what cmd has read from the environment.
type Env struct {
	NodeName     string // NODE_NAME
	PodIP        string // POD_IP: an address, or one of each family with a comma between
	PodName      string // POD_NAME
	PodNamespace string // POD_NAMESPACE
	HostName     string // what the kernel calls this machine
}

// LoadCloud reads and checks the cloud's part of a file. The error is a [Problems].
func LoadCloud(path string, env Env) (*Cloud, error) {
	c, r := readCloud(path, env)
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

// ReadCloud is LoadCloud with no check but of the token file: a node must be shut out
// though a certificate is missing.
func ReadCloud(path string, env Env) (*Cloud, error) {
	c, r := readCloud(path, env)
	if c != nil {
		c.Server.checkTokenFile(r)
	}
	if err := r.err(); err != nil {
		return nil, err
	}
	return c, nil
}

func readCloud(path string, env Env) (*Cloud, *report) {
	d, r := read(path)
	if d == nil {
		return nil, r
	}
	if d.Mode.Cloud == nil {
		r.mode(d, "cloud")
		return nil, r
	}
	return newCloud(d.Mode.Cloud, env, r), r
}

// LoadEdge reads and checks the edge's part of a file. The error is a [Problems].
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

// ReadEdge is LoadEdge without the check: files that it names may be missing.
func ReadEdge(path string, env Env) (*Edge, error) {
	e, r := readEdge(path, env)
	return e, r.err()
}

func readEdge(path string, env Env) (*Edge, *report) {
	d, r := read(path)
	if d == nil {
		return nil, r
	}
	if d.Mode.Edge == nil {
		r.mode(d, "edge")
		return nil, r
	}
	return newEdge(d.Mode.Edge, env, r), r
}

// Checked is what a file configures: a cloud, an edge, or both.
type Checked struct {
	Cloud    *Cloud
	Edge     *Edge
	Warnings []string // of both
}

// Check reads a file and checks whatever it configures. The error is a [Problems].
func Check(path string, env Env) (Checked, error) {
	d, r := read(path)
	if d == nil {
		return Checked{}, r.err()
	}
	var k Checked
	if d.Mode.Cloud != nil {
		k.Cloud = newCloud(d.Mode.Cloud, env, r)
		k.Cloud.check(r)
	}
	if d.Mode.Edge != nil {
		k.Edge = newEdge(d.Mode.Edge, env, r)
		k.Edge.check(r)
	}
	if k.Cloud == nil && k.Edge == nil {
		r.mode(d, "")
	}
	if err := r.err(); err != nil {
		return Checked{}, err
	}
	k.Warnings = r.warnings()
	if k.Cloud != nil {
		k.Cloud.Warnings = k.Warnings
	}
	if k.Edge != nil {
		k.Edge.Warnings = k.Warnings
	}
	return k, nil
}

// read returns the file's tables, or nil when there is nothing to look at.
func read(path string) (*tables, *report) {
	r := newReport(&source{file: path})
	data, err := os.ReadFile(path) //nolint:gosec // the operator names the file
	switch {
	case errors.Is(err, fs.ErrNotExist):
		r.add("", "the file does not exist: give the path of a configuration file with -c")
		return nil, r
	case errors.Is(err, fs.ErrPermission):
		r.add("", "this user may not read the file: run this as its owner, such as with sudo, or change its mode")
		return nil, r
	case err != nil:
		r.add("", "the file cannot be read: %s", reason(err))
		return nil, r
	}
	return decode(data, r), r
}

// mode adds what is wrong with a file that does not configure the wanted mode.
func (r *report) mode(d *tables, want string) {
	switch {
	case want == "cloud" && d.Mode.Edge != nil:
		r.add("", "this file configures an edge: run tunnel edge -c %s, or give the cloud's file", r.src.file)
	case want == "edge" && d.Mode.Cloud != nil:
		r.add("", "this file configures a cloud: run tunnel cloud -c %s, or give the edge's file", r.src.file)
	case r.err() != nil:
		// The unknown key may be the misspelt mode.
	case want == "":
		r.add("", "this file configures nothing: it has neither [mode.cloud] nor [mode.edge]")
	default:
		r.add("", "this file configures nothing: it has no [mode.%s]", want)
	}
}

// reason is err without the path, which the problem names already.
func reason(err error) string {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err.Error()
	}
	return fmt.Sprint(err)
}
