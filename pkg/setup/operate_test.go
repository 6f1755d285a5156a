package setup

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tunnel.example/tunnel/conf"
)

// init has an admin socket, an inventory and a file of forwards beside the configuration, or where systemd lets the
// cloud write. A later init with --systemd moves them.
func TestInitOperated(t *testing.T) {
	root, err := os.MkdirTemp("/tmp", "t") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(root)
	c := newFolder(t, filepath.Join(root, "etc"))
	if err = Init(t.Context(), newInit(c.dir)); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(c.dir, cloudFile)
	want := func(when, socket, folder string) {
		t.Helper()
		s, err := conf.ReadSockets(config)
		if err != nil || s.Cloud != socket {
			t.Errorf("%s: the socket is %q, %v; want %q", when, s.Cloud, err, socket)
		}
		is, _, err := conf.ReadCloud(config, conf.Env{})
		if err != nil || is.Inventory != filepath.Join(folder, "nodes.json") ||
			is.Forwards != filepath.Join(folder, "forwards.toml") {
			t.Errorf("%s: the inventory is %q, the forwards %q, %v; want both in %q", when, is.Inventory, is.Forwards, err,
				folder)
		}
	}
	want("init", filepath.Join(c.dir, "cloud.sock"), c.dir)
	if err = os.WriteFile(filepath.Join(c.dir, "nodes.json"), []byte("remembered"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err = c.fill(); err != nil {
		t.Fatal(err)
	}
	moved := filepath.Join(c.state, "nodes.json")
	want("init --systemd", "/run/tunnel-cloud/admin.sock", c.state)
	if text, err := os.ReadFile(moved); err != nil || string(text) != "remembered" {
		t.Errorf("the inventory that was there has not moved: %q, %v", text, err)
	}
}

// A folder whose path is too long for a socket gets a configuration with which the cloud starts all the same.
func TestSocketLine(t *testing.T) {
	for dir, want := range map[string]string{
		"/etc/tunnel":                  `socket = "cloud.sock"`,
		"/" + strings.Repeat("d", 100): `#socket = "/run/tunnel-cloud/admin.sock"`,
	} {
		if got := socketLine("cloud", dir, cloudSocket, false); got != want {
			t.Errorf("%s: %s; want %s", dir, got, want)
		}
	}
}

// When systemd takes over an edge, its socket moves to where the unit's user may write, unless an operator has chosen
// another path.
func TestJoinMovesSocket(t *testing.T) {
	dir := t.TempDir()
	f := &nodeFiles{
		dir: dir, certPath: filepath.Join(stateDir, certFile), keep: true, moveFrom: filepath.Join(dir, certFile),
	}
	for socket, want := range map[string]string{
		`socket = "edge.sock"`:      `socket = "/run/tunnel-edge/admin.sock"`,
		`socket = "/run/mine.sock"`: `socket = "/run/mine.sock"`,
	} {
		text := "nodecert = \"node.pem\"\n[mode.edge.admin]\n" + socket + "\n"
		if err := os.WriteFile(filepath.Join(dir, edgeFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := f.config(new(way))
		if err != nil || !strings.HasSuffix(string(got), "\n"+want+"\n") {
			t.Errorf("%s becomes\n%s%v", socket, got, err)
		}
	}
}
