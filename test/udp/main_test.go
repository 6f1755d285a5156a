package udp

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// program is the program under test.
var program string

// patience bounds every wait.
const patience = 20 * time.Second

func TestMain(m *testing.M) { os.Exit(buildAndRun(m)) }

// buildAndRun builds the program and runs the tests. The program belongs to the module of the
// repository, not to this one.
func buildAndRun(m *testing.M) (exitCode int) {
	dir, err := os.MkdirTemp("", "tunnel-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	program = filepath.Join(dir, "tunnel")
	build := exec.Command("go", "build", "-trimpath", "-tags=grpcnotrace", "-o", program, "./cmd/tunnel")
	build.Dir, build.Env = filepath.Join("..", ".."), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "building the program: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// ports is a tunnel with a UDP port. At the end of the test, neither cloud nor edge may have dropped a
// datagram for another reason than those in may.
type ports struct {
	t    *testing.T
	pair *rig.Pair
	door string // where callers send
	may  []string
}

// congestion are the reasons for drops that tell a sender to slow down. QUIC and TCP send more until
// datagrams are lost.
func congestion() []string { return []string{"full", "late", "receive"} }

// forward starts a cloud and an edge whose UDP port leads to a target.
func forward(t *testing.T, target string, may ...string) *ports {
	t.Helper()
	door := testkit.FreeAddress(t)
	pair, err := rig.NewPair(rig.Config{
		Binary: program, Dir: t.TempDir(), Debug: testing.Verbose(),
		Cloud: fmt.Sprintf("\n[mode.cloud.udp]\n%q = %q\n", door, rig.Node+"/"+target),
	})
	if err != nil {
		t.Fatal(err)
	}
	p := &ports{t: t, pair: pair, door: door, may: may}
	for _, start := range []func() (*rig.Process, error){pair.StartCloud, pair.StartEdge} {
		process, err := start()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(process.Kill)
	}
	testkit.Within(t, patience, "the edge has a session", func() error { return rig.Ready(pair.EdgeHealth()) })
	t.Cleanup(p.nothingIsLost)
	return p
}

// late returns how many datagrams have waited too long for a processor.
func (p *ports) late() (n int) {
	for _, health := range []string{p.pair.CloudHealth(), p.pair.EdgeHealth()} {
		all, err := rig.Metrics(health)
		if err != nil {
			p.t.Error(err)
		}
		n += int(all[`tunnel_udp_dropped_total{reason="late"}`])
	}
	return n
}

func (p *ports) nothingIsLost() {
	for side, health := range map[string]string{"cloud": p.pair.CloudHealth(), "edge": p.pair.EdgeHealth()} {
		all, err := rig.Metrics(health)
		if err != nil {
			p.t.Error(err)
		}
		carried := 0.0
		for name, n := range all {
			if reason, ok := strings.CutPrefix(name, `tunnel_udp_dropped_total{reason="`); ok && n != 0 {
				p.t.Logf("%s: %s is %v", side, name, n)
				if !slices.Contains(p.may, strings.TrimSuffix(reason, `"}`)) {
					p.t.Errorf("%s: %s is %v", side, name, n)
				}
			}
			if strings.HasPrefix(name, "tunnel_udp_datagrams_total") {
				carried += n
			}
		}
		if carried == 0 {
			p.t.Errorf("no datagram went through the %s", side)
		}
	}
	if p.t.Failed() {
		p.t.Logf("log of the cloud:\n%s\nlog of the edge:\n%s", p.pair.CloudLog.String(), p.pair.EdgeLog.String())
	}
}

// needs returns the path of a program of Debian.
func needs(t *testing.T, name string) string {
	t.Helper()
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/usr/local/sbin") {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path
		}
	}
	t.Fatalf("%s is missing: make udp installs it", name)
	return ""
}

// serve runs a server until the test ends.
func serve(t *testing.T, path string, args ...string) {
	t.Helper()
	cmd := exec.Command(path, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("%s says:\n%s", path, out.String())
		}
	})
}

// output runs a client and returns what it prints.
func output(t *testing.T, path string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.Command(path, args...)
	timer := time.AfterFunc(patience, func() { cmd.Process.Kill() })
	defer timer.Stop()
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s %s: %w\n%s", path, strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// write writes a file of the test and returns its path.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// split returns host and port of an address.
func split(t *testing.T, addr string) (host, port string) {
	t.Helper()
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	return host, port
}
