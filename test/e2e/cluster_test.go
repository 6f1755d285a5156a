//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A cluster is the Kubernetes of test/cluster. Its fields are set once.
type cluster struct {
	scripts  string // test/cluster
	home     string // what is built and running
	nodes    []string
	settings []string // NAME=VALUE, of test/cluster/lib/common.sh
}

func (c *cluster) path(file string) string { return filepath.Join(c.home, "run", file) }

// clusterHome is where what is built and running of the cluster is, as test/cluster/lib/common.sh has it.
func clusterHome(t testing.TB) string {
	t.Helper()
	if home := os.Getenv("CLUSTER_HOME"); home != "" {
		return home
	}
	cache, err := os.UserCacheDir() // $XDG_CACHE_HOME or ~/.cache
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(cache, "tunnel-e2e")
}

// upCluster brings a cluster up and takes it down when the test ends, however it ends. settings are those of
// test/cluster/lib/common.sh that differ from two nodes behind NAT.
func upCluster(ctx context.Context, t testing.TB, settings ...string) *cluster {
	t.Helper()
	scripts, err := filepath.Abs("../cluster")
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{scripts: scripts, home: clusterHome(t), nodes: []string{"edge1", "edge2"}, settings: settings}
	if err := claimCluster(c.home); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Not under ctx: it has to run after a Ctrl-C, too.
		if err := c.script(context.Background(), "down.sh"); err != nil {
			t.Errorf("taking the cluster down: %v", err)
		}
		t.Logf("all logs are in %s", filepath.Join(c.home, "logs"))
	})
	if err := c.script(ctx, "up.sh"); err != nil {
		t.Fatalf("bringing the cluster up (make e2e-build prepares it): %v", err)
	}
	return c
}

// claim is locked until this process ends; nil: not yet.
var claim *os.File

// claimCluster keeps other processes from the cluster: two runs would take it down under each other.
func claimCluster(home string) error {
	if claim != nil {
		return nil
	}
	if err := os.MkdirAll(home, 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(home, "run.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return fmt.Errorf("another run of make e2e or make conformance has the cluster, wait for its end: %s: %w",
			f.Name(), err)
	}
	claim = f
	return nil
}

// script runs one of test/cluster's commands.
func (c *cluster) script(ctx context.Context, name string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	cmd := command(ctx, filepath.Join(c.scripts, name), args...)
	cmd.Env = append(os.Environ(), "CLUSTER_HOME="+c.home, "MODE=nat", "NODES="+strings.Join(c.nodes, " "))
	cmd.Env = append(cmd.Env, c.settings...)
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) } // up.sh cleans up after itself
	cmd.WaitDelay = 30 * time.Second
	_, err := run(cmd, nil)
	return err
}

// kubernetes returns the version of kube-apiserver, such as v1.34.4.
func (c *cluster) kubernetes(ctx context.Context, t *testing.T) string {
	t.Helper()
	out, err := c.kubectl(ctx, "get", "--raw", "/version")
	if err != nil {
		t.Fatal(err)
	}
	var version struct{ GitVersion string }
	if err := json.Unmarshal([]byte(out), &version); err != nil {
		t.Fatal(err)
	}
	return version.GitVersion
}

// command is a command on the machine that runs the control plane, with the cluster's kubectl first on PATH.
func (c *cluster) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	if !strings.Contains(name, "/") {
		name = filepath.Join(c.home, "bin", name)
	}
	cmd := command(ctx, name, args...)
	cmd.Env = mark(c.path(""), "KUBECONFIG="+c.path("admin.kubeconfig"), "KUBECACHEDIR="+c.path("kubecache"))
	return cmd
}

// inside is a command within a node.
func (c *cluster) inside(ctx context.Context, node string, args ...string) *exec.Cmd {
	cmd := c.command(ctx, filepath.Join(c.scripts, "innode.sh"), append([]string{node}, args...)...)
	cmd.Env = append(cmd.Env, "CLUSTER_HOME="+c.home)
	return cmd
}

// kubectl runs kubectl to its end and returns what it printed on stdout.
func (c *cluster) kubectl(ctx context.Context, args ...string) (string, error) {
	return run(c.command(ctx, "kubectl", args...), nil)
}

// kubectlIn is kubectl with an input.
func (c *cluster) kubectlIn(ctx context.Context, stdin io.Reader, args ...string) (string, error) {
	return run(c.command(ctx, "kubectl", args...), stdin)
}

// coreDNS is where kube-apiserver and metrics-server ask for the addresses of the nodes.
const coreDNS = "127.0.77.53:53"

// apply creates the objects of a file in testdata, with each pair of substitutions made.
func (c *cluster) apply(ctx context.Context, file string, oldnew ...string) error {
	b, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		return err
	}
	_, err = c.kubectlIn(ctx, strings.NewReader(strings.NewReplacer(oldnew...).Replace(string(b))), "apply", "-f", "-")
	return err
}

// leaf adds a certificate of the cluster's CA.
func (c *cluster) leaf(ctx context.Context, t *testing.T, args ...string) {
	t.Helper()
	if _, err := run(c.command(ctx, "pki", append([]string{"leaf", "-dir", c.path("pki")}, args...)...), nil); err != nil {
		t.Fatal(err)
	}
}

// getInside makes an HTTP request from within a node's network namespace, where nothing outside can reach.
func (c *cluster) getInside(ctx context.Context, node, url string) (int, string, error) {
	tr := &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return dialInside(ctx, "/run/netns/te2e-"+node, network, addr)
		}}
	return get(ctx, tr, url)
}

func get(ctx context.Context, tr *http.Transport, url string) (int, string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, string(b), err
}

// dialInside opens a connection from another network namespace: a socket belongs to the namespace
// of the thread that made it.
func dialInside(ctx context.Context, netns, network, addr string) (net.Conn, error) {
	return openInside(netns, func() (net.Conn, error) {
		// One literal address, so that the dialer stays in this goroutine.
		return (&net.Dialer{FallbackDelay: -1}).DialContext(ctx, network, addr)
	})
}

// openInside opens a socket in another network namespace.
func openInside[Socket any](netns string, open func() (Socket, error)) (Socket, error) {
	type result struct {
		socket Socket
		err    error
	}
	done := make(chan result, 1) // one send, and nobody may be left to take it
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine and takes the namespace along
		ns, err := os.Open(netns)
		if err != nil {
			done <- result{err: err}
			return
		}
		defer ns.Close()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- result{err: fmt.Errorf("entering %s: %w", netns, err)}
			return
		}
		socket, err := open()
		done <- result{socket, err}
	}()
	r := <-done
	return r.socket, r.err
}

// logs are the files that explain a failure, the most telling first.
func (c *cluster) logs() []string {
	return []string{"cloud", account + "-1", account + "-2", account + "-3", account + "-4", account + "-5", "edge1",
		"edge2", "coredns", "apiserver", "metrics-server", "edge1-kubelet"}
}

// step is t.Run; when the step fails, it prints what the daemons logged meanwhile.
func (c *cluster) step(t *testing.T, name string, f func(t *testing.T)) bool {
	t.Helper()
	return t.Run(name, func(t *testing.T) {
		from := make(map[string]int64)
		for _, l := range c.logs() {
			if fi, err := os.Stat(c.path("log/" + l + ".log")); err == nil {
				from[l] = fi.Size()
			}
		}
		t.Cleanup(func() {
			if !t.Failed() {
				return
			}
			for _, l := range c.logs() {
				if s := c.logged(l, from[l]); s != "" {
					t.Logf("%s.log, meanwhile:\n%s", l, tail(s, 30))
				}
			}
		})
		f(t)
	})
}

// logged returns what was written to a log since offset, the last 64 KiB at most.
func (c *cluster) logged(name string, offset int64) string {
	f, err := os.Open(c.path("log/" + name + ".log"))
	if err != nil {
		return ""
	}
	defer f.Close()
	if fi, err := f.Stat(); err == nil {
		offset = max(offset, fi.Size()-64<<10)
	}
	b, err := io.ReadAll(io.NewSectionReader(f, offset, 64<<10))
	if err != nil {
		return err.Error()
	}
	return withoutInfo(string(b))
}

var info = regexp.MustCompile(`(?m)^I\d{4} .*\n`)

// withoutInfo leaves out what Kubernetes logs at its level I.
func withoutInfo(log string) string { return info.ReplaceAllString(log, "") }
