package conf

import (
	"cmp"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Forward is a TCP port in the file of forwards, [mode.cloud.admin] forwards, which `tunnel forward` writes. The file
// has only [mode.cloud.tcp] and the tables beside it. Its lines count like lines of the main file.
type Forward struct {
	Listen    string   `json:"listen"`              // host:port
	Target    string   `json:"target"`              // host:port, or node/host:port
	Allow     []string `json:"allow,omitempty"`     // networks that may connect; none: loopback only
	ProxyFrom []string `json:"proxyfrom,omitempty"` // balancers that send a PROXY header
	SendProxy string   `json:"sendproxy,omitempty"` // v1 or v2: the header that the target gets
}

const (
	adminTable = "mode.cloud.admin."
	// noForwards says how to get a file of forwards.
	noForwards = `this cloud has no file for ports that change while it runs: ` +
		`write forwards = "forwards.toml" into [mode.cloud.admin], in a folder that the cloud may write to, ` +
		`and then run tunnel reload`
)

// maxForwards is the longest file of forwards that is read, in bytes.
const maxForwards = 16 << 20

// ReadForwards returns the lines of the file of forwards, sorted; none if there is no file yet.
func (c *Cloud) ReadForwards() ([]Forward, error) {
	if c.Forwards == "" {
		return nil, errors.New(noForwards)
	}
	data, _, err := tunnel.ReadFile(c.Forwards, maxForwards)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	r := newReport(&source{file: c.Forwards})
	t := readForwards(data, r)
	if err = r.err(); err != nil {
		return nil, err
	}
	var all []Forward
	for _, listen := range slices.Sorted(maps.Keys(t.TCP)) {
		all = append(all, Forward{
			listen, t.TCP[listen], t.TCPAllow[listen], t.TCPProxyFrom[listen], t.TCPSendProxy[listen],
		})
	}
	return all, nil
}

// InForwards reports whether the listener at the address listen comes from the file of forwards.
func (c *Cloud) InForwards(listen string) bool {
	if c.src == nil || c.src.elsewhere == nil {
		return false
	}
	key := forwardTCP.key(listen)
	return c.src.lines[key] == 0 && c.src.elsewhere.lines[key] > 0
}

// WithForwards returns c with forwards in place of the lines of its file of forwards. It checks the result and writes
// nothing. It does not read the main file again, so an edit there counts only after a reload.
func (c *Cloud) WithForwards(forwards []Forward) (*Cloud, error) {
	if c.Forwards == "" || c.src == nil {
		return nil, errors.New(noForwards)
	}
	r := newReport(&source{file: c.src.file, lines: c.src.lines, cloud: c.src.cloud, env: c.src.env})
	next := newCloud(r.addForwards(c.src.cloud, c.Forwards, formatForwards(forwards)), c.src.env, r)
	next.check(r)
	if err := r.err(); err != nil {
		return nil, err
	}
	next.Warnings = r.warnings()
	return next, nil
}

// WriteForwards replaces the file of forwards. If it returns an error, the file has not changed. The caller syncs the
// folder afterwards: until then a loss of power could bring the old file back.
func (c *Cloud) WriteForwards(forwards []Forward) error {
	// A rename replaces the file as a whole, so that a crash leaves the old file or the new one.
	f, err := os.CreateTemp(filepath.Dir(c.Forwards), ".forwards-*")
	if err != nil {
		return err
	}
	_, err = f.Write(formatForwards(forwards))
	err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), c.Forwards)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// formatForwards returns the content of a file of forwards.
func formatForwards(forwards []Forward) []byte {
	sorted := slices.SortedFunc(slices.Values(forwards), func(a, b Forward) int { return cmp.Compare(a.Listen, b.Listen) })
	b := new(strings.Builder)
	b.WriteString("# TCP ports of the cloud. tunnel forward writes this file; tunnel reload reads it again.\n")
	table := func(name string, value func(Forward) any) {
		header := "[mode.cloud." + name + "]\n"
		for _, f := range sorted {
			if v := reflect.ValueOf(value(f)); v.Len() > 0 {
				b.WriteString(header + inTOML(reflect.ValueOf(f.Listen)) + " = " + inTOML(v) + "\n")
				header = ""
			}
		}
	}
	table("tcp", func(f Forward) any { return f.Target })
	table("tcpallow", func(f Forward) any { return f.Allow })
	table("tcpproxyfrom", func(f Forward) any { return f.ProxyFrom })
	table("tcpsendproxy", func(f Forward) any { return f.SendProxy })
	return []byte(b.String())
}

// readForwards returns the tables of a file of forwards; nil: it is not valid TOML.
func readForwards(data []byte, r *report) *cloudTable {
	d := decode(data, r)
	if d == nil {
		return nil
	}
	t := d.Mode.Cloud
	if t == nil {
		t = new(cloudTable)
	}
	others := settingsOf(toml.Key{"mode", "cloud"}, *t)
	if d.Mode.Edge != nil {
		maps.Copy(others, settingsOf(toml.Key{"mode", "edge"}, *d.Mode.Edge))
	}
	for _, key := range slices.Sorted(maps.Keys(others)) {
		if !strings.HasPrefix(key, "mode.cloud.tcp") {
			r.add(key, "this file holds [mode.cloud.tcp], tcpallow, tcpproxyfrom and tcpsendproxy alone: "+
				"move the key into the main file")
		}
	}
	return t
}

// withForwards returns t with the lines of the file of forwards that t names, if the file exists.
func (r *report) withForwards(t *cloudTable) *cloudTable {
	path := r.src.path(t.Admin.Forwards)
	if path == "" {
		return t
	}
	data, _, err := tunnel.ReadFile(path, maxForwards)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return t
	case err != nil:
		r.add(adminTable+"forwards", "%s cannot be read: %s", path, withoutPath(err))
		return t
	}
	return r.addForwards(t, path, data)
}

// addForwards returns a copy of t with the lines of a file of forwards. It reports the problems of the file, and each
// line that t has already.
func (r *report) addForwards(t *cloudTable, path string, data []byte) *cloudTable {
	own := newReport(&source{file: path})
	more := readForwards(data, own)
	r.problems = append(r.problems, own.problems...)
	if more == nil {
		return t
	}
	r.src.elsewhere = own.src
	merged := *t
	for _, listen := range slices.Sorted(maps.Keys(more.TCP)) {
		if _, both := t.TCP[listen]; both {
			own.add(forwardTCP.key(listen), "%s has the same listener: remove it here, such as with tunnel forward rm, "+
				"or there", r.src.file)
			r.problems = append(r.problems, own.problems[len(own.problems)-1])
		}
	}
	merged.TCP, merged.TCPSendProxy = union(t.TCP, more.TCP), union(t.TCPSendProxy, more.TCPSendProxy)
	merged.TCPAllow, merged.TCPProxyFrom = union(t.TCPAllow, more.TCPAllow), union(t.TCPProxyFrom, more.TCPProxyFrom)
	return &merged
}

// union returns the lines of both tables. If both have a key, the line of a counts.
func union[V any](a, b map[string]V) map[string]V {
	all := make(map[string]V, len(a)+len(b))
	maps.Copy(all, b)
	maps.Copy(all, a)
	return all
}
