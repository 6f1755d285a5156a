package arch

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every test that docs/security.md names is in the package that it names.
func TestSecurityPage(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "security.md"))
	if err != nil {
		t.Fatal(err)
	}
	// `TestA`, `TestB` (`pkg/c`)
	group := regexp.MustCompile("((?:`Test\\w+`(?:, )?)+) \\(`([\\w/]+)`\\)")
	name := regexp.MustCompile(`Test\w+`)
	found := 0
	for line := range strings.Lines(string(page)) {
		for _, m := range group.FindAllStringSubmatch(line, -1) {
			code := testsOf(t, m[2])
			for _, test := range name.FindAllString(m[1], -1) {
				found++
				if !strings.Contains(code, "func "+test+"(") {
					t.Errorf("%s has no %s", m[2], test)
				}
			}
		}
	}
	if all := len(name.FindAllString(string(page), -1)); found != all || found < 50 {
		t.Errorf("%d of %d tests on the page stand beside their package: write `TestName` (`package`)", found, all)
	}
}

// testsOf returns the test files of a package.
func testsOf(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", "..", dir, "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%s has no tests: %v", dir, err)
	}
	var all strings.Builder
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(b)
	}
	return all.String()
}
