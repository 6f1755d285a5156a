package docs

import (
	"os"
	"path/filepath"
	"testing"
)

// scenarios are what the tests of this file run.
var scenarios = map[string]bool{"readme": true, "first-port": true, "demo": true}

// forward runs a scenario that forwards a port to the ssh server behind the edge.
func forward(t *testing.T, scenario string) {
	t.Helper()
	cloud, caller := freePort(t), freePort(t)
	newSite(t, scenario, map[string]string{
		"tunnel.example.com:9000": "127.0.0.1:" + cloud, // the cloud, as edges dial it
		"2222":                    caller,               // the port that callers use
		"127.0.0.1:22\"":          "127.0.0.1:" + sshServer(t) + "\"",
		"tunnel1.…":               "no token was created yet",
	}, []want{
		{"tunnel init", "cloud.toml", ""},
		{"tunnel cloud", "msg=starting", cloud},
		{"tunnel token create", "tunnel1.", ""},
		{"tunnel join", "Node edge1 has joined", ""},
		{"tunnel edge", "session started", ""},
		{"ssh -p", greeting, ""},
	}).run()
}

// A newcomer who follows README reaches a service behind NAT.
func TestReadme(t *testing.T) {
	t.Parallel()
	forward(t, "readme")
}

// docs/first-port.md leads to ssh on a machine behind NAT.
func TestFirstPort(t *testing.T) {
	t.Parallel()
	forward(t, "first-port")
}

// README's way to see the tunnel work: make, in a clone. The clone is a folder of links, so that
// what make builds does not land in this tree.
func TestDemo(t *testing.T) {
	t.Parallel()
	s := newSite(t, "demo", nil, []want{
		{"make demo", "ok tcp", ""},
		{"ARGS=--once", "ok https-passthrough", ""},
	})
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() == "bin" || e.Name() == ".git" {
			continue
		}
		from, err := filepath.Abs(filepath.Join(root, e.Name()))
		if err == nil {
			err = os.Symlink(from, filepath.Join(s.dir("clone"), e.Name()))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	s.run()
}
