// Command site checks the site that `make site` has built:
//
//	go run ./tools/site bin/site
//
// Every link leads to a file of the site, every anchor to an element, and every page can be reached from
// the first one. A browser that shows a page requests nothing from another server.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/net/html"
)

const first = "index.html"

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: site FOLDER")
		os.Exit(2)
	}
	summary, err := check(os.DirFS(os.Args[1]))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Printf("%s: %s\n", filepath.Join(os.Args[1], first), summary)
}

// link is a link of a page, or a file that a page requests.
type link struct {
	to      string
	request bool // a browser fetches it to show the page
}

// page is an HTML file of the site.
type page struct {
	links []link
	ids   map[string]bool
}

// check returns a summary of the site, or all its faults in one error.
func check(site fs.FS) (summary string, err error) {
	pages, err := read(site)
	if err != nil {
		return "", err
	}
	var faults []error
	if pages[first] == nil {
		faults = append(faults, errors.New(first+" is missing"))
	}
	links := 0
	leadsTo := make(map[string][]string) // from each page
	for name, p := range pages {
		for _, l := range p.links {
			links++
			to, fault := follow(site, pages, name, l)
			if fault != "" {
				faults = append(faults, fmt.Errorf("%s: %s: %s", name, l.to, fault))
			}
			leadsTo[name] = append(leadsTo[name], to)
		}
	}
	reached := map[string]bool{first: true}
	for next := []string{first}; len(next) > 0; next = next[1:] {
		for _, to := range leadsTo[next[0]] {
			if !reached[to] {
				reached[to] = true
				next = append(next, to)
			}
		}
	}
	for name := range pages {
		if !reached[name] {
			faults = append(faults, fmt.Errorf("%s: no page leads here from %s", name, first))
		}
	}
	slices.SortFunc(faults, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return fmt.Sprintf("%d pages, %d links", len(pages), links), errors.Join(faults...)
}

// outside matches what a style sheet loads.
var outside = regexp.MustCompile(`@import|url\(\s*['"]?[^)]*`)

// read returns the HTML files of a site by their path. A style sheet that loads anything is an error.
func read(site fs.FS) (map[string]*page, error) {
	pages := make(map[string]*page)
	err := fs.WalkDir(site, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		switch path.Ext(name) {
		case ".html":
			text, err := fs.ReadFile(site, name)
			if err != nil {
				return err
			}
			root, err := html.Parse(bytes.NewReader(text))
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			pages[name] = newPage(root)
		case ".css":
			text, err := fs.ReadFile(site, name)
			if err != nil {
				return err
			}
			if loads := outside.Find(text); loads != nil {
				return fmt.Errorf("%s: loads something: %s", name, loads)
			}
		}
		return nil
	})
	return pages, err
}

// newPage returns the links and the anchors of a document.
func newPage(root *html.Node) *page {
	p := &page{ids: make(map[string]bool)}
	for n := range root.Descendants() {
		if n.Type != html.ElementNode {
			continue
		}
		for _, a := range n.Attr {
			switch a.Key {
			case "id":
				p.ids[a.Val] = true
			case "href", "src", "srcset", "poster", "data":
				p.links = append(p.links, link{to: a.Val, request: n.Data != "a"})
			}
		}
	}
	return p
}

// follow returns the path in the site to which a link of a page leads, and what is wrong with the link.
func follow(site fs.FS, pages map[string]*page, from string, l link) (to, fault string) {
	u, err := url.Parse(l.to)
	switch {
	case err != nil:
		return "", err.Error()
	case u.Scheme == "data":
		return "", ""
	case u.Scheme != "" || u.Host != "":
		if l.request {
			return "", "a browser would request this from another server"
		}
		return "", ""
	case strings.HasPrefix(u.Path, "/"):
		return "", "the path is absolute: the site would not work in a folder"
	}
	to = from
	if u.Path != "" {
		to = path.Join(path.Dir(from), u.Path)
	}
	info, err := fs.Stat(site, to)
	switch {
	case err != nil:
		return to, "there is no such file"
	case info.IsDir():
		return to, "it is a folder"
	case u.Fragment != "" && (pages[to] == nil || !pages[to].ids[u.Fragment]):
		return to, "there is no such anchor"
	}
	return to, ""
}
