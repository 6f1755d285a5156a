package docs

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// docs/network.md lets tunnel and web sites share port 443: join, session, conns and a web site pass a proxy that has
// the page's configuration. With the PROXY protocol, no edge passes.
func TestPort443(t *testing.T) {
	t.Parallel()
	proxies, err := rig.FindProxies(root)
	if err != nil {
		t.Skip(err)
	}
	t.Run("haproxy", func(t *testing.T) {
		t.Parallel()
		s := newShared(t, proxies, haproxy())
		s.works()
		s.edge.Kill()
		s.proxy.Kill()
		s.startProxy("9000 check", "9000 check send-proxy")
		s.startEdge("authentication handshake failed: EOF") // as the page's table has it
	})
	t.Run("nginx", func(t *testing.T) {
		t.Parallel()
		newShared(t, proxies, nginx(proxies)).works()
	})
}

// A proxy is a program that docs/network.md has a configuration for.
type proxy struct {
	name  string
	part  string // a text of the page's configuration
	frame string // the reader's own configuration, with %s for the page's, and WEB for the address of the web sites
	check []string
	run   []string
}

// haproxy has the backend of the web sites from the reader.
func haproxy() proxy {
	return proxy{name: "haproxy", part: "frontend port443",
		frame: "%s\nbackend websites\n    mode tcp\n    timeout connect 5s\n    timeout server 1m\n    server web WEB\n",
		check: []string{"-c", "-f"}, run: []string{"-db", "-f"}}
}

// nginx runs as one process, so it needs no other user.
func nginx(proxies rig.Proxies) proxy {
	return proxy{name: "nginx", part: "ssl_preread on",
		frame: "load_module " + proxies.NginxStream() + ";\ndaemon off;\nmaster_process off;\npid nginx.pid;\nevents {}\n%s",
		check: []string{"-e", "stderr", "-p", ".", "-t", "-c"}, run: []string{"-e", "stderr", "-p", ".", "-c"}}
}

// shared is a cloud and a web site behind a proxy, and an edge.
type shared struct {
	t       *testing.T
	proxies rig.Proxies
	of      proxy
	dir     string

	cloud, port, web, caller string // addresses: grpcport, port 443, the web site, the port of the tcp front door
	proxy, edge              *rig.Process
}

func newShared(t *testing.T, proxies rig.Proxies, of proxy) *shared {
	t.Helper()
	s := &shared{t: t, proxies: proxies, of: of, dir: t.TempDir()}
	for _, address := range []*string{&s.cloud, &s.port, &s.caller} {
		*address = testkit.FreeAddress(t)
	}
	site := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "a web site")
	}))
	site.Config.ErrorLog = log.New(io.Discard, "", 0) // open brings it connections without a handshake
	site.StartTLS()
	t.Cleanup(site.Close)
	s.web = site.Listener.Addr().String()
	return s
}

// localName resolves to 127.0.0.1 everywhere, and is sent as SNI: an address is not.
const localName = "localhost"

// works sets all up as the page says, and asserts that tunnel and web site are there.
func (s *shared) works() {
	s.t.Helper()
	_, cloud, err := net.SplitHostPort(s.cloud)
	_, port, portErr := net.SplitHostPort(s.port)
	if err := errors.Join(err, portErr); err != nil {
		s.t.Fatal(err)
	}
	s.tunnel("", "init", "--address", localName+":"+cloud, "--dir", "cloud")
	s.edit("cloud/cloud.toml", `address = "`+localName+":"+cloud+`"`, `address = "`+localName+":"+port+`"`)
	s.edit("cloud/cloud.toml", "#[mode.cloud.tcp]\n", fmt.Sprintf("[mode.cloud.tcp]\n%q = %q\n", s.caller,
		"edge1/127.0.0.1:"+sshServer(s.t)))
	s.start(program, "msg=starting", "cloud", "-c", "cloud/cloud.toml")
	s.open(s.cloud)
	s.startProxy()
	token := joinToken.FindString(s.tunnel("", "token", "create", "-c", "cloud/cloud.toml", "--node", "edge1"))
	s.tunnel(token, "join", "--dir", "edge")
	s.startEdge("session started")
	testkit.Within(s.t, limit, "a conn to the ssh server", func() error {
		line, err := banner(s.caller)
		if err == nil && line != greeting {
			err = fmt.Errorf("it says %q", line)
		}
		return err
	})
	s.webSite()
}

// webSite asserts that the proxy leads another name to the web site.
func (s *shared) webSite() {
	s.t.Helper()
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		// The certificate is for example.com; which one the server has is not the question.
		TLSClientConfig: &tls.Config{ServerName: "www.example.com", InsecureSkipVerify: true},
	}, Timeout: limit}
	answer, err := client.Get("https://" + s.port)
	if err != nil {
		s.t.Fatal(err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil || string(body) != "a web site" {
		s.t.Errorf("www.example.com on port 443 says %q, %v", body, err)
	}
}

// startProxy starts the proxy with the page's configuration. oldnew are further changes.
func (s *shared) startProxy(oldnew ...string) {
	s.t.Helper()
	blocks, err := All(root)
	if err != nil {
		s.t.Fatal(err)
	}
	var text string
	for _, b := range blocks {
		if b.Page == "docs/network.md" && strings.Contains(b.Text, s.of.part) {
			text = b.Text // the first one; the next is for the PROXY protocol, see test/balancers
			break
		}
	}
	changes := []string{"bind :443", "bind " + s.port, "listen 443", "listen " + s.port, "127.0.0.1:8443", s.web,
		"10.0.0.5:9000", s.cloud, "tunnel.example.com", localName}
	for i := 0; i < len(oldnew); i += 2 {
		text = strings.ReplaceAll(text, oldnew[i], oldnew[i+1])
	}
	text = fmt.Sprintf(strings.ReplaceAll(s.of.frame, "WEB", s.web), strings.NewReplacer(changes...).Replace(text))
	for _, here := range []string{s.port, s.cloud, s.web, localName} {
		if !strings.Contains(text, here) {
			s.t.Fatalf("docs/network.md has no configuration of %s, or it says other addresses than %q", s.of.name, changes)
		}
	}
	if err := os.WriteFile(filepath.Join(s.dir, "proxy.conf"), []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
	command := s.proxyCommand()
	check := exec.Command(command[0], append(append(command[1:], s.of.check...), "proxy.conf")...)
	if out, err := check.CombinedOutput(); err != nil {
		s.t.Fatalf("%s refuses the page's configuration: %v\n%s\n%s", s.of.name, err, out, text)
	}
	s.proxy = s.start(command[0], "", append(append(command[1:], s.of.run...), "proxy.conf")...)
	s.open(s.port)
}

// open waits until an address accepts connections.
func (s *shared) open(address string) {
	s.t.Helper()
	testkit.Within(s.t, limit, address+" to be open", func() error {
		c, err := net.DialTimeout("tcp", address, time.Second)
		if err == nil {
			c.Close()
		}
		return err
	})
}

// proxyCommand is the program of the proxy, which runs from where it was unpacked.
func (s *shared) proxyCommand() []string {
	s.t.Helper()
	env, err := exec.LookPath("env")
	args, argsErr := s.proxies.Command(s.of.name, s.dir)
	if err := errors.Join(err, argsErr); err != nil {
		s.t.Fatal(err)
	}
	return append([]string{env}, args...)
}

// startEdge starts the edge, and waits until its log has a text.
func (s *shared) startEdge(says string) {
	s.t.Helper()
	s.edge = s.start(program, says, "edge", "-c", "edge/edge.toml")
}

// start starts a program that ends with the test, and waits until it prints a text.
func (s *shared) start(path, says string, args ...string) *rig.Process {
	s.t.Helper()
	if path == program {
		env, err := exec.LookPath("env")
		if err != nil {
			s.t.Fatal(err)
		}
		path, args = env, append([]string{"-C", s.dir, program}, args...)
	}
	printed := new(rig.Log)
	p, err := rig.Start(printed, path, args...)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(p.Kill)
	testkit.Within(s.t, limit, fmt.Sprintf("%q says %q", args, says), func() error {
		if !strings.Contains(printed.String(), says) {
			return fmt.Errorf("it says\n%s", printed)
		}
		return nil
	})
	return p
}

// tunnel runs a command of the program to its end, and returns what it prints.
func (s *shared) tunnel(stdin string, args ...string) string {
	s.t.Helper()
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Stdin = s.dir, strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.t.Fatalf("tunnel %s: %v\n%s", args, err, joinToken.ReplaceAllString(string(out), "***"))
	}
	return string(out)
}

// edit changes a file.
func (s *shared) edit(file, old, text string) {
	s.t.Helper()
	file = filepath.Join(s.dir, file)
	b, err := os.ReadFile(file)
	if err == nil && strings.Count(string(b), old) != 1 {
		err = fmt.Errorf("%s does not have %q once", file, old)
	}
	if err == nil {
		err = os.WriteFile(file, []byte(strings.Replace(string(b), old, text, 1)), 0o600)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}
