package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// scenarios are what the tests of this file run.
var scenarios = map[string]bool{
	"readme": true, "first-port": true, "demo": true, "certificates": true, "backup": true, "upgrade": true,
}

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

// init gives the machine cloud a folder of `tunnel init`, with which a page begins.
func (s *site) init() {
	s.t.Helper()
	dir := filepath.Join(s.dir("cloud"), "cloud")
	init := exec.Command(program, "init", "--address", "tunnel.example.com:9000", "--dir", dir)
	if out, err := init.CombinedOutput(); err != nil {
		s.t.Fatalf("%v\n%s", err, out)
	}
}

// made runs the scenario of a page that begins with a folder of `tunnel init`.
func made(t *testing.T, scenario string, wants []want) {
	t.Helper()
	s := newSite(t, scenario, nil, wants)
	s.init()
	s.run()
}

// docs/certificates.md replaces the cloud's certificate by one that edges accept.
func TestCertificates(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("openssl"); err != nil {
		t.Skip("needs openssl(1)")
	}
	made(t, "certificates", []want{
		{"-enddate", "notAfter=", ""},
		{"openssl verify", "new.crt: OK", ""},
		{"config check", "cloud.toml: ok (cloud)", ""},
	})
}

// docs/backup.md restores a cloud from its backup.
func TestBackup(t *testing.T) {
	t.Parallel()
	made(t, "backup", []want{
		{"tar -tzf", "./nodes-ca.key", ""},
		{"config check", "cloud.toml: ok (cloud)", ""},
	})
}

// docs/upgrade.md has the program say its version and that of the protocol, and a new program check the configuration.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	s := newSite(t, "upgrade", map[string]string{"/etc/tunnel": "cloud"}, []want{
		{"tunnel version", "protocol ", ""},
		{"config check", "cloud.toml: ok (cloud)", ""},
	})
	s.init()
	if err := os.Symlink(program, filepath.Join(s.dir("cloud"), "tunnel-new")); err != nil {
		t.Fatal(err)
	}
	s.run()
}
