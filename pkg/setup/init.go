package setup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
)

// DefaultDir is the folder for the files of init and of join.
const DefaultDir = "/etc/tunnel"

// caLifetime is the lifetime of the certificate authorities that Init makes, and of the
// cloud's certificate. No program renews them.
const caLifetime = 10 * 365 * 24 * time.Hour

// InitConfig says what Init makes.
type InitConfig struct {
	Address string   // what edges dial, host:port
	Names   []string // further names and IP addresses for the cloud's certificate
	Dir     string   // for the files
	Systemd bool     // have systemd start the cloud
	Host    Host
	Out     io.Writer
}

// cloudFolder is the state of one run of Init: what the operator asked for, and the folder that Init fills.
type cloudFolder struct {
	InitConfig
	dir   string   // absolute
	state string   // where systemd's user may write: cloudStateDir, or another folder in tests
	port  int      // the port in Address
	hosts []string // names and IP addresses in the cloud's certificate; the first is the host in Address
	files []newFile
}

// Init makes a folder with everything that a cloud needs without Kubernetes, and prints what it has made.
// Init replaces no file. With Systemd, Init also accepts the folder of an earlier Init: it moves the private
// files to cloudStateDir, where the unit's user can read them.
func Init(ctx context.Context, cfg InitConfig) error {
	hosts, port, err := certificateHosts(cfg.Address, cfg.Names)
	if err != nil {
		return err
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return err
	}
	c := &cloudFolder{InitConfig: cfg, dir: dir, state: cloudStateDir, port: port, hosts: hosts}
	var unit *systemdUnit
	if cfg.Systemd {
		if unit, err = newSystemdUnit(cloudService(), dir, cfg.Host); err != nil {
			return initError(err)
		}
		unit.lowPort = port < lowPorts
	}
	if err = c.fill(); err != nil {
		return err
	}
	width := 0
	for _, f := range c.files {
		width = max(width, len(pathIn(cfg.Dir, f.name)))
	}
	for _, f := range c.files {
		fmt.Fprintf(cfg.Out, "%-*s  %s\n", width, pathIn(cfg.Dir, f.name), f.what)
	}
	if unit != nil {
		if err = unit.install(ctx); err != nil {
			return initError(err)
		}
		fmt.Fprintf(cfg.Out, "\n%s\n", strings.Join(unit.running(), "\n"))
	}
	c.explain()
	return nil
}

// lowPorts is the first port that every process may listen on (ip(7), ip_unprivileged_port_start).
const lowPorts = 1024

// initError turns the failure of a step into an error that says what to do.
func initError(err error) error {
	if failed, ok := errors.AsType[*stepError](err); ok {
		return &Error{failed.kind, fmt.Errorf("%s: %w\n%s", failed.step, failed.err, failed.fix)}
	}
	return err
}

// fill writes the files. With Systemd it keeps the files of an earlier Init.
func (c *cloudFolder) fill() error {
	if c.Systemd {
		if there, err := c.adopt(); there || err != nil {
			return err
		}
	}
	made, err := newCredentials(c.hosts)
	if err != nil {
		return err
	}
	c.files = c.newFiles(made)
	return createFiles(c.dir, c.files)
}

// certificateHosts returns the host of address and further names, each once, and the port of address.
func certificateHosts(address string, names []string) (hosts []string, port int, err error) {
	host, port, err := splitAddress(address)
	if err != nil {
		return nil, 0, &Error{KindUsage, err}
	}
	hosts = []string{host}
	for _, name := range names {
		if !conf.IsHost(name) || leadsNowhere(name) {
			return nil, 0, &Error{KindUsage, fmt.Errorf("--san: %q is neither a name nor an IP address of the cloud", name)}
		}
		if !slices.Contains(hosts, name) {
			hosts = append(hosts, name)
		}
	}
	return hosts, port, nil
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
	if leadsNowhere(host) {
		return "", 0, fmt.Errorf("%s cannot be dialled by other machines: "+
			"--address is what edges dial, a name or an address of this machine", host)
	}
	if !conf.IsHost(host) || !auth.IsHost(host) {
		return "", 0, fmt.Errorf("--address: %q is neither a name nor an IP address", host)
	}
	return host, int(n), nil
}

// leadsNowhere reports whether host is an IP address that other machines cannot dial: 0.0.0.0, :: or an address
// with a zone, such as fe80::1%eth0.
func leadsNowhere(host string) bool {
	ip, err := netip.ParseAddr(host)
	return err == nil && (ip.IsUnspecified() || ip.Zone() != "")
}

// newFile is a file that Init or Join writes.
type newFile struct {
	name    string      // an absolute path, or a name in the folder
	what    string      // Init shows it to the operator; "" for the files of Join
	mode    fs.FileMode // the umask does not change it
	content []byte
	given   bool // if root runs Init, the owner of the folder gets the file
}

const (
	publicFile fs.FileMode = 0o644
	secretFile fs.FileMode = 0o600
)

// credentials are the certificates and keys of a new cloud, in PEM.
type credentials struct {
	ca, caKey           []byte // the CA that signs the cloud's certificate
	cert, key           []byte // the certificate and the key of the cloud
	nodesCA, nodesCAKey []byte // the CA that signs nodes' certificates
}

// newCredentials makes the certificates of a cloud. The certificate of the cloud is for all hosts.
func newCredentials(hosts []string) (*credentials, error) {
	cloudCA, err := auth.NewCA("tunnel cloud CA", caLifetime)
	if err != nil {
		return nil, err
	}
	// Nodes have a CA of their own. No certificate that it signs can pass for a cloud or a replica.
	nodesCA, err := auth.NewCA("tunnel nodes CA", caLifetime)
	if err != nil {
		return nil, err
	}
	leaf := auth.Leaf{CommonName: hosts[0], Server: true, Client: true} // a replica is a client of the others
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			leaf.IPs = append(leaf.IPs, ip)
		} else {
			leaf.DNSNames = append(leaf.DNSNames, host)
		}
	}
	cert, key, err := cloudCA.Issue(leaf)
	if err != nil {
		return nil, err
	}
	return &credentials{
		ca: cloudCA.CertPEM(), caKey: cloudCA.KeyPEM(), cert: cert, key: key,
		nodesCA: nodesCA.CertPEM(), nodesCAKey: nodesCA.KeyPEM(),
	}, nil
}

// The names of a cloud's files.
const (
	cloudFile     = "cloud.toml"
	cloudCertFile = "cloud.crt"
	cloudKeyFile  = "cloud.key"
	nodesCAFile   = "nodes-ca.crt"
	nodesKeyFile  = "nodes-ca.key"
	tokensFile    = "tokens"
)

// newFiles returns the files of a cloud.
func (c *cloudFolder) newFiles(made *credentials) []newFile {
	config := strings.NewReplacer(
		"{Address}", c.Address, "{Host}", c.hosts[0], "{Port}", strconv.Itoa(c.port),
		"{Key}", c.secret(cloudKeyFile), "{NodesKey}", c.secret(nodesKeyFile), "{Tokens}", c.secret(tokensFile),
		"{Socket}", socketLine("cloud", c.dir, cloudSocket, c.Systemd), "{Inventory}", c.secret(inventoryFile),
		"{Forwards}", c.secret(forwardsFile),
	).Replace(initTOML)
	public := func(name, what string, content []byte) newFile {
		return newFile{name: name, what: what, mode: publicFile, content: content}
	}
	secret := func(name, what string, content []byte) newFile {
		return newFile{name: c.secret(name), what: what, mode: secretFile, content: content, given: c.Systemd}
	}
	return []newFile{
		public(caFile, "the authority of the cloud's certificate; edges are told its sum", made.ca),
		{
			name: "ca.key", mode: secretFile, content: made.caKey,
			what: "its key: needed for another certificate only, so keep it somewhere else",
		},
		public(cloudCertFile, "the cloud's certificate, for "+strings.Join(c.hosts, ", "), made.cert),
		secret(cloudKeyFile, "its key", made.key),
		public(nodesCAFile, "the authority that signs nodes' certificates", made.nodesCA),
		secret(nodesKeyFile, "its key, which the cloud signs with", made.nodesCAKey),
		secret(tokensFile, "who may join; `tunnel token` writes it", []byte(emptyTokens)),
		public(cloudFile, "the configuration", []byte(config)),
	}
}

// secret returns the name or the path of a file that the cloud reads and other users must not read.
func (c *cloudFolder) secret(name string) string {
	if c.Systemd {
		return filepath.Join(c.state, name)
	}
	return name
}

// emptyTokens is the token file of a new cloud.
const emptyTokens = "# Who may join, a line for each token. `tunnel token create` adds them.\n"

// initTOML is the cloud.toml of a new cloud. Its last table is the one to which operators append keys.
const initTOML = `# A cloud, made by tunnel init: tunnel cloud -c cloud.toml
# Relative paths are relative to this file. tunnel config check says what is wrong with it.

# Where edges dial.
[mode.cloud.stream.server]
grpcport = {Port}
cert = "cloud.crt"
key = "{Key}"
tokenfile = "{Tokens}"
# /healthz /readyz /metrics, on all interfaces.
#logport = 7000

[mode.cloud.stream.dns]
# Names do not use Kubernetes.
debug = true

# For tunnel ls, status, ping, reload and forward, by the user of the cloud.
[mode.cloud.admin]
{Socket}
# The nodes that the cloud has seen.
inventory = "{Inventory}"
# The ports that tunnel forward adds.
forwards = "{Forwards}"

# Who gets a certificate here, and what tunnel token create tells them.
[mode.cloud.join]
ca = "nodes-ca.crt"
cakey = "{NodesKey}"
address = "{Address}"
cloudca = "ca.crt"

# TCP ports here that lead to a node: "listen" = "node/target". tunnel forward add needs no line here.
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

// pathIn returns name if it is an absolute path, else the path of the file name in dir.
func pathIn(dir, name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(dir, name)
}

// createFiles writes all files, or none. It writes none if one of them exists. A relative name is the name of a
// file in dir.
func createFiles(dir string, files []newFile) (err error) {
	if err = noneExists(dir, files); err != nil {
		return err
	}
	folders := []string{dir}
	for _, f := range files {
		if filepath.IsAbs(f.name) {
			folders = append(folders, filepath.Dir(f.name))
		}
	}
	for _, folder := range folders {
		if err = makeDir(folder); err != nil {
			return notWritable(folder, err)
		}
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
		path := pathIn(dir, f.name)
		if err = createFile(path, f); err != nil {
			return notWritable(filepath.Dir(path), err)
		}
		written = append(written, path)
	}
	return nil
}

// noneExists returns an error with the names of the files that exist; nil: none exists.
func noneExists(dir string, files []newFile) error {
	var there []string
	for _, f := range files {
		path := pathIn(dir, f.name)
		_, err := os.Lstat(path)
		switch {
		case err == nil:
			there = append(there, f.name)
		case !errors.Is(err, fs.ErrNotExist):
			return notWritable(filepath.Dir(path), err)
		}
	}
	switch {
	case there == nil:
		return nil
	case !filepath.IsAbs(there[0]):
		there[0] = dir + " holds " + there[0]
	default:
		there[0] = "this machine has " + there[0]
	}
	return fmt.Errorf("%s already, and nothing was written: another cloud may be using it; "+
		"choose another --dir, or remove the files", strings.Join(there, ", "))
}

// createFile writes a new file. It fails if path exists.
func createFile(path string, f newFile) error {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_EXCL
	file, err := os.OpenFile(path, flags, f.mode)
	if err != nil {
		return err
	}
	_, err = file.Write(f.content)
	if f.given {
		err = errors.Join(err, giveToFolder(file))
	}
	// The umask may have removed bits of f.mode, so Chmod sets them. This file may hold the only copy of a secret,
	// so Sync brings it to the disk.
	err = errors.Join(err, file.Chmod(f.mode), file.Sync(), file.Close())
	if err != nil {
		os.Remove(path) //nolint:errcheck // the caller reports the first error
	}
	return err
}

// giveToFolder makes the owner of a file's folder the owner of the file. Only root can do so: for another user,
// giveToFolder does nothing.
func giveToFolder(file *os.File) error {
	if os.Geteuid() != 0 {
		return nil
	}
	folder, err := os.Stat(filepath.Dir(file.Name()))
	if err != nil {
		return err
	}
	return own(file, folder)
}

// makeDir makes a folder that every user may enter, unless the folder exists. Every user may enter because the
// daemon may run as another user. The mode of each secret file keeps other users from reading it.
func makeDir(dir string) error {
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.Chmod(dir, 0o755) // the umask may have removed bits of the mode
}

// notWritable adds advice to err if this user may not write to the folder dir.
func notWritable(dir string, err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%s cannot be written to: %w; use sudo, or another folder with --dir", dir, reasonOf(err))
	}
	return err
}

// explain prints the commands that the operator runs next.
func (c *cloudFolder) explain() {
	config, sudo := shellQuote(filepath.Join(c.Dir, cloudFile)), c.Host.sudo()
	fmt.Fprintf(c.Out, "\nNext:\n  1. open TCP port %d of this machine to the edges; they need no other\n", c.port)
	step := 2
	if !c.Systemd {
		fmt.Fprintf(c.Out, "  2. start the cloud:\n       %stunnel cloud -c %s\n", sudo, config)
		fmt.Fprint(c.Out, "     or, to have systemd start it now and with the machine, "+
			"run the same init once more with --systemd\n")
		step = 3
	}
	fmt.Fprintf(c.Out, "  %d. for each edge, print the line to paste there:\n", step)
	fmt.Fprintf(c.Out, "       %stunnel token create -c %s --node NAME\n", sudo, config)
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
