package ways

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
	"tunnel.example/tunnel/test/rig/rigtest"
)

const (
	// soon is for what happens without waiting for anything, on a machine that is busy with other things.
	soon = 30 * time.Second
	// hangs is when a command is taken to hang.
	hangs = 3 * time.Minute
)

// program is the program under test.
var program string

func TestMain(m *testing.M) {
	flag.Parse()
	rigtest.Parallel(8)
	os.Exit(rigtest.Main(m, &program))
}

// site is a cloud and an edge that nobody has started yet.
type site struct {
	*testing.T
	*rig.Pair
	env     []string // of commands, besides that of the test
	secrets []string // besides the token: no command may print them
}

// newSite writes the files of a cloud and an edge with admin sockets. change, if not nil, changes what they are made
// of.
func newSite(t *testing.T, change func(*rig.Config)) *site {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "w") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	cfg := rig.Config{
		Binary: program, Dir: dir,
		Cloud: fmt.Sprintf("\n[mode.cloud.admin]\nsocket = %q\n", filepath.Join(dir, "c.sock")),
		Edge:  fmt.Sprintf("\n[mode.edge.admin]\nsocket = %q\n", filepath.Join(dir, "e.sock")),
	}
	if change != nil {
		change(&cfg)
	}
	pair, err := rig.NewPair(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &site{T: t, Pair: pair}
}

// cloudRuns starts the cloud, and waits until edges can reach it.
func (s *site) cloudRuns() *rig.Process {
	s.Helper()
	p, err := s.StartCloud()
	s.started(p, err)
	testkit.Within(s, soon, "the cloud is ready", func() error { return rig.Ready(s.CloudHealth()) })
	return p
}

// edgeRuns starts the edge, and waits until it has a session.
func (s *site) edgeRuns() {
	s.Helper()
	p, err := s.StartEdge()
	s.started(p, err)
	testkit.Within(s, soon, "the edge has a session", func() error { return rig.Ready(s.EdgeHealth()) })
}

// started has a process end with the test.
func (s *site) started(p *rig.Process, err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(p.Kill)
}

// edit replaces text in a file.
func (s *site) edit(name, old, now string) {
	s.Helper()
	text, err := os.ReadFile(s.Path(name))
	if err != nil {
		s.Fatal(err)
	}
	if !strings.Contains(string(text), old) {
		s.Fatalf("%s does not hold %q:\n%s", name, old, text)
	}
	s.write(name, strings.Replace(string(text), old, now, 1))
}

func (s *site) write(name, text string) {
	s.Helper()
	if err := os.WriteFile(s.Path(name), []byte(text), 0o600); err != nil {
		s.Fatal(err)
	}
}

// dials has the edge dial another address.
func (s *site) dials(addr string) { s.edit("edge.toml", s.GRPC(), addr) }

// line is a line of tunnel check -o json.
type line struct{ Group, Name, State, Text, Do string }

// report is the output of tunnel check -o json.
type report struct {
	OK     bool   `json:"ok"`
	Checks []line `json:"checks"`
}

// command is a command line of the program, with the environment of the site. It ends with ctx.
func (s *site) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), append([]string{
		"HTTP_PROXY=", "HTTPS_PROXY=", "http_proxy=", "https_proxy=", "NO_PROXY=", "KUBECONFIG=",
	}, s.env...)...)
	return cmd
}

// run runs a command line of the program, and looks for secrets in what it prints.
func (s *site) run(args ...string) (code int, out, notes string) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), hangs)
	defer cancel()
	cmd := s.command(ctx, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	out, notes = stdout.String(), stderr.String()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		code = exit.ExitCode()
	} else if err != nil {
		s.Fatalf("tunnel %q: %v", args, err)
	}
	for _, secret := range append(s.secrets, s.Token(rig.Node).Reveal()) {
		if strings.Contains(out+notes, secret) {
			s.Errorf("tunnel %q shows a secret", args)
		}
	}
	return code, out, notes
}

// check runs tunnel check with a file of the site.
func (s *site) check(file string, args ...string) (r report) {
	s.Helper()
	code, out, notes := s.run(append([]string{"check", "-o", "json", "-c", s.Path(file)}, args...)...)
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		s.Fatalf("%v: exit code %d\n%s%s", err, code, out, notes)
	}
	if (code == 0) != r.OK {
		s.Errorf("exit code %d, and ok is %t", code, r.OK)
	}
	for _, l := range r.Checks {
		if bad := l.State == "fail" || l.State == "warn"; bad != (l.Do != "") || l.Text == "" {
			s.Errorf("a line without a text, or a next step in the wrong place: %+v", l)
		}
	}
	return r
}

// line returns a line of a report; group is the begin of a group's name.
func (r report) line(group, name string) *line {
	for i, l := range r.Checks {
		if strings.HasPrefix(l.Group, group) && l.Name == name {
			return &r.Checks[i]
		}
	}
	return nil
}

func (r report) String() string {
	var b strings.Builder
	for _, l := range r.Checks {
		fmt.Fprintf(&b, "%-8s %s / %s: %s\n", l.State, l.Group, l.Name, l.Text)
		if l.Do != "" {
			fmt.Fprintf(&b, "         do: %s\n", l.Do)
		}
	}
	return b.String()
}

// pair makes a certificate that ca has signed, with dates of its own.
func pair(
	t *testing.T, ca *auth.CA, subject pkix.Name, name string, from, until time.Time, usage x509.ExtKeyUsage,
) (cert, key []byte) {
	t.Helper()
	signer, err := tls.X509KeyPair(ca.CertPEM(), ca.KeyPEM())
	if err != nil {
		t.Fatal(err)
	}
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: subject, NotBefore: from, NotAfter: until,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{usage}, BasicConstraintsValid: true,
	}
	if name != "" {
		leaf.DNSNames = []string{name}
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, signer.Leaf, own.Public(), signer.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(own)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

// certify gives the cloud a certificate with dates of its own.
func (s *site) certify(from, until time.Time) {
	s.Helper()
	cloud := pkix.Name{CommonName: "cloud"}
	cert, key := pair(s.T, s.CA(), cloud, "tunnel.cloud.io", from, until, x509.ExtKeyUsageServerAuth)
	s.write("cloud.crt", string(cert))
	s.write("cloud.key", string(key))
}

// nodeCertificate gives the edge a certificate in place of the token.
func (s *site) nodeCertificate(from, until time.Time) {
	s.Helper()
	cert, key := pair(s.T, s.CA(), auth.NodeSubject(rig.Node), "", from, until, x509.ExtKeyUsageClientAuth)
	s.write("node.pem", string(cert)+string(key))
	s.edit("edge.toml", `tokenfile = "token"`, `nodecert = "node.pem"`)
	s.edit("cloud.toml", "\n[mode.cloud.admin]", "\n[mode.cloud.join]\nca = \"ca.crt\"\n[mode.cloud.admin]")
}

// serve serves every connection at an address of loopback until the test ends, and closes it.
func serve(t *testing.T, ln net.Listener, handle func(net.Conn)) string {
	t.Helper()
	return testkit.ServeOn(t, ln, func(_ context.Context, c net.Conn) { handle(c) })
}

// listen listens on loopback.
func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}
