package main

import (
	"strings"
	"testing"
	"testing/fstest"
)

// Each fault of a site is found, and a site without faults has none.
func TestCheck(t *testing.T) {
	const good = `<link rel="stylesheet" href="site.css"><link rel="icon" href="data:,">
<h1 id="top">A</h1> <a href="docs/b.html#b">B</a> <a href="#top">up</a> <a href="https://example.com/x">away</a>`
	for name, tt := range map[string]struct{ file, text, fault string }{
		"none":              {"index.html", good, ""},
		"no first page":     {"index.html", "", "index.html is missing"},
		"no file":           {"index.html", good + `<a href="none.html">x</a>`, "none.html: there is no such file"},
		"no anchor":         {"index.html", good + `<a href="#none">x</a>`, "#none: there is no such anchor"},
		"no anchor there":   {"docs/b.html", `<a href="../index.html#b">x</a>`, "index.html#b: there is no such anchor"},
		"a folder":          {"index.html", good + `<a href="docs">x</a>`, "docs: it is a folder"},
		"an absolute path":  {"index.html", good + `<a href="/docs/b.html">x</a>`, "the path is absolute"},
		"a page alone":      {"docs/c.html", "<p>alone", "docs/c.html: no page leads here"},
		"a font":            {"index.html", good + `<link href="https://example.com/font.css">`, "another server"},
		"a script":          {"index.html", good + `<script src="//example.com/a.js"></script>`, "another server"},
		"a picture":         {"index.html", good + `<img src="http://example.com/a.png">`, "another server"},
		"no picture":        {"index.html", good + `<img src="none.svg">`, "none.svg: there is no such file"},
		"a style's picture": {"site.css", `p { background: url("https://example.com/a.png") }`, "site.css: loads something"},
		"a style's style":   {"site.css", `@import "a.css";`, "site.css: loads something"},
	} {
		site := fstest.MapFS{
			"index.html":  {Data: []byte(good)},
			"site.css":    {Data: []byte("body { margin: 0 }")},
			"docs/b.html": {Data: []byte(`<h2 id="b">B</h2>`)},
		}
		if site[tt.file] = (&fstest.MapFile{Data: []byte(tt.text)}); tt.text == "" {
			delete(site, tt.file)
		}
		_, err := check(site)
		switch {
		case tt.fault == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case tt.fault != "" && (err == nil || !strings.Contains(err.Error(), tt.fault)):
			t.Errorf("%s: %v, want %s", name, err, tt.fault)
		}
	}
}
