package logline

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"":                      "",
		"tunnel: a b=c b=c":     "",
		"time=1 msg=a b=1 c=2":  "",
		"time=1 msg=a b=1 b=2":  `"b" is there twice`,
		`time=1 "a b"=1 msg=x`:  "",
		`time=1 msg="b=1" b=2`:  "",
		`time=1 msg="not ended`: "invalid syntax",
		`time=1 !BADKEY=5`:      "has no key",
		`time=1 msg`:            "no key=value",
		`{"time":1,"a":{"b":1},"b":[{"a":1},{"a":2}]}`: "",
		`{"time":1,"a":1,"a":2}`:                       `"a" is there twice`,
		`{"time":1,"a":{"b":1,"b":2}}`:                 `"b" is there twice`,
		`{"time":1,"a":`:                               "EOF",
		`{"time":1} x`:                                 "",
		`{"time":1,"!BADKEY":1}`:                       "has no key",
	} {
		err := Check(line + "\n")
		if want == "" && line != `{"time":1} x` {
			if err != nil {
				t.Errorf("%s: %v", line, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", line, err, want)
		}
	}
}

// What slog writes is parsed, whatever is in it; a key twice is found behind With, too.
func TestCheckOfSlog(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	for name, h := range map[string]slog.Handler{
		"text": slog.NewTextHandler(&b, nil), "json": slog.NewJSONHandler(&b, nil),
	} {
		log := slog.New(h)
		b.Reset()
		log.With("a", "x y").Info("what=\"is\" it\n", "b", errors.New("c=1 \x00\xff"), "d", []string{"e=f", "g"}, "", 1)
		if err := Check(b.String()); err != nil {
			t.Errorf("%s: %v in %s", name, err, b.String())
		}
		b.Reset()
		log.With("a", 1).Info("twice", "a", 2)
		if Check(b.String()) == nil {
			t.Errorf("%s: no error for %s", name, b.String())
		}
		b.Reset()
		log.Info("a value without a key", slog.Any("fault", make(chan int)))
		if err := Check(b.String()); (err != nil) != (name == "json") {
			t.Errorf("%s: %v for %s", name, err, b.String())
		}
	}
}
