package main

import (
	"os"
	"path/filepath"
	"testing"
)

// TestDocumentsOfABadProgram checks that a release fails if the program does not write its own documents.
func TestDocumentsOfABadProgram(t *testing.T) {
	const completes = `if [ "$1" = completion ]; then echo "for $2 at $SOURCE_DATE_EPOCH"; exit; fi` + "\n"
	for _, test := range []struct {
		name, script string
		want         []string // of the error
	}{
		{"no completion", `echo "unknown command $1" >&2; exit 2`, []string{"completion bash", "unknown command completion"}},
		{"silent completion", `exit 0`, []string{"tunnel completion bash wrote nothing"}},
		{"no man", completes + `echo "unknown command $1" >&2; exit 2`, []string{"man /", "unknown command man"}},
		{"no page", completes, []string{"tunnel man wrote no page"}},
		{"another section", completes + `echo >"$2/tunnel.8"`, []string{"tunnel.8"}},
		{"good", completes + `echo >"$2/tunnel.1"`, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := small(t)
			host := filepath.Join(r.work, "tunnel")
			if err := os.WriteFile(host, []byte("#!/bin/sh\n"+test.script+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			d := documents{completions: map[string][]byte{}}
			err := r.askProgram(t.Context(), host, &d)
			if test.want != nil {
				wantError(t, err, test.want...)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := string(d.completions["zsh"]); got != "for zsh at 1000000000\n" {
				t.Errorf("zsh: %q", got)
			}
			if len(d.manuals) != 1 || d.manuals[0].name != "tunnel.1" {
				t.Errorf("manuals: %+v", d.manuals)
			}
		})
	}
}
