package conf

import (
	"strings"
	"testing"
)

// A target without a node whose host could be a node's name is a warning that says both ways to mend it.
func TestTargetLikeANode(t *testing.T) {
	t.Parallel()
	for target, want := range map[string]string{
		"edge1:22":           `write "edge1/127.0.0.1:22", and if any node is right, write "*/edge1:22"`,
		"*/edge1:22":         "",
		"edge1/127.0.0.1:22": "",
		"127.0.0.1:22":       "",
		"[::1]:22":           "",
		"localhost:22":       "",
		"db.corp.example:22": "",
	} {
		for _, table := range []string{"tcp", "udp"} {
			r := newReport(&source{file: "cloud.toml"})
			lines := r.listeners(forwarding{table, "", ""}, map[string]string{"127.0.0.1:2222": target}, nil)
			found := ""
			for _, w := range r.warnings() {
				if strings.Contains(w, "any connected node dials the host") {
					found = w
				}
			}
			if (want == "") != (found == "") || !strings.Contains(found, want) {
				t.Errorf("%s = %q: the warning is %q", table, target, found)
			}
			if target == "*/edge1:22" && (lines[0].Node != "" || lines[0].Target != "edge1:22" || lines[0].Among != nil) {
				t.Errorf("%q is %+v", target, lines[0])
			}
		}
	}
}
