package auth

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// TellEdges is what a cloud tells an edge with each certificate. The zero value says nothing.
type TellEdges struct {
	CloudCAs []byte   // the CAs by which the edge shall verify the cloud, for [ParseCloudCAs]
	Servers  []string // further addresses of the cloud, host:port; empty beside CloudCAs: earlier ones are withdrawn
	NodeCAs  []byte   // the CAs that sign the certificates of nodes, for [ParseNodeCAs]; empty: the cloud does not say
}

const (
	maxServers = 16        // an edge accepts at most so many addresses from a cloud
	maxServer  = 262       // the longest address, in bytes: a DNS name, a colon and a port
	maxTold    = 128 << 10 // the longest file of a Told, in bytes
)

// Told keeps what an edge has accepted from its cloud: CAs, and further addresses of the cloud. It stores them in a
// file beside the edge's certificate.
//
// The configuration takes precedence. If the operator changes the CAs in the configuration, the file no longer counts.
// The edge uses the addresses of the configuration beside the addresses of the file.
type Told struct {
	// Set once.
	file       string
	configured func() ([]byte, error) // reads the CAs of the configuration, in PEM
	host       string                 // the name to verify in the cloud's certificate
	log        *slog.Logger

	mu      sync.Mutex // guards the following
	base    *CloudCAs  // the CAs of the configuration, as last read
	pool    *x509.CertPool
	content toldFile       // the content of the file; it counts only while content.Base is the sum of base
	cas     *CloudCAs      // the CAs in content; nil: content does not count
	nodes   *x509.CertPool // the CAs that sign the certificates of nodes; empty: none are known
	of      any            // the version with which Roots was last called
}

// toldFile is the content of the file.
type toldFile struct {
	Base    string   `json:"base"` // SHA-256 of the CAs in the configuration, when the edge accepted CAs
	CAs     string   `json:"cas"`  // PEM; empty: the CAs of the configuration
	Servers []string `json:"servers,omitempty"`
	// TakenBack is true if the cloud has withdrawn Servers while the edge reached the cloud only by them.
	TakenBack bool   `json:"taken_back,omitempty"`
	NodeCAs   string `json:"node_cas,omitempty"` // PEM
}

// ToldConfig configures a Told.
type ToldConfig struct {
	File string // path of the file; it need not exist
	CA   string // path of the file with the CAs of the configuration
	Host string // the name to verify in the cloud's certificate
	Log  *slog.Logger
}

// NewTold reads the file. If the file is bad, NewTold ignores it, and only the configuration counts.
func NewTold(cfg ToldConfig) (*Told, error) {
	t := &Told{
		file: cfg.File, host: cfg.Host, log: cfg.Log,
		configured: func() ([]byte, error) { return os.ReadFile(cfg.CA) },
	}
	content, err := readTold(cfg.File)
	if err != nil {
		t.log.Warn("what the cloud has told cannot be used; the configuration counts alone", "target", cfg.File, "err", err)
	}
	t.content = content
	return t, t.readBase()
}

// readTold reads the file at path. A file that does not exist is no error.
func readTold(path string) (toldFile, error) {
	text, _, err := tunnel.ReadFile(path, maxTold)
	if errors.Is(err, fs.ErrNotExist) {
		return toldFile{}, nil
	}
	if err != nil {
		return toldFile{}, err
	}
	return parseTold(text)
}

// parseTold parses the file.
func parseTold(text []byte) (toldFile, error) {
	var content toldFile
	if len(text) > maxTold {
		return content, fmt.Errorf("it is longer than %d bytes", maxTold)
	}
	if err := json.Unmarshal(text, &content); err != nil {
		return toldFile{}, err
	}
	if content.CAs != "" {
		if _, err := ParseCloudCAs([]byte(content.CAs)); err != nil {
			return toldFile{}, err
		}
	}
	if err := checkServers(content.Servers); err != nil {
		return toldFile{}, err
	}
	if content.NodeCAs != "" {
		if _, err := ParseNodeCAs([]byte(content.NodeCAs)); err != nil {
			return toldFile{}, err
		}
	}
	return content, nil
}

// NodeCAs are the CAs that sign the certificates of nodes.
type NodeCAs []*x509.Certificate

// ParseNodeCAs reads NodeCAs in PEM. It skips blocks of other types, such as keys. It returns an error if text holds no
// CA, or more than an edge accepts.
func ParseNodeCAs(text []byte) (NodeCAs, error) {
	if len(text) > maxCloudCAsText {
		return nil, fmt.Errorf("the CAs of nodes are %d bytes long; %d are allowed", len(text), maxCloudCAsText)
	}
	cas, err := ParseCertificates(text)
	switch {
	case err != nil:
		return nil, fmt.Errorf("the CAs of nodes: %w", err)
	case len(cas) == 0:
		return nil, errors.New("the CAs of nodes: there is no certificate")
	case len(cas) > maxCloudCAs:
		return nil, fmt.Errorf("the CAs of nodes: there are more than %d", maxCloudCAs)
	}
	return cas, nil
}

// PEM returns the CAs in PEM, and nothing else.
func (n NodeCAs) PEM() []byte {
	var text []byte
	for _, ca := range n {
		text = append(text, encodePEM("CERTIFICATE", ca.Raw)...)
	}
	return text
}

// checkServers returns an error for addresses that an edge does not accept. An edge accepts no URL from a cloud: by a
// URL, a cloud could make the edge send a request of the cloud's choice to another server.
func checkServers(servers []string) error {
	if len(servers) > maxServers {
		return fmt.Errorf("%d addresses of the cloud; %d are allowed", len(servers), maxServers)
	}
	for _, s := range servers {
		host, port, err := net.SplitHostPort(s)
		n, bad := strconv.ParseUint(port, 10, 16)
		if err != nil || bad != nil || n == 0 || len(s) > maxServer || !IsHost(host) {
			return errors.New("an address of the cloud is not host:port")
		}
	}
	return nil
}

// readBase reads the CAs of the configuration. The caller holds mu, or nobody else has t yet.
func (t *Told) readBase() error {
	text, err := t.configured()
	if err != nil {
		return err
	}
	all, err := ParseCertificates(text)
	if err != nil {
		return err
	}
	t.base, t.cas = &CloudCAs{cas: all}, nil
	if t.content.Base == t.base.sum() {
		if t.cas = t.base; t.content.CAs != "" {
			t.cas, _ = ParseCloudCAs([]byte(t.content.CAs)) // never fails: parseTold has parsed it before
		}
	}
	t.pool = t.trustedLocked().Pool()
	t.nodes = t.nodePoolLocked()
	return nil
}

// nodeCAsLocked returns the CAs that sign the certificates of nodes. It returns none if the cloud has not told them.
// The caller holds mu, or is NewTold.
func (t *Told) nodeCAsLocked() NodeCAs {
	if t.cas == nil || t.content.NodeCAs == "" {
		return nil
	}
	cas, _ := ParseNodeCAs([]byte(t.content.NodeCAs)) // never fails: it has been parsed before
	return cas
}

// nodePoolLocked returns the same as roots.
func (t *Told) nodePoolLocked() *x509.CertPool {
	pool := x509.NewCertPool() // nil would stand for the CAs of the system
	for _, ca := range t.nodeCAsLocked() {
		pool.AddCert(ca)
	}
	return pool
}

// NodeCAs returns the CAs that sign the certificates of nodes, as the cloud has told; none: it has told none.
func (t *Told) NodeCAs() NodeCAs {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.nodeCAsLocked()
}

// NodeRoots returns NodeCAs as roots. known is false if there are none.
func (t *Told) NodeRoots() (pool *x509.CertPool, known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.nodes, t.cas != nil && t.content.NodeCAs != ""
}

// sum returns the SHA-256 of the CAs, in hexadecimal.
func (c *CloudCAs) sum() string {
	h := sha256.New()
	for _, ca := range c.cas {
		h.Write(ca.Raw)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// trustedLocked returns the CAs by which the edge verifies the cloud now. The caller holds mu.
func (t *Told) trustedLocked() *CloudCAs {
	if t.cas != nil {
		return t.cas
	}
	return t.base
}

// Trusted returns the CAs by which the edge verifies the cloud now.
func (t *Told) Trusted() []*x509.Certificate {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.trustedLocked().cas
}

// IDs returns the CAID of each CA by which the edge verifies the cloud now.
func (t *Told) IDs() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.trustedLocked().IDs()
}

// Roots returns the CAs by which the edge verifies the cloud now. The caller passes another version whenever the CAs of
// the configuration have changed; Roots then reads them again.
func (t *Told) Roots(version any) *x509.CertPool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of != version {
		if t.of != nil {
			if err := t.readBase(); err != nil {
				t.log.Error("the CAs of the cloud cannot be read again", "err", err)
			}
		}
		t.of = version
	}
	return t.pool
}

// Servers returns the addresses that the cloud has told. It returns none if the file does not count. If takenBack is
// true, the cloud has withdrawn the addresses, and the edge must prefer those of the configuration.
func (t *Told) Servers() (servers []string, takenBack bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cas == nil {
		return nil, false
	}
	return slices.Clone(t.content.Servers), t.content.TakenBack
}

// Take stores what the cloud has told. chain is the certificate chain that the cloud has shown. If the cloud tells
// nothing, or only what the edge does not accept, the old content stays; in the second case a log line says why.
//
// If the cloud tells good CAs and no addresses, it withdraws its earlier addresses. Take then removes them if
// asConfigured is true: the edge reaches the cloud by its configuration. Otherwise they may be the only way to the
// cloud, so they stay, behind the addresses of the configuration.
//
// If Take cannot write the file, it returns an error and changes nothing.
func (t *Told) Take(told TellEdges, chain []*x509.Certificate, asConfigured bool) (is Taken, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var next toldFile
	if t.cas != nil {
		next = t.content
	}
	trusted, takesBack := t.trustedLocked(), false
	if len(told.CloudCAs) > 0 {
		adopted, bad := t.adoptLocked(told.CloudCAs, chain)
		if bad != nil {
			t.log.Warn("the edge does not take the CAs that the cloud tells; they stay as they were", "err", bad)
		} else {
			is.CAs, trusted = !adopted.Equal(trusted), adopted
			takesBack = len(told.Servers) == 0 && len(next.Servers) > 0
		}
	}
	switch bad := checkServers(told.Servers); {
	case bad != nil:
		t.log.Warn("the edge does not take the addresses that the cloud tells; they stay as they were", "err", bad)
	case takesBack && !asConfigured:
		is.Servers, next.TakenBack = !next.TakenBack, true
	case takesBack || len(told.Servers) > 0:
		is.Servers = next.TakenBack || !slices.Equal(told.Servers, next.Servers)
		next.Servers, next.TakenBack = slices.Clone(told.Servers), false
	}
	if len(told.NodeCAs) > 0 {
		if cas, bad := ParseNodeCAs(told.NodeCAs); bad != nil {
			t.log.Warn("the edge does not take the CAs of nodes that the cloud tells; they stay as they were", "err", bad)
		} else {
			text := string(cas.PEM())
			is.NodeCAs = next.NodeCAs != text
			next.NodeCAs = text
		}
	}
	if is != (Taken{}) {
		next.Base, next.CAs = t.base.sum(), ""
		if !trusted.Equal(t.base) {
			next.CAs = string(trusted.PEM())
		}
		if err = writeTold(t.file, next); err != nil {
			return Taken{}, err
		}
		t.content, t.cas = next, trusted
		t.pool, t.nodes = trusted.Pool(), t.nodePoolLocked()
	}
	return is, nil
}

// Taken says what has changed.
type Taken struct {
	CAs     bool // the CAs by which the edge verifies the cloud
	Servers bool // the addresses of the cloud
	NodeCAs bool // the CAs that sign the certificates of nodes
}

// adoptLocked returns the CAs by which the edge verifies the cloud from now on. The caller holds mu.
func (t *Told) adoptLocked(text []byte, chain []*x509.Certificate) (*CloudCAs, error) {
	told, err := ParseCloudCAs(text)
	if err != nil {
		return nil, err
	}
	next, unproven, err := t.trustedLocked().Adopt(told, chain, t.host, time.Now())
	for _, ca := range unproven {
		t.log.Warn("the cloud tells a CA that no CA which this edge trusts has signed; the edge does not take it",
			"target", nameOfCA(ca))
	}
	return next, err
}

// WriteTold writes the file of an edge that has just joined and trusts the CA of its join token. told is what the cloud
// told the edge with the certificate. If there is nothing to write, WriteTold removes the file. After an error the file
// is as before.
func WriteTold(path string, ca []byte, host string, told TellEdges, chain []*x509.Certificate, log *slog.Logger) error {
	t := &Told{file: path, host: host, log: log, configured: func() ([]byte, error) { return ca, nil }}
	if err := t.readBase(); err != nil {
		return err
	}
	is, err := t.Take(told, chain, false)
	if err != nil || is != (Taken{}) {
		return err
	}
	if err = os.Remove(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// writeTold replaces the file at path.
func writeTold(path string, content toldFile) error {
	text, err := json.MarshalIndent(content, "", "  ")
	if err != nil {
		return err
	}
	if err = WriteSecretFile(path, append(text, '\n')); err != nil {
		return fmt.Errorf("writing what the cloud has told: %w", err)
	}
	return nil
}

// nameOfCA names a CA for people.
func nameOfCA(ca *x509.Certificate) string { return ca.Subject.CommonName + " " + CAID(ca) }
