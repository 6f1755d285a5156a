package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/https"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Commands that cannot reach a running process say what to do.
func TestReloadCannotAsk(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	none := file("none.toml", "[mode.cloud.stream.server]\ngrpcport = 9000\n")
	silent := file("silent.toml", "[mode.cloud.admin]\nsocket = \"silent.sock\"\n")
	broken := file("broken.toml", "x =\n")
	for _, tc := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"reload", "-c", none}, exitConfig, "names no admin socket: write socket = "},
		{[]string{"reload", "-c", silent}, exitRuntime, "nothing listens on " + filepath.Join(dir, "silent.sock")},
		{[]string{"reload", "-c", none, "--socket", "/none.sock"}, exitRuntime, "nothing listens on /none.sock"},
		{[]string{"reload", "-c", broken}, exitConfig, "broken.toml:1: x: not valid TOML"},
		{[]string{"reload", "now"}, exitUsage, "takes only flags"},
		{[]string{"forward", "ls", "-c", none}, exitConfig, "names no admin socket"},
		{[]string{"forward", "add", "-c", silent, "127.0.0.1:1"}, exitUsage, "takes LISTEN and NODE/TARGET, not 1 arguments"},
		{[]string{"forward", "add", "-c", silent, "127.0.0.1:1", "127.0.0.1:1"}, exitUsage, "name the node before"},
		{[]string{"forward", "rm", "-c", silent, "127.0.0.1:1"}, exitRuntime, "nothing listens"},
		{[]string{"forward", "list"}, exitUsage, "unknown command"},
	} {
		var stdout, stderr bytes.Buffer
		code := run(t.Context(), tc.args, &stdout, &stderr)
		if code != tc.code || !strings.Contains(stderr.String(), tc.want) || stdout.Len() > 0 {
			t.Errorf("%q: exit code %d, want %d and %q:\n%s%s", tc.args, code, tc.code, tc.want, &stdout, &stderr)
		}
	}
}

// A SIGHUP that comes while another process takes over goes to that process.
func TestHangupIsPassedOn(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("Windows has no SIGHUP")
	}
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGHUP) // else the new process ignores it if nohup has started the test
	defer signal.Stop(caught)
	next := exec.Command("sleep", "60")
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	defer next.Process.Kill()
	hangups := make(chan os.Signal, 1)
	r := &reloader{log: slog.New(slog.DiscardHandler), hangups: hangups, successor: next.Process.Pid}
	testkit.Run(t, r.Run)
	hangups <- syscall.SIGHUP
	next.Wait() // a signal has ended it
	if state := next.ProcessState.String(); state != "signal: hangup" {
		t.Errorf("the new process has ended: %s", state)
	}
}

// The keys that change while a cloud runs are keys of the file; keys of front doors that are off are not among
// them.
func TestLiveKeys(t *testing.T) {
	var d cloudDoors
	for key, want := range map[string]bool{
		`mode.cloud.tcp."127.0.0.1:1"`:        true,
		`mode.cloud.udpallow."127.0.0.1:1"`:   true,
		"mode.cloud.limits.flowsperaddress":   true,
		"mode.cloud.admin.forwards":           true,
		"mode.cloud.admin.socket":             false,
		"mode.cloud.https.allowfrom":          false, // the door is off
		"mode.cloud.egress.strategies":        false, // the door is off
		"mode.cloud.limits.conns":             false,
		"mode.cloud.stream.server.grpcport":   false,
		"mode.cloud.https.addr.10250":         false,
		"mode.cloud.tcpip":                    false,
		`mode.cloud.https.addr."mode.cloud."`: false,
	} {
		if got := d.live(nil).is(key); got != want {
			t.Errorf("%s changes while the cloud runs: %t, want %t", key, got, want)
		}
	}
}

// The lists of a front door wait for a restart if another key of its table changes.
func TestListsWaitForTheirTable(t *testing.T) {
	d := cloudDoors{https: new(https.FrontDoor), egress: new(egress.FrontDoor)}
	lists := []string{"https.allowfrom", "https.callers", "limits.connsperaddress", "egress.clientnames"}
	for changed, want := range map[string][]bool{
		"":                   {true, true, true, true},
		"https.callers":      {true, true, true, true},
		"limits.conns":       {true, true, true, true},
		"https.addr.10250":   {false, false, false, true},
		"https.clientca":     {false, false, false, true},
		"https.kubelet.cert": {false, false, false, true},
		"egress.clientca":    {true, true, true, false},
	} {
		live := d.live([]conf.Change{{Key: cloudRoot + "https.allowfrom"}, {Key: cloudRoot + changed}})
		for i, key := range lists {
			if got := live.is(cloudRoot + key); got != want[i] {
				t.Errorf("with a change of %q, %s changes while the cloud runs: %t", changed, key, got)
			}
		}
		if waits := strings.Join(live.waits, ""); (waits == "") != want[0] || !want[0] && !strings.Contains(waits, changed) {
			t.Errorf("with a change of %q, the warnings are %q", changed, live.waits)
		}
	}
}

// What reload prints.
func TestPrintReloaded(t *testing.T) {
	cmd := newReloadCommand()
	for want, done := range map[string]*reloaded{
		"cloud: nothing has changed\n": {},
		"cloud: applied\n  a: 1 -> 2\ncloud: these keys need a restart\n  b: absent -> 3\n": {
			Applied: []conf.Change{{Key: "a", Old: "1", New: "2"}}, Restart: []conf.Change{{Key: "b", New: "3"}},
		},
	} {
		var out bytes.Buffer
		cmd.SetOut(&out)
		if err := printReloaded(cmd, "cloud", done, &outputFlag{form: "text"}); err != nil || out.String() != want {
			t.Errorf("printed %q, %v; want %q", out.String(), err, want)
		}
	}
}

// A reload has the warnings of a start, and a new forward those of its own line.
func TestReloadWarns(t *testing.T) {
	metricFiles(t)
	const open = "[mode.cloud.https]\ntls = \"passthrough\"\nlisten = \"0.0.0.0\"\n" +
		"[mode.cloud.https.addr]\n\"10250\" = \"127.0.0.1:10250\"\n"
	if err := os.WriteFile("cloud.toml", []byte(plainCloud+open), 0o600); err != nil {
		t.Fatal(err)
	}
	r := &cloudReloader{file: "cloud.toml"}
	next, err := r.readFile()
	if err != nil || !strings.Contains(strings.Join(next.warnings, "\n"), "accept all source addresses") {
		t.Errorf("%v, warnings %q", err, next.warnings)
	}
}

// Who changes a drained cloud learns that its ports stay closed.
func TestReloadOfADrainedCloud(t *testing.T) {
	var d daemon
	d.mode, d.log = "cloud", slog.New(slog.DiscardHandler)
	r := newReloader(&d, nil, nil, nil)
	r.live = func([]conf.Change) liveKeys { return liveKeys{is: func(string) bool { return true }} }
	warned := func() bool {
		t.Helper()
		next := &candidate{prepare: func(context.Context, func(string) bool) (tunnel.PreparedAll, error) { return nil, nil }}
		done, err := r.applyLocked(t.Context(), "forwards changed", next, nil)
		if err != nil {
			t.Fatal(err)
		}
		return slices.Contains(done.Warnings, drainedWarning)
	}
	if warned() {
		t.Error("a cloud that is not drained warns")
	}
	d.drained.Store(true)
	if !warned() {
		t.Error("a drained cloud does not warn")
	}
}

// A reload has the next handshakes of egress, and the next certificates of nodes, use what the file says now.
func TestReloadStores(t *testing.T) {
	metricFiles(t)
	const (
		tables = "[mode.cloud.egress]\nhttpconnect = [\"tls://127.0.0.1:8090\"]\ncert = \"cert\"\nkey = \"key\"\n" +
			"clientca = \"ca\"\nclientnames = [\"%s\"]\n" +
			"[mode.cloud.join]\nca = \"signer.crt\"\ncakey = \"signer.key\"\nservers = [\"%[1]s.example.com:9000\"]\n"
		file = "cloud.toml"
	)
	write := func(name string) {
		if err := os.WriteFile(file, []byte(plainCloud+fmt.Sprintf(tables, name)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	signer := testca.New(t, "nodes")
	for name, text := range map[string][]byte{"signer.crt": signer.CertPEM(), "signer.key": signer.KeyPEM()} {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("old")
	c, err := conf.LoadCloud(file, environment())
	if err != nil {
		t.Fatal(err)
	}
	w, err := wireCloud(c, slog.New(slog.DiscardHandler), place{})
	if err != nil {
		t.Fatal(err)
	}
	names, servers := &w.doors.egressNames, &w.doors.servers
	check := func(want string) {
		t.Helper()
		if *names.Load() == nil || (*names.Load())[0] != want || !strings.HasPrefix((*servers.Load())[0], want) {
			t.Errorf("callers %q, servers %q; want those of %s", *names.Load(), *servers.Load(), want)
		}
	}
	check("old")
	write("new")
	r := newCloudReloader(w, file, nil, nil)
	next, err := r.readFile()
	if err != nil {
		t.Fatal(err)
	}
	all, err := next.prepare(t.Context(), r.live([]conf.Change{{Key: cloudRoot + "egress.clientca"}}).is)
	if err != nil {
		t.Fatal(err)
	}
	all.Commit()
	if (*names.Load())[0] != "old" {
		t.Errorf("callers are %q although another key of the table needs a restart", *names.Load())
	}
	all, err = next.prepare(t.Context(), r.live(nil).is)
	if err != nil {
		t.Fatal(err)
	}
	all.Commit()
	check("new")
}
