package tunnel

import (
	"fmt"
	"strings"
	"testing"
	"unsafe"
)

// The newest refusals are kept, the newest first; successes are not.
func TestRefusals(t *testing.T) {
	var r Refusals
	if got := r.Last(); len(got) != 0 {
		t.Errorf("none: %v", got)
	}
	r.Record(Event{Result: ResultOK})
	for n := range maxRefusals + 7 {
		r.Record(Event{Result: Denied.String(), Target: fmt.Sprint(n), Err: strings.Repeat("é", 1000)})
		got := r.Last()
		if want := min(n+1, maxRefusals); len(got) != want {
			t.Fatalf("%d refusals after %d; want %d", len(got), n+1, want)
		}
		for i, e := range got {
			if e.Target != fmt.Sprint(n-i) || e.Time.IsZero() || len(e.Err) > maxRefusalText+len("…") {
				t.Fatalf("after %d, refusal %d is %+v", n+1, i, e)
			}
		}
	}
}

// A refusal that is kept does not keep the longer text, such as a request line, that its texts are parts of.
func TestRefusalsCopy(t *testing.T) {
	line := "POST /exec?command=secret"
	var r Refusals
	r.Record(Event{Result: Denied.String(), Path: line[5:10]})
	if got := r.Last()[0].Path; got != "/exec" || unsafe.StringData(got) == unsafe.StringData(line[5:10]) {
		t.Errorf("%q is a part of the line", got)
	}
}

// Each of two trails gets each event. A success costs no memory while the refusals alone are kept.
func TestTrails(t *testing.T) {
	var a, b int
	one, two := Trail(func(Event) { a++ }), Trail(func(Event) { b++ })
	one.And(two).Record(Event{})
	one.And(nil).Record(Event{})
	Trail(nil).And(two).Record(Event{})
	if Trail(nil).And(nil) != nil || a != 2 || b != 2 {
		t.Errorf("a has %d events, b %d", a, b)
	}
	trail := Trail(new(Refusals).Record)
	if n := testing.AllocsPerRun(100, func() { trail.Record(Event{Kind: EventTCP, Result: ResultOK}) }); n != 0 {
		t.Errorf("a success allocates %v times", n)
	}
}
