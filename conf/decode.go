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

// decode reads data into tables. It reports every unknown key and every value of
// the wrong type, each with its line; after a syntax error there is nothing to look
// at and it returns nil.
//
// The library's own decoder stops at the first wrong type, lets the case of a key
// pass and gives no line for a key that it has not decoded, so the values are set
// here; parsing is the library's.
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

// syntax adds the parser's error.
func (r *report) syntax(err error) {
	pe, ok := errors.AsType[toml.ParseError](err)
	if !ok {
		r.add("", "not valid TOML: %s", strings.TrimPrefix(err.Error(), "toml: "))
		return
	}
	text := "not valid TOML: " + lowerFirst(strings.TrimSuffix(pe.Message, "."))
	p := Problem{File: r.src.file, Line: pe.Position.Line, Key: pe.LastKey, Text: text}
	if strings.HasSuffix(pe.LastKey, "token") {
		// The parser quotes what it stumbled over, and that is the token.
		p.Text = `not valid TOML: write the token in double quotes, on one line`
	}
	r.problems = append(r.problems, p)
}

func lowerFirst(s string) string {
	if s == "" {
		return s
	}
	return strings.ToLower(s[:1]) + s[1:]
}

type decoder struct {
	md toml.MetaData
	r  *report
}

// table sets the fields of the struct v.
func (d *decoder) table(path toml.Key, prims map[string]toml.Primitive, v reflect.Value) {
	for _, name := range slices.Sorted(maps.Keys(prims)) {
		p, key := prims[name], join(path, name)
		d.r.src.lines[key.String()] = d.line(p)
		if rule, ok := superEdge(key.String()); ok {
			d.foreign(path, prims, name, rule, v)
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

// foreign follows the rule for a key that only SuperEdge has.
func (d *decoder) foreign(path toml.Key, prims map[string]toml.Primitive, name string, rule rule, v reflect.Value) {
	key := join(path, name).String()
	switch {
	case rule.refuse != "":
		d.r.add(key, "%s", rule.refuse)
	case rule.ignore != "":
		d.r.warn(key, "ignored: %s", rule.ignore)
	default:
		if _, both := prims[rule.rename]; both {
			d.r.add(key, "this is SuperEdge's newer name of %s, which is there as well: remove one of them", rule.rename)
			return
		}
		d.r.warn(key, "this is SuperEdge's name of %s: it is accepted, but write %s", rule.rename, rule.rename)
		now := join(path, rule.rename)
		d.r.src.lines[now.String()] = d.r.src.lines[key]
		f, _ := field(v, rule.rename)
		d.value(now, prims[name], f)
	}
}

// value sets v, or reports that it is of the wrong type.
func (d *decoder) value(key toml.Key, p toml.Primitive, v reflect.Value) {
	raw := d.raw(p)
	ok := false
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.value(key, p, v.Elem())
		return
	case reflect.Struct:
		if _, ok = raw.(map[string]any); ok {
			d.table(key, d.children(p), v)
		}
	case reflect.Map:
		if _, ok = raw.(map[string]any); ok {
			d.lines(key, p, v)
		}
	case reflect.String:
		var s string
		if s, ok = raw.(string); ok {
			v.SetString(s)
		}
	case reflect.Int:
		var n int64
		if n, ok = raw.(int64); ok {
			v.SetInt(n)
		}
	case reflect.Bool:
		var b bool
		if b, ok = raw.(bool); ok {
			v.SetBool(b)
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Struct {
			ok = d.tables(key, p, v)
			break
		}
		var list []string
		if list, ok = stringList(raw); ok {
			v.Set(reflect.ValueOf(list))
		}
	default:
		panic("conf: no way to decode into " + v.Type().String()) // a field of tables that this package's tests would have met
	}
	if !ok {
		d.r.add(key.String(), "expected %s, found %s%s", kindWord(v), found(raw), hint(v, raw))
		d.r.mute(key.String())
	}
}

// tables sets v, a slice of structs, from an array of tables. It reports whether p is one.
func (d *decoder) tables(key toml.Key, p toml.Primitive, v reflect.Value) bool {
	var elems []toml.Primitive
	if d.md.PrimitiveDecode(p, &elems) != nil {
		return false
	}
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

// lines fills a map whose keys the operator chooses.
func (d *decoder) lines(path toml.Key, p toml.Primitive, v reflect.Value) {
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

// looksLikeKey reports whether a name that no table has may be shown. A secret that was
// written to the left of the equals sign may not, and all that it is sure to have is that
// it is long, or not made of letters.
func looksLikeKey(name string) bool {
	const longest = 24
	for _, r := range name {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && r != '_' && r != '-' {
			return false
		}
	}
	return len(name) <= longest
}

// unknown reports a key that no table has here, and what was probably meant.
func (d *decoder) unknown(path toml.Key, name string, p toml.Primitive, v reflect.Value) {
	key, what := join(path, name), "key"
	if _, ok := d.raw(p).(map[string]any); ok {
		what = "table"
	}
	if homes := homesOf(path, name); len(homes) > 0 && len(homes) <= 3 {
		if what == "table" {
			home := strings.TrimSuffix(homes[0], "]")
			d.r.add(key.String(), "unknown table here: write %s.%s]", home, name)
			return
		}
		d.r.add(key.String(), "unknown key here: %s belongs in %s", name, strings.Join(homes, " or "))
		return
	}
	known := names(v.Type())
	if near, ok := nearest(name, known); ok {
		d.r.mute(join(path, near).String()) // it is not missing as well
		d.r.add(key.String(), "unknown %s: did you mean %s?", what, near)
		return
	}
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

// raw returns the value as the parser made it.
func (d *decoder) raw(p toml.Primitive) any {
	var raw any
	if err := d.md.PrimitiveDecode(p, &raw); err != nil {
		return nil // into any, it has no reason to fail
	}
	return raw
}

func (d *decoder) children(p toml.Primitive) map[string]toml.Primitive {
	var prims map[string]toml.Primitive
	if err := d.md.PrimitiveDecode(p, &prims); err != nil {
		return nil // only called on tables, for which it has no reason to fail
	}
	return prims
}

// line asks the library where a value stands. Its positions are private, but an
// unmarshaler's error is given the place of the value that it was called for.
func (d *decoder) line(p toml.Primitive) int {
	pe, _ := errors.AsType[toml.ParseError](d.md.PrimitiveDecode(p, new(probe)))
	line := pe.Position.Line
	if _, ok := d.raw(p).(map[string]any); !ok || line > 0 {
		return line
	}
	for _, child := range d.children(p) { // [a.b] makes an a that stands nowhere itself
		if n := d.line(child); n > 0 && (line == 0 || n < line) {
			line = n
		}
	}
	return line
}

type probe struct{}

func (*probe) UnmarshalTOML(any) error { return errors.New("where is this?") }

// join appends without sharing the array of path.
func join(path toml.Key, name string) toml.Key {
	return append(slices.Clip(slices.Clone(path)), name)
}

// field returns the field of the struct v for the TOML key name. Case matters.
func field(v reflect.Value, name string) (reflect.Value, bool) {
	for i := range v.NumField() {
		if v.Type().Field(i).Tag.Get("toml") == name {
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

// names lists the keys of a table, sorted.
func names(t reflect.Type) []string {
	var list []string
	for f := range t.Fields() {
		list = append(list, f.Tag.Get("toml"))
	}
	slices.Sort(list)
	return list
}

// homesOf lists the tables of the same mode that do have a key of that name.
func homesOf(path toml.Key, name string) []string {
	var homes []string
	var walk func(at toml.Key, t reflect.Type)
	walk = func(at toml.Key, t reflect.Type) {
		for f := range t.Fields() {
			key := f.Tag.Get("toml")
			sub := join(at, key)
			if len(path) > 1 && len(sub) == 2 && sub[1] != path[1] {
				continue // the other mode
			}
			if key == name && len(at) > 0 {
				homes = append(homes, "["+at.String()+"]")
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
	return homes
}

// nearest returns the known name with the fewest edits from name, when that is near
// enough to be meant: a third of the letters and one more.
func nearest(name string, known []string) (string, bool) {
	best, least := "", 2+len(name)/3
	for _, k := range known {
		if n := edits(strings.ToLower(name), k); n < least {
			best, least = k, n
		}
	}
	return best, best != ""
}

// edits is the Levenshtein distance of a and b.
func edits(a, b string) int {
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

// stringList accepts an array of strings, empty or not.
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

func kindWord(v reflect.Value) string {
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

// found describes a value without showing it: it may be a secret.
func found(raw any) string {
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

// hint says how to write the value, where that is plain.
func hint(v reflect.Value, raw any) string {
	_, isString := raw.(string)
	_, isArray := raw.([]any)
	_, isTable := raw.(map[string]any)
	_, isTables := raw.([]map[string]any)
	switch k := v.Kind(); {
	case k == reflect.Slice && v.Type().Elem().Kind() == reflect.Struct:
		return ": write every element in braces, [{…}]"
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
