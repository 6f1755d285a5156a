package setup

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/template"
	"time"

	"tunnel/conf"
	"tunnel/pkg/auth"
)

// DefaultDir is where init and join put their files.
const DefaultDir = "/etc/tunnel"

// caLifetime is that of the authorities that init makes, and of the cloud's certificate:
// nothing of it is renewed by itself.
const caLifetime = 10 * 365 * 24 * time.Hour

// CloudFolder is a folder that Init has filled.
type CloudFolder struct {
	dir   string
	port  int
	files []newFile
}

// Init makes a folder with everything that a cloud needs without Kubernetes. address is
// what edges will dial, host:port. Init replaces no file.
func Init(dir, address string) (*CloudFolder, error) {
	host, port, err := splitAddress(address)
	if err != nil {
		return nil, &Error{KindUsage, err}
	}
	files, err := initFiles(address, host, port)
	if err == nil {
		err = createFiles(dir, files)
	}
	if err != nil {
		return nil, err
	}
	return &CloudFolder{dir, port, files}, nil
}

// splitAddress reads what edges are to dial.
func splitAddress(address string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, fmt.Errorf("--address is host:port, such as tunnel.example.com:9000, not %q", address)
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return "", 0, fmt.Errorf("--address has no port from 1 to 65535: write host:port, such as tunnel.example.com:9000, not %q", address)
	}
	if ip, errIP := netip.ParseAddr(host); errIP == nil && (ip.IsUnspecified() || ip.Zone() != "") {
		return "", 0, fmt.Errorf("%s leads nowhere from another machine: --address is what edges dial, a name or an address of this one", host)
	}
	if !conf.IsHost(host) {
		return "", 0, fmt.Errorf("--address: %q is neither a name nor an IP address", host)
	}
	return host, int(n), nil
}

// newFile is a file to be written.
type newFile struct {
	name    string
	what    string // for people; "" for what another line speaks of
	mode    fs.FileMode
	content []byte
}

const (
	publicFile fs.FileMode = 0o644
	secretFile fs.FileMode = 0o600
)

// initFiles makes everything, in memory.
func initFiles(address, host string, port int) ([]newFile, error) {
	cloudCA, err := auth.NewCA("tunnel cloud CA", caLifetime)
	if err != nil {
		return nil, err
	}
	// An authority of its own: what it signs can never pass for a cloud or a replica.
	nodesCA, err := auth.NewCA("tunnel nodes CA", caLifetime)
	if err != nil {
		return nil, err
	}
	leaf := auth.Leaf{CommonName: host, Server: true, Client: true} // a client of other replicas
	if ip := net.ParseIP(host); ip != nil {
		leaf.IPs = []net.IP{ip}
	} else {
		leaf.DNSNames = []string{host}
	}
	cert, key, err := cloudCA.Issue(leaf)
	if err != nil {
		return nil, err
	}
	config, err := cloudConfig(address, host, port)
	if err != nil {
		return nil, err
	}
	return []newFile{
		{"ca.crt", "the authority of the cloud's certificate; edges are told its sum", publicFile, cloudCA.CertPEM()},
		{"ca.key", "its key: needed for another certificate only, so keep it somewhere else", secretFile, cloudCA.KeyPEM()},
		{"cloud.crt", "the cloud's certificate, for " + host, publicFile, cert},
		{"cloud.key", "its key", secretFile, key},
		{"nodes-ca.crt", "the authority that signs nodes' certificates", publicFile, nodesCA.CertPEM()},
		{"nodes-ca.key", "its key, which the cloud signs with", secretFile, nodesCA.KeyPEM()},
		{"tokens", "who may join; `tunnel token` writes it", secretFile, []byte(emptyTokens)},
		{"cloud.toml", "the configuration", publicFile, config},
	}, nil
}

const emptyTokens = "# Who may join, a line for each token. `tunnel token create` adds them.\n"

func cloudConfig(address, host string, port int) ([]byte, error) {
	var b bytes.Buffer
	err := template.Must(template.New("cloud.toml").Parse(initTOML)).Execute(&b, struct {
		Address, Host string
		Port          int
	}{address, host, port})
	return b.Bytes(), err
}

const initTOML = `# A cloud, made by tunnel init: tunnel cloud -c cloud.toml
# Relative paths are relative to this file. tunnel config check says what is wrong with it.

# Where edges dial.
[mode.cloud.stream.server]
grpcport = {{.Port}}
cert = "cloud.crt"
key = "cloud.key"
tokenfile = "tokens"
# /healthz /readyz /metrics, on all interfaces.
#logport = 7000

[mode.cloud.stream.dns]
# No Kubernetes.
debug = true

# Who gets a certificate here, and what tunnel token create tells them.
[mode.cloud.join]
ca = "nodes-ca.crt"
cakey = "nodes-ca.key"
address = "{{.Address}}"
cloudca = "ca.crt"

# TCP ports here that lead to a node: "listen" = "node/target".
#[mode.cloud.tcp]
#"127.0.0.1:2222" = "edge1/127.0.0.1:22"
# A listener that is not on loopback needs a line that says who may connect.
#[mode.cloud.tcpallow]
#"0.0.0.0:2222" = ["10.0.0.0/8"]

# Another replica of this cloud has the same files, or a certificate of its own by ca.key.
#[mode.cloud.stream.peers]
#addresses = ["10.0.0.2:{{.Port}}"]
#ca = "ca.crt"
#servername = "{{.Host}}"
`

// createFiles writes files into dir, all or none. A file that is there stops it.
func createFiles(dir string, files []newFile) (err error) {
	var there []string
	for _, f := range files {
		_, err = os.Lstat(filepath.Join(dir, f.name))
		if err == nil {
			there = append(there, f.name)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return notWritable(dir, err)
		}
	}
	if there != nil {
		return fmt.Errorf("%s holds %s already, and nothing was written: another cloud may be using it; choose another --dir, or remove the files", dir, strings.Join(there, ", "))
	}
	if err = makeDir(dir); err != nil {
		return notWritable(dir, err)
	}
	var written []string
	defer func() {
		if err == nil {
			return
		}
		for _, path := range written {
			os.Remove(path) //nolint:errcheck // the first error is the one to report
		}
	}()
	for _, f := range files {
		path := filepath.Join(dir, f.name)
		if err = createFile(path, f); err != nil {
			return notWritable(dir, err)
		}
		written = append(written, path)
	}
	return nil
}

// createFile writes a file that is not there.
func createFile(path string, f newFile) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, f.mode) //nolint:gosec // the operator names the folder
	if err != nil {
		return err
	}
	_, err = file.Write(f.content)
	return errors.Join(err, file.Chmod(f.mode), file.Close()) // whatever the umask is
}

// makeDir makes a folder that everybody may enter, unless it is there: what is secret in
// it has a mode of its own, and the edge may run as another user.
func makeDir(dir string) error {
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // see above
		return err
	}
	return os.Chmod(dir, 0o755) //nolint:gosec // whatever the umask is
}

// notWritable adds what to do about a folder that we may not write to.
func notWritable(dir string, err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%s cannot be written to: %w; use sudo, or another folder with --dir", dir, reasonOf(err))
	}
	return err
}

// Explain prints what Init wrote, and what comes next.
func (c *CloudFolder) Explain(out io.Writer, h Host) {
	for _, f := range c.files {
		fmt.Fprintf(out, "%-28s %s\n", filepath.Join(c.dir, f.name), f.what)
	}
	config := shellQuote(filepath.Join(c.dir, "cloud.toml"))
	fmt.Fprintf(out, `
Next:
  1. open TCP port %d of this machine to the edges; they need no other
  2. start the cloud:
       %stunnel cloud -c %s
  3. for each edge, print the line to paste there:
       %[2]stunnel token create -c %[3]s --node NAME
`, c.port, h.sudo(), config)
}

// shellQuote makes a word of a POSIX shell.
func shellQuote(s string) string {
	plain := strings.IndexFunc(s, func(c rune) bool {
		return !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.ContainsRune("/._-:=@%+,", c))
	}) < 0
	if plain && s != "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
