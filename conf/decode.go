package conf

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
)

// decode parses data into tables. It reports each unknown key and each value of the wrong type with its
// line. After a syntax error it returns nil.
//
// The TOML library only parses, and this file sets the fields. The library's own decoder does not suffice:
// it stops at the first wrong type, ignores the case of keys, and gives no line for a key that it has not
// decoded.
func decode(data []byte, r *report) *tables {
	var root map[string]toml.Primitive
	md, err := toml.Decode(string(data), &root)
	if err != nil {
		r.syntax(err)
		return nil
	}
	r.src.lines = make(map[string]int)
	d := &decoder{md: md, r: r}
	var t tables
	d.table(nil, root, reflect.ValueOf(&t).Elem())
	return &t
}

// syntax adds the parser's error as a problem.
func (r *report) syntax(err error) {
	pe, ok := errors.AsType[toml.ParseError](err)
	if !ok {
		r.add("", "not valid TOML: %s", strings.TrimPrefix(err.Error(), "toml: "))
		return
	}
	text := "not valid TOML: " + lowerFirst(strings.TrimSuffix(pe.Message, "."))
	p := Problem{File: r.src.file, Line: pe.Position.Line, Key: pe.LastKey, Text: text}
	if strings.HasSuffix(pe.LastKey, "token") {
		// The parser's message quotes the text at the error, which may be the token.
		p.Text = `not valid TOML: write the token in double quotes, on one line`
	}
	r.problems = append(r.problems, p)
}

// lowerFirst returns s with its first byte in lower case.
func lowerFirst(s string) string {
	if s == "" {
		return s
	}
	return strings.ToLower(s[:1]) + s[1:]
}

// decoder sets the fields of tables from parsed values.
type decoder struct {
	md toml.MetaData // decodes a Primitive
	r  *report       // gets the problems, and in src.lines the line of each key
}

// table sets the fields of struct v from the keys of the table at path. It reports unknown keys.
func (d *decoder) table(path toml.Key, prims map[string]toml.Primitive, v reflect.Value) {
	for _, name := range slices.Sorted(maps.Keys(prims)) {
		p, key := prims[name], join(path, name)
		d.r.src.lines[key.String()] = d.line(p)
		if rule, ok := superEdgeRule(key.String()); ok {
			d.superEdgeKey(path, prims, name, rule, v)
			continue
		}
		f, ok := field(v, name)
		if !ok {
			d.unknown(path, name, p, v)
			continue
		}
		d.value(key, p, f)
	}
}

// superEdgeKey renames, ignores or refuses a key that only SuperEdge has, as rule says.
func (d *decoder) superEdgeKey(
	path toml.Key, prims map[string]toml.Primitive, name string, rule rule, v reflect.Value,
) {
	key := join(path, name).String()
	switch {
	case rule.refuse != "":
		d.r.add(key, "%s", rule.refuse)
	case rule.ignore != "":
		d.r.warn(key, "ignored: %s", rule.ignore)
	default:
		if _, both := prims[rule.rename]; both {
			d.r.add(key, "this is SuperEdge's newer name of %s, which is there as well: remove one of them",
				rule.rename)
			return
		}
		d.r.warn(key, "this is SuperEdge's name of %s: it is accepted, but write %s", rule.rename, rule.rename)
		// Decode the value under our name, with the line of SuperEdge's name, so that problems of the value
		// name a key that the documentation has.
		now := join(path, rule.rename)
		d.r.src.lines[now.String()] = d.r.src.lines[key]
		f, _ := field(v, rule.rename)
		d.value(now, prims[name], f)
	}
}

// value sets v from p, or reports that p is of the wrong type and mutes key.
func (d *decoder) value(key toml.Key, p toml.Primitive, v reflect.Value) {
	raw := d.raw(p)
	ok := false
	switch v.Kind() {
	// A pointer stands for a table or a bool that the file may leave out. nil: the file leaves it out.
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.value(key, p, v.Elem())
		return
	case reflect.Struct:
		if _, ok = raw.(map[string]any); ok {
			d.table(key, d.children(p), v)
		}
	// The operator chooses the keys, such as the addresses to listen on in [mode.cloud.tcp].
	case reflect.Map:
		if _, ok = raw.(map[string]any); ok {
			d.freeTable(key, p, v)
		}
	case reflect.String:
		var s string
		if s, ok = raw.(string); ok {
			v.SetString(s)
		}
	case reflect.Int:
		var n int64
		if n, ok = raw.(int64); ok {
			ok = !v.OverflowInt(n) // an int may have 32 bits
			v.SetInt(n)
		}
	case reflect.Bool:
		var b bool
		if b, ok = raw.(bool); ok {
			v.SetBool(b)
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Struct {
			ok = d.arrayOfTables(key, p, v)
			break
		}
		var list []string
		if list, ok = stringList(raw); ok {
			v.Set(reflect.ValueOf(list))
		}
	default:
		// The tests decode every field of tables, so no other kind gets here.
		panic("conf: no way to decode into " + v.Type().String())
	}
	if !ok {
		d.r.add(key.String(), "expected %s, found %s%s", expectedKind(v), describe(raw), hint(v, raw))
		d.r.mute(key.String())
	}
}

// arrayOfTables sets v, a slice of structs. It returns false if p is not an array of tables.
func (d *decoder) arrayOfTables(key toml.Key, p toml.Primitive, v reflect.Value) bool {
	var elems []toml.Primitive
	if d.md.PrimitiveDecode(p, &elems) != nil {
		return false
	}
	// All elements must be tables. The library also decodes an array of other values into elems.
	for _, e := range elems {
		if _, ok := d.raw(e).(map[string]any); !ok {
			return false
		}
	}
	v.Set(reflect.MakeSlice(v.Type(), len(elems), len(elems)))
	for i, e := range elems {
		d.table(key, d.children(e), v.Index(i))
	}
	return true
}

// freeTable sets v, a map whose keys the operator chooses. It skips values of the wrong type.
func (d *decoder) freeTable(path toml.Key, p toml.Primitive, v reflect.Value) {
	v.Set(reflect.MakeMap(v.Type()))
	prims := d.children(p)
	for _, name := range slices.Sorted(maps.Keys(prims)) {
		key := join(path, name)
		d.r.src.lines[key.String()] = d.line(prims[name])
		elem := reflect.New(v.Type().Elem()).Elem()
		d.value(key, prims[name], elem)
		if !d.r.muted[key.String()] {
			v.SetMapIndex(reflect.ValueOf(name), elem)
		}
	}
}

// looksLikeKey reports whether the name of an unknown key may be shown. Somebody may have written a
// secret to the left of the equals sign. Most secrets are long, or hold more than letters.
func looksLikeKey(name string) bool {
	const longest = 24
	for _, r := range name {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && r != '_' && r != '-' {
			return false
		}
	}
	return len(name) <= longest
}

// unknown reports a key that the table at path does not have. It suggests the table that has such a key,
// or the key with the most similar name.
func (d *decoder) unknown(path toml.Key, name string, p toml.Primitive, v reflect.Value) {
	// Suggest first a table that has this key, then a similar key of this table, and last all keys of this
	// table. Only in the last case the name may be a secret: in the others it equals or resembles a key.
	key, what := join(path, name), "key"
	if _, ok := d.raw(p).(map[string]any); ok {
		what = "table"
	}
	// A name in more than three tables, such as the cloud's cert, does not tell which one was meant.
	if owners := tablesWithKey(path, name); len(owners) > 0 && len(owners) <= 3 {
		if what == "table" {
			owner := strings.TrimSuffix(owners[0], "]")
			d.r.add(key.String(), "unknown table here: write %s.%s]", owner, name)
			return
		}
		d.r.add(key.String(), "unknown key here: %s belongs in %s", name, strings.Join(owners, " or "))
		return
	}
	// No other table suggests itself: look for a spelling mistake.
	known := names(v.Type())
	if near, ok := nearest(name, known); ok {
		d.r.mute(join(path, near).String()) // the suggested key must not be reported as missing as well
		d.r.add(key.String(), "unknown %s: did you mean %s?", what, near)
		return
	}
	// Problems look up their line by key, so the masked key gets a line.
	if !looksLikeKey(name) {
		key = join(path, "***")
		d.r.src.lines[key.String()] = d.line(p)
	}
	here := "a file"
	if len(path) > 0 {
		here = "[" + path.String() + "]"
	}
	d.r.add(key.String(), "unknown %s: %s has %s", what, here, strings.Join(known, ", "))
}

// raw returns the value of p with the types of the parser.
func (d *decoder) raw(p toml.Primitive) any {
	var raw any
	if err := d.md.PrimitiveDecode(p, &raw); err != nil {
		return nil // decoding into any does not fail
	}
	return raw
}

// children returns the keys and values of a table.
func (d *decoder) children(p toml.Primitive) map[string]toml.Primitive {
	var prims map[string]toml.Primitive
	if err := d.md.PrimitiveDecode(p, &prims); err != nil {
		return nil // decoding a table does not fail, and p is one
	}
	return prims
}

// line returns the line of a value. The library does not export positions, but it adds the position of the
// value to the error of an Unmarshaler. So line lets the library call an Unmarshaler that always fails.
func (d *decoder) line(p toml.Primitive) int {
	pe, _ := errors.AsType[toml.ParseError](d.md.PrimitiveDecode(p, new(probe)))
	// The library wraps probe's error in a ParseError with the position of the value; line 0: no position.
	line := pe.Position.Line
	if _, ok := d.raw(p).(map[string]any); !ok || line > 0 {
		return line
	}
	for _, child := range d.children(p) { // the header [a.b] creates table a, which has no line
		if n := d.line(child); n > 0 && (line == 0 || n < line) {
			line = n
		}
	}
	return line
}

// probe is the Unmarshaler that always fails, for line.
type probe struct{}

func (*probe) UnmarshalTOML(any) error { return errors.New("where is this?") }

// join returns path with name appended. It copies path, so results never share an array.
func join(path toml.Key, name string) toml.Key {
	return append(slices.Clip(slices.Clone(path)), name)
}

// field returns the field of struct v whose TOML key is name. Case matters.
func field(v reflect.Value, name string) (reflect.Value, bool) {
	for i := range v.NumField() {
		if v.Type().Field(i).Tag.Get("toml") == name {
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

// names returns the keys of a table, sorted.
func names(t reflect.Type) []string {
	var list []string
	for f := range t.Fields() {
		list = append(list, f.Tag.Get("toml"))
	}
	slices.Sort(list)
	return list
}

// tablesWithKey returns the tables that have a key of that name. If path is in a mode, it returns only
// tables of that mode.
func tablesWithKey(path toml.Key, name string) []string {
	var owners []string
	var walk func(at toml.Key, t reflect.Type)
	walk = func(at toml.Key, t reflect.Type) {
		for f := range t.Fields() {
			key := f.Tag.Get("toml")
			sub := join(at, key)
			if len(path) > 1 && len(sub) == 2 && sub[1] != path[1] {
				continue // a table of the other mode
			}
			if key == name && len(at) > 0 {
				owners = append(owners, "["+at.String()+"]")
			}
			ft := f.Type
			if ft.Kind() == reflect.Pointer {
				ft = ft.Elem()
			}
			if ft.Kind() == reflect.Struct {
				walk(sub, ft)
			}
		}
	}
	walk(nil, reflect.TypeFor[tables]())
	return owners
}

// nearest returns the known name with the smallest edit distance from name. The distance must be at most
// a third of the length of name, plus one.
func nearest(name string, known []string) (string, bool) {
	// Short names allow few edits: for three letters the distance may be two.
	best, bestDistance := "", 2+len(name)/3
	for _, k := range known {
		if n := editDistance(strings.ToLower(name), k); n < bestDistance {
			best, bestDistance = k, n
		}
	}
	return best, best != ""
}

// editDistance is the Levenshtein distance of a and b.
func editDistance(a, b string) int {
	// One row of the dynamic programming matrix: row[j] is the distance of a[:i] and b[:j].
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// stringList returns raw as a list of strings. It returns false if raw is no such list.
func stringList(raw any) ([]string, bool) {
	elems, ok := raw.([]any)
	if !ok {
		return nil, false
	}
	list := make([]string, len(elems))
	for i, e := range elems {
		if list[i], ok = e.(string); !ok {
			return nil, false
		}
	}
	return list, true
}

// expectedKind describes the TOML type of a field.
func expectedKind(v reflect.Value) string {
	switch v.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Int:
		return "a whole number"
	case reflect.Bool:
		return "true or false"
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Struct {
			return "an array of tables"
		}
		return "an array of strings"
	default:
		return "a table"
	}
}

// describe describes the type of a value. It does not show the value, which may be a secret.
func describe(raw any) string {
	switch raw := raw.(type) {
	case string:
		return "a string"
	case int64:
		return "a whole number"
	case float64:
		return "a number with a fraction"
	case bool:
		return "true or false"
	case time.Time:
		return "a date"
	case map[string]any:
		return "a table"
	case []map[string]any:
		return "an array of tables"
	case []any:
		if _, ok := stringList(raw); ok {
			return "an array of strings"
		}
		return "an array that holds something else"
	default:
		return fmt.Sprintf("a %T", raw)
	}
}

// hint says how to write the value, if the mistake is a common one; else "".
func hint(v reflect.Value, raw any) string {
	_, isString := raw.(string)
	_, isWhole := raw.(int64)
	_, isArray := raw.([]any)
	_, isTable := raw.(map[string]any)
	_, isTables := raw.([]map[string]any)
	switch k := v.Kind(); {
	// Slices of structs come first, so the later cases for slices are about lists of strings.
	case k == reflect.Slice && v.Type().Elem().Kind() == reflect.Struct:
		return ": write every element in braces, [{…}]"
	case k == reflect.Int && isWhole:
		return " that is too large"
	case (k == reflect.Int || k == reflect.Bool) && isString:
		return ": write it without quotes"
	case k == reflect.String && !isArray && !isTable && !isTables:
		return ": write it in double quotes"
	case k == reflect.Slice && isString:
		return ": write it in brackets, [\"…\"]"
	case k == reflect.Slice && isArray:
		return ": write every element in double quotes"
	case isTables:
		return ": write [name], not [[name]]"
	default:
		return ""
	}
}
