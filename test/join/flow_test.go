package join

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// TestNewcomer is the whole way: init, cloud, token create, join, edge, token list, token
// revoke, and back again.
func TestNewcomer(t *testing.T) {
	t.Parallel()
	s := newSite(t, "localhost")
	s.start()
	line, _ := s.create("edge1")
	if !strings.HasPrefix(line, "echo 'tunnel1.") || !strings.HasSuffix(line, "' | sudo tunnel join") ||
		strings.Contains(line, "\n") {
		t.Errorf("the line to paste is %q", tokenText.ReplaceAllString(line, "***"))
	}

	edgeDir := filepath.Join(t.TempDir(), "edge")
	joined := s.want(0, s.shell(line+" --dir "+edgeDir+"\n"), "tunnel edge -c "+filepath.Join(edgeDir, "edge.toml"))
	wantSteps(t, joined, "dns", "tcp", "tls", "clock", "token", "files")
	wantMode(t, filepath.Join(edgeDir, "node.pem"), 0o600)

	edge := s.edge(edgeDir)
	edge.waitReady()
	list := s.want(0, s.tunnel("", "token", "list", "-c", s.path("cloud.toml")), "NODE", "edge1", "join token", "good")
	t.Logf("\n%s", list.out)

	// The operator's edits stay when the same node joins once more.
	line, _ = s.create("edge1")
	s.want(0, s.shell(line+" --dir "+edgeDir+"\n"), "edge.toml (as it was)")

	revoked := time.Now()
	s.want(0, s.tunnel("", "token", "revoke", "-c", s.path("cloud.toml"), "--node", "edge1"), "Node edge1 is revoked")
	testkit.Within(t, soon, "the session is gone", edge.lost)
	t.Logf("the session was gone %s after the command was started", time.Since(revoked).Round(time.Millisecond))
	testkit.Within(t, soon, "the node is refused", func() error { return says(&s.log, "revokes this node") })
	s.want(0, s.tunnel("", "token", "list", "-c", s.path("cloud.toml")), "edge1", "nothing proves this node")

	// What it had does not come back with a new token; it does.
	line, _ = s.create("edge1")
	s.want(0, s.tunnel("", "token", "list", "-c", s.path("cloud.toml")), "certificates from before", "join token", "good")
	testkit.Within(t, soon, "it joins again", func() error {
		// A certificate of the second in which the older ones were revoked is none.
		if a := s.shell(line + " --dir " + edgeDir + "\n"); a.code != 0 {
			return fmt.Errorf("%s", a)
		}
		return nil
	})
	edge.restart()
	edge.waitReady()
	if err := s.cloud.Signal(0); err != nil {
		t.Error(err)
	}
}

// wantSteps checks that every step succeeded, in this order.
func wantSteps(t *testing.T, a answer, steps ...string) {
	t.Helper()
	at := 0
	for _, step := range steps {
		i := strings.Index(a.out[at:], "ok    "+step)
		if i < 0 {
			t.Fatalf("%s\nwant the step %s behind those before it", a, step)
		}
		at += i
	}
	if strings.Contains(a.out, "FAIL") {
		t.Error(a)
	}
}

func wantMode(t *testing.T, path string, mode os.FileMode) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != mode {
		t.Errorf("%s has mode %v, want %v", path, info.Mode(), mode)
	}
}

// edgeOf is an edge that runs.
type edgeOf struct {
	s       *site
	dir     string
	health  string
	log     rig.Log
	process *rig.Process
}

// edge starts an edge by the configuration that join has written.
func (s *site) edge(dir string) *edgeOf {
	s.t.Helper()
	port := testkit.FreePort(s.t)
	edit(s.t, filepath.Join(dir, "edge.toml"), "#logport = 7010", "logport = "+strconv.Itoa(port))
	e := &edgeOf{s: s, dir: dir, health: net.JoinHostPort("127.0.0.1", strconv.Itoa(port))}
	e.run()
	s.t.Cleanup(func() {
		e.process.Kill()
		s.spoken.WriteString(e.log.String())
		if s.t.Failed() {
			s.t.Logf("log of the edge:\n%s", e.log.String())
		}
	})
	return e
}

func (e *edgeOf) run() {
	e.s.t.Helper()
	var err error
	e.process, err = rig.Start(&e.log, filepath.Join(programs, "tunnel"), "edge", "-c", filepath.Join(e.dir, "edge.toml"),
		"--log-level", "debug")
	if err != nil {
		e.s.t.Fatal(err)
	}
}

// restart is what a person does who does not want to wait for the next attempt.
func (e *edgeOf) restart() {
	e.process.Kill()
	e.run()
}

func (e *edgeOf) waitReady() {
	e.s.t.Helper()
	testkit.Within(e.s.t, soon, "the edge has a session", func() error { return rig.Ready(e.health) })
}

// lost returns nil when the edge has no session.
func (e *edgeOf) lost() error {
	if rig.Ready(e.health) == nil {
		return fmt.Errorf("it has a session")
	}
	return nil
}

// TestJSON: programs read what people do.
func TestJSON(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	a := s.want(0, s.tunnel("", "token", "create", "-c", s.path("cloud.toml"), "--node", "edge1",
		"--ttl", "90m", "--json"))
	var created struct {
		Node, ID, Token, Command string
		Expires                  time.Time
		Written                  bool
	}
	if err := json.Unmarshal([]byte(a.out), &created); err != nil {
		t.Fatal(err)
	}
	token := s.note(created.Token)
	left := time.Until(created.Expires)
	if created.Node != "edge1" || string(token.Node) != "edge1" || !created.Written ||
		!strings.Contains(created.Command, created.Token) ||
		left < 85*time.Minute || left > 90*time.Minute {
		t.Errorf("created %+v", created.Expires)
	}
	a = s.want(0, s.tunnel("", "token", "list", "-c", s.path("cloud.toml"), "--json"))
	var listed []struct{ Node, Kind, ID, State string }
	if err := json.Unmarshal([]byte(a.out), &listed); err != nil {
		t.Fatal(err)
	}
	if len(listed) != 1 || listed[0].Node != "edge1" || listed[0].ID != created.ID || listed[0].State != "good" {
		t.Errorf("listed %+v, created %s", listed, created.ID)
	}
}

// TestInitKeepsFiles: nothing is replaced, whatever is there.
func TestInitKeepsFiles(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	before, err := os.ReadFile(s.path("nodes-ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ca.key", "cloud.key", "nodes-ca.key", "tokens"} {
		wantMode(t, s.path(name), 0o600)
	}
	s.want(1, s.tunnel("", "init", "--address", s.address, "--dir", s.dir), "already",
		"ca.crt, ca.key, cloud.crt, cloud.key, nodes-ca.crt, nodes-ca.key, tokens, cloud.toml")
	other := t.TempDir()
	if err := os.WriteFile(filepath.Join(other, "tokens"), []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.want(1, s.tunnel("", "init", "--address", s.address, "--dir", other), "tokens already")
	left, err := os.ReadDir(other)
	if err != nil || len(left) != 1 {
		t.Errorf("init has written although a file was there: %v, %v", left, err)
	}
	if after, err := os.ReadFile(s.path("nodes-ca.key")); err != nil || string(after) != string(before) {
		t.Errorf("the key of the authority has changed (%v)", err)
	}
	s.want(0, s.tunnel("", "config", "check", "-c", s.path("cloud.toml")), "ok (cloud)")
}
