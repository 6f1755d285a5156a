package main

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// fakeCluster names the folder of the cluster that fakeKubectl serves: the file pods.json, and the file log with
// the arguments of each call.
const fakeCluster = "TUNNEL_TEST_FAKE_CLUSTER"

// fakeBreak says after how many bytes of output fakeKubectl loses a pod, which it does not tell.
const fakeBreak = "TUNNEL_TEST_FAKE_BREAK"

// fakeKubectl is a kubectl. A pod of its cluster is a process of this machine.
func fakeKubectl(args []string) int {
	dir := os.Getenv(fakeCluster)
	log, err := os.OpenFile(filepath.Join(dir, "log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = fmt.Fprintln(log, strings.Join(args, " "))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 99
	}
	if slices.Contains(args, "get") {
		pods, err := os.ReadFile(filepath.Join(dir, "pods.json"))
		if err != nil {
			fmt.Fprintln(os.Stderr, "Error from server (Forbidden)")
			return 1
		}
		os.Stdout.Write(pods)
		return 0
	}
	i := slices.Index(args, "--")
	if i < 0 || !slices.Contains(args, "exec") || args[i+1] != "/tunnel" {
		fmt.Fprintf(os.Stderr, "unexpected arguments %q\n", args)
		return 99
	}
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 99
	}
	cmd := exec.Command(self, args[i+2:]...)
	cmd.Env = append(os.Environ(), runMain+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	inGroup(cmd) // a terminal does not reach a pod
	if most, _ := strconv.Atoi(os.Getenv(fakeBreak)); most > 0 {
		cmd.Stdout = nil
		said, _ := cmd.Output()
		os.Stdout.Write(said[:most])
		return 0
	}
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		fmt.Fprintf(os.Stderr, "command terminated with exit code %d\n", exit.ExitCode())
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 99
	}
	return 0
}

// kubectlUser is a user with the plugin and a fake kubectl in the only folder of PATH.
type kubectlUser struct {
	t   *testing.T
	dir string
}

func newKubectlUser(t *testing.T) *kubectlUser {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("a link needs a privilege on Windows")
	}
	u := &kubectlUser{t, t.TempDir()}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"kubectl", kubectlPlugin, kubectlComplete} {
		if err = os.Symlink(self, filepath.Join(u.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", u.dir)
	t.Setenv(fakeCluster, u.dir)
	return u
}

// fakePod is a pod of a cloud. notReady "": it is ready. evicted: its kubelet has ended it.
type fakePod struct{ name, config, notReady string }

const evicted = "Evicted"

// pods sets the pods of the cluster.
func (u *kubectlUser) pods(pods ...fakePod) {
	u.t.Helper()
	items := []any{}
	for _, p := range pods {
		status := map[string]any{"phase": "Running", "conditions": []any{
			map[string]any{"type": "Initialized", "status": "True"}, map[string]any{"type": "Ready", "status": "True"},
		}}
		switch p.notReady {
		case "":
		case evicted:
			status = map[string]any{"phase": "Failed", "reason": evicted, "message": "The node was low on resource: memory."}
		default:
			status = map[string]any{"phase": "Pending", "containerStatuses": []any{
				map[string]any{"state": map[string]any{"waiting": map[string]any{"reason": p.notReady}}},
			}}
		}
		items = append(items, map[string]any{
			"metadata": map[string]any{"name": p.name}, "status": status,
			"spec": map[string]any{"containers": []any{
				map[string]any{"name": "sidecar", "args": []string{"-c", "no"}},
				map[string]any{"name": "tunnel", "args": []string{"cloud", "-c", p.config}},
			}},
		})
	}
	text, err := json.Marshal(map[string]any{"kind": "List", "items": items})
	if err != nil {
		u.t.Fatal(err)
	}
	if err = os.WriteFile(filepath.Join(u.dir, "pods.json"), text, 0o600); err != nil {
		u.t.Fatal(err)
	}
}

// calls returns the arguments of the calls of kubectl since the last time.
func (u *kubectlUser) calls() string {
	text, err := os.ReadFile(filepath.Join(u.dir, "log"))
	if err != nil {
		return ""
	}
	os.Remove(filepath.Join(u.dir, "log"))
	return string(text)
}

// run runs a program of the user's folder, as kubectl runs plugins.
func (u *kubectlUser) run(name string, args ...string) (code int, stdout, stderr string) {
	u.t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(u.t.Context(), filepath.Join(u.dir, name), args...)
	cmd.Env = append(os.Environ(), runMain+"=1")
	cmd.Dir, cmd.Stdout, cmd.Stderr = u.dir, &out, &errs
	err := cmd.Run()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		u.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// wants runs the plugin, and fails the test unless it ends with the exit code.
func (u *kubectlUser) wants(want int, args ...string) (stdout, stderr string) {
	u.t.Helper()
	code, stdout, stderr := u.run(kubectlPlugin, args...)
	if code != want {
		u.t.Fatalf("%q: exit code %d, want %d\n%s%s", args, code, want, stdout, stderr)
	}
	return stdout, stderr
}

// An operator asks a cloud by kubectl as on its machine: output, exit codes, a stream until Ctrl-C, a file, names.
func TestKubectlPlugin(t *testing.T) {
	o := newOperated(t, nil)
	u := newKubectlUser(t)
	u.pods(fakePod{name: "tunnel-cloud-b", config: o.cloud}, fakePod{"tunnel-cloud-a", "none", "ContainerCreating"})

	out, _ := u.wants(exitOK, "--context", "far", "-n", "edge", "--kubeconfig=k", "ls", "-o", "json")
	if !strings.Contains(out, `"name": "edge1"`) {
		t.Errorf("ls prints\n%s", out)
	}
	const to = "--namespace=edge --context=far --kubeconfig=k "
	want := to + "get pods --selector=app.kubernetes.io/name=tunnel,app.kubernetes.io/component=cloud --output=json\n" +
		to + "exec tunnel-cloud-b --container=tunnel --stdin -- " +
		"/tunnel --until-input-ends ls --config=" + o.cloud + " -o json\n"
	if got := u.calls(); got != want {
		t.Errorf("the calls of kubectl are\n%swant\n%s", got, want)
	}
	if _, errs := u.wants(exitAway, "ls", "edge9"); !strings.Contains(errs, "no replica knows the node edge9") {
		t.Errorf("ls of an unknown node says %q", errs)
	}
	if out, errs := u.wants(exitOK, "status"); !strings.Contains(out, "ready") ||
		!strings.Contains(errs, "asking tunnel-cloud-b, one of 2 pods") {
		t.Errorf("status prints %q, %q", out, errs)
	}
	u.calls()
	if u.wants(exitOK, "version"); !strings.HasSuffix(u.calls(), "/tunnel --until-input-ends version\n") {
		t.Error("version got a flag that it does not have")
	}

	u.wants(exitOK, "diag", "-f", "state.zip")
	z, err := zip.OpenReader(filepath.Join(u.dir, "state.zip"))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	if _, err = z.Open("cloud/status.json"); err != nil {
		t.Error(err)
	}
	t.Setenv(fakeBreak, "100")
	_, errs := u.wants(exitRuntime, "diag", "-f", "broken.zip")
	if _, err = os.Stat(filepath.Join(u.dir, "broken.zip")); !strings.Contains(errs, "not whole") || err == nil {
		t.Errorf("diag by a connection that breaks says %q, and leaves a file: %v", errs, err)
	}
	t.Setenv(fakeBreak, "")
	if _, errs := u.wants(exitRuntime, "diag", "-f", "state.zip"); !strings.Contains(errs, "exists") {
		t.Errorf("a second diag says %q", errs)
	}

	for _, c := range []struct {
		words []string
		want  string
	}{
		{[]string{"-n", "edge", "ta"}, "tap\tShow conns as they open and end, until Ctrl-C\n:4\n"},
		{[]string{"ls", "ed"}, "edge1\tconnected\n:4\n"},
		{[]string{"nonsense", ""}, ":4\n"},
		{[]string{"--namespace", ""}, ":4\n"},
	} {
		// Again and again: a completion that takes long says nothing.
		testkit.Within(t, time.Minute, "words are completed", func() error {
			if _, got, _ := u.run(kubectlComplete, c.words...); got != c.want {
				return fmt.Errorf("%q completes to %q, want %q", c.words, got, c.want)
			}
			return nil
		})
	}
}

// start starts the plugin in a process group of its own, with its output in out. The process has ended when every
// process has ended that inherited its standard error: that in the pod, too.
func (u *kubectlUser) start(out lines, args ...string) *process {
	u.t.Helper()
	p := &process{t: u.t, done: make(chan error, 1), cmd: exec.Command(filepath.Join(u.dir, kubectlPlugin), args...)}
	p.cmd.Env = append(os.Environ(), runMain+"=1")
	p.cmd.Stdout, p.cmd.Stderr = out.File, &p.out
	inGroup(p.cmd)
	if err := p.cmd.Start(); err != nil {
		u.t.Fatal(err)
	}
	go func() { p.done <- p.cmd.Wait() }()
	return p
}

// interrupt sends SIGINT to a process alone.
func interrupt(cmd *exec.Cmd) error { return cmd.Process.Signal(os.Interrupt) }

// stops fails the test unless stop ends the plugin without an error, and the process in the pod.
func stops(p *process, what string, stop func(*exec.Cmd) error) {
	p.t.Helper()
	if err := stop(p.cmd); err != nil {
		p.t.Fatal(err)
	}
	if code, text := p.wait(); code != exitOK {
		p.t.Errorf("%s: exit code %d: %s", what, code, text)
	}
}

// A tap streams. A signal to the plugin ends it, and the process in the pod. So does Ctrl-C, which kubectl gets, too.
func TestKubectlPluginTap(t *testing.T) {
	o := newOperated(t, nil)
	u := newKubectlUser(t)
	u.pods(fakePod{name: "tunnel-cloud-a", config: o.cloud})
	target, port := testkit.Serve(t, testkit.Echo), testkit.FreeAddress(t)
	u.wants(exitOK, "forward", "add", port, "edge1/"+target)
	for what, stop := range map[string]func(*exec.Cmd) error{"a signal": interrupt, "Ctrl-C": ctrlC} {
		out := newLines(t)
		tap := u.start(out, "tap", "-o", "json")
		testkit.Within(t, 20*time.Second, "the tap shows a conn", func() error {
			c, err := net.Dial("tcp", port)
			if err != nil {
				return err
			}
			defer c.Close()
			c.(*net.TCPConn).CloseWrite()
			if _, err = io.ReadAll(c); err != nil {
				return err
			}
			if text := out.String(); !strings.Contains(text, `"end"`) {
				return fmt.Errorf("%q", text)
			}
			return nil
		})
		stops(tap, what, stop)
	}
}

// A ping without an end ends without an error, as on the machine of the cloud.
func TestKubectlPluginPing(t *testing.T) {
	o := newOperated(t, nil)
	u := newKubectlUser(t)
	u.pods(fakePod{name: "tunnel-cloud-a", config: o.cloud})
	for what, stop := range map[string]func(*exec.Cmd) error{"a signal": interrupt, "Ctrl-C": ctrlC} {
		out := newLines(t)
		ping := u.start(out, "ping", "edge1", "-n0", "--interval", "10ms")
		testkit.Within(t, 20*time.Second, "two pings", func() error {
			if text := out.String(); strings.Count(text, "round trip") < 2 {
				return fmt.Errorf("%q", text)
			}
			return nil
		})
		stops(ping, what, stop)
	}
}

// Each mistake has its exit code, and a message that says what to do.
func TestKubectlPluginErrors(t *testing.T) {
	ready, starts := fakePod{"a", "none", ""}, fakePod{"b", "none", "ImagePullBackOff"}
	gone := fakePod{"c", "none", evicted}
	for _, c := range []struct {
		args []string
		pods []fakePod
		code int
		want string
	}{
		{nil, nil, exitOK, "kubectl edgetunnel [flags] COMMAND"},
		{[]string{"tap", "--help"}, nil, exitOK, "tunnel tap [NODE]"},
		{[]string{"init"}, nil, exitUsage, `unknown command "init"`},
		{[]string{"ls", "-n", "edge"}, nil, exitUsage, "write -n before ls"},
		{[]string{"top", "--context=far"}, nil, exitUsage, "write --context before top"},
		{[]string{"-n", "edge", "ls"}, []fakePod{}, exitRuntime,
			"app.kubernetes.io/component=cloud in the namespace edge: name the namespace of the cloud by"},
		{[]string{"ls"}, nil, exitRuntime, "Error from server (Forbidden)"},
		{[]string{"ls"}, []fakePod{starts}, exitRuntime, "b: ImagePullBackOff"},
		{[]string{"--pod", "c", "ls"}, []fakePod{ready}, exitRuntime, "has no pod c; it has a"},
		{[]string{"drain"}, []fakePod{ready, starts}, exitUsage, "there are a, b (ImagePullBackOff)"},
		{[]string{"cert", "rotate-ca", "--status"}, []fakePod{ready, starts}, exitUsage, "there are a, b"},
		{[]string{"cert", "status"}, []fakePod{ready, starts}, exitConfig, "command terminated with exit code 3"},
		{[]string{"drain"}, []fakePod{ready, gone}, exitConfig, "command terminated with exit code 3"},
		{[]string{"ls"}, []fakePod{gone}, exitRuntime, "c: Evicted: The node was low"},
		{[]string{"--pod", "d", "ls"}, []fakePod{gone}, exitRuntime, "has no pod d; it has none that runs"},
		{[]string{"--pod", "b", "status"}, []fakePod{ready, starts}, exitConfig, "none"},
		{[]string{"ls"}, []fakePod{ready}, exitConfig, "command terminated with exit code 3"},
	} {
		u := newKubectlUser(t)
		if c.pods != nil {
			u.pods(c.pods...)
		}
		code, out, errs := u.run(kubectlPlugin, c.args...)
		if code != c.code || !strings.Contains(out+errs, c.want) {
			t.Errorf("%q: exit code %d, want %d with %q\n%s%s", c.args, code, c.code, c.want, out, errs)
		}
	}
	u := newKubectlUser(t)
	if err := os.Remove(filepath.Join(u.dir, "kubectl")); err != nil {
		t.Fatal(err)
	}
	if _, errs := u.wants(exitRuntime, "ls"); !strings.Contains(errs, "no folder of PATH has the program kubectl") {
		t.Errorf("without kubectl: %s", errs)
	}
}
