package tunnel

import "testing"

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"dial tcp 10.0.0.1:22: Zeit überschritten": "dial tcp 10.0.0.1:22: Zeit überschritten",
		"\x1b]0;x\a\x1b[2J\nOK":                    "?]0;x??[2J?OK",
		"\u009b2J \u202eabc \xff":                  "?2J ?abc ?",
	} {
		if got := Printable(in); got != want {
			t.Errorf("%q becomes %q, want %q", in, got, want)
		}
	}
}
