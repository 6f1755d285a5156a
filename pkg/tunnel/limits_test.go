package tunnel

import "testing"

func TestLimitNamesAreUnique(t *testing.T) {
	var c Counters
	seen := make(map[string]bool)
	for _, l := range Limits() {
		name := l.String()
		if name == "" || seen[name] {
			t.Errorf("limit %d is called %q", l, name)
		}
		seen[name] = true
		c.Limited(l)
		if n := c.LimitedBy(l); n != 1 {
			t.Errorf("%s was reached once and counted %d times", l, n)
		}
	}
	unknown := numLimits
	c.Limited(unknown)
	if c.LimitedBy(unknown) != 0 || seen[unknown.String()] {
		t.Error("a limit that does not exist is counted")
	}
}

func TestCountingALimitAllocatesNothing(t *testing.T) {
	var c Counters
	if n := testing.AllocsPerRun(100, func() { c.Limited(LimitOpens) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
