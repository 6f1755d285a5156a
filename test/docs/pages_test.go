package docs

import (
	"errors"
	"go/ast"
	goparser "go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"tunnel.example/tunnel/conf"
)

const root = "../.."

// Every command block of every page has a mark, and every fence a language. The scenarios that the
// pages name are those that a test runs.
func TestPages(t *testing.T) {
	blocks, err := All(root)
	if err != nil {
		t.Fatal(err)
	}
	inCluster := clusterScenarios(t)
	kinds := make(map[Kind]int)
	for _, b := range blocks {
		kinds[b.Kind]++
		for _, s := range b.Scenarios {
			if b.Kind == Run && !scenarios[s] {
				t.Errorf("%s: no test of this package runs the scenario %q", b, s)
			}
			if b.Kind == Cluster && !inCluster[s] {
				t.Errorf("%s: %s has no scenario %q", b, clusterTests, s)
			}
		}
	}
	if kinds[Run] == 0 || kinds[Other] == 0 {
		t.Errorf("blocks by kind: %v: the pages are not read", kinds)
	}
	t.Logf("%d blocks are run here, %d need a cluster, %d are not run", kinds[Run], kinds[Cluster], kinds[NotRun])
}

// clusterTests is the file with the scenarios that need a cluster. The file builds with the tag e2e only, so these
// tests parse it.
const clusterTests = "test/e2e/pages_test.go"

// clusterScenarios returns the names of the scenarios of clusterTests: each `scenario{name: "NAME", …}`.
func clusterScenarios(t *testing.T) map[string]bool {
	t.Helper()
	file, err := goparser.ParseFile(token.NewFileSet(), filepath.Join(root, clusterTests), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[string]bool)
	ast.Inspect(file, func(n ast.Node) bool {
		made, ok := n.(*ast.CompositeLit)
		if !ok {
			return true
		}
		if of, ok := made.Type.(*ast.Ident); !ok || of.Name != "scenario" {
			return true
		}
		for _, e := range made.Elts {
			pair, ok := e.(*ast.KeyValueExpr)
			if !ok {
				continue
			}
			key, isIdent := pair.Key.(*ast.Ident)
			value, isText := pair.Value.(*ast.BasicLit)
			if !isIdent || key.Name != "name" || !isText {
				continue
			}
			name, err := strconv.Unquote(value.Value)
			if err != nil {
				t.Fatal(err)
			}
			names[name] = true
		}
		return true
	})
	if len(names) == 0 {
		t.Fatalf("%s has no scenario{name: …}", clusterTests)
	}
	return names
}

// Each scenario that needs a cluster is on a page.
func TestClusterScenarios(t *testing.T) {
	blocks, err := All(root)
	if err != nil {
		t.Fatal(err)
	}
	for name := range clusterScenarios(t) {
		if len(Steps(blocks, Cluster, name)) == 0 {
			t.Errorf("%s runs the scenario %q, and no page has a block of it", clusterTests, name)
		}
	}
}

var (
	testName = regexp.MustCompile(`\bTest[A-Z]\w*`)
	inFolder = regexp.MustCompile(` of (?:package )?([\w/]+)`)
	// The commands of the program in a line of a block: "tunnel", or "kubectl edgetunnel" with kubectl's flags.
	command = regexp.MustCompile(`(?:^|[\s/])(?:kubectl edge)?tunnel((?: [^\s|#;]+)+)`)
)

// testsOf returns the tests that a mark names, by their folder: "TestA and TestB of FOLDER".
func testsOf(reason string) (map[string][]string, error) {
	tests := make(map[string][]string)
	for _, at := range testName.FindAllStringIndex(reason, -1) {
		folder := inFolder.FindStringSubmatch(reason[at[1]:])
		if folder == nil {
			return nil, errors.New("the mark names tests without their folder: write TestA of FOLDER")
		}
		tests[folder[1]] = append(tests[folder[1]], reason[at[0]:at[1]])
	}
	return tests, nil
}

// A mark that names tests ("TestA and TestB of FOLDER") names tests that exist. Each command of the block and each long
// flag is a word of a string in the tests' folders, so that a mark cannot name a test that runs something else.
func TestReasons(t *testing.T) {
	blocks, err := All(root)
	if err != nil {
		t.Fatal(err)
	}
	known := commandNames(t)
	checked, compared := 0, 0
	for _, b := range blocks {
		tests, err := testsOf(b.Reason)
		if err != nil {
			t.Errorf("%s: %v", b, err)
			continue
		}
		words := make(map[string]bool)
		for folder, names := range tests {
			functions := testsIn(t, folder, words)
			for _, name := range names {
				checked++
				if !functions[name] {
					t.Errorf("%s: %s has no %s", b, folder, name)
				}
			}
		}
		if len(tests) == 0 {
			continue
		}
		for _, word := range commandWords(b.Text, known) {
			compared++
			if !words[word] {
				t.Errorf("%s: no string of the tests that the mark names has the word %q", b, word)
			}
		}
	}
	if checked < 5 || compared < 20 {
		t.Errorf("the marks name only %d tests, for %d words of commands", checked, compared)
	}
}

// testsIn returns the functions of the test files of a folder, and adds the words of their strings to words. Strings in
// other files of the folder count as well: test/rig has what several tests share.
func testsIn(t *testing.T, folder string, words map[string]bool) map[string]bool {
	t.Helper()
	functions := make(map[string]bool)
	for _, pattern := range []string{filepath.Join(root, folder, "*_test.go"), filepath.Join(root, "test/rig", "*.go")} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			file, err := goparser.ParseFile(token.NewFileSet(), name, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(file, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.FuncDecl:
					functions[n.Name.Name] = true
				case *ast.BasicLit:
					if text, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING {
						for _, word := range strings.Fields(text) {
							flag, _, _ := strings.Cut(word, "=")
							words[flag] = true
						}
					}
				}
				return true
			})
		}
	}
	return functions
}

// commandNames returns the commands of docs/commands.md, such as "ls" and "token create".
func commandNames(t *testing.T) map[string]bool {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(root, "docs/commands.md"))
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[string]bool)
	for _, m := range regexp.MustCompile("(?m)^## `tunnel ([a-z -]+)`$").FindAllStringSubmatch(string(page), -1) {
		names[m[1]] = true
	}
	if !names["ls"] || !names["token create"] {
		t.Fatalf("docs/commands.md has the commands %v", names)
	}
	return names
}

// commandWords returns the words of tunnel's commands in a block: command, subcommand, and long flags without values.
func commandWords(text string, known map[string]bool) (words []string) {
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, " #") // a comment
		for _, m := range command.FindAllStringSubmatch(line, -1) {
			before := ""
			for _, arg := range strings.Fields(m[1]) {
				flag, _, _ := strings.Cut(arg, "=")
				switch {
				case strings.HasPrefix(flag, "--"):
					words = append(words, flag)
				case known[before+" "+arg]:
					words = append(words, before, arg)
				case known[arg]:
					words = append(words, arg)
				}
				before = arg
			}
		}
	}
	return words
}

// The words of commands are found in lines as pages have them.
func TestCommandWords(t *testing.T) {
	known := map[string]bool{"ls": true, "tap": true, "token create": true, "drain": true, "services ls": true}
	for line, want := range map[string]string{
		"tunnel ls edge1 --missing    # tunnel drain":                "ls --missing",
		"echo x | sudo tunnel token create --node='a b' --uses 2":    "token create --node --uses",
		"kubectl edgetunnel -n far --pod POD drain --stop":           "--pod drain --stop",
		"kubectl -n a exec POD -- /tunnel services ls -c a.toml":     "services ls",
		"tunnel services watch":                                      "",
		"tunnel tap -o json | jq 'select(.phase == \"ls\")' --slurp": "tap",
		"install tunnel-edge.service --now":                          "",
	} {
		if got := strings.Join(commandWords(line, known), " "); got != want {
			t.Errorf("%s: the words are %q, want %q", line, got, want)
		}
	}
}

// Each fault of a page is found, and a page without faults has none.
func TestParse(t *testing.T) {
	const sh = "```sh\ntunnel version\n```\n"
	for _, tt := range []struct{ page, want string }{
		{"<!-- run: readme cloud -->\n" + sh, ""},
		{"1. First\n\n   <!-- not run: needs a registry -->\n   ```sh\n   a\n     b\n   ```\n", ""},
		{"- a list\n  - in a list\n\n    goes on\n", ""},
		{"- a list\n\ntext\n\n    code\n", "p:5: code is in a fence"},
		{"1. text\n\n       code\n", "p:3: code is in a fence"},
		{sh, "p:1: shell commands without a mark"},
		{"```bash\na\n```\n", "p:1: shell commands without a mark"},
		{"```\na\n```\n", "p:1: the fence names no language"},
		{"``` text\na\n```\n", "p:1: a fence names one language"},
		{"<!-- run: readme cloud -->\n\n" + sh, "p:1: a mark stands on the line before"},
		{"<!-- run: readme cloud -->\n```toml\n```\n", "p:1: the fence behind this mark has no shell commands"},
		{"<!-- run: readme -->\n" + sh, "p:1: the mark is run: SCENARIO MACHINE"},
		{"<!-- run: readme cloud forever -->\n" + sh, "p:1: the mark is run: SCENARIO MACHINE"},
		{"<!-- run: one,two cloud -->\n" + sh, ""},
		{"<!-- cluster: one cloud fails -->\n" + sh, ""},
		{"<!-- run: one, cloud -->\n" + sh, "p:1: a comma separates the names of two scenarios"},
		{"<!-- not run: -->\n" + sh, "p:1: the mark gives no reason"},
		{"```text\na\n", "p:1: the fence is not closed"},
		{"  ```text\na\n  ```\n", "p:1: a line of the block is left of its fence"},
	} {
		blocks, err := Parse("p", tt.page)
		switch {
		case tt.want == "" && err != nil:
			t.Errorf("%q: %v", tt.page, err)
		case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%q: error %v, want %q", tt.page, err, tt.want)
		}
		if tt.want == "" && strings.Contains(tt.page, "```") && len(blocks) != 1 {
			t.Errorf("%q: %d blocks, want 1", tt.page, len(blocks))
		}
	}
}

// Steps returns a scenario's blocks in order, with what their marks say.
func TestSteps(t *testing.T) {
	page := "<!-- run: one a -->\n```sh\nfirst\n```\n<!-- cluster: one a -->\n```sh\nelsewhere\n```\n" +
		"<!-- run: two a -->\n```sh\nother\n```\n<!-- run: two,one b background -->\n```sh\nboth\n```\n" +
		"<!-- run: one a fails -->\n```sh\nlast\n```\n"
	blocks, err := Parse("p", page)
	if err != nil {
		t.Fatal(err)
	}
	steps := Steps(blocks, Run, "one")
	want := []Block{
		{Page: "p", Line: 2, Lang: "sh", Text: "first\n", Kind: Run, Scenarios: []string{"one"}, Machine: "a"},
		{Page: "p", Line: 14, Lang: "sh", Text: "both\n", Kind: Run, Scenarios: []string{"two", "one"}, Machine: "b",
			Background: true},
		{Page: "p", Line: 18, Lang: "sh", Text: "last\n", Kind: Run, Scenarios: []string{"one"}, Machine: "a", Fails: true},
	}
	if !reflect.DeepEqual(steps, want) {
		t.Errorf("got %+v\nwant %+v", steps, want)
	}
	if n := len(Steps(blocks, Cluster, "one")); n != 1 {
		t.Errorf("%d blocks need a cluster, want 1", n)
	}
}

// Every key of every TOML block on the pages exists, and has a value of its type.
func TestKeysOnPages(t *testing.T) {
	blocks, err := All(root)
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, b := range blocks {
		if b.Lang != "toml" {
			continue
		}
		checked++
		for _, fault := range keyFaults(t, b.Text) {
			t.Errorf("%s: %s", b, fault)
		}
	}
	if checked < 5 {
		t.Errorf("only %d blocks of TOML are on the pages", checked)
	}
	if faults := keyFaults(t, "[mode.edge]\nalow = [\"self:*\"]\n"); len(faults) != 1 {
		t.Errorf("a made-up key has the faults %q, want 1", faults)
	}
	if faults := keyFaults(t, "[mode.edge]\nallow = \"self:*\"\n"); len(faults) != 1 {
		t.Errorf("a value of another type has the faults %q, want 1", faults)
	}
}

// keyFaults returns the faults of a part of a configuration. Missing keys are none, nor are values
// that only a whole configuration can have right.
func keyFaults(t *testing.T, text string) (faults []string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "part.toml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := conf.Check(file, conf.Env{HostName: "edge1"})
	problems, ok := errors.AsType[conf.Problems](err)
	if err != nil && !ok {
		return []string{err.Error()}
	}
	for _, p := range problems {
		for _, prefix := range []string{"unknown ", "expected ", "not valid TOML"} { // see conf/decode.go
			if strings.HasPrefix(p.Text, prefix) {
				faults = append(faults, p.Key+": "+p.Text)
			}
		}
	}
	return faults
}
