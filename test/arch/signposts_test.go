package arch

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A signpost is a place in the code that a page names: a `file.go`, with or without a folder,
// or a `folder` of Go files, and the names that directly follow it, as in
// "`pkg/stream/session.go` `sendLoop` → `receiveLoop`". Only white space, a comma, "and" or an
// arrow may stand between a place and its names.
type signpost struct {
	place string
	names []string // functions, types, constants, variables, or Type.Method
}

var (
	codeSpan  = regexp.MustCompile("`([^`]+)`")
	goFile    = regexp.MustCompile(`^[\w./-]+\.go$`)
	folder    = regexp.MustCompile(`^(?:bench|cmd|conf|internal|pkg|test|tools)(?:/[\w-]+)*$`)
	goName    = regexp.MustCompile(`^[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?$`)
	connector = regexp.MustCompile(`^(?:,|,? and|,? →)?\s*$`)
)

// signpostsIn returns the signposts of one line of a page.
func signpostsIn(line string) (all []signpost) {
	end, follows := 0, false // of the code span before; whether it belongs to a signpost
	for _, m := range codeSpan.FindAllStringSubmatchIndex(line, -1) {
		text, between := line[m[2]:m[3]], line[end:m[0]]
		switch {
		case goFile.MatchString(text), folder.MatchString(text):
			all = append(all, signpost{place: text})
			follows = true
		case follows && connector.MatchString(between) && goName.MatchString(text):
			last := &all[len(all)-1]
			last.names = append(last.names, text)
		default:
			follows = false
		}
		end = m[1]
	}
	return all
}

// code is what the Go files of the repository declare.
type code struct {
	files    []string                   // paths from the top, with slashes
	declared map[string]map[string]bool // by path; read when a page names the file
}

// newCode lists the Go files of the repository. Those below testdata are not ours to name.
func newCode(t *testing.T) *code {
	t.Helper()
	c := &code{declared: make(map[string]map[string]bool)}
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && file != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(file, ".go"):
			return nil
		}
		rel, err := filepath.Rel(root, file)
		c.files = append(c.files, filepath.ToSlash(rel))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// at returns the files that a place names: one path, all files of that name, or the files of a
// folder.
func (c *code) at(place string) (found []string) {
	for _, f := range c.files {
		if f == place || strings.HasSuffix(f, "/"+place) || path.Dir(f) == place {
			found = append(found, f)
		}
	}
	return found
}

// of returns what a file declares: "Name", and "Type.Name" and "Name" for a method.
func (c *code) of(file string) (map[string]bool, error) {
	if names := c.declared[file]; names != nil {
		return names, nil
	}
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join("..", "..", filepath.FromSlash(file)), nil,
		parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	names := make(map[string]bool)
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			names[d.Name.Name] = true
			if d.Recv != nil {
				names[receiver(d.Recv.List[0].Type)+"."+d.Name.Name] = true
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					names[s.Name.Name] = true
				case *ast.ValueSpec:
					for _, n := range s.Names {
						names[n.Name] = true
					}
				}
			}
		}
	}
	c.declared[file] = names
	return names, nil
}

// receiver returns the name of a method's type.
func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr: // a type with a parameter
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

// check returns what is wrong with a signpost.
func (c *code) check(s signpost) (faults []string) {
	files := c.at(s.place)
	if len(files) == 0 {
		if !goFile.MatchString(s.place) && len(s.names) == 0 { // a folder without Go files
			return nil
		}
		return []string{fmt.Sprintf("`%s` is not in the repository", s.place)}
	}
	for _, name := range s.names {
		there := slices.ContainsFunc(files, func(f string) bool {
			declared, err := c.of(f)
			if err != nil {
				faults = append(faults, err.Error())
			}
			return declared[name]
		})
		if !there {
			faults = append(faults, fmt.Sprintf("`%s` does not declare `%s`", s.place, name))
		}
	}
	return faults
}

// Every file and every function that the pages name exists, so that a reader who follows a
// page into the code arrives.
func TestSignposts(t *testing.T) {
	root := filepath.Join("..", "..")
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(pages) < 5 {
		t.Fatalf("the pages are not found: %v, %v", pages, err)
	}
	c := newCode(t)
	names := 0
	for _, page := range append(pages, filepath.Join(root, "README.md")) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		number := 0
		for line := range strings.Lines(string(text)) {
			number++
			for _, s := range signpostsIn(line) {
				names += len(s.names)
				for _, fault := range c.check(s) {
					t.Errorf("%s:%d: %s", page, number, fault)
				}
			}
		}
	}
	if names < 80 {
		t.Errorf("only %d names follow a file on all pages: write `file.go` `Name`, or this test checks nothing", names)
	}
}

// A made-up file, function or method is found.
func TestWrongSignposts(t *testing.T) {
	c := newCode(t)
	for _, test := range []struct {
		line   string
		faults int
	}{
		{"| 7 | `pkg/stream/session.go` `sendLoop` → `receiveLoop` | the message crosses |", 0},
		{"(`open_edge.go` `edgeSession.ServeOpen`, `serve` and `refuse`)", 0},
		{"`pkg/reload` `Watch`, `followed.check`", 0},
		{"`session.go` `sendLoop`; the message `Hello` follows", 0},
		{"`session.go` and its `Hello`, or `pkg/stream` (`Hello`)", 0},
		{"`docs` and `net.Conn`, `Open.network`", 0},
		{"| 7 | `pkg/stream/session.go` `madeUp` |", 1},
		{"| 7 | `session.go` `sendLoop` → `madeUp`, `watchSilence` |", 1},
		{"`session.go` `madeUp`, `alsoMadeUp`", 2},
		{"`session.go` `cloudSession.sendLoop`", 1}, // it is a method of session
		{"`peers.go` `hasLeft`", 1},                 // it is in nodes.go
		{"`pkg/reload` `Follow`", 1},
		{"`pkg/streams/session.go`", 1},
		{"`madeup.go`", 1},
		{"`pkg/madeup` `Run`", 1},
	} {
		var faults []string
		for _, s := range signpostsIn(test.line) {
			faults = append(faults, c.check(s)...)
		}
		if len(faults) != test.faults {
			t.Errorf("%s\nhas the faults %q; want %d", test.line, faults, test.faults)
		}
	}
}
