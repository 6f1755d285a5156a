package tunnel

import "testing"

func TestChange(t *testing.T) {
	var c Change
	c.Notify() // nobody waits
	first, same := c.Next(), c.Next()
	if IsClosed(first) {
		t.Error("a change of before is told")
	}
	c.Notify()
	if !IsClosed(first) || !IsClosed(same) {
		t.Error("not everybody is told")
	}
	second := c.Next()
	if IsClosed(second) {
		t.Error("one change is told twice")
	}
	c.Notify()
	if !IsClosed(second) {
		t.Error("the second change is not told")
	}
}
