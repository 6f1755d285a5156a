package docs

import (
	"bufio"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
	"tunnel.example/tunnel/test/rig/rigtest"
)

// asSSH in the environment makes the test binary stand in for ssh(1).
const asSSH = "TUNNEL_TEST_DOCS_SSH"

// limit is the time for one block, on a machine that is busy with other things. The slowest block
// builds the program.
const limit = 2 * time.Minute

var program string // the program under test

func TestMain(m *testing.M) {
	if os.Getenv(asSSH) != "" {
		if err := ssh(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(rigtest.Main(m, &program))
}

// ssh stands in for the program of that name: it prints the first line of the server. The edge may
// report its session a moment before the cloud lists it, so ssh tries for some seconds.
func ssh(args []string) error {
	if len(args) != 3 || args[0] != "-p" || args[2] != "USER@localhost" {
		return fmt.Errorf("this ssh knows only -p PORT USER@localhost, not %q", args)
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		line, err := banner(net.JoinHostPort("127.0.0.1", args[1]))
		if err == nil || time.Now().After(end) {
			fmt.Print(line)
			return err
		}
	}
}

func banner(addr string) (string, error) {
	c, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	return bufio.NewReader(c).ReadString('\n')
}

const greeting = "SSH-2.0-behind-nat\r\n"

// sshServer is the service behind the edge. It returns its port.
func sshServer(t *testing.T) string {
	t.Helper()
	_, port, err := net.SplitHostPort(testkit.Serve(t, func(c *net.TCPConn) { c.Write([]byte(greeting)) }))
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// site is the machines on which a scenario is typed.
type site struct {
	t     *testing.T
	name  string // of the scenario
	dirs  map[string]string
	path  string            // a folder with the programs that the pages take for granted
	tmp   string            // TMPDIR of the commands; Go ignores a go.mod that is in TMPDIR itself
	swaps map[string]string // what a page says → what it is here
	wants []want
	// replaced counts the texts of swaps that a block had, seen the wants that were met.
	replaced map[string]int
	seen     map[int]int
}

// want is what a block does that has command.
type want struct {
	command string
	output  string // is printed
	port    string // accepts connections then; "": none
}

// listens returns an error until the port accepts connections.
func (w want) listens() error {
	if w.port == "" {
		return nil
	}
	c, err := net.DialTimeout("tcp", net.JoinHostPort("127.0.0.1", w.port), time.Second)
	if err == nil {
		c.Close()
	}
	return err
}

// newSite makes the machines of a scenario, each a folder of its own.
func newSite(t *testing.T, name string, swaps map[string]string, wants []want) *site {
	t.Helper()
	s := &site{t: t, name: name, dirs: make(map[string]string), path: t.TempDir(), tmp: t.TempDir(),
		swaps: swaps, wants: wants,
		replaced: make(map[string]int), seen: make(map[int]int)}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s.script("ssh", asSSH+"=1 exec '"+self+"' \"$@\"")
	s.script("sudo", "echo a block that needs root is marked as not run >&2; exit 1")
	if err := os.Symlink(program, filepath.Join(s.path, "tunnel")); err != nil {
		t.Fatal(err)
	}
	return s
}

// script installs a program on the machines.
func (s *site) script(name, command string) {
	s.t.Helper()
	if err := os.WriteFile(filepath.Join(s.path, name), []byte("#!/bin/sh\n"+command+"\n"), 0o700); err != nil {
		s.t.Fatal(err)
	}
}

// dir returns the folder of a machine.
func (s *site) dir(machine string) string {
	if s.dirs[machine] == "" {
		s.dirs[machine] = s.t.TempDir()
	}
	return s.dirs[machine]
}

var joinToken = regexp.MustCompile(`tunnel1\.[A-Za-z0-9_-]{8,}`)

// run runs all blocks of the scenario.
func (s *site) run() {
	s.t.Helper()
	blocks, err := All(root)
	if err != nil {
		s.t.Fatal(err)
	}
	steps := Steps(blocks, Run, s.name)
	if len(steps) == 0 {
		s.t.Fatal("no page has a block of this scenario")
	}
	for _, b := range steps {
		s.step(b)
	}
	for text := range s.swaps {
		if s.replaced[text] == 0 {
			s.t.Errorf("no block of the scenario says %q any more: change the test", text)
		}
	}
	for i, w := range s.wants {
		if s.seen[i] == 0 {
			s.t.Errorf("no block of the scenario has %q any more: change the test", w.command)
		}
	}
}

// step runs one block, and checks its output.
func (s *site) step(b Block) {
	s.t.Helper()
	var pairs []string
	for _, old := range slices.Sorted(maps.Keys(s.swaps)) {
		s.replaced[old] += strings.Count(b.Text, old)
		pairs = append(pairs, old, s.swaps[old])
	}
	began := time.Now()
	log := s.shell(b, strings.NewReplacer(pairs...).Replace(b.Text))
	for i, w := range s.wants {
		if !strings.Contains(b.Text, w.command) {
			continue
		}
		s.seen[i]++
		testkit.Within(s.t, limit, fmt.Sprintf("%s: the output says %q", b, w.output), func() error {
			if out := log.String(); !strings.Contains(out, w.output) {
				return fmt.Errorf("the output is\n%s", joinToken.ReplaceAllString(out, "***"))
			}
			return w.listens()
		})
	}
	if token := joinToken.FindString(log.String()); token != "" && strings.Contains(b.Text, "token create") {
		s.swaps["tunnel1.…"] = token
	}
	s.t.Logf("%s: %s", b, time.Since(began).Round(10*time.Millisecond))
}

// shell runs the commands of a block as a shell does. A block in the background goes on until the
// test ends; any other block ends with success, or fails if its mark says so.
func (s *site) shell(b Block, text string) *rig.Log {
	s.t.Helper()
	env, err := exec.LookPath("env")
	if err != nil {
		s.t.Fatal(err)
	}
	if b.Background {
		text = "exec " + text // signals reach the command, not a shell before it
	}
	dir, log := s.dir(b.Machine), new(rig.Log)
	p, err := rig.Start(log, env, "-C", dir, "TMPDIR="+s.tmp, "PATH="+s.path+":"+os.Getenv("PATH"), "sh", "-euc", text)
	if err != nil {
		s.t.Fatal(err)
	}
	end := func() {
		syscall.Kill(-p.PID(), syscall.SIGTERM) // fails only if the process has ended
		select {
		case <-p.Done():
		case <-time.After(10 * time.Second):
			syscall.Kill(-p.PID(), syscall.SIGKILL)
			<-p.Done()
		}
	}
	if b.Background {
		s.t.Cleanup(func() {
			if !p.Alive() {
				s.t.Errorf("%s: the command has ended:\n%s", b, log)
			}
			end()
		})
		return log
	}
	select {
	case <-p.Done():
	case <-time.After(limit):
		end()
		s.t.Fatalf("%s: the commands have not ended after %s:\n%s", b, limit, log)
	}
	if (p.ExitCode() != 0) != b.Fails {
		s.t.Fatalf("%s: exit code %d:\n%s", b, p.ExitCode(), joinToken.ReplaceAllString(log.String(), "***"))
	}
	return log
}
