package conf

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"

	"tunnel.example/tunnel/internal/testkit"
)

// docs/configuration.md is made from three sources. The comments of the example files say what each key
// does, so that the text stands once. The types in tables.go say which keys there are and what their values
// look like. superEdgeRules says which other names SuperEdge has.

// valueForm explains a value of the tag is, in tables.go.
type valueForm struct{ one, many, meaning string }

// valueForms are in the order of the page.
func valueForms() []valueForm {
	limit := fmt.Sprintf("a whole number; a limit is from 1 to %d", maxCount)
	return []valueForm{
		{"port", "ports", "a whole number from 1 to 65535, without quotes"},
		{"range of ports", "ranges of ports", "two ports with `-` between, such as `20000-20999`"},
		{"number", "numbers", limit},
		{"number a second", "numbers a second", fmt.Sprintf("a whole number from 1 to %d", maxPerSecond)},
		{"number of a million", "numbers of a million", "a whole number from 1 to 1000000; 10000 is one in a hundred"},
		{"collector", "collectors", "`http://host:port` or `https://host:port`; a path may follow"},
		{"seconds", "seconds", fmt.Sprintf("a whole number from 1 to %d", maxSeconds)},
		{"KiB", "KiB", fmt.Sprintf("a whole number from %d to %d; 1 KiB is 1,024 bytes", minKiB, maxKiB)},
		{"path", "paths", "a path, absolute or relative to the configuration file"},
		{"host:port", "addresses host:port",
			"a name or an IP address, a colon and a port; an IPv6 address has brackets: `[::1]:9000`"},
		{"IP address", "IP addresses", "an IPv4 or IPv6 address; in `upstream` a port may follow"},
		{"network", "networks", "an IP address, or a network such as `10.0.0.0/8`"},
		{"target", "targets", "`host:port` that an edge dials; a node and a slash may stand before it"},
		{"allow entry", "allow entries", "an address, a network or `self`; then a colon, and a port or `*`"},
		{"listener", "listeners", "`unix:///path` with an absolute path, or `tls://host:port`"},
		{"tls address", "addresses", "`tls://host:port`"},
		{"server", "servers", "`host:port`, or the URL of a WebSocket, `wss://host/path`"},
		{"proxy", "proxies", "`\"env\"`, `\"none\"`, or a URL: `http://host:port`, `https://host:port`, " +
			"`socks5://host:port`; `user:password@` may stand before the host, with `%40` for `@` in them"},
		{"name", "names", "a text; the column *what it does* says what the name stands for"},
		{"congestion control", "congestion controls", "`auto`, `system`, or a name of Linux such as `bbr`, " +
			"`cubic` or `reno`"},
		{"label selector", "label selectors", "as for `kubectl get --selector`"},
		{"identifiers", "identifiers", "pairs such as `host=edge1`, joined by `&`; the keys are `host`, `ipv4`, " +
			"`ipv6`, `cidr` and `default-route`"},
		{"duration", "durations", "a number and a unit, such as `720h` or `30m`"},
		{"secret", "secrets", "a text; tunnel never shows it"},
	}
}

// shown is what an example file says of keys of one table that share a comment.
type shown struct {
	keys, values []string // as in the file: "cert", and its value in TOML
	off          bool     // the keys are commented out
	comment      string
}

// shownTable is a table of an example file.
type shownTable struct {
	path  string // mode.cloud.https
	intro string // the comment above its header
	rows  []shown
}

var (
	tableLine = regexp.MustCompile(`^#?\[([\w.]+)\]$`)
	keyLine   = regexp.MustCompile(`^(#?)("[^"]+"|\w+) = (.+)$`)
)

// readExample returns the tables of an example file, in order.
func readExample(t *testing.T, file string) (all []shownTable) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var comment []string
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		header, key := tableLine.FindStringSubmatch(line), keyLine.FindStringSubmatch(line)
		switch {
		case line == "" || line == "#":
			comment = nil
		case strings.HasPrefix(line, "# "):
			comment = append(comment, line[2:])
		case header != nil:
			all = append(all, shownTable{path: header[1], intro: strings.Join(comment, " ")})
			comment = nil
		case key != nil && len(all) > 0:
			table := &all[len(all)-1]
			if comment != nil || len(table.rows) == 0 {
				table.rows = append(table.rows, shown{off: key[1] == "#", comment: strings.Join(comment, " ")})
			}
			row := &table.rows[len(table.rows)-1]
			row.keys, row.values = append(row.keys, key[2]), append(row.values, key[3])
			comment = nil
		default:
			t.Fatalf("%s: the line %q is neither a comment, a key nor a table", file, line)
		}
	}
	return all
}

// keyFields returns the fields of tables and of all tables in it, by their whole key.
func keyFields() map[string]reflect.StructField {
	all := make(map[string]reflect.StructField)
	var walk func(at toml.Key, ty reflect.Type)
	walk = func(at toml.Key, ty reflect.Type) {
		for f := range ty.Fields() {
			key, ft := join(at, f.Tag.Get("toml")), f.Type
			all[key.String()] = f
			if ft.Kind() == reflect.Pointer {
				ft = ft.Elem()
			}
			if ft.Kind() == reflect.Struct {
				walk(key, ft)
			}
		}
	}
	walk(nil, reflect.TypeFor[tables]())
	return all
}

// form describes the values of a key in words. It returns "" if the tag is does not fit the type.
func form(f reflect.StructField) string {
	is, ty := f.Tag.Get("is"), f.Type
	if ty.Kind() == reflect.Pointer {
		ty = ty.Elem()
	}
	if ty.Kind() == reflect.Map {
		ty = ty.Elem()
	}
	list := ty.Kind() == reflect.Slice
	switch {
	case list && ty.Elem().Kind() == reflect.Struct:
		return "list of tables with `" + strings.Join(names(ty.Elem()), "` and `") + "`"
	case ty.Kind() == reflect.Bool && is == "":
		return "true or false"
	}
	if words, ok := strings.CutPrefix(is, "one of "); ok {
		all := strings.Fields(words)
		for i, word := range all {
			all[i] = "`\"" + word + "\"`"
		}
		if list {
			return "list of " + strings.Join(all, ", ")
		}
		return strings.Join(all[:len(all)-1], ", ") + " or " + all[len(all)-1]
	}
	for _, v := range valueForms() {
		if v.one == is && list {
			return "list of " + v.many
		}
		if v.one == is {
			return is
		}
	}
	return ""
}

// said matches the sentences of a comment that say what an absent key means.
var said = regexp.MustCompile(`(?:^| )(?:(Off) by default|Default: (.+?)|(Required[^.]*))\.(?: |$)`)

// byDefault cuts from a comment what an absent key means, and returns both. Without such a sentence,
// the value of a key that is commented out is the default.
func byDefault(s shown) (meaning, absent string, err error) {
	m := said.FindStringSubmatch(s.comment)
	switch {
	case m != nil:
		meaning = strings.TrimSpace(strings.Replace(s.comment, m[0], " ", 1))
		if absent = m[2]; absent == "" {
			absent = lowerFirst(m[1] + m[3])
		}
		if said.MatchString(meaning) {
			return "", "", fmt.Errorf("%v: the comment names two defaults", s.keys)
		}
		return meaning, absent, nil
	case !s.off:
		return "", "", fmt.Errorf("%v: the key is set, so its comment must say \"Default: ...\", "+
			"\"Off by default\" or \"Required\"", s.keys)
	}
	return s.comment, "`" + strings.Join(s.values, "`, `") + "`", nil
}

var (
	namedTable = regexp.MustCompile(`\[(mode\.[\w.]+)\]`)
	namedPage  = regexp.MustCompile(`docs/(\w+\.md)`)
)

// anchor returns the anchor of a table's heading, as GitHub makes it.
func anchor(table string) string { return "#" + strings.ReplaceAll(table, ".", "") }

// markdown turns the text of a comment into Markdown: tables and pages become links.
func markdown(text string) string {
	known := keyFields()
	text = namedTable.ReplaceAllStringFunc(text, func(s string) string {
		table := s[1 : len(s)-1]
		if _, ok := known[table]; !ok {
			return "`" + s + "`" // a table of SuperEdge
		}
		return "[`" + s + "`](" + anchor(table) + ")"
	})
	text = namedPage.ReplaceAllString(text, "[$1]($1)")
	return strings.ReplaceAll(text, "|", `\|`)
}

// sentences returns a text with each sentence on a line of its own.
func sentences(text string) string {
	return regexp.MustCompile("\\. ([A-Z/\"`[])").ReplaceAllString(text, ".\n$1")
}

// superEdges says that SuperEdge has a key too, and which other names it has for the key.
func superEdges(same bool, others []string) string {
	names := "`" + strings.Join(others, "`, `") + "`"
	switch {
	case same && others != nil:
		return " *SuperEdge has this key, later as " + names + ".*"
	case same:
		return " *SuperEdge has this key.*"
	case others != nil:
		return " *In SuperEdge: " + names + ".*"
	default:
		return ""
	}
}

// row returns the line of the page for keys that share a comment.
func row(table string, s shown, fields map[string]reflect.StructField, renamed map[string][]string) (string, error) {
	meaning, absent, err := byDefault(s)
	if err != nil {
		return "", err
	}
	var values, others []string
	theirs := 0
	for _, key := range s.keys {
		f := fields[table+"."+key]
		if values = append(values, form(f)); values[len(values)-1] == "" {
			return "", fmt.Errorf("%s: the tag is:%q does not say what the value of %s looks like",
				key, f.Tag.Get("is"), f.Type)
		}
		if f.Tag.Get("from") == "superedge" {
			theirs++
		}
		others = append(others, renamed[table+"."+key]...)
	}
	if values = slices.Compact(values); meaning == "" || len(values) > 1 || theirs != 0 && theirs != len(s.keys) {
		return "", fmt.Errorf("%s: %v need a comment each", table, s.keys)
	}
	meaning += superEdges(theirs > 0, others)
	return fmt.Sprintf("| `%s` | %s | %s | %s |\n", strings.Join(s.keys, "`, `"), values[0],
		markdown(absent), markdown(meaning)), nil
}

// section returns the part of the page about a table.
func section(
	t *testing.T, table shownTable, fields map[string]reflect.StructField, renamed map[string][]string,
) string {
	t.Helper()
	b := new(strings.Builder)
	fmt.Fprintf(b, "\n## `[%s]`\n", table.path)
	if table.intro == "" {
		t.Errorf("[%s] has no comment above it", table.path)
	}
	fmt.Fprintf(b, "\n%s\n", sentences(markdown(table.intro)))
	if f := fields[table.path]; f.Type.Kind() == reflect.Map { // its keys are the operator's
		fmt.Fprintf(b, "The form of each value: %s.\n", form(f))
		if f.Tag.Get("from") == "superedge" {
			fmt.Fprint(b, "*SuperEdge has this table.*\n")
		}
		fmt.Fprintf(b, "\n```toml\n[%s]\n", table.path)
		for _, r := range table.rows {
			for i := range r.keys {
				fmt.Fprintf(b, "%s = %s\n", r.keys[i], r.values[i])
			}
		}
		fmt.Fprint(b, "```\n")
		return b.String()
	}
	fmt.Fprint(b, "\n| key | value | if the key is absent | what it does |\n|---|---|---|---|\n")
	for _, s := range table.rows {
		line, err := row(table.path, s, fields, renamed)
		if err != nil {
			t.Errorf("[%s]: %v", table.path, err)
		}
		b.WriteString(line)
	}
	return b.String()
}

const head = `# Configuration reference

<!-- Made by "make docs" from conf/cloud.toml, conf/edge.toml and conf/tables.go. A test compares. -->

This page lists every key of the configuration files of a cloud and of an edge.
[conf/cloud.toml](../conf/cloud.toml) and [conf/edge.toml](../conf/edge.toml) hold the same keys, ready to be copied.
` + "`tunnel config check -c FILE`" + ` reports all problems of a file, each with its line.

- A file is TOML.
  An unknown key is an error, and so is a value of the wrong type.
- An absent key, 0 and "" mean the same.
- Cloud and edge read files with certificates, CAs, private keys and tokens again when the files change.
  For any other change, run ` + "`tunnel reload`" + `.
  It applies what can change while the process runs, and names the keys that need a restart ([reload.md](reload.md)).
- Keys of SuperEdge 0.2 to 0.8.0 are marked.
  SuperEdge 0.8.2 renamed keys; tunnel accepts the other names with a warning.

## The forms of values

| form | how to write it |
|---|---|
| true or false | without quotes |
`

// reference returns docs/configuration.md.
func reference(t *testing.T) string {
	fields, renamed := keyFields(), make(map[string][]string)
	rules := superEdgeRules()
	for _, key := range slices.Sorted(maps.Keys(rules)) {
		if now := rules[key].rename; now != "" {
			i := strings.LastIndex(key, ".")
			renamed[key[:i+1]+now] = append(renamed[key[:i+1]+now], key[i+1:])
		}
	}
	b := new(strings.Builder)
	b.WriteString(head)
	for _, v := range valueForms() {
		fmt.Fprintf(b, "| %s | %s |\n", v.one, v.meaning)
	}
	for _, file := range []string{"cloud.toml", "edge.toml"} {
		for _, table := range readExample(t, file) {
			b.WriteString(section(t, table, fields, renamed))
		}
	}
	fmt.Fprint(b, "\n## Keys that only SuperEdge has\n\n"+
		"A key that is ignored leads to a warning, a key that is refused to an error.\n\n"+
		"| key | what happens |\n|---|---|\n")
	for _, key := range slices.Sorted(maps.Keys(rules)) {
		switch r := rules[key]; {
		case r.ignore != "":
			fmt.Fprintf(b, "| `%s` | ignored: %s |\n", key, markdown(r.ignore))
		case r.refuse != "":
			fmt.Fprintf(b, "| `%s` | refused: %s |\n", key, markdown(r.refuse))
		}
	}
	return b.String()
}

// TestReference: docs/configuration.md is up to date. TestExamples checks that the example files have
// every key.
func TestReference(t *testing.T) {
	page := reference(t)
	if n := strings.Count(page, "\n| `"); n < 80 {
		t.Fatalf("the page has only %d rows of keys: the example files are not understood", n)
	}
	testkit.Page(t, "../docs/configuration.md", page)
}

// TestByDefault: a comment that says nothing or two things of an absent key is found.
func TestByDefault(t *testing.T) {
	for _, tt := range []struct {
		s               shown
		meaning, absent string
	}{
		{shown{off: true, values: []string{"16"}, comment: "How many."}, "How many.", "`16`"},
		{shown{off: true, values: []string{`"/x"`}, comment: "A file. Off by default. More."}, "A file. More.", "off"},
		{shown{values: []string{"1"}, comment: "A port. Required."}, "A port.", "required"},
		{shown{values: []string{"1"}, comment: "A CA. Required with `a`."}, "A CA.", "required with `a`"},
		{shown{values: []string{"1"}, comment: "A. Default: 0.0.0.0, so all. B."}, "A. B.", "0.0.0.0, so all"},
		{shown{values: []string{"1"}, comment: "A port."}, "", ""},
		{shown{off: true, comment: "A port. Off by default. Default: 1."}, "", ""},
	} {
		meaning, absent, err := byDefault(tt.s)
		if meaning != tt.meaning || absent != tt.absent || (err != nil) != (tt.absent == "") {
			t.Errorf("%q: %q, %q, %v", tt.s.comment, meaning, absent, err)
		}
	}
}

// TestLimitForms: the forms of the limits are those that limits.go reads. The largest value is accepted,
// and the next one is not.
func TestLimitForms(t *testing.T) {
	largest := map[string]int{"number": maxCount, "number a second": maxPerSecond, "seconds": maxSeconds, "KiB": maxKiB}
	for table, ty := range map[string]reflect.Type{
		limitsTable: reflect.TypeFor[limitsKeys](), edgeLimitsTable: reflect.TypeFor[edgeLimitsKeys](),
	} {
		for f := range ty.Fields() {
			most := largest[f.Tag.Get("is")]
			for n, ok := range map[int]bool{most: true, most + 1: false} {
				r := newReport(&source{file: "f"})
				d := decode(fmt.Appendf(nil, "%s%s = %d", table, f.Tag.Get("toml"), n), r)
				if d.Mode.Cloud != nil {
					newLimits(&d.Mode.Cloud.Limits, r)
				} else {
					newEdgeLimits(&d.Mode.Edge.Limits, r)
				}
				if err := r.err(); (err == nil) != ok {
					t.Errorf("%s%s = %d: %v", table, f.Tag.Get("toml"), n, err)
				}
			}
		}
	}
}

// TestShownDefaults: a value that the page shows as the default changes nothing when it is written. A key in
// elsewhere has its default in another package, and tests of cmd/tunnel compare some of them.
func TestShownDefaults(t *testing.T) {
	elsewhere := map[string]bool{
		"mode.cloud.join.signername": true, "mode.cloud.join.lifetime": true, "mode.cloud.join.audience": true,
		"mode.cloud.https.clientnames": true, "mode.cloud.egress.strategies": true,
		"mode.edge.stream.client.connections": true,
	}
	load := func(text string) any {
		r := newReport(&source{file: "f"})
		d := decode([]byte(text), r)
		var loaded any
		if d.Mode.Cloud != nil {
			c := newCloud(d.Mode.Cloud, Env{}, r)
			c.src, loaded = nil, c
		} else {
			e := newEdge(d.Mode.Edge, Env{HostName: "edge1"}, r)
			e.src, loaded = nil, e
		}
		if err := r.err(); err != nil {
			t.Errorf("%s\n%v", text, err)
		}
		return loaded
	}
	compared := 0
	for _, table := range slices.Concat(readExample(t, "cloud.toml"), readExample(t, "edge.toml")) {
		for _, s := range table.rows {
			_, absent, err := byDefault(s)
			shown := "`" + strings.Join(s.values, "`, `") + "`"
			if err != nil || absent != shown || strings.HasSuffix(table.path, ".limits") || s.keys[0][0] == '"' {
				continue
			}
			for i, key := range s.keys {
				compared++
				header := "[" + table.path + "]\n"
				same := reflect.DeepEqual(load(header), load(header+key+" = "+s.values[i]))
				if same == elsewhere[table.path+"."+key] {
					t.Errorf("%s.%s: %s is shown as the default; writing it changes nothing: %t",
						table.path, key, s.values[i], same)
				}
			}
		}
	}
	if compared < 12 {
		t.Errorf("only %d defaults are compared", compared)
	}
}
