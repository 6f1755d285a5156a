package hostile

import (
	"archive/zip"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

// notLookedAt are the commands whose output this test does not search, and why.
var notLookedAt = map[string]string{
	"":                      "it shows its help",
	"cloud":                 "its log is an output of its own",
	"edge":                  "its log is an output of its own",
	"cni install":           "it copies a program, and knows no secret",
	"cni uninstall":         "it removes a program, and knows no secret",
	"completion bash":       "its output is always the same",
	"completion fish":       "its output is always the same",
	"completion powershell": "its output is always the same",
	"completion zsh":        "its output is always the same",
	"demo":                  "its secrets are its own, and last as long as it runs",
	"services explain":      "a node keeps names, addresses and ports of Services, and nothing else of them",
	"services ls":           "as services explain",
	"services watch":        "as services explain",
	"version":               "its output is always the same",
}

// everyCommand fails the test for each command in docs/commands.md that neither ran in this test nor is in
// notLookedAt.
func (c *cage) everyCommand() {
	page, err := os.ReadFile("../../docs/commands.md")
	if err != nil {
		c.t.Fatal(err)
	}
	headings := regexp.MustCompile("(?m)^## `tunnel ?(.*)`$").FindAllStringSubmatch(string(page), -1)
	if len(headings) < 20 {
		c.t.Fatalf("docs/commands.md has only %d commands", len(headings))
	}
	for _, h := range headings {
		ran := slices.ContainsFunc(c.ran, func(line string) bool { return strings.HasPrefix(line, h[1]+" ") })
		if !ran && notLookedAt[h[1]] == "" {
			c.t.Errorf("no canary looks at the output of tunnel %s", h[1])
		}
	}
}

// says runs a command in each of its forms.
func (c *cage) says(command, config string, forms []string, args ...string) {
	for _, form := range forms {
		line := slices.Concat(strings.Fields(command), args, []string{"-c", config})
		if form != "" {
			line = append(line, "-o", form)
		}
		c.tell("what tunnel "+command+" says", "", line...)
	}
}

// asks runs the commands that ask a daemon and change nothing, with the configuration of the daemon. name is the
// daemon's.
func (c *cage) asks(name, config string) {
	c.says("status", config, []string{"text", "wide", "json", "yaml"})
	c.says("status", config, []string{"wide", "json"}, "--all")
	c.says("cert status", config, []string{"table", "wide", "json", "yaml"})
	c.says("check", config, []string{"text", "json", "yaml"})
	file := filepath.Join(c.t.TempDir(), "diag.zip")
	c.says("diag", config, []string{""}, "-f", file)
	z, err := zip.OpenReader(file)
	if err != nil {
		c.t.Fatalf("tunnel diag of %s: %v", name, err)
	}
	defer z.Close()
	for _, f := range z.File {
		text, err := unpacked(f)
		if err != nil {
			c.t.Fatal(err)
		}
		c.out.add("diag of "+name, f.Name+": "+text)
	}
}

// unpacked returns a file of a zip file. A profile is packed once more.
func unpacked(f *zip.File) (string, error) {
	r, err := f.Open()
	if err != nil {
		return "", err
	}
	defer r.Close()
	text, err := io.ReadAll(r)
	if err != nil {
		return "", err
	}
	if again, err := gzip.NewReader(bytes.NewReader(text)); err == nil {
		text, err = io.ReadAll(again)
		return string(text), err
	}
	return string(text), nil
}

// operates runs every command of an operator against a cloud and edges that do well, and reads the files that the cloud
// keeps.
func (c *cage) operates() {
	cloud := c.Path("cloud.toml")
	c.asks("the cloud", cloud)
	c.asks("the edge", c.Path("edge.toml"))
	c.says("ls", cloud, []string{"table", "wide", "json", "yaml"})
	c.says("ls", cloud, []string{"wide"}, "--missing")
	c.says("top", cloud, []string{"table", "wide", "json", "yaml"}, "--once")
	c.says("ping", cloud, []string{"text", "json", "yaml"}, rig.Node, "-n", "1")
	for _, target := range []string{c.echo, "127.0.0.1:1", "192.0.2.1:22"} {
		c.says("trace", cloud, []string{"text", "json", "yaml"}, rig.Node, target)
	}
	c.says("forget", cloud, []string{""}, "no-such-node")
	free := testkit.FreeAddress(c.t)
	c.says("forward add", cloud, []string{"json"}, free, rig.Node+"/"+c.echo)
	c.keeps("forwards.toml")
	c.says("forward ls", cloud, []string{"table", "json", "yaml"})
	c.says("forward rm", cloud, []string{"text"}, free)
	c.says("cert renew", cloud, []string{"text", "json"}, "--all")
	c.manyTokens(cloud)
	c.reloads()
	c.says("drain", cloud, []string{"text", "json"}) // refused: there is no other replica
	c.keeps("nodes.json")
	page := &http.Client{Timeout: hangs, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", c.page)
		}}}
	for _, path := range []string{"/", "/data.json", "/page.js"} {
		c.out.add("the status page", fetch(c.t, page, path))
	}
}

// port returns the port of an address.
func port(addr string) string {
	_, p, _ := net.SplitHostPort(addr)
	return p
}

// keeps looks at a file that the cloud writes.
func (c *cage) keeps(name string) {
	c.t.Helper()
	testkit.Within(c.t, readyWithin, "the cloud writes "+name, func() error {
		text, err := os.ReadFile(c.Path(name))
		if err == nil && !strings.Contains(string(text), rig.Node) {
			err = fmt.Errorf("it has no %s: %s", rig.Node, text)
		}
		if err == nil {
			c.out.add("the file "+name, string(text))
		}
		return err
	})
}

// manyTokens makes tokens for several nodes, and looks at what is said of them later.
func (c *cage) manyTokens(cloud string) {
	for _, args := range [][]string{
		{"token", "create", "--nodes-from", "-", "-o", "json", "-c", cloud},
		{"token", "create", "--node", "many-*", "--uses", "2", "-o", "json", "-c", cloud},
	} {
		create := exec.CommandContext(c.t.Context(), program, args...)
		create.Stdin = strings.NewReader("evil5\nevil6\n")
		created, err := create.CombinedOutput() // it prints the tokens, which is what it is for
		tokens := regexp.MustCompile(`tunnel1\.[A-Za-z0-9_-]+`).FindAllString(string(created), -1)
		if err != nil || len(tokens) == 0 {
			c.t.Fatalf("no token: %v: %s", err, created)
		}
		c.ran = append(c.ran, strings.Join(args, " "))
		for _, token := range tokens {
			parsed, err := auth.ParseJoinToken(token)
			if err != nil {
				c.t.Fatal(err)
			}
			c.secrets.add("a join token", token)
			c.secrets.add("the secret of a join token", parsed.Secret.Reveal())
		}
	}
	c.says("token list", cloud, []string{"table", "json", "yaml"})
	c.says("token list", cloud, []string{""}, "--json")
	c.says("token revoke", cloud, []string{""}, "--node", "evil6")
}

// reloads has the daemons read files with other secrets. Secrets that have changed are named, and not shown.
func (c *cage) reloads() {
	password := c.secrets.make("the password of a new proxy")
	for file, change := range map[string]func(text string) string{
		"edge.toml": func(text string) string {
			return strings.Replace(text, `tokenfile = "token"`,
				fmt.Sprintf("token = %q\nproxy = \"http://me:%s@127.0.0.1:1\"", c.Token(rig.Node).Reveal(), password), 1)
		},
		"cloud.toml": func(text string) string {
			return strings.Replace(text, "[mode.cloud.admin]", "[mode.cloud.limits]\nconns = 1000\n[mode.cloud.admin]", 1)
		},
	} {
		good, err := os.ReadFile(c.Path(file))
		if err != nil {
			c.t.Fatal(err)
		}
		now := change(string(good))
		if now == string(good) {
			c.t.Fatalf("%s has not changed", file)
		}
		for _, text := range []string{now, now + "\nnonsense = \"" + c.secrets.make("a token in a wrong key") + "\"\n"} {
			if err = os.WriteFile(c.Path(file), []byte(text), 0o600); err != nil {
				c.t.Fatal(err)
			}
			c.says("reload", c.Path(file), []string{"text", "json", "yaml"})
		}
		if err = os.WriteFile(c.Path(file), good, 0o600); err != nil {
			c.t.Fatal(err)
		}
	}
}

// taps runs `tunnel tap` in each of its forms. When end is called, all of them have seen an exec.
func (c *cage) taps() (end func()) {
	var processes []*rig.Process
	for _, form := range []string{"table", "wide", "json"} {
		p, err := rig.Start(new(rig.Log), program, "tap", "-c", c.Path("cloud.toml"), "-o", form)
		if err != nil {
			c.t.Fatal(err)
		}
		c.t.Cleanup(p.Kill)
		processes = append(processes, p)
	}
	c.ran = append(c.ran, "tap -o json")
	show := func(what, text string, more func()) {
		testkit.Within(c.t, readyWithin, what, func() error {
			more()
			for _, p := range processes {
				if !strings.Contains(p.Log().String(), text) {
					return fmt.Errorf("one shows %q", p.Log().String())
				}
			}
			return nil
		})
	}
	show("the taps show conns", c.echo, func() {
		if conn, err := net.Dial("tcp", c.Door("echo")); err == nil {
			conn.Close()
		}
	})
	return func() {
		show("the taps show an exec", "/exec/ns/pod/c", func() {})
		show("the taps show a CONNECT", "192.0.2.1:22", func() {})
		for _, p := range processes {
			p.Signal(syscall.SIGINT)
			<-p.Done()
			c.out.add("what tunnel tap says", p.Log().String())
		}
	}
}

// connects is callers of the egress front door, with secrets wherever a CONNECT has a place for them.
func (c *cage) connects() {
	const echoed = "bytes through egress"
	for _, target := range []string{c.echo, "127.0.0.1:1", "192.0.2.1:22"} {
		conn, err := attackerDial(c.t.Context(), c.egress)
		if err != nil {
			c.t.Fatal(err)
		}
		answer := exchange(tls.Client(conn, c.victim().callerTLS(true)), "CONNECT "+target+" HTTP/1.1\r\nHost: x\r\n"+
			"Authorization: Bearer "+c.bearer+"\r\nProxy-Authorization: Basic "+
			c.secrets.make("the password of an egress caller")+"\r\n\r\n"+c.secrets.make(echoed))
		c.out.add("what a caller is answered", c.secrets.without(answer, echoed))
	}
}

// proxiedNode is an edge that has a session through a proxy with a password, and is asked, restarted and drained.
func (c *cage) proxiedNode() {
	password := c.secrets.make("the password of a proxy that works")
	proxy := serve(c.t, func(conn net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(conn))
		if err != nil || r.Method != http.MethodConnect {
			return
		}
		to, err := net.Dial("tcp", r.Host)
		if err != nil {
			return
		}
		defer to.Close()
		io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n")
		go io.Copy(to, conn)
		io.Copy(conn, to)
	})
	config := c.Path("behind.toml")
	text := fmt.Sprintf("[mode.edge]\nnode = \"evil0\"\n"+
		"[mode.edge.stream.client]\nservername = %q\ndns = \"tunnel.cloud.io\"\n"+
		"cert = \"ca.crt\"\ntoken = %q\nproxy = \"http://me:%s@%s\"\nlogport = %s\n[mode.edge.admin]\nsocket = \"b.sock\"\n",
		c.GRPC(), c.Token("evil0").Reveal(), password, proxy, port(testkit.FreeAddress(c.t))) + c.edgeTraces()
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
	var log rig.Log
	p, err := rig.Start(&log, program, "edge", "-c", config, "--log-level", "debug")
	if err != nil {
		c.t.Fatal(err)
	}
	defer p.Kill()
	testkit.Within(c.t, readyWithin, "the edge behind a proxy has a session", func() error {
		if !strings.Contains(log.String(), "session started") {
			return fmt.Errorf("its log: %s", log.String())
		}
		return nil
	})
	c.asks("the edge behind a proxy", config)
	restart := exec.CommandContext(c.t.Context(), program, "restart", "-c", config, "-o", "json")
	said, err := restart.CombinedOutput()
	c.out.add("what tunnel restart says", string(said))
	c.ran = append(c.ran, "restart -o json")
	var taken struct{ PID int }
	if json.Unmarshal(said, &taken) != nil || taken.PID == 0 {
		c.t.Fatalf("tunnel restart: %v: %s", err, said)
	}
	defer syscall.Kill(taken.PID, syscall.SIGKILL)
	c.says("drain", config, []string{"json"})
	for _, pid := range []int{taken.PID, p.PID()} {
		syscall.Kill(pid, syscall.SIGQUIT)
	}
	<-p.Done()
	c.out.add("what an edge behind a proxy says", log.String())
}

// rotates replaces the CAs of a cloud of its own.
func (c *cage) rotates() {
	dir, err := os.MkdirTemp("/tmp", "canary") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		c.t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	c.tell("what tunnel init says", "", "init", "--address", testkit.FreeAddress(c.t), "--dir", dir)
	config := filepath.Join(dir, "cloud.toml")
	var log rig.Log
	p, err := rig.Start(&log, program, "cloud", "-c", config, "--log-level", "debug")
	if err != nil {
		c.t.Fatal(err)
	}
	defer p.Kill()
	testkit.Within(c.t, readyWithin, "the new cloud is ready", func() error {
		if !strings.Contains(log.String(), "ready") {
			return fmt.Errorf("its log: %s", log.String())
		}
		return nil
	})
	for range 3 {
		c.secrets.addKeys(c.t, dir)
		c.says("cert rotate-ca", config, []string{""}, "--status")
		c.says("cert rotate-ca", config, []string{""}, "--force")
	}
	c.secrets.addKeys(c.t, dir)
	c.asks("the new cloud", config)
	p.Signal(syscall.SIGQUIT)
	<-p.Done()
	c.out.add("what the new cloud says", log.String())
}
