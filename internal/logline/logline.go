// Package logline checks lines of our logs. A line in the format json must parse, and no line may have a key
// twice: programs that read logs keep one of both values, and which one is up to them.
//
//	if err := logline.Check(line); err != nil { … }
//
// Tests call it for every line that the code under test logs. See internal/testkit and test/rig.
package logline

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Check returns what is wrong with a line of log/slog, in the format text or json. It accepts any line that is
// neither: a program may print other things beside its log.
func Check(line string) error {
	line = strings.TrimRight(line, "\r\n")
	switch {
	case strings.HasPrefix(line, `{"time":`):
		return checkJSON(line)
	case strings.HasPrefix(line, "time="):
		return checkText(line)
	}
	return nil
}

// Faults that log/slog writes into a line.
const (
	badKey   = "!BADKEY" // the key of a value without a key
	badValue = "!ERROR:" // the begin of a value that does not encode
)

// note adds a key, or returns what is wrong with it or its value.
func note(keys map[string]bool, key, value string) error {
	switch {
	case key == badKey:
		return fmt.Errorf("the value %q has no key", value)
	case strings.HasPrefix(value, badValue):
		return fmt.Errorf("the value of %q does not encode: %s", key, value)
	case keys[key]:
		return fmt.Errorf("the key %q is there twice", key)
	}
	keys[key] = true
	return nil
}

// checkText checks a line of slog.TextHandler: key=value, either of them quoted if need be.
func checkText(line string) error {
	keys := make(map[string]bool)
	for rest := line; rest != ""; {
		key, after, err := word(rest, "=")
		if err != nil || !strings.HasPrefix(after, "=") {
			return fmt.Errorf("no key=value in %q", rest)
		}
		value, after, err := word(after[1:], " ")
		if err != nil {
			return fmt.Errorf("the value of %q: %w", key, err)
		}
		if err := note(keys, key, value); err != nil {
			return err
		}
		rest = strings.TrimPrefix(after, " ")
	}
	return nil
}

// word returns the quoted or unquoted word at the start of s, and what follows it. An unquoted word ends before
// one of the characters of end.
func word(s, end string) (w, rest string, err error) {
	if !strings.HasPrefix(s, `"`) {
		if at := strings.IndexAny(s, end); at >= 0 {
			return s[:at], s[at:], nil
		}
		return s, "", nil
	}
	quoted, err := strconv.QuotedPrefix(s)
	if err != nil {
		return "", "", err
	}
	w, err = strconv.Unquote(quoted)
	return w, s[len(quoted):], err
}

// checkJSON checks a line of slog.JSONHandler.
func checkJSON(line string) error {
	d := json.NewDecoder(strings.NewReader(line))
	if err := object(d); err != nil {
		return err
	}
	next := d.Token
	if _, err := next(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the object")
	}
	return nil
}

// object reads a value, and checks the keys of the objects in it.
func object(d *json.Decoder) error {
	next := d.Token
	open, err := next()
	if err != nil {
		return err
	}
	if text, ok := open.(string); ok && strings.HasPrefix(text, badValue) {
		return fmt.Errorf("a value does not encode: %s", text)
	}
	delim, ok := open.(json.Delim)
	if !ok {
		return nil
	}
	keys := make(map[string]bool)
	for d.More() {
		if delim == '{' {
			var key json.Token
			if key, err = next(); err != nil {
				return err
			}
			if err = note(keys, key.(string), ""); err != nil {
				return err
			}
		}
		if err = object(d); err != nil {
			return err
		}
	}
	_, err = next()
	return err
}
