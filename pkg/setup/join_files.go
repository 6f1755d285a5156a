package setup

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The names of a node's files.
const (
	edgeFile = "edge.toml"
	caFile   = "ca.crt"
	certFile = "node.pem"

	// ToldFile holds what an edge with `updates = true` has learned from its cloud: CAs and further addresses.
	// The file is beside the certificate.
	ToldFile = "cloud.json"

	proxyFile   = "proxy"
	proxyCAFile = "proxy-ca.crt"
)

// stateDir is the folder of node.pem if systemd runs the edge. The unit's user may write
// nowhere else.
const stateDir = "/var/lib/tunnel-edge"

// nodeFiles are the files of a node, to be written or kept.
type nodeFiles struct {
	dir      string // absolute
	certPath string
	force    bool
	token    auth.JoinToken
	env      conf.Env
	keep     bool       // edge.toml exists, and is for this node and this cloud; an operator may have edited it
	existing *conf.Edge // the content of edge.toml; nil unless keep is true
	moveFrom string     // the certificate that edge.toml names, if it is not certPath; "": there is none to move
	proxyOld string     // the file with the proxy's URL that moves with the certificate; "": there is none to move
	servers  []string   // JoinConfig.Servers
}

// newNodeFiles checks that Join may write the files. It writes none of them.
func newNodeFiles(cfg JoinConfig) (*nodeFiles, error) {
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, err
	}
	f := &nodeFiles{
		dir: dir, certPath: filepath.Join(dir, certFile),
		force: cfg.Force, token: cfg.Token, env: cfg.Host.Env, servers: cfg.Servers,
	}
	if cfg.Systemd || f.force && f.ofUnit() {
		f.certPath = filepath.Join(stateDir, certFile)
	}
	if !f.force {
		if err := f.checkExisting(); err != nil {
			return nil, &stepError{step: "files", err: err, fix: existingFix(err)}
		}
		if f.keep && (cfg.Proxy != "" || cfg.ProxyFile != "" || cfg.ProxyCA != "") {
			return nil, &stepError{
				step: "files", err: fmt.Errorf("%s exists, and join does not edit it", filepath.Join(f.dir, edgeFile)),
				fix: "Write proxy, proxyfile or proxyca into it and leave the flags out, or replace it with --force. " +
					"Nothing was changed, and the token was not sent.",
			}
		}
	}
	for _, d := range []string{dir, filepath.Dir(f.certPath)} {
		if err := tryWriting(d); err != nil {
			failed := fmt.Errorf("%s cannot be written to: %w", d, reasonOf(err))
			return nil, &stepError{step: "files", err: failed, fix: unwritableFix(err)}
		}
	}
	return f, nil
}

// ofUnit reports whether edge.toml names a certificate in the state folder of the unit. The unit's user could read a
// certificate nowhere else. The file may be damaged, or of a later program.
func (f *nodeFiles) ofUnit() bool {
	path := filepath.Join(f.dir, edgeFile)
	if is, err := conf.ReadEdge(path, conf.Env{HostName: "none"}); err == nil {
		return filepath.Dir(is.NodeCert) == stateDir
	}
	text, _, err := tunnel.ReadFile(path, tunnel.MaxFile)
	return err == nil && bytes.Contains(text, []byte(strconv.Quote(filepath.Join(stateDir, certFile))))
}

// existingFix says what to do about files that join finds and does not replace.
func existingFix(err error) string {
	const unchanged = " Nothing was changed, and the token was not sent."
	if errors.Is(err, fs.ErrPermission) { // root ran an earlier join and owns the files
		return unwritableFix(err) + unchanged
	}
	return "Choose another --dir, or replace them with --force." + unchanged
}

func unwritableFix(err error) string {
	if errors.Is(err, fs.ErrPermission) {
		return "Run this with sudo (… | sudo tunnel join), or choose a folder of yours with --dir."
	}
	return "Choose another folder with --dir."
}

// tryWriting makes the folder if it does not exist, and makes and removes a file in it.
func tryWriting(dir string) error {
	if err := makeDir(dir); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(dir, ".join.*")
	if err != nil {
		return err
	}
	return errors.Join(tmp.Close(), os.Remove(tmp.Name()))
}

// checkExisting returns an error for a file that belongs to another node or another cloud.
func (f *nodeFiles) checkExisting() error {
	config := filepath.Join(f.dir, edgeFile)
	if _, err := os.Lstat(config); err == nil {
		if err := f.checkConfig(config); err != nil {
			return err
		}
		f.keep = true
	}
	for _, path := range f.certPaths() {
		if err := f.lookAtCert(path); err != nil {
			return err
		}
	}
	ca := filepath.Join(f.dir, caFile)
	if _, err := os.Lstat(ca); err == nil && !f.keep {
		certs, err := readCertificates(ca, ca)
		if err != nil || !pinned(certs, f.token.CA) {
			return fmt.Errorf("%s exists, and is not the authority that the token names", ca)
		}
	}
	return nil
}

// certPaths returns where a certificate of the node may be.
func (f *nodeFiles) certPaths() []string { return []string{filepath.Join(f.dir, certFile), f.certPath} }

// hasCert reports whether there is a file where a certificate of the node may be.
func (f *nodeFiles) hasCert() bool {
	return slices.ContainsFunc(f.certPaths(), func(path string) bool {
		_, err := os.Lstat(path)
		return err == nil
	})
}

// lookAtCert returns an error if path holds anything but a certificate of this node.
func (f *nodeFiles) lookAtCert(path string) error {
	text, _, err := tunnel.ReadFile(path, tunnel.MaxFile)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR): // Join meets ENOTDIR again when it writes
		return nil
	case err != nil:
		return err
	}
	node, err := nodeOfPEM(text)
	switch {
	case err != nil && f.keep: // edge.toml is this node's, so path is this node's certificate: Join replaces damage
		return nil
	case err != nil:
		return fmt.Errorf("%s exists, and is not a node's certificate", path)
	case node != f.token.Node:
		return fmt.Errorf("%s is of node %s, and the token of node %s", path, node, f.token.Node)
	}
	return nil
}

// checkConfig returns an error if edge.toml is for another node or cloud, or names other files
// than Join writes. Other differences are an operator's edits, which stay.
func (f *nodeFiles) checkConfig(config string) error {
	// ReadEdge accepts an edge.toml that names missing files: an operator may join again to restore these files.
	is, err := conf.ReadEdge(config, conf.Env{HostName: "none"})
	if err != nil {
		return fmt.Errorf("%s exists and cannot be read: %w", config, oneLine(err))
	}
	ca, own, state := filepath.Join(f.dir, caFile), filepath.Join(f.dir, certFile), filepath.Join(stateDir, certFile)
	cert := abs(is.NodeCert)
	switch {
	case is.Node != f.token.Node:
		return fmt.Errorf("%s is of node %s, and the token of node %s", config, is.Node, f.token.Node)
	case is.ServerName != f.token.ServerName, !slices.Equal(is.Places(), f.places(is)):
		return fmt.Errorf("%s is for the cloud %s, and the token for %s",
			config, strings.Join(is.Places(), ", "), strings.Join(f.places(is), ", "))
	case abs(is.CA) != ca || cert != own && cert != state:
		return fmt.Errorf("%s names other files than %s (cert) and %s (nodecert)", config, ca, f.certPath)
	case cert == state: // the node joined with --systemd before
		f.certPath = state
	case cert != f.certPath:
		info, err := os.Stat(config)
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o004 == 0 { // it may have the password of a proxy
			return fmt.Errorf("the unit's user could not read %s (mode %04o): move secrets in it to files of their own, "+
				"such as proxyfile, run chmod 644 on it, and then the same command again", config, info.Mode().Perm())
		}
		if err = f.checkMove(config, is); err != nil {
			return err
		}
		f.moveFrom = cert
	}
	f.existing = is
	return nil
}

// checkMove is for an edge that an operator has started, and that systemd will start from now on, as another user.
// It finds out whether the file with the proxy's URL has to move, too. It returns an error if the unit's user could
// not read another file that edge.toml names.
func (f *nodeFiles) checkMove(config string, is *conf.Edge) error {
	text, err := os.ReadFile(config)
	if err != nil {
		return err
	}
	old := filepath.Join(f.dir, proxyFile)
	if abs(is.ProxyFile) == old && strings.Count(string(text), proxyLine(proxyFile)) == 1 {
		f.proxyOld = old
	}
	for _, path := range []string{
		is.CA, is.ProxyFile, is.ProxyCA, is.NodeKey, is.TokenFile, is.HTTPS.Cert, is.HTTPS.Key, is.Services.NearCA,
		is.Konnectivity.CA, is.Konnectivity.Cert, is.Konnectivity.Key, is.Konnectivity.TokenFile,
	} {
		path = abs(path)
		if path == "" || path == f.proxyOld || strings.HasPrefix(path, stateDir+"/") {
			continue
		}
		if err = readableByAll(path); err != nil {
			return fmt.Errorf("%s names a file that the unit's user could not read: %w; then run the same command again",
				config, err)
		}
	}
	return nil
}

// readableByAll returns an error if the unit's user could not read a file because of its mode or its folders. The error
// says what to do. A file that does not exist gives no error: conf.LoadEdge reports it.
func readableByAll(path string) error {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Perm()&0o004 == 0:
		return fmt.Errorf("%s has the mode %04o: if it is no secret, run chmod 644 on it, or else move it to %s/ (make that "+
			"folder first) and write its new path", path, info.Mode().Perm(), stateDir)
	case hidden(path):
		return fmt.Errorf("the unit has no home and no /tmp: move %s to another folder, and write its new path", path)
	}
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o001 == 0 {
			return fmt.Errorf("it may not enter the folder of %s: run chmod o+x %s (its mode is %04o)",
				path, dir, info.Mode().Perm())
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
	}
}

// places returns the servers by which an existing edge.toml must reach the cloud: the servers of the command line,
// else the servers of the file, else the address in the token.
func (f *nodeFiles) places(is *conf.Edge) []string {
	switch {
	case len(f.servers) > 0:
		return f.servers
	case len(is.Servers) > 0:
		return is.Servers
	}
	return []string{f.token.Address}
}

// abs returns path as an absolute path; "" stays "".
func abs(path string) string {
	if p, err := filepath.Abs(path); err == nil && path != "" {
		return p
	}
	return path
}

// nodeOfPEM returns the node of the first certificate in a PEM text.
func nodeOfPEM(text []byte) (tunnel.NodeName, error) {
	certs, err := auth.ParseCertificates(text)
	if len(certs) > 0 { // if there is an error, it concerns a later certificate
		return auth.NodeOf(certs[0])
	}
	if err == nil {
		err = errors.New("no certificate")
	}
	return "", err
}

// write writes the files. For each file, written has its path, with a remark if the file stays as it was.
func (f *nodeFiles) write(e *enrolled, w *way) (written []string, err error) {
	// WriteNodeFile makes the folder's owner the owner of the file. Under systemd this owner is not root.
	if err = auth.WriteNodeFile(f.certPath, e.chain, e.key); err != nil {
		return nil, fmt.Errorf("writing %s: %w", f.certPath, err)
	}
	config, err := f.config(w)
	if err != nil {
		return nil, err
	}
	written = append(written, f.certPath)
	if f.proxyOld != "" {
		if err = copySecret(f.proxyOld, f.proxyPath()); err != nil {
			return nil, err
		}
		written = append(written, f.proxyPath())
	}
	// join writes ca.crt before it replaces cloud.json. A cloud.json for another ca.crt does not count. But an old ca.crt
	// without cloud.json may no longer fit the cloud.
	var what string
	if what, err = f.update(newFile{name: caFile, mode: publicFile, content: e.ca}); err != nil {
		return nil, err
	}
	written = append(written, what)
	if f.existing == nil || f.existing.Updates {
		told := filepath.Join(filepath.Dir(f.certPath), ToldFile)
		if err = auth.WriteTold(told, e.ca, f.token.ServerName, e.told, e.cloud, slog.New(slog.DiscardHandler)); err != nil {
			return nil, err
		}
		if _, err = os.Stat(told); err == nil {
			written = append(written, told)
		}
	}
	var files []newFile
	if !f.keep {
		if w.proxyCA != nil {
			files = append(files, newFile{name: proxyCAFile, mode: publicFile, content: w.proxyCA})
		}
		if w.used != nil && w.used.HasPassword() {
			if err = auth.WriteSecretFile(f.proxyPath(), []byte(w.used.URL()+"\n")); err != nil {
				return nil, fmt.Errorf("writing %s: %w", f.proxyPath(), err)
			}
			written = append(written, f.proxyPath())
		}
	}
	for _, file := range append(files, newFile{name: edgeFile, mode: publicFile, content: config}) {
		if what, err = f.update(file); err != nil {
			return nil, err
		}
		written = append(written, what)
	}
	// If the edge could not start with these files, the operator learns the reason now.
	if _, err = conf.LoadEdge(filepath.Join(f.dir, edgeFile), f.env); err != nil {
		return nil, fmt.Errorf("the edge would not start: %w", err)
	}
	old := []string{f.moveFrom, f.proxyOld}
	if f.moveFrom != "" {
		old = append(old, filepath.Join(filepath.Dir(f.moveFrom), ToldFile)) // the new one is beside the new certificate
	}
	for _, path := range old {
		if path == "" {
			continue
		}
		if e := os.Remove(path); !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	return written, err
}

// copySecret writes the content of a secret file to another path. The owner of the new file is the owner of its
// folder.
func copySecret(from, to string) error {
	content, _, err := tunnel.ReadFile(from, tunnel.MaxFile)
	if err != nil {
		return err
	}
	if err = auth.WriteSecretFile(to, content); err != nil {
		return fmt.Errorf("writing %s: %w", to, err)
	}
	return nil
}

// update writes a file unless it holds the content already. It returns the path and a remark. A file of another
// content that join replaces, with --force, gets the name that ends in .old: it may have settings of an operator.
func (f *nodeFiles) update(file newFile) (what string, _ error) {
	path := filepath.Join(f.dir, file.name)
	old, _, err := tunnel.ReadFile(path, tunnel.MaxFile)
	if err == nil && bytes.Equal(old, file.content) {
		return path + " (as it was)", nil
	}
	what = path
	if err == nil && !f.keep {
		if err := keepOld(path, old); err != nil {
			return "", err
		}
		what += fmt.Sprintf(" (the file before is %s, and no longer counts)", path+oldSuffix)
	}
	if err := overwrite(path, file); err != nil {
		return "", fmt.Errorf("writing %s: %w", path, err)
	}
	return what, nil
}

// oldSuffix is appended to the path of a file, and gives the path of the copy before the file was replaced. systemd
// ignores the names of units that end in it.
const oldSuffix = ".old"

// keepOld writes a copy of the file at path, beside that file and with its mode. content is the content of the file.
func keepOld(path string, content []byte) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if err = overwrite(path+oldSuffix, newFile{mode: info.Mode().Perm(), content: content}); err != nil {
		return fmt.Errorf("writing %s: %w", path+oldSuffix, err)
	}
	return nil
}

// overwrite writes a new file beside path, and renames the new file to path.
func overwrite(path string, f newFile) error {
	tmp := path + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f.name = tmp
	if err := createFile(tmp, f); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return auth.SyncFolder(filepath.Dir(path))
}

// config returns the content of edge.toml. The edits of an operator stay.
func (f *nodeFiles) config(w *way) ([]byte, error) {
	if f.keep {
		path := filepath.Join(f.dir, edgeFile)
		text, err := os.ReadFile(path)
		if err != nil || f.moveFrom == "" {
			return text, err
		}
		old := fmt.Sprintf("nodecert = %q", certFile)
		if strings.Count(string(text), old) != 1 {
			return nil, fmt.Errorf("the certificate is in %s now, but %s does not have exactly one nodecert = %q "+
				"to change: write nodecert = %q", f.certPath, path, certFile, f.certPath)
		}
		moved := strings.Replace(string(text), old, fmt.Sprintf("nodecert = %q", f.certPath), 1)
		if f.proxyOld != "" {
			moved = strings.Replace(moved, proxyLine(proxyFile), proxyLine(f.proxyPath()), 1)
		}
		return []byte(moveSocket(moved, "edge", edgeSocket)), nil
	}
	cert := certFile
	if f.certPath != filepath.Join(f.dir, certFile) {
		cert = f.certPath
	}
	values := strings.NewReplacer("{Node}", string(f.token.Node), "{Place}", f.place(), "{Way}", f.way(w),
		"{ServerName}", f.token.ServerName, "{Cert}", cert,
		"{Socket}", socketLine("edge", f.dir, edgeSocket, cert != certFile))
	return []byte(values.Replace(joinTOML)), nil
}

// place returns the line of edge.toml that says where the cloud is.
func (f *nodeFiles) place() string {
	if len(f.servers) == 0 {
		return fmt.Sprintf("servername = %q", f.token.Address)
	}
	var quoted []string
	for _, s := range f.servers {
		quoted = append(quoted, fmt.Sprintf("%q", s))
	}
	return "servers = [" + strings.Join(quoted, ", ") + "]"
}

// way returns the lines of edge.toml about the proxy by which w has reached the cloud. The proxy may come from the
// operator's environment. The edge will start in another environment, so the file must name the proxy.
func (f *nodeFiles) way(w *way) string {
	var lines string
	switch {
	case w.noProxy:
		lines = fmt.Sprintf("proxy = %q\n", conf.ProxyNone)
	case w.used == nil:
	case !w.used.HasPassword():
		lines = fmt.Sprintf("proxy = %q\n", w.used.URL())
	case filepath.Dir(f.certPath) == f.dir:
		lines = proxyLine(proxyFile)[1:]
	default:
		lines = proxyLine(f.proxyPath())[1:]
	}
	if w.proxyCA != nil {
		lines += fmt.Sprintf("proxyca = %q\n", proxyCAFile)
	}
	return lines
}

// proxyLine returns the line of edge.toml that names the file with the proxy's URL, between the ends of two lines.
func proxyLine(path string) string { return fmt.Sprintf("\nproxyfile = %q\n", path) }

// proxyPath returns the path of the file with the proxy's URL. The file is in the certificate's folder, where the
// edge's user may read private files.
func (f *nodeFiles) proxyPath() string { return filepath.Join(filepath.Dir(f.certPath), proxyFile) }

// joinTOML is the edge.toml of a new node. Its last table is the one to which operators append keys, such as logport.
const joinTOML = `# An edge, made by tunnel join: tunnel edge -c edge.toml
# Relative paths are relative to this file. tunnel config check says what is wrong with it.

[mode.edge]
node = "{Node}"
# What the cloud may have dialled besides this machine: address or network : port or *.
#allow = ["10.0.0.0/8:443"]

# For tunnel status, by the user of the edge.
[mode.edge.admin]
{Socket}

[mode.edge.stream.client]
# The address to dial, the name in the cloud's certificate, and who signs that.
{Place}
{Way}dns = "{ServerName}"
cert = "ca.crt"
# This node's certificate and its key. The edge renews it.
nodecert = "{Cert}"
# With each new certificate the edge takes new CAs and addresses of its cloud.
updates = true
# /healthz /readyz /metrics, on all interfaces.
#logport = 7010
`

// pinned reports whether one of certs has the SHA-256 that a join token pins.
func pinned(certs []*x509.Certificate, sum [32]byte) bool {
	for _, c := range certs {
		if sha256.Sum256(c.Raw) == sum {
			return true
		}
	}
	return false
}
