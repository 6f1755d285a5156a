package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// linked is a module that a binary holds packages of.
type linked struct {
	path, version string
	sum           string   // as in go.sum; "" for the standard library
	licences      []string // SPDX identifiers, sorted
	texts         []file   // its licences and notices; names are relative to the module
}

// standardLibrary is the name of the standard library in place of a module path.
const standardLibrary = "std"

// linkedModules returns what the binary is made of: the standard library, then the modules that the binary names.
// A module without a known licence is an error, since nobody may distribute it.
func (r *release) linkedModules(ctx context.Context, p *program) ([]linked, error) {
	goroot, err := output(ctx, r.root, buildEnvironment(p.platform), "go", "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	std := linked{path: standardLibrary, version: p.info.GoVersion}
	dir := strings.TrimSpace(string(goroot))
	if err = std.readTexts(dir, []string{dir}); err != nil {
		return nil, err
	}
	dirs, err := r.packageFolders(ctx, p)
	if err != nil {
		return nil, err
	}
	modules := []linked{std}
	for _, dep := range p.info.Deps {
		of, ok := dirs[dep.Path]
		if !ok {
			return nil, fmt.Errorf("the binary holds module %s, of which go list knows no package", dep.Path)
		}
		if dep.Replace != nil {
			dep = dep.Replace
		}
		m := linked{path: dep.Path, version: dep.Version, sum: dep.Sum}
		if err = m.readTexts(of.module, of.packages); err != nil {
			return nil, err
		}
		modules = append(modules, m)
	}
	slices.SortFunc(modules[1:], func(a, b linked) int { return strings.Compare(a.path, b.path) })
	return modules, nil
}

// folders are the folder of a module, and the folders of its packages that a binary holds.
type folders struct {
	module   string
	packages []string
}

// packageFolders returns the folders of the modules in the binary, by module path.
func (r *release) packageFolders(ctx context.Context, p *program) (map[string]folders, error) {
	const format = "{{with .Module}}{{if not .Main}}{{.Path}}\t{{.Dir}}\t{{$.Dir}}{{end}}{{end}}"
	out, err := output(ctx, r.root, buildEnvironment(p.platform),
		"go", "list", "-deps", "-tags", p.setting("-tags"), "-f", format, p.info.Path)
	if err != nil {
		return nil, err
	}
	found := map[string]folders{}
	for line := range strings.Lines(string(out)) {
		fields := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(fields) != 3 {
			return nil, fmt.Errorf("go list: unexpected line %q", line)
		}
		f := found[fields[0]]
		f.module, f.packages = fields[1], append(f.packages, fields[2])
		found[fields[0]] = f
	}
	return found, nil
}

// textName matches the names of files with licences and notices.
var textName = regexp.MustCompile(
	`(?i)^(.*[-_.])?(licen[cs]es?|copying|copyright|notices?|patents|unlicense)([-_.].*)?$`)

// addition matches the names of notices and patent grants: files that accompany a licence, and are none.
var addition = regexp.MustCompile(`(?i)notice|patents`)

// readTexts reads the licences and notices of the module in folder root that concern the packages: in their
// folders, and in those above, up to root.
func (m *linked) readTexts(root string, packages []string) error {
	dirs := map[string]bool{root: true}
	for _, dir := range packages {
		for ; dir != root && strings.HasPrefix(dir, root+string(filepath.Separator)); dir = filepath.Dir(dir) {
			dirs[dir] = true
		}
	}
	for dir := range dirs {
		if err := m.readFolder(root, dir); err != nil {
			return err
		}
	}
	m.texts = sorted(m.texts)
	slices.Sort(m.licences)
	m.licences = slices.Compact(m.licences)
	if len(m.licences) == 0 {
		return fmt.Errorf("module %s %s: no known licence in %s", m.path, m.version, root)
	}
	return nil
}

// readFolder reads the licences and notices in the folder dir of the module in root.
func (m *linked) readFolder(root, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		name := entry.Name()
		if !entry.Type().IsRegular() || filepath.Ext(name) == ".go" || !textName.MatchString(name) {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, filepath.Join(dir, name))
		if err != nil {
			return err
		}
		m.texts = append(m.texts, file{name: filepath.ToSlash(relative), data: data})
		if !addition.MatchString(name) {
			m.licences = append(m.licences, identify(data)...)
		}
	}
	return nil
}

// knownShare is the percentage of a text that must be a known licence, so that the text counts as that licence.
// pkg.go.dev has the same bound.
const knownShare = 75

// identify returns the SPDX identifiers of the licences in a text. A text that is mostly something else has none.
func identify(text []byte) []string {
	coverage := licensecheck.Scan(text)
	if coverage.Percent < knownShare {
		return nil
	}
	var ids []string
	for _, match := range coverage.Match {
		if !match.IsURL {
			ids = append(ids, match.ID)
		}
	}
	return ids
}

// noticesOf returns the licences and notices of everything in the binary. It repeats no text.
func (r *release) noticesOf(p *program) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "Third-party notices of tunnel %s for %s/%s\n\n", r.version, p.os, p.arch)
	b.WriteString("The program holds code of the modules below, each under its own licence.\n" +
		"The licence of tunnel itself is in the file LICENSE.\n")
	first := map[string]string{} // text -> where it stands
	for _, m := range p.modules {
		name := cmp.Or(map[string]string{standardLibrary: "The Go standard library"}[m.path], m.path)
		fmt.Fprintf(&b, "\n%s\n%s %s: %s\n", strings.Repeat("=", 80), name, m.version, strings.Join(m.licences, ", "))
		for _, text := range m.texts {
			fmt.Fprintf(&b, "%s\n%s", strings.Repeat("-", 80), text.name)
			if same, ok := first[string(text.data)]; ok {
				fmt.Fprintf(&b, ": the same text as %s\n", same)
				continue
			}
			first[string(text.data)] = text.name + " of " + name
			fmt.Fprintf(&b, "\n\n%s\n", bytes.TrimRight(text.data, "\n"))
		}
	}
	return b.Bytes()
}
