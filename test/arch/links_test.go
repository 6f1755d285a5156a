package arch

import (
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// index is the page that lists all pages in the order of a reader. The site takes its navigation from it.
const index = "docs/README.md"

var (
	fenced    = regexp.MustCompile("(?ms)^[ \t]*(```+|~~~+).*?^[ \t]*(```+|~~~+)[ \t]*$")
	htmlNote  = regexp.MustCompile(`(?s)<!--.*?-->`)
	mdHeading = regexp.MustCompile(`(?m)^#{1,6} +(.+?)(?: +#+)?$`)
	mdLink    = regexp.MustCompile(`\]\(<?([^)\s>]*)>?(?: +"[^"]*")?\)`)
	mdLabel   = regexp.MustCompile(`(?m)^ {0,3}\[[^\]]+\]: +<?([^\s>]+)`)
	htmlLink  = regexp.MustCompile(`<(?:a|img)\b[^>]*\b(?:href|src)="([^"]*)"`)
	htmlID    = regexp.MustCompile(`<a (?:id|name)="([^"]+)"`)
	linkText  = regexp.MustCompile(`!?\[([^\]]*)\]\([^)]*\)`)
	indexLine = regexp.MustCompile(`(?m)^- \[[^\]]+\]\(([^)#]+)(?:#[^)]*)?\)`)
)

// page is a Markdown file.
type page struct {
	links   []string
	anchors map[string]bool
}

// readPage returns the links and the anchors of a page. It ignores code: a link in code is an example.
func readPage(text string) page {
	p := page{anchors: make(map[string]bool)}
	text = htmlNote.ReplaceAllString(fenced.ReplaceAllString(text, ""), "")
	for _, m := range mdHeading.FindAllStringSubmatch(text, -1) {
		name := slug(m[1])
		for n, first := 1, name; p.anchors[name]; n++ {
			name = fmt.Sprintf("%s-%d", first, n)
		}
		p.anchors[name] = true
	}
	for _, m := range htmlID.FindAllStringSubmatch(text, -1) {
		p.anchors[m[1]] = true
	}
	// A code span may stand in the text of a link, and what looks like a link in a code span is none.
	text = codeSpan.ReplaceAllString(text, "code")
	for _, form := range []*regexp.Regexp{mdLink, mdLabel, htmlLink} {
		for _, m := range form.FindAllStringSubmatch(text, -1) {
			p.links = append(p.links, m[1])
		}
	}
	return p
}

// slug returns the anchor that GitHub makes from a heading.
func slug(heading string) string {
	heading = linkText.ReplaceAllString(heading, "$1")
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			return unicode.ToLower(r)
		}
		return -1
	}, strings.TrimSpace(heading))
}

// pages reads the Markdown files below root, by their path with slashes. Those of tools and of tests' data
// are left out.
func pages(t *testing.T, root string) map[string]page {
	t.Helper()
	all := make(map[string]page)
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && file != root &&
			(strings.HasPrefix(d.Name(), ".") || slices.Contains([]string{"testdata", "bin", "dist"}, d.Name())):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(file, ".md"):
			return nil
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, file)
		all[filepath.ToSlash(rel)] = readPage(string(text))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// faultOf returns what is wrong with a link of a page below root; "": nothing, or it leads elsewhere.
func faultOf(root, from, link string, all map[string]page) string {
	u, err := url.Parse(link)
	switch {
	case err != nil:
		return err.Error()
	case u.Scheme != "" || u.Host != "":
		return ""
	case u.Path == "" && u.Fragment == "":
		return "the link is empty"
	case strings.HasPrefix(u.Path, "/"):
		return "the path is absolute: write it relative to the page"
	}
	to := from
	if u.Path != "" {
		to = path.Join(path.Dir(from), u.Path)
		if strings.HasPrefix(to, "..") {
			return "it leads out of the repository"
		}
		if _, err = os.Stat(filepath.Join(root, filepath.FromSlash(to))); err != nil {
			return to + " does not exist"
		}
	}
	if u.Fragment == "" {
		return ""
	}
	target, ok := all[to]
	switch {
	case !ok:
		return to + " is not a page, so it has no anchors"
	case !target.anchors[u.Fragment]:
		return fmt.Sprintf("%s has no heading with the anchor #%s", to, u.Fragment)
	}
	return ""
}

// Every relative link of every page leads to a file of the repository, and every anchor to a heading.
func TestLinks(t *testing.T) {
	root := filepath.Join("..", "..")
	all := pages(t, root)
	checked := 0
	for name, p := range all {
		for _, link := range p.links {
			checked++
			if fault := faultOf(root, name, link, all); fault != "" {
				t.Errorf("%s links to %s: %s", name, link, fault)
			}
		}
	}
	if checked < 150 || all["README.md"].anchors == nil {
		t.Errorf("only %d links in %d pages: the pages or their links are not found", checked, len(all))
	}
}

// A wrong link is found, in each form that Markdown has. What stands in code is no link.
func TestWrongLinks(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"README.md":      "# Top\n\n## What `tunnel join` does: a [list](docs/a.md)\n",
		"docs/a.md":      "# A\n\n## Twice\n\n## Twice\n\n## Café, 2.5 – more\n\n<a id=\"own\"></a>\n",
		"docs/b.svg":     "<svg/>",
		"testdata/no.md": "[none](none.md)",
	} {
		file := filepath.Join(root, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	all := pages(t, root)
	if len(all) != 2 {
		t.Errorf("the pages are %v", all)
	}
	for text, faults := range map[string]int{
		"[a](a.md), [itself](#twice), [second](a.md#twice-1), [own](#own), [no space](#café-25--more)": 0,
		"[up](../README.md#what-tunnel-join-does-a-list), ![plot](b.svg), [folder](..)":                0,
		"[outside](https://example.com/x#y), <mailto:a@example.com>, [`code`](a.md)":                   0,
		"`[x](none.md)`\n\n```sh\n[x](none.md)\n```\n<!-- [x](none.md) -->":                            0,
		"[x](none.md)":                       1,
		"[`code`](none.md)":                  1,
		"![x](none.svg)":                     1,
		"[x](a.md#none), [y](#none)":         2,
		"[x](b.svg#none)":                    1,
		"[x]()":                              1,
		"[x](/docs/a.md)":                    1,
		"[x](../../out.md)":                  1,
		"[x][label]\n\n[label]: none.md":     1,
		"<img alt=\"x\" src=\"none.png\">":   1,
		"[x](a.md#Twice), [y](<none.md>)":    2,
		"[x](a.md#twice-2)":                  1,
		"[x](none.md \"a title\"), [y](a.m)": 2,
	} {
		found := 0
		for _, link := range readPage(text).links {
			if faultOf(root, "docs/a.md", link, all) != "" {
				found++
			}
		}
		if found != faults {
			t.Errorf("%s\nhas %d faults, want %d", text, found, faults)
		}
	}
}

// The index lists every page of docs/ once, and README.md leads to the index.
func TestIndex(t *testing.T) {
	root := filepath.Join("..", "..")
	text, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(index)))
	if err != nil {
		t.Fatal(err)
	}
	listed := make(map[string]int)
	for _, m := range indexLine.FindAllStringSubmatch(string(text), -1) {
		listed[path.Join(path.Dir(index), m[1])]++
	}
	all := pages(t, root)
	for name := range all {
		want := strings.HasPrefix(name, "docs/") && name != index
		if n := listed[name]; want && n != 1 {
			t.Errorf("%s lists %s %d times: write one line \"- [Title](%s): what a reader finds there\"",
				index, name, n, strings.TrimPrefix(name, "docs/"))
		}
	}
	if !slices.ContainsFunc(all["README.md"].links, func(l string) bool { return strings.HasPrefix(l, index) }) {
		t.Errorf("README.md does not link to %s", index)
	}
}
