package join

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

const (
	// soon is for what happens without waiting for anything, on a machine that is busy
	// with other things.
	soon = 15 * time.Second
	// hangs is when a command is taken to hang.
	hangs = 60 * time.Second
)

// programs is a folder with the program under test, as on a machine that it is installed
// on, and a sudo that changes nothing.
var programs string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	var err error
	if programs, err = os.MkdirTemp("", "tunnel-join-"); err == nil {
		defer os.RemoveAll(programs)
		_, err = rig.Build(programs)
	}
	if err == nil {
		err = errors.Join(
			os.WriteFile(filepath.Join(programs, "sudo"), []byte("#!/bin/sh\nexec \"$@\"\n"), 0o755),
			os.Chmod(programs, 0o755),
		)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// site is a cloud's folder, and what has been said so far.
type site struct {
	t       *testing.T
	dir     string // of the cloud
	address string
	port    int

	secrets []string // that must show nowhere
	log     rig.Log  // of the cloud
	spoken  strings.Builder
	as      *syscall.SysProcAttr // who runs commands; nil: who runs the test
	cloud   *rig.Process
}

// newSite runs tunnel init. host is what edges dial.
func newSite(t *testing.T, host string) *site {
	t.Helper()
	port := testkit.FreePort(t)
	s := &site{t: t, dir: filepath.Join(t.TempDir(), "cloud"),
		address: net.JoinHostPort(host, strconv.Itoa(port)), port: port}
	t.Cleanup(s.end)
	s.want(0, s.tunnel("", "init", "--address", s.address, "--dir", s.dir), "Next:", s.path("cloud.toml"))
	return s
}

// end stops the cloud, and looks for secrets in everything that was printed.
func (s *site) end() {
	if s.cloud != nil {
		s.cloud.Kill()
	}
	text := s.spoken.String() + s.log.String()
	for _, secret := range s.secrets {
		if strings.Contains(text, secret) {
			s.t.Error("a secret shows in what was printed or logged")
		}
	}
	if strings.Contains(text, "panic") {
		s.t.Error("something has panicked")
	}
	if s.t.Failed() {
		s.t.Logf("log of the cloud:\n%s", s.log.String())
	}
}

func (s *site) path(name string) string { return filepath.Join(s.dir, name) }

// answer is what a command has said.
type answer struct {
	args       string
	code       int
	out, notes string
}

func (a answer) String() string {
	return fmt.Sprintf("%s: exit code %d\n%s%s", a.args, a.code, a.out, a.notes)
}

// tunnel runs a command to its end. stdin is what it reads.
func (s *site) tunnel(stdin string, args ...string) answer {
	s.t.Helper()
	a := s.command(stdin, filepath.Join(programs, "tunnel"), args...)
	s.spoken.WriteString(a.notes)
	if len(args) < 2 || args[1] != "create" { // it prints a secret, which is what it is for
		s.spoken.WriteString(a.out)
	}
	return a
}

// asNobody is tunnel as an ordinary user.
func (s *site) asNobody(stdin string, args ...string) answer {
	s.t.Helper()
	if os.Geteuid() == 0 {
		s.as = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		defer func() { s.as = nil }()
	}
	return s.tunnel(stdin, args...)
}

// nobody is the user and the group of that name (Debian's base-passwd).
const nobody = 65534

// shell types lines at a machine.
func (s *site) shell(lines string) answer {
	s.t.Helper()
	a := s.command(lines, "sh")
	s.spoken.WriteString(a.out + a.notes)
	return a
}

func (s *site) command(stdin, name string, args ...string) answer {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), hangs)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "PATH="+programs+":"+os.Getenv("PATH"))
	cmd.SysProcAttr = s.as
	cmd.Stdin = strings.NewReader(stdin)
	var out, notes bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &notes
	err := cmd.Run()
	a := answer{args: strings.Join(append([]string{filepath.Base(name)}, args...), " "), out: out.String(),
		notes: notes.String()}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		a.code = exit.ExitCode()
	} else if err != nil {
		s.t.Fatalf("%s: %v", a.args, err)
	}
	if ctx.Err() != nil {
		s.t.Fatalf("hangs: %s", a)
	}
	return a
}

// want checks an exit code, and that texts stand in what was said.
func (s *site) want(code int, a answer, texts ...string) answer {
	s.t.Helper()
	if a.code != code {
		s.t.Errorf("%s\nwant exit code %d", a, code)
	}
	for _, text := range texts {
		if !strings.Contains(a.out+a.notes, text) {
			s.t.Errorf("%s\nwant %q", a, text)
		}
	}
	return a
}

// edit replaces text in a file of a folder.
func edit(t *testing.T, path, old, now string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), old) {
		t.Fatalf("%s does not hold %q", path, old)
	}
	if err := os.WriteFile(path, []byte(strings.Replace(string(text), old, now, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
}

// start starts the cloud and waits until edges can reach it.
func (s *site) start() {
	s.t.Helper()
	var err error
	s.cloud, err = rig.Start(&s.log, filepath.Join(programs, "tunnel"), "cloud", "-c", s.path("cloud.toml"),
		"--log-level", "debug")
	if err != nil {
		s.t.Fatal(err)
	}
	testkit.Within(s.t, soon, "the cloud listens", func() error {
		c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)))
		if err == nil {
			c.Close()
		}
		if !s.cloud.Alive() {
			s.t.Fatalf("the cloud has ended:\n%s", s.log.String())
		}
		return err
	})
}

var tokenText = regexp.MustCompile(`tunnel1\.[A-Za-z0-9_-]+`)

// create makes a token for a node, and notes that it is a secret.
func (s *site) create(node string, args ...string) (line string, token auth.JoinToken) {
	s.t.Helper()
	a := s.want(0, s.tunnel("",
		append([]string{"token", "create", "-c", s.path("cloud.toml"), "--node", node}, args...)...))
	return strings.TrimSpace(a.out), s.note(a.out)
}

// note reads a token from a text, and notes that it is a secret.
func (s *site) note(text string) auth.JoinToken {
	s.t.Helper()
	word := tokenText.FindString(text)
	token, err := auth.ParseJoinToken(word)
	if err != nil {
		s.t.Fatalf("no token in what `token create` has printed: %v", err)
	}
	s.secret(word, token)
	return token
}

func (s *site) secret(word string, token auth.JoinToken) {
	s.secrets = append(s.secrets, word, token.Secret.Reveal(), auth.EncodeToken(string(token.Node), token.Secret))
}

// join runs tunnel join with a token.
func (s *site) join(token auth.JoinToken, dir string, args ...string) answer {
	s.t.Helper()
	word := token.Encode().Reveal()
	s.secret(word, token)
	return s.tunnel(word+"\n", append([]string{"join", "--dir", dir}, args...)...)
}

// says returns nil when a log holds a text.
func says(log *rig.Log, text string) error {
	if !strings.Contains(log.String(), text) {
		return fmt.Errorf("the log lacks %q", text)
	}
	return nil
}
