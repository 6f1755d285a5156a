package faults

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

const (
	// restarts is how often a process is replaced under traffic.
	restarts = 3
	// endsWithin is from a restart to the end of an old process: the grace period, and a bit.
	endsWithin = 35 * time.Second
	// liveTime is how long a live conn of a caller lasts. It is shorter than the grace period.
	liveTime = 8 * time.Second
)

// taken is what tunnel restart says, by the test's own words.
type taken struct {
	PID int `json:"pid"`
	Old int `json:"old"`
}

// restart replaces a process of the pair. The new one ends with the test.
func (p *pair) restart(mode string) taken {
	p.t.Helper()
	output, code := p.command(mode, "restart", "-o", "json")
	var done taken
	if err := json.Unmarshal([]byte(output), &done); err != nil || code != 0 || done.PID == done.Old {
		p.t.Fatalf("tunnel restart: exit code %d, %v:\n%s", code, err, output)
	}
	p.t.Cleanup(func() {
		syscall.Kill(done.PID, syscall.SIGKILL)
		if mode == "cloud" {
			p.cloud = nil // it has ended, and its log with the new process
		} else {
			p.edge = nil
		}
	})
	return done
}

// gone waits until a process has ended.
func gone(t *testing.T, pid int) {
	t.Helper()
	testkit.Within(t, endsWithin, "the old process ends", func() error {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err == nil && !strings.Contains(string(text), ") Z ") {
			return fmt.Errorf("process %d runs", pid)
		}
		return nil
	})
}

// liveAndNew starts callers of the echo and https doors: new ones, and some whose conns live for a while, and are in
// use all the time. Each must be served, and none may be cut off.
func (p *pair) liveAndNew() *callers {
	p.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	c := &callers{t: p.t, stop: stop}
	for i := range liveCallers {
		c.wg.Go(func() {
			for ctx.Err() == nil {
				if err := live(ctx, p.Door("echo")); err != nil {
					c.fail(fmt.Errorf("live conn %d: %w", i, err))
				}
			}
		})
	}
	https := p.tryHTTPS(false)
	c.wg.Go(func() {
		tick := time.NewTicker(time.Second / callersPerSecond)
		defer tick.Stop()
		for i := 0; ctx.Err() == nil; i++ {
			c.wg.Go(func() {
				try := func() error { return tryEcho(context.Background(), p.Door("echo")) }
				if i%5 == 0 {
					try = func() error { return https(context.Background(), func() {}) }
				}
				if err := try(); err != nil {
					c.fail(fmt.Errorf("a new conn (%d): %w", i, err))
				} else {
					c.served.Add(1)
				}
			})
			<-tick.C
		}
	})
	p.t.Cleanup(c.end)
	return c
}

// live holds a conn for liveTime, and uses it.
func live(ctx context.Context, door string) error {
	conn, closeIt, err := dial(context.Background(), door)
	if err != nil {
		return err
	}
	defer closeIt()
	for until := time.Now().Add(liveTime); time.Now().Before(until) && ctx.Err() == nil; {
		if err := ping(conn); err != nil {
			return err
		}
		time.Sleep(between)
	}
	return nil
}

// newRestartPair makes a pair with all that a restart touches: an inventory, a file of forwards, UDP, admin sockets.
func newRestartPair(t *testing.T) (p *pair, udp string) {
	t.Helper()
	number := testkit.FreePort(t)
	target, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { target.Close() })
	go func() {
		for b := make([]byte, 1500); ; {
			n, from, err := target.ReadFrom(b)
			if err != nil {
				return
			}
			target.WriteTo(b[:n], from)
		}
	}()
	udp = fmt.Sprintf("127.0.0.1:%d", number)
	dir, err := os.MkdirTemp("", "restart") // t.TempDir's path is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p = newPair(t, func(c *rig.Config) {
		c.Dir = dir
		c.Cloud = fmt.Sprintf("\n[mode.cloud.udp]\n%q = \"edge1/%s\"\n[mode.cloud.admin]\nsocket = \"c.sock\"\n"+
			"forwards = \"forwards.toml\"\ninventory = \"nodes.json\"\n", udp, target.LocalAddr())
		c.Edge = "\n[mode.edge.admin]\nsocket = \"e.sock\"\n"
	})
	p.start()
	return p, udp
}

// TestRestartCloud replaces the only cloud three times in a row, under traffic: no caller is refused, and none is cut
// off. UDP goes on, too. What the cloud remembers is there afterwards.
func TestRestartCloud(t *testing.T) {
	t.Parallel()
	p, udp := newRestartPair(t)
	flow, err := net.Dial("udp", udp)
	if err != nil {
		t.Fatal(err)
	}
	defer flow.Close()
	const lost = "no session; trying again"
	before := strings.Count(p.EdgeLog.String(), lost) // it may have started before the cloud
	traffic := p.liveAndNew()
	var old []int
	for range restarts {
		traffic.more(callersPerSecond)
		if err := pingUDP(flow); err != nil {
			t.Errorf("UDP before: %v", err)
		}
		done := p.restart("cloud")
		old = append(old, done.Old)
		if err := pingUDP(flow); err != nil {
			t.Errorf("UDP after: %v", err)
		}
		if err := rig.Ready(p.CloudHealth()); err != nil {
			t.Errorf("/readyz after: %v", err)
		}
		p.wantCommand(0, []string{"edge1", "connected"}, "cloud", "ls", "-o", "json")
	}
	traffic.more(callersPerSecond)
	traffic.end()
	for _, pid := range old {
		gone(t, pid)
	}
	t.Logf("%d callers were served", traffic.served.Load())
	if n := traffic.failed.Load(); n > 0 {
		t.Errorf("%d callers failed", n)
	}
	if err := tryEcho(t.Context(), p.Door("echo")); err != nil {
		t.Errorf("after the end of the old processes: %v", err)
	}
	if n := strings.Count(p.EdgeLog.String(), lost); n > before {
		t.Errorf("the edge had no session %d times", n-before)
	}

	// The files are those of the new process.
	number := testkit.FreePort(t)
	extra := fmt.Sprintf("127.0.0.1:%d", number)
	p.wantCommand(0, []string{"applied", extra}, "cloud", "forward", "add", extra, "edge1/"+p.targets.echo)
	p.restart("cloud")
	if err := tryEcho(t.Context(), extra); err != nil {
		t.Errorf("a port of tunnel forward, after a restart: %v", err)
	}
	if text, err := os.ReadFile(p.Path("nodes.json")); err != nil || !bytes.Contains(text, []byte("edge1")) {
		t.Errorf("the inventory is %q, %v", text, err)
	}
}

// TestRestartEdge is TestRestartCloud for an edge: the cloud dials through the new process at once, and the conns of
// the old one go on.
func TestRestartEdge(t *testing.T) {
	t.Parallel()
	p, _ := newRestartPair(t)
	traffic := p.liveAndNew()
	var old []int
	for range restarts {
		traffic.more(callersPerSecond)
		done := p.restart("edge")
		old = append(old, done.Old)
		if err := rig.Ready(p.EdgeHealth()); err != nil {
			t.Errorf("/readyz after: %v", err)
		}
	}
	traffic.more(callersPerSecond)
	traffic.end()
	for _, pid := range old {
		gone(t, pid)
	}
	if n := traffic.failed.Load(); n > 0 {
		t.Errorf("%d callers failed", n)
	}
	testkit.Within(t, patience, "the old sessions are gone", func() error { return p.sessions(1) })
	if n, err := metric(p.CloudHealth(), "tunnel_sessions_replaced_total"); err != nil || n != 0 {
		t.Errorf("%v sessions were replaced, %v", n, err)
	}
}

// TestRestartBoth replaces the edge, and at once the cloud, as an upgrade of a package with both does. The edge's old
// process still runs, and must not join the new cloud: it would replace the session of the edge's new process.
func TestRestartBoth(t *testing.T) {
	t.Parallel()
	p, _ := newRestartPair(t)
	traffic := p.liveAndNew()
	var old []int
	for range restarts { // which of the edge's processes reaches the new cloud last is chance
		traffic.more(callersPerSecond)
		old = append(old, p.restart("edge").Old, p.restart("cloud").Old)
		traffic.more(callersPerSecond)
		if n, err := metric(p.CloudHealth(), "tunnel_sessions_replaced_total"); err != nil || n != 0 {
			t.Errorf("%v sessions were replaced, %v", n, err)
		}
	}
	for _, pid := range old {
		gone(t, pid)
	}
	traffic.more(callersPerSecond)
	traffic.end()
	if n := traffic.failed.Load(); n > 0 {
		t.Errorf("%d callers failed", n)
	}
}

// successor waits for the n-th new process of a log, and returns its id.
func successor(t *testing.T, log *rig.Log, n int) (pid int) {
	t.Helper()
	line := regexp.MustCompile(`a new process starts.* pid=(\d+)`)
	testkit.Within(t, patience, "a new process starts", func() error {
		all := line.FindAllStringSubmatch(log.String(), -1)
		if len(all) < n {
			return fmt.Errorf("%d, want %d", len(all), n)
		}
		var err error
		pid, err = strconv.Atoi(all[n-1][1])
		return err
	})
	return pid
}

// TestRestartFails: a new process that cannot start, or is killed at any moment before it serves, leaves the old one
// serving, with its conns.
func TestRestartFails(t *testing.T) {
	t.Parallel()
	p, _ := newRestartPair(t)
	held, closeIt, err := dial(t.Context(), p.Door("echo"))
	if err != nil {
		t.Fatal(err)
	}
	defer closeIt()
	works := func(when string) {
		t.Helper()
		if err := errors.Join(ping(held), tryEcho(t.Context(), p.Door("echo")), rig.Ready(p.CloudHealth())); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	good, err := os.ReadFile(p.Path("cloud.toml"))
	if err != nil {
		t.Fatal(err)
	}
	starts := 0
	taken := listen(t)
	defer taken.Close()
	works("before")
	traffic := startCallers(t, p.Door("echo"))
	for name, tc := range map[string]struct {
		text string
		says string
		code int
	}{
		"a bad configuration": {"[mode.cloud.limits]\nconn = 1\n", "unknown key", 3},
		"a port that is taken": {
			fmt.Sprintf("[mode.cloud.egress]\nhttpconnect = [\"unix://%s\"]\n", p.Path("no/such.sock")), "create the folder", 4},
	} {
		p.replace("cloud.toml", append(bytes.Clone(good), tc.text...))
		p.wantCommand(tc.code, []string{tc.says}, "cloud", "restart")
		starts++
		works(name)
	}
	p.replace("cloud.toml", good)

	result := make(chan string, 1) // each restart sends once
	begin := func() {
		starts++
		go func() {
			output, code := p.command("cloud", "restart")
			result <- fmt.Sprintf("%d %s", code, output)
		}()
	}
	failed := func(when string) {
		t.Helper()
		if got := <-result; !strings.HasPrefix(got, "4 ") || !strings.Contains(got, "the old process serves as before") {
			t.Errorf("%s: %s", when, got)
		}
		works(when)
	}
	// While the edge hangs, the new process waits for it. On a slow machine, it is killed before.
	if err := p.edge.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	begin()
	syscall.Kill(successor(t, &p.CloudLog, starts), syscall.SIGKILL)
	if err := p.edge.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	failed("killed at its start")
	traffic.end()
	if n := traffic.failed.Load(); n > 0 {
		t.Errorf("%d callers failed", n)
	}

	// An edge that hangs keeps the new process from serving.
	if err := p.edge.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	begin()
	pid := successor(t, &p.CloudLog, starts)
	testkit.Within(t, backWithin, "the edges are told to move", func() error {
		if !strings.Contains(p.CloudLog.String(), "the edges move to the new process") {
			return errors.New("the log does not say so")
		}
		return nil
	})
	syscall.Kill(pid, syscall.SIGKILL)
	if err := p.edge.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	failed("killed while the edges move")

	// The next restart succeeds.
	done := p.restart("cloud")
	works("after a restart")
	closeIt()
	gone(t, done.Old)
}

// TestRestartStopped: a process that is told to stop while a new one starts ends the new one, too.
func TestRestartStopped(t *testing.T) {
	t.Parallel()
	p, _ := newRestartPair(t)
	if err := p.edge.Signal(syscall.SIGSTOP); err != nil { // the new process waits for it
		t.Fatal(err)
	}
	result := make(chan string, 1) // sent once
	go func() {
		output, code := p.command("cloud", "restart")
		result <- fmt.Sprintf("%d %s", code, output)
	}()
	pid := successor(t, &p.CloudLog, 1)
	testkit.Within(t, backWithin, "the edges are told to move", func() error {
		if !strings.Contains(p.CloudLog.String(), "the edges move to the new process") {
			return errors.New("the log does not say so")
		}
		return nil
	})
	if err := p.cloud.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := <-result; !strings.HasPrefix(got, "1 ") || !strings.Contains(got, "is stopping") {
		t.Errorf("tunnel restart: %s", got)
	}
	gone(t, pid)
	if err := p.edge.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.cloud.Done():
	case <-time.After(endsWithin):
		t.Error("the cloud has not ended")
	}
	p.cloud = nil
}

// TestRestartOfAnEdgeThatIsAway: without a session, the new process of an edge is not ready. By the exit code, a
// package then has systemd restart the service.
func TestRestartOfAnEdgeThatIsAway(t *testing.T) {
	t.Parallel()
	p, _ := newRestartPair(t)
	p.cloud.Kill()
	p.cloud = nil
	p.wantCommand(1, []string{"the old process continues, and is not ready either"}, "edge", "restart")
}

// TestRestartUnderSystemd: systemd hears of readiness, and of the new main process.
func TestRestartUnderSystemd(t *testing.T) {
	t.Parallel()
	p, _ := newRestartPair(t)
	p.cloud.Kill()
	socket, err := net.ListenPacket("unixgram", p.Path("notify"))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	hears := func() string {
		t.Helper()
		b := make([]byte, 100)
		if err := socket.SetReadDeadline(time.Now().Add(backWithin)); err != nil {
			t.Fatal(err)
		}
		n, _, err := socket.ReadFrom(b)
		if err != nil {
			t.Fatal(err)
		}
		return string(b[:n])
	}
	p.cloud, err = rig.Start(&p.CloudLog,
		"env", "-u", "SYSTEMD_EXEC_PID", "NOTIFY_SOCKET="+p.Path("notify"), // a service may run this test
		program, "cloud", "-c", p.Path("cloud.toml"))
	if err != nil {
		t.Fatal(err)
	}
	if got := hears(); got != "READY=1" {
		t.Errorf("at the start systemd hears %q", got)
	}
	p.waitReady(patience)
	done := p.restart("cloud")
	got, want := []string{hears(), hears()}, []string{fmt.Sprintf("MAINPID=%d", done.PID), "READY=1"}
	slices.Sort(got) // two processes send
	if !slices.Equal(got, want) {
		t.Errorf("at a restart systemd hears %q, want %q", got, want)
	}
	socket.Close()
	p.wantCommand(1, []string{"systemd cannot be notified"}, "cloud", "restart")
	if err := rig.Ready(p.CloudHealth()); err != nil {
		t.Errorf("after a restart that was refused: %v", err)
	}
}

// TestDrain: a drained edge gets no new conn, and keeps its old ones; a cloud without other replicas refuses, and ends
// when it is asked to.
func TestDrain(t *testing.T) {
	t.Parallel()
	p, _ := newRestartPair(t)
	held, closeIt, err := dial(t.Context(), p.Door("echo"))
	if err != nil {
		t.Fatal(err)
	}
	defer closeIt()
	if err = ping(held); err != nil {
		t.Fatal(err)
	}
	p.wantCommand(1, []string{"there is no other replica", "tunnel restart"}, "cloud", "drain")
	if err = errors.Join(rig.Ready(p.CloudHealth()), tryEcho(t.Context(), p.Door("echo"))); err != nil {
		t.Errorf("after a drain that was refused: %v", err)
	}
	p.wantCommand(0, []string{"edge: drained; ", "conns go on"}, "edge", "drain")
	p.wantCommand(0, []string{"drained"}, "edge", "drain")
	if err = rig.Ready(p.EdgeHealth()); err == nil {
		t.Error("/readyz of the drained edge is 200")
	}
	testkit.Within(t, patience, "new conns are refused", func() error {
		if err := tryEcho(t.Context(), p.Door("echo")); err == nil {
			return errors.New("a new conn is served")
		}
		return nil
	})
	if err = ping(held); err != nil {
		t.Errorf("the conn of the drained edge: %v", err)
	}
	p.wantCommand(1, []string{"is drained"}, "edge", "restart")
	closeIt()
	p.wantCommand(0, []string{"drained"}, "cloud", "drain", "--stop")
	select {
	case <-p.cloud.Done():
	case <-time.After(endsWithin):
		t.Error("the cloud has not ended")
	}
	p.cloud = nil
}

// TestDiag collects the state of both daemons. No secret is in the file.
func TestDiag(t *testing.T) {
	t.Parallel()
	p, _ := newRestartPair(t)
	if err := tryEcho(t.Context(), p.Door("echo")); err != nil {
		t.Fatal(err)
	}
	secrets := map[string]string{"token": p.Token(rig.Node).Reveal()}
	for _, name := range []string{"cloud.key", "https.key", "client.key"} {
		text, err := os.ReadFile(p.Path(name))
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(strings.TrimSpace(string(text)), "\n")[1:] {
			if !strings.HasPrefix(line, "-----") {
				secrets[fmt.Sprintf("%s, line %d", name, i)] = line
			}
		}
	}
	// The token stands in the configuration itself, too.
	p.edit("edge.toml", "tokenfile = \"token\"\n", fmt.Sprintf("token = %q\n", secrets["token"]))
	for mode, wanted := range map[string][]string{
		"cloud": {"cloud/readyz.txt", "cloud/metrics.txt", "cloud/status.json", "cloud/nodes.json", "cloud/goroutines.txt",
			"cloud/heap.pprof", "cloud.toml.txt", "kernel.txt", "version.txt"},
		"edge": {"edge/readyz.txt", "edge/status.json", "edge.toml.txt"},
	} {
		file := filepath.Join(t.TempDir(), "diag.zip")
		p.wantCommand(0, []string{file}, mode, "diag", "-f", file)
		p.wantCommand(1, []string{"exists"}, mode, "diag", "-f", file)
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%v, %v", info, err)
		}
		files := unzip(t, file)
		for _, name := range wanted {
			if len(files[name]) == 0 {
				t.Errorf("%s: there is no %s", mode, name)
			}
		}
		for name, text := range files {
			for what, secret := range secrets {
				if strings.Contains(text, secret) {
					t.Errorf("%s: %s has the %s", mode, name, what)
				}
			}
		}
		if !strings.Contains(files["cloud.toml.txt"]+files["edge.toml.txt"], "mode."+mode+".") {
			t.Errorf("%s: no key of the configuration: %v", mode, files)
		}
		if mode == "edge" && !strings.Contains(files["edge.toml.txt"], `token = "***"`) {
			t.Errorf("the token is not shown as ***:\n%s", files["edge.toml.txt"])
		}
	}
}

func unzip(t *testing.T, file string) map[string]string {
	t.Helper()
	z, err := zip.OpenReader(file)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	files := make(map[string]string)
	for _, f := range z.File {
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[f.Name] = string(text)
	}
	return files
}
