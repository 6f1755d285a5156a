package join

import (
	"bufio"
	"context"
	"encoding/base64"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
)

// connectProxy is an HTTP proxy that wants a password. It counts its connections.
func connectProxy(t *testing.T, user, password string) (addr string, passed *atomic.Int64) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	passed = new(atomic.Int64)
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
	return testkit.ServeOn(t, ln, func(_ context.Context, c net.Conn) {
		in := bufio.NewReader(c)
		r, err := http.ReadRequest(in)
		switch {
		case err != nil:
			return
		case r.Header.Get("Proxy-Authorization") != basic:
			io.WriteString(c, "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=\"x\"\r\n\r\n")
			return
		}
		out, err := net.Dial("tcp", r.RequestURI)
		if err != nil {
			return
		}
		defer out.Close()
		passed.Add(1)
		io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		go func() {
			io.Copy(out, in)
			out.Close()
		}()
		io.Copy(c, out)
	}), passed
}

// TestJoinThroughProxy: what join has used to reach the cloud is what the edge uses, and what the next join uses. The
// password is in a file of its own.
func TestJoinThroughProxy(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	s.start()
	const password = "canary-4711"
	s.secrets = append(s.secrets, password)
	addr, passed := connectProxy(t, "me", password)
	url := "http://me:" + password + "@" + addr
	file := filepath.Join(t.TempDir(), "url")
	if err := os.WriteFile(file, []byte(url+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, token := s.create("edge1")
	dir := filepath.Join(t.TempDir(), "edge")
	s.want(1, s.join(token, dir, "--proxy", "http://"+addr),
		"FAIL  proxy: ", "407 Proxy Authentication Required", "--proxy-file")
	s.want(2, s.join(token, dir, "--proxy", url), "a password on a command line")
	wantSteps(t, s.want(0, s.join(token, dir, "--proxy-file", file)), "proxy", "tls", "clock", "token", "files")
	wantMode(t, filepath.Join(dir, "proxy"), 0o600)
	config, err := os.ReadFile(filepath.Join(dir, "edge.toml"))
	if err != nil || !strings.Contains(string(config), "\nproxyfile = \"proxy\"\n") ||
		strings.Contains(string(config), password) {
		t.Errorf("%v\n%s", err, config)
	}
	before := passed.Load()
	edge := s.edge(dir)
	edge.waitReady()
	testkit.Within(t, soon, "the edge's log names the proxy",
		func() error { return says(&edge.log, "through proxy "+addr) })
	if passed.Load() == before {
		t.Errorf("the edge does not use the proxy:\n%s", edge.log.String())
	}

	_, token = s.create("edge1")
	before = passed.Load()
	s.want(0, s.join(token, dir), "edge.toml (as it was)", "through proxy "+addr)
	if passed.Load() == before {
		t.Error("the second join does not use the proxy of edge.toml")
	}
	_, token = s.create("edge1")
	s.want(1, s.join(token, dir, "--proxy", "none"), "FAIL  files: ", "does not edit it", "the token was not sent")

	for name, tt := range map[string]struct {
		flags []string
		line  string
	}{
		"edge2": {[]string{"--proxy", "none"}, "\nservername = \"" + s.address + "\"\nproxy = \"none\"\n"},
		"edge3": {
			[]string{"--server", "127.0.0.1:1", "--server", s.address},
			"\nservers = [\"127.0.0.1:1\", \"" + s.address + "\"]\ndns = ",
		},
		"edge4": {nil, "\nservername = \"" + s.address + "\"\ndns = "},
	} {
		_, token := s.create(name)
		dir := filepath.Join(t.TempDir(), "edge")
		s.want(0, s.join(token, dir, tt.flags...))
		config, err := os.ReadFile(filepath.Join(dir, "edge.toml"))
		if err != nil || !strings.Contains(string(config), tt.line) {
			t.Errorf("%s: %v\n%s\nwant %q", name, err, config, tt.line)
		}
	}
	_, token = s.create("edge5")
	for _, flags := range [][]string{
		{"--server", "nonsense"}, {"--proxy", "ftp://x"}, {"--proxy-ca", "/nowhere"}, {"--proxy-file", "/nowhere"},
	} {
		s.want(2, s.join(token, filepath.Join(t.TempDir(), "edge"), flags...), flags[0])
	}
}
