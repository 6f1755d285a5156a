package setup

import (
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
	"time"

	"tunnel/conf"
	"tunnel/pkg/auth"
)

// DefaultDir is the folder for the files of init and of join.
const DefaultDir = "/etc/tunnel"

// caLifetime is the lifetime of the certificate authorities that Init makes, and of the
// cloud's certificate. No program renews them.
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

// splitAddress checks and splits the address that edges dial. Its errors are about --address.
func splitAddress(address string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, fmt.Errorf("--address is host:port, such as tunnel.example.com:9000, not %q", address)
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return "", 0, fmt.Errorf("--address has no port from 1 to 65535: "+
			"write host:port, such as tunnel.example.com:9000, not %q", address)
	}
	if ip, errIP := netip.ParseAddr(host); errIP == nil && (ip.IsUnspecified() || ip.Zone() != "") {
		return "", 0, fmt.Errorf("%s leads nowhere from another machine: "+
			"--address is what edges dial, a name or an address of this one", host)
	}
	if !conf.IsHost(host) {
		return "", 0, fmt.Errorf("--address: %q is neither a name nor an IP address", host)
	}
	return host, int(n), nil
}

// newFile is a file that Init or Join writes.
type newFile struct {
	name    string
	what    string      // shown to the operator by CloudFolder.Explain; "" for the files of Join
	mode    fs.FileMode // whatever the umask is
	content []byte
}

const (
	publicFile fs.FileMode = 0o644
	secretFile fs.FileMode = 0o600
)

// initFiles makes the files of a cloud, in memory.
func initFiles(address, host string, port int) ([]newFile, error) {
	cloudCA, err := auth.NewCA("tunnel cloud CA", caLifetime)
	if err != nil {
		return nil, err
	}
	// Nodes have a CA of their own. No certificate that it signs can pass for a cloud or a replica.
	nodesCA, err := auth.NewCA("tunnel nodes CA", caLifetime)
	if err != nil {
		return nil, err
	}
	leaf := auth.Leaf{CommonName: host, Server: true, Client: true} // a replica is a client of the others
	if ip := net.ParseIP(host); ip != nil {
		leaf.IPs = []net.IP{ip}
	} else {
		leaf.DNSNames = []string{host}
	}
	cert, key, err := cloudCA.Issue(leaf)
	if err != nil {
		return nil, err
	}
	config := strings.NewReplacer("{Address}", address, "{Host}", host, "{Port}", strconv.Itoa(port)).Replace(initTOML)
	return []newFile{
		{"ca.crt", "the authority of the cloud's certificate; edges are told its sum", publicFile, cloudCA.CertPEM()},
		{"ca.key", "its key: needed for another certificate only, so keep it somewhere else",
			secretFile, cloudCA.KeyPEM()},
		{"cloud.crt", "the cloud's certificate, for " + host, publicFile, cert},
		{"cloud.key", "its key", secretFile, key},
		{"nodes-ca.crt", "the authority that signs nodes' certificates", publicFile, nodesCA.CertPEM()},
		{"nodes-ca.key", "its key, which the cloud signs with", secretFile, nodesCA.KeyPEM()},
		{"tokens", "who may join; `tunnel token` writes it", secretFile, []byte(emptyTokens)},
		{"cloud.toml", "the configuration", publicFile, []byte(config)},
	}, nil
}

// emptyTokens is the token file of a new cloud.
const emptyTokens = "# Who may join, a line for each token. `tunnel token create` adds them.\n"

// initTOML is the cloud.toml of a new cloud.
const initTOML = `# A cloud, made by tunnel init: tunnel cloud -c cloud.toml
# Relative paths are relative to this file. tunnel config check says what is wrong with it.

# Where edges dial.
[mode.cloud.stream.server]
grpcport = {Port}
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
address = "{Address}"
cloudca = "ca.crt"

# TCP ports here that lead to a node: "listen" = "node/target".
#[mode.cloud.tcp]
#"127.0.0.1:2222" = "edge1/127.0.0.1:22"
# A listener that is not on loopback needs a line that says who may connect.
#[mode.cloud.tcpallow]
#"0.0.0.0:2222" = ["10.0.0.0/8"]

# Another replica of this cloud has the same files, or a certificate of its own by ca.key.
#[mode.cloud.stream.peers]
#addresses = ["10.0.0.2:{Port}"]
#ca = "ca.crt"
#servername = "{Host}"
`

// createFiles writes all files into dir, or none. If one exists, createFiles writes none.
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
		return fmt.Errorf("%s holds %s already, and nothing was written: another cloud may be using it; "+
			"choose another --dir, or remove the files", dir, strings.Join(there, ", "))
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
			os.Remove(path) //nolint:errcheck // the caller reports the first error
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

// createFile writes a new file. It fails if path exists.
func createFile(path string, f newFile) error {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_EXCL
	file, err := os.OpenFile(path, flags, f.mode)
	if err != nil {
		return err
	}
	_, err = file.Write(f.content)
	return errors.Join(err, file.Chmod(f.mode), file.Close()) // Chmod: the umask may have cut f.mode
}

// makeDir makes a folder that every user may enter, unless it exists. The edge may run as
// another user; secret files in the folder have a mode of their own.
func makeDir(dir string) error {
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.Chmod(dir, 0o755) // the umask may have cut the mode
}

// notWritable adds advice to an error about permissions for a folder.
func notWritable(dir string, err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%s cannot be written to: %w; use sudo, or another folder with --dir", dir, reasonOf(err))
	}
	return err
}

// Explain prints the files that Init wrote, and the next commands.
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

// shellQuote returns s as one word of a POSIX shell.
func shellQuote(s string) string {
	plain := strings.IndexFunc(s, func(c rune) bool {
		return !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' ||
			strings.ContainsRune("/._-:=@%+,", c))
	}) < 0
	if plain && s != "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
