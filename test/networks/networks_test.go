package networks

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

const (
	// soon is for what happens without waiting for anything, on a busy machine.
	soon = 30 * time.Second
	// password is the proxies'. It must show in no log and in no file but the one for it.
	password = "canary-4711"
	// payload passes through the tunnel in both directions. It must show in no log of a box.
	payload = "canary-payload-0815"
	// leastOfDirect is the part of the speed of the row "directly" that every other row must reach. The box, cloud,
	// edge, caller and target share the processors, so this is far from what the box costs on a machine of its own.
	leastOfDirect = 0.3
)

// program is the binary under test.
var program string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "tunnel-networks-")
	if err == nil {
		defer os.RemoveAll(dir)
		program, err = rig.Build(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// isWhole reports whether `make networks` runs the tests: all boxes must be there, and the long parts run.
func isWhole() bool { return os.Getenv("TUNNEL_NETWORKS") != "" }

// site is a cloud, and a folder for an edge that is to reach it.
type site struct {
	t             *testing.T
	dir           string // of everything
	grpc, web     string // ports of the cloud
	door          string // of the cloud, to target
	target        testkit.Target
	health        string // of the edge
	token         string // the join token
	log           rig.Log
	edgeLog       rig.Log
	boxes         rig.Log
	ca            *auth.CA // of boxes
	caFile        string
	cloud, edge   *rig.Process
	between       []*rig.Process // boxes
	boxCrt, boxKy string         // files: the certificate of boxes
}

// newSite starts a cloud that init has made, and makes a join token.
func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{
		t: t, dir: t.TempDir(), target: testkit.NewTarget(t), grpc: testkit.FreeAddress(t), web: testkit.FreeAddress(t),
		door: testkit.FreeAddress(t), health: testkit.FreeAddress(t),
	}
	// squid writes as another user, who must also be able to enter the folder above.
	if err := errors.Join(os.Chmod(filepath.Dir(s.dir), 0o755), os.Chmod(s.dir, 0o777)); err != nil {
		t.Fatal(err)
	}
	s.certify()
	cloud := filepath.Join(s.dir, "cloud")
	s.tunnel("", nil, "init", "--address", s.grpc, "--dir", cloud)
	config := filepath.Join(cloud, "cloud.toml")
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	const server = "[mode.cloud.stream.server]\n"
	if !strings.Contains(string(text), server) {
		t.Fatalf("cloud.toml has no %q:\n%s", server, text)
	}
	more := strings.Replace(string(text), server, server+fmt.Sprintf("websocket = %q\n", s.web), 1) +
		fmt.Sprintf("\n[mode.cloud.tcp]\n%q = %q\n", s.door, "edge1/"+s.target.Address())
	if err = os.WriteFile(config, []byte(more), 0o600); err != nil {
		t.Fatal(err)
	}
	s.cloud = s.start(&s.log, program, "cloud", "-c", config)
	s.token = s.tunnel("", nil, "token", "create", "-c", config, "--node", "edge1")
	s.token = regexp.MustCompile(`tunnel1\.[A-Za-z0-9_-]+`).FindString(s.token)
	for _, addr := range []string{s.grpc, s.web} {
		s.listens(addr)
	}
	t.Cleanup(func() {
		for what, log := range map[string]*rig.Log{"cloud": &s.log, "edge": &s.edgeLog, "box": &s.boxes} {
			if t.Failed() {
				t.Logf("log of the %s:\n%s", what, log)
			}
			if what != "box" && strings.Contains(log.String(), password) {
				t.Errorf("the log of the %s shows the proxy's password", what)
			}
		}
	})
	return s
}

// certify makes the certificate of boxes, and its CA.
func (s *site) certify() {
	s.t.Helper()
	var err error
	if s.ca, err = auth.NewCA("box", time.Hour); err != nil {
		s.t.Fatal(err)
	}
	cert, key, err := s.ca.Issue(auth.Leaf{CommonName: "box", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Server: true})
	if err != nil {
		s.t.Fatal(err)
	}
	s.caFile = s.write("box-ca.crt", string(s.ca.CertPEM()))
	s.boxCrt, s.boxKy = s.write("box.crt", string(cert)), s.write("box.key", string(key))
	s.write("box.pem", string(cert)+string(key))
}

// write writes a file of the site, and returns its path.
func (s *site) write(name, text string) string {
	s.t.Helper()
	path := filepath.Join(s.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		s.t.Fatal(err)
	}
	return path
}

// start starts a program, which ends with the test.
func (s *site) start(log *rig.Log, path string, args ...string) *rig.Process {
	s.t.Helper()
	p, err := rig.Start(log, path, args...)
	if err != nil {
		s.t.Fatal(err)
	}
	if log == &s.boxes {
		s.between = append(s.between, p)
	}
	s.t.Cleanup(func() {
		if p.Alive() {
			syscall.Kill(-p.PID(), syscall.SIGKILL) // the group: boxes have workers
		}
		p.Kill()
	})
	return p
}

// listens waits until something listens on an address.
func (s *site) listens(addr string) {
	s.t.Helper()
	testkit.Within(s.t, soon, addr+" listens", func() error {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err
	})
}

// tunnel runs a command of the program, and returns its output.
func (s *site) tunnel(stdin string, env []string, args ...string) string {
	s.t.Helper()
	out, err := s.try(stdin, env, args...)
	if err != nil {
		s.t.Fatalf("tunnel %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

func (s *site) try(stdin string, env []string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdin, cmd.Env = strings.NewReader(stdin), append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if strings.Contains(string(out), password) {
		s.t.Errorf("tunnel %s shows the proxy's password:\n%s", args[0], out)
	}
	return string(out), err
}

// join joins with flags, starts the edge, and waits for its session. It returns what join has said.
func (s *site) join(flags ...string) string {
	s.t.Helper()
	dir := filepath.Join(s.dir, "edge")
	said := s.tunnel(s.token+"\n", nil, append([]string{"join", "--dir", dir}, flags...)...)
	config := filepath.Join(dir, "edge.toml")
	text, err := os.ReadFile(config)
	if err != nil {
		s.t.Fatal(err)
	}
	if strings.Contains(string(text), password) {
		s.t.Errorf("edge.toml holds the proxy's password:\n%s", text)
	}
	_, port, _ := net.SplitHostPort(s.health)
	now := strings.Replace(string(text), "#logport = 7010", "logport = "+port, 1)
	if err = os.WriteFile(config, []byte(now), 0o600); err != nil {
		s.t.Fatal(err)
	}
	s.edge = s.start(&s.edgeLog, program, "edge", "-c", config)
	testkit.Within(s.t, soon, "the edge has a session", func() error { return rig.Ready(s.health) })
	return said
}

// work is the processor time of processes.
type work struct {
	tunnel time.Duration // cloud and edge
	boxes  time.Duration
	ends   time.Duration // caller and target: this process
}

// work returns the processor time that the processes of the site have used until now.
func (s *site) work() (w work) {
	s.t.Helper()
	sum := func(all ...*rig.Process) (sum time.Duration) {
		for _, p := range all {
			used, err := p.CPU()
			if err != nil {
				s.t.Fatal(err)
			}
			sum += used
		}
		return sum
	}
	var self syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &self); err != nil {
		s.t.Fatal(err)
	}
	return work{
		tunnel: sum(s.cloud, s.edge), boxes: sum(s.between...),
		ends: time.Duration(self.Utime.Nano() + self.Stime.Nano()),
	}
}

// since returns the processor time that was used after before.
func (w work) since(before work) work {
	return work{w.tunnel - before.tunnel, w.boxes - before.boxes, w.ends - before.ends}
}

// all returns the processor time of all processes.
func (w work) all() time.Duration { return w.tunnel + w.boxes + w.ends }

// box is a program in between. It is installed under one of names.
func (s *site) box(names ...string) (path string) {
	s.t.Helper()
	for _, name := range names {
		for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/usr/local/sbin") {
			if info, err := os.Stat(filepath.Join(dir, name)); err == nil && !info.IsDir() {
				return filepath.Join(dir, name)
			}
		}
	}
	if isWhole() {
		s.t.Fatalf("%s is not installed", names[0])
	}
	s.t.Skipf("%s is not installed: make networks installs it", names[0])
	return ""
}

// configure writes the configuration of a box. {Dir}, {Web} and {Addr} in the text are the folder of the site, the
// cloud's address for WebSockets, and an address for the box, which it returns.
func (s *site) configure(name, text string) (file, addr string) {
	s.t.Helper()
	addr = testkit.FreeAddress(s.t)
	_, port, _ := net.SplitHostPort(addr)
	values := strings.NewReplacer("{Dir}", s.dir, "{Web}", s.web, "{Addr}", addr, "{Port}", port)
	return s.write(name, values.Replace(text)), addr
}

// squid starts squid, with a password or without, and returns its address.
func (s *site) squid(withPassword bool) (addr string) {
	path := s.box("squid")
	access := "http_access allow localhost\n"
	if withPassword {
		helper := s.write("auth.sh", "#!/bin/sh\nwhile read -r u p; do\n"+
			"if [ \"$u $p\" = 'me "+password+"' ]; then echo OK; else echo ERR; fi\ndone\n")
		if err := os.Chmod(helper, 0o755); err != nil {
			s.t.Fatal(err)
		}
		access = `auth_param basic program {Dir}/auth.sh
auth_param basic children 1
acl known proxy_auth REQUIRED
http_access allow known
`
	}
	config, addr := s.configure("squid.conf", `http_port {Addr}
pid_filename none
cache deny all
cache_log {Dir}/squid.log
access_log stdio:{Dir}/access.log
coredump_dir {Dir}
visible_hostname box
shutdown_lifetime 0 seconds
`+access+"http_access deny all\n")
	s.start(&s.boxes, path, "-N", "-f", config)
	s.listens(addr)
	return addr
}

// dante starts dante, a SOCKS5 proxy.
func (s *site) dante() (addr string) {
	path := s.box("danted", "sockd")
	config, addr := s.configure("danted.conf", `logoutput: {Dir}/access.log
internal: 127.0.0.1 port = {Port}
external: 127.0.0.1
clientmethod: none
socksmethod: none
user.privileged: root
user.unprivileged: nobody
client pass {
	from: 0.0.0.0/0 to: 0.0.0.0/0
	log: connect
}
socks pass {
	from: 0.0.0.0/0 to: 0.0.0.0/0
	log: connect
}
`)
	s.start(&s.boxes, path, "-f", config)
	s.listens(addr)
	return addr
}

// nginx starts nginx as an HTTP ingress that closes silent WebSockets after timeout.
func (s *site) nginx(timeout string) (addr string) {
	path := s.box("nginx")
	config, addr := s.configure("nginx.conf", `daemon off;
master_process off;
pid {Dir}/nginx.pid;
error_log {Dir}/nginx.log;
events {}
http {
	access_log {Dir}/access.log;
	client_body_temp_path {Dir}/body;
	proxy_temp_path {Dir}/proxied;
	fastcgi_temp_path {Dir}/fastcgi;
	uwsgi_temp_path {Dir}/uwsgi;
	scgi_temp_path {Dir}/scgi;
	server {
		listen {Addr} ssl;
		ssl_certificate {Dir}/box.crt;
		ssl_certificate_key {Dir}/box.key;
		location /tunnel {
			proxy_pass http://{Web};
			proxy_http_version 1.1;
			proxy_set_header Upgrade $http_upgrade;
			proxy_set_header Connection "upgrade";
			proxy_buffer_size 64k;
			proxy_buffers 8 64k;
			proxy_read_timeout `+timeout+`;
		}
	}
}
`)
	s.start(&s.boxes, path, "-c", config, "-p", s.dir)
	s.listens(addr)
	return addr
}

// haproxy starts HAProxy as an HTTP ingress that closes silent WebSockets after timeout.
func (s *site) haproxy(timeout string) (addr string) {
	path := s.box("haproxy")
	config, addr := s.configure("haproxy.cfg", `global
	tune.bufsize 65536
defaults
	mode http
	log stdout format raw local0
	option httplog
	timeout connect 5s
	timeout client 60s
	timeout server 60s
	timeout tunnel `+timeout+`
frontend ingress
	bind {Addr} ssl crt {Dir}/box.pem
	default_backend cloud
backend cloud
	server cloud1 {Web}
`)
	s.start(&s.boxes, path, "-db", "-f", config)
	s.listens(addr)
	return addr
}

// carries checks a conn like an exec (small bytes to and fro), and bulk each way.
func (s *site) carries(bulk int) (up, down time.Duration) {
	s.t.Helper()
	dial := func() (caller net.Conn, target *net.TCPConn) {
		c, err := net.Dial("tcp", s.door)
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() { c.Close() })
		return c, s.target.Next(s.t)
	}
	caller, target := dial()
	for i := range 100 {
		b := []byte{byte(i)}
		for _, way := range [][2]net.Conn{{caller, target}, {target, caller}} {
			way[0].Write(b)
			way[1].SetReadDeadline(time.Now().Add(soon))
			if _, err := io.ReadFull(way[1], b); err != nil || b[0] != byte(i) {
				s.t.Fatalf("byte %d: %v", i, err)
			}
		}
	}
	for _, way := range [][2]net.Conn{{caller, target}, {target, caller}} {
		io.WriteString(way[0], payload)
		got := make([]byte, len(payload))
		if _, err := io.ReadFull(way[1], got); err != nil || string(got) != payload {
			s.t.Fatalf("%q, %v; want %q", got, err, payload)
		}
	}
	measure := func(from, to net.Conn) time.Duration {
		began := time.Now()
		sent := make(chan error, 1)
		go func() {
			err := rig.SendNoise(from, int64(bulk), 1<<40)
			from.(interface{ CloseWrite() error }).CloseWrite()
			sent <- err
		}()
		err := rig.CheckNoise(to, int64(bulk), nil)
		if err = errors.Join(err, <-sent); err != nil {
			s.t.Fatal(err)
		}
		return time.Since(began)
	}
	caller, target = dial()
	down = measure(caller, target)
	up = measure(target, caller)
	return up, down
}

// sees checks the log of a box, its files and its output: it names what it has passed on, and no byte inside. Most
// boxes log a connection when it has ended, such as the one that join has made.
func (s *site) sees(words ...string) {
	s.t.Helper()
	testkit.Within(s.t, soon, "the box writes its log", func() error {
		text := []byte(s.boxes.String())
		for _, file := range []string{"access.log", "squid.log", "nginx.log"} {
			more, err := os.ReadFile(filepath.Join(s.dir, file))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			text = append(text, more...)
		}
		for _, inside := range []string{"edge1", s.token, payload} {
			if bytes.Contains(text, []byte(inside)) {
				s.t.Fatalf("the log of the box shows %q, which is inside:\n%s", inside, text)
			}
		}
		for _, word := range words {
			if !strings.Contains(string(text), word) {
				return fmt.Errorf("it lacks %q:\n%s", word, text)
			}
		}
		return nil
	})
}

// TestNetworks: join, session, data connections and bulk, from each network that has only one way out. The line
// "of the speed directly" of each row compares its speed with that of the first row.
func TestNetworks(t *testing.T) {
	bulk := 16 << 20
	if isWhole() {
		bulk = 1 << 30
	}
	var direct [2]float64 // MiB a second of the row "directly", up and down; 0: it has not run
	var directWork work   // of the row "directly"
	for _, row := range []struct {
		name string
		way  func(s *site) (flags []string, route string)
		log  []string // what the box writes about the way; nil: the box has no log
	}{
		{"directly", func(s *site) ([]string, string) { return nil, s.grpc }, nil},
		{"squid", func(s *site) ([]string, string) {
			addr := s.squid(false)
			return []string{"--proxy", "http://" + addr}, s.grpc + " through proxy " + addr
		}, []string{"CONNECT"}},
		{"squid with a password", func(s *site) ([]string, string) {
			addr := s.squid(true)
			file := s.write("proxy-url", "http://me:"+password+"@"+addr+"\n")
			return []string{"--proxy-file", file}, s.grpc + " through proxy " + addr
		}, []string{"CONNECT", " me "}},
		{"dante", func(s *site) ([]string, string) {
			addr := s.dante()
			return []string{"--proxy", "socks5://" + addr}, s.grpc + " through proxy socks5://" + addr
		}, []string{"tcp/connect"}},
		{"nginx", func(s *site) ([]string, string) {
			url := "wss://" + s.nginx("60s") + "/tunnel"
			return []string{"--server", url, "--proxy-ca", s.caFile}, url
		}, []string{`"GET /tunnel HTTP/1.1" 101 `}},
		{"HAProxy", func(s *site) ([]string, string) {
			url := "wss://" + s.haproxy("60s") + "/tunnel"
			return []string{"--server", url, "--proxy-ca", s.caFile}, url
		}, []string{"ingress~ cloud/cloud1 ", " 101 ", "/tunnel HTTP/1.1"}},
		{"an intercepting proxy", func(s *site) ([]string, string) {
			url := "wss://" + s.ingress() + "/tunnel"
			proxy := s.interceptor()
			return []string{"--server", s.grpc, "--server", url, "--proxy", "http://" + proxy, "--proxy-ca", s.caFile},
				url + " through proxy " + proxy
		}, nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := newSite(t)
			flags, route := row.way(s)
			said := s.join(flags...)
			t.Logf("\n%s", said)
			testkit.Within(t, soon, "the edge's log names the way", func() error { // it may be ready before
				if !strings.Contains(s.edgeLog.String(), route) {
					return fmt.Errorf("it lacks %q", route)
				}
				return nil
			})
			before := s.work()
			up, down := s.carries(bulk)
			used := s.work().since(before)
			var rates [2]float64
			for i, took := range []time.Duration{up, down} {
				rates[i] = float64(bulk) / (1 << 20) / took.Seconds()
			}
			t.Logf("%s: %.0f MiB/s up, %.0f MiB/s down", row.name, rates[0], rates[1])
			switch {
			case row.name == "directly":
				direct, directWork = rates, used
			case direct[0] > 0:
				t.Logf("%s: cloud and edge worked for %v, directly for %v: %.2f of the speed that they have by themselves",
					row.name, used.tunnel, directWork.tunnel, directWork.tunnel.Seconds()/used.tunnel.Seconds())
				t.Logf("%s: the box worked for %v; if the way cost cloud and edge nothing more than directly (all processes "+
					"together: %v), busy processors would reach %.2f of the speed directly", row.name, used.boxes,
					directWork.all(), directWork.all().Seconds()/(directWork.all()+used.boxes).Seconds())
				ratios := [2]float64{rates[0] / direct[0], rates[1] / direct[1]}
				t.Logf("%s: %.2f up and %.2f down of the speed directly", row.name, ratios[0], ratios[1])
				if isWhole() && min(ratios[0], ratios[1]) < leastOfDirect { // a few megabytes say too little
					t.Errorf("%.2f up and %.2f down of the speed directly, want %.2f at least", ratios[0], ratios[1], leastOfDirect)
				}
			}
			if row.log != nil {
				s.sees(row.log...)
			}
		})
	}
}

// A password that is wrong or missing is a line that says what to write. HTTPS_PROXY is no way around: it does not
// apply to loopback.
func TestPasswordMissing(t *testing.T) {
	s := newSite(t)
	addr := s.squid(true)
	dir := filepath.Join(s.dir, "edge")
	for _, tt := range []struct{ file, want string }{
		{"http://" + addr, "wants a user and a password"},
		{"http://me:wrong@" + addr, "does not accept the user and password"},
	} {
		out, err := s.try(s.token+"\n", nil, "join", "--dir", dir, "--proxy-file", s.write("proxy-url", tt.file))
		if err == nil || !strings.Contains(out, "407 Proxy Authentication Required") || !strings.Contains(out, tt.want) ||
			!strings.Contains(out, "FAIL  proxy") {
			t.Errorf("%v\n%s", err, out)
		}
	}
	out, err := s.try(s.token+"\n", nil, "join", "--dir", dir, "--proxy", "http://me:"+password+"@"+addr)
	if err == nil || !strings.Contains(out, "--proxy-file") {
		t.Errorf("a password on the command line: %v\n%s", err, out)
	}
	secret := base64.StdEncoding.EncodeToString([]byte("me:" + password))
	if strings.Contains(out, secret) {
		t.Error("the password shows in base64")
	}
}

// A conn that says nothing for longer than the ingress waits stays open, on the session's own connection and on a
// data connection.
func TestIngressTimeout(t *testing.T) {
	if !isWhole() {
		t.Skip("takes a minute and a half: make networks runs it")
	}
	for name, ingress := range map[string]func(*site, string) string{"nginx": (*site).nginx, "HAProxy": (*site).haproxy} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			s.join("--server", "wss://"+ingress(s, "25s")+"/tunnel", "--proxy-ca", s.caFile)
			for range 4 { // the first uses the session's own connection
				c, err := net.Dial("tcp", s.door)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				target := s.target.Next(t)
				c.Write([]byte("x"))
				if _, err = io.ReadFull(target, make([]byte, 1)); err != nil {
					t.Fatal(err)
				}
				defer func() {
					c.Write([]byte("y"))
					target.SetReadDeadline(time.Now().Add(soon))
					if _, err := io.ReadFull(target, make([]byte, 1)); err != nil {
						t.Errorf("after 80 s: %v", err)
					}
				}()
			}
			time.Sleep(80 * time.Second)
			if n := strings.Count(s.edgeLog.String(), "session started"); n != 1 {
				t.Errorf("%d sessions", n)
			}
		})
	}
}
