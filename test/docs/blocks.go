// Package docs reads the command blocks of the pages. Its tests run the commands.
//
// A page is every README.md, and every *.md below docs. Every fence of a page names its language.
// The line before a fence with shell commands is a mark:
//
//	<!-- run: first-port cloud -->                  the scenario first-port runs the block on the machine cloud
//	<!-- run: first-port cloud background -->       the same; the one command of the block keeps running
//	<!-- run: first-port cloud fails -->            the same; the last command fails, as the page says
//	<!-- run: readme,first-port cloud -->           a block of two scenarios
//	<!-- cluster: kubernetes control -->            as run, but the scenario needs a real cluster (make e2e)
//	<!-- not run: needs a registry -->              no test runs the block, and why
//
// The tests of this package run the scenarios that need no cluster. A test with a cluster takes its
// blocks from here:
//
//	blocks, err := docs.All(root)
//	for _, b := range docs.Steps(blocks, docs.Cluster, "kubernetes") { … }
//
// The package knows nothing of testing and runs no command itself.
package docs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Kind says what tests do with a block.
type Kind int

// The kinds of blocks.
const (
	Other   Kind = iota // no shell commands, such as TOML or a picture
	Run                 // run by the tests of this package
	Cluster             // run by a test that has a real cluster
	NotRun              // shell commands that no test runs
)

// Block is a fenced block of a page.
type Block struct {
	Page string // path from the top of the repository
	Line int    // of the opening fence
	Lang string
	Text string // without the indentation of the fence; ends in a line break

	Kind       Kind
	Scenarios  []string // Run, Cluster
	Machine    string   // Run, Cluster: where the commands are typed
	Background bool     // Run, Cluster: the command keeps running
	Fails      bool     // Run, Cluster: the last command fails
	Reason     string   // NotRun
}

// String returns the place of the block, for messages.
func (b Block) String() string { return fmt.Sprintf("%s:%d", b.Page, b.Line) }

var (
	fence = regexp.MustCompile("^( *)(```+)([a-z]*)$")
	mark  = regexp.MustCompile(`^ *<!-- (run|cluster|not run): *(.*?) *-->$`)
	item  = regexp.MustCompile(`^( *)(?:[-*]|\d+\.) +`)
)

// isShell reports whether a language is one of shell commands. Pages use sh; the others are here so
// that no command escapes its mark.
func isShell(lang string) bool {
	return slices.Contains([]string{"sh", "bash", "shell", "console", "zsh"}, lang)
}

// Pages returns the paths of the pages, from root: first those that a reader meets first.
func Pages(root string) ([]string, error) {
	var first, docs, others []string
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && file != root && isForeign(d.Name()):
			return filepath.SkipDir
		case d.IsDir():
			return nil
		}
		page, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		switch page = filepath.ToSlash(page); {
		case page == "README.md":
			first = append(first, page)
		case strings.HasPrefix(page, "docs/") && strings.HasSuffix(page, ".md"):
			docs = append(docs, page)
		case strings.HasSuffix(page, "/README.md"):
			others = append(others, page)
		}
		return nil
	})
	if err == nil && (len(first) == 0 || len(docs) == 0) {
		err = fmt.Errorf("no README.md, or no docs/*.md, below %s", root)
	}
	return slices.Concat(first, docs, others), err
}

// isForeign reports whether a folder holds tests' data, or what is no part of the repository.
func isForeign(folder string) bool {
	return strings.HasPrefix(folder, ".") || slices.Contains([]string{"testdata", "bin", "dist"}, folder)
}

// All returns the blocks of all pages. The error names every fault of every page.
func All(root string) ([]Block, error) {
	pages, err := Pages(root)
	if err != nil {
		return nil, err
	}
	var all []Block
	var errs []error
	for _, page := range pages {
		text, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			return nil, err
		}
		blocks, err := Parse(page, string(text))
		all, errs = append(all, blocks...), append(errs, err)
	}
	return all, errors.Join(errs...)
}

// Steps returns the blocks of a scenario, in the order of the pages.
func Steps(blocks []Block, kind Kind, scenario string) []Block {
	return slices.DeleteFunc(slices.Clone(blocks), func(b Block) bool {
		return b.Kind != kind || !slices.Contains(b.Scenarios, scenario)
	})
}

// parser reads a page line by line.
type parser struct {
	page   string
	blocks []Block
	errs   []error

	open     *Block // the block that is being read; nil outside of fences
	indent   string // of its fence
	ticks    string // of its fence
	marked   []string
	markLine int   // of marked; 0: the line before is no mark
	blank    bool  // the line before is blank
	columns  []int // where the text of each open list item begins
}

// Parse returns the blocks of a page. The error names every fault.
func Parse(page, text string) ([]Block, error) {
	p := &parser{page: page, blank: true}
	number := 0
	for line := range strings.Lines(text) {
		number++
		p.line(number, strings.TrimRight(line, "\r\n"))
	}
	if p.open != nil {
		p.fault(p.open.Line, "the fence is not closed")
	}
	return p.blocks, errors.Join(p.errs...)
}

func (p *parser) fault(line int, format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf("%s:%d: %s", p.page, line, fmt.Sprintf(format, args...)))
}

func (p *parser) line(number int, line string) {
	if p.open != nil {
		p.inside(line)
		return
	}
	if m := fence.FindStringSubmatch(line); m != nil {
		p.begin(number, m)
		return
	}
	if p.markLine != 0 {
		p.fault(p.markLine, "a mark stands on the line before a fence of shell commands")
		p.markLine = 0
	}
	switch m := mark.FindStringSubmatch(line); {
	case m != nil:
		p.marked, p.markLine = m, number
	case strings.HasPrefix(strings.TrimSpace(line), "```"):
		p.fault(number, "a fence names one language and nothing else")
	case p.blank && p.isIndentedCode(line):
		p.fault(number, "code is in a fence, not indented: else no test sees its commands")
	}
	p.list(line)
	p.blank = strings.TrimSpace(line) == ""
}

// isIndentedCode reports whether a line behind a blank one begins an indented code block: four
// columns or more right of the text around it.
func (p *parser) isIndentedCode(line string) bool {
	around := 0
	for _, c := range p.columns {
		if c <= indentOf(line) {
			around = max(around, c)
		}
	}
	return strings.TrimSpace(line) != "" && indentOf(line) >= around+4
}

// list notes where list items begin and end.
func (p *parser) list(line string) {
	if strings.TrimSpace(line) == "" {
		return
	}
	m := item.FindStringSubmatch(line)
	if m == nil && !p.blank {
		return // it continues a paragraph
	}
	p.columns = slices.DeleteFunc(p.columns, func(c int) bool { return c > indentOf(line) })
	if m != nil {
		p.columns = append(p.columns, len(m[0]))
	}
}

func indentOf(line string) int { return len(line) - len(strings.TrimLeft(line, " ")) }

// begin opens a block.
func (p *parser) begin(number int, m []string) {
	b := Block{Page: p.page, Line: number, Lang: m[3]}
	switch {
	case b.Lang == "":
		p.fault(number, "the fence names no language: write sh, toml, yaml or, for a picture or an output, text")
	case isShell(b.Lang) && p.markLine == 0:
		p.fault(number, "shell commands without a mark: write <!-- run: SCENARIO MACHINE -->, "+
			"<!-- cluster: SCENARIO MACHINE --> or <!-- not run: REASON --> on the line before")
	case isShell(b.Lang):
		p.read(&b)
	case p.markLine != 0:
		p.fault(p.markLine, "the fence behind this mark has no shell commands")
	}
	p.markLine = 0
	p.open, p.indent, p.ticks = &b, m[1], m[2]
}

// read fills in the mark of a block.
func (p *parser) read(b *Block) {
	words := strings.Fields(p.marked[2])
	switch p.marked[1] {
	case "not run":
		b.Kind, b.Reason = NotRun, p.marked[2]
		if len(words) < 2 {
			p.fault(p.markLine, "the mark gives no reason")
		}
		return
	case "run":
		b.Kind = Run
	case "cluster":
		b.Kind = Cluster
	}
	if len(words) == 3 {
		b.Background, b.Fails = words[2] == "background", words[2] == "fails"
	}
	if len(words) != 2 && !b.Background && !b.Fails {
		p.fault(p.markLine, "the mark is %s: SCENARIO MACHINE, or with background or fails behind it", p.marked[1])
		return
	}
	b.Scenarios, b.Machine = strings.Split(words[0], ","), words[1]
	if slices.Contains(b.Scenarios, "") {
		p.fault(p.markLine, "a comma separates the names of two scenarios: ONE,TWO")
	}
}

// inside adds a line to the open block, or closes it.
func (p *parser) inside(line string) {
	if strings.TrimSpace(line) == p.ticks {
		p.blocks = append(p.blocks, *p.open)
		p.open, p.blank = nil, false
		return
	}
	rest, ok := strings.CutPrefix(line, p.indent)
	if !ok && strings.TrimSpace(line) != "" {
		p.fault(p.open.Line, "a line of the block is left of its fence")
	}
	p.open.Text += rest + "\n"
}
