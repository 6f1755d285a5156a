package setup

import (
	"bytes"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"text/template"

	"tunnel/conf"
	"tunnel/pkg/auth"
	"tunnel/pkg/tunnel"
)

// The files of a node.
const (
	edgeFile = "edge.toml"
	caFile   = "ca.crt"
	certFile = "node.pem"
)

// stateDir is where node.pem is when systemd runs the edge: the unit's user may write
// there, and nowhere else.
const stateDir = "/var/lib/tunnel-edge"

// nodeFiles is where a node's files are, and what is there already.
type nodeFiles struct {
	dir      string // absolute
	certPath string
	force    bool
	token    auth.JoinToken
	env      conf.Env
	keep     bool   // edge.toml is this node's, for this cloud, and may have been edited
	moveFrom string // where edge.toml has the certificate, if that is to be certPath now
}

// newNodeFiles sees that the files may be written, without writing them.
func newNodeFiles(cfg JoinConfig) (*nodeFiles, error) {
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, err
	}
	f := &nodeFiles{dir: dir, certPath: filepath.Join(dir, certFile), force: cfg.Force, token: cfg.Token, env: cfg.Host.Env}
	if cfg.Systemd {
		f.certPath = filepath.Join(stateDir, certFile)
	}
	if !f.force {
		if err := f.look(); err != nil {
			return nil, &stepError{
				step: "files", err: err,
				fix: "Choose another --dir, or replace them with --force. Nothing has been changed, and the token not been sent.",
			}
		}
	}
	for _, d := range []string{dir, filepath.Dir(f.certPath)} {
		if err := tryWriting(d); err != nil {
			return nil, &stepError{step: "files", err: fmt.Errorf("%s cannot be written to: %w", d, reasonOf(err)), fix: unwritableFix(err)}
		}
	}
	return f, nil
}

func unwritableFix(err error) string {
	if errors.Is(err, fs.ErrPermission) {
		return "Run this with sudo (… | sudo tunnel join), or choose a folder of yours with --dir."
	}
	return "Choose another folder with --dir."
}

// tryWriting makes a folder, and a file in it for a moment.
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

// look reports files that are not this node's.
func (f *nodeFiles) look() error {
	config := filepath.Join(f.dir, edgeFile)
	if _, err := os.Lstat(config); err == nil {
		if err := f.lookAtConfig(config); err != nil {
			return err
		}
		f.keep = true
	}
	for _, path := range []string{filepath.Join(f.dir, certFile), f.certPath} {
		if err := f.lookAtCert(path); err != nil {
			return err
		}
	}
	ca := filepath.Join(f.dir, caFile)
	if _, err := os.Lstat(ca); err == nil && !f.keep {
		certs, err := readCertificates(ca, ca)
		if err != nil || !pinned(certs, f.token.CA) {
			return fmt.Errorf("%s is there, and is not the authority that the token names", ca)
		}
	}
	return nil
}

func (f *nodeFiles) lookAtCert(path string) error {
	text, err := os.ReadFile(path) //nolint:gosec // the operator names the folder
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR): // the latter shows when it is written
		return nil
	case err != nil:
		return err
	}
	node, err := nodeOfPEM(text)
	switch {
	case err != nil && f.keep: // edge.toml says that it is to be this node's: it is broken
		return nil
	case err != nil:
		return fmt.Errorf("%s is there, and is no node's certificate", path)
	case node != f.token.Node:
		return fmt.Errorf("%s is of node %s, and the token of node %s", path, node, f.token.Node)
	}
	return nil
}

// lookAtConfig reports an edge.toml that is not what we would write, as far as it matters.
func (f *nodeFiles) lookAtConfig(config string) error {
	// Files that it names may be missing, which is another reason to join again.
	is, err := conf.ReadEdge(config, conf.Env{HostName: "none"})
	if err != nil {
		return fmt.Errorf("%s is there and cannot be read: %w", config, oneLine(err))
	}
	ca, own, state := filepath.Join(f.dir, caFile), filepath.Join(f.dir, certFile), filepath.Join(stateDir, certFile)
	cert := abs(is.NodeCert)
	switch {
	case is.Node != f.token.Node:
		return fmt.Errorf("%s is of node %s, and the token of node %s", config, is.Node, f.token.Node)
	case is.Addr != f.token.Address || is.ServerName != f.token.ServerName:
		return fmt.Errorf("%s is for the cloud %s, and the token for %s", config, is.Addr, f.token.Address)
	case abs(is.CA) != ca || cert != own && cert != state:
		return fmt.Errorf("%s names other files than %s (cert) and %s (nodecert)", config, ca, f.certPath)
	case cert == state: // it was joined with --systemd, and stays so
		f.certPath = state
	case cert != f.certPath:
		f.moveFrom = cert
	}
	return nil
}

// abs is path from the root, if there is one.
func abs(path string) string {
	if p, err := filepath.Abs(path); err == nil && path != "" {
		return p
	}
	return path
}

// nodeOfPEM returns the node of the first certificate of a file.
func nodeOfPEM(text []byte) (tunnel.NodeName, error) {
	certs, err := auth.ParseCertificates(text)
	if len(certs) > 0 { // an error is about a later one
		return auth.NodeOf(certs[0])
	}
	if err == nil {
		err = errors.New("no certificate")
	}
	return "", err
}

// write writes what is not there yet, and returns the paths.
func (f *nodeFiles) write(e *enrolled) (written []string, err error) {
	if err = auth.WriteNodeFile(f.certPath, e.chain, e.key); err != nil { // it becomes the folder's owner's: under systemd that is not root
		return nil, fmt.Errorf("writing %s: %w", f.certPath, err)
	}
	config, err := f.config()
	if err != nil {
		return nil, err
	}
	written = append(written, f.certPath)
	for _, file := range []newFile{{name: caFile, mode: publicFile, content: e.ca}, {name: edgeFile, mode: publicFile, content: config}} {
		var what string
		if what, err = f.update(file); err != nil {
			return nil, err
		}
		written = append(written, what)
	}
	// What the edge will say when it starts is better heard now.
	if _, err = conf.LoadEdge(filepath.Join(f.dir, edgeFile), f.env); err != nil {
		return nil, fmt.Errorf("the edge would not start: %w", err)
	}
	if f.moveFrom != "" {
		err = os.Remove(f.moveFrom)
	}
	return written, err
}

// update replaces a file that holds something else, and says what it has done.
func (f *nodeFiles) update(file newFile) (what string, _ error) {
	path := filepath.Join(f.dir, file.name)
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, file.content) { //nolint:gosec // likewise
		return path + " (as it was)", nil
	}
	if err := overwrite(path, file); err != nil {
		return "", fmt.Errorf("writing %s: %w", path, err)
	}
	return path, nil
}

// overwrite replaces a file whole.
func overwrite(path string, f newFile) error {
	tmp := path + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f.name = tmp
	if err := createFile(tmp, f); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// config returns what edge.toml is to hold. What an operator has changed stays.
func (f *nodeFiles) config() ([]byte, error) {
	if f.keep {
		path := filepath.Join(f.dir, edgeFile)
		text, err := os.ReadFile(path) //nolint:gosec // likewise
		if err != nil || f.moveFrom == "" {
			return text, err
		}
		old := fmt.Sprintf("nodecert = %q", certFile)
		if strings.Count(string(text), old) != 1 {
			return nil, fmt.Errorf("the certificate is in %s now, and %s does not say nodecert = %q, which could be changed: write nodecert = %q", f.certPath, path, certFile, f.certPath)
		}
		return []byte(strings.Replace(string(text), old, fmt.Sprintf("nodecert = %q", f.certPath), 1)), nil
	}
	cert := certFile
	if f.certPath != filepath.Join(f.dir, certFile) {
		cert = f.certPath
	}
	var b bytes.Buffer
	err := template.Must(template.New(edgeFile).Parse(joinTOML)).Execute(&b, struct {
		Node                      tunnel.NodeName
		Address, ServerName, Cert string
	}{f.token.Node, f.token.Address, f.token.ServerName, cert})
	return b.Bytes(), err
}

const joinTOML = `# An edge, made by tunnel join: tunnel edge -c edge.toml
# Relative paths are relative to this file. tunnel config check says what is wrong with it.

[mode.edge]
node = "{{.Node}}"
# What the cloud may have dialled besides this machine: address or network : port or *.
#allow = ["10.0.0.0/8:443"]

[mode.edge.stream.client]
# The address to dial, the name in the cloud's certificate, and who signs that.
servername = "{{.Address}}"
dns = "{{.ServerName}}"
cert = "ca.crt"
# This node's certificate and its key. The edge renews it.
nodecert = "{{.Cert}}"
# /healthz /readyz /metrics, on all interfaces.
#logport = 7010
`

// pinned reports whether one of certs is the authority that a token names.
func pinned(certs []*x509.Certificate, sum [32]byte) bool {
	for _, c := range certs {
		if sha256.Sum256(c.Raw) == sum {
			return true
		}
	}
	return false
}
