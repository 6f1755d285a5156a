//go:build e2e

package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A verb is one way in which a user reaches a node.
type verb struct {
	name string
	// works asserts all that a user would notice.
	works func(ctx context.Context, t *testing.T, c *cluster)
	// try is the shortest use of it. It returns nil when it worked, and an *exitError when kubectl said by its exit code
	// that it did not.
	try func(ctx context.Context, c *cluster, node string) error
}

var verbs = []verb{
	{"logs", logsWork, tryLogs},
	{"logs -f", followWorks, tryFollow},
	{"exec", execWorks, tryExec},
	{"exec -it", terminalWorks, tryTerminal},
	{"attach", attachWorks, tryAttach},
	{"cp", copyWorks, tryCopy},
	{"port-forward", forwardWorks, tryForward},
	{"node proxy", proxyWorks, tryProxy},
	{"stats", statsWork, tryStats},
}

// top stands apart: what it prints is up to a scrape old, so it follows a change 15 s later at most
// (a scrape each 10 s that may take 5 s), and needs two scrapes before it prints anything.
var top = verb{"top node", topWorks, tryTop}

func pod(node string) string { return "web-" + node }

func want(err error, got, want string) error {
	if err == nil && got != want {
		err = fmt.Errorf("got %q, want %q", got, want)
	}
	return err
}

// within is the context for one use of a verb.
func within(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, d)
}

func tryLogs(ctx context.Context, c *cluster, node string) error {
	out, err := c.kubectl(ctx, "logs", pod(node), "-c", "web", "--tail=1")
	if err == nil && !strings.HasPrefix(out, "tick ") {
		err = fmt.Errorf("logs printed %q", out)
	}
	return err
}

// logsWork compares a log of 1.3 MB with what the container wrote.
func logsWork(ctx context.Context, t *testing.T, c *cluster) {
	eventually(ctx, t, 30*time.Second, "the log to be written", func(ctx context.Context) error {
		out, err := c.kubectl(ctx, "logs", pod("edge1"), "-c", "bulk", "--tail=1")
		return want(err, out, "200000\n")
	})
	out, err := c.kubectl(ctx, "logs", pod("edge1"), "-c", "bulk")
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for i := 1; i <= 200000; i++ {
		all.WriteString(strconv.Itoa(i))
		all.WriteByte('\n')
	}
	if out != all.String() {
		t.Errorf("a log of %d bytes arrived as %d other bytes, ending in %q", all.Len(), len(out), tail(out, 2))
	}
}

// stream starts a kubectl that does not end by itself, waits until it has printed something that matches, and ends it.
func stream(ctx context.Context, c *cluster, match func(out string) bool, args ...string) error {
	p, err := start(c.command(ctx, "kubectl", args...))
	if err != nil {
		return err
	}
	defer p.kill()
	return p.until(ctx, match)
}

func ticks(n int) func(string) bool {
	return func(out string) bool { return strings.Count(out, "tick ") >= n && strings.HasSuffix(out, "\n") }
}

func tryFollow(ctx context.Context, c *cluster, node string) error {
	return stream(ctx, c, ticks(1), "logs", "-f", "--tail=1", pod(node), "-c", "web")
}

// followWorks watches lines arrive as they are written, none missing.
func followWorks(ctx context.Context, t *testing.T, c *cluster) {
	const lines = 4 // the container writes one a second
	p, err := start(c.command(ctx, "kubectl", "logs", "-f", "--tail=1", pod("edge1"), "-c", "web"))
	if err != nil {
		t.Fatal(err)
	}
	defer p.kill()
	ctx, cancel := within(ctx, 15*time.Second)
	defer cancel()
	if err := p.until(ctx, ticks(1)); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := p.until(ctx, ticks(lines)); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > (lines+6)*time.Second {
		t.Errorf("%d lines, a second apart, took %v to arrive", lines-1, took)
	}
	last := 0
	for line := range strings.Lines(p.out.String()) {
		n, err := strconv.Atoi(strings.TrimPrefix(strings.TrimSpace(line), "tick "))
		if err != nil || last != 0 && n != last+1 {
			t.Errorf("line %q after tick %d", line, last)
		}
		last = n
	}
}

func tryExec(ctx context.Context, c *cluster, node string) error {
	out, err := c.kubectl(ctx, "exec", pod(node), "-c", "web", "--", "hostname")
	return want(err, out, pod(node)+"\n")
}

// spdy is the environment in which kubectl upgrades to SPDY, as it did before 1.30 (exec, attach)
// and 1.31 (port-forward). kube-apiserver then passes the upgrade on as it is, with the Host that
// kubectl used for kube-apiserver itself.
var spdy = []string{"KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false", "KUBECTL_PORT_FORWARD_WEBSOCKETS=false"}

func execWorks(ctx context.Context, t *testing.T, c *cluster) {
	for _, node := range c.nodes { // each name leads to its own node
		if err := tryExec(ctx, c, node); err != nil {
			t.Error(err)
		}
	}
	for _, code := range []int{1, 7, 255} {
		_, err := c.kubectl(ctx, "exec", pod("edge1"), "-c", "web", "--", "sh", "-c", fmt.Sprintf("exit %d", code))
		if got, ok := exitCode(err); !ok || got != code {
			t.Errorf("exit %d in the container: kubectl said %v", code, err)
		}
	}

	p, err := start(c.command(ctx, "kubectl", "exec", pod("edge1"), "-c", "web", "--", "sh", "-c",
		"echo out; echo err >&2"))
	if err != nil {
		t.Fatal(err)
	}
	<-p.done
	if out, stderr := p.out.String(), p.stderr.String(); p.err != nil || out != "out\n" || stderr != "err\n" {
		t.Errorf("exec mixed up its streams: stdout %q, stderr %q, %v", out, stderr, p.err)
	}

	for _, node := range c.nodes {
		cmd := c.command(ctx, "kubectl", "exec", pod(node), "-c", "web", "--", "hostname")
		cmd.Env = append(cmd.Env, spdy...)
		out, err := run(cmd, nil)
		if err := want(err, out, pod(node)+"\n"); err != nil {
			t.Errorf("as an older kubectl does it, by SPDY: %v", err)
		}
	}

	in := noise(20 << 20)
	sum := sha256.New()
	out, err := c.kubectlIn(ctx, io.TeeReader(in, sum), "exec", "-i", pod("edge1"), "-c", "web", "--", "sha256sum")
	if err := want(err, out, hex.EncodeToString(sum.Sum(nil))+"  -\n"); err != nil {
		t.Errorf("20 MB of stdin: %v", err)
	}
}

// noise is n bytes that do not compress, the same at each call.
func noise(n int64) io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{'e', '2', 'e'}), n) }

func tryTerminal(ctx context.Context, c *cluster, node string) error {
	term, err := startTerminal(c.command(ctx, "kubectl", "exec", "-it", pod(node), "-c", "web", "--", "sh"), 37, 91)
	if err != nil {
		return err
	}
	defer term.close()
	// The size comes by a stream of its own, perhaps after what is typed; until then there is none, and stty fails.
	if err := term.enter("until stty size | grep '37 91'; do sleep 1; done; exit"); err != nil {
		return err
	}
	return term.until(ctx, printed("37 91"))
}

// printed matches a line of a terminal's output, which echoes what is typed and ends lines in CR LF.
func printed(line string) func(string) bool {
	re := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(line) + `\r?$`)
	return func(out string) bool { return re.MatchString(out) }
}

// terminalWorks looks at the size of the window at the other end, changes it, and leaves with a code.
func terminalWorks(ctx context.Context, t *testing.T, c *cluster) {
	ctx, cancel := within(ctx, 40*time.Second)
	defer cancel()
	term, err := startTerminal(c.command(ctx, "kubectl", "exec", "-it", pod("edge1"), "-c", "web", "--", "sh"), 37, 91)
	if err != nil {
		t.Fatal(err)
	}
	defer term.close()
	// What was typed before there was a shell, or even a connection, is not lost. The window's size
	// comes by another stream, and nothing says which of the two the container sees first.
	if err := errors.Join(term.enter("echo type''d"), term.until(ctx, printed("typed"))); err != nil {
		t.Fatalf("what was typed first: %v", err)
	}
	hasSize := func(size string) {
		t.Helper()
		eventually(ctx, t, 10*time.Second, "the window's size to be "+size, func(ctx context.Context) error {
			ctx, cancel := within(ctx, time.Second)
			defer cancel()
			return errors.Join(term.enter("stty size"), term.until(ctx, printed(size)))
		})
	}
	hasSize("37 91")
	if err := term.resize(20, 60); err != nil {
		t.Fatal(err)
	}
	hasSize("20 60")
	if err := term.enter("exit 3"); err != nil {
		t.Fatal(err)
	}
	if code, _ := exitCode(term.endsWithin(t, 10*time.Second)); code != 3 {
		t.Errorf("exit 3 at the terminal: kubectl said %v", term.err)
	}
}

func tryAttach(ctx context.Context, c *cluster, node string) error {
	return stream(ctx, c, ticks(1), "attach", pod(node), "-c", "web")
}

// attachWorks reads from a container that talks, talks to one that echoes, and sits down at one with a terminal.
func attachWorks(ctx context.Context, t *testing.T, c *cluster) {
	ctx, cancel := within(ctx, 20*time.Second)
	defer cancel()
	if err := stream(ctx, c, ticks(3), "attach", pod("edge1"), "-c", "web"); err != nil {
		t.Error(err)
	}

	cmd := c.command(ctx, "kubectl", "attach", "-i", "-q", pod("edge1"), "-c", "echo")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	p, err := start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer p.kill()
	said := fmt.Sprintf("said at %v\n", time.Now().UnixNano())
	if _, err := io.WriteString(in, said); err != nil {
		t.Fatal(err)
	}
	if err := p.until(ctx, func(out string) bool { return strings.Contains(out, said) }); err != nil {
		t.Errorf("what was typed into the container's stdin did not come back: %v", err)
	}

	term, err := startTerminal(c.command(ctx, "kubectl", "attach", "-it", pod("edge1"), "-c", "shell"), 41, 83)
	if err != nil {
		t.Fatal(err)
	}
	defer term.close()
	eventually(ctx, t, 10*time.Second, "the terminal to answer with its size", func(ctx context.Context) error {
		ctx, cancel := within(ctx, time.Second)
		defer cancel()
		return errors.Join(term.enter("stty size"), term.until(ctx, printed("41 83")))
	})
}

func tryCopy(ctx context.Context, c *cluster, node string) error {
	dir, err := os.MkdirTemp("", "tunnel-e2e")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "passwd")
	if _, err := c.kubectl(ctx, "cp", "-c", "web", pod(node)+":/etc/passwd", file); err != nil {
		return err
	}
	b, err := os.ReadFile(file)
	return want(err, string(b), "root:x:0:0:root:/:/bin/sh\n")
}

// copyWorks copies 100 MB there and back and compares at each end.
func copyWorks(ctx context.Context, t *testing.T, c *cluster) {
	const size = 100 << 20
	dir := t.TempDir()
	there, back := filepath.Join(dir, "there"), filepath.Join(dir, "back")
	f, err := os.Create(there)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(f, sum), noise(size))
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	hash := hex.EncodeToString(sum.Sum(nil))

	began := time.Now()
	if _, err := c.kubectl(ctx, "cp", "-c", "web", there, pod("edge1")+":/tmp/big"); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d MB there: %v", size>>20, time.Since(began).Round(time.Millisecond))
	out, err := c.kubectl(ctx, "exec", pod("edge1"), "-c", "web", "--", "sha256sum", "/tmp/big")
	if err := want(err, out, hash+"  /tmp/big\n"); err != nil {
		t.Errorf("after cp to the pod: %v", err)
	}
	began = time.Now()
	if _, err := c.kubectl(ctx, "cp", "-c", "web", pod("edge1")+":/tmp/big", back); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d MB back: %v", size>>20, time.Since(began).Round(time.Millisecond))
	f, err = os.Open(back)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := want(nil, hashOf(t, f), hash); err != nil {
		t.Errorf("after cp from the pod: %v", err)
	}
}

func hashOf(t *testing.T, r io.Reader) string {
	t.Helper()
	sum := sha256.New()
	if _, err := io.Copy(sum, r); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(sum.Sum(nil))
}

var forwarding = regexp.MustCompile(`Forwarding from (127\.0\.0\.1:\d+) ->`)

// forwardCommand is a port-forward from a free local port to the pod's web server.
func forwardCommand(ctx context.Context, c *cluster, node string) *exec.Cmd {
	return c.command(ctx, "kubectl", "port-forward", "--address=127.0.0.1", "pod/"+pod(node), ":8080")
}

// forward starts a port-forward and returns the local address.
func forward(ctx context.Context, cmd *exec.Cmd) (*process, string, error) {
	p, err := start(cmd)
	if err != nil {
		return nil, "", err
	}
	if err := p.until(ctx, forwarding.MatchString); err != nil {
		p.kill()
		return nil, "", err
	}
	return p, forwarding.FindStringSubmatch(p.out.String())[1], nil
}

func tryForward(ctx context.Context, c *cluster, node string) error {
	p, addr, err := forward(ctx, forwardCommand(ctx, c, node))
	if err != nil {
		return err
	}
	defer p.kill()
	_, body, err := get(ctx, &http.Transport{DisableKeepAlives: true}, "http://"+addr+"/")
	if err = want(err, body, "hello-from-pod\n"); err != nil {
		select { // kubectl tells by its exit code that the pod is lost
		case <-p.done:
			return p.err
		case <-ctx.Done():
			return fmt.Errorf("port-forward goes on without the page: %w", err)
		}
	}
	return nil
}

// forwardWorks fetches a page from each node, and a file of 20 MB.
func forwardWorks(ctx context.Context, t *testing.T, c *cluster) {
	ctx, cancel := within(ctx, 40*time.Second)
	defer cancel()
	for _, node := range c.nodes {
		if err := tryForward(ctx, c, node); err != nil {
			t.Error(err)
		}
	}
	out, err := c.kubectl(ctx, "exec", pod("edge1"), "-c", "web", "--", "sh", "-c",
		"head -c 20000000 /dev/urandom >/www/blob; sha256sum </www/blob")
	if err != nil {
		t.Fatal(err)
	}
	for _, env := range [][]string{nil, spdy} {
		cmd := forwardCommand(ctx, c, "edge1")
		cmd.Env = append(cmd.Env, env...)
		p, addr, err := forward(ctx, cmd)
		if err != nil {
			t.Errorf("port-forward, environment %q: %v", env, err)
			continue
		}
		defer p.kill()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/blob", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		got := hashOf(t, resp.Body)
		resp.Body.Close()
		if err := want(nil, got+"  -\n", out); err != nil {
			t.Errorf("20 MB through port-forward, environment %q: %v", env, err)
		}
	}
}

func raw(ctx context.Context, c *cluster, node, path string) (string, error) {
	return c.kubectl(ctx, "get", "--raw", "/api/v1/nodes/"+node+"/proxy/"+path)
}

func tryProxy(ctx context.Context, c *cluster, node string) error {
	out, err := raw(ctx, c, node, "healthz")
	return want(err, out, "ok")
}

// proxyWorks asks the kubelet for what it knows: its settings, its pods, its metrics, its refusal.
func proxyWorks(ctx context.Context, t *testing.T, c *cluster) {
	for _, node := range c.nodes {
		if err := tryProxy(ctx, c, node); err != nil {
			t.Error(err)
		}
		out, err := raw(ctx, c, node, "pods")
		if err != nil || !strings.Contains(out, `"`+pod(node)+`"`) {
			t.Errorf("the kubelet of %s does not know its pod: %.300q, %v", node, out, err)
		}
	}
	for path, holds := range map[string]string{"configz": `"kubeletconfig"`,
		"metrics/resource": "node_cpu_usage_seconds_total", "metrics": "kubelet_running_pods"} {
		if out, err := raw(ctx, c, "edge1", path); err != nil || !strings.Contains(out, holds) {
			t.Errorf("proxy/%s: %.300q, %v", path, out, err)
		}
	}
	if _, err := raw(ctx, c, "edge1", "no/such/page"); err == nil || !strings.Contains(err.Error(), "NotFound") {
		t.Errorf("a page that the kubelet does not have: want its 404, got %v", err)
	}
}

func tryStats(ctx context.Context, c *cluster, node string) error {
	out, err := raw(ctx, c, node, "stats/summary")
	if err != nil {
		return err
	}
	var s struct{ Node struct{ NodeName string } }
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		return err
	}
	return want(nil, s.Node.NodeName, node)
}

func statsWork(ctx context.Context, t *testing.T, c *cluster) {
	for _, node := range c.nodes {
		if err := tryStats(ctx, c, node); err != nil {
			t.Error(err)
		}
	}
	out, err := raw(ctx, c, "edge1", "stats/summary")
	if err != nil {
		t.Fatal(err)
	}
	var s struct {
		Pods []struct{ PodRef struct{ Name string } }
	}
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		t.Fatal(err)
	}
	for _, p := range s.Pods {
		if p.PodRef.Name == pod("edge1") {
			return
		}
	}
	t.Errorf("no statistics of pod %s: %+v", pod("edge1"), s)
}

func tryTop(ctx context.Context, c *cluster, node string) error {
	out, err := c.kubectl(ctx, "top", "node", node, "--no-headers")
	if err == nil && !regexp.MustCompile(`^`+node+` +\d+m +\d+% +[1-9]\d*Mi +\d+%`).MatchString(out) {
		err = fmt.Errorf("top printed %q", out)
	}
	return err
}

func topWorks(ctx context.Context, t *testing.T, c *cluster) {
	for _, node := range c.nodes {
		eventually(ctx, t, 40*time.Second, "top node "+node, func(ctx context.Context) error { return tryTop(ctx, c, node) })
	}
}
