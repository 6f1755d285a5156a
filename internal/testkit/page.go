package testkit

import (
	"os"
	"strings"
	"testing"
)

// updateDocs in the environment makes Page write the pages. `make docs` sets it.
const updateDocs = "TUNNEL_UPDATE_DOCS"

// Page fails the test if a page of docs/ that is made from the code is not up to date. It names the first
// line that differs. With TUNNEL_UPDATE_DOCS in the environment it writes the page instead.
func Page(t testing.TB, file, want string) {
	t.Helper()
	if os.Getenv(updateDocs) != "" {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v: make docs writes it", err)
	}
	if string(got) == want {
		return
	}
	has, wants := strings.Split(string(got), "\n"), strings.Split(want, "\n")
	n := 0
	for n < len(has) && n < len(wants) && has[n] == wants[n] {
		n++
	}
	line := func(lines []string) string {
		if n < len(lines) {
			return lines[n]
		}
		return "(the end)"
	}
	t.Errorf("%s:%d: not up to date, make docs writes it anew\nthe page has %s\nthe code has %s",
		file, n+1, line(has), line(wants))
}
