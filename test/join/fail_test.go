package join

import (
	"encoding/base64"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
)

// TestTheWayIsWrong: each step of join, when it fails, has a name and says what to do; and
// until all of them are good, nothing secret has left this machine.
func TestTheWayIsWrong(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	s.start()
	_, good := s.create("edge1")
	here := auth.Leaf{CommonName: "127.0.0.1", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Server: true}
	ended := here
	ended.TTL = -time.Second

	for name, tt := range map[string]struct {
		change func(t *testing.T, token *auth.JoinToken) *stranger // nil: nobody is asked
		step   string
		says   []string
	}{
		"the name does not resolve": {
			func(_ *testing.T, token *auth.JoinToken) *stranger {
				token.Address = "nobody.invalid:9000"
				return nil
			}, "dns", []string{"nobody.invalid", "/etc/hosts"},
		},
		"nothing listens": {
			func(t *testing.T, token *auth.JoinToken) *stranger {
				token.Address = testkit.FreeAddress(t)
				return nil
			}, "tcp", []string{"connection refused", "is `tunnel cloud` running"},
		},
		"it speaks something else": {
			func(t *testing.T, token *auth.JoinToken) *stranger {
				l := listen(t, func(c net.Conn) { fmt.Fprint(c, "HTTP/1.1 400 Bad Request\r\n\r\n") })
				token.Address = l.address
				return l
			}, "tls", []string{"does not speak TLS", "grpcport"},
		},
		"it closes": {
			func(t *testing.T, token *auth.JoinToken) *stranger {
				l := listen(t, func(net.Conn) {})
				token.Address = l.address
				return l
			}, "tls", []string{"the other side does not speak TLS"},
		},
		"another cloud": {
			func(t *testing.T, token *auth.JoinToken) *stranger {
				l := listenTLS(t, newCA(t), here)
				token.Address = l.address
				return l
			}, "tls", []string{"not the cloud that made this token", "Your secret has not been sent"},
		},
		"another cloud that shows our authority": {
			func(t *testing.T, token *auth.JoinToken) *stranger {
				l := listenTLS(t, newCA(t), here, s.file("ca.crt"))
				token.Address = l.address
				return l
			}, "tls", []string{"not the cloud that made this token"},
		},
		"another name": {
			func(_ *testing.T, token *auth.JoinToken) *stranger {
				token.ServerName = "tunnel.example.com"
				return nil
			}, "tls", []string{"not made out to tunnel.example.com", "[mode.cloud.join]"},
		},
		"a certificate that has expired, or a clock that is wrong": {
			func(t *testing.T, token *auth.JoinToken) *stranger {
				ca := newCA(t)
				l := listenTLS(t, ca, ended, ca.CertPEM())
				token.Address, token.CA = l.address, sumOf(t, ca.CertPEM())
				return l
			}, "clock", []string{"this machine's clock says", "timedatectl", "the cloud's certificate expired on 20",
				"replace the certificate on the cloud"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			token := good
			stranger := tt.change(t, &token)
			dir := filepath.Join(t.TempDir(), "edge")
			a := s.want(1, s.join(token, dir), append(tt.says, "FAIL  "+tt.step+": ")...)
			if strings.Contains(a.out, "ok    token") {
				t.Errorf("%s\nthe token was sent", a)
			}
			wantEmpty(t, dir)
			if stranger == nil {
				return
			}
			heard, shook := stranger.heard()
			if heard == "" {
				t.Error("the stranger was not even asked; this test shows nothing")
			}
			// What TLS wraps is heard unwrapped, too; so the first bytes of HTTP/2 would show.
			for _, secret := range []string{token.Secret.Reveal(), base64.StdEncoding.EncodeToString([]byte(token.Secret)),
				"authorization", "PRI * HTTP/2"} {
				if strings.Contains(heard, secret) {
					t.Errorf("the stranger has heard what begins with %q", secret[:4])
				}
			}
			if shook {
				t.Error("the handshake with the stranger was completed")
			}
		})
	}
	// After all that, the same token is as good as before.
	s.want(0, s.join(good, filepath.Join(t.TempDir(), "edge")))
}

// TestTheCloudsCertificateIsBad: a cloud that starts with a certificate which no edge accepts still shows the
// CA of the token. So join does not take the cloud for another server. With a good certificate the same token
// is accepted.
func TestTheCloudsCertificateIsBad(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	_, token := s.create("edge1")
	ca, err := auth.LoadCA(s.file("ca.crt"), s.file("ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	here := auth.Leaf{CommonName: "127.0.0.1", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Server: true}
	use := func(leaf auth.Leaf) {
		t.Helper()
		cert, key, err := ca.Issue(leaf)
		if err != nil {
			t.Fatal(err)
		}
		for name, content := range map[string][]byte{"cloud.crt": cert, "cloud.key": key} {
			if err = os.WriteFile(s.path(name), content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	dir := filepath.Join(t.TempDir(), "edge")
	expired, client := here, here
	expired.TTL = -time.Second
	client.Server, client.Client = false, true
	for _, tt := range []struct {
		leaf             auth.Leaf
		step, says, logs string
	}{
		{expired, "clock", "the cloud's certificate expired on 20", "the cloud's certificate expired on 20"},
		{client, "tls", "the cloud's certificate is not for servers", "cloud.crt is not for servers"},
	} {
		use(tt.leaf)
		s.start()
		a := s.want(1, s.join(token, dir), "FAIL  "+tt.step+": ", tt.says, "on the cloud", "this token stays good")
		if strings.Contains(a.out+a.notes, "authority") {
			t.Errorf("%s\njoin blames another authority", a)
		}
		testkit.Within(t, soon, "the cloud's log says why", func() error { return says(&s.log, tt.logs) })
		s.cloud.Kill()
	}
	use(here)
	s.start()
	s.want(0, s.join(token, dir), "ok    clock")
}

// TestRefused: the cloud does not take the token. Exit code 4.
func TestRefused(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	s.start()
	_, good := s.create("edge1")
	dir := filepath.Join(t.TempDir(), "edge")
	refused := func(token auth.JoinToken, inTheLog string) {
		t.Helper()
		s.want(4, s.join(token, dir), "FAIL  token: ", "tunnel token create")
		testkit.Within(t, soon, "the cloud's log says why", func() error { return says(&s.log, inTheLog) })
	}
	with := func(change func(*auth.JoinToken)) auth.JoinToken {
		token := good
		token.Secret = auth.NewToken()
		change(&token)
		return token
	}

	refused(with(func(*auth.JoinToken) {}), "not this node's")
	refused(with(func(token *auth.JoinToken) { token.Node, token.Secret = "edge2", good.Secret }),
		"no token for this node")

	plain, expired := with(func(*auth.JoinToken) {}), with(func(*auth.JoinToken) {})
	s.editTokens(func(text string) string {
		text, err := auth.AddToken(text, auth.TokenLine{Node: "edge1", Secret: plain.Secret}, time.Now())
		if err == nil {
			text, err = auth.AddToken(text,
				auth.TokenLine{Node: "edge1", Secret: expired.Secret, Join: true,
					Expires: time.Now().Add(-time.Minute)}, time.Now())
		}
		if err != nil {
			t.Fatal(err)
		}
		return text
	})
	refused(plain, "opens sessions")
	refused(expired, "has expired")
	s.want(0, s.tunnel("", "token", "list", "-c", s.path("cloud.toml")), "expired")

	before := s.reads()
	s.want(0, s.tunnel("", "token", "revoke", "-c", s.path("cloud.toml"), "--node", "edge1"))
	s.waitRead(before)
	s.want(4, s.join(good, dir), "FAIL  token: ")
	wantEmpty(t, dir)
}

// TestCloudGivesNoCertificates: a cloud that does so no more.
func TestCloudGivesNoCertificates(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	_, token := s.create("edge1")
	edit(t, s.path("cloud.toml"), `cakey = "nodes-ca.key"`, "")
	s.start()
	s.want(4, s.join(token, filepath.Join(t.TempDir(), "edge")), "FAIL  token: ", "issues no certificates",
		"[mode.cloud.join]")
	s.want(3, s.tunnel("", "token", "create", "-c", s.path("cloud.toml"), "--node", "edge2"),
		"gives no certificates", "cakey")
}

// TestFolder: what is in the folder already, or keeps it from being written to.
func TestFolder(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	s.start()
	_, first := s.create("edge1")
	_, second := s.create("edge2")
	dir := filepath.Join(t.TempDir(), "edge")
	s.want(0, s.join(first, dir))
	pem, err := os.ReadFile(filepath.Join(dir, "node.pem"))
	if err != nil {
		t.Fatal(err)
	}

	// What a full disk, for one, has left of it.
	if err := os.WriteFile(filepath.Join(dir, "node.pem"), pem[:len(pem)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	s.want(0, s.join(first, dir), "edge.toml (as it was)")
	if pem, err = os.ReadFile(filepath.Join(dir, "node.pem")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "node.pem"), nil, 0o644); err != nil { // as an operator would
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(dir, "node.pem"), 0o644); err != nil { // likewise
		t.Fatal(err)
	}
	s.want(3, s.tunnel("", "config", "check", "-c", filepath.Join(dir, "edge.toml")), "nodecert: ", "chmod 600",
		"tunnel join writes another")
	if err := os.Remove(filepath.Join(dir, "node.pem")); err != nil {
		t.Fatal(err)
	}
	s.want(3, s.tunnel("", "config", "check", "-c", filepath.Join(dir, "edge.toml")),
		"node.pem does not exist: with a new join token, tunnel join writes it")
	if err := os.WriteFile(filepath.Join(dir, "node.pem"), pem, 0o600); err != nil {
		t.Fatal(err)
	}

	issued := strings.Count(s.log.String(), "certificate issued")
	s.want(1, s.join(second, dir), "FAIL  files: ", "is of node edge1, and the token of node edge2", "--force")
	if now, err := os.ReadFile(filepath.Join(dir, "node.pem")); err != nil || string(now) != string(pem) {
		t.Errorf("the other node's certificate has changed (%v)", err)
	}
	if strings.Count(s.log.String(), "certificate issued") != issued {
		t.Error("a certificate was made for nothing")
	}
	s.want(0, s.join(second, dir, "--force"))
	s.want(1, s.join(first, dir), "is of node edge2")

	// Another cloud's node.
	elsewhere := second
	elsewhere.Address = "tunnel.example.com:9000"
	s.want(1, s.join(elsewhere, dir), "FAIL  files: ", "is for the cloud "+s.address)

	// Somebody else's files.
	for _, name := range []string{"ca.crt", "edge.toml", "node.pem"} {
		theirs := t.TempDir()
		if err := os.WriteFile(filepath.Join(theirs, name), []byte("mine"), 0o600); err != nil {
			t.Fatal(err)
		}
		s.want(1, s.join(first, theirs), "FAIL  files: ", name+" exists")
	}

	// On the cloud's own machine its folder may be the edge's as well.
	s.want(0, s.join(first, s.dir), "ca.crt (as it was)")

	// A file in the folder's place, and a folder of somebody else.
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.want(1, s.join(first, filepath.Join(file, "edge")), "FAIL  files: ", "--dir")
	s.want(1, s.asNobody(first.Encode().Reveal()+"\n", "join", "--dir", "/etc/tunnel-of-somebody-else"), "FAIL  files: ",
		"permission denied", "sudo")
}

// TestTokenFileIsNotOurs: a file that cannot be replaced is not, and it is said which line
// it lacks.
func TestTokenFileIsNotOurs(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	// As a Secret is mounted.
	if err := os.Rename(s.path("tokens"), s.path("real")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("real", s.path("tokens")); err != nil {
		t.Fatal(err)
	}
	a := s.want(1, s.tunnel("", "token", "create", "-c", s.path("cloud.toml"), "--node", "edge1"),
		"tokens was NOT changed", "symbolic link", "add     edge1:sha256:", " join expires=", "kubectl -n $NS patch secret")
	token := s.note(a.out)
	if strings.Contains(string(s.file("real")), "edge1") {
		t.Error("the file has changed")
	}
	if info, err := os.Lstat(s.path("tokens")); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link was replaced (%v)", err)
	}
	// What it says to add is all that is needed.
	_, line, _ := strings.Cut(a.notes, "add     ")
	line, _, _ = strings.Cut(line, "\n")
	s.start()
	before := s.reads()
	if err := os.WriteFile(s.path("real"), []byte(line+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.waitRead(before)
	s.want(0, s.join(token, filepath.Join(t.TempDir(), "edge")))
	s.want(1, s.tunnel("", "token", "revoke", "-c", s.path("cloud.toml"), "--node", "edge1"), "remove  edge1:sha256:",
		"add     edge1:revoked", "grep -v '^[[:blank:]]*edge1[[:blank:]]*:'")
}

// TestTokenFileMayNotBeWritten: who may not change the file gets no token that could never
// be good.
func TestTokenFileMayNotBeWritten(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	for _, name := range []string{"cloud.key", "nodes-ca.key", "tokens"} {
		if err := os.Chmod(s.path(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if os.Geteuid() != 0 {
		if err := os.Chmod(s.dir, 0o500); err != nil {
			t.Fatal(err)
		}
		defer os.Chmod(s.dir, 0o700) // so that it can be removed
	}
	for _, parent := range []string{filepath.Dir(s.dir), filepath.Dir(filepath.Dir(s.dir))} {
		if err := os.Chmod(parent, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	a := s.want(1, s.asNobody("", "token", "create", "-c", s.path("cloud.toml"), "--node", "edge1"),
		"tokens was NOT changed", "sudo")
	if tokenText.MatchString(a.out + a.notes) {
		t.Error("it has printed a token")
	}
}

// TestRevokeOnABadDay: a node can be shut out, and the file be shown, though the cloud
// could not start.
func TestRevokeOnABadDay(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	s.create("edge1")
	for _, name := range []string{"nodes-ca.key", "cloud.crt"} {
		if err := os.Remove(s.path(name)); err != nil {
			t.Fatal(err)
		}
	}
	config := s.path("cloud.toml")
	s.want(3, s.tunnel("", "token", "create", "-c", config, "--node", "edge1"), "nodes-ca.key does not exist")
	edit(t, config, "[mode.cloud.join]\n", "[mode.cloud.join]\nof_a_later_program = 1\n")
	if a := s.want(0, s.tunnel("", "token", "list", "-c", config), "join token"); !strings.Contains(a.notes, "warning: ") {
		t.Error(a)
	}
	if a := s.want(0, s.tunnel("", "token", "revoke", "-c", config, "--node", "edge1"),
		"is revoked"); !strings.Contains(a.notes, "of_a_later_program") || strings.Count(a.notes, "\n") != 1 {
		t.Error(a)
	}
	s.want(0, s.tunnel("", "token", "revoke", "-c", config, "--node", "egde1"), "is revoked",
		"about egde1 before: is the name right?")
	if err := os.Remove(s.path("tokens")); err != nil {
		t.Fatal(err)
	}
	s.want(3, s.tunnel("", "token", "revoke", "-c", config, "--node", "edge1"), "tokens does not exist")
}

// TestReplicas: where each replica has a file of its own, it is said what to change in it.
func TestReplicas(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	edit(t, s.path("cloud.toml"), "#[mode.cloud.stream.peers]\n#addresses = ", "[mode.cloud.stream.peers]\naddresses = ")
	edit(t, s.path("cloud.toml"), "#ca = \"ca.crt\"\n#servername = ", "ca = \"ca.crt\"\nservername = ")
	s.want(0, s.tunnel("", "config", "check", "-c", s.path("cloud.toml")), "ok (cloud)")
	a := s.want(0, s.tunnel("", "token", "create", "-c", s.path("cloud.toml"), "--node", "edge1"), "other replicas",
		"add     edge1:sha256:")
	s.note(a.out)
	s.want(0, s.tunnel("", "token", "revoke", "-c", s.path("cloud.toml"), "--node", "edge1"), "other replicas",
		"remove  edge1:sha256:", "add     edge1:revoked")
}

// TestTokenFileStaysAsItWas: comments, order, mode; and nobody's line is lost.
func TestTokenFileStaysAsItWas(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	mine := "# mine\nedge9:" + auth.NewToken().Hashed() + "\n"
	if err := os.WriteFile(s.path("tokens"), []byte(mine), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(s.path("tokens"), 0o640); err != nil {
		t.Fatal(err)
	}
	owner := os.Geteuid()
	if owner == 0 { // else nobody may give a file away
		owner = nobody
		if err := os.Chown(s.path("tokens"), owner, owner); err != nil {
			t.Fatal(err)
		}
	}
	const tools = 5
	var creating sync.WaitGroup
	for i := range tools {
		creating.Go(func() {
			a := s.command("", filepath.Join(programs, "tunnel"), "token", "create", "-c", s.path("cloud.toml"), "--node",
				"n"+strconv.Itoa(i))
			if a.code != 0 {
				t.Error(a.code, a.notes)
			}
		})
	}
	creating.Wait()
	text := string(s.file("tokens"))
	if !strings.HasPrefix(text, mine) || strings.Count(text, " join expires=") != tools {
		t.Errorf("the file is\n%s", text)
	}
	wantMode(t, s.path("tokens"), 0o640)
	if info, err := os.Stat(s.path("tokens")); err != nil || int(info.Sys().(*syscall.Stat_t).Uid) != owner {
		t.Errorf("the file has another owner (%v)", err)
	}
	if left, err := filepath.Glob(s.path(".tokens*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestCommandLine: what a newcomer may type, with the exit code and the sentence for it.
func TestCommandLine(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	config := s.path("cloud.toml")
	token := auth.JoinToken{Address: "127.0.0.1:9", ServerName: "x", Node: "edge1", Secret: auth.NewToken()}
	text := token.Encode().Reveal()
	s.secret(text, token)
	for _, tt := range []struct {
		stdin string
		args  []string
		code  int
		want  string
	}{
		{"", []string{"init"}, 2, `"address" not set`},
		{"", []string{"init", "--address", "tunnel.example.com"}, 2, "tunnel.example.com:9000"},
		{"", []string{"init", "--address", "tunnel.example.com:ssh"}, 2, "port from 1 to 65535"},
		{"", []string{"init", "--address", "0.0.0.0:9000"}, 2, "cannot be dialled by other machines"},
		{"", []string{"init", "--address", ":9000"}, 2, "neither a name nor an IP address"},
		{"", []string{"init", "--address", `a"b:9000`}, 2, "neither a name nor an IP address"},
		{"", []string{"init", "--address", "a:9000", "--dir", "/dev/null/x"}, 1, "not a directory"},
		{"", []string{"token", "create", "-c", config}, 2, "flags in the group [node nodes-from] is required"},
		{"", []string{"token", "create", "-c", config, "--node", "Edge 1"}, 2, "--node: "},
		{"", []string{"token", "create", "-c", config, "--node", "default"}, 2, "any node"},
		{"", []string{"token", "create", "-c", config, "--node", "edge1", "--ttl", "1s"}, 2,
			"--ttl is from 1m to 8760h, not 1s"},
		{"", []string{"token", "create", "-c", s.path("none.toml"), "--node", "edge1"}, 3, "does not exist"},
		{"", []string{"token", "list", "-c", config}, 0, "holds no token: tunnel token create"},
		{"", []string{"join"}, 2, "no token on standard input"},
		{"\n", []string{"join"}, 2, "no token on standard input"},
		{"edge1:secret\n", []string{"join"}, 2, "no join token"},
		{text[:len(text)-4] + "\n", []string{"join"}, 2, "paste all of the line"},
		{"", []string{"join", "--token-file", "/nonexistent/token"}, 2, "no such file"},
		{"", []string{"join", "--token-file", os.DevNull}, 2, "/dev/null is empty"},
		{"", []string{"token", "create", "-c", config}, 2, "Run tunnel token create --help"},
		{"", []string{"token", "create", "-c", config, "--node", "edge1", "--ttl", "1m1s1ms", "x"}, 2,
			`takes only flags, such as --name value, not "x"`},
		{"", []string{"token", "creat"}, 2, `unknown command "creat"`},
		{"", []string{"config", "chek"}, 2, `unknown command "chek"`},
	} {
		s.want(tt.code, s.tunnel(tt.stdin, tt.args...), tt.want)
	}
	// A token that was given as an argument, against all advice, is not repeated.
	for _, args := range [][]string{{"join", text}, {"join", "--token-file", text}} {
		a := s.command("", filepath.Join(programs, "tunnel"), args...)
		s.spoken.WriteString(a.out + a.notes)
		if a.code != 2 || !strings.Contains(a.notes, "seen by every user") {
			t.Errorf("exit code %d, %s", a.code, a.notes)
		}
	}
	// An ordinary user who forgot sudo.
	s.want(1, s.asNobody("", "init", "--address", "a:9000", "--dir", "/etc/tunnel-of-somebody-else"), "use sudo")
	s.want(3, s.asNobody("", "token", "create", "-c", config, "--node", "edge1"), "may not")
}

func (s *site) file(name string) []byte {
	s.t.Helper()
	text, err := os.ReadFile(s.path(name))
	if err != nil {
		s.t.Fatal(err)
	}
	return text
}

// reads returns how often the cloud has said that it has read the token file again.
func (s *site) reads() int { return strings.Count(s.log.String(), "token file read again") }

func (s *site) waitRead(before int) {
	s.t.Helper()
	testkit.Within(s.t, soon, "the cloud has read the token file", func() error {
		if n := s.reads(); n == before {
			return fmt.Errorf("it has done so %d times", n)
		}
		return nil
	})
}

// editTokens changes the token file as an operator does, and waits until the cloud has
// seen it.
func (s *site) editTokens(change func(string) string) {
	s.t.Helper()
	before := s.reads()
	if err := os.WriteFile(s.path("tokens"), []byte(change(string(s.file("tokens")))), 0o600); err != nil {
		s.t.Fatal(err)
	}
	s.waitRead(before)
}

func wantEmpty(t *testing.T, dir string) {
	t.Helper()
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("files were written: %v, %v", left, err)
	}
}
