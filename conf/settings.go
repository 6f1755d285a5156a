package conf

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"
)

// Settings are the keys of one mode that have a value, by dotted key. Each line of a table whose keys the operator
// chooses, such as [mode.cloud.tcp], counts as a key. Settings have no key whose value is 0 or "": such a key means the
// same as a missing key.
type Settings map[string]Setting

// Setting is the value of a key.
type Setting struct {
	sum   [sha256.Size]byte // SHA-256 of the value, for comparison: a Setting keeps no secret, so it cannot show one
	shown string            // the value in TOML; *** for a secret
}

// String returns the value in TOML; *** for a secret.
func (s Setting) String() string { return s.shown }

// Change is a key whose value differs between two files.
type Change struct {
	Key string `json:"key"`
	Old string `json:"old,omitempty"` // the value in TOML, *** for a secret; "": the key was absent
	New string `json:"new,omitempty"` // the value in TOML, *** for a secret; "": the key is absent now
}

// String returns "key: old -> new".
func (c Change) String() string {
	shown := func(value string) string {
		if value == "" {
			return "absent"
		}
		return value
	}
	return c.Key + ": " + shown(c.Old) + " -> " + shown(c.New)
}

// Changes returns the keys whose values differ between s and next, sorted by key.
func (s Settings) Changes(next Settings) []Change {
	var all []Change
	keys := maps.Clone(s)
	if keys == nil {
		keys = make(Settings)
	}
	maps.Copy(keys, next)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if old, now := s[key], next[key]; old.sum != now.sum {
			all = append(all, Change{Key: key, Old: old.shown, New: now.shown})
		}
	}
	return all
}

// Settings returns the keys of the file and of its file of forwards; nil: c was not read from a file.
func (c *Cloud) Settings() Settings { return c.src.settingsOf() }

// Settings returns the keys of the file; nil: e was not read from a file.
func (e *Edge) Settings() Settings { return e.src.settingsOf() }

func (s *source) settingsOf() Settings {
	if s == nil {
		return nil
	}
	return s.settings
}

// settingsOf returns the settings of the table at path. v is a struct of tables.go.
func settingsOf(path toml.Key, v any) Settings {
	all := make(Settings)
	all.add(path, reflect.ValueOf(v), "")
	return all
}

// add adds the value of a key. If the key is a table, it adds the keys of the table. is is the key's tag `is`.
func (s Settings) add(key toml.Key, v reflect.Value, is string) {
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return
		}
		if v = v.Elem(); v.Kind() == reflect.Bool { // false is not the same as absent
			s.set(key, fmt.Sprint(v), "")
			return
		}
		if v.Kind() == reflect.Struct { // the table itself turns a feature on, even without keys
			s.set(key, "{}", "")
		}
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			tag := v.Type().Field(i).Tag
			s.add(join(key, tag.Get("toml")), v.Field(i), tag.Get("is"))
		}
	case reflect.Map:
		for _, name := range v.MapKeys() {
			s.add(join(key, name.String()), v.MapIndex(name), is)
		}
	default:
		if !v.IsZero() && (v.Kind() != reflect.Slice || v.Len() > 0) {
			s.set(key, inTOML(v), is)
		}
	}
}

// set records the value of a key, written in TOML. is is the key's tag `is`, which decides whether the value
// is a secret.
func (s Settings) set(key toml.Key, value, is string) {
	setting := Setting{sha256.Sum256([]byte(value)), value}
	if is == "secret" || is == "proxy" && strings.Contains(value, "@") { // a proxy may have a password
		setting.shown = `"***"`
	}
	s[key.String()] = setting
}

// inTOML returns a value as a configuration file writes it.
func inTOML(v reflect.Value) string {
	switch v.Kind() {
	case reflect.String:
		return strconv.Quote(v.String())
	case reflect.Slice:
		items := make([]string, v.Len())
		for i := range items {
			items[i] = inTOML(v.Index(i))
		}
		return "[" + strings.Join(items, ", ") + "]"
	case reflect.Struct:
		var fields []string
		for i := range v.NumField() {
			fields = append(fields, v.Type().Field(i).Tag.Get("toml")+" = "+inTOML(v.Field(i)))
		}
		return "{" + strings.Join(fields, ", ") + "}"
	default:
		return fmt.Sprint(v)
	}
}
