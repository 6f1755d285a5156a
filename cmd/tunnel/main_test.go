package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// runMain in the environment makes the test binary run main. Tests start real processes of
// tunnel so, and build nothing.
const runMain = "TUNNEL_TEST_RUN_MAIN"

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "kubectl" {
		os.Exit(fakeKubectl(os.Args[1:]))
	}
	if os.Getenv(runMain) != "" {
		main()
	}
	os.Exit(m.Run())
}

// process is a running tunnel.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	out  bytes.Buffer
	done chan error
}

func start(t *testing.T, args ...string) *process {
	t.Helper()
	return startTo(t, nil, args...)
}

// startTo is start with standard output in a file; nil: with the errors.
func startTo(t *testing.T, out *os.File, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(os.Args[0], args...), done: make(chan error, 1)}
	p.cmd.Env = append(os.Environ(), runMain+"=1")
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	if out != nil {
		p.cmd.Stdout = out
	}
	p.cmd.WaitDelay = 5 * time.Second
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.done <- p.cmd.Wait() }()
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		p.wait()
	})
	return p
}

// wait returns the exit code and the output.
func (p *process) wait() (code int, output string) {
	p.t.Helper()
	select {
	case err := <-p.done:
		p.done <- err
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			return exit.ExitCode(), p.out.String()
		}
		return 0, p.out.String()
	case <-time.After(2 * time.Minute):
		p.cmd.Process.Kill()
		p.t.Fatal("tunnel does not end")
		return 0, ""
	}
}

func tunnelMain(t *testing.T, args ...string) (code int, output string) {
	t.Helper()
	return start(t, args...).wait()
}

// Each mistake on a command line has its exit code and its message.
func TestCommandLine(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.toml")
	if err := os.WriteFile(bad, []byte("[mode.cloud.stream.server]\ngrpcprot = 9000\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{nil, exitOK, "tunnel demo"},
		{[]string{"version"}, exitOK, "protocol 1"},
		{[]string{"token", "create", "-c", "x", "--node", "tunnel1.eyJhIjoiYiJ9"}, exitUsage, `node name "***" is not`},
		{[]string{"edge", "-c", "x", "s3cret-token"}, exitUsage, `only flags, such as --name value, not "***"`},
		{[]string{"clowd"}, exitUsage, `unknown command "clowd"`},
		{[]string{"cloud"}, exitUsage, "name the configuration file with -c"},
		{[]string{"cloud", "--frobnicate"}, exitUsage, "unknown flag"},
		{[]string{"cloud", "-c", "x", "--log-level", "loud"}, exitUsage, "--log-level is"},
		{[]string{"cloud", "-c", filepath.Join(dir, "none.toml")}, exitConfig, "does not exist"},
		{[]string{"cloud", "-c", bad}, exitConfig,
			`bad.toml:2: mode.cloud.stream.server.grpcprot: unknown key: did you mean grpcport?`},
		{[]string{"config", "check", "-c", bad}, exitConfig, "did you mean grpcport"},
		{[]string{"edge", "-c", bad}, exitConfig, "this file configures a cloud"},
		{[]string{"--m=cloud", "--c=" + bad}, exitConfig, "did you mean grpcport"},
		{[]string{"--mode=cloud", "--conf=" + bad, "--alsologtostderr", "--v=2", "--log-dir=/x"}, exitConfig,
			"did you mean grpcport"},
		{[]string{"--m=clowd", "--c=" + bad}, exitUsage, "--m is cloud or edge"},
		{[]string{"--m=cloud"}, exitUsage, "--m needs --c"},
		{[]string{"demo", "--target", "nonsense"}, exitUsage, "--target is host:port"},
		{[]string{"demo", "--target", "10.0.0.5:ssh"}, exitUsage, "--target is host:port"},
		{[]string{"demo", "--target", ":22"}, exitUsage, "--target is host:port"},
		{[]string{"demo", "--target", "nobody.invalid:22"}, exitRuntime, "--target nobody.invalid:22"},
	} {
		code, output := tunnelMain(t, tt.args...)
		if code != tt.code || !strings.Contains(output, tt.want) {
			t.Errorf("tunnel %s: exit code %d and\n%s\nwant %d and %q",
				strings.Join(tt.args, " "), code, output, tt.code, tt.want)
		}
	}
}

// Every check of the demo passes. The demo leaves neither a file nor a process behind.
func TestDemoOnce(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	p := start(t, "demo", "--once")
	code, output := p.wait()
	if code != exitOK || strings.Contains(output, "FAIL") {
		t.Fatalf("exit code %d:\n%s", code, output)
	}
	for _, name := range []string{"tcp", "https-passthrough", "https-terminate", "wrong-token-refused", "join-by-token"} {
		if !strings.Contains(output, "ok "+name+"\n") {
			t.Errorf("no line says ok %s:\n%s", name, output)
		}
	}
	wantNothingLeft(t)
}

// The demo reaches --target through the tunnel, or says that it cannot.
func TestDemoTarget(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and sends nothing
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	closed := testkit.FreeAddress(t)
	for target, want := range map[string]struct {
		code int
		line string
	}{
		ln.Addr().String(): {exitOK, "ok own-target\n"},
		closed:             {exitRuntime, "FAIL own-target: " + closed + " cannot be reached"},
	} {
		t.Setenv("TMPDIR", t.TempDir())
		var code int
		var output string
		for range 3 { // on a busy machine, a reset may come after the demo has stopped looking
			if code, output = start(t, "demo", "--once", "--target", target).wait(); code == want.code {
				break
			}
			t.Logf("once more, after exit code %d:\n%s", code, output)
		}
		if code != want.code || !strings.Contains(output, want.line) {
			t.Errorf("exit code %d, want %d and %q:\n%s", code, want.code, want.line, output)
		}
		wantNothingLeft(t)
	}
}

// Ctrl-C ends a demo without --once, and its processes.
func TestDemoInterrupted(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	_, port, _ := net.SplitHostPort(echo(t))
	p := start(t, "demo", "--target", "localhost:"+port)
	await(t, "the demo is up", func() bool {
		logs, err := filepath.Glob(filepath.Join(os.TempDir(), "tunnel-demo-*", "edge.log"))
		if err != nil || len(logs) == 0 {
			return false
		}
		text, err := os.ReadFile(logs[0])
		return err == nil && strings.Contains(string(text), "session started")
	})
	p.cmd.Process.Signal(syscall.SIGINT)
	if code, output := p.wait(); code != exitOK {
		t.Errorf("exit code %d:\n%s", code, output)
	}
	wantNothingLeft(t)
}

// A hangup of the terminal ends the demo, and so does a pipe that loses its reader.
func TestDemoAbandoned(t *testing.T) {
	for name, abandon := range map[string]func(*exec.Cmd, io.Closer){
		"hangup":      func(cmd *exec.Cmd, _ io.Closer) { cmd.Process.Signal(syscall.SIGHUP) },
		"broken pipe": func(_ *exec.Cmd, out io.Closer) { out.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("TMPDIR", t.TempDir())
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, os.Args[0], "demo")
			cmd.Env = append(os.Environ(), runMain+"=1")
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			// A child does not inherit a handler. It would inherit SIG_IGN, as under nohup(1).
			hangups := make(chan os.Signal, 1)
			signal.Notify(hangups, syscall.SIGHUP)
			defer signal.Stop(hangups)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			io.ReadFull(out, make([]byte, 1)) // the demo prints nothing before both ends are ready
			abandon(cmd, out)
			if err := cmd.Wait(); err != nil {
				t.Errorf("the demo ended with %v", err)
			}
			wantNothingLeft(t)
		})
	}
}

func wantNothingLeft(t *testing.T) {
	t.Helper()
	left, err := os.ReadDir(os.TempDir())
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	// The command line of each child names a file in the demo's folder.
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range procs {
		if cmdline, err := os.ReadFile(f); err == nil && bytes.Contains(cmdline, []byte(os.TempDir())) {
			t.Errorf("still running: %q", cmdline)
		}
	}
}

// echo starts a TCP service that sends every byte back, and returns its address.
func echo(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				io.Copy(c, c)
				c.Close()
			}()
		}
	}()
	return ln.Addr().String()
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	testkit.Within(t, 20*time.Second, what, func() error {
		if !ok() {
			return errors.New("not yet")
		}
		return nil
	})
}

func ready(port int) bool {
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/readyz", port))
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// The example configurations run unchanged beside the files of `make dev-certs`. Other
// processes may use the examples' ports, so the test has a network of its own.
func TestExampleFiles(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	dir := t.TempDir()
	for _, name := range []string{"cloud.toml", "edge.toml"} {
		text, err := os.ReadFile(filepath.Join("../../conf", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	devcerts := exec.Command("go", "run", "tunnel.example/tunnel/conf/devcerts", filepath.Join(dir, "dev"))
	if out, err := devcerts.CombinedOutput(); err != nil {
		t.Fatalf("devcerts: %v\n%s", err, out)
	}
	check := []string{"config", "check", "-c", filepath.Join(dir, "cloud.toml")}
	if code, output := tunnelMain(t, check...); code != exitOK || !strings.Contains(output, "ok (cloud)") {
		t.Errorf("config check: exit code %d:\n%s", code, output)
	}
	cloud := start(t, "cloud", "-c", filepath.Join(dir, "cloud.toml"))
	edge := start(t, "edge", "-c", filepath.Join(dir, "edge.toml"))
	await(t, "both are ready", func() bool { return ready(7000) && ready(7010) })

	t.Run("a second cloud on the same ports", func(t *testing.T) {
		code, output := tunnelMain(t, "cloud", "-c", filepath.Join(dir, "cloud.toml"))
		if code != exitRuntime || !strings.Contains(output, "address already in use") {
			t.Errorf("exit code %d:\n%s", code, output)
		}
	})
	t.Run("a certificate that is none", func(t *testing.T) {
		if err := os.WriteFile(filepath.Join(dir, "dev/https.crt"), []byte("junk"), 0o600); err != nil {
			t.Fatal(err)
		}
		code, output := tunnelMain(t, check...)
		if code != exitConfig || !strings.Contains(output, "mode.cloud.https: cert") {
			t.Errorf("config check: exit code %d:\n%s", code, output)
		}
	})
	for name, p := range map[string]*process{"edge": edge, "cloud": cloud} {
		p.cmd.Process.Signal(syscall.SIGTERM)
		if code, output := p.wait(); code != exitOK {
			t.Errorf("%s: exit code %d after SIGTERM:\n%s", name, code, output)
		}
	}
}
