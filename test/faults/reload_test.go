package faults

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

const (
	// callersPerSecond and liveCallers are the traffic that a reload must not touch.
	callersPerSecond = 50
	liveCallers      = 20
	// reloads is how often each side reloads under that traffic, and callersBetween how many callers come between
	// two reloads.
	reloads        = 10
	callersBetween = 5
)

// newReloadPair makes a pair whose cloud has an admin socket and a file of forwards.
func newReloadPair(t *testing.T) *pair {
	t.Helper()
	dir, err := os.MkdirTemp("", "reload") // t.TempDir's path is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p := newPair(t, func(c *rig.Config) {
		c.Dir = dir
		c.Cloud = "\n[mode.cloud.admin]\nsocket = \"c.sock\"\nforwards = \"forwards.toml\"\n"
		c.Edge = "\n[mode.edge.admin]\nsocket = \"e.sock\"\n"
	})
	p.start()
	return p
}

// command runs a command of the program with a configuration file of the pair.
func (p *pair) command(mode string, args ...string) (output string, code int) {
	p.t.Helper()
	out, err := exec.CommandContext(p.t.Context(), program, append(args, "-c", p.Path(mode+".toml"))...).CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return string(out), exit.ExitCode()
	}
	if err != nil {
		p.t.Fatal(err)
	}
	return string(out), 0
}

// wantCommand runs a command, and checks the exit code and that its output has all texts.
func (p *pair) wantCommand(code int, texts []string, mode string, args ...string) {
	p.t.Helper()
	output, got := p.command(mode, args...)
	if got != code {
		p.t.Errorf("%v: exit code %d, want %d:\n%s", args, got, code, output)
	}
	for _, text := range texts {
		if !strings.Contains(output, text) {
			p.t.Errorf("%v: want %q in\n%s", args, text, output)
		}
	}
}

// callers are clients that all must be served: new ones, and some that stay.
type callers struct {
	t      *testing.T
	stop   context.CancelFunc
	wg     sync.WaitGroup
	served atomic.Int64
	failed atomic.Int64
}

// startCallers starts callers of a door that echoes.
func startCallers(t *testing.T, door string) *callers {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	c := &callers{t: t, stop: stop}
	for i := range liveCallers {
		conn, closeIt, err := dial(context.Background(), door)
		if err != nil {
			t.Fatal(err)
		}
		c.wg.Go(func() {
			defer closeIt()
			for ctx.Err() == nil {
				if err := ping(conn); err != nil {
					c.fail(fmt.Errorf("live conn %d: %w", i, err))
					return
				}
				time.Sleep(between)
			}
		})
	}
	c.wg.Go(func() {
		tick := time.NewTicker(time.Second / callersPerSecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			c.wg.Go(func() {
				if err := tryEcho(context.Background(), door); err != nil {
					c.fail(fmt.Errorf("a new conn: %w", err))
				} else {
					c.served.Add(1)
				}
			})
			<-tick.C
		}
	})
	t.Cleanup(c.end)
	return c
}

// ping expects an echo of a byte.
func ping(c net.Conn) error {
	if err := c.SetDeadline(time.Now().Add(hangs)); err != nil {
		return err
	}
	b := []byte{'x'}
	if _, err := c.Write(b); err != nil {
		return err
	}
	_, err := io.ReadFull(c, b)
	return err
}

// pingUDP expects an echo of a datagram, and sends it again after each second: one that waits long for a processor is
// lost.
func pingUDP(c net.Conn) error {
	question := time.Now().Format(time.RFC3339Nano)
	for late := time.Now().Add(hangs); ; {
		if _, err := io.WriteString(c, question); err != nil {
			return err
		}
		if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			return err
		}
		b := make([]byte, 100)
		n, err := c.Read(b)
		for err == nil && string(b[:n]) != question { // an answer to what was asked before
			n, err = c.Read(b)
		}
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) || time.Now().After(late) {
			return err
		}
	}
}

// more waits until n more callers were served.
func (c *callers) more(n int64) {
	c.t.Helper()
	want := c.served.Load() + n
	testkit.Within(c.t, patience, "callers are served", func() error {
		if got := c.served.Load(); got < want && c.failed.Load() == 0 {
			return fmt.Errorf("%d, want %d", got, want)
		}
		return nil
	})
}

func (c *callers) fail(err error) {
	if errors.Is(err, rig.ErrLate) {
		c.t.Log(err)
		return
	}
	if c.failed.Add(1) <= 5 {
		c.t.Errorf("%s: %v", time.Now().Format("15:04:05.000"), err)
	}
}

// end stops the callers and waits for them.
func (c *callers) end() {
	c.stop()
	c.wg.Wait()
}

// TestReload reloads cloud and edge under traffic, by the command and by SIGHUP, with ports that come, go and
// change, and with files that have problems: no caller is refused, and none is cut off. Nothing is left over.
func TestReload(t *testing.T) {
	t.Parallel()
	p := newReloadPair(t)
	base := p.baseline()
	number := testkit.FreePort(t)
	extra, echoes := fmt.Sprintf("127.0.0.1:%d", number), fmt.Sprintf("edge1/%s", p.targets.echo)
	extraLine := fmt.Sprintf("%q = %q\n", extra, echoes)
	traffic := startCallers(t, p.Door("echo"))
	started := time.Now()

	// A line that is there, then not.
	for i := range reloads {
		traffic.more(callersBetween)
		if i%2 == 0 {
			p.edit("cloud.toml", "[mode.cloud.tcp]\n", "[mode.cloud.tcp]\n"+extraLine)
			change := fmt.Sprintf("mode.cloud.tcp.%q: absent -> %q", extra, echoes)
			p.wantCommand(0, []string{"applied", change}, "cloud", "reload")
			if err := tryEcho(t.Context(), extra); err != nil {
				t.Errorf("the new port: %v", err)
			}
		} else {
			live, closeIt, err := dial(t.Context(), extra)
			if err != nil {
				t.Fatal(err)
			}
			if err = ping(live); err != nil {
				t.Fatal(err)
			}
			p.edit("cloud.toml", extraLine, "")
			p.hangup(p.cloud, &p.CloudLog, extra, `-> absent`)
			if err := tryEcho(t.Context(), extra); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("the removed port: %v", err)
			}
			if err := ping(live); err != nil {
				t.Errorf("a conn of the removed port: %v", err)
			}
			closeIt()
		}
	}
	// The line of the callers itself: who may connect.
	p.edit("cloud.toml", "[mode.cloud.admin]",
		fmt.Sprintf("[mode.cloud.tcpallow]\n%q = [\"127.0.0.0/8\"]\n[mode.cloud.admin]", p.Door("echo")))
	p.wantCommand(0, []string{"applied", "mode.cloud.tcpallow."}, "cloud", "reload")

	// What the edge may dial.
	for i := range reloads {
		traffic.more(callersBetween)
		allow := []string{"allow = [\"10.0.0.0/8:1\"]\n", ""}
		p.edit("edge.toml", "[mode.edge]\n"+allow[(i+1)%2], "[mode.edge]\n"+allow[i%2])
		p.wantCommand(0, []string{"applied", "mode.edge.allow: "}, "edge", "reload")
	}

	p.badFiles(extra)
	traffic.end()
	t.Logf("%d callers were served in %s of reloads", traffic.served.Load(), time.Since(started).Round(time.Millisecond))
	if failed, served := traffic.failed.Load(), traffic.served.Load(); failed > 0 || served < 2*reloads*callersBetween {
		t.Errorf("%d callers were served, %d failed", served, failed)
	}
	p.back(base)
}

// TestReloadTakesEffect: what a reload has applied decides about the next caller, at each front door and at the edge.
func TestReloadTakesEffect(t *testing.T) {
	t.Parallel()
	p := newReloadPair(t)
	datagrams, door := echoDatagrams(t), testkit.FreeAddress(t)
	p.edit("cloud.toml", "[mode.cloud.admin]", fmt.Sprintf(
		"[mode.cloud.udp]\n%q = \"edge1/%s\"\n[mode.cloud.egress]\nhttpconnect = [\"unix://%s\"]\n[mode.cloud.admin]",
		door, datagrams, p.Path("egress.sock")))
	p.wantCommand(0, []string{"mode.cloud.egress"}, "cloud", "reload") // only a restart opens the door of egress
	p.cloud.Kill()
	p.startCloud()
	p.waitReady(patience)

	https, echo := p.tryHTTPS(true), fmt.Sprintf("%q", p.Door("echo"))
	flows := func(health, limit string) func() error {
		return func() error {
			name := fmt.Sprintf("tunnel_limited_total{limit=%q}", limit)
			before, err := metric(health, name)
			for i := 0; i < 3 && err == nil; i++ {
				err = p.sendDatagram(door)
			}
			after, err2 := metric(health, name)
			if err = errors.Join(err, err2); err == nil && after > before {
				err = fmt.Errorf("the limit %s is reached", limit)
			}
			return err
		}
	}
	for _, tt := range []struct {
		mode, table string // to which lines are added
		lines, key  string
		try         func() error
		why         string // part of the error after the reload
	}{
		{"edge", "[mode.edge]\n", "allow = [\"127.0.0.1:1\"]\n", "mode.edge.allow",
			func() error { return tryEcho(t.Context(), p.Door("echo")) }, ""},
		{"cloud", "[mode.cloud.admin]\n", "[mode.cloud.tcpallow]\n" + echo + " = [\"10.0.0.0/8\"]\n", "mode.cloud.tcpallow",
			func() error { return tryEcho(t.Context(), p.Door("echo")) }, ""},
		{"cloud", "[mode.cloud.https]\n", "allowfrom = [\"10.0.0.0/8\"]\n", "mode.cloud.https.allowfrom",
			func() error { return https(t.Context(), nil) }, ""},
		{"cloud", "[mode.cloud.https]\n", "clientnames = [\"another\"]\n", "mode.cloud.https.clientnames",
			func() error { return https(t.Context(), nil) }, "HTTP 403"},
		{"cloud", "[mode.cloud.egress]\n", "strategies = [\"destHost\"]\n", "mode.cloud.egress.strategies",
			func() error { return connect(p.Path("egress.sock"), p.targets.echo) }, "HTTP/1.1 5"},
		{"cloud", "[mode.cloud.admin]\n", "[mode.cloud.limits]\nflowsperaddress = 1\n", "mode.cloud.limits.flowsperaddress",
			flows(p.CloudHealth(), "flowsperaddress"), "is reached"},
		{"edge", "[mode.edge.admin]\n", "[mode.edge.limits]\nflows = 1\n", "mode.edge.limits.flows",
			flows(p.EdgeHealth(), "flows"), "is reached"},
	} {
		if err := tt.try(); err != nil {
			t.Errorf("%s, before: %v", tt.key, err)
		}
		// A table stands before that of its line; a line stands in it.
		with := tt.table + tt.lines
		if strings.HasPrefix(tt.lines, "[") {
			with = tt.lines + tt.table
		}
		p.edit(tt.mode+".toml", tt.table, with)
		p.wantCommand(0, []string{"applied", tt.key}, tt.mode, "reload")
		if err := tt.try(); err == nil || !strings.Contains(err.Error(), tt.why) {
			t.Errorf("%s, after the reload: %v, want %q", tt.key, err, tt.why)
		}
		p.edit(tt.mode+".toml", with, tt.table)
		p.wantCommand(0, []string{"applied", tt.key}, tt.mode, "reload")
		if err := tt.try(); err != nil {
			t.Errorf("%s, after the second reload: %v", tt.key, err)
		}
	}

	// A list that goes together with another key of its table waits for the restart, which opens the ports anew.
	const denied = "[mode.cloud.https]\nallowfrom = [\"10.0.0.0/8\"]\n"
	const other = "[mode.cloud.https]\nproxyfrom = [\"10.0.0.1/32\"]\n"
	p.edit("cloud.toml", "[mode.cloud.https]\n", denied)
	p.wantCommand(0, []string{"applied", "mode.cloud.https.allowfrom"}, "cloud", "reload")
	p.edit("cloud.toml", denied, other)
	p.wantCommand(0, []string{"need a restart", "mode.cloud.https.allowfrom"}, "cloud", "reload")
	if err := https(t.Context(), nil); err == nil {
		t.Error("a caller that allowfrom denied is served without a restart")
	}
}

// echoDatagrams serves an address that sends datagrams back.
func echoDatagrams(t *testing.T) string {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(b)
			if err != nil {
				return
			}
			conn.WriteTo(b[:n], from)
		}
	}()
	t.Cleanup(func() { conn.Close(); <-ended })
	return conn.LocalAddr().String()
}

// sendDatagram sends a datagram from a new port, and waits for the echo.
func (p *pair) sendDatagram(door string) error {
	conn, err := net.Dial("udp", door)
	if err != nil {
		return err
	}
	p.t.Cleanup(func() { conn.Close() }) // until then its flow stays
	return pingUDP(conn)
}

// connect asks an egress socket for a target by HTTP CONNECT.
func connect(socket, target string) error {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err = conn.SetDeadline(time.Now().Add(hangs)); err != nil {
		return err
	}
	if _, err = fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", target); err != nil {
		return err
	}
	status, err := bufio.NewReader(conn).ReadString('\n')
	if err == nil && !strings.HasPrefix(status, "HTTP/1.1 200") {
		err = errors.New(status)
	}
	return err
}

// hangup sends SIGHUP, and waits for a new line of the log about the reload that has all texts.
func (p *pair) hangup(process *rig.Process, log *rig.Log, texts ...string) {
	p.t.Helper()
	before := len(log.String())
	if err := process.Signal(syscall.SIGHUP); err != nil {
		p.t.Fatal(err)
	}
	testkit.Within(p.t, patience, "the log tells the reload", func() error {
		for line := range strings.SplitSeq(log.String()[before:], "\n") {
			found := strings.Contains(line, "configuration")
			for _, text := range texts {
				found = found && strings.Contains(line, text)
			}
			if found {
				return nil
			}
		}
		return fmt.Errorf("no line has %q", texts)
	})
}

// badFiles reloads files that cannot take effect. Each must change nothing, and say why.
func (p *pair) badFiles(free string) {
	p.t.Helper()
	good, err := os.ReadFile(p.Path("cloud.toml"))
	if err != nil {
		p.t.Fatal(err)
	}
	taken := listen(p.t)
	defer taken.Close()
	for name, tc := range map[string]struct {
		text  string
		texts []string
	}{
		"unknown key":  {"[mode.cloud.limits]\nconn = 1\n", []string{"mode.cloud.limits.conn: unknown key"}},
		"not TOML":     {"x =\n", []string{"not valid TOML"}},
		"missing file": {"[mode.cloud.egress]\ncert = \"none\"\nkey = \"none\"\n", []string{"does not exist"}},
		"bad value":    {"[mode.cloud.egress]\nstrategies = [\"nonsense\"]\n", []string{"nonsense"}},
	} {
		p.replace("cloud.toml", append(bytes.Clone(good), tc.text...))
		output, code := p.command("cloud", "reload")
		if code != 3 {
			p.t.Errorf("%s: exit code %d, want 3:\n%s", name, code, output)
		}
		for _, text := range tc.texts {
			if !strings.Contains(output, text) {
				p.t.Errorf("%s: want %q in\n%s", name, text, output)
			}
		}
		if checked, _ := p.command("cloud", "config", "check"); checked != output {
			p.t.Errorf("%s: reload says\n%s, config check\n%s", name, output, checked)
		}
		p.hangup(p.cloud, &p.CloudLog, "nothing has changed")
	}
	// A port that another process has, beside a line that could take effect.
	text := fmt.Sprintf("[mode.cloud.tcp]\n%q = \"edge1/127.0.0.1:1\"\n%q = \"edge1/127.0.0.1:1\"\n", taken.Addr(), free)
	p.replace("cloud.toml", bytes.Replace(good, []byte("[mode.cloud.tcp]\n"), []byte(text), 1))
	p.wantCommand(3, []string{taken.Addr().String(), "address already in use", "ss -ltnp"}, "cloud", "reload")
	if _, err := net.Dial("tcp", free); !errors.Is(err, syscall.ECONNREFUSED) {
		p.t.Errorf("a part of a change that failed has taken effect: %v", err)
	}
	// A key that needs a restart is named, again and again, and its value does not take effect.
	p.replace("cloud.toml", append(bytes.Clone(good), "[mode.cloud.limits]\nconns = 1\n"...))
	for range 2 {
		p.wantCommand(0, []string{"need a restart", "mode.cloud.limits.conns: absent -> 1"}, "cloud", "reload")
	}
	p.replace("cloud.toml", good)
	p.wantCommand(0, []string{"nothing has changed"}, "cloud", "reload")
}

// TestForwards adds and removes ports by command. They are there after a restart, too.
func TestForwards(t *testing.T) {
	t.Parallel()
	p := newReloadPair(t)
	number := testkit.FreePort(t)
	extra, target := fmt.Sprintf("127.0.0.1:%d", number), "edge1/"+p.targets.echo
	traffic := startCallers(t, p.Door("echo"))
	p.wantCommand(0, []string{"applied", extra}, "cloud", "forward", "add", extra, target)
	if err := tryEcho(t.Context(), extra); err != nil {
		t.Errorf("the new port: %v", err)
	}
	p.wantCommand(1, []string{"already"}, "cloud", "forward", "add", extra, "edge1/127.0.0.1:1")
	p.wantCommand(3, []string{"tcpallow"}, "cloud", "forward", "add", "0.0.0.0:1", target)
	limited := fmt.Sprintf("127.0.0.1:%d", testkit.FreePort(t))
	for _, c := range []struct {
		network string
		admits  bool
	}{{"192.0.2.0/24", false}, {"127.0.0.0/8", true}} {
		p.wantCommand(0, []string{"applied", limited}, "cloud", "forward", "add", limited, target, "--allow", c.network)
		if err := tryEcho(t.Context(), limited); (err == nil) != c.admits {
			t.Errorf("a caller at a port for %s: %v", c.network, err)
		}
		p.wantCommand(0, []string{"-> absent"}, "cloud", "forward", "rm", limited)
	}
	p.wantCommand(1, []string{"is in the configuration"}, "cloud", "forward", "rm", p.Door("echo"))
	p.wantCommand(0, []string{extra + "  " + target, "forwards", "configuration"}, "cloud", "forward", "ls")
	p.wantCommand(0, []string{"nothing has changed"}, "cloud", "reload")
	traffic.end()
	if failed := traffic.failed.Load(); failed > 0 {
		t.Errorf("%d callers failed", failed)
	}

	p.cloud.Kill()
	p.startCloud()
	p.waitReady(patience)
	if err := tryEcho(t.Context(), extra); err != nil {
		t.Errorf("the port after a restart: %v", err)
	}
	p.wantCommand(0, []string{"-> absent"}, "cloud", "forward", "rm", extra)
	if err := tryEcho(t.Context(), extra); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the removed port: %v", err)
	}
	p.wantCommand(1, []string{"there is no forward"}, "cloud", "forward", "rm", extra)
}

// TestTerminalClosed: SIGHUP of a terminal that is closed stops the process, and SIGHUP of an operator does not.
func TestTerminalClosed(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("this machine has no pseudoterminals: %v", err)
	}
	defer terminal.Close()
	fd := int(terminal.Fd())
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err = errors.Join(err, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)); err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "cloud", "-c", p.Path("cloud.toml"))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, &p.CloudLog, &p.CloudLog
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err = cmd.Start(); err != nil {
		t.Fatal(err)
	}
	tty.Close()
	ended := make(chan error, 1) // one send, which is waited for
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { cmd.Process.Kill() })
	testkit.Within(t, backWithin, "the cloud is ready", func() error { return rig.Ready(p.CloudHealth()) })
	if err = cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	testkit.Within(t, patience, "the cloud reloads", func() error {
		if !strings.Contains(p.CloudLog.String(), "configuration read again") {
			return errors.New("the log does not say so")
		}
		return nil
	})
	terminal.Close()
	select {
	case err = <-ended:
	case <-time.After(atOnce):
		t.Fatal("the cloud outlives its terminal")
	}
	if err != nil || !strings.Contains(p.CloudLog.String(), "the terminal was closed") {
		t.Errorf("the cloud ended with %v, and its log has\n%s", err, tail(p.CloudLog.String()))
	}
}
