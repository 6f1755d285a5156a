package tunnel

import "testing"

func TestSelector(t *testing.T) {
	for _, c := range []struct {
		s    string
		node NodeName
		want bool
	}{
		{"*", "edge1", true},
		{"edge1", "edge1", true},
		{"edge1", "edge10", false},
		{"edge1,gw-*", "gw-2.site", true},
		{"edge1,gw-*", "edge2", false},
		{"*-site3", "a-site3", true},
		{"*-site3", "a-site30", false},
		{"gw-*-b", "gw-a-b", true},
		{"edge1, gw-*", "gw-2", true},
		{" * ", "edge1", true},
	} {
		s, err := ParseSelector(c.s)
		if err != nil || s.Chooses(c.node) != c.want {
			t.Errorf("%q chooses %s: %v, want %v; %v", c.s, c.node, !c.want, c.want, err)
		}
	}
	for _, bad := range []string{"", ",", "a,", "A", "a b", "a?", "[a]", "a\\*", "a/b", "*,a", "a, *"} {
		if s, err := ParseSelector(bad); err == nil {
			t.Errorf("%q is read as %q", bad, s)
		}
	}
}
