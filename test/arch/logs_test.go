package arch

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// unchecked are files whose logs no test may check, and why.
var unchecked = map[string]string{
	"internal/logline/logline_test.go": "it tests the check itself",
	"pkg/auth/secret_test.go":          "it logs values that have no JSON",
	"test/arch/logs_test.go":           "it has an example of such a log",
	"pkg/stream/dial_bench_test.go":    "a benchmark that throws its log away",
}

// Every log that a test keeps is a testkit.Log or a rig.Log, which check each line: it parses, and no key is there
// twice.
func TestLogsAreChecked(t *testing.T) {
	if uncheckedLog("var log bytes.Buffer\nslog.NewTextHandler(&log, nil)") == "" {
		t.Fatal("a log in a buffer is not found; this test would never fail")
	}
	root := filepath.Join("..", "..")
	handlers := 0
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(file, "_test.go") {
			return err
		}
		name, err := filepath.Rel(root, file)
		if err != nil || unchecked[filepath.ToSlash(name)] != "" {
			return err
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		handlers += len(handler.FindAll(text, -1))
		if found := uncheckedLog(string(text)); found != "" {
			t.Errorf("%s: %s: no line of this log is checked; use a testkit.Log", name, found)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if handlers < 10 {
		t.Errorf("only %d handlers were found", handlers)
	}
}

// handler matches a handler of slog, and the name of what it writes to.
var handler = regexp.MustCompile(`slog\.New(?:Text|JSON)Handler\(&?(?:\w+\.)*(\w+), `)

// uncheckedLog returns a handler that writes to a buffer of the same file, or to no log at all; "": there is none.
func uncheckedLog(text string) string {
	for _, m := range handler.FindAllStringSubmatch(text, -1) {
		buffer := regexp.MustCompile(`\b` + m[1] + `(\s+\*?|\s*:?= new\(|\s*:?= &?)(bytes\.Buffer|strings\.Builder)\b`)
		if m[1] == "Discard" || m[1] == "Stderr" || buffer.MatchString(text) {
			return m[0]
		}
	}
	return ""
}
