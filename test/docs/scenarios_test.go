package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
)

// scenarios are what the tests of this file run.
var scenarios = map[string]bool{
	"readme": true, "first-port": true, "demo": true, "certificates": true, "backup": true, "upgrade": true,
}

// forwards is the site of a scenario that forwards a port to the ssh server behind the edge.
func forwards(t *testing.T, scenario string) *site {
	t.Helper()
	cloud, caller := strconv.Itoa(testkit.FreePort(t)), strconv.Itoa(testkit.FreePort(t))
	return newSite(t, scenario, map[string]string{
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
	})
}

// A newcomer who follows README builds the program, installs it, and reaches a service behind NAT.
func TestReadme(t *testing.T) {
	t.Parallel()
	s := forwards(t, "readme")
	s.clone("clone")
	s.swaps["sudo install"], s.swaps["/usr/local/bin"] = "install", s.path
	if err := os.Remove(filepath.Join(s.path, "tunnel")); err != nil { // the page installs its own
		t.Fatal(err)
	}
	s.run()
}

// docs/first-port.md leads to ssh on a machine behind NAT.
func TestFirstPort(t *testing.T) {
	t.Parallel()
	s := forwards(t, "first-port")
	s.swaps["2223"] = strconv.Itoa(testkit.FreePort(t)) // of the second edge
	s.wants = append(s.wants, want{"tunnel forward add", "cloud: applied", ""},
		want{"tunnel status", "listens   tcp", ""}, want{"tunnel token revoke", "has no session of node edge1", ""})
	s.run()
}

// README's way to see the tunnel work: make, in a clone.
func TestDemo(t *testing.T) {
	t.Parallel()
	s := newSite(t, "demo", nil, []want{
		{"make demo", "ok tcp", ""},
		{"ARGS=--once", "ok https-passthrough", ""},
	})
	s.clone("clone")
	s.run()
}

// clone gives a machine a clone of the repository. It is a folder of links, so that what make builds does not land in
// this tree.
func (s *site) clone(machine string) {
	s.t.Helper()
	entries, err := os.ReadDir(root)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() == "bin" || e.Name() == ".git" {
			continue
		}
		from, err := filepath.Abs(filepath.Join(root, e.Name()))
		if err == nil {
			err = os.Symlink(from, filepath.Join(s.dir(machine), e.Name()))
		}
		if err != nil {
			s.t.Fatal(err)
		}
	}
}

// initCloud gives the machine cloud a folder of `tunnel init`, with which a page begins.
func (s *site) initCloud() {
	s.t.Helper()
	dir := filepath.Join(s.dir("cloud"), "cloud")
	cmd := exec.Command(program, "init", "--address", "tunnel.example.com:9000", "--dir", dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		s.t.Fatalf("%v\n%s", err, out)
	}
}

// made runs the scenario of a page that begins with a folder of `tunnel init`.
func made(t *testing.T, scenario string, wants []want) *site {
	t.Helper()
	s := newSite(t, scenario, nil, wants)
	s.initCloud()
	s.run()
	return s
}

// docs/certificates.md replaces the cloud's certificate by one that edges accept, and the nodes CA by one that signs.
func TestCertificates(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("openssl"); err != nil {
		t.Skip("needs openssl(1)")
	}
	s := made(t, "certificates", []want{
		{"-enddate", "notAfter=", ""},
		{"openssl verify", "new.crt: OK", ""},
		{"config check", "cloud.toml: ok (cloud)", ""},
	})
	dir := filepath.Join(s.dir("cloud"), "cloud")
	_, err := auth.NewFileSigner(filepath.Join(dir, "nodes-ca.crt"), filepath.Join(dir, "nodes-ca.key"), 0)
	if err != nil {
		t.Error(err)
	}
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
	s.initCloud()
	if err := os.Symlink(program, filepath.Join(s.dir("cloud"), "tunnel-new")); err != nil {
		t.Fatal(err)
	}
	s.run()
}
